"""A heat map of a sweep, with matplotlib, which need not be installed.

One panel an operation and number of threads: queue depth across, block size up, bandwidth as colour
and in figures. All panels share one scale of colours, so that they can be compared.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.facts import MachineFacts
from bench.job import Op
from bench.sweep import Cell, Setting, SweepResult
from tiering.errors import ConfigError
from tiering.sizes import format_bytes

_PANEL_INCHES: Final = (4.6, 3.8)
_DARK_BELOW: Final = 0.6  # of the scale: white figures on darker colours


def check_plotting() -> None:
    """Say before the work, not after it, that no picture can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed; "
            "install it by: pip install matplotlib, or leave --plot out"
        )


def draw(result: SweepResult, machine: MachineFacts, *, path: Path) -> None:
    """Draw a sweep.

    Args:
        result: the sweep.
        machine: for the title.
        path: of the picture; its ending says the format.

    Raises:
        ConfigError: it cannot be drawn or written.
    """
    check_plotting()
    ops = list(dict.fromkeys(cell.op for cell in result.cells))
    threads = sorted({cell.setting.threads for cell in result.cells})
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(_PANEL_INCHES[0] * len(ops), _PANEL_INCHES[1] * len(threads) + 0.9),
        layout="constrained",
    )
    panels = figure.subplots(len(threads), len(ops), squeeze=False)
    top = max(cell.median.gb_per_s for cell in result.cells)
    image = None
    for row, count in enumerate(threads):
        for column, op in enumerate(ops):
            image = _panel(panels[row][column], result, op=op, threads=count, top=top)
    figure.colorbar(image, ax=panels.ravel().tolist(), label="bandwidth, GB/s (10⁹ bytes a second)")
    figure.suptitle(_title(result, machine), fontsize=9)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from error


def _title(result: SweepResult, machine: MachineFacts) -> str:
    engine, path = result.engine, result.path
    way = "O_DIRECT" if engine.direct else "page cache"
    registered = "registered" if engine.registered_bytes else "unregistered"
    return (
        f"{path.drive}, {path.file_system or 'unknown file system'}, {way}; "
        f"{engine.backend} backend, {registered} buffers, {engine.pages.describe()}\n"
        f"{machine.kernel}, {machine.cpu_count} processors; file of "
        f"{format_bytes(result.job.size_bytes)}, {result.job.window.seconds:g} s a cell; "
        f"zero-infinity {machine.version}"
    )


def _panel(axes: Any, result: SweepResult, *, op: Op, threads: int, top: float) -> Any:  # noqa: ANN401 - matplotlib's classes, which may not be there
    cells = [cell for cell in result.cells if cell.op == op and cell.setting.threads == threads]
    blocks = sorted({cell.setting.block_bytes for cell in cells})
    depths = sorted({cell.setting.queue_depth for cell in cells})
    values = _matrix(cells, blocks, depths)
    image = axes.imshow(values, vmin=0, vmax=top, cmap="viridis", origin="lower", aspect="auto")
    axes.set_title(f"{op}, {threads} threads" if threads else op)
    axes.set_xlabel("queue depth (blocks at the drive)")
    axes.set_ylabel("block size")
    axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    axes.set_yticks(range(len(blocks)), [format_bytes(block) for block in blocks])
    for (row, column), value in np.ndenumerate(values):
        setting = Setting(blocks[row], depths[column], threads)
        axes.text(
            column,
            row,
            f"{value:.2f}",
            ha="center",
            va="center",
            color="white" if value < _DARK_BELOW * top else "black",
            fontweight="bold" if setting == result.winner else "normal",
            bbox={"fill": False, "edgecolor": "red"} if setting == result.winner else None,
        )
    return image


def _matrix(
    cells: Sequence[Cell], blocks: Sequence[int], depths: Sequence[int]
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Bandwidths in GB/s, block sizes down and depths across."""
    values = np.zeros((len(blocks), len(depths)))
    for cell in cells:
        row = blocks.index(cell.setting.block_bytes)
        values[row, depths.index(cell.setting.queue_depth)] = cell.median.gb_per_s
    return values
