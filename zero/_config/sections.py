"""The top level of the configuration and its sections apart from ``zero_optimization``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero._config.keys import key, section
from zero._config.optimizer_options import OPTIMIZER_OPTIONS, SCHEDULER_OPTIONS
from zero._config.unread_sections import INERT_NAMES, REFUSED_NAMES, CommsLogger
from zero._config.zero_section import ZeroOptimization

DTYPES = ("fp32", "float32", "float", "fp16", "float16", "half", "bf16", "bfloat16")
LEVELS = ("debug", "info", "warning", "error", "critical")
WATCHES = "it only watches; training is the same without it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16:
    """``fp16``."""

    enabled: bool = key(False, "parameters and computation in float16, float32 masters", false="off")
    auto_cast: bool = key(False, "the engine casts floating-point inputs", false="inputs as given", active_if="fp16")
    loss_scale: float = key(0.0, "a fixed loss scale; 0 is dynamic", minimum=0, active_if="float16")
    initial_scale_power: int = key(
        16,
        "the first dynamic scale is 2 to this power, at most 127: the scaled loss is float32",
        minimum=0,
        maximum=127,
        active_if="dynamic loss scale",
        aliases=("init_scale_power",),
    )
    loss_scale_window: int = key(
        1000, "steps without an overflow before the scale doubles", minimum=1, active_if="dynamic loss scale"
    )
    hysteresis: int = key(2, "overflows before the scale halves", minimum=1, active_if="dynamic loss scale")
    consecutive_hysteresis: bool = key(
        False,
        "a step without an overflow restores the hysteresis",
        false="only a doubling restores it",
        active_if="dynamic loss scale",
    )
    min_loss_scale: float = key(1.0, "the smallest scale", is_positive=True, active_if="dynamic loss scale")
    fp16_master_weights_and_grads: bool = key(False, "no float32 masters", false="off", unavailable="16-bit masters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16:
    """``bf16``."""

    enabled: bool = key(False, "parameters and computation in bfloat16, float32 masters", false="off")
    check_grad_overflow: bool = key(
        True,
        "a step whose gradients have a NaN or an infinity is skipped",
        false="it is taken",
        active_if="bf16",
    )
    immediate_grad_update: bool = key(False, "-", false="the same as true", inactive="gradients are always taken over")
    bf16_master_weights_and_grads: bool = key(False, "no float32 masters", false="off", unavailable="16-bit masters")
    bf16_optimizer_states: bool = key(False, "states in bfloat16", false="off", unavailable="16-bit states")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTypes:
    """``data_types``."""

    grad_accum_dtype: str | None = key(
        None, "dtype that gradients accumulate in (absent: float32; DeepSpeed: the model's)", choices=DTYPES
    )
    param_dtype: str | None = key(None, "-", unavailable="param_dtype (use fp16 or bf16)")
    buffer_dtype: str | None = key(None, "-", unavailable="buffer_dtype (buffers are cast with the parameters)")
    keep_in_fp32_modules: tuple[str, ...] = key(
        (),
        "modules that stay float32 and compute in it, by any part of their dotted name, or by '.' and the whole",
        active_if="16 bit",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchAutocast:
    """``torch_autocast``."""

    enabled: bool = key(False, "the engine's forward runs under torch.autocast", false="off")
    dtype: str = key("bfloat16", "its dtype", choices=DTYPES, active_if="torch_autocast")
    lower_precision_safe_modules: tuple[str, ...] = key((), "-", inactive="torch.autocast decides by operation")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerChoice:
    """``optimizer``: built from the JSON if initialize() is given none."""

    type: str | None = key(None, "Adam (AdamW unless adam_w_mode is false), AdamW, SGD, or a name of torch.optim")
    params: dict[str, Any] = key({}, "its arguments", options=OPTIMIZER_OPTIONS)
    legacy_fusion: bool = key(False, "-", false="the same as true", inactive="of DeepSpeed's LAMB")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerChoice:
    """``scheduler``: built from the JSON if initialize() is given none; stepped by engine.step()."""

    type: str | None = key(
        None,
        "the learning-rate schedule",
        choices=("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
    )
    params: dict[str, Any] = key({}, "its arguments", options=SCHEDULER_OPTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointing:
    """``activation_checkpointing``: where inputs of checkpointed functions rest until backward."""

    partition_activations: bool = key(
        False, "inputs are divided over the tensor-parallel ranks, if there are any", false="whole on each"
    )
    cpu_checkpointing: bool = key(False, "inputs rest in host memory", false="where they are")
    contiguous_memory_optimization: bool = key(
        False, "inputs rest in one buffer, allocated in the first step", false="each of its own"
    )
    number_checkpoints: int | None = key(
        None,
        "checkpoints that buffer is made for before the first step, after which it holds as many as that had",
        minimum=1,
        active_if="one buffer",
    )
    synchronize_checkpoint_boundary: bool = key(
        False, "the device is synchronised before and after each function", false="off"
    )
    profile: bool = key(False, "log times after each backward", false="off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Aio:
    """``aio``: file input and output of NVMe offload."""

    block_size: int = key(1_048_576, "bytes a request", minimum=1, active_if="nvme")
    queue_depth: int = key(8, "requests in flight", minimum=1, active_if="nvme")
    intra_op_parallelism: int = key(1, "threads a file", minimum=1, active_if="nvme", aliases=("thread_count",))
    single_submit: bool = key(False, "one request a call", false="many", active_if="nvme")
    overlap_events: bool = key(True, "collect while submitting", false="submit, then collect", active_if="nvme")
    use_gds: bool = key(False, "GPUDirect storage", false="off", unavailable="GPUDirect storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Zcomm:
    """``zcomm``: what DeepSpeed has no key for."""

    ranks_per_node: int | None = key(
        None, "so many consecutive ranks stand in for a node (absent: torchrun's environment)", minimum=1
    )
    weight_format: str | None = key(
        None,
        "wire format of weights; overrides zero_quantized_weights; auto: what zcomm probe found fastest",
        setting="weight_format",
        active_if="stage 1+",
    )
    gradient_format: str | tuple[str, ...] | None = key(
        None,
        "wire format of gradients, or [inside the node, between nodes]; overrides zero_quantized_gradients; auto: as "
        "with weights",
        setting="gradient_format",
        active_if="stage 1+",
    )
    backend: str = key(
        "auto",
        "what carries weights and gradients. torch: torch's process groups. nccl: zcomm's communicator over NCCL in "
        "C++, for parameters on GPUs, the same bits. auto: torch, until nccl is measured to be faster",
        choices=("auto", "torch", "nccl"),
        setting="backend",
    )
    kernels: str = key(
        "auto",
        "what encodes and decodes them, the same bits; auto: what ZCOMM_KERNELS says",
        choices=("auto", "native", "triton", "cuda", "reference"),
        setting="kernels",
    )
    mode: str | None = key(
        None,
        "over several nodes, 4 bits for each parameter cross the network after a step: its change. delta: stages 1 and "
        "2. delta_hpz: stage 3, with a copy of the parameters in every node, and gradients cross per step, not per "
        "micro-batch, in 4 bits too",
        choices=("delta_hpz", "delta"),
        setting="mode",
    )
    residual_beta: float = key(
        1.0,
        "what gradients have lost between nodes is multiplied with it before it is added to the next step's, at most "
        "1; below 1 old losses fade (LoCo's damping)",
        is_positive=True,
        setting="residual_beta",
        active_if="delta_hpz",
    )
    residual_reset_interval: int = key(
        0,
        "steps after which what gradients have lost between nodes is forgotten (LoCo's reset); 0: never",
        minimum=0,
        setting="residual_reset_interval",
        active_if="delta_hpz",
    )
    activations: str | None = key(
        None,
        "where inputs of checkpointed functions rest; overrides cpu_checkpointing",
        choices=("device", "cpu", "nvme"),
    )
    activations_nvme_path: str | None = key(None, "their folder", active_if="activations nvme")
    tile_linears_above: int | None = key(
        None,
        "elements of a linear layer's weight above which it is cut into tiles of at most so many, each gathered and "
        "released on its own; its keys in state dicts stay",
        minimum=1,
        setting="tile_linears_above",
        active_if="stage 3",
    )
    hpz_secondary_device: str = key(
        "device",
        "where the secondary partition of hpZ rests",
        choices=("device", "cpu"),
        setting="hpz_secondary_device",
        active_if="hpZ",
    )
    keep_previous_states: bool = key(
        True,
        "states on NVMe are written beside those before: a step that fails leaves the optimizer before it",
        false="half the disk; after a step that failed the optimizer asks for the last checkpoint",
        active_if="offload_optimizer nvme",
    )
    delayed_update: bool = key(
        False,
        "the update of a step runs on the host during the next step's forward and backward, which read the parameters "
        "of one update before",
        false="step() waits for its update",
        active_if="offload_optimizer",
    )
    delay_start: int = key(
        40,
        "updates that are not delayed, at the start (the default is the paper's)",
        minimum=0,
        active_if="delayed update",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole of it."""

    train_batch_size: int | None = key(None, "samples a step, all ranks; = micro x accumulation x ranks", minimum=1)
    train_micro_batch_size_per_gpu: int | None = key(None, "samples a rank and backward", minimum=1)
    gradient_accumulation_steps: int | None = key(None, "backwards a step", minimum=1)
    managed_gradient_accumulation: bool = key(
        True,
        "the engine counts backwards to the boundary",
        false="set_gradient_accumulation_boundary() decides",
    )
    gradient_clipping: float = key(
        0.0, "largest global gradient norm; 0 is off, as it is if absent (DeepSpeed since 0.19: 1.0)", minimum=0
    )
    zero_optimization: ZeroOptimization = section(ZeroOptimization, "ZeRO and ZeRO++")
    fp16: Fp16 = section(Fp16, "float16")
    bf16: Bf16 = section(Bf16, "bfloat16", aliases=("bfloat16",))
    data_types: DataTypes = section(DataTypes, "dtypes")
    torch_autocast: TorchAutocast = section(TorchAutocast, "torch.autocast")
    communication_data_type: str | None = key(
        None, "dtype that gradients travel in (absent: the parameters')", choices=DTYPES, active_if="plain gradients"
    )
    optimizer: OptimizerChoice = section(OptimizerChoice, "the optimizer")
    scheduler: SchedulerChoice = section(SchedulerChoice, "the learning-rate schedule")
    zero_allow_untested_optimizer: bool = key(
        False,
        "-",
        false="the same as true",
        inactive="every optimizer is tested for being elementwise, and is refused or works",
    )
    zero_force_ds_cpu_optimizer: bool = key(
        True,
        "torch's Adam and AdamW over offloaded states are updated by zero.CPUAdam; other optimizers are taken as given",
        false="torch's are, too, with more passes over memory",
        active_if="offload_optimizer",
    )
    activation_checkpointing: ActivationCheckpointing = section(ActivationCheckpointing, "activations")
    aio: Aio = section(Aio, "file input and output")
    steps_per_print: int | None = key(
        None, "print step, loss scale and learning rate so often; Infinity: never", minimum=1, is_never_if_infinite=True
    )
    wall_clock_breakdown: bool = key(False, "log the times of forward, backward, gather, reduce and step", false="off")
    prescale_gradients: bool = key(
        False, "divide before the reduction", false="the same as true", inactive="sums are in float32"
    )
    gradient_predivide_factor: float = key(1.0, "-", inactive="sums are in float32")
    gradient_allreduce_op: str = key("mean", "mean over the ranks", choices=("mean", "sum"), unavailable="'sum'")
    dataloader_drop_last: bool = key(False, "drop an incomplete last batch", false="keep it")
    zcomm: Zcomm = section(Zcomm, "this library's own keys")
    checkpoint: dict[str, Any] = key(
        {}, "checkpoints", inactive="of DeepSpeed's checkpoint format", names=INERT_NAMES["checkpoint"]
    )
    sparse_gradients: bool = key(False, "-", false="off", unavailable="sparse gradients")
    disable_allgather: bool = key(False, "-", false="the same as true", inactive="there is no such mode")
    disable_python_gc: bool = key(False, "-", false="the same as true", inactive="no call collects garbage")
    dump_state: bool = key(False, "initialize() prints the effective settings", false="off")
    log_level: str | None = key(None, "the level of the logger 'zero', which initialize() sets", choices=LEVELS)
    memory_breakdown: bool = key(
        False, "the engine's first rank prints its memory after each forward, backward and step", false="off"
    )
    comms_logger: CommsLogger = section(CommsLogger, "what is sent")
    flops_profiler: dict[str, Any] = key({}, "-", inactive=WATCHES, names=INERT_NAMES["flops_profiler"])
    timers: dict[str, Any] = key({}, "-", inactive=WATCHES, names=INERT_NAMES["timers"])
    tensorboard: dict[str, Any] = key({}, "-", inactive=WATCHES, names=INERT_NAMES["tensorboard"])
    wandb: dict[str, Any] = key({}, "-", inactive=WATCHES, names=INERT_NAMES["wandb"])
    comet: dict[str, Any] = key({}, "-", inactive=WATCHES, names=INERT_NAMES["comet"])
    csv_monitor: dict[str, Any] = key({}, "-", inactive=WATCHES, names=INERT_NAMES["csv_monitor"])
    nebula: dict[str, Any] = key({}, "-", inactive="a service of DeepSpeed", names=INERT_NAMES["nebula"])
    amp: dict[str, Any] = key(
        {}, "-", unavailable="Apex AMP (use fp16, bf16 or torch_autocast)", names=REFUSED_NAMES["amp"]
    )
    elasticity: dict[str, Any] = key({}, "-", unavailable="elasticity", names=REFUSED_NAMES["elasticity"])
    autotuning: dict[str, Any] = key({}, "-", unavailable="autotuning", names=REFUSED_NAMES["autotuning"])
    compression_training: dict[str, Any] = key(
        {}, "-", unavailable="compression", names=REFUSED_NAMES["compression_training"]
    )
    data_efficiency: dict[str, Any] = key(
        {}, "-", unavailable="data efficiency", names=REFUSED_NAMES["data_efficiency"]
    )
    curriculum_learning: dict[str, Any] = key(
        {}, "-", unavailable="curriculum learning", names=REFUSED_NAMES["curriculum_learning"]
    )
    progressive_layer_drop: dict[str, Any] = key(
        {}, "-", unavailable="layer drop", names=REFUSED_NAMES["progressive_layer_drop"]
    )
    eigenvalue: dict[str, Any] = key({}, "-", unavailable="eigenvalues", names=REFUSED_NAMES["eigenvalue"])
    quantize_training: dict[str, Any] = key(
        {}, "-", unavailable="quantized training", names=REFUSED_NAMES["quantize_training"]
    )
    weight_quantization: dict[str, Any] = key(
        {}, "-", unavailable="weight quantization", names=REFUSED_NAMES["weight_quantization"]
    )
    sparse_attention: dict[str, Any] = key(
        {}, "-", unavailable="sparse attention", names=REFUSED_NAMES["sparse_attention"]
    )
    tensor_parallel: dict[str, Any] = key(
        {}, "-", unavailable="tensor parallelism", names=REFUSED_NAMES["tensor_parallel"]
    )
    expert_parallel: dict[str, Any] = key(
        {}, "-", unavailable="expert parallelism", names=REFUSED_NAMES["expert_parallel"]
    )
    pipeline: dict[str, Any] = key({}, "-", unavailable="pipeline parallelism", names=REFUSED_NAMES["pipeline"])
    hybrid_engine: dict[str, Any] = key({}, "-", unavailable="the hybrid engine", names=REFUSED_NAMES["hybrid_engine"])
    compile: dict[str, Any] = key(
        {}, "-", unavailable="compilation (use torch.compile)", names=REFUSED_NAMES["compile"]
    )
