"""Who runs when, and what the runs say beside each other.

In each round everybody trains once, with each number of ranks, our engine with everything in memory
among them; the next round
goes the other way round. Right before a run that pages to the drive, the drive is probed, and where
there is a GPU, the GPU and its link before each run. Figures
are compared only within a round, since machines and drives change their speed from minute to
minute; of these ratios the median, the least and the greatest are told.

What has been found so far is told after every run, so that nothing is lost of a measurement that
ends early. Its last round may be one in which not all have trained.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from bench.contest import Ratio, ratio
from bench.steps import device
from bench.steps.contestants import Contestant, Ours, run_ranks
from bench.steps.device import Device
from bench.steps.drive import Drive, Probe
from bench.steps.ideal import Ideal, Load, Speeds, Traffic, ideal
from bench.steps.ranks import together
from bench.steps.wire import Outcome, Step, Training
from tiering.errors import ConfigError

_UNDER_WAY: Final = "more runs were to come"


@dataclass(frozen=True)
class Plan:
    """Who takes part, and how often.

    Args:
        ours: our engine, with one budget or several.
        others: to compare with.
        rounds: each trains so often.
        root: a folder on the drive; None where nothing pages to one.
        probe_s: seconds of each of the probe's windows.
        probe_bytes: of the probe's file.
        limit_s: a run that takes longer is killed.
        timeline: for the trace of one more step of our engine's last run, if that is wanted.
        ranks: each number of them, as many as train together.
    """

    ours: tuple[Ours, ...]
    others: tuple[Contestant, ...]
    rounds: int
    root: Path | None
    probe_s: float
    probe_bytes: int
    limit_s: float
    timeline: Path | None = None
    ranks: tuple[int, ...] = (1,)

    @property
    def last_of_ours(self) -> Ours:
        """Whose run is the last one of our engine's."""
        return self.ours[-1] if self.rounds % 2 else self.ours[0]

    @property
    def contestants(self) -> tuple[Contestant, ...]:
        """All, those in memory first: they say which type the others have to compute in."""
        in_memory = tuple(Ours(ranks=ranks) for ranks in self.ranks)
        return (*in_memory, *(one for one in self.ours if one not in in_memory), *self.others)

    @property
    def total_runs(self) -> int:
        """In all rounds."""
        return len(self.contestants) * self.rounds


@dataclass(frozen=True)
class Measured:
    """One run.

    Args:
        ranks: what each of them has measured.
        drive: as the probe before it found it; None for runs without one.
        device: the GPU, likewise.
    """

    ranks: tuple[Outcome, ...]
    drive: Drive | None
    device: Device | None = None

    @cached_property
    def outcome(self) -> Outcome:
        """Of all ranks together."""
        return together(self.ranks)

    def of_rank(self, rank: int) -> Measured:
        """What one of them has measured."""
        return replace(self, ranks=(self.ranks[rank],))

    @property
    def step_s(self) -> float:
        """Median of the steps that count."""
        return statistics.median(step.seconds for step in self.outcome.measured)

    @property
    def kernel_traffic(self) -> Traffic:
        """Bytes a step, the mean, as the kernel counts them."""
        steps = self.outcome.measured
        return Traffic(
            statistics.fmean(step.kernel_read_bytes for step in steps),
            statistics.fmean(step.kernel_written_bytes for step in steps),
        )

    @property
    def engine_traffic(self) -> Traffic | None:
        """Bytes a step, the mean, by the engine's own counters; None when it has none."""
        steps = self.outcome.measured
        return _mean((step.engine_read_bytes, step.engine_written_bytes) for step in steps)

    @property
    def link_traffic(self) -> Traffic | None:
        """Likewise over the link to the GPU, up and down; None without one."""
        if self.device is None:
            return None
        steps = self.outcome.measured
        return _mean((step.uploaded_bytes, step.offloaded_bytes) for step in steps)

    @property
    def drive_load(self) -> Load | None:
        """What a step of all ranks puts on the drive, which they share; None without one."""
        traffic = self.engine_traffic
        return Load(traffic, self.drive.speeds) if traffic and self.drive else None

    @property
    def link_load(self) -> Load | None:
        """What a step puts on the link, of each way the most of any GPU; None without one."""
        ranks = (self.of_rank(rank).link_traffic for rank in range(len(self.ranks)))
        known = [traffic for traffic in ranks if traffic]
        if self.device is None or not known:
            return None
        return Load(Traffic(*map(max, zip(*known, strict=True))), self.device.link)


def _mean(moved: Iterable[tuple[int | None, int | None]]) -> Traffic | None:
    """Of each way; None if nobody counts."""
    known = [(one, other) for one, other in moved if one is not None and other is not None]
    return Traffic(*map(statistics.fmean, zip(*known, strict=True))) if known else None


@dataclass(frozen=True)
class Series:
    """All runs of one contestant.

    Args:
        contestant: who.
        runs: one a round, of the rounds from the first on; one at least.
    """

    contestant: Contestant
    runs: tuple[Measured, ...]

    @property
    def name(self) -> str:
        """In tables."""
        return self.contestant.name

    @property
    def ranks(self) -> int:
        """That trained together."""
        return self.contestant.ranks

    @property
    def each_rank(self) -> list[Series]:
        """The same runs, as each rank has measured them."""
        return [
            replace(self, runs=tuple(run.of_rank(rank) for run in self.runs))
            for rank in range(len(self.runs[0].ranks))
        ]

    @property
    def last(self) -> Outcome:
        """Of the last run."""
        return self.runs[-1].outcome

    @property
    def steps(self) -> list[Step]:
        """Those that count, of all runs."""
        return [step for run in self.runs for step in run.outcome.measured]

    def seconds(self, part: Callable[[Step], float] = lambda step: step.seconds) -> Ratio:
        """Median, least and greatest of the steps' times.

        Args:
            part: of a step; all of it by default.
        """
        return ratio([part(step) for step in self.steps])

    def bytes_per_parameter(self, traffic: Callable[[Measured], Traffic | None]) -> Traffic | None:
        """Median of the runs, a parameter a step; None when the engine does not count."""
        found = [one for one in map(traffic, self.runs) if one is not None]
        if not found:
            return None
        numel = self.last.parameter_numel
        return Traffic(
            statistics.median(one.read for one in found) / numel,
            statistics.median(one.written for one in found) / numel,
        )

    @property
    def peak_bytes(self) -> float:
        """Of process memory over the start, of all ranks; median of the runs."""
        return statistics.median(run.outcome.peak_bytes for run in self.runs)

    @property
    def training_peak_bytes(self) -> float:
        """Likewise, in the steps that count."""
        return statistics.median(run.outcome.training_peak_bytes for run in self.runs)

    @property
    def process_peak_bytes(self) -> float:
        """Of process memory, all of it; median of the runs."""
        return statistics.median(run.outcome.process_peak_bytes for run in self.runs)

    @property
    def device_peak_bytes(self) -> float:
        """Of a GPU's memory, in the steps that count; median of the runs."""
        return statistics.median(run.outcome.device_peak_bytes for run in self.runs)

    def utilisation(self, step_flop: int) -> float | None:
        """Operations a step by what the GPU could do meanwhile; median of the runs.

        Args:
            step_flop: floating-point operations of the model in a step of one rank.
        """
        found = [step_flop / run.step_s / run.device.flop_per_s for run in self.runs if run.device]
        return statistics.median(found) if found else None


@dataclass(frozen=True)
class Share:
    """How near our engine came to what is possible.

    Args:
        ideal: of the round with the middle share.
        of_measured: ideal by measured, over the rounds.
    """

    ideal: Ideal
    of_measured: Ratio


@dataclass(frozen=True)
class Versus:
    """One of ours beside another.

    Args:
        ours: name.
        other: name.
        time: ours by the other's time of a step; below 1, ours is faster.
        memory: ours by the other's peak of memory; below 1, ours takes less.
        training_memory: likewise, in the steps that count.
    """

    ours: str
    other: str
    time: Ratio
    memory: Ratio
    training_memory: Ratio


@dataclass(frozen=True)
class Scaling:
    """What more ranks give.

    Args:
        label: who.
        ranks: that trained together.
        base_ranks: fewer or more, with which they are compared.
        tokens_per_s: of these ranks together, by those of the others, over the rounds.
    """

    label: str
    ranks: int
    base_ranks: int
    tokens_per_s: Ratio


@dataclass(frozen=True)
class Result:
    """What the command found.

    Args:
        training: what was trained, with the type everybody computed in.
        plan: who took part.
        series: the one in memory first, then ours, then the others; of those that have trained.
        incomplete: why not all runs are there; empty if they are.
    """

    training: Training
    plan: Plan
    series: tuple[Series, ...]
    incomplete: str = ""

    @property
    def ended_runs(self) -> int:
        """How many are there."""
        return sum(len(one.runs) for one in self.series)

    def in_memory(self, ranks: int) -> Series:
        """Our engine with everything in memory, on so many ranks."""
        (found,) = (one for one in self.series if one.contestant == Ours(ranks=ranks))
        return found

    @property
    def paged(self) -> tuple[Series, ...]:
        """Our engine as the plan has it."""
        names = {one.name for one in self.plan.ours}
        return tuple(one for one in self.series if one.name in names)

    @property
    def versus(self) -> tuple[Versus, ...]:
        """Each of ours beside each other."""
        names = {one.name for one in self.plan.others}
        others = [one for one in self.series if one.name in names]
        pairs = ((ours, other) for ours in self.paged for other in others)
        return tuple(_versus(*pair) for pair in pairs if pair[0].ranks == pair[1].ranks)

    @property
    def scaling(self) -> tuple[Scaling, ...]:
        """Each with more ranks beside the same with the first number of them."""
        first = self.plan.ranks[0]
        pairs = ((base, more) for base in self.series for more in self.series)
        return tuple(
            _scaling(base, more)
            for base, more in pairs
            if base.contestant.label == more.contestant.label and base.ranks == first != more.ranks
        )

    @property
    def equal_steps(self) -> int:
        """Steps whose loss is equal to the last bit in all runs of ours on as many ranks."""
        ours = [one for one in self.series if isinstance(one.contestant, Ours)]
        losses = {
            ranks: [
                [step.loss for step in run.outcome.steps]
                for one in ours
                if one.ranks == ranks
                for run in one.runs
            ]
            for ranks in {one.ranks for one in ours}
        }
        equal = [
            [len(set(of_step)) == 1 for of_step in zip(*runs, strict=True)]
            for runs in losses.values()
        ]
        return sum(map(all, zip(*equal, strict=True)))

    def share(self, series: Series) -> Share:
        """How near one of ours came to the ideal of the bytes it moved."""
        ideals = list(self._ideals(series))
        shares = [one.seconds / run.step_s for one, run in zip(ideals, series.runs, strict=False)]
        middle = shares.index(statistics.median_low(shares))
        return Share(ideals[middle], ratio(shares))

    def _ideals(self, series: Series) -> Iterator[Ideal]:
        for run, memory in zip(series.runs, self.in_memory(series.ranks).runs, strict=False):
            yield ideal(memory.step_s, run.drive_load, run.link_load)


def middle_speeds(found: Sequence[Speeds]) -> Speeds | None:
    """Of some probes, each the median; None if there are none."""
    return Speeds(*map(statistics.median, zip(*found, strict=True))) if found else None


def measure(training: Training, plan: Plan, *, advance: Callable[[str], None]) -> Iterator[Result]:
    """Measure.

    Args:
        training: what everybody trains.
        plan: who, and how often.
        advance: told before each run who comes.

    Yields:
        What has been found so far, after every run; the last one is complete.

    Raises:
        ConfigError: it cannot be measured as asked.
        ContestantError: an engine failed.
        DeviceError: the GPU failed.
        TransferError: the drive failed.
    """
    contestants = plan.contestants
    runs: list[list[Measured]] = [[] for _ in contestants]
    has_gpu = True  # until we know better
    for number in range(plan.rounds):
        for index in _order(len(contestants), number):
            advance(f"round {number + 1}, {contestants[index].name}")
            gpu = device.look() if has_gpu else None
            has_gpu = gpu is not None
            if gpu is not None and gpu.gpu_count < max(plan.ranks):
                raise ConfigError(
                    f"--ranks {max(plan.ranks)} needs a GPU for each, and there are {gpu.gpu_count}"
                )
            is_last = number == plan.rounds - 1 and contestants[index] == plan.last_of_ours
            trace = plan.timeline if is_last else None
            run = _run(contestants[index], training, plan, gpu, trace)
            runs[index].append(run)
            training = replace(training, compute_dtype=run.outcome.compute_dtype)
            pairs = zip(contestants, runs, strict=True)
            series = tuple(Series(one, tuple(ended)) for one, ended in pairs if ended)
            found = Result(training, plan, series)
            is_complete = found.ended_runs == plan.total_runs
            yield found if is_complete else replace(found, incomplete=_UNDER_WAY)


def _order(count: int, number: int) -> Sequence[int]:
    forth = range(count)
    return forth if number % 2 == 0 else forth[::-1]


def _run(
    contestant: Contestant,
    training: Training,
    plan: Plan,
    gpu: Device | None,
    timeline: Path | None,
) -> Measured:
    drive = None
    if contestant.uses_drive and isinstance(contestant, Ours) and plan.root is not None:
        drive = Probe(plan.root, plan.probe_s, plan.probe_bytes).look()
    ranks = run_ranks(contestant, training, root=plan.root, limit_s=plan.limit_s, timeline=timeline)
    return Measured(ranks, drive, gpu)


def _scaling(base: Series, more: Series) -> Scaling:
    pairs = zip(base.runs, more.runs, strict=False)
    # As many tokens on each rank.
    ratios = [more.ranks / base.ranks * one.step_s / two.step_s for one, two in pairs]
    return Scaling(more.contestant.label, more.ranks, base.ranks, ratio(ratios))


def _versus(ours: Series, other: Series) -> Versus:
    pairs = list(zip(ours.runs, other.runs, strict=False))

    def of(figure: Callable[[Measured], float]) -> Ratio:
        return ratio([figure(one) / figure(two) if figure(two) else 0.0 for one, two in pairs])

    return Versus(
        ours=ours.name,
        other=other.name,
        time=of(lambda run: run.step_s),
        memory=of(lambda run: run.outcome.peak_bytes),
        training_memory=of(lambda run: run.outcome.training_peak_bytes),
    )
