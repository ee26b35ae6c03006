"""Quantized, hierarchical collectives for PyTorch: torch.distributed's function names with a ``format=``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zcomm import control, functional, volume
from zcomm._collectives.all_gather import all_gather_single
from zcomm._collectives.all_reduce import all_reduce
from zcomm._collectives.all_to_all import all_to_all_single
from zcomm._collectives.reduce_scatter import reduce_scatter_single
from zcomm._formats.formats import FORMATS, Format, get_format
from zcomm._formats.philox import RandomKey
from zcomm._formats.recipes import RECIPES, Recipe
from zcomm._kernels.relative_error import relative_error, relative_errors
from zcomm._residuals.buffer_layout import Span
from zcomm._residuals.relayout import load_residuals, relayout_residuals
from zcomm._residuals.residual import Residual
from zcomm._stateful.delta_gather import DeltaGather
from zcomm._stateful.encoded_shard import EncodedShard
from zcomm._stateful.node_replica import NodeReplica
from zcomm._stateful.node_sums import NodeSums
from zcomm._stateful.secondary import SecondaryPartition
from zcomm._transport.flight_record import Flight, flight_record
from zcomm._transport.topology import Topology
from zcomm._transport.traffic import Traffic, traffic
from zcomm._transport.work import Work
from zcomm.errors import (
    BackendUnavailableError,
    CommunicationError,
    ConfigError,
    DamagedError,
    DivergedError,
    FormatError,
    IntegrityError,
    LayoutError,
    MessageError,
    StateError,
    TopologyError,
    ZcommError,
)

if TYPE_CHECKING:
    from zcomm.install import Installation, install_ddp, install_fsdp2

__all__ = [
    "FORMATS",
    "RECIPES",
    "BackendUnavailableError",
    "CommunicationError",
    "ConfigError",
    "DamagedError",
    "DeltaGather",
    "DivergedError",
    "EncodedShard",
    "Flight",
    "Format",
    "FormatError",
    "Installation",
    "IntegrityError",
    "LayoutError",
    "MessageError",
    "NodeReplica",
    "NodeSums",
    "RandomKey",
    "Recipe",
    "Residual",
    "SecondaryPartition",
    "Span",
    "StateError",
    "Topology",
    "TopologyError",
    "Traffic",
    "Work",
    "ZcommError",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "control",
    "flight_record",
    "functional",
    "get_format",
    "install_ddp",
    "install_fsdp2",
    "load_residuals",
    "reduce_scatter_single",
    "relative_error",
    "relative_errors",
    "relayout_residuals",
    "traffic",
    "volume",
]

INSTALL_NAMES = ("Installation", "install_ddp", "install_fsdp2")


def __getattr__(name: str) -> Any:
    """Import :mod:`zcomm.install` at its first use: it takes an eighth of this package's memory."""
    if name in INSTALL_NAMES:
        return getattr(importlib.import_module("zcomm.install"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
