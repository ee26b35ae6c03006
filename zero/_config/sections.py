"""The keys at the top level of the configuration, and of its sections but ``zero_optimization``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero._config.keys import ignored, key, section
from zero._config.monitor_sections import Comet, CsvMonitor, TensorBoard, Wandb
from zero._config.optimizer_options import OPTIMIZER_OPTIONS, SCHEDULER_OPTIONS
from zero._config.setting_keys import REDUCE_OPS, WireSettings
from zero._config.zero_section import ZeroOptimization

DTYPES = ("fp32", "float32", "float", "fp16", "float16", "half", "bf16", "bfloat16")
LEVELS = ("debug", "info", "warning", "error", "critical")
MONITORING_ONLY = "monitoring only; training is the same without it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16:
    """``fp16``."""

    enabled: bool = key(False, "parameters and computation in float16, float32 masters")
    auto_cast: bool = key(
        False, "the engine casts floating-point inputs to float16", false="inputs stay as they are", active_if="fp16"
    )
    loss_scale: float = key(0.0, "a static loss scale; 0: dynamic", minimum=0, active_if="float16")
    initial_scale_power: int = key(
        16,
        "the first dynamic loss scale is 2 to this power; at most 127, for the scaled loss is a float32",
        minimum=0,
        maximum=127,
        active_if="dynamic loss scale",
        aliases=("init_scale_power",),
    )
    loss_scale_window: int = key(
        1000, "steps without an overflow before the loss scale doubles", minimum=1, active_if="dynamic loss scale"
    )
    hysteresis: int = key(2, "overflows before the loss scale halves", minimum=1, active_if="dynamic loss scale")
    consecutive_hysteresis: bool = key(
        False,
        "a step without an overflow restores the hysteresis",
        false="only a doubling of the loss scale restores it",
        active_if="dynamic loss scale",
    )
    min_loss_scale: float = key(1.0, "the smallest loss scale", is_positive=True, active_if="dynamic loss scale")
    fp16_master_weights_and_grads: bool = key(False, "no float32 masters", unavailable="16-bit masters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16:
    """``bf16``."""

    enabled: bool = key(False, "parameters and computation in bfloat16, float32 masters")
    check_grad_overflow: bool = key(
        True, "skip a step whose gradients have a NaN or an infinity", false="take the step", active_if="bf16"
    )
    immediate_grad_update: bool = ignored(False, "-", "gradients are always accumulated during backward")
    bf16_master_weights_and_grads: bool = key(False, "no float32 masters", unavailable="16-bit masters")
    bf16_optimizer_states: bool = key(False, "states in bfloat16", unavailable="16-bit states")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTypes:
    """``data_types``."""

    grad_accum_dtype: str | None = key(
        None, "the dtype that gradients accumulate in (if absent float32; DeepSpeed: the model's dtype)", choices=DTYPES
    )
    param_dtype: str | None = key(
        None, "the dtype of parameters: that of fp16 or bf16, of which one must be enabled", choices=DTYPES
    )
    buffer_dtype: str | None = key(
        None,
        "the dtype of buffers (if absent they keep theirs; statistics of batch and instance norms follow the "
        "parameters)",
        choices=DTYPES,
    )
    keep_in_fp32_modules: tuple[str, ...] = key(
        (),
        "modules that stay float32 and compute in it, by any part of their dotted name, or by '.' and the full name",
        active_if="16 bit",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchAutocast:
    """``torch_autocast``."""

    enabled: bool = key(False, "run the engine's forward under torch.autocast")
    dtype: str = key("bfloat16", "the dtype of autocast", choices=DTYPES, active_if="torch_autocast")
    lower_precision_safe_modules: tuple[str, ...] = key((), "-", inactive="torch.autocast decides by operation")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerChoice:
    """``optimizer``: built from the JSON if initialize() is called without one."""

    type: str | None = key(None, "Adam (AdamW unless adam_w_mode is false), AdamW, SGD, or a name of torch.optim")
    params: dict[str, Any] = key({}, "the options of the optimizer", options=OPTIMIZER_OPTIONS)
    legacy_fusion: bool = ignored(False, "-", "DeepSpeed's LAMB only")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerChoice:
    """``scheduler``: built from the JSON if initialize() is called without one; stepped by engine.step()."""

    type: str | None = key(
        None,
        "the learning-rate schedule",
        choices=("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
    )
    params: dict[str, Any] = key({}, "the options of the schedule", options=SCHEDULER_OPTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointing:
    """``activation_checkpointing``: where inputs of checkpointed functions are stored until backward."""

    partition_activations: bool = key(
        False, "divide inputs over the tensor-parallel ranks, if there are any", false="all of them on each rank"
    )
    cpu_checkpointing: bool = key(False, "store inputs in host memory", false="inputs stay where they are")
    contiguous_memory_optimization: bool = key(
        False, "store inputs in one buffer, allocated in the first step", false="allocate them one by one"
    )
    number_checkpoints: int | None = key(
        None,
        "checkpoints that the buffer is first allocated for; after the first step it holds as many as that step had",
        minimum=1,
        active_if="one buffer",
    )
    synchronize_checkpoint_boundary: bool = key(False, "synchronize the device before and after each function")
    profile: bool = key(False, "log times after each backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Aio:
    """``aio``: file I/O of NVMe offload."""

    block_size: int = key(1_048_576, "bytes per request", minimum=1, active_if="nvme")
    queue_depth: int = key(8, "requests in flight", minimum=1, active_if="nvme")
    intra_op_parallelism: int = key(1, "threads per file", minimum=1, active_if="nvme", aliases=("thread_count",))
    single_submit: bool = key(False, "submit one request per system call", false="submit many", active_if="nvme")
    overlap_events: bool = key(
        True, "collect completions while submitting", false="submit all, then collect", active_if="nvme"
    )
    use_gds: bool = key(False, "GPUDirect storage", unavailable="GPUDirect storage")


@dataclass(frozen=True, kw_only=True)
class Zcomm(WireSettings):
    """``zcomm``: what DeepSpeed has no key for."""

    ranks_per_node: int | None = key(
        None, "this many consecutive ranks count as one node (if absent, torchrun's environment decides)", minimum=1
    )
    activations: str | None = key(
        None,
        "where inputs of checkpointed functions are stored; overrides cpu_checkpointing",
        choices=("device", "cpu", "nvme"),
    )
    activations_nvme_path: str | None = key(None, "the folder for inputs on NVMe", active_if="activations nvme")
    keep_previous_states: bool = key(
        True,
        "keep the previous states on NVMe while new ones are written: a step that fails leaves the optimizer as it was "
        "before",
        false="takes half the disk space; after a failed step, load the last checkpoint",
        active_if="offload_optimizer nvme",
    )
    delayed_update: bool = key(
        False,
        "run the update of a step on the host during the next step's forward and backward, which read parameters that "
        "are one update old",
        false="step() waits for its update",
        active_if="offload_optimizer",
    )
    delay_start: int = key(
        40,
        "the number of first updates that are not delayed (the default is that of the ZeRO-Offload paper)",
        minimum=0,
        active_if="delayed update",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommsLogger:
    """``comms_logger``."""

    enabled: bool = key(
        False,
        "the engine's first rank prints what it has sent, by operation, format and link class: every steps_per_print "
        "steps, and in destroy()",
    )
    verbose: bool = key(False, "print after each step, for it alone", false="see enabled", active_if="comms_logger")
    prof_all: bool = key(True, "print all operations", false="print those of prof_ops", active_if="comms_logger")
    prof_ops: tuple[str, ...] = key(
        (),
        "operations to print unless prof_all: all_gather, reduce_scatter, all_reduce, all_to_all, control",
        active_if="comms_logger",
    )
    debug: bool = ignored(False, "-", "DeepSpeed only: a log of callers")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsProfile:
    """``flops_profiler``."""

    enabled: bool = key(
        False, "the engine's first rank counts the operations of a forward, by module, and logs them after the step"
    )
    profile_step: int = key(
        1, "the steps before the one whose last forward is counted", minimum=0, active_if="flops_profiler",
        aliases=("step",),
    )  # fmt: skip
    module_depth: int = key(-1, "how far down modules are shown; -1: all", minimum=-1, active_if="flops_profiler")
    top_modules: int = key(
        1, "how many classes of modules are shown at each depth", minimum=1, active_if="flops_profiler"
    )
    detailed: bool = key(True, "show each module as well", active_if="flops_profiler")
    output_file: str | None = key(None, "write to this file instead", active_if="flops_profiler")
    recompute_fwd_factor: float = key(0.0, "-", minimum=0, inactive="backward is not counted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """``checkpoint``."""

    tag_validation: str = key(
        "warn",
        "if ranks give save_checkpoint() different tags, the first rank's is used, with a warning (warn) or without "
        "(ignore), or it is an error (fail)",
        choices=("ignore", "warn", "fail"),
    )
    load_universal: bool = ignored(False, "load checkpoints on other world sizes", "always possible")
    use_node_local_storage: bool = ignored(False, "files on each node's own disk", "all ranks share one folder")
    parallel_write: dict[str, Any] = key({}, "who writes", inactive="every rank always writes its shard")
    writer: dict[str, Any] = key({}, "how files are written", inactive="DeepSpeed's checkpoint format only")
    checkpoint_serialization: bool = ignored(True, "write the model as a pickle", "safetensors, as always")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All keys."""

    train_batch_size: int | None = key(
        None, "samples per step on all ranks: micro-batch size x accumulation steps x ranks", minimum=1
    )
    train_micro_batch_size_per_gpu: int | None = key(None, "samples per rank and backward", minimum=1)
    gradient_accumulation_steps: int | None = key(None, "backwards per step", minimum=1)
    managed_gradient_accumulation: bool = key(
        True, "the engine counts backwards up to the boundary", false="set_gradient_accumulation_boundary() decides"
    )
    gradient_clipping: float = key(
        0.0, "the largest global gradient norm; 0: off (DeepSpeed since 0.19, if absent: 1.0)", minimum=0
    )
    zero_optimization: ZeroOptimization = section(ZeroOptimization, "ZeRO and ZeRO++")
    fp16: Fp16 = section(Fp16, "float16")
    bf16: Bf16 = section(Bf16, "bfloat16", aliases=("bfloat16",))
    data_types: DataTypes = section(DataTypes, "dtypes")
    torch_autocast: TorchAutocast = section(TorchAutocast, "torch.autocast")
    communication_data_type: str | None = key(
        None,
        "the dtype that gradients are sent in (if absent, that of the parameters)",
        choices=DTYPES,
        active_if="plain gradients",
    )
    optimizer: OptimizerChoice = section(OptimizerChoice, "the optimizer")
    scheduler: SchedulerChoice = section(SchedulerChoice, "the learning-rate schedule")
    zero_allow_untested_optimizer: bool = ignored(
        False, "-", "every optimizer is tried at construction, and refused if it couples tensors"
    )
    zero_force_ds_cpu_optimizer: bool = key(
        True,
        "zero.CPUAdam does the update of torch's Adam and AdamW on offloaded states; other optimizers run as given",
        false="torch's Adam and AdamW run as given, too, with more passes over memory",
        active_if="offload_optimizer",
    )
    activation_checkpointing: ActivationCheckpointing = section(ActivationCheckpointing, "activations")
    aio: Aio = section(Aio, "file input and output")
    steps_per_print: int | None = key(
        None,
        "steps between prints of step, loss scale and learning rate; Infinity: never",
        minimum=1,
        infinity_means_absent=True,
    )
    wall_clock_breakdown: bool = key(False, "log the times of forward, backward, gather, reduce and step")
    prescale_gradients: bool = ignored(False, "divide gradients before the reduction", "sums are in float32")
    gradient_predivide_factor: float = key(1.0, "-", inactive="sums are in float32")
    gradient_allreduce_op: str = key(
        "mean", "gradients are the mean over the ranks, or their sum (DeepSpeed: below stage 3)", choices=REDUCE_OPS
    )
    dataloader_drop_last: bool = key(False, "drop an incomplete last batch", false="keep it")
    zcomm: Zcomm = section(Zcomm, "this library's own keys")
    checkpoint: Checkpoint = section(Checkpoint, "checkpoints")
    sparse_gradients: bool = ignored(False, "-", "gradients of embeddings with sparse=True are made dense")
    sequence_parallel_size: int = key(1, "-", minimum=1, unavailable="sequence parallelism")
    seq_parallel_communication_data_type: str | None = key(
        None, "-", choices=DTYPES, inactive="sequence parallelism only"
    )
    cuda_visible_devices: str | None = key(None, "-", inactive="the launcher's environment decides")
    vocabulary_size: int | None = key(None, "-", inactive="DeepSpeed only: a warning about its alignment")
    use_data_before_expert_parallelism: bool = ignored(False, "order of ranks", "expert parallelism only")
    disable_allgather: bool = ignored(False, "-", "parameters are always gathered")
    disable_python_gc: bool = ignored(False, "-", "no call runs the garbage collector")
    dump_state: bool = key(False, "initialize() prints the effective settings")
    log_level: str | None = key(None, "initialize() sets the logger 'zero' to this level", choices=LEVELS)
    memory_breakdown: bool = key(
        False, "the engine prints the first rank's memory after each forward, backward and step"
    )
    comms_logger: CommsLogger = section(CommsLogger, "what is sent")
    flops_profiler: FlopsProfile = section(FlopsProfile, "operations of a forward")
    timers: dict[str, Any] = key({}, "-", inactive=MONITORING_ONLY)
    tensorboard: TensorBoard = section(TensorBoard, "TensorBoard")
    wandb: Wandb = section(Wandb, "Weights & Biases")
    comet: Comet = section(Comet, "Comet")
    csv_monitor: CsvMonitor = section(CsvMonitor, "CSV files")
    nebula: dict[str, Any] = key({}, "-", inactive="DeepSpeed's service only")
    amp: dict[str, Any] = key({}, "-", unavailable="Apex AMP (use fp16, bf16 or torch_autocast)")
    elasticity: dict[str, Any] = key({}, "-", unavailable="elasticity")
    autotuning: dict[str, Any] = key({}, "-", unavailable="autotuning")
    compression_training: dict[str, Any] = key({}, "-", unavailable="compression")
    data_efficiency: dict[str, Any] = key({}, "-", unavailable="data efficiency")
    curriculum_learning: dict[str, Any] = key({}, "-", unavailable="curriculum learning")
    progressive_layer_drop: dict[str, Any] = key({}, "-", unavailable="layer drop")
    eigenvalue: dict[str, Any] = key({}, "-", unavailable="eigenvalues")
    quantize_training: dict[str, Any] = key({}, "-", unavailable="quantized training")
    weight_quantization: dict[str, Any] = key({}, "-", unavailable="weight quantization")
    sparse_attention: dict[str, Any] = key({}, "-", unavailable="sparse attention")
    tensor_parallel: dict[str, Any] = key({}, "-", unavailable="tensor parallelism")
    expert_parallel: dict[str, Any] = key({}, "-", unavailable="expert parallelism")
    pipeline: dict[str, Any] = key({}, "-", unavailable="pipeline parallelism")
    hybrid_engine: dict[str, Any] = key({}, "-", unavailable="the hybrid engine")
    compile: dict[str, Any] = key({}, "-", unavailable="compilation (use torch.compile)")
