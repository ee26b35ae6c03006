"""The section ``zero_optimization``: all of DeepSpeed's keys, and what each does here.

Defaults are DeepSpeed's unless the text of a key says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero._config.keys import ignored, key, limit, section
from zero._config.setting_keys import StageSettings

MOE_BLOCKS = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)
FLAT = "parameters and gradients are always views of flat buckets"


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadParam:
    """``offload_param``."""

    device: str = key(
        "none", "where sharded parameters are stored", choices=("none", "cpu", "nvme"), active_if="stage 3"
    )
    nvme_path: str | None = key(None, "folder for parameters on NVMe", active_if="offload_param nvme")
    buffer_count: int = key(5, "buffers between NVMe and memory", minimum=1, active_if="offload_param nvme")
    buffer_size: int = key(100_000_000, "elements of each buffer", minimum=1, active_if="offload_param nvme")
    max_in_cpu: int = limit(
        0,
        "elements of this rank's shards that stay in host memory and not in files (DeepSpeed: 1e9, which keeps up to a "
        "billion parameters per rank out of the files)",
        active_if="offload_param nvme",
    )
    pin_memory: bool = key(True, "page-locked memory", false="pageable memory", active_if="offload_param")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptimizer:
    """``offload_optimizer``."""

    device: str = key(
        "none",
        "where optimizer states are stored; off the device they are updated on the host",
        choices=("none", "cpu", "nvme"),
        active_if="stage 1+",
    )
    nvme_path: str | None = key(None, "folder for states on NVMe", active_if="offload_optimizer nvme")
    buffer_count: int = key(4, "buffers between NVMe and memory", minimum=1, active_if="offload_optimizer nvme")
    pin_memory: bool = key(True, "page-locked memory", false="pageable memory", active_if="offload_optimizer")
    pipeline_read: bool = key(
        False,
        "read the next states during an update, and the first buffer_count sub-groups during backward",
        false="read them before it",
        active_if="offload_optimizer nvme",
    )
    pipeline_write: bool = key(
        False, "write states during the next update", false="write them before it", active_if="offload_optimizer nvme"
    )
    fast_init: bool = ignored(
        False, "write the first states to NVMe without reading them", "the first states are never read"
    )
    ratio: float = key(1.0, "the share of the states that is offloaded", minimum=0, active_if="offload_optimizer")
    super_offload: bool = key(False, "for GH200", unavailable="super_offload")
    cpuadam_cores_perc: float = key(0.8, "cores for super_offload", minimum=0, inactive="super_offload only")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafModule:
    """``leaf_module``."""

    classes: tuple[str, ...] = key(
        MOE_BLOCKS,
        "module classes that are gathered as one unit; those of the default need not be in the model, others must",
        active_if="stage 3",
    )
    names: tuple[str, ...] = key((), "modules that are gathered as one unit, by name", active_if="stage 3")
    name_suffixes: tuple[str, ...] = key(
        (), "modules that are gathered as one unit, by the end of their name", active_if="stage 3"
    )


@dataclass(frozen=True, kw_only=True)
class ZeroOptimization(StageSettings):
    """``zero_optimization``."""

    zero_quantized_weights: bool = key(
        False,
        "qwZ: send weights as INT8 blocks of 256; at stages 1 and 2, too",
        false="send weights in their dtype",
        active_if="stage 1+",
        aliases=("quantized_weights",),
    )
    zero_quantized_gradients: bool = key(
        False,
        "qgZ: send gradients as INT4 blocks of 128 on both hops, also inside one node; at stages 1 and 2, too",
        false="send gradients in communication_data_type",
        active_if="stage 1+",
        aliases=("quantized_gradients",),
    )
    zero_hpz_partition_size: int = key(
        1,
        "hpZ: the number of ranks per node; after a step's first gather, gathers stay inside the node. 1: off",
        minimum=1,
        active_if="stage 3",
        aliases=("hpz_partition_size",),
    )
    zero_quantized_nontrainable_weights: bool = key(
        False,
        "store and send frozen weights as INT8 blocks of 256, but for persistent parameters",
        false="store and send them in their dtype",
        active_if="stage 3",
    )
    contiguous_gradients: bool = ignored(True, "gradients in flat buffers", FLAT)
    reduce_scatter: bool = ignored(True, "reduce-scatter of gradients", "every reduction is a reduce-scatter")
    use_multi_rank_bucket_allreduce: bool = ignored(
        True, "one exchange for a bucket", "a bucket is always one exchange"
    )
    allgather_partitions: bool = ignored(True, "all-gather of new parameters", "it is always an all-gather")
    offload_param: OffloadParam = section(OffloadParam, "parameters in host memory or on NVMe, stage 3")
    offload_optimizer: OffloadOptimizer = section(OffloadOptimizer, "optimizer states in host memory or on NVMe")
    sub_group_size: int = limit(
        1_000_000_000,
        "the most elements that are updated as one when states are offloaded",
        minimum=1,
        active_if="offload_optimizer",
    )
    stage3_module_granularity_threshold: int = key(
        0,
        "gather small modules as one",
        minimum=0,
        inactive="layers are always gathered as one",
        aliases=("module_granularity_threshold",),
    )
    stage3_use_all_reduce_for_fetch_params: bool = ignored(
        False, "gather by all-reduce", "gathers are all-gathers", aliases=("use_all_reduce_for_fetch_params",)
    )
    stage3_allgather_sequential: bool = ignored(
        False, "gather one parameter at a time", "layers are always gathered as one", aliases=("allgather_sequential",)
    )
    stage3_gather_16bit_weights_on_model_save: bool = ignored(
        False,
        "full weights on save",
        "model.state_dict() always holds full weights",
        aliases=("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
    )
    compute_grad_norm: bool = key(
        True,
        "the engine computes the gradient norm of every step",
        false="only if gradients are clipped; otherwise get_global_grad_norm() is None",
    )
    enable_sanity_checks: bool = ignored(
        False, "internal checks", "ranks always compare the model and the settings at construction"
    )
    leaf_module: LeafModule = section(LeafModule, "modules that are gathered as one unit")
    zeropp_loco_param: dict[str, Any] | None = key(
        None,
        "error feedback of qgZ",
        unavailable="LoCo's moving average of errors differs from our residuals: zcomm.mode=delta_hpz has error "
        "feedback, with zcomm.residual_beta (1 for an err_beta of 0) and zcomm.residual_reset_interval (in steps) for "
        "reset_T",
    )
    mics_shard_size: int = key(-1, "MiCS", unavailable="MiCS (zero_hpz_partition_size, hpZ, comes closest)")
    mics_hierarchical_params_gather: bool = key(False, "MiCS", inactive="MiCS only")
    zenflow: dict[str, Any] | None = key(None, "asynchronous offload", unavailable="zenflow")
    load_from_fp32_weights: bool = ignored(
        True, "restore masters from float32 weights", "state_dict() holds the masters"
    )
    elastic_checkpoint: bool = ignored(False, "load checkpoints on other world sizes", "always possible")
    round_robin_gradients: bool = key(False, "order of offloaded gradients", false="-", inactive="not needed here")
    parameter_alignment: bool = ignored(False, "align parameters", "parameters start on multiples of 256 elements")
    legacy_stage1: bool = ignored(False, "the old stage 1", "there is one stage 1")
    memory_efficient_linear: bool = ignored(True, "linear layers do not keep gathered weights", "no layer keeps them")
    pipeline_loading_checkpoint: bool = key(False, "staged loading", false="-", inactive="DeepSpeed's format only")
    override_module_apply: bool = key(
        True, "Module.apply gathers first", false="-", inactive="zero.Init gathers where it is needed"
    )
    save_muon_momentum_buffer_in_memory: bool = key(False, "Muon on NVMe", false="-", inactive="Muon only")
