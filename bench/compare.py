"""The command ``compare``: our engine and fio do the same job on the same file, in turn.

So a drive that changes its speed changes it for both. In each round everybody moves the file's size
once (or several times); the next round goes the other way round. Figures are compared only within a
round; of these ratios the median, the least and the greatest are told.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from bench.facts import EngineFacts, PathFacts, engine_facts, path_facts
from bench.fio_baseline import Fio, FioEngine, FioError
from bench.job import Job, Window
from bench.lane import Lane, open_places
from bench.run import make_buffer
from bench.workload import Bandwidth, bandwidth, measure, write_through

OURS: Final = "ours"


class Ratio(NamedTuple):
    """Of our figures to another's, one a round.

    Args:
        median: of them.
        least: of them.
        greatest: of them.
    """

    median: float
    least: float
    greatest: float


@dataclass(frozen=True)
class Contestant:
    """One way to do the job, and what it reached.

    Args:
        name: ``ours``, or ``fio`` and its engine.
        runs: one a round.
        huge_bytes: of its memory on huge pages; None when unknown.
        throughput: ours by this one's; above 1, ours is faster. None for ours itself.
        cpu: ours by this one's processor time for the same bytes; below 1, ours takes less.
    """

    name: str
    runs: tuple[Bandwidth, ...]
    huge_bytes: int | None
    throughput: Ratio | None
    cpu: Ratio | None


@dataclass(frozen=True)
class Comparison:
    """What the command found.

    Args:
        job: what was done.
        passes: so many times the file's size was moved in each run.
        fio_version: which fio.
        path: where.
        engine: what our engine was granted.
        contestants: ours first.
        unusable: fio's engines that cannot work here, and why.
        best: name of the fio that moved most, by its median.
    """

    job: Job
    passes: int
    fio_version: str
    path: PathFacts
    engine: EngineFacts
    contestants: tuple[Contestant, ...]
    unusable: dict[str, str]
    best: str


class _Outcome(NamedTuple):
    """Of one run."""

    bandwidth: Bandwidth
    huge_bytes: int | None


_Runner = Callable[[], _Outcome]


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
        FioError: none of fio's engines works here.
    """
    with contextlib.ExitStack() as closing:
        (place,) = closing.enter_context(open_places([root], job.size_bytes))
        buffer = make_buffer(job, areas=2 if job.op == "mixed" else 1)
        lane = closing.enter_context(Lane(place, buffer, job))
        write_through(lane)
        runners: dict[str, _Runner] = {OURS: lambda: _run_ours(lane, plan.passes)}
        for engine in plan.against:
            runners[f"fio {engine}"] = _fio_runner(fio, lane, engine, plan.passes)
        unusable = _remove_unusable(runners)
        outcomes = _alternate(runners, plan.pairs)
        contestants = tuple(_judge(name, outcomes) for name in runners)
        return Comparison(
            job=job,
            passes=plan.passes,
            fio_version=fio.version,
            path=path_facts(place),
            engine=engine_facts(lane),
            contestants=contestants,
            unusable=unusable,
            best=max(contestants[1:], key=_median_gb_per_s).name,
        )


def _run_ours(lane: Lane, passes: int) -> _Outcome:
    if not lane.file.info.direct:
        lane.place.drop_cache()
    window = Window(requests=passes * lane.job.requests_a_pass)
    facts = lane.buffer.page_facts()
    return _Outcome(bandwidth([measure(lane, lane.job.op, window=window)]), facts.huge_bytes)


def _fio_runner(fio: Fio, lane: Lane, engine: FioEngine, passes: int) -> _Runner:
    def run() -> _Outcome:
        return _Outcome(*fio.run(lane.job, lane.place.file, engine=engine, passes=passes))

    return run


def _remove_unusable(runners: dict[str, _Runner]) -> dict[str, str]:
    """Let everybody run once, unmeasured, and take out who cannot. Returns why."""
    failures = {name: _failure(runner) for name, runner in runners.items()}
    unusable = {name: failure for name, failure in failures.items() if failure}
    for name in unusable:
        del runners[name]
    if len(runners) == 1:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in unusable.items())
        raise FioError(f"nothing to compare with: {reasons}")
    return unusable


def _failure(runner: _Runner) -> str:
    try:
        runner()
    except FioError as error:
        return str(error)
    return ""


def _alternate(runners: dict[str, _Runner], pairs: int) -> dict[str, list[_Outcome]]:
    outcomes: dict[str, list[_Outcome]] = {name: [] for name in runners}
    for number in range(pairs):
        order = list(runners) if number % 2 == 0 else list(reversed(runners))
        for name in order:
            outcomes[name].append(runners[name]())
    return outcomes


def _judge(name: str, outcomes: dict[str, list[_Outcome]]) -> Contestant:
    runs = [outcome.bandwidth for outcome in outcomes[name]]
    ours = [outcome.bandwidth for outcome in outcomes[OURS]]
    seen = [outcome.huge_bytes for outcome in outcomes[name] if outcome.huge_bytes is not None]
    pairs = list(zip(ours, runs, strict=True))
    return Contestant(
        name=name,
        runs=tuple(runs),
        huge_bytes=min(seen, default=None),
        throughput=None
        if name == OURS
        else ratio([_by(one.gb_per_s, other.gb_per_s) for one, other in pairs]),
        cpu=None
        if name == OURS
        else ratio([_by(one.cpu_s_per_gb, other.cpu_s_per_gb) for one, other in pairs]),
    )


def _by(one: float, other: float) -> float:
    return one / other if other else float("inf")


def ratio(values: Sequence[float]) -> Ratio:
    """Median, least and greatest of one or more values."""
    return Ratio(statistics.median(values), min(values), max(values))


def _median_gb_per_s(contestant: Contestant) -> float:
    return statistics.median(run.gb_per_s for run in contestant.runs)
