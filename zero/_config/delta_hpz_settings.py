"""``mode="delta_hpz"`` and ``mode="delta"``: which other settings they allow, and which they replace.

``mode="delta_hpz"``, stage 3 on several nodes. 4-bit messages cross the network once a step, not per micro-batch:

    forward, backward   parameters are gathered inside the node from its ranks' replicas       Replica
    each micro-batch    gradients are summed inside the node, in float32               GradientReduceScatter
    the last one        these sums are reduced between the nodes, bucket by bucket     GradientReduceScatter
    step()              norm and clipping; then bucket by bucket the sharded update. The       BucketwiseUpdate
                        delta of the updated shard goes to the ranks of equal local rank of
                        the other nodes while the next bucket is updated; the bucket's next
                        use waits for it

A replica is this rank's 1 / L of its node's copy of the parameters, in their dtype. The sender knows what receivers
hold, so errors do not accumulate, and all nodes hold the same bits. Writes outside of a step (loading,
GatheredParameters, safe_set_*) update replicas exactly. What the last hop of the reduction loses is kept as a
residual, without the loss scale, and committed when the step is applied. Frozen parameters are never sent, nor are
buckets that no rank used in the step.

Bytes for each parameter and rank beyond stage 3: 2 / L replica, 1 / L residual, and with accumulation 4 / L sums.

``mode="delta"``, stages 1 and 2 on several nodes. After a step deltas update the full parameters, between nodes and
then inside them (full_replica). Gradients travel as without the mode. It costs 2 bytes for each parameter of this
rank's shard.
"""

from __future__ import annotations

from dataclasses import replace

from zcomm import ConfigError, Topology, get_format
from zero._config.settings import Effective, ZeroSettings, resolve
from zero._storage.tier_settings import Tier

CHANGE_FORMAT = "int4"
"""The format of parameters' deltas, unless ``weight_format`` is given."""
GRADIENT_FORMAT = ("int8", "nf4")
"""The formats of gradients inside the node and between nodes, unless ``gradient_format`` is given."""


def resolve_mode(settings: ZeroSettings, topology: Topology) -> Effective:
    """Decide which of ``settings``, the mode included, take effect. The same on every rank.

    Raises:
        ConfigError: The mode is unknown, or is not combined with another setting; see also
            :func:`zero._config.settings.resolve`.
    """
    if settings.mode is None:
        return resolve(settings, topology)
    _check(settings)
    if topology.num_nodes == 1:
        effective = resolve(replace(settings, mode=None, weight_format=None), topology)
        return effective.with_notes(inactive=(f"mode={settings.mode!r} (one node: nothing crosses a network)",))
    changes, inactive = settings.weight_format or CHANGE_FORMAT, list[str]()
    if settings.quantized_weights:
        inactive.append(f"quantized_weights (mode={settings.mode!r}: deltas of parameters are sent, as {changes})")
    remaining = replace(settings, weight_format="none", quantized_weights=False)
    _check_rounding(settings.mode, changes)
    if settings.mode == "delta_hpz":
        remaining = _with_mode_formats(remaining, inactive)
    return replace(resolve(remaining, topology), change_format=changes).with_notes(inactive=tuple(inactive))


def _check_rounding(mode: str | None, *names: str) -> None:
    for name in names:
        if get_format(name).is_random:
            raise ConfigError(f"mode={mode!r} rounds to nearest: format={name!r} rounds stochastically")


def _with_mode_formats(settings: ZeroSettings, inactive: list[str]) -> ZeroSettings:
    """The settings that remain with ``mode="delta_hpz"``; those without effect are added to ``inactive``."""
    gradients = settings.gradient_format or GRADIENT_FORMAT
    _check_rounding(settings.mode, *((gradients,) if isinstance(gradients, str) else gradients))
    if settings.quantized_gradients:
        inactive.append(
            f"quantized_gradients (mode={settings.mode!r}: gradients are sent as {gradients}; set gradient_format for "
            "others)"
        )
    if settings.hpz_partition_size > 1:
        inactive.append(f"hpz_partition_size (mode={settings.mode!r}: every node has a replica already)")
    return replace(settings, gradient_format=gradients, quantized_gradients=False, hpz_partition_size=1)


def _check(settings: ZeroSettings) -> None:
    mode, tiers = settings.mode, settings.tiers
    refused = {"delayed_update (replicas would be one update behind)": tiers.states.delays_update}
    if mode == "delta_hpz":
        if settings.stage != 3:
            instead = "; mode='delta' is of stages 1 and 2" if settings.stage else ""
            raise ConfigError(
                f"mode={mode!r} needs stage 3, where parameters are gathered: stage={settings.stage}{instead}"
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
            f"mode={mode!r} needs stage 1 or 2, where every rank updates a shard of parameters that all hold: "
            f"stage={settings.stage}; stage 3 has mode='delta_hpz'"
        )
    requested = [what for what, is_requested in refused.items() if is_requested]
    if requested:
        raise ConfigError(f"mode={mode!r} is not combined with {'; '.join(requested)}: leave out one of them")
