"""``mode="delta_hpz"``, stage 3 on several nodes: per step, not per micro-batch, 4-bit messages cross the network.

    forward, backward   parameters are gathered inside the node, from its ranks' replicas      zero._gather.gather_sources.Replica
    each micro-batch    gradients are summed inside the node, and kept there in float32        zero._gradients.reduction.Reduction
    the last one        these sums are reduced between the nodes, bucket by bucket             the same
    step()              norm and clipping, and bucket by bucket the sharded update, after which the
                        change of the shard goes to the ranks of equal local rank of the other
                        nodes while the next is updated; waited for when it is used next        zero._step.delta_publish.Changes

A replica is this rank's 1 / L of its node's copy of the parameters, in their dtype. Receivers' state is known to the
sender, so errors do not add up, and all nodes hold the same bits. Writes that are not a step's (loading,
GatheredParameters, safe_set_*) bring replicas up to date exactly. What the last hop of the reduction loses is kept as a
residual, in units without the loss scale, and counts once the step is applied. Frozen parameters are never sent, nor
are buckets that no rank used in the step.

Bytes for each parameter and rank beyond stage 3: 2 / L replica, 1 / L residual, and with accumulation 4 / L sums.

``mode="delta"``, stages 1 and 2 on several nodes: full parameters are what changes are sent to, between nodes and on
inside them, after a step (:mod:`zero._gather.full_replica`). Gradients travel as they do without it. Each parameter of this rank's
shard takes 2 bytes more.

Here is what the mode means for the other settings; called while these are resolved.
"""

from __future__ import annotations

from dataclasses import replace

from zcomm import ConfigError, Topology, get_format
from zero._config.settings import Effective, ZeroSettings, resolve
from zero._config.value_types import nearest
from zero._storage.tier_settings import Tier

MODES = ("delta_hpz", "delta")
CHANGE_FORMAT = "int4"
"""Of changes of parameters, unless ``weight_format`` says another."""
GRADIENT_FORMAT = ("int8", "nf4")
"""Of gradients, inside the node and between nodes, unless ``gradient_format`` says others."""


def resolve_mode(settings: ZeroSettings, topology: Topology) -> Effective:
    """Decide what of ``settings``, the mode included, takes effect. The same on every rank.

    Raises:
        ConfigError: The mode is unknown, or something is asked for that it is not combined with; see also
            :func:`zero._config.settings.resolve`.
    """
    if settings.mode is None:
        return resolve(settings, topology)
    _check(settings)
    if topology.num_nodes == 1:
        effective = resolve(replace(settings, mode=None, weight_format=None), topology)
        return effective.and_more(inactive=(f"mode={settings.mode!r} (one node: nothing leaves it as it is)",))
    changes, inactive = settings.weight_format or CHANGE_FORMAT, list[str]()
    if settings.quantized_weights:
        inactive.append(f"quantized_weights (mode={settings.mode!r}: changes of parameters travel, as {changes})")
    kept = replace(settings, weight_format="none", quantized_weights=False)
    _check_rounding(settings.mode, changes)
    if settings.mode == "delta_hpz":
        kept = _beside_replicas(kept, inactive)
    return replace(resolve(kept, topology), change_format=changes).and_more(inactive=tuple(inactive))


def _check_rounding(mode: str | None, *names: str) -> None:
    for name in names:
        if get_format(name).is_random:
            raise ConfigError(f"mode={mode!r} rounds to nearest: format={name!r} rounds stochastically")


def _beside_replicas(settings: ZeroSettings, inactive: list[str]) -> ZeroSettings:
    """The settings that hold beside ``mode="delta_hpz"``; what has no effect is added to ``inactive``."""
    gradients = settings.gradient_format or GRADIENT_FORMAT
    _check_rounding(settings.mode, *((gradients,) if isinstance(gradients, str) else gradients))
    if settings.quantized_gradients:
        inactive.append(
            f"quantized_gradients (mode={settings.mode!r}: gradients travel as {gradients}; gradient_format= says "
            "others)"
        )
    if settings.hpz_partition_size > 1:
        inactive.append(f"hpz_partition_size (mode={settings.mode!r}: every node has a copy already)")
    return replace(settings, gradient_format=gradients, quantized_gradients=False, hpz_partition_size=1)


def _check(settings: ZeroSettings) -> None:
    mode, tiers = settings.mode, settings.tiers
    if mode not in MODES:
        raise ConfigError(
            f"mode must be one of {', '.join(MODES)}, or absent: mode={mode!r}{nearest(str(mode), MODES)}"
        )
    refused = {
        "delayed_update (receivers would be behind)": tiers.states.delays_update,
    }
    if mode == "delta_hpz":
        if settings.stage != 3:
            instead = "; mode='delta' is of stages 1 and 2" if settings.stage else ""
            raise ConfigError(
                f"mode={mode!r} is of stage 3, where parameters are gathered: stage={settings.stage}{instead}"
            )
        refused |= {
            "offload_param (replicas are on the device)": tiers.parameters.tier is not Tier.DEVICE,
            "zero_quantized_nontrainable_weights (replicas have the parameters' dtype)": (
                settings.quantized_nontrainable_weights
            ),
            "hpz_secondary_device='cpu' (replicas are on the device)": settings.hpz_secondary_device == "cpu",
        }
    elif settings.stage not in (1, 2):
        raise ConfigError(
            f"mode={mode!r} is of stages 1 and 2, where every rank updates a shard of parameters that all hold: "
            f"stage={settings.stage}; stage 3 has mode='delta_hpz'"
        )
    asked = [what for what, is_asked in refused.items() if is_asked]
    if asked:
        raise ConfigError(f"mode={mode!r} is not combined with {'; '.join(asked)}: leave out one of them")
