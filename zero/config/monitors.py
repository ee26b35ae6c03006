"""What only watches the training: its sections, and the names in those of DeepSpeed's that nothing here reads."""

from __future__ import annotations

from dataclasses import dataclass

from zero.config.keys import key

__all__ = ["NAMES", "CommsLogger"]

NAMES: dict[str, tuple[str, ...]] = {
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
"""By section, what may stand in it; a dot leads into an object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommsLogger:
    """``comms_logger``."""

    enabled: bool = key(
        False,
        "the engine's first rank prints what it has sent, by operation, format and link: at each of steps_per_print, "
        "and in destroy()",
        false="off",
    )
    verbose: bool = key(False, "at each step, and of this step", false="see enabled", active_if="comms_logger")
    prof_all: bool = key(True, "all operations", false="those of prof_ops", active_if="comms_logger")
    prof_ops: tuple[str, ...] = key(
        (),
        "operations to print unless prof_all: all_gather, reduce_scatter, all_reduce, all_to_all, control",
        active_if="comms_logger",
    )
    debug: bool = key(False, "-", false="the same as true", inactive="of DeepSpeed's log of callers")
