"""Names of keys in DeepSpeed sections that are inactive or refused as a whole, so that a misspelled key is found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zero._config.keys import key

INERT_NAMES: dict[str, tuple[str, ...]] = {
    "checkpoint": (
        *("tag_validation", "load_universal", "use_node_local_storage", "checkpoint_serialization"),
        *("parallel_write.pipeline_stage", "writer.type", "writer.decoupled", "writer.io_buffer_size"),
        *("writer.io_buffer_double", "writer.show_statistics", "writer.data_parallel", "writer.io_multiplier"),
    ),
    "flops_profiler": (
        *("enabled", "profile_step", "module_depth", "top_modules", "detailed", "output_file", "recompute_fwd_factor"),
    ),
    "timers": ("throughput.enabled", "throughput.synchronized"),
    "tensorboard": ("enabled", "output_path", "job_name"),
    "wandb": ("enabled", "group", "team", "project"),
    "comet": (
        *("enabled", "samples_log_interval", "project", "workspace", "api_key", "experiment_name", "experiment_key"),
        *("online", "mode"),
    ),
    "csv_monitor": ("enabled", "output_path", "job_name"),
    "nebula": (
        *("enabled", "persistent_storage_path", "persistent_time_interval", "num_of_version_in_retention"),
        *("enable_nebula_load", "load_path"),
    ),
}
"""Names that each inactive section may have; a dot leads into an inner object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommsLogger:
    """``comms_logger``."""

    enabled: bool = key(
        False,
        "the engine's first rank prints what it has sent, by operation, format and link class: every steps_per_print "
        "steps, and in destroy()",
        false="off",
    )
    verbose: bool = key(False, "print after each step, for it alone", false="see enabled", active_if="comms_logger")
    prof_all: bool = key(True, "print all operations", false="print those of prof_ops", active_if="comms_logger")
    prof_ops: tuple[str, ...] = key(
        (),
        "operations to print unless prof_all: all_gather, reduce_scatter, all_reduce, all_to_all, control",
        active_if="comms_logger",
    )
    debug: bool = key(False, "-", false="the same as true", inactive="DeepSpeed only: a log of callers")


def _under(outer: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{outer}.{name}" for name in names)


SCHEDULE = ("total_curriculum_step", "difficulty_step", "root_degree", "difficulty", "max_step")
OFFSETS = ("enabled", "schedule_offset")
GROUPS = ("different_groups",)  # users choose the names in it
PRUNING = (*_under("shared_parameters", (*OFFSETS, "method")), *GROUPS)
MIXED = ("fp16_mixed_quantize.enabled", "fp16_mixed_quantize.quantize_change_ratio")

REFUSED_NAMES: dict[str, tuple[str, ...]] = {
    "amp": (
        *("enabled", "opt_level", "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights"),
        *("loss_scale", "cast_model_outputs", "num_losses", "verbosity", "min_loss_scale", "max_loss_scale"),
    ),
    "elasticity": (
        *("enabled", "max_train_batch_size", "micro_batch_sizes", "min_gpus", "max_gpus", "min_time", "version"),
        *("prefer_large_batch", "prefer_larger_batch", "ignore_non_elastic_batch_info", "num_gpus_per_node"),
        "model_parallel_size",
    ),
    "autotuning": (
        *("enabled", "fast", "results_dir", "exps_dir", "overwrite", "metric", "metric_path", "start_profile_step"),
        *("end_profile_step", "max_train_batch_size", "min_train_batch_size", "max_train_micro_batch_size_per_gpu"),
        *("min_train_micro_batch_size_per_gpu", "num_tuning_micro_batch_sizes", "mp_size", "tuner_type"),
        *("tuner_early_stopping", "tuner_num_trials", "arg_mappings", "model_info", "model_info_path"),
    ),
    "compression_training": (
        *_under(
            "layer_reduction",
            ("enabled", "keep_number_layer", "module_name_prefix", "teacher_layer", "other_module_name"),
        ),
        *_under(
            "weight_quantization.shared_parameters",
            (
                *(*OFFSETS, "quantizer_kernel", "quantize_groups", "quantize_verbose", "quantization_type", "rounding"),
                *("quantize_weight_in_forward", *MIXED),
            ),
        ),
        *_under("weight_quantization", GROUPS),
        *_under("activation_quantization.shared_parameters", (*OFFSETS, "quantization_type", "range_calibration")),
        *_under("activation_quantization", GROUPS),
        *_under(
            "sparse_pruning.shared_parameters",
            ("schedule_offset_end", "schedule_offset_stride", "block_pattern", "dense_ratio", "excluded_modules"),
        ),
        *_under("sparse_pruning", PRUNING),
        *_under("row_pruning", PRUNING),
        *_under("head_pruning", (*PRUNING, "shared_parameters.num_heads")),
        *_under("channel_pruning", PRUNING),
    ),
    "data_efficiency": (
        *("enabled", "seed", "data_sampling.enabled", "data_sampling.num_epochs", "data_sampling.num_workers"),
        "data_sampling.pin_memory",
        *_under("data_sampling.curriculum_learning", ("enabled", "data_cluster_path", "curriculum_metrics")),
        *_under(
            "data_sampling.dynamic_batching",
            (
                *("enabled", "metrics_path", "lr_scaling_method", "min_batch_size", "max_batch_size"),
                *("sequence_picking_order", "dataloader", "max_tokens", "verbose"),
            ),
        ),
        "data_routing.enabled",
        *_under(
            "data_routing.random_ltd",
            (
                *("enabled", "total_layer_num", "random_ltd_layer_num", "random_ltd_layer_id", "model_mask_name"),
                *("model_type", "hidden_state_order", "global_batch_size", "micro_batch_size"),
                *_under("random_ltd_schedule", ("min_value", "max_value", "schedule_type")),
                *_under("random_ltd_schedule.schedule_config", ("require_steps", "seq_per_step")),
                *_under("layer_token_lr_schedule", ("enabled", "total_layer_tokens", "warmup_type")),
                "layer_token_lr_schedule.warmup_layer_tokens",
            ),
        ),
    ),
    "curriculum_learning": (
        *("enabled", "curriculum_type", "min_difficulty", "max_difficulty", "schedule_type"),
        *_under("schedule_config", SCHEDULE),
    ),
    "progressive_layer_drop": ("enabled", "theta", "gamma"),
    "eigenvalue": (
        *("enabled", "verbose", "max_iter", "tol", "stability", "gas_boundary_resolution", "layer_name", "layer_num"),
    ),
    "quantize_training": (
        *("enabled", "quantize_verbose", "quantizer_kernel", "quantize_groups", "quantize_algo.q_type"),
        *("quantize_algo.rounding", "quantize_bits.start_bits", "quantize_bits.target_bits"),
        *("quantize_schedule.quantize_period", "quantize_schedule.schedule_offset", *MIXED),
    ),
    "weight_quantization": (
        *_under("quantized_initialization", ("num_bits", "group_size", "group_dim", "symmetric")),
        "post_init_quant",
    ),
    "sparse_attention": (
        *("mode", "block", "different_layout_per_head", "num_local_blocks", "num_global_blocks", "attention"),
        *("horizontal_global_attention", "num_different_global_patterns", "num_random_blocks", "local_window_blocks"),
        *("global_block_indices", "global_block_end_indices", "num_sliding_window_blocks"),
    ),
    "tensor_parallel": (
        *("autotp_size", "preset_model", "tp_overlap_comm", "dtype", "injection_policy_tuple", "keep_module_on_host"),
        *("replace_with_kernel_inject", "kernel_inject", "partition_config.use_default_specs"),
        *("partition_config.layer_specs", *_under("tp", ("tp_size", "tp_grain_size"))),
        *_under("tensor_parallel", ("tp_size", "tp_grain_size")),
    ),
    "expert_parallel": (
        *("enabled", "autoep_size", "expert_tensor_parallel_size", "validate_folding_routing", "preset_model"),
        *("moe_layer_pattern", "expert_pattern", "router_pattern", "use_grouped_mm", "disable_triton_grouped_mm"),
        *("route_norm", "route_scale", "score_apply", "combine_impl", "num_expert_groups", "num_limited_groups"),
        *("score_func", "top_k", "load_balance_coeff", "routed_scaling_factor", "expert_w1", "expert_w2", "expert_w3"),
        *("num_experts_attr", "top_k_attr", "has_shared_experts", "shared_experts_pattern"),
        "shared_experts_gate_pattern",
    ),
    "pipeline": (
        *("stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned"),
        *("grad_partitioned", "use_reentrant"),
    ),
    "hybrid_engine": (
        *("enabled", "max_out_tokens", "inference_tp_size", "release_inference_cache", "pin_parameters"),
        *("tp_gather_partition_size", "enable_cuda_graph"),
    ),
    "compile": (
        *("deepcompile", "passes", "free_activation", "free_activation_threshold", "offload_activation"),
        *("offload_activation_pin_memory", "offload_opt_states", "double_buffer", "symmetric_memory", "debug_log"),
        *("offload_parameters", "sync_before_reduce", "sync_after_reduce", "sync_before_allgather"),
        *("sync_after_allgather", "keep_int_input_tensors", "keep_all_input_tensors"),
    ),
}
"""Names that each refused section may have; a dot leads into an inner object. Values are not checked."""
