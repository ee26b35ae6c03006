"""Configurations for the tests, copied from DeepSpeed's tutorials."""

from __future__ import annotations

from typing import Any

FP16 = {"enabled": True, "initial_scale_power": 32, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
COMMON: dict[str, Any] = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 300, "warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 30},
    },
    "fp16": FP16,
    "zero_allow_untested_optimizer": True,
    "wall_clock_breakdown": False,
    "steps_per_print": 9999999999,
}
CHECKPOINTING = {
    "partition_activations": True,
    "cpu_checkpointing": True,
    "contiguous_memory_optimization": True,
    "number_checkpoints": 4,
}


def _offload(device: dict[str, Any]) -> dict[str, Any]:
    zero = {"stage": 3, "allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8}
    devices = {"offload_param": device, "offload_optimizer": device}
    return {**COMMON, "zero_optimization": {**zero, **devices}, "activation_checkpointing": CHECKPOINTING}


CONFIGS: dict[str, dict[str, Any]] = {
    "megatron_stage1": {"zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}},
    "megatron_stage2": {
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 5e8,
            "allgather_bucket_size": 5e8,
        }
    },
    "megatron_stage3_offload": {
        "zero_optimization": {
            "stage": 3,
            "cpu_offload": True,
            "cpu_offload_params": True,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "stage3_max_live_parameters": 6000000,
            "stage3_max_reuse_distance": 100000000,
            "stage3_prefetch_bucket_size": 200000,
            "stage3_param_persitance_threshold": 100000,
            "reduce_bucket_size": 3000000,
            "sub_group_size": 1e6,
        }
    },
    "zero_dp": {**COMMON, "zero_optimization": {"stage": 1}},
    "zero_dp_inline": {
        **COMMON,
        "zero_optimization": {
            "stage": 1,
            "allgather_partitions": True,
            "allgather_bucket_size": 5e8,
            "overlap_comm": False,
            "reduce_scatter": True,
            "reduce_bucket_size": 5e8,
            "contiguous_gradients": True,
        },
    },
    "zero_r": {
        **COMMON,
        "zero_optimization": {"stage": 1, "allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8},
        "activation_checkpointing": CHECKPOINTING,
    },
    "zero_offload": _offload({"device": "cpu", "pin_memory": True}),
    "zero_infinity": _offload({"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True}),
    "zeropp": {
        **COMMON,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 5e8,
            "zero_quantized_weights": True,
            "zero_hpz_partition_size": 2,
            "zero_quantized_gradients": True,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    },
}
NEEDS_MORE: tuple[str, ...] = ()
"""The configurations that this version refuses."""
