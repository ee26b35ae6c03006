"""The section ``activation_checkpointing``, and what ``zcomm`` adds to it."""

from __future__ import annotations

from zcomm import ConfigError
from zero.activations.settings import ActivationSettings
from zero.config.sections import Config
from zero.tiers.settings import Files, Tier

__all__ = ["activations_of"]


def activations_of(config: Config) -> ActivationSettings:
    """Read where checkpoints rest.

    Raises:
        ConfigError: Files without their folder.
    """
    asked, place = config.activation_checkpointing, config.zcomm.activations
    tier = Tier(place) if place is not None else Tier.CPU if asked.cpu_checkpointing else Tier.DEVICE
    if tier is Tier.NVME and not config.zcomm.activations_nvme_path:
        raise ConfigError("zcomm.activations='nvme' needs zcomm.activations_nvme_path, a folder on a fast disk")
    return ActivationSettings(
        partitions=asked.partition_activations,
        tier=tier,
        path=config.zcomm.activations_nvme_path,
        files=Files(request_nbytes=config.aio.block_size, num_requests=config.aio.queue_depth),
        has_arena=asked.contiguous_memory_optimization,
        num_checkpoints=asked.number_checkpoints,
        synchronizes=asked.synchronize_checkpoint_boundary,
        is_profiled=asked.profile,
    )
