"""What the demo says: one live line while it trains, a table and a JSON file when it has."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

import psutil
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from infinity.demo.options import Options
from infinity.demo.train import Step, as_one
from infinity.report import EngineStats

_MB = 1e6
_GB = 1e9
_LAST = 5  # steps of which the closing loss is the mean, since single batches differ
_PLAIN_LINES = 8  # a run, where there is no terminal to rewrite a line on


class PeakMemory:
    """The most memory this process has held at once, over what it held at the start."""

    def __init__(self) -> None:
        # Writing 5 sets the kernel's high-water mark back to what is held now (man 5 proc). Where
        # that is not allowed the mark may date from before, and the answer is only too high.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._start_bytes = psutil.Process().memory_info().rss

    def over_start_bytes(self) -> int:
        """Bytes of the peak over the start."""
        status = Path("/proc/self/status").read_text()
        peak_kib = next(
            int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")
        )
        return max(0, peak_kib * 1024 - self._start_bytes)


class Ideal(NamedTuple):
    """The least time a step can take, by what binds it.

    Args:
        compute_s: of the step's arithmetic with everything in memory.
        nvme_s: of its transfers at the bandwidth measured for reads and writes at once.
    """

    compute_s: float
    nvme_s: float

    @property
    def seconds(self) -> float:
        """The longer of both: at best they overlap completely."""
        return max(self.compute_s, self.nvme_s)

    @property
    def binds(self) -> str:
        """Which one that is."""
        return "compute" if self.compute_s >= self.nvme_s else "NVMe"


@dataclasses.dataclass(frozen=True)
class Limits:
    """What this machine was measured to do.

    Args:
        compute_s: a step's forward and backward in memory, in seconds, measured by themselves.
        nvme_bytes_per_s: read and written together, at once; 0 where nothing is on NVMe.
    """

    compute_s: float
    nvme_bytes_per_s: float

    @classmethod
    def as_one(cls, ranks: Sequence[Limits]) -> Limits:
        """Of several ranks that were measured at the same time."""
        return cls(
            compute_s=max(rank.compute_s for rank in ranks),
            nvme_bytes_per_s=sum(rank.nvme_bytes_per_s for rank in ranks),
        )

    def ideal(self, steps: Sequence[Step]) -> Ideal:
        """Least time of a step that moves what these steps moved on average."""
        moved_bytes = sum(step.read_bytes + step.written_bytes for step in steps) / len(steps)
        in_torch = [step.torch_seconds for step in steps if step.torch_seconds is not None]
        return Ideal(
            # The plain copy updates its weights as well, so it is the better measure.
            compute_s=statistics.median(in_torch) if in_torch else self.compute_s,
            nvme_s=moved_bytes / self.nvme_bytes_per_s if self.nvme_bytes_per_s else 0.0,
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run, of one rank or of several: what the table and the file are made from."""

    options: Options
    steps: list[Step]
    stats: EngineStats
    limits: Limits
    peak_memory_bytes: int
    ranks: tuple[Result, ...] = ()
    """What each has done, where these are the figures of several."""

    @classmethod
    def as_one(cls, ranks: Sequence[Result]) -> Result:
        """What several ranks have done: bytes and memory of all together, times of the slowest."""
        if len(ranks) == 1:
            return ranks[0]
        return cls(
            ranks[0].options,
            [as_one(steps) for steps in zip(*(rank.steps for rank in ranks), strict=True)],
            _stats_as_one([rank.stats for rank in ranks]),
            Limits.as_one([rank.limits for rank in ranks]),
            sum(rank.peak_memory_bytes for rank in ranks),
            tuple(ranks),
        )

    @property
    def steady(self) -> list[Step]:
        """The steps but the first, in which the order of uses is not known yet."""
        return self.steps[1:] or self.steps

    @property
    def step_s(self) -> float:
        """Median time of a step."""
        return statistics.median(step.seconds for step in self.steady)

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained on, a second."""
        windows = self.options.batch * max(1, len(self.ranks))
        return windows * self.options.model.context / self.step_s

    @property
    def ideal(self) -> Ideal:
        """The least time of a step of this run."""
        return self.limits.ideal(self.steady)

    @property
    def torch_ratios(self) -> list[float]:
        """Time of each step over that of the plain copy's, least first; empty without a copy."""
        return sorted(
            step.seconds / step.torch_seconds for step in self.steady if step.torch_seconds
        )

    @property
    def last_loss(self) -> float:
        """Mean of the last few losses."""
        return statistics.fmean(step.loss for step in self.steps[-_LAST:])

    def bytes_per_parameter(self, moved_bytes: int) -> float:
        """Spread a run's bytes over its parameters and steps."""
        return moved_bytes / self.stats.parameter_numel / len(self.steps)


_ADDED_UP: Final = (
    *("state_bytes", "arena_budget_bytes", "arena_used_bytes", "arena_peak_bytes"),
    *("arena_huge_bytes", "nvme_read_bytes", "nvme_written_bytes", "nvme_paths"),
    *("prefetch_hits", "prefetch_misses", "prefetch_wasted"),
)


def _stats_as_one(ranks: Sequence[EngineStats]) -> EngineStats:
    """What several engines have together; what they have in common is the first's."""
    first, *others = ranks
    added = {name: getattr(first, name) for name in _ADDED_UP}
    waited_s = dict(first.waited_s)
    for other in others:
        added = {name: total + getattr(other, name) for name, total in added.items()}
        waited_s = {hop: seconds + other.waited_s[hop] for hop, seconds in waited_s.items()}
    return dataclasses.replace(first, **added, waited_s=waited_s)


class Progress:
    """The live line. Without a terminal it prints one now and then instead.

    Args:
        console: where to.
        options: for the number of steps.
        limits: for the share of the ideal.
        budget_bytes: of the host arena.
        ranks: how many there are; all else is of all of them together.
    """

    def __init__(
        self,
        console: Console,
        options: Options,
        limits: Limits,
        *,
        budget_bytes: int,
        ranks: int = 1,
    ) -> None:
        self._console = console
        self._ranks = ranks
        self._options = options
        self._limits = limits
        self._budget_bytes = budget_bytes
        self._every = max(1, options.steps // _PLAIN_LINES)
        self._live = Live(console=console, refresh_per_second=8) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, number: int, step: Step) -> None:
        """Tell of a step, counted from 1."""
        line = Text(self._line(number, step))
        if self._live:
            self._live.update(line)
        elif number == 1 or number % self._every == 0 or number == self._options.steps:
            self._console.print(line, soft_wrap=True)

    def _line(self, number: int, step: Step) -> str:
        tokens = self._ranks * self._options.batch * self._options.model.context
        # One step of the plain copy can be slow by chance; the table takes the median of all.
        ideal = self._limits.ideal([step._replace(torch_seconds=None)])
        return (
            f"step {number}/{self._options.steps}  loss {step.loss:.3f}  "
            f"{tokens / step.seconds:,.0f} tokens/s  "
            f"NVMe {step.read_bytes / step.seconds / _GB:.2f} GB/s read "
            f"{step.written_bytes / step.seconds / _GB:.2f} written  "
            f"{ideal.seconds / step.seconds:.0%} of ideal  "
            f"arena {step.arena_bytes / _MB:.0f}/{self._budget_bytes / _MB:.0f} MB"
        )


class Row(NamedTuple):
    """A line of the closing table."""

    name: str
    value: str
    note: str


def table(result: Result) -> Table:
    """Return the closing table."""
    shown = Table(title="How it went", title_justify="left", show_header=False)
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column()
    shown.add_column(style="dim")
    for row in rows(result):
        shown.add_row(*(Text(cell) for cell in row))
    return shown


def rows(result: Result) -> list[Row]:
    """Return the lines of the closing table, the most important first."""
    return [
        *_speed_rows(result),
        *(_traffic_rows(result) if result.options.offload == "nvme" else []),
        *_memory_rows(result),
        *(_rank_row(number, rank) for number, rank in enumerate(result.ranks)),
    ]


def _speed_rows(result: Result) -> list[Row]:
    ideal, ratios = result.ideal, result.torch_ratios
    shown = [
        Row(
            "loss",
            f"{result.steps[0].loss:.3f} first, {result.last_loss:.3f} last",
            f"{len(result.steps)} steps; last is the mean of {min(_LAST, len(result.steps))}",
        ),
        Row(
            "speed",
            f"{result.tokens_per_s:,.0f} tokens/s",
            f"{result.step_s:.3f} s a step (median), computing in {result.stats.compute_dtype}",
        ),
        Row(
            "share of ideal",
            f"{ideal.seconds / result.step_s:.0%}",
            f"{ideal.binds} binds: compute {ideal.compute_s:.3f} s, NVMe {ideal.nvme_s:.3f} s",
        ),
    ]
    if ratios:
        shown.append(
            Row(
                "time over plain torch",
                f"{statistics.median(ratios):.2f} (median)",
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}; fused AdamW, everything in memory, in turns",
            )
        )
    return shown


def _traffic_rows(result: Result) -> list[Row]:
    options, stats = result.options, result.stats
    fetched = stats.prefetch_hits + stats.prefetch_misses
    waited = sorted(stats.waited_s.items(), key=lambda item: -item[1])
    per_step = "bytes a parameter a step"
    return [
        Row(
            "read from NVMe",
            f"{result.bytes_per_parameter(stats.nvme_read_bytes):.2f} {per_step}",
            f"{options.least_read_bytes} when nothing stays in memory between uses",
        ),
        Row(
            "written to NVMe",
            f"{result.bytes_per_parameter(stats.nvme_written_bytes):.2f} {per_step}",
            f"{options.least_written_bytes} when nothing stays in memory between updates",
        ),
        Row(
            "prefetch",
            f"{stats.prefetch_hits / fetched if fetched else 0:.1%} of fetches were there in time",
            f"{stats.prefetch_misses} were not, {stats.prefetch_wasted} were fetched in vain",
        ),
        Row(
            "waited",
            f"{sum(stats.waited_s.values()):.2f} s in all" + _of_ranks(result),
            ", ".join(f"{hop} {seconds:.2f} s" for hop, seconds in waited),
        ),
        Row(
            "backend",
            f"{stats.backend}, {'direct' if stats.direct_io else 'through the page cache'}",
            _backend_reason(result),
        ),
    ]


def _of_ranks(result: Result) -> str:
    return f", of {len(result.ranks)} ranks" if result.ranks else ""


def _backend_reason(result: Result) -> str:
    if result.options.backend != "auto":
        return "asked for"
    return result.stats.backend_reason or "io_uring is allowed here"


def _memory_rows(result: Result) -> list[Row]:
    stats = result.stats
    peak, budget, huge, states = (
        count / _MB
        for count in (
            stats.arena_peak_bytes,
            stats.arena_budget_bytes,
            stats.arena_huge_bytes,
            stats.state_bytes,
        )
    )
    beside = ", the plain copy's included" if result.options.compare_torch else ""
    return [
        Row(
            "host arena",
            f"{peak:.1f} of {budget:.1f} MB at most",
            f"the budget is {budget / states:.1%} of the states' {states:.1f} MB; "
            f"{huge:.1f} MB lie on huge pages",
        ),
        Row(
            "process memory",
            f"{result.peak_memory_bytes / _MB:.0f} MB over the start at most" + _of_ranks(result),
            f"arena, activations and the model as it was built{beside}",
        ),
    ]


def _rank_row(number: int, rank: Result) -> Row:
    stats = rank.stats
    waited = ", ".join(f"{hop} {seconds:.2f} s" for hop, seconds in stats.waited_s.items())
    on_nvme = (
        f"{stats.nvme_read_bytes / _GB:.2f} GB read, {stats.nvme_written_bytes / _GB:.2f} written; "
        if rank.options.offload == "nvme"
        else ""
    )
    return Row(
        f"rank {number}",
        f"{rank.tokens_per_s:,.0f} tokens/s, {rank.ideal.seconds / rank.step_s:.0%} of ideal",
        f"{on_nvme}arena {stats.arena_peak_bytes / _MB:.1f} of "
        f"{stats.arena_budget_bytes / _MB:.1f} MB, process {rank.peak_memory_bytes / _MB:.0f} MB "
        f"over the start; waited for {waited}",
    )


def as_json(result: Result) -> dict[str, object]:
    """Return the results as plain values: bytes, seconds, and every step."""
    options = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in dataclasses.asdict(result.options).items()
    }
    return {
        "options": options,
        "engine": dataclasses.asdict(result.stats),
        "limits": dataclasses.asdict(result.limits),
        "ideal": {**result.ideal._asdict(), "binds": result.ideal.binds},
        "step_s": result.step_s,
        "tokens_per_s": result.tokens_per_s,
        "share_of_ideal": result.ideal.seconds / result.step_s,
        "torch_ratios": result.torch_ratios,
        "peak_memory_bytes": result.peak_memory_bytes,
        "read_bytes_per_parameter": result.bytes_per_parameter(result.stats.nvme_read_bytes),
        "written_bytes_per_parameter": result.bytes_per_parameter(result.stats.nvme_written_bytes),
        "losses": [step.loss for step in result.steps],
        "losses_hex": [step.loss.hex() for step in result.steps],
        "steps": [step._asdict() for step in result.steps],
        "ranks": [as_json(rank) for rank in result.ranks],
    }
