"""The command ``sweep``: the same job over block sizes, depths, threads and operations.

All cells use one file and one memory; each has an engine of its own. They are measured in several
rounds through the whole grid, and a cell's figure is its median, so that a slow minute of the drive
does not fall on one cell alone.

A winner is one setting for all operations swept, since a training run has one: the setting whose
worst operation is nearest to the best any setting reached in it. Among those within two parts in a
hundred of it, the one with the least memory at the drive wins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from bench.buffers import Buffer
from bench.config_file import AioBlock
from bench.facts import EngineFacts, PathFacts, engine_facts, path_facts
from bench.job import Job, Op
from bench.lane import Lane, Place, open_places
from bench.run import make_buffer
from bench.workload import Bandwidth, bandwidth, measure, write_through

_GOOD_ENOUGH: Final = 0.98


class Setting(NamedTuple):
    """What is swept beside the operation.

    Args:
        block_bytes: of one transfer.
        queue_depth: transfers at the drive.
        threads: of the thread backend; 0: its own choice.
    """

    block_bytes: int
    queue_depth: int
    threads: int


class Cell(NamedTuple):
    """One measured point.

    Args:
        op: what was done.
        setting: how.
        median: the run with the middle bandwidth.
        runs: all, one a round.
    """

    op: Op
    setting: Setting
    median: Bandwidth
    runs: tuple[Bandwidth, ...]


@dataclass(frozen=True)
class Grid:
    """What to sweep.

    Args:
        ops: operations.
        block_bytes: of one transfer.
        queue_depths: transfers at the drive.
        threads: of the thread backend.
        rounds: through the whole grid.
    """

    ops: tuple[Op, ...]
    block_bytes: tuple[int, ...]
    queue_depths: tuple[int, ...]
    threads: tuple[int, ...]
    rounds: int = 1

    def settings(self) -> list[Setting]:
        """All, in order."""
        return [
            Setting(block, depth, threads)
            for threads in self.threads
            for block in self.block_bytes
            for depth in self.queue_depths
        ]


@dataclass(frozen=True)
class SweepResult:
    """What the command found.

    Args:
        job: the base of all cells.
        path: where.
        engine: what the engine of the last cell was granted.
        cells: all.
        winner: the best setting.
        aio: the block to paste into a configuration.
    """

    job: Job
    path: PathFacts
    engine: EngineFacts
    cells: tuple[Cell, ...]
    winner: Setting
    aio: AioBlock


def jobs_of(job: Job, grid: Grid) -> list[Job]:
    """The job of each cell, in the order of the grid.

    Raises:
        ConfigError: a cell cannot work.
    """
    return [
        dataclasses.replace(
            job,
            op=op,
            block_bytes=setting.block_bytes,
            queue_depth=setting.queue_depth,
            threads=setting.threads,
        )
        for op in grid.ops
        for setting in grid.settings()
    ]


def sweep(job: Job, root: Path, *, grid: Grid, advance: Callable[[str], None]) -> SweepResult:
    """Measure the grid.

    Args:
        job: the base of all cells.
        root: the path.
        grid: what is swept.
        advance: told before each run what comes.

    Raises:
        ConfigError: a cell cannot be measured.
        TransferError: the drive failed.
    """
    jobs = jobs_of(job, grid)
    with contextlib.ExitStack() as closing:
        (place,) = closing.enter_context(open_places([root], job.size_bytes))
        buffer = make_buffer(job, areas=2, area_bytes=max(one.memory_bytes for one in jobs))
        facts = path_facts(place)
        advance("first write")
        _fill(place, buffer, job)
        runs: list[list[Bandwidth]] = [[] for _ in jobs]
        for _ in range(grid.rounds):
            for one, found in zip(jobs, runs, strict=True):
                advance(one.describe())
                figures, engine = _measure_cell(place, buffer, one)
                found.append(figures)
    cells = tuple(_cell(one, found) for one, found in zip(jobs, runs, strict=True))
    winner = best_setting(cells)
    return SweepResult(job, facts, engine, cells, winner, aio_block(winner))


def _fill(place: Place, buffer: Buffer, job: Job) -> None:
    with Lane(place, buffer, job) as lane:
        write_through(lane)


def _measure_cell(place: Place, buffer: Buffer, job: Job) -> tuple[Bandwidth, EngineFacts]:
    with Lane(place, buffer, job) as lane:
        if not lane.file.info.direct:
            place.drop_cache()
        figures = bandwidth([measure(lane, job.op, window=job.window)])
        return figures, engine_facts(lane)


def _cell(job: Job, runs: Sequence[Bandwidth]) -> Cell:
    middle = statistics.median_low(run.gb_per_s for run in runs)
    median = next(run for run in runs if run.gb_per_s == middle)
    setting = Setting(job.block_bytes, job.queue_depth, job.threads)
    return Cell(job.op, setting, median, tuple(runs))


def best_setting(cells: Sequence[Cell]) -> Setting:
    """The setting whose worst operation is nearest to the best, as the head of this file says."""
    best_of: dict[Op, float] = {}
    for cell in cells:
        best_of[cell.op] = max(best_of.get(cell.op, 0.0), cell.median.gb_per_s)
    worst: dict[Setting, float] = {}
    for cell in cells:
        part = cell.median.gb_per_s / best_of[cell.op]
        worst[cell.setting] = min(worst.get(cell.setting, 1.0), part)
    least = _GOOD_ENOUGH * max(worst.values())
    good = [setting for setting, part in worst.items() if part >= least]
    return min(good, key=lambda one: (one.block_bytes * one.queue_depth, -worst[one]))


def aio_block(setting: Setting) -> AioBlock:
    """A setting in the words of a DeepSpeed-style configuration."""
    return {
        "block_size": setting.block_bytes,
        "queue_depth": setting.queue_depth,
        "thread_count": max(1, setting.threads),
        "single_submit": False,
        "overlap_events": True,
    }
