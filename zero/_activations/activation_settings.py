"""The settings of activation checkpointing, as the configuration gives them."""

from __future__ import annotations

from dataclasses import dataclass, field

from zero._storage.tier_settings import FileSettings, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSettings:
    """The section ``activation_checkpointing``, and ``zcomm.activations``."""

    partitions: bool = False
    """Each tensor-parallel rank stores its part of every saved input."""
    tier: Tier = Tier.DEVICE
    """Where saved inputs are stored."""
    path: str | None = None
    """The folder of the files, for NVMe."""
    files: FileSettings = field(default_factory=FileSettings)
    has_arena: bool = False
    """Saved inputs share one buffer that is allocated once."""
    num_checkpoints: int | None = None
    """Checkpoints that the buffer is first allocated for; None: as many as the first step has."""
    synchronizes: bool = False
    """The device is synchronized before and after each function."""
    is_profiled: bool = False
    """Times are logged after every backward."""

    def described(self) -> tuple[str, ...]:
        """The text for ``optimizer.effective``; empty if nothing differs from torch.utils.checkpoint."""
        if not self.has_effect:
            return ()
        places = {Tier.DEVICE: "on the device", Tier.CPU: "in host memory", Tier.NVME: f"in files below {self.path}"}
        text = f"inputs of checkpointed functions are stored {places[self.tier]}"
        if self.has_arena:
            number = "" if self.num_checkpoints is None else f" with room for {self.num_checkpoints}"
            text += f", in one buffer{number}"
        text += ", divided over the tensor-parallel ranks" if self.partitions else ""
        text += ", the device synchronized around each" if self.synchronizes else ""
        return (text + (", times logged" if self.is_profiled else ""),)

    @property
    def moves(self) -> bool:
        """Whether saved inputs are copied to another place instead of staying where they are."""
        return self.partitions or self.has_arena or self.tier is not Tier.DEVICE

    @property
    def has_effect(self) -> bool:
        return self.moves or self.synchronizes or self.is_profiled
