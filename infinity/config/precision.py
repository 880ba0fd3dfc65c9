"""Types of weights and gradients, and the scale of a 16-bit loss."""

from __future__ import annotations

from typing import Annotated

from infinity.config.fields import (
    Auto,
    AutoSection,
    Count,
    Factor,
    FloatType,
    NoEffect,
    Number,
    Positive,
    Refused,
    Section,
    anything,
    given,
)

_MASTERS = "master weights and moments are fp32 always; move them with offload_optimizer instead"


class Bf16(AutoSection):
    """``bf16``: weights and gradients in bf16."""

    enabled: bool | Auto = False
    """Weights are stored as bf16, gradients rounded to bf16, the update done on fp32 master
    weights. auto: on if the model's own weights are bf16.
    """
    check_grad_overflow: bool | None = None
    """True: a step with a gradient that is not finite is skipped. None: what
    `tiering.nonfinite_gradients` says (DeepSpeed's default is true).
    """
    immediate_grad_update: Annotated[
        bool, NoEffect("gradients are reduced as soon as they are complete", met_by=anything)
    ] = False
    bf16_master_weights_and_grads: Annotated[object, Refused(_MASTERS, given(False))] = False
    bf16_optimizer_states: Annotated[object, Refused(_MASTERS, given(False))] = False


class Fp16(AutoSection):
    """``fp16``: weights and gradients in fp16, with a scaled loss."""

    enabled: bool | Auto = False
    """Weights are stored as fp16, the loss is scaled, the update done on fp32 master weights; a
    step with a gradient that is not finite is skipped. auto: on if the model's own weights are
    fp16.
    """
    auto_cast: bool = False
    """Floating inputs of the model are cast to fp16."""
    loss_scale: Number = 0.0
    """Factor of the loss; 0: it is found while training."""
    initial_scale_power: Count = 16
    """A found scale starts at two to this power."""
    loss_scale_window: Positive = 1000
    """Steps without overflow after which a found scale is doubled."""
    hysteresis: Positive = 2
    """Overflows after which a found scale is halved."""
    consecutive_hysteresis: bool = False
    """A step without overflow starts the count of `hysteresis` anew."""
    min_loss_scale: Factor = 1.0
    """A found scale is never smaller."""
    fp16_master_weights_and_grads: Annotated[object, Refused(_MASTERS, given(False))] = False


class DataTypes(Section):
    """``data_types``."""

    grad_accum_dtype: FloatType | None = None
    """Type in which the gradients of several micro-batches are summed. None: fp32, and with one
    micro-batch a step the type of the weights.
    """
    param_dtype: Annotated[
        object, Refused('say "bf16" or "fp16": {"enabled": true}, or tiering.compute_dtype')
    ] = None
    buffer_dtype: Annotated[
        object, Refused("buffers keep the type they have; cast them before initialize()")
    ] = None
    keep_in_fp32_modules: Annotated[
        list[str] | Auto, NoEffect("buffers keep the type they have", met_by=anything)
    ] = "auto"
