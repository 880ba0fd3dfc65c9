"""A step's timeline as a picture, with matplotlib, which need not be installed.

A row for each resource that did something. What overlaps in a row lies side by side, up to a few.
A trace that was recorded where there is no matplotlib is drawn elsewhere by
``python -m bench.steps.timeline_plot TRACE PICTURE``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, Final

from bench.facts import MachineFacts
from bench.plot import check_plotting
from bench.steps.measure import Result
from bench.steps.timeline import PASSES, ROWS, Span, Window, busy_share, lanes, read
from tiering.errors import ConfigError

_INCHES: Final = (16.0, 7.0)
_DPI: Final = 100
_HEIGHT: Final = 0.84  # of a row's
_LANES: Final = 4  # side by side: more would be too thin to see
_LABELLED: Final = 0.04  # of the step: shorter passes have no room for their name
_COLOURS: Final = {
    "engine": "tab:gray",
    "compute": "tab:green",
    "upload": "tab:blue",
    "offload": "tab:cyan",
    "read": "tab:orange",
    "write": "tab:red",
}
_PASS_COLOURS: Final = dict(zip(PASSES, ("lightsteelblue", "thistle", "wheat"), strict=True))
_ENGINE_COLOURS: Final = ("tab:purple", "tab:olive", "tab:brown", "tab:pink")
_WORDS: Final = {"read": "drive: read", "write": "drive: write", "passes": "host: passes"}


def draw(trace: Path, *, path: Path) -> None:
    """Draw a step.

    Args:
        trace: as it was recorded.
        path: of the picture; its ending says the format.

    Raises:
        ConfigError: it cannot be drawn or written.
    """
    check_plotting()
    spans, window, title = read(trace)
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=_INCHES, layout="constrained"
    )
    axes = figure.subplots()
    rows = [row for row in ROWS if any(span.row == row for span in spans)]
    for place, row in enumerate(reversed(rows)):
        _row(axes, [span for span in spans if span.row == row], window, place)
    axes.set_yticks(
        range(len(rows)), [_label(row, spans, window) for row in reversed(rows)], fontsize=12
    )
    axes.set_xlim(0, (window.end_us - window.begin_us) / 1e3)
    axes.set_xlabel("ms", fontsize=12)
    axes.tick_params(axis="x", labelsize=12)
    axes.grid(axis="x", alpha=0.4)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside lower center", ncols=len(_ENGINE_COLOURS), fontsize=12)
    seconds = (window.end_us - window.begin_us) / 1e6
    figure.suptitle(f"{title}\n{seconds:.3f} s while recorded", fontsize=11)
    try:
        figure.savefig(path, dpi=_DPI)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from error


def _row(axes: Any, spans: list[Span], window: Window, place: int) -> None:  # noqa: ANN401 - matplotlib's
    """Draw the bars of a row around the height ``place``, each lane below the one before."""
    found = lanes(spans)
    places = min(len(found), _LANES)
    height = _HEIGHT / places
    colours = _colours(spans)
    named: set[str] = set()
    for number, lane in enumerate(found):
        bottom = place + _HEIGHT / 2 - (number % places + 1) * height
        for kind, colour in colours.items():
            bars = [_bar(span, window) for span in lane if _kind(span) == kind]
            is_new = kind.startswith("infinity.") and kind not in named and bars
            label = f"engine: {kind.removeprefix('infinity.')}" if is_new else None
            named.add(kind)
            axes.broken_barh(bars, (bottom, height), facecolors=colour, label=label)
        for span in lane if spans[0].row == "passes" else ():
            begin, width = _bar(span, window)
            if width > _LABELLED * (window.end_us - window.begin_us) / 1e3:
                middle = begin + width / 2
                axes.text(middle, place, span.name, ha="center", va="center", fontsize=12)


def _bar(span: Span, window: Window) -> tuple[float, float]:
    """Begin and width, in milliseconds from the step's begin."""
    begin, end = max(span.begin_us, window.begin_us), min(span.end_us, window.end_us)
    return (begin - window.begin_us) / 1e3, (end - begin) / 1e3


def _kind(span: Span) -> str:
    """What has one colour: in the resources' rows, everything."""
    if span.row == "passes":
        return span.name
    return span.name.split()[0] if span.row == "engine" else span.row


def _colours(spans: list[Span]) -> dict[str, str]:
    kinds = sorted({_kind(span) for span in spans})
    if spans[0].row == "passes":
        return {kind: _PASS_COLOURS[kind] for kind in kinds}
    if spans[0].row == "engine":
        count = len(_ENGINE_COLOURS)
        return {kind: _ENGINE_COLOURS[n % count] for n, kind in enumerate(kinds)}
    return {kind: _COLOURS[kind] for kind in kinds}


def _label(row: str, spans: list[Span], window: Window) -> str:
    words = _WORDS.get(row, row)
    if row == "passes":
        return words
    share = busy_share([span for span in spans if span.row == row], window)
    return f"{words}\nbusy {share:.0%}"


def title_of(result: Result, machine: MachineFacts) -> str:
    """What a recorded step is, and where it ran.

    Args:
        result: of the runs, of which one recorded it.
        machine: on which they ran.
    """
    training, name = result.training, result.plan.last_of_ours.name
    (series,) = (one for one in result.series if one.name == name)
    gpus = [run.device for run in series.runs if run.device]
    drives = [run.drive for run in series.runs if run.drive]
    where = [
        *(gpu.name for gpu in gpus[-1:]),
        f"{machine.cpu_count} processors ({machine.cpu_model})",
        *(f"{d.path.drive}, {d.path.file_system}" for d in drives[-1:]),
        f"zero-infinity {machine.version}, torch {series.last.version}",
    ]
    return (
        f"a step of {name}: {training.shape.parameter_numel / 1e6:.1f} million parameters, batch "
        f"{training.batch} x {training.shape.context}, computing in {training.compute_dtype}; "
        f"{series.seconds().median:.3f} s as measured\n{'; '.join(where)}"
    )


if __name__ == "__main__":
    draw(Path(sys.argv[1]), path=Path(sys.argv[2]))
