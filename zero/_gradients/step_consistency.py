"""Detects ranks that diverged: settings, boundaries and accumulated gradients must be equal when gradients are reduced.

A digest of them is part of the agreement that ends each backward, so it costs no message. A call on one rank only,
such as ``model.zero_grad()`` or another learning rate between a backward and ``step()``, is found at the next backward,
or when weights are saved before it: no checkpoint holds half a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from zcomm import DivergedError, Topology, control
from zero._config.rank_consistency import differences_between_ranks, summarize
from zero._gradients.bucket_gradients import BucketGrads

DIGEST_NBYTES = 7  # the agreement sends it as int64
PLAIN = (bool, int, float, str, type(None))
OTHER_GATHERS = (
    "the ranks have gathered different parameters, so results since the last step are wrong: at stage 3 every rank "
    "must run the same modules in the same order (for layers that only some ranks use, choose stage 1 or 2)"
)


class StepFacts:
    """What this rank has done since the last step, and the settings of its next update.

    Args:
        all_grads: Those of the trainable buckets.
    """

    def __init__(self, all_grads: Sequence[BucketGrads]) -> None:
        self._all = all_grads
        self._groups: Callable[[], list[dict[str, Any]]] = list
        self._written: Callable[[], tuple[str, ...]] = tuple
        self._names: list[tuple[str, ...]] = []
        self.num_backwards = 0
        """Backwards outside of ``no_sync`` since the last step."""
        self.is_deferred = False
        """Whether ``no_sync`` was entered since the last backward outside of it."""
        self.has_failed = False
        """Whether the last step raised an error on this rank, which may have left it without the update."""
        self._applied: bytes = b""
        """By parameter, whether the last step had a gradient; then by bucket, whether a user had edited gradients."""
        self._key: tuple[Any, ...] = ()
        self._digest = 0

    def watch(self, groups: Callable[[], list[dict[str, Any]]], written: Callable[[], tuple[str, ...]]) -> None:
        """Compare the settings of these parameter groups, too, if they are plain values.

        ``written``: the parameters that were written to where that is an error, which all ranks must raise.
        """
        self._groups, self._written = groups, written
        self._names = [tuple(name for name in group if name not in ("params", "param_names")) for group in groups()]

    def count(self, *, is_deferred: bool) -> None:
        """A backward starts; ``is_deferred``: within ``no_sync``, where ranks may run different numbers of them."""
        self.num_backwards, self.is_deferred = self.num_backwards + (not is_deferred), is_deferred

    def end_step(self, edits: list[bool]) -> None:
        """A step uses the present gradients; ``edits``: by bucket, whether a user has edited them."""
        self.num_backwards, self.is_deferred, self.has_failed = 0, False, False
        self._applied = b"".join([*(bytes(grads.used) for grads in self._all), bytes(edits)])

    def digest(self, edits: list[bool], ends_step: bool) -> int:  # noqa: FBT001  (of one caller)
        """The digest of everything compared; ``ends_step``: this backward is the last of a step."""
        held = b"".join([*(bytes(grads.reduced) for grads in self._all), bytes(edits)])
        key = (self._settings(), self.num_backwards, ends_step, held, self._applied, self.has_failed, self._written())
        if key != self._key:
            hashed = hashlib.blake2b(repr(key).encode(), digest_size=DIGEST_NBYTES).digest()
            self._key, self._digest = key, int.from_bytes(hashed, "little")
        return self._digest

    def _settings(self) -> tuple[Any, ...]:
        pairs = zip(self._groups(), self._names, strict=True)
        return tuple(_plain(group.get(name)) for group, names in pairs for name in names)

    def check(self, topology: Topology) -> None:
        """Raise DivergedError on every rank if the last step or the settings differ between ranks. Collective."""
        if topology.world_size == 1:
            return
        applied, has_failed = self._applied, self.has_failed
        # without gradients: ranks may clear them differently
        self._key = (self._settings(), 0, True, b"", applied, has_failed, ())
        try:
            if not control.are_equal(repr(self._key), topology):
                raise self.divergence(topology)
        finally:
            self._key, self._applied, self.has_failed = (), applied, has_failed  # a second save must fail again

    def forget_step(self) -> None:
        """A load has undone the last step. :attr:`has_failed` stays until optimizer states are loaded, too."""
        self._applied = b""

    def divergence(self, topology: Topology) -> DivergedError:
        """The error for different digests, which every rank must raise. Collective. A difference is reported once."""
        found = differences_between_ranks(self._texts(), topology, lane="step")
        self._applied, self.has_failed = b"", False
        return DivergedError(
            f"every rank must make the same calls with the same settings: {summarize(found)}. Pass the loss's mean "
            "over the ranks to a scheduler that follows it; call zero_grad() and step(), and set param.grad and "
            "accumulation boundaries, on every rank; after a step that raised on some ranks, load the last checkpoint"
        )

    def _texts(self) -> dict[str, str]:
        settings, num_backwards, ends_step, held, applied, has_failed, written = self._key
        texts = {"the number of backwards since the last step": str(num_backwards)}
        texts["the backward"] = "one that ends a step" if ends_step else "one within a step"
        texts["the last step"] = "unfinished, as it raised an error," if has_failed else "done"
        texts |= {f"the parameter {name!r}": "written to outside zero.GatheredParameters" for name in written}
        named = [f"parameter group {i} {name}" for i, names in enumerate(self._names) for name in names]
        texts |= {name: repr(value) for name, value in zip(named, settings, strict=True)}
        slots = [slot.name for grads in self._all for slot in grads.bucket.layout.slots]
        buckets = [grads.bucket.name for grads in self._all]
        for bits, when, word in ((held, "before this backward", "held"), (applied, "in the last step", "applied")):
            named = [f"the gradient of {name!r} {when}" for name in slots]
            texts |= {name: word if bit else "none" for name, bit in zip(named, bits, strict=False)}
            named = [f"param.grad in {name!r} {when}" for name in buckets]
            edits = bits[len(slots) :]
            texts |= {name: "edited in place" if bit else "as reduced" for name, bit in zip(named, edits, strict=False)}
        return texts


def _plain(value: Any) -> Any:
    """``value`` if it can be compared cheaply, else None; reading a tensor on a GPU would block the host."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, float):
        return float(value)  # repr() of numpy's floats differs
    return value if isinstance(value, PLAIN) else None
