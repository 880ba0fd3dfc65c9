"""DeepSpeed's learning rate schedules, as torch's schedulers.

Note: what a rate is a function of

Of the number of updates that were made, and of nothing else: `ClosedFormLR.rates_after`. So a
schedule that goes on from a checkpoint, or from ``last_batch_iteration``, gives the rates of one
that never stopped, and loading a state puts them into the optimizer at once.

DeepSpeed counts batches from -1, and calls ``step`` after each update. Its constructors put a rate
into the optimizer, so that is what the first update uses; the second uses that of batch 0. Torch
counts ``last_epoch`` from 0, also after each update. ``last_epoch`` is therefore the number of
updates made, and one more than DeepSpeed's ``last_batch_iteration``.

What follows from it, and is kept, because rates are to be those that people have tuned: a warmup
begins with two updates at the lowest rate, and that of `WarmupCosineLR` with one at 0 whatever its
ratios are; a range test and a cycle begin with one. `OneCycle` tells what it does to ``betas``.

What is not kept: ``warmup_num_steps`` of 0 is no warmup, where DeepSpeed refuses it; an unknown
``warmup_type`` is an error, where it warns; a momentum that its decay would take out of what Adam
can use stays within.
"""

from __future__ import annotations

import inspect
import math
import numbers
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler

from infinity.config.spelling import nearest
from tiering.errors import ConfigError, TieringWarning

PerGroup: TypeAlias = float | Sequence[float]
"""One number for all parameter groups, or a list or tuple with one for each."""

WARMUP_TYPES: Final = ("log", "linear")
CYCLED_BETA2: Final = 0.99
"""Of every group that `OneCycle` gives a momentum."""
HIGHEST_MOMENTUM: Final = 0.999
"""To which a growing momentum is held; at 1 Adam's bias correction would divide by zero."""


def warmup_share(updates: int, *, steps: int, warmup_type: str) -> float:
    """The share of the way up that a warmup has gone.

    Args:
        updates: made so far; 0 counts as 1.
        steps: of the warmup; 0 for none.
        warmup_type: log or linear.

    Returns:
        0 to 1.
    """
    number = max(updates, 1)
    if number > steps:
        return 1.0
    if warmup_type == "linear":
        return (number - 1) / steps
    return 1.0 / math.log(steps) * math.log(number)


def linear_share(updates: int, *, begin: int, end: int) -> float:
    """What is left of a rate that falls to 0, from one batch to another.

    Args:
        updates: made so far.
        begin: batch that has the whole rate.
        end: batch that has none.

    Returns:
        1 to 0.
    """
    batch = max(updates, 1) - 1
    return max(0.0, (end - batch) / max(1, end - begin))


def cosine_share(updates: int, *, begin: int, end: int, least: float) -> float:
    """What is left of a rate that falls along half a cosine.

    Args:
        updates: made so far.
        begin: updates after which it has the whole rate.
        end: updates after which it has the least.
        least: share that stays.

    Returns:
        1 to ``least``.
    """
    progress = min(1.0, (updates - begin) / max(1, end - begin))
    return least + (1.0 - least) * (1.0 + math.cos(math.pi * progress)) / 2


def cycle_height(
    updates: int, *, sizes: tuple[float, float], stair_counts: tuple[int, int]
) -> float:
    """How high a cycle that goes up and down once stands.

    Args:
        updates: made so far.
        sizes: steps up, and down again.
        stair_counts: stairs of each half; 0 for a slope.

    Returns:
        0 to 1.
    """
    first, second = sizes
    at = updates % (first + second)
    up = at <= first
    steps, size = (at, first) if up else (first + second - at, second)
    stairs = stair_counts[0] if up else stair_counts[1]
    return math.floor(steps * stairs / size) / stairs if stairs else steps / size


class ClosedFormLR(LRScheduler):
    """What all schedules share: see *what a rate is a function of*.

    Args:
        optimizer: its rates are set at once, and by each `step`. A tensor that is a rate stays.
        last_batch_iteration: batches made so far less 1, to go on from there.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int) -> None:
        last = _whole("last_batch_iteration", last_batch_iteration, at_least=-1)
        for group in optimizer.param_groups:  # torch asks for it when a schedule goes on
            rate = group["lr"]
            group.setdefault("initial_lr", rate.clone() if torch.is_tensor(rate) else rate)
        super().__init__(optimizer, last)

    @property
    def last_batch_iteration(self) -> int:
        """DeepSpeed's count: -1 before the first `step`."""
        return self.last_epoch - 1

    def rates_after(self, updates: int) -> list[float]:
        """The rate of each parameter group for the update that follows so many."""
        raise NotImplementedError

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rates of the update to come."""
        return list(self.rates_after(self.last_epoch))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state, with its settings, and put its rates into the optimizer.

        Args:
            state_dict: of `state_dict`; or DeepSpeed's, which is nothing but
                ``last_batch_iteration``, and leaves the settings as they are.

        Raises:
            ConfigError: it is of an optimizer with another number of parameter groups.
        """
        state = dict(state_dict)
        if state.keys() == {"last_batch_iteration"}:
            batch = _whole("last_batch_iteration", state["last_batch_iteration"], at_least=-1)
            state = {"last_epoch": batch + 1, "_step_count": batch + 2}
        groups = self.optimizer.param_groups
        saved = len(state.get("base_lrs", groups))
        if saved != len(groups):
            raise ConfigError(
                f"the scheduler's state has rates of {saved} parameter groups, and the optimizer "
                f"has {len(groups)}; make the groups as they were when it was saved"
            )
        super().load_state_dict(state)
        self._apply()

    def _apply(self) -> None:
        """Put the rates into the optimizer without a step."""
        groups = self.optimizer.param_groups
        rates = self.rates_after(self.last_epoch)
        for group, rate in zip(groups, rates, strict=True):
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [g["lr"].clone() if torch.is_tensor(g["lr"]) else g["lr"] for g in groups]


class WarmupLR(ClosedFormLR):
    """Rises from the lowest to the highest rate, and stays there.

    Args:
        optimizer: to steer.
        warmup_min_lr: rate of the first two updates.
        warmup_max_lr: rate after the warmup; None for the rates that the optimizer has (or had
            before its first scheduler).
        warmup_num_steps: of the warmup; 1 is as 2, and with 0 the first update has the full rate.
        warmup_type: log or linear.
        last_batch_iteration: batches made so far less 1, to go on from there.

    Raises:
        ConfigError: a value that cannot work.
    """

    def __init__(  # noqa: PLR0913 - DeepSpeed's keys
        self,
        optimizer: torch.optim.Optimizer,
        *,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = (
            _initial_rates(optimizer)
            if warmup_max_lr is None
            else _per_group(optimizer, "warmup_max_lr", warmup_max_lr)
        )
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def rates_after(self, updates: int) -> list[float]:
        """The rate of each parameter group for the update that follows so many."""
        share = self._share(updates)
        return [
            least + (most - least) * share
            for least, most in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def _share(self, updates: int) -> float:
        return warmup_share(updates, steps=self.warmup_num_steps, warmup_type=self.warmup_type)


class WarmupDecayLR(WarmupLR):
    """Rises as `WarmupLR` does, and then falls to the lowest rate along a line.

    With a total of fewer steps than the warmup has, the rate drops to the lowest after the warmup.

    Args:
        optimizer: to steer.
        total_num_steps: of warmup and decay together.
        warmup_min_lr: rate of the first two updates.
        warmup_max_lr: rate after the warmup; None for the rates that the optimizer has (or had
            before its first scheduler).
        warmup_num_steps: of the warmup; 1 is as 2, and with 0 the first update has the full rate.
        warmup_type: log or linear.
        last_batch_iteration: batches made so far less 1, to go on from there.

    Raises:
        ConfigError: a value that cannot work.
    """

    def __init__(  # noqa: PLR0913 - DeepSpeed's keys
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        *,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _total_steps(total_num_steps, warmup_num_steps)
        super().__init__(
            optimizer,
            warmup_min_lr=warmup_min_lr,
            warmup_max_lr=warmup_max_lr,
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
            last_batch_iteration=last_batch_iteration,
        )

    def _share(self, updates: int) -> float:
        steps = self.warmup_num_steps
        if max(updates, 1) <= steps:
            return super()._share(updates)
        return linear_share(updates, begin=steps, end=self.total_num_steps)


class WarmupCosineLR(ClosedFormLR):
    """Scales the optimizer's own rates: up from a ratio to 1, and down along half a cosine.

    The first update has rate 0, whatever the ratios are, unless there is no warmup.

    Args:
        optimizer: to steer; its rates (or those before its first scheduler) are ratio 1.
        total_num_steps: of warmup and decay together.
        warmup_min_ratio: of the second update.
        warmup_num_steps: of the warmup; 1 is as 2, and with 0 the first update has the full rate.
        cos_min_ratio: of the last update and all after it.
        warmup_type: log or linear.
        last_batch_iteration: batches made so far less 1, to go on from there.

    Raises:
        ConfigError: a value that cannot work.
    """

    def __init__(  # noqa: PLR0913 - DeepSpeed's keys
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        *,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _total_steps(total_num_steps, warmup_num_steps)
        self.warmup_min_ratio = _number("warmup_min_ratio", warmup_min_ratio)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.cos_min_ratio = _number("cos_min_ratio", cos_min_ratio)
        self.warmup_type = _warmup_type(warmup_type)
        self.org_lrs = _initial_rates(optimizer)
        super().__init__(optimizer, last_batch_iteration)

    def rates_after(self, updates: int) -> list[float]:
        """The rate of each parameter group for the update that follows so many."""
        ratio = self._ratio(updates)
        return [rate * ratio for rate in self.org_lrs]

    def _ratio(self, updates: int) -> float:
        steps = self.warmup_num_steps
        if updates > steps or not steps:
            return cosine_share(
                updates, begin=steps, end=self.total_num_steps, least=self.cos_min_ratio
            )
        if not updates:
            return 0.0
        share = warmup_share(updates, steps=steps, warmup_type=self.warmup_type)
        return self.warmup_min_ratio + share * (1.0 - self.warmup_min_ratio)


class OneCycle(ClosedFormLR):
    """One cycle of the rate, up and down, and of the momentum, down and up; then both decay.

    The momentum is ``betas[0]`` of each parameter group, and ``betas`` is replaced as a whole:
    ``betas[1]`` becomes 0.99, whatever it was. That is DeepSpeed's, and so is that the first update
    has the lowest momentum though the cycle begins at the highest. The engine's optimizer uses
    ``betas`` as they are when a step is decided, so an update that is made later, in the next
    forward, has those of its own step. To keep the configured ``betas``, set ``cycle_momentum`` to
    false.

    Args:
        optimizer: to steer.
        cycle_min_lr: rate at both ends of the cycle.
        cycle_max_lr: rate at its top.
        decay_lr_rate: after the cycle, the lowest rate is divided by 1 and so much for each
            ``decay_step_size``.
        cycle_first_step_size: steps up.
        cycle_second_step_size: steps down; None for as many as up.
        cycle_first_stair_count: stairs of the way up; 0 for a slope.
        cycle_second_stair_count: stairs of the way down; None for as many as up.
        decay_step_size: steps; 0 for no decay.
        cycle_momentum: whether ``betas`` are changed. Where groups have none they are not, with a
            warning.
        cycle_min_mom: momentum of the first update, and at the top of the rate.
        cycle_max_mom: momentum at both ends, and after the cycle.
        decay_mom_rate: after the cycle, the highest momentum is multiplied by 1 and so much for
            each ``decay_step_size``; it is held to 0 and 0.999.
        last_batch_iteration: batches made so far less 1, to go on from there.

    Raises:
        ConfigError: a value that cannot work.
    """

    def __init__(  # noqa: PLR0913 - DeepSpeed's keys
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        *,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = _per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self.sizes = _cycle_sizes(cycle_first_step_size, cycle_second_step_size)
        self.stair_counts = _stair_counts(cycle_first_stair_count, cycle_second_stair_count)
        self.decay_step_size = _number("decay_step_size", decay_step_size)
        self.decay_lr_rate = _number("decay_lr_rate", decay_lr_rate)
        self.decay_mom_rate = _number("decay_mom_rate", decay_mom_rate, at_least=-math.inf)
        self.min_moms = _momenta(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = _momenta(optimizer, "cycle_max_mom", cycle_max_mom)
        self.cycle_momentum = _truth("cycle_momentum", cycle_momentum) and _has_betas(optimizer)
        super().__init__(optimizer, last_batch_iteration)

    def rates_after(self, updates: int) -> list[float]:
        """The rate of each parameter group for the update that follows so many."""
        if self._is_over(updates):
            fall = 1.0 + self.decay_lr_rate * self._decay_intervals(updates)
            return [rate / fall for rate in self.min_lrs]
        height = self._height(updates)
        return [
            least + (most - least) * height
            for least, most in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def momenta_after(self, updates: int) -> list[float]:
        """The momentum of each parameter group for the update that follows so many."""
        if not updates:
            return list(self.min_moms)
        if self._is_over(updates):
            growth = 1.0 + self.decay_mom_rate * self._decay_intervals(updates)
            return [min(max(0.0, m * growth), max(m, HIGHEST_MOMENTUM)) for m in self.max_moms]
        height = self._height(updates)
        return [
            most - (most - least) * height
            for least, most in zip(self.min_moms, self.max_moms, strict=True)
        ]

    def step(self, epoch: int | None = None) -> None:
        """Set the rates and momenta of the next update; called after each."""
        super().step(epoch)
        self._apply_momenta()

    def _apply(self) -> None:
        super()._apply()
        self._apply_momenta()

    def _apply_momenta(self) -> None:
        if not self.cycle_momentum:
            return
        momenta = self.momenta_after(self.last_epoch)
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
            group["betas"] = (momentum, CYCLED_BETA2)

    def _height(self, updates: int) -> float:
        return cycle_height(updates, sizes=self.sizes, stair_counts=self.stair_counts)

    def _is_over(self, updates: int) -> bool:
        return updates >= sum(self.sizes) + 1

    def _decay_intervals(self, updates: int) -> float:
        beyond = updates - sum(self.sizes)
        return beyond / self.decay_step_size if self.decay_step_size else 0.0


class LRRangeTest(ClosedFormLR):
    """A rate that grows for ever, to find out which one is too high.

    Args:
        optimizer: to steer.
        lr_range_test_min_lr: rate of the first update.
        lr_range_test_step_size: steps of an interval.
        lr_range_test_step_rate: share of the first rate that an interval adds.
        lr_range_test_staircase: whether it is added at the end of each interval, rather than in
            every step.
        last_batch_iteration: batches made so far less 1, to go on from there.

    Raises:
        ConfigError: a value that cannot work.
    """

    def __init__(  # noqa: PLR0913 - DeepSpeed's keys
        self,
        optimizer: torch.optim.Optimizer,
        *,
        lr_range_test_min_lr: PerGroup = 0.001,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _whole("lr_range_test_step_size", lr_range_test_step_size, at_least=1)
        self.step_rate = _number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = _truth("lr_range_test_staircase", lr_range_test_staircase)
        super().__init__(optimizer, last_batch_iteration)

    def rates_after(self, updates: int) -> list[float]:
        """The rate of each parameter group for the update that follows so many."""
        intervals = updates // self.step_size if self.staircase else updates / self.step_size
        growth = 1.0 + self.step_rate * intervals
        return [rate * growth for rate in self.min_lrs]


SCHEDULERS: Final[Mapping[str, type[ClosedFormLR]]] = MappingProxyType(
    {
        "LRRangeTest": LRRangeTest,
        "OneCycle": OneCycle,
        "WarmupLR": WarmupLR,
        "WarmupDecayLR": WarmupDecayLR,
        "WarmupCosineLR": WarmupCosineLR,
    }
)
"""By ``scheduler.type`` of the configuration."""


def scheduler_of(
    kind: str,
    optimizer: torch.optim.Optimizer,
    /,
    **params: Any,  # noqa: ANN401 - each kind has its own, and checks them
) -> ClosedFormLR:
    """Make the scheduler that a configuration asks for.

    Args:
        kind: ``scheduler.type``, a key of `SCHEDULERS`.
        optimizer: to steer.
        params: ``scheduler.params``.

    Raises:
        ConfigError: there is no such kind, or its parameters cannot work.
    """
    if kind not in SCHEDULERS:
        raise ConfigError(
            f"scheduler.type {kind!r} is not known{_nearest(str(kind), SCHEDULERS)}; it is one of "
            f"{', '.join(SCHEDULERS)}; another one is given to initialize() as lr_scheduler"
        )
    known = dict(inspect.signature(SCHEDULERS[kind]).parameters)
    del known["optimizer"]
    for key in params:
        if key not in known:
            raise ConfigError(
                f"scheduler.params.{key} is not a parameter of {kind}{_nearest(key, known)}; it "
                f"has {', '.join(known)}"
            )
    missing = [
        key
        for key, parameter in known.items()
        if parameter.default is inspect.Parameter.empty and key not in params
    ]
    if missing:
        raise ConfigError(f"{kind} needs scheduler.params.{' and '.join(missing)}; set it")
    return SCHEDULERS[kind](optimizer, **params)


# -- checks: each returns the value, or raises ConfigError


def _nearest(word: str, known: Mapping[str, object]) -> str:
    close = nearest(word, known)
    return f"; the nearest is {close!r}" if close else ""


def _finite(value: object) -> float | None:
    """A finite number, or None for anything else; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _number(key: str, value: object, *, at_least: float = 0.0, below: float = math.inf) -> float:
    number = _finite(value)
    if number is not None and at_least <= number < below:
        return number
    lower = f" of at least {at_least:g}" if at_least > -math.inf else ""
    upper = f" and below {below:g}" if below < math.inf else ""
    raise ConfigError(f"the scheduler's {key} is {value!r}; set a finite number{lower}{upper}")


def _whole(key: str, value: object, *, at_least: int) -> int:
    """Counts may be written as floats such as 1e4."""
    number = _finite(value)
    if number is not None and number.is_integer() and number >= at_least:
        return int(number)
    raise ConfigError(
        f"the scheduler's {key} is {value!r}; set a whole number that is at least {at_least}"
    )


def _truth(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ConfigError(f"the scheduler's {key} is {value!r}; set it to true or false")


def _per_group(
    optimizer: torch.optim.Optimizer, key: str, value: object, *, below: float = math.inf
) -> list[float]:
    """One number for each parameter group."""
    count = len(optimizer.param_groups)
    if not isinstance(value, (list, tuple)):
        return [_number(key, value, below=below)] * count
    if len(value) != count:
        raise ConfigError(
            f"the scheduler's {key} has {len(value)} values, and the optimizer has {count} "
            "parameter groups; give one value for each, or a single number for all"
        )
    return [_number(f"{key}[{index}]", each, below=below) for index, each in enumerate(value)]


def _momenta(optimizer: torch.optim.Optimizer, key: str, value: object) -> list[float]:
    return _per_group(optimizer, key, value, below=1.0)


def _initial_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The rates that the optimizer has, or had before its first scheduler."""
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


def _warmup_type(value: str) -> str:
    if value in WARMUP_TYPES:
        return value
    raise ConfigError(
        f"the scheduler's warmup_type is {value!r}; set it to {' or '.join(WARMUP_TYPES)}"
    )


def _warmup_steps(value: object) -> int:
    """A warmup of one step is one of two, as its logarithm would be zero."""
    steps = _whole("warmup_num_steps", value, at_least=0)
    return max(2, steps) if steps else 0


def _total_steps(value: object, warmup_steps: object) -> int:
    total = _whole("total_num_steps", value, at_least=1)
    warmup = _whole("warmup_num_steps", warmup_steps, at_least=0)
    if total < warmup:
        warnings.warn(
            f"the scheduler's total_num_steps {total} is below its warmup_num_steps {warmup}, so "
            "the rate falls to its lowest as soon as the warmup ends; raise the first or lower the "
            "second",
            TieringWarning,
            stacklevel=3,
        )
    return total


def _cycle_sizes(first: object, second: object) -> tuple[float, float]:
    up = _number("cycle_first_step_size", first)
    if not up:
        raise ConfigError(
            f"the scheduler's cycle_first_step_size is {first!r}; set a number above 0"
        )
    return up, up if second is None else _number("cycle_second_step_size", second)


def _stair_counts(first: object, second: object) -> tuple[int, int]:
    up = _whole("cycle_first_stair_count", first, at_least=0)
    if second is None:
        return up, up
    return up, _whole("cycle_second_stair_count", second, at_least=0)


def _has_betas(optimizer: torch.optim.Optimizer) -> bool:
    """Whether there is a momentum to cycle."""
    if all("betas" in group for group in optimizer.param_groups):
        return True
    warnings.warn(
        f"{type(optimizer).__name__} has no betas, so OneCycle leaves the momentum alone; set "
        "cycle_momentum to false, or take an optimizer of Adam's kind",
        TieringWarning,
        stacklevel=3,
    )
    return False
