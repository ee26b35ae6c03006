"""The sections of monitors: where the engine's first rank writes the numbers of each step."""

from __future__ import annotations

from dataclasses import dataclass

from zero._config.keys import key

JOB_NAME = "DeepSpeedJobName"
NUMBERS = "the loss, learning rate and loss scale of each step"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBoard:
    """``tensorboard``."""

    enabled: bool = key(False, f"write {NUMBERS} for TensorBoard")
    output_path: str = key("", "the folder; if empty the current one", active_if="tensorboard")
    job_name: str = key(JOB_NAME, "a folder in output_path", active_if="tensorboard")


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvMonitor:
    """``csv_monitor``."""

    enabled: bool = key(False, f"write {NUMBERS} to CSV files, a file for each")
    output_path: str = key("", "the folder; if empty the current one", active_if="csv_monitor")
    job_name: str = key(JOB_NAME, "a folder in output_path", active_if="csv_monitor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wandb:
    """``wandb``."""

    enabled: bool = key(False, f"send {NUMBERS} to Weights & Biases")
    group: str | None = key(None, "the group of the run", active_if="wandb")
    team: str | None = key(None, "the team that the run belongs to", active_if="wandb")
    project: str = key("deepspeed", "the project of the run", active_if="wandb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comet:
    """``comet``."""

    enabled: bool = key(False, f"send {NUMBERS} to Comet")
    samples_log_interval: int = key(100, "the least samples between two values of a number", active_if="comet")
    project: str | None = key(None, "the project (if absent, Comet's own settings decide)", active_if="comet")
    workspace: str | None = key(None, "the workspace (if absent, Comet's own settings decide)", active_if="comet")
    api_key: str | None = key(
        None, "the API key; better set COMET_API_KEY, for dump_state prints this one", active_if="comet"
    )
    experiment_name: str | None = key(
        None, "the name of the experiment (if absent, Comet's own settings decide)", active_if="comet"
    )
    experiment_key: str | None = key(None, "the experiment to go on with", active_if="comet")
    online: bool | None = key(None, "send while training", false="store in files", active_if="comet")
    mode: str | None = key(None, "get, create or get_or_create the experiment", active_if="comet")
