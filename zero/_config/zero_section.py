"""The section ``zero_optimization``: DeepSpeed's keys, and what each does here.

The classes have as many fields as DeepSpeed's sections have keys. Defaults are DeepSpeed's unless the text says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from zero._config.keys import key, section

FLAT = "parameters and gradients are always views of flat buckets"


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadParam:
    """``offload_param``."""

    device: str = key(
        "none",
        "where sharded parameters rest",
        choices=("none", "cpu", "nvme"),
        active_if="stage 3",
    )
    nvme_path: str | None = key(None, "folder for parameters on NVMe", active_if="offload_param nvme")
    buffer_count: int = key(5, "buffers between NVMe and memory", minimum=1, active_if="offload_param nvme")
    buffer_size: int = key(100_000_000, "elements of each", minimum=1, active_if="offload_param nvme")
    max_in_cpu: int = key(
        0,
        "elements of this rank's shards that stay in host memory all the same (DeepSpeed: 1e9, by which up to a "
        "billion parameters a rank are not in the files that were asked for)",
        minimum=0,
        maximum=math.inf,
        active_if="offload_param nvme",
    )
    pin_memory: bool = key(True, "page-locked memory", false="pageable memory", active_if="offload_param")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptimizer:
    """``offload_optimizer``."""

    device: str = key(
        "none",
        "where optimizer states rest and are updated",
        choices=("none", "cpu", "nvme"),
        active_if="stage 1+",
    )
    nvme_path: str | None = key(None, "folder for states on NVMe", active_if="offload_optimizer nvme")
    buffer_count: int = key(4, "buffers between NVMe and memory", minimum=1, active_if="offload_optimizer nvme")
    pin_memory: bool = key(True, "page-locked memory", false="pageable memory", active_if="offload_optimizer")
    pipeline_read: bool = key(
        False, "read the next states during an update", false="read before", active_if="offload_optimizer nvme"
    )
    pipeline_write: bool = key(
        False, "write states during the next update", false="write after", active_if="offload_optimizer nvme"
    )
    fast_init: bool = key(
        False,
        "states on NVMe are first written without being read",
        false="the same as true",
        inactive="first states are never read",
    )
    ratio: float = key(1.0, "share of the states that is offloaded", minimum=0, active_if="offload_optimizer")
    super_offload: bool = key(False, "for GH200", false="off", unavailable="super_offload")
    cpuadam_cores_perc: float = key(0.8, "cores for super_offload", minimum=0, inactive="super_offload only")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafModule:
    """``leaf_module``."""

    classes: tuple[str, ...] = key((), "classes gathered as a whole", active_if="stage 3")
    names: tuple[str, ...] = key((), "modules, by name", active_if="stage 3")
    name_suffixes: tuple[str, ...] = key((), "modules, by the end of the name", active_if="stage 3")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroOptimization:
    """``zero_optimization``."""

    stage: int = key(
        0,
        "0 nothing sharded, 1 optimizer states, 2 and gradients, 3 and parameters "
        "(without any configuration ZeroOptimizer takes 1)",
        choices=(0, 1, 2, 3),
        setting="stage",
    )
    zero_quantized_weights: bool = key(
        False,
        "qwZ: weights travel as INT8 blocks of 256; at stages 1 and 2, too",
        false="weights travel as they are",
        setting="quantized_weights",
        active_if="stage 1+",
        aliases=("quantized_weights",),
    )
    zero_quantized_gradients: bool = key(
        False,
        "qgZ: gradients travel as INT4 blocks of 128 on both hops, also inside one node; at stages 1 and 2, too",
        false="gradients travel in communication_data_type",
        setting="quantized_gradients",
        active_if="stage 1+",
        aliases=("quantized_gradients",),
    )
    zero_hpz_partition_size: int = key(
        1,
        "hpZ: ranks per node, so that gathers after a step's first stay inside the node; 1 is off",
        minimum=1,
        setting="hpz_partition_size",
        active_if="stage 3",
        aliases=("hpz_partition_size",),
    )
    zero_quantized_nontrainable_weights: bool = key(
        False,
        "frozen weights rest as INT8 blocks of 256, and travel so; small ones that stay whole are left as they are",
        false="as they are",
        setting="quantized_nontrainable_weights",
        active_if="stage 3",
    )
    reduce_bucket_size: int = key(
        500_000_000,
        "elements that one gradient exchange carries at most",
        minimum=1,
        maximum=math.inf,
        setting="reduce_bucket_size",
    )
    allgather_bucket_size: int = key(
        500_000_000,
        "elements that one weight exchange carries at most",
        minimum=1,
        maximum=math.inf,
        setting="allgather_bucket_size",
    )
    overlap_comm: bool = key(
        True,
        "exchange while the computation goes on, at every stage (DeepSpeed: at stage 3)",
        false="exchange, then compute: the same bits",
        setting="overlap_comm",
    )
    contiguous_gradients: bool = key(True, "gradients in flat buffers", false="the same as true", inactive=FLAT)
    reduce_scatter: bool = key(
        True, "reduce-scatter of gradients", false="the same as true", inactive="every reduction is a reduce-scatter"
    )
    use_multi_rank_bucket_allreduce: bool = key(
        True, "one exchange for a bucket", false="the same as true", inactive="every bucket is one exchange"
    )
    allgather_partitions: bool = key(
        True, "all-gather of new parameters", false="the same as true", inactive="it is always an all-gather"
    )
    offload_param: OffloadParam = section(OffloadParam, "parameters in host memory or on NVMe, stage 3")
    offload_optimizer: OffloadOptimizer = section(OffloadOptimizer, "optimizer states in host memory or on NVMe")
    sub_group_size: int = key(
        1_000_000_000,
        "elements that one tile of the optimizer step updates",
        minimum=1,
        maximum=math.inf,
        active_if="offload_optimizer",
    )
    stage3_prefetch_bucket_size: int = key(
        50_000_000,
        "elements gathered ahead of their use at most, and not more than the largest layer has (more would hide "
        "nothing more); 0 is none",
        minimum=0,
        maximum=math.inf,
        setting="stage3_prefetch_bucket_size",
        active_if="stage 3, overlapped",
    )
    stage3_param_persistence_threshold: int = key(
        0,
        "parameters with fewer elements stay whole (DeepSpeed: 100,000; here they travel with their layer, so that "
        "keeping them saves bytes, but no exchange)",
        minimum=0,
        maximum=math.inf,
        aliases=("stage3_param_persitance_threshold",),
        setting="stage3_param_persistence_threshold",
        active_if="stage 3",
    )
    stage3_model_persistence_threshold: int = key(
        2**63 - 1,
        "elements that stay whole at most",
        minimum=0,
        maximum=math.inf,
        setting="stage3_model_persistence_threshold",
        active_if="stage 3",
    )
    stage3_max_live_parameters: int = key(
        1_000_000_000,
        "elements gathered at a time, but for what running modules need; a module with more is gathered in parts",
        minimum=0,
        maximum=math.inf,
        setting="stage3_max_live_parameters",
        active_if="stage 3",
    )
    stage3_max_reuse_distance: int = key(
        1,
        "a layer stays gathered if fewer elements are used before it is used again: 1 keeps the last one from forward "
        "to backward, 0 none (DeepSpeed: 1e9, which keeps smaller models whole: 2/3 of the bytes, and stage 2's "
        "memory)",
        minimum=0,
        maximum=math.inf,
        setting="stage3_max_reuse_distance",
        active_if="stage 3",
    )
    stage3_module_granularity_threshold: int = key(
        0, "finer modules are gathered as one", minimum=0, inactive="layers are always gathered as one"
    )
    stage3_use_all_reduce_for_fetch_params: bool = key(
        False, "gather by all-reduce", false="the same as true", inactive="gathers are all-gathers"
    )
    stage3_allgather_sequential: bool = key(
        False, "gather one parameter at a time", false="the same as true", inactive="layers are always gathered as one"
    )
    stage3_gather_16bit_weights_on_model_save: bool = key(
        False,
        "whole weights on save",
        aliases=("stage3_gather_fp16_weights_on_model_save",),
        false="the same as true",
        inactive="model.state_dict() always holds whole weights",
    )
    ignore_unused_parameters: bool = key(
        True,
        "parameters without a gradient are left as they are",
        false="step() raises an error that names them",
        setting="ignore_unused_parameters",
    )
    compute_grad_norm: bool = key(
        True,
        "the engine computes the gradient norm of every step",
        false="only where gradients are clipped; get_global_grad_norm() is None elsewhere",
    )
    enable_sanity_checks: bool = key(
        False,
        "internal checks",
        false="the same as true",
        inactive="ranks always compare model and settings at construction",
    )
    leaf_module: LeafModule = section(LeafModule, "modules gathered as a whole")
    zeropp_loco_param: dict[str, Any] | None = key(
        None,
        "error feedback of qgZ",
        unavailable="LoCo's moving average of errors, which is another arithmetic than ours: zcomm.mode=delta_hpz has "
        "error feedback, with zcomm.residual_beta (1 where err_beta is 0) and, for reset_T, "
        "zcomm.residual_reset_interval, which counts steps",
        names=("err_beta", "reset_T"),
    )
    mics_shard_size: int = key(-1, "MiCS", unavailable="MiCS (hpZ is the nearest: zero_hpz_partition_size)")
    mics_hierarchical_params_gather: bool = key(False, "MiCS", false="off", inactive="MiCS only")
    zenflow: dict[str, Any] | None = key(
        None,
        "asynchronous offload",
        unavailable="zenflow",
        names=(
            *("topk_ratio", "select_strategy", "select_interval", "update_interval", "overlap_step", "offload"),
            *("auto_ratio", "full_warm_up_rounds", "pt_reserved_cores_perc"),
        ),
    )
    load_from_fp32_weights: bool = key(
        True, "masters are restored from float32", false="the same as true", inactive="state_dict() holds the masters"
    )
    elastic_checkpoint: bool = key(
        False, "checkpoints fit other world sizes", false="the same as true", inactive="they always do"
    )
    round_robin_gradients: bool = key(False, "order of offloaded gradients", false="-", inactive="not needed here")
    parameter_alignment: bool = key(
        False, "align parameters", false="the same as true", inactive="parameters start on multiples of 256 elements"
    )
    legacy_stage1: bool = key(False, "the old stage 1", false="the same as true", inactive="there is one stage 1")
    memory_efficient_linear: bool = key(
        True, "linear layers do not keep gathered weights", false="the same as true", inactive="no layer keeps them"
    )
    pipeline_loading_checkpoint: bool = key(False, "staged loading", false="-", inactive="of DeepSpeed's format")
    override_module_apply: bool = key(True, "Module.apply gathers first", false="-", inactive="of zero.Init")
    log_trace_cache_warnings: bool = key(
        False,
        "log every change of the order in which layers are used",
        false="log the first",
        setting="log_trace_cache_warnings",
        active_if="stage 3",
    )
    save_muon_momentum_buffer_in_memory: bool = key(False, "Muon on NVMe", false="-", inactive="Muon only")
