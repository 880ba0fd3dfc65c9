"""Several ways to do the same work, measured in turn.

So a drive that changes its speed changes it for everybody. Each does the work once in each round;
each round begins with the next one, and every other round goes the other way round. Before each the
drive rests: a program that has to be started gives it a rest, and a throttled drive saves up
meanwhile. Figures are compared only within a round; of these ratios the median, the least and the
greatest are told.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from bench.workload import Bandwidth
from tiering.errors import TieringError

OURS: Final = "ours"
_GB: Final = 1e9
_REST_S: Final = 0.5


class RivalError(TieringError):
    """Another program ran and failed, or cannot do on this machine what it was asked."""


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


class Outcome(NamedTuple):
    """Of one run.

    Args:
        bandwidth: what it moved.
        huge_bytes: of its memory on huge pages; None when unknown.
        mapped_bytes: of its memory; None when unknown.
    """

    bandwidth: Bandwidth
    huge_bytes: int | None
    mapped_bytes: int | None = None


Runner = Callable[[], Outcome]
"""Does the work once."""


@dataclass(frozen=True)
class Contestant:
    """One way to do the work, and what it reached.

    Args:
        name: ``ours``, or another's.
        runs: one a round.
        huge_bytes: of its memory on huge pages; None when unknown.
        mapped_bytes: of its memory; None when unknown.
        throughput: ours by this one's; above 1, ours is faster. None for ours itself.
        cpu: ours by this one's processor time for the same bytes; below 1, ours takes less.
    """

    name: str
    runs: tuple[Bandwidth, ...]
    huge_bytes: int | None
    mapped_bytes: int | None
    throughput: Ratio | None
    cpu: Ratio | None

    @property
    def gb_per_s(self) -> float:
        """Median of the rounds, in units of 10**9 bytes."""
        return statistics.median(run.gb_per_s for run in self.runs)

    @property
    def cpu_s_per_gb(self) -> float:
        """Median of the rounds."""
        return statistics.median(run.cpu_s_per_gb for run in self.runs)

    @property
    def gb_per_s_per_core(self) -> float:
        """Median of the rounds, in 10**9 bytes for a processor second."""
        return statistics.median(run.gb_per_s_per_core for run in self.runs)


class Contest(NamedTuple):
    """How it went.

    Args:
        contestants: ours first.
        unusable: those that cannot work here, and why.
    """

    contestants: tuple[Contestant, ...]
    unusable: dict[str, str]

    @property
    def best(self) -> str:
        """Name of the one beside ours that moved most, by its median; empty where we are alone."""
        if len(self.contestants) == 1:
            return ""
        return max(self.contestants[1:], key=lambda one: one.gb_per_s).name


def hold(runners: Mapping[str, Runner], rounds: int, *, may_be_alone: bool = False) -> Contest:
    """Let everybody run once, unmeasured, and then the rounds.

    Args:
        runners: by name; ours, which has the name `OURS`, is among them.
        rounds: how many.
        may_be_alone: measure us even where nobody else can work.

    Raises:
        RivalError: nobody but us can work here, or somebody failed in a round.
    """
    usable = dict(runners)
    unusable = _remove_unusable(usable)
    if len(usable) == 1 and not may_be_alone:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in unusable.items())
        raise RivalError(f"nothing to compare with: {reasons}")
    outcomes = _alternate(usable, rounds)
    return Contest(tuple(_judge(name, outcomes) for name in usable), unusable)


def _remove_unusable(runners: dict[str, Runner]) -> dict[str, str]:
    """Let everybody run once and take out who cannot. Returns why."""
    failures = {name: _failure(runner) for name, runner in runners.items()}
    unusable = {name: failure for name, failure in failures.items() if failure}
    for name in unusable:
        del runners[name]
    return unusable


def _failure(runner: Runner) -> str:
    try:
        runner()
    except RivalError as error:
        return str(error)
    return ""


def _alternate(runners: Mapping[str, Runner], rounds: int) -> dict[str, list[Outcome]]:
    outcomes: dict[str, list[Outcome]] = {name: [] for name in runners}
    for number in range(rounds):
        first = number % len(runners)
        names = [*runners][first:] + [*runners][:first]
        for name in names if number % 2 == 0 else reversed(names):
            time.sleep(_REST_S)
            outcomes[name].append(runners[name]())
    return outcomes


def _judge(name: str, outcomes: Mapping[str, list[Outcome]]) -> Contestant:
    runs = [outcome.bandwidth for outcome in outcomes[name]]
    ours = [outcome.bandwidth for outcome in outcomes[OURS]]
    seen = [outcome.huge_bytes for outcome in outcomes[name] if outcome.huge_bytes is not None]
    pairs = list(zip(ours, runs, strict=True))
    return Contestant(
        name=name,
        runs=tuple(runs),
        huge_bytes=min(seen, default=None),
        mapped_bytes=outcomes[name][0].mapped_bytes,
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


def in_turns(ours: Sequence[float], others: Sequence[float]) -> Ratio:
    """Ours by others', round by round; of speeds, below 1 says that ours are slower."""
    return ratio([one / other for one, other in zip(ours, others, strict=True)])


def speed_cells(ours: Sequence[float], others: Sequence[float]) -> tuple[str, str, str]:
    """Of a row: others' and our median speed in 10**9 bytes a second, and their ratio.

    Args:
        ours: bytes a second, one a round.
        others: likewise.
    """
    share = in_turns(ours, others)
    return (
        f"{statistics.median(others) / _GB:.2f}",
        f"{statistics.median(ours) / _GB:.2f}",
        f"{share.median:.3f} ({share.least:.3f} to {share.greatest:.3f})",
    )
