"""The section ``scheduler``: one of five types, each with parameters of its own.

Names and defaults of the parameters are those of DeepSpeed's classes, so they can be passed on as
keyword arguments; "auto" is for a trainer to fill in.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from infinity.config.fields import Auto, Count, Number, Positive, Section, SizeOrNone, Whole


def _group_rates(value: object) -> object:
    """A list has a rate for each group."""
    return tuple(value) if isinstance(value, list) else value


Rate = Annotated[Number | tuple[Number, ...], BeforeValidator(_group_rates)]
WarmupType = Literal["log", "linear"]


class _Params(Section):
    last_batch_iteration: Annotated[Whole, Field(ge=-1)] = -1
    """Steps taken before, less one."""


class WarmupLRParams(_Params):
    """``scheduler.params`` of WarmupLR: from the least rate to the greatest, which then stays."""

    warmup_min_lr: Rate | Auto = 0.0
    """Rate at the start; a list has one for each group."""
    warmup_max_lr: Rate | Auto | None = None
    """Rate after the warm-up. None: the optimizer's."""
    warmup_num_steps: Count | Auto = 1000
    """Steps of the warm-up; 0: none."""
    warmup_type: WarmupType = "log"
    """How the rate rises."""


class WarmupDecayLRParams(_Params):
    """``scheduler.params`` of WarmupDecayLR: then down to zero in a straight line."""

    total_num_steps: Positive | Auto
    """Steps of the whole training; required."""
    warmup_min_lr: Rate | Auto = 0.0
    """Rate at the start; a list has one for each group."""
    warmup_max_lr: Rate | Auto = 1e-3
    """Rate after the warm-up."""
    warmup_num_steps: Count | Auto = 1000
    """Steps of the warm-up; 0: none."""
    warmup_type: WarmupType = "log"
    """How the rate rises."""


class WarmupCosineLRParams(_Params):
    """``scheduler.params`` of WarmupCosineLR: parts of the optimizer's rate, then down a cosine."""

    total_num_steps: Positive | Auto
    """Steps of the whole training; required."""
    warmup_min_ratio: Number | Auto = 0.0
    """Part of the rate at the start."""
    warmup_num_steps: Count | Auto = 1000
    """Steps of the warm-up; 0: none."""
    cos_min_ratio: Number | Auto = 1e-4
    """Part of the rate at the end."""
    warmup_type: WarmupType = "log"
    """How the rate rises."""


class OneCycleParams(_Params):
    """``scheduler.params`` of OneCycle: up, down, and a decay."""

    cycle_min_lr: Rate | Auto
    """Rate at both ends of the cycle; required."""
    cycle_max_lr: Rate | Auto
    """Rate at its top; required."""
    decay_lr_rate: Number = 0.0
    """How fast the rate falls after the cycle."""
    cycle_first_step_size: Positive = 2000
    """Steps up."""
    cycle_second_step_size: SizeOrNone | None = None
    """Steps down. None: as many as up."""
    cycle_first_stair_count: Count = 0
    """Stairs on the way up; 0: none."""
    cycle_second_stair_count: Count | None = None
    """Stairs on the way down. None: as many as up."""
    decay_step_size: Count = 0
    """Steps of a stair of the decay; 0: no decay."""
    cycle_momentum: bool = True
    """The first beta goes the other way round."""
    cycle_min_mom: Annotated[Number, Field(lt=1)] = 0.8
    """First beta at the top of the cycle."""
    cycle_max_mom: Annotated[Number, Field(lt=1)] = 0.9
    """First beta at its ends."""
    decay_mom_rate: Number = 0.0
    """How fast it rises after the cycle."""


class LRRangeTestParams(_Params):
    """``scheduler.params`` of LRRangeTest: up and up, to see which rate is too much."""

    lr_range_test_min_lr: Rate | Auto = 1e-3
    """Rate at the start."""
    lr_range_test_step_size: Positive = 2000
    """Steps between two raises."""
    lr_range_test_step_rate: Number = 1.0
    """What a raise adds, as a part of the rate at the start."""
    lr_range_test_staircase: bool = False
    """True: the rate rises in stairs."""


class WarmupLR(Section):
    """``scheduler`` of type WarmupLR."""

    type: Literal["WarmupLR"]
    params: WarmupLRParams = WarmupLRParams()


class WarmupDecayLR(Section):
    """``scheduler`` of type WarmupDecayLR."""

    type: Literal["WarmupDecayLR"]
    params: WarmupDecayLRParams


class WarmupCosineLR(Section):
    """``scheduler`` of type WarmupCosineLR."""

    type: Literal["WarmupCosineLR"]
    params: WarmupCosineLRParams


class OneCycle(Section):
    """``scheduler`` of type OneCycle."""

    type: Literal["OneCycle"]
    params: OneCycleParams


class LRRangeTest(Section):
    """``scheduler`` of type LRRangeTest."""

    type: Literal["LRRangeTest"]
    params: LRRangeTestParams = LRRangeTestParams()


Scheduler = Annotated[
    WarmupLR | WarmupDecayLR | WarmupCosineLR | OneCycle | LRRangeTest, Field(discriminator="type")
]
