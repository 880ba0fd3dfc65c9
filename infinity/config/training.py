"""Keys at the top of the file that say how gradients and steps are made."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from infinity.config.fields import (
    Auto,
    Factor,
    FloatType,
    NoEffect,
    Number,
    Refused,
    Section,
    anything,
    given,
)


def _comm_type(value: object) -> object:
    """In any case; bfp16 is an older name of bf16."""
    name = value.lower() if isinstance(value, str) else value
    return "bf16" if name == "bfp16" else name


class Training(Section):
    """How gradients and steps are made."""

    gradient_clipping: Number | Auto = 1.0
    """Largest global norm of the gradients; 0 or auto: no clipping. Left out it is 1.0, as in
    DeepSpeed.
    """
    communication_data_type: Annotated[FloatType | None, BeforeValidator(_comm_type)] = None
    """Type in which gradients are reduced over ranks. None: their own."""
    prescale_gradients: bool = False
    """True: gradients are divided by the number of ranks before they are summed over them. False:
    by `gradient_predivide_factor` before, and by the rest of that number behind.
    """
    gradient_predivide_factor: Factor = 1.0
    """See `prescale_gradients`."""
    gradient_allreduce_op: Annotated[
        object, Refused("gradients are averaged over ranks; multiply the loss", given("mean"))
    ] = "mean"
    managed_gradient_accumulation: Annotated[
        object, Refused("step() counts micro-batches; set gradient_accumulation_steps", given(True))
    ] = True
    dataloader_drop_last: bool = False
    """The data loader leaves out the last batch if it is smaller than the others."""
    disable_allgather: Annotated[
        bool, NoEffect("updated weights are gathered when they are used", given(False))
    ] = False
    zero_allow_untested_optimizer: Annotated[
        bool, NoEffect("torch's Adam and AdamW are taken, others refused", met_by=anything)
    ] = False
    zero_force_ds_cpu_optimizer: Annotated[
        bool, NoEffect("the update is always our own, on pages of the state", met_by=anything)
    ] = True
