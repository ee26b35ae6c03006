"""Reads where things are stored: the sections ``offload_optimizer``, ``offload_param``, ``aio`` and activations."""

from __future__ import annotations

from zcomm import ConfigError
from zero._activations.activation_settings import ActivationSettings
from zero._config.sections import Config
from zero._storage.tier_settings import FileSettings, ParameterTier, StateTier, Tier, Tiers


def tiers_of(config: Config, *, stage: int) -> Tiers:
    """Read ``offload_optimizer``, ``offload_param`` and ``aio``; at stages where they have no effect: the device.

    Raises:
        ConfigError: ``nvme`` without a folder, or a ratio above 1.
    """
    zero = config.zero_optimization
    optimizer, param = zero.offload_optimizer, zero.offload_param
    states_are_offloaded = optimizer.device != "none" and stage >= 1
    params_are_offloaded = param.device != "none" and stage == 3
    for name, section, is_offloaded in (
        ("offload_optimizer", optimizer, states_are_offloaded),
        ("offload_param", param, params_are_offloaded),
    ):
        if is_offloaded and section.device == "nvme" and not section.nvme_path:
            raise ConfigError(f"zero_optimization.{name}.device='nvme' needs nvme_path, a folder on a fast disk")
    if optimizer.ratio > 1:
        raise ConfigError(f"zero_optimization.offload_optimizer.ratio must be 0 to 1: ratio={optimizer.ratio}")
    return Tiers(
        states=StateTier(
            tier=Tier(optimizer.device) if states_are_offloaded else Tier.DEVICE,
            path=optimizer.nvme_path,
            ratio=optimizer.ratio,
            sub_group_numel=zero.sub_group_size,
            num_buffers=optimizer.buffer_count,
            keeps_previous=config.zcomm.keep_previous_states,
            reads_ahead=optimizer.pipeline_read,
            writes_behind=optimizer.pipeline_write,
            delays_update=config.zcomm.delayed_update,
            delay_start=config.zcomm.delay_start,
        ),
        parameters=ParameterTier(
            tier=Tier(param.device) if params_are_offloaded else Tier.DEVICE,
            path=param.nvme_path,
            num_buffers=param.buffer_count,
            buffer_numel=param.buffer_size,
            max_numel_in_memory=param.max_in_cpu,
        ),
        files=FileSettings(request_nbytes=config.aio.block_size, num_requests=config.aio.queue_depth),
        pins_memory=optimizer.pin_memory and param.pin_memory,
    )


def activations_of(config: Config) -> ActivationSettings:
    """Read where inputs of checkpointed functions are stored.

    Raises:
        ConfigError: ``nvme`` without a folder.
    """
    requested, tier_name = config.activation_checkpointing, config.zcomm.activations
    tier = Tier(tier_name) if tier_name is not None else Tier.CPU if requested.cpu_checkpointing else Tier.DEVICE
    if tier is Tier.NVME and not config.zcomm.activations_nvme_path:
        raise ConfigError("zcomm.activations='nvme' needs zcomm.activations_nvme_path, a folder on a fast disk")
    return ActivationSettings(
        partitions=requested.partition_activations,
        tier=tier,
        path=config.zcomm.activations_nvme_path,
        files=FileSettings(request_nbytes=config.aio.block_size, num_requests=config.aio.queue_depth),
        has_arena=requested.contiguous_memory_optimization,
        num_checkpoints=requested.number_checkpoints,
        synchronizes=requested.synchronize_checkpoint_boundary,
        is_profiled=requested.profile,
    )
