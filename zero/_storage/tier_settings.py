"""Where states and parameters were asked to rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Tier(Enum):
    """A place for tensors at rest."""

    DEVICE = "device"  # with the computation
    CPU = "cpu"  # host memory, page-locked where there is CUDA
    NVME = "nvme"  # files of this rank, read and written past the page cache


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """How files are read and written (``aio``)."""

    request_nbytes: int = 1_048_576
    num_requests: int = 8
    """In flight at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTier:
    """``offload_optimizer``: where masters and moments rest, and the host updates them if that is not the device."""

    tier: Tier = Tier.DEVICE
    path: str | None = None
    """Folder, of NVMe."""
    ratio: float = 1.0
    """Share of the elements that rests there; the others stay on the device."""
    sub_group_numel: int = 1_000_000_000
    """Elements that are read, updated and written at a time, at most."""
    num_buffers: int = 4
    """Sub-groups in memory at a time, at most."""
    keeps_previous: bool = True
    """Each sub-group has two places in the files: a step that fails leaves the optimizer before it. False: half the
    disk, and after a step that failed the optimizer refuses to go on."""
    reads_ahead: bool = False
    writes_behind: bool = False
    delays_update: bool = False
    """The update of a step runs during the next step's forward and backward."""
    delay_start: int = 40
    """Updates that are made at once, before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTier:
    """``offload_param``: where the shards of parameters rest (stage 3)."""

    tier: Tier = Tier.DEVICE
    path: str | None = None
    num_buffers: int = 5
    """Buffers between files and memory, at most."""
    buffer_numel: int = 100_000_000
    """Elements of each, at most."""
    max_numel_in_memory: int = 0
    """Elements of shards that stay in host memory beside the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """All of it."""

    states: StateTier = field(default_factory=StateTier)
    parameters: ParameterTier = field(default_factory=ParameterTier)
    files: FileSettings = field(default_factory=FileSettings)
    pins_memory: bool = True
    """Page-locks host memory where there is CUDA."""


ON_DEVICE = Tiers()
"""Everything on the device."""
