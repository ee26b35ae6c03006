"""Quantized, hierarchical collectives for PyTorch: torch.distributed's names with a ``format=``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zcomm import control, functional, volume
from zcomm.all_gather import all_gather_single
from zcomm.all_reduce import all_reduce
from zcomm.all_to_all import all_to_all_single
from zcomm.buffer_layout import Span
from zcomm.delta import DeltaGather
from zcomm.encoded import EncodedShard
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
from zcomm.flight import Flight, flight_record
from zcomm.formats import FORMATS, Format, get_format
from zcomm.node_replica import NodeReplica
from zcomm.node_sums import NodeSums
from zcomm.philox import RandomKey
from zcomm.recipes import RECIPES, Recipe
from zcomm.reduce_scatter import reduce_scatter_single
from zcomm.relayout import load_residuals, relayout_residuals
from zcomm.residual import Residual
from zcomm.sampling import relative_error, relative_errors
from zcomm.secondary import SecondaryPartition
from zcomm.topology import Topology
from zcomm.traffic import Traffic, traffic
from zcomm.work import Work

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

OF_INSTALL = ("Installation", "install_ddp", "install_fsdp2")


def __getattr__(name: str) -> Any:
    """What :mod:`zcomm.install` brings, an eighth of this package's memory, is imported when it is first used."""
    if name in OF_INSTALL:
        return getattr(importlib.import_module("zcomm.install"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
