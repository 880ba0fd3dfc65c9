"""What DeepSpeed's schema has beyond the training that this engine does.

Sections here are not looked into. Switched off they pass; switched on, one that would only make
another thing of the same training has no effect, and one that would train differently is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from infinity.config.fields import NoEffect, Refused, Section, anything, given, off

_REMOVED = "DeepSpeed itself has removed it; leave the section out"
_ELASTIC = "set the batch sizes themselves: any two of train_batch_size and its two factors"
_NO_TENSOR_PARALLELISM = "all ranks are data-parallel; leave it out"
_NO_PIPELINE = "it is for pipeline modules, which are not taken"
_NO_CHECKPOINTS = "there are no checkpoints yet"


def _one_part(value: object) -> bool:
    """Tensor parallelism over one rank is none."""
    if not isinstance(value, Mapping):
        return False
    inner = value.get("tensor_parallel", value.get("tp"))
    size = inner.get("tp_size", 1) if isinstance(inner, Mapping) else 1
    return value.get("autotp_size", 0) in (0, 1) and size == 1


def _eager(value: object) -> bool:
    """The section of torch.compile with its passes switched off."""
    return isinstance(value, Mapping) and not (
        value.get("deepcompile") or value.get("autoep_non_moe")
    )


class Elsewhere(Section):
    """Other things than this training."""

    checkpoint: Annotated[
        dict[str, object] | None,
        NoEffect(
            _NO_CHECKPOINTS,
            keys=(
                *("tag_validation", "load_universal", "use_node_local_storage", "parallel_write"),
                *("parallel_write.pipeline_stage", "checkpoint_serialization", "writer"),
                *("writer.type", "writer.decoupled", "writer.io_buffer_size"),
                *("writer.io_buffer_double", "writer.show_statistics", "writer.data_parallel"),
                "writer.io_multiplier",
            ),
        ),
    ] = None
    datastates_ckpt: Annotated[object, NoEffect(_NO_CHECKPOINTS, met_by=off)] = None
    disable_python_gc: Annotated[bool, NoEffect("call gc.disable() yourself", given(False))] = False
    vocabulary_size: Annotated[
        int | None, NoEffect("the model knows its vocabulary", met_by=anything)
    ] = None
    seq_parallel_communication_data_type: Annotated[
        str | None, NoEffect("there is no sequence parallelism")
    ] = None
    use_data_before_expert_parallelism: Annotated[
        bool, NoEffect("there is no expert parallelism", given(False))
    ] = False
    pipeline: Annotated[
        dict[str, object] | None,
        NoEffect(
            _NO_PIPELINE,
            keys=(
                *("stages", "partition", "seed_layers", "activation_checkpoint_interval"),
                *("pipe_partitioned", "grad_partitioned"),
            ),
        ),
    ] = None
    autotuning: Annotated[
        object,
        Refused(
            'sizes that are "auto" are worked out, and aio_bench sweep finds the aio section',
            off,
            keys=(
                *("enabled", "fast", "results_dir", "exps_dir", "overwrite", "start_profile_step"),
                *("end_profile_step", "metric", "metric_path", "tuner_type", "arg_mappings"),
                *("tuner_early_stopping", "tuner_num_trials", "model_info", "model_info_path"),
                *("model_info.profile", "model_info.num_params", "model_info.hidden_size"),
                *("model_info.num_layers", "mp_size", "max_train_batch_size"),
                *("min_train_batch_size", "max_train_micro_batch_size_per_gpu"),
                *("min_train_micro_batch_size_per_gpu", "num_tuning_micro_batch_sizes"),
            ),
        ),
    ] = None
    torch_autocast: Annotated[
        object,
        Refused(
            'use "bf16" or "fp16": {"enabled": true}, or torch.autocast around the forward',
            off,
            keys=("enabled", "dtype", "lower_precision_safe_modules"),
        ),
    ] = None
    amp: Annotated[
        object,
        Refused('use "bf16" or "fp16": {"enabled": true}', off, keys=("enabled", "opt_level")),
    ] = None
    sparse_gradients: Annotated[
        object, Refused("gradients are dense; leave it out", given(False))
    ] = False
    tensor_parallel: Annotated[
        object,
        Refused(
            _NO_TENSOR_PARALLELISM,
            _one_part,
            keys=(
                *("autotp_size", "dtype", "tp_overlap_comm", "vocab_parallel_lm_head"),
                *("vocab_parallel_ce_backend", "tensor_parallel", "tp", "injection_policy_tuple"),
                *("tensor_parallel.tp_size", "tensor_parallel.tp_grain_size"),
                *("tensor_parallel.mpu", "tensor_parallel.tp_group", "partition_config"),
                *("preset_model", "keep_module_on_host", "replace_with_kernel_inject"),
                "kernel_inject",
            ),
        ),
    ] = None
    expert_parallel: Annotated[
        object,
        Refused(
            "experts are parameters like others; leave it out",
            off,
            keys=(
                *("enabled", "autoep_size", "expert_tensor_parallel_size", "preset_model"),
                *("validate_folding_routing", "async_split_plan", "moe_layer_pattern"),
                *("expert_pattern", "router_pattern", "use_grouped_mm", "route_norm"),
                *("disable_triton_grouped_mm", "route_scale", "score_apply", "combine_impl"),
                *("row_weighting_impl", "gate_up_impl", "comm_backend", "comm_num_sm"),
                *("comm_qp_margin", "comm_max_tokens_per_rank", "num_expert_groups", "top_k"),
                *("num_limited_groups", "score_func", "load_balance_coeff", "expert_activation"),
                *("routed_scaling_factor", "expert_w1", "expert_w2", "expert_w3"),
                *("num_experts_attr", "top_k_attr", "has_shared_experts"),
                *("shared_experts_pattern", "shared_experts_gate_pattern"),
            ),
        ),
    ] = None
    sequence_parallel_size: Annotated[object, Refused(_NO_TENSOR_PARALLELISM, given(1))] = None
    data_parallel_size: Annotated[object, Refused("it is the number of ranks")] = None
    compile: Annotated[
        object,
        Refused(
            "compile the model's blocks yourself with torch.compile",
            _eager,
            keys=(
                *("deepcompile", "autoep_non_moe", "free_activation", "free_activation_threshold"),
                *("offload_activation", "offload_activation_pin_memory", "offload_opt_states"),
                *("double_buffer", "symmetric_memory", "debug_log", "offload_parameters"),
                *("sync_before_reduce", "sync_after_reduce", "sync_before_allgather"),
                *("sync_after_allgather", "keep_int_input_tensors", "keep_all_input_tensors"),
                "passes",
            ),
        ),
    ] = None
    hybrid_engine: Annotated[
        object,
        Refused(
            "training and generation share one forward; leave it out",
            off,
            keys=(
                *("enabled", "max_out_tokens", "inference_tp_size", "release_inference_cache"),
                *("pin_parameters", "tp_gather_partition_size", "enable_cuda_graph"),
            ),
        ),
    ] = None
    weight_quantization: Annotated[
        object,
        Refused(
            "weights are stored as fp32, bf16 or fp16",
            off,
            keys=(
                *("enabled", "num_bits", "q_type", "q_groups", "quantized_initialization"),
                "post_init_quant",
            ),
        ),
    ] = None
    data_efficiency: Annotated[
        object,
        Refused(
            "choose and order samples in your own data loader",
            off,
            keys=(
                *("enabled", "seed", "data_sampling", "data_sampling.enabled"),
                *("data_sampling.num_epochs", "data_sampling.num_workers"),
                *("data_sampling.pin_memory", "data_sampling.curriculum_learning"),
                "data_sampling.curriculum_learning.enabled",
                "data_sampling.dynamic_batching",
                *(
                    f"data_sampling.dynamic_batching.{key}"
                    for key in (
                        *("enabled", "metrics_path", "lr_scaling_method", "min_batch_size"),
                        *("max_batch_size", "sequence_picking_order", "max_tokens", "verbose"),
                    )
                ),
                *("data_routing", "data_routing.enabled", "data_routing.random_ltd"),
                "data_routing.random_ltd.enabled",
            ),
        ),
    ] = None
    curriculum_learning: Annotated[
        object, Refused("order samples in your own data loader", off, keys=("enabled",))
    ] = None
    elasticity: Annotated[object, Refused(_ELASTIC, off, keys=("enabled",))] = None
    compression_training: Annotated[object, Refused(_REMOVED, off)] = None
    progressive_layer_drop: Annotated[object, Refused(_REMOVED, off, keys=("enabled",))] = None
    quantize_training: Annotated[object, Refused(_REMOVED, off, keys=("enabled",))] = None
    eigenvalue: Annotated[object, Refused(_REMOVED, off, keys=("enabled",))] = None
    sparse_attention: Annotated[object, Refused(_REMOVED)] = None
    graph_harvesting: Annotated[object, Refused(_REMOVED, given(False))] = False
    nebula: Annotated[object, Refused(_NO_CHECKPOINTS, off, keys=("enabled",))] = None
