"""ZeRO for PyTorch: optimizer states, gradients and parameters sharded over the ranks, on quantized collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zero import _checkpoint as checkpoints
from zero import _publish, checkpointing, integrations, utils, zero
from zero._access.gathered_parameters import (
    GatheredParameters,
    gathered_for_generation,
    register_external_parameter,
    unregister_external_parameter,
)
from zero._access.pretrained import Loaded, load_pretrained
from zero._access.tiled_linear import TiledLinear, TiledLinearReturnBias
from zero._checkpoint import CheckpointError
from zero._config import NotAvailableError, precision_preset
from zero._config.settings import Effective, ZeroSettings
from zero._model.init import Init
from zero._optim.cpu_optimizers import CPUAdagrad, CPUAdam, CPULion
from zero._optim.lamb import Lamb
from zero._optim.lion import Lion
from zero._optim.muon import Muon, MuonSplit, split_for_muon
from zero._publish import PublicationError
from zero._ranks.distributed import init_distributed
from zero._sharding.stages import model_state_nbytes
from zero._step.moving_average import MovingAverage
from zero._storage.transfer_counters import moved
from zero.checkpointing import checkpoint
from zero.engine import Engine
from zero.initialize import Initialized, add_config_arguments, initialize
from zero.offload import offload_states, reload_states
from zero.optimizer import ZeroOptimizer
from zero.plan.estimate import Estimate, estimate
from zero.plan.formulas import Activations, Counts

if TYPE_CHECKING:
    from zero._checkpoint import export_checkpoint, load_checkpoint, save_checkpoint
    from zero._publish import Publisher, Subscriber

__all__ = [
    "Activations",
    "CPUAdagrad",
    "CPUAdam",
    "CPULion",
    "CheckpointError",
    "Counts",
    "Effective",
    "Engine",
    "Estimate",
    "GatheredParameters",
    "Init",
    "Initialized",
    "Lamb",
    "Lion",
    "Loaded",
    "MovingAverage",
    "Muon",
    "MuonSplit",
    "NotAvailableError",
    "PublicationError",
    "Publisher",
    "Subscriber",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroOptimizer",
    "ZeroSettings",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "estimate",
    "export_checkpoint",
    "gathered_for_generation",
    "init_distributed",
    "initialize",
    "integrations",
    "load_checkpoint",
    "load_pretrained",
    "model_state_nbytes",
    "moved",
    "offload_states",
    "precision_preset",
    "register_external_parameter",
    "reload_states",
    "save_checkpoint",
    "split_for_muon",
    "unregister_external_parameter",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    """Import what saves and publishes when it is first used: that takes time that training alone need not spend."""
    for package in (checkpoints, _publish):
        if name in __all__ and name in package.MODULES:
            return getattr(package, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
