"""Settings of offloading: the storage tier of states and parameters, and how files are read and written."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Tier(Enum):
    """A storage tier."""

    DEVICE = "device"  # the memory of the device that computes
    CPU = "cpu"  # host memory, page-locked where there is CUDA
    NVME = "nvme"  # files of this rank, read and written by direct I/O


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """How files are read and written (``aio``)."""

    request_nbytes: int = 1_048_576
    num_requests: int = 8
    """Requests in flight at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTier:
    """``offload_optimizer``: the tier of masters and moments. The host updates them unless it is the device."""

    tier: Tier = Tier.DEVICE
    path: str | None = None
    """Folder of the files (nvme)."""
    ratio: float = 1.0
    """Share of the elements that is offloaded; the others stay on the device."""
    sub_group_numel: int = 1_000_000_000
    """At most so many elements are read, updated and written at a time."""
    num_buffers: int = 4
    """At most so many sub-groups are in memory at a time."""
    keeps_previous: bool = True
    """Store two versions of each sub-group in the files: a step that fails leaves the optimizer as it was before. False
    takes half the disk space, but after a failed step the optimizer cannot continue."""
    reads_ahead: bool = False
    writes_behind: bool = False
    delays_update: bool = False
    """The update of a step runs during the next step's forward and backward."""
    delay_start: int = 40
    """The first so many updates are not delayed."""

    @property
    def allows_joint_updates(self) -> bool:
        """Whether ranks may exchange something during an update: not in a thread of its own, nor between sub-groups."""
        return self.tier is Tier.DEVICE or (self.tier is Tier.CPU and not self.delays_update)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTier:
    """``offload_param``: the tier of parameter shards (stage 3)."""

    tier: Tier = Tier.DEVICE
    path: str | None = None
    num_buffers: int = 5
    """Staging buffers at most."""
    buffer_numel: int = 100_000_000
    """Elements of each buffer at most."""
    max_numel_in_memory: int = 0
    """Elements of shards that stay in host memory instead of files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """All settings of offloading."""

    states: StateTier = field(default_factory=StateTier)
    parameters: ParameterTier = field(default_factory=ParameterTier)
    files: FileSettings = field(default_factory=FileSettings)
    pins_memory: bool = True
    """Page-lock host memory where there is CUDA."""


ON_DEVICE = Tiers()
"""Nothing is offloaded."""
