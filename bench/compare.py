"""The command ``compare``: we and others do the same job on the same file, in turn.

In each round everybody moves the file's size once, or several times.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.contest import OURS, Contest, Outcome, hold
from bench.facts import EngineFacts, PathFacts, engine_facts, path_facts
from bench.job import Job, Window
from bench.lane import Lane, open_places
from bench.rivals import Rival, Task
from bench.run import make_buffer
from bench.workload import bandwidth, measure, write_through


@dataclass(frozen=True)
class Comparison:
    """What the command found.

    Args:
        job: what was done.
        passes: so many times the file's size was moved in each run.
        versions: of the programs compared with.
        path: where.
        engine: what our engine was granted.
        contest: how it went.
    """

    job: Job
    passes: int
    versions: dict[str, str]
    path: PathFacts
    engine: EngineFacts
    contest: Contest


@dataclass(frozen=True)
class Plan:
    """How to compare.

    Args:
        pairs: rounds.
        passes: so many times the file's size is moved in each run.
        may_be_alone: measure us even where nobody else can work.
    """

    pairs: int = 7
    passes: int = 1
    may_be_alone: bool = False


def compare(job: Job, root: Path, *, rivals: Sequence[Rival], plan: Plan) -> Comparison:
    """Compare.

    Raises:
        ConfigError: the job cannot be done.
        TransferError: the drive failed.
        RivalError: none of the others works here.
    """
    with contextlib.ExitStack() as closing:
        (place,) = closing.enter_context(open_places([root], job.size_bytes))
        buffer = make_buffer(job, areas=2 if job.op == "mixed" else 1)
        lane = closing.enter_context(Lane(place, buffer, job))
        task = Task(_as_granted(lane), place.file, plan.passes)
        others = {rival.name: rival.runner(task) for rival in rivals}
        write_through(lane)
        runners = {OURS: lambda: _run_ours(lane, plan.passes), **others}
        contest = hold(runners, plan.pairs, may_be_alone=plan.may_be_alone)
        return Comparison(
            job=job,
            passes=plan.passes,
            versions=dict(rival.version for rival in rivals),
            path=path_facts(place),
            engine=engine_facts(lane),
            contest=contest,
        )


def _as_granted(lane: Lane) -> Job:
    """The job for others: registered memory only where we were granted it ourselves."""
    if lane.stats().registered_bytes:
        return lane.job
    return dataclasses.replace(lane.job, registration="unregistered")


def _run_ours(lane: Lane, passes: int) -> Outcome:
    if not lane.file.info.direct:
        lane.place.drop_cache()
    window = Window(requests=passes * lane.job.requests_a_pass)
    facts = lane.buffer.page_facts()
    figures = bandwidth([measure(lane, lane.job.op, window=window)])
    return Outcome(figures, facts.huge_bytes, facts.mapped_bytes)
