"""The section ``aio``: how the drive is driven."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from infinity.config.fields import NoEffect, Positive, Refused, Section, Whole, anything, given

_ONE_WORKER = NoEffect("one worker keeps a drive's queue full", met_by=anything)


class Aio(Section):
    """``aio``."""

    block_size: Annotated[Whole, Field(ge=4096)] = 2**20
    """Bytes of one transfer; a power of two."""
    queue_depth: Annotated[Whole, Field(ge=1, le=4096)] = 32
    """Transfers in flight."""
    intra_op_parallelism: Annotated[Positive, _ONE_WORKER] = 1
    thread_count: Annotated[Positive, _ONE_WORKER] = 1
    single_submit: Annotated[
        bool, NoEffect("as many transfers go in one system call as are ready", given(False))
    ] = False
    overlap_events: Annotated[
        bool, NoEffect("submission and completion always overlap", given(True))
    ] = True
    use_gds: Annotated[
        object, Refused("records pass through the host arena; leave it out", given(False))
    ] = False

    @model_validator(mode="after")
    def _block_is_power_of_two(self) -> Aio:
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        return self
