"""The section ``activation_checkpointing``: what happens to the inputs of recomputed blocks."""

from __future__ import annotations

from typing import Annotated

from infinity.config.fields import Count, NoEffect, Section, given


class ActivationCheckpointing(Section):
    """``activation_checkpointing``: for blocks that the model itself recomputes in backward."""

    cpu_checkpointing: bool = False
    """The saved inputs of checkpointed blocks are kept in host memory until backward."""
    partition_activations: Annotated[
        bool,
        NoEffect(
            "it shares activations out over model-parallel ranks; all are data-parallel",
            given(False),
        ),
    ] = False
    number_checkpoints: Annotated[
        Count | None, NoEffect("the model's own checkpointing decides how many there are")
    ] = None
    contiguous_memory_optimization: Annotated[
        bool,
        NoEffect("it is for partitioned activations; torch's allocator places them", given(False)),
    ] = False
    synchronize_checkpoint_boundary: Annotated[
        bool, NoEffect("streams are ordered by events at every boundary", given(False))
    ] = False
    profile: Annotated[bool, NoEffect("use torch.profiler", given(False))] = False
