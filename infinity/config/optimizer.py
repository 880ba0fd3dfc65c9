"""The section ``optimizer``; a file gives the same training as it does in DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from infinity.config.fields import (
    Auto,
    NoEffect,
    Number,
    Refused,
    Section,
    anything,
    given,
)
from infinity.config.spelling import did_you_mean, nearest
from tiering.errors import ConfigError

TORCH_DECOUPLED_DECAY: Final = 0.01
"""torch's default for AdamW."""

Beta = Annotated[Number, Field(lt=1)]


def _type(value: object) -> object:
    """In any case; others are refused by name."""
    names = {"adam": "Adam", "adamw": "AdamW"}
    if not isinstance(value, str):
        return value
    if value.lower() not in names:
        kernel = value.lower().removeprefix("deepspeed").removeprefix("fused").removeprefix("cpu")
        if kernel in names:
            hint = f"; write {names[kernel]!r}"
        else:
            hint = did_you_mean(nearest(value, names.values())) or ", whose state is not paged yet"
        raise ValueError(f"there are 'Adam' and 'AdamW', got {value!r}{hint}")
    return names[value.lower()]


class AdamSettings(NamedTuple):
    """What the update needs; all of it known."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    """Decay of the weights themselves, as AdamW has it, not of the gradients."""
    fused: bool


class AdamParams(Section):
    """``optimizer.params`` of Adam and AdamW; "auto" is for a trainer to fill in."""

    lr: Number | Auto = 1e-3
    """Learning rate."""
    betas: tuple[Beta, Beta] | Auto = (0.9, 0.999)
    """Decay of the two moments."""
    eps: Number | Auto = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Number | Auto | None = None
    """None: 0, as DeepSpeed's own kernels have it; with `torch_adam`, torch's default: 0.01 for
    decoupled decay, else 0.
    """
    adam_w_mode: bool = True
    """With type Adam: decoupled decay as in AdamW, which is DeepSpeed's default. False: decay is
    added to the gradients. Type AdamW is always decoupled.
    """
    torch_adam: bool = False
    """The update is torch's own in any case. True: so is the default of `weight_decay`."""
    fused: bool = False
    """True: torch's fused kernel, which is faster and differs from the default one in the last bit.
    """
    foreach: Annotated[bool | None, NoEffect("the update goes tile by tile", met_by=anything)] = (
        None
    )
    set_grad_none: Annotated[
        bool, NoEffect("gradients are None after a step", met_by=given(True))
    ] = True
    bias_correction: Annotated[object, Refused("it is always on", given(True))] = True
    amsgrad: Annotated[
        object, Refused("its third state is not paged; leave it out", given(False))
    ] = False
    fp32_optimizer_states: Annotated[
        object, Refused("moments are fp32; move them with offload_optimizer", given(True))
    ] = True
    max_grad_norm: Annotated[object, Refused("use gradient_clipping, beside optimizer")] = None


class Optimizer(Section):
    """``optimizer``."""

    type: Annotated[Literal["Adam", "AdamW"], BeforeValidator(_type)] = "AdamW"
    """In small or large letters. Adam decouples decay as well, unless `adam_w_mode` is false."""
    params: AdamParams = AdamParams()
    legacy_fusion: Annotated[bool, NoEffect("there is one way of updating", given(False))] = False

    def settings(self) -> AdamSettings:
        """What the update needs.

        Raises:
            ConfigError: something is "auto".
        """
        params = self.params
        decay = params.weight_decay
        decoupled = self.type == "AdamW" or params.adam_w_mode
        if decay is None:
            decay = TORCH_DECOUPLED_DECAY if params.torch_adam and decoupled else 0.0
        if params.lr == "auto" or params.betas == "auto" or params.eps == "auto" or decay == "auto":
            raise ConfigError('optimizer.params has "auto", which only a trainer can fill in')
        return AdamSettings(params.lr, params.betas, params.eps, decay, decoupled, params.fused)

    def remarks(self) -> Iterator[str]:
        """DeepSpeed's AdamW does not look at adam_w_mode."""
        if self.type == "AdamW" and not self.params.adam_w_mode:
            yield (
                "optimizer.params.adam_w_mode: false has no effect with type AdamW, as in "
                "DeepSpeed; for decay in the gradients use type Adam"
            )
