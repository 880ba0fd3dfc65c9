"""The command ``run``: one job on one path or on several, each alone and then all at once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.buffers import Buffer
from bench.facts import EngineFacts, PathFacts, cache_note, engine_facts, path_facts
from bench.job import Job
from bench.lane import Lane, Place, open_places
from bench.verification import verify
from bench.workload import (
    Bandwidth,
    Latency,
    Span,
    bandwidth,
    measure,
    measure_latency,
    write_through,
)


@dataclass(frozen=True)
class Row:
    """The figures of one job.

    Args:
        name: ``first write``, ``overwrite``, ``read`` or ``mixed``.
        bandwidth: of its bandwidth window.
        latency: of its latency window, if it had one.
        page_cache: what the page cache had to do with it.
    """

    name: str
    bandwidth: Bandwidth
    latency: Latency | None
    page_cache: str


@dataclass(frozen=True)
class PathResult:
    """All of one path, measured alone.

    Args:
        path: what it is.
        engine: what the engine was granted.
        rows: the first write, then the job.
        verified_bytes: compared afterwards; 0 when that was not asked for.
    """

    path: PathFacts
    engine: EngineFacts
    rows: tuple[Row, ...]
    verified_bytes: int


@dataclass(frozen=True)
class RunResult:
    """What the command found.

    Args:
        job: what was measured.
        paths: each alone.
        together: all at once, and each path's part in it; None for a single path.
    """

    job: Job
    paths: tuple[PathResult, ...]
    together: Together | None


@dataclass(frozen=True)
class Together:
    """Several paths at once.

    Args:
        total: all of them.
        parts: each.
    """

    total: Bandwidth
    parts: tuple[Bandwidth, ...]


def make_buffer(job: Job, *, areas: int, area_bytes: int | None = None) -> Buffer:
    """Memory for a job."""
    return Buffer(area_bytes or job.memory_bytes, areas, pages=job.pages, seed=job.seed)


def run(job: Job, roots: Sequence[Path], *, verifies: Sequence[str] = ()) -> RunResult:
    """Measure a job.

    Args:
        job: what.
        roots: the paths.
        verifies: what is compared afterwards: nothing, or ``("file",)``.

    Raises:
        ConfigError: it cannot be measured.
        TransferError: the drive failed.
        VerifyError: the data is not what was written.
    """
    with contextlib.ExitStack() as closing:
        places = closing.enter_context(open_places(roots, job.size_bytes))
        areas = 2 if verifies or job.op == "mixed" else 1
        lanes = [
            closing.enter_context(Lane(place, make_buffer(job, areas=areas), job))
            for place in places
        ]
        found = [_measure_alone(lane) for lane in lanes]
        together = _measure_together(lanes) if len(lanes) > 1 else None
        return RunResult(
            job,
            tuple(
                PathResult(
                    path_facts(lane.place),
                    engine_facts(lane),
                    rows,
                    verify(lane) if verifies else 0,
                )
                for lane, rows in zip(lanes, found, strict=True)
            ),
            together,
        )


def _measure_alone(lane: Lane) -> tuple[Row, ...]:
    job = lane.job
    first = bandwidth([write_through(lane)])
    rows = [Row("first write", first, None, cache_note(lane, read_bytes=0))]
    _forget(lane.place, lane)
    figures = bandwidth([measure(lane, job.op, window=job.window)])
    note = cache_note(lane, read_bytes=figures.read_bytes)
    _forget(lane.place, lane)
    latency = measure_latency(lane, job.op, window=job.window)
    name = "overwrite" if job.op == "write" else job.op
    return (*rows, Row(name, figures, latency, note))


def _forget(place: Place, lane: Lane) -> None:
    """Let no job be served from what the one before left in memory."""
    if not lane.file.info.direct:
        place.drop_cache()


def _measure_together(lanes: Sequence[Lane]) -> Together:
    for lane in lanes:
        _forget(lane.place, lane)
    stop = threading.Event()
    start = threading.Barrier(len(lanes))

    def measure_one(lane: Lane) -> Span:
        start.wait()
        try:
            return measure(lane, lane.job.op, window=lane.job.window, stop=stop)
        except BaseException:
            stop.set()
            raise

    with concurrent.futures.ThreadPoolExecutor(len(lanes)) as pool, _set_on_error(stop):
        spans = list(pool.map(measure_one, lanes))
    return Together(bandwidth(spans), tuple(bandwidth([span]) for span in spans))


@contextlib.contextmanager
def _set_on_error(stop: threading.Event) -> Iterator[None]:
    try:
        yield
    except BaseException:
        stop.set()
        raise
