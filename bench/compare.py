"""The command ``compare``: our engine and fio do the same job on the same file, in turn.

In each round everybody moves the file's size once, or several times.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from bench.contest import OURS, Contest, Outcome, Runner, hold
from bench.facts import EngineFacts, PathFacts, engine_facts, path_facts
from bench.fio_baseline import Fio, FioEngine
from bench.job import Job, Window
from bench.lane import Lane, open_places
from bench.run import make_buffer
from bench.workload import bandwidth, measure, write_through


@dataclass(frozen=True)
class Comparison:
    """What the command found.

    Args:
        job: what was done.
        passes: so many times the file's size was moved in each run.
        fio_version: which fio.
        path: where.
        engine: what our engine was granted.
        contest: how it went.
    """

    job: Job
    passes: int
    fio_version: str
    path: PathFacts
    engine: EngineFacts
    contest: Contest


@dataclass(frozen=True)
class Plan:
    """How to compare.

    Args:
        against: fio's engines.
        pairs: rounds.
        passes: so many times the file's size is moved in each run.
    """

    against: tuple[FioEngine, ...]
    pairs: int = 7
    passes: int = 1


def compare(job: Job, root: Path, *, fio: Fio, plan: Plan) -> Comparison:
    """Compare.

    Raises:
        ConfigError: the job cannot be done.
        TransferError: the drive failed.
        RivalError: none of fio's engines works here.
    """
    with contextlib.ExitStack() as closing:
        (place,) = closing.enter_context(open_places([root], job.size_bytes))
        buffer = make_buffer(job, areas=2 if job.op == "mixed" else 1)
        lane = closing.enter_context(Lane(place, buffer, job))
        write_through(lane)
        runners: dict[str, Runner] = {OURS: lambda: _run_ours(lane, plan.passes)}
        for engine in plan.against:
            runners[f"fio {engine}"] = _fio_runner(fio, lane, engine, plan.passes)
        contest = hold(runners, plan.pairs)
        return Comparison(
            job=job,
            passes=plan.passes,
            fio_version=fio.version,
            path=path_facts(place),
            engine=engine_facts(lane),
            contest=contest,
        )


def _run_ours(lane: Lane, passes: int) -> Outcome:
    if not lane.file.info.direct:
        lane.place.drop_cache()
    window = Window(requests=passes * lane.job.requests_a_pass)
    facts = lane.buffer.page_facts()
    return Outcome(bandwidth([measure(lane, lane.job.op, window=window)]), facts.huge_bytes)


def _fio_runner(fio: Fio, lane: Lane, engine: FioEngine, passes: int) -> Runner:
    def run() -> Outcome:
        return fio.run(lane.job, lane.place.file, engine=engine, passes=passes)

    return run
