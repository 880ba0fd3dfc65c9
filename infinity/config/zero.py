"""The section ``zero_optimization``: what is partitioned, and where it lives."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator

from infinity.config.fields import (
    Auto,
    AutoSection,
    NoEffect,
    NullIsDefault,
    Number,
    Positive,
    Refused,
    Size,
    SizeOrNone,
    anything,
    given,
    whole,
)

DEFAULT_BUFFERS: Final = 5
"""``offload_param.buffer_count`` where only the size is given."""

OffloadDevice = Literal["none", "cpu", "nvme"]

_PINNED = NoEffect("the arena is pinned where the machine allows it", given(True))
_PLAIN_TRAVEL = Refused(
    "weights and gradients travel in their own type; leave it out", given(False)
)
_COLLECTIVES = "which collectives are used is settled"


class OffloadParam(AutoSection):
    """``zero_optimization.offload_param``: where the weights live; needs stage 3."""

    device: OffloadDevice = "none"
    """none: next to the compute; cpu: in the host arena; nvme: on the drive."""
    nvme_path: str | None = None
    """Folder on the drive; needed with nvme; made if missing."""
    pin_memory: Annotated[bool, _PINNED] = True
    buffer_count: Positive | Auto = "auto"
    """With buffer_size: room for weights on their way. auto: 5, as DeepSpeed has it."""
    buffer_size: Size | Auto = "auto"
    """Elements. Where `tiering.host_memory` is auto, so many times buffer_count of the weights have
    room on their way, and always as many as are needed at once; a parameter may be larger. auto:
    as many as are needed.
    """
    max_in_cpu: SizeOrNone | Auto = "auto"
    """Most elements of weights that stay in the arena and are not read again. Where
    `tiering.host_memory` is auto it grows by them; else they have what it leaves over. auto: all
    that it leaves over.
    """


class OffloadOptimizer(AutoSection):
    """``zero_optimization.offload_optimizer``: where masters and moments live; from stage 1 on."""

    device: OffloadDevice = "none"
    """none: next to the compute; cpu: in the host arena; nvme: on the drive."""
    nvme_path: str | None = None
    """Folder on the drive; needed with nvme; made if missing."""
    pin_memory: Annotated[bool, _PINNED] = True
    buffer_count: Positive | Auto = "auto"
    """Where `tiering.host_memory` is auto: tensors of a tile's size that have room on their way,
    four a tile, and always as many as are needed.
    """
    fast_init: Annotated[
        bool, NoEffect("the state is always written tile by tile", met_by=anything)
    ] = False
    pipeline_read: Annotated[bool, NoEffect("reads always run ahead", anything)] = False
    pipeline_write: Annotated[bool, NoEffect("writes always run behind", anything)] = False
    ratio: Annotated[
        object, Refused("all of the optimizer's state lives on one device; use 1.0", given(1))
    ] = 1.0
    super_offload: Annotated[
        object, Refused('use "device": "cpu", or tiering.update_in_backward', given(False))
    ] = False
    cpuadam_cores_perc: Annotated[
        Number, NoEffect("it is for super_offload; torch's number of threads holds", given(0.8))
    ] = 0.8


class LeafModule(AutoSection):
    """``zero_optimization.leaf_module``: modules whose parameters are gathered together."""

    classes: Annotated[
        object, NoEffect("units follow the model's lists; any order of use inside works", anything)
    ] = None
    names: Annotated[object, NoEffect("as for classes", met_by=anything)] = None
    name_suffixes: Annotated[object, NoEffect("as for classes", met_by=anything)] = None


class ZeroOptimization(AutoSection):
    """``zero_optimization``."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(whole)] = 0
    """What is partitioned over ranks and paged. 1: optimizer states; 2: and gradients; 3: and
    weights; 0: nothing.
    """
    offload_param: Annotated[OffloadParam, NullIsDefault] = OffloadParam()
    offload_optimizer: Annotated[OffloadOptimizer, NullIsDefault] = OffloadOptimizer()
    sub_group_size: Size | Auto = "auto"
    """Most elements of one optimizer tile; 524,288 at most, since larger ones only take room."""
    reduce_bucket_size: Annotated[
        Size | Auto,
        NoEffect("gradients are reduced unit by unit; see tiering.max_unit_numel", anything),
    ] = "auto"
    allgather_bucket_size: Annotated[
        Size | Auto,
        NoEffect("weights are gathered unit by unit; see tiering.max_unit_numel", anything),
    ] = "auto"
    stage3_prefetch_bucket_size: SizeOrNone | Auto = "auto"
    """Elements of weights fetched ahead, the last unit whole; 0: none. auto: as far as there is
    room.
    """
    contiguous_gradients: Annotated[
        bool, NoEffect("gradients are always contiguous", given(True))
    ] = True
    overlap_comm: Annotated[
        bool | None, NoEffect("reducing always goes on beside backward", given(True))
    ] = None
    reduce_scatter: Annotated[bool, NoEffect(_COLLECTIVES, given(True))] = True
    allgather_partitions: Annotated[bool, NoEffect(_COLLECTIVES, given(True))] = True
    use_multi_rank_bucket_allreduce: Annotated[bool, NoEffect(_COLLECTIVES, given(True))] = True
    round_robin_gradients: Annotated[
        bool, NoEffect("every rank copies the part of each gradient that is its own", given(False))
    ] = False
    compute_grad_norm: Annotated[bool, NoEffect("the norm is always known", given(True))] = True
    parameter_alignment: Annotated[
        bool, NoEffect("every parameter has tensors of its own", given(False))
    ] = False
    ignore_unused_parameters: Annotated[
        bool, NoEffect("a parameter without a gradient is left as it is", given(True))
    ] = True
    load_from_fp32_weights: Annotated[
        bool, NoEffect("there are no checkpoints to load yet", given(True))
    ] = True
    elastic_checkpoint: Annotated[
        bool, NoEffect("there are no checkpoints to save yet", given(False))
    ] = False
    pipeline_loading_checkpoint: Annotated[
        bool, NoEffect("there are no checkpoints to load yet", given(False))
    ] = False
    legacy_stage1: Annotated[bool, NoEffect("there is one stage 1", given(False))] = False
    enable_sanity_checks: Annotated[
        bool, NoEffect("what can be checked always is", met_by=anything)
    ] = False
    log_trace_cache_warnings: Annotated[
        bool, NoEffect("engine.stats() tells how often the order of use changed", given(False))
    ] = False
    memory_efficient_linear: Annotated[
        bool, NoEffect("torch's own linear keeps no gathered weight", given(True))
    ] = True
    override_module_apply: Annotated[
        bool, NoEffect("Module.apply sees ordinary parameters", met_by=anything)
    ] = True
    cpu_offload_use_pin_memory: Annotated[bool, _PINNED] = True
    leaf_module: Annotated[LeafModule, NullIsDefault] = LeafModule()
    stage3_param_persistence_threshold: Annotated[
        SizeOrNone | Auto,
        NoEffect("small parameters travel with their unit, at no transfer of their own", anything),
    ] = "auto"
    stage3_model_persistence_threshold: Annotated[
        SizeOrNone | Auto,
        NoEffect("small parameters travel with their unit", anything),
    ] = "auto"
    stage3_max_live_parameters: Annotated[
        SizeOrNone | Auto, NoEffect("a unit is live only while it is used", given(10**9))
    ] = "auto"
    stage3_max_reuse_distance: Annotated[
        SizeOrNone | Auto, NoEffect("what is used farthest in the future goes first", given(10**9))
    ] = "auto"
    stage3_module_granularity_threshold: Annotated[
        SizeOrNone | Auto, NoEffect("units are made of the model's lists and blocks", given(0))
    ] = "auto"
    stage3_use_all_reduce_for_fetch_params: Annotated[
        bool, NoEffect(_COLLECTIVES, given(False))
    ] = False
    stage3_allgather_sequential: Annotated[bool, NoEffect(_COLLECTIVES, given(False))] = False
    stage3_gather_16bit_weights_on_model_save: Annotated[
        bool, NoEffect("engine.module.state_dict() has whole weights in any case", met_by=anything)
    ] = False
    save_muon_momentum_buffer_in_memory: Annotated[
        bool, NoEffect("there is no Muon", given(False))
    ] = False
    zero_hpz_partition_size: Annotated[
        object, Refused("weights are partitioned once, over all ranks; use 1", given(0, 1))
    ] = 1
    zero_quantized_weights: Annotated[object, _PLAIN_TRAVEL] = False
    zero_quantized_nontrainable_weights: Annotated[object, _PLAIN_TRAVEL] = False
    zero_quantized_gradients: Annotated[object, _PLAIN_TRAVEL] = False
    zeropp_loco_param: Annotated[object, _PLAIN_TRAVEL] = None
    mics_shard_size: Annotated[
        object, Refused("weights are partitioned over all ranks; leave it out", given(-1))
    ] = -1
    mics_hierarchical_params_gather: Annotated[
        object, Refused("weights are partitioned over all ranks; leave it out", given(False))
    ] = False
    zenflow: Annotated[
        object,
        Refused(
            "every gradient counts in every update; tiering.update_in_backward hides the update",
            keys=(
                *("topk_ratio", "select_strategy", "select_interval", "update_interval"),
                *("overlap_step", "offload", "auto_ratio", "full_warm_up_rounds"),
                *("pt_reserved_cores_perc", "steps_per_epoch"),
            ),
        ),
    ] = None
