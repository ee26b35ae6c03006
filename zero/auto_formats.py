"""``weight_format="auto"`` and ``gradient_format="auto"``: what ``zcomm probe`` found fastest on these links.

One format for all weights, and one for all gradients, by the model's largest exchange of each: decided once, at
construction, from the table that the first rank has (:mod:`zcomm.auto`), so all ranks have the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from zcomm import Topology
from zcomm.auto import AUTO, table_of
from zero.agreement import on_every_rank
from zero.model_plan import check_model, plan_model
from zero.settings import ZeroSettings
from zero.stages import get_stage

__all__ = ["choose_formats"]


def choose_formats(model: nn.Module, settings: ZeroSettings, topology: Topology) -> tuple[ZeroSettings, list[str]]:
    """``settings`` with formats in place of ``"auto"``, and what was chosen, in words. Collective if any is.

    Raises:
        ConfigError: The first rank's probe file is not one. The same on every rank.
    """
    plain = settings.with_formats(None, None)
    if plain == settings:
        return settings, []
    if not get_stage(settings.stage).shards_states:
        return plain, ["formats auto: none (stage 0 has no sharded exchange)"]
    planned = on_every_rank(lambda: plan_model(model, plain, topology), topology)
    device, table, said = check_model(model), table_of(topology), list[str]()
    buckets = [bucket for bucket in planned.buckets if bucket.dtype.is_floating_point]
    weights = max((min(b.layout.numel, settings.allgather_bucket_size) * b.dtype.itemsize for b in buckets), default=0)
    summed = (settings.gradient_dtype or torch.float32).itemsize
    trained = (min(b.layout.numel, settings.reduce_bucket_size) * summed for b in buckets if b.is_trainable)
    gradients = max(trained, default=0)
    found = table.choose("all_gather", weights, device)
    weight = str(found.between)  # one format, forwarded as it is: that of the slower links
    found = table.choose("reduce_scatter", gradients, device)
    hops = str(found.inside), str(found.between)
    if settings.weight_format == AUTO:
        said.append(f"weight_format auto: {weight} for {weights:,} bytes")
    if settings.gradient_format == AUTO:
        said.append(f"gradient_format auto: {','.join(dict.fromkeys(hops))} for {gradients:,} bytes")
        settings = replace(settings, quantized_gradients=False)  # which "none", the parameters' dtype, would leave on
    return settings.with_formats(weight, None if set(hops) == {"none"} else hops), said
