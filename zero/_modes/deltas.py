"""What the two modes share that send deltas of the parameters after a step, instead of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from zcomm import ConfigError, LayoutError, Topology, get_format
from zero._config.setting_keys import EXACT
from zero._config.settings import Effective, ZeroSettings, resolve
from zero._gather.gather_sources import BucketSources, GatherOptions
from zero._modes.mode import Mode
from zero._sharding.bucket import Bucket

CHANGE_FORMAT = "int4"
"""The format of parameters' deltas, unless ``weight_format`` is given."""


class DeltaMode(Mode):
    """Reduces traffic between nodes, so it needs several."""

    needs_nodes = True

    def resolve(self, settings: ZeroSettings, topology: Topology) -> Effective:
        refused = {"delayed_update (replicas would be one update behind)": settings.tiers.states.delays_update}
        refused |= self.refused(settings)
        if requested := [what for what, is_requested in refused.items() if is_requested]:
            raise ConfigError(f"mode={self.name!r} is not combined with {'; '.join(requested)}: leave out one of them")
        changes, inactive = self._changes(settings), list[str]()
        self.check(settings)
        if topology.num_nodes == 1:
            plain = replace(settings, mode=None, weight_format=None, changes="quantized", gradient_error=0.0)
            effective = resolve(plain, topology)
            return effective.with_notes(inactive=(f"mode={self.name!r} (one node: nothing crosses a network)",))
        if settings.quantized_weights:
            inactive.append(f"quantized_weights (mode={self.name!r}: deltas of parameters are sent, as {changes})")
        remaining = replace(settings, weight_format="none", quantized_weights=False)
        if changes != EXACT:
            self.check_rounding(changes)
        effective = resolve(self.remaining(remaining, inactive), topology)
        effective = replace(effective, mode=self.name, mode_text=self.text(changes), change_format=changes)
        return effective.with_notes(inactive=tuple(inactive))

    def _changes(self, settings: ZeroSettings) -> str:
        """The format of deltas."""
        if settings.changes != EXACT:  # "auto" is left in plans alone, which have no parameters to ask
            return settings.weight_format or CHANGE_FORMAT
        if settings.weight_format is not None:
            raise ConfigError(
                f"changes={EXACT!r} sends deltas without loss, weight_format={settings.weight_format!r} does not: "
                "leave out one of them"
            )
        return EXACT

    def check_rounding(self, *formats: str) -> None:
        """Refuse formats that do not round to nearest."""
        for name in formats:
            if get_format(name).is_random:
                raise ConfigError(f"mode={self.name!r} rounds to nearest: format={name!r} rounds stochastically")

    def check(self, settings: ZeroSettings) -> None:
        """Refuse settings that contradict each other, also where the mode has no effect."""

    def refused(self, settings: ZeroSettings) -> dict[str, bool]:
        """By what it is, whether ``settings`` ask for something that the mode does not combine with."""
        return {}

    def remaining(self, settings: ZeroSettings, inactive: list[str]) -> ZeroSettings:
        """What the mode makes of other settings; those without effect are added to ``inactive``."""
        return settings

    def text(self, changes: str) -> str:
        """What it does, for the log."""
        raise NotImplementedError

    def sources(self, buckets: Sequence[Bucket], options: GatherOptions, effective: Effective) -> BucketSources:
        if effective.sends_exact_changes:
            _check_exact(buckets)
        return self.sources_of(buckets, options, effective.change_format or CHANGE_FORMAT)

    def sources_of(self, buckets: Sequence[Bucket], options: GatherOptions, format: str) -> BucketSources:
        """Where parameters come from, and what their deltas, in ``format``, are added to."""
        raise NotImplementedError


def _check_exact(buckets: Sequence[Bucket]) -> None:
    """Raise LayoutError unless the deltas of ``buckets`` can be sent without loss. The same on every rank."""
    for bucket in buckets:
        if bucket.is_trainable and bucket.dtype not in (torch.bfloat16, torch.float16):
            raise LayoutError(
                f"changes={EXACT!r} serves bfloat16 and float16 parameters: parameter {bucket.layout.slots[0].name!r} "
                f"is {bucket.dtype}; cast the model, or leave out changes"
            )
