"""A picture of a sweep over budgets, with matplotlib, which need not be installed.

Time of a step above, bytes a parameter below, both against the arena's budget; beside what was
measured stands what is possible.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final

from bench.facts import MachineFacts
from bench.plot import check_plotting
from bench.steps.contestants import STATE_BYTES
from bench.steps.ideal import Traffic
from bench.steps.measure import Result, Series
from bench.steps.report import least_ideal
from tiering.errors import ConfigError

_INCHES: Final = (7.0, 7.5)
_MEASURED: Final = {"marker": "o", "capsize": 3}


def draw(result: Result, machine: MachineFacts, *, path: Path) -> None:
    """Draw a sweep.

    Args:
        result: the sweep.
        machine: for the title.
        path: of the picture; its ending says the format.

    Raises:
        ConfigError: it cannot be drawn or written.
    """
    check_plotting()
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=_INCHES, layout="constrained"
    )
    above, below = figure.subplots(2, 1, sharex=True)
    series = [one for one in result.paged if one.last.paging]
    _times(above, result, series)
    _bytes(below, result, series)
    figure.suptitle(_title(result, machine), fontsize=9)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from error


def _title(result: Result, machine: MachineFacts) -> str:
    training = result.training
    drives = [run.drive for one in result.paged for run in one.runs if run.drive]
    where = f"{drives[-1].path.drive}, {drives[-1].path.file_system}; " if drives else ""
    return (
        f"{training.shape.parameter_numel / 1e6:.1f} million parameters, batch {training.batch} x "
        f"{training.shape.context}, computing in {training.compute_dtype}\n"
        f"{where}{machine.cpu_count} processors; zero-infinity {machine.version}"
    )


def _budgets(series: list[Series]) -> list[float]:
    """Of the arenas that were granted, as parts of the states."""
    return [
        one.last.paging.arena_budget_bytes / (one.last.parameter_numel * STATE_BYTES)
        for one in series
        if one.last.paging
    ]


def _times(axes: Any, result: Result, series: list[Series]) -> None:  # noqa: ANN401 - matplotlib's
    budgets, found = _budgets(series), [one.seconds() for one in series]
    medians = [one.median for one in found]
    ends = [
        [one.median - one.least for one in found],
        [one.greatest - one.median for one in found],
    ]
    axes.errorbar(budgets, medians, yerr=ends, label="measured", **_MEASURED)
    shares = [result.share(one).ideal.seconds for one in series]
    axes.plot(budgets, shares, "s--", label="ideal of the bytes moved")
    least = [least_ideal(result, one)[1].seconds for one in series]
    axes.plot(budgets, least, "^:", label="ideal of a perfect engine's bytes")
    axes.axhline(
        result.in_memory(series[0].ranks).seconds().median,
        color="grey",
        label="everything in memory",
    )
    axes.set_ylabel("seconds a step")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _bytes(axes: Any, result: Result, series: list[Series]) -> None:  # noqa: ANN401 - matplotlib's
    budgets = _budgets(series)
    moved = [one.bytes_per_parameter(lambda run: run.engine_traffic) for one in series]
    known = [traffic or Traffic(0, 0) for traffic in moved]
    least = [least_ideal(result, one)[0] for one in series]
    for name, colour in (("read", "tab:blue"), ("written", "tab:orange")):
        axes.plot(budgets, [getattr(t, name) for t in known], "o-", color=colour, label=name)
        wanted = [getattr(t, name) for t in least]
        axes.plot(budgets, wanted, "^:", color=colour, label=f"{name}, a perfect engine")
    axes.set_xlabel("budget of the arena, of all states")
    axes.set_ylabel("bytes a parameter a step")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
