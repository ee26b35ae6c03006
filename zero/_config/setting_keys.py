"""Keys that are also fields of :class:`zero.ZeroSettings`: declared once, for the JSON and for keywords."""

from __future__ import annotations

from dataclasses import dataclass

from zcomm._transport.backend_choice import BackendWish, KernelsName
from zero._config.keys import key, limit

MODES = ("delta_hpz", "delta")
EXACT = "exact"
CHANGES = ("auto", "quantized", EXACT)
REDUCE_OPS = ("mean", "sum")


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """Of the section ``zero_optimization``."""

    stage: int = key(
        0,
        "what is sharded. 0: nothing, 1: optimizer states, 2: gradients, too, 3: parameters, too (without any "
        "configuration ZeroOptimizer uses stage 1)",
        choices=(0, 1, 2, 3),
    )
    reduce_bucket_size: int = limit(500_000_000, "the most elements of one gradient exchange", minimum=1)
    allgather_bucket_size: int = limit(500_000_000, "the most elements of one weight exchange", minimum=1)
    overlap_comm: bool = key(
        True,
        "overlap exchanges with the computation, at every stage (DeepSpeed: at stage 3)",
        false="exchange, then compute; the bits are the same",
    )
    stage3_prefetch_bucket_size: int = limit(
        50_000_000,
        "the most elements to prefetch, and never more than the largest layer has (prefetching more hides no more "
        "time); 0: none",
        active_if="stage 3, overlapped",
        aliases=("prefetch_bucket_size",),
    )
    stage3_param_persistence_threshold: int = limit(
        0,
        "parameters with fewer elements are persistent, that is, stay full (DeepSpeed: 100,000; here they are sent "
        "with their layer, so persistence saves bytes but no exchange)",
        aliases=("param_persistence_threshold", "stage3_param_persitance_threshold"),
        active_if="stage 3",
    )
    stage3_model_persistence_threshold: int = limit(
        2**63 - 1,
        "the most elements of persistent parameters",
        active_if="stage 3",
        aliases=("model_persistence_threshold",),
    )
    stage3_max_live_parameters: int = limit(
        1_000_000_000,
        "the most elements that are full at a time, beyond what running modules need; a larger module is gathered in "
        "parts",
        active_if="stage 3",
        aliases=("max_live_parameters",),
    )
    stage3_max_reuse_distance: int = limit(
        1,
        "a layer stays full if fewer elements are used before its next use. 1: the last layer, from forward to "
        "backward; 0: none (DeepSpeed: 1e9, which keeps smaller models full: 2/3 of the bytes sent, with the memory of "
        "stage 2)",
        active_if="stage 3",
        aliases=("max_reuse_distance",),
    )
    ignore_unused_parameters: bool = key(
        True, "parameters without a gradient are not updated", false="step() raises an error that names them"
    )
    log_trace_cache_warnings: bool = key(
        False, "log every change of the order in which layers are used", false="log only the first", active_if="stage 3"
    )


@dataclass(frozen=True, kw_only=True)
class WireSettings:
    """Of the section ``zcomm``."""

    weight_format: str | None = key(
        None,
        "wire format of weights; overrides zero_quantized_weights; auto: the one that zcomm probe found fastest",
        active_if="stage 1+",
    )
    gradient_format: str | tuple[str, str] | None = key(
        None,
        "wire format of gradients, or [inside the node, between nodes]; overrides zero_quantized_gradients; auto: as "
        "for weights",
        active_if="stage 1+",
    )
    gradient_error: float = key(
        0.0,
        "send gradients between nodes with this relative error (of the root mean square of 128 elements, 0.001 to "
        "0.5), entropy-coded, instead of in a format: 0.15 takes about 3.1 bits an element, 0.1 3.7 (nf4, whose error "
        "is 0.09: 4.25). For parameters in host memory, over gloo, on Linux. 0: gradient_format's",
        minimum=0,
        active_if="delta_hpz",
    )
    backend: BackendWish = key(
        "auto",
        "what carries weights and gradients. torch: torch's process groups. nccl: zcomm's C++ communicator over NCCL, "
        "for parameters on GPUs, with the same bits. auto: torch, until nccl is measured to be faster",
    )
    kernels: KernelsName = key(
        "auto", "what encodes and decodes weights and gradients; the bits are the same. auto: what ZCOMM_KERNELS says"
    )
    mode: str | None = key(
        None,
        "on several nodes, send changes of the parameters over the network after a step. delta: stages 1 and 2. "
        "delta_hpz: stage 3, with a replica of the parameters in every node; gradients cross the network in 4 bits, "
        "too, once a step and not per micro-batch",
        choices=MODES,
    )
    changes: str = key(
        "auto",
        "what a mode sends of the parameters after a step. quantized: their change in weight_format (default int4). "
        "exact: their change without loss, so that replicas have the bits of the rounded masters, for 16-bit "
        "parameters: about as many bytes as int4 in pretraining, fewer at lower learning rates. auto: exact if "
        "all trained parameters have 16 bits and are in host memory, and weight_format is not set; else quantized",
        choices=CHANGES,
        active_if="a mode",
    )
    residual_beta: float = key(
        1.0,
        "the residual of gradients is multiplied by it before it is added to the next step's gradients; at most 1. "
        "Below 1 old residuals fade (LoCo's damping)",
        is_positive=True,
        active_if="delta_hpz",
    )
    residual_reset_interval: int = key(
        0,
        "steps after which the residual of gradients is reset to zero (LoCo's reset); 0: never",
        minimum=0,
        active_if="delta_hpz",
    )
    hpz_secondary_device: str = key(
        "device", "where the secondary partition of hpZ is stored", choices=("device", "cpu"), active_if="hpZ"
    )
