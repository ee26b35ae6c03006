"""A frozen shard that rests as INT8 blocks, about half the bytes of 16-bit weights, and is gathered as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zcomm import EncodedShard, StateError, Topology, Work
from zero.tiers.shard_rest import Elsewhere

__all__ = ["Encoded"]


class Encoded(Elsewhere):
    """One :class:`zcomm.EncodedShard` for each exchange of a gather.

    No step updates it. Where somebody changes its values, an exchange's part with any new value is rounded anew, the
    others keep their bits.

    Args:
        values: The shard's values on the device; not kept.
        cuts: How the exchanges of a gather cut it.
        topology: The ranks.
        keeps_on: Where the codes rest.
    """

    def __init__(
        self, values: Tensor, cuts: Sequence[tuple[int, int]], topology: Topology, *, keeps_on: torch.device
    ) -> None:
        nothing = torch.full((), float("nan"), dtype=values.dtype).expand(values.numel())
        super().__init__(nothing, values.device, updates_on_host=False)
        self._tier = "device" if keeps_on == values.device else "cpu"
        self._parts = {
            (start, stop): EncodedShard(values[start:stop], topology, device=keeps_on) for start, stop in cuts
        }

    def gather(self, cut: tuple[int, int], columns: Tensor, *, async_op: bool) -> Work | None:
        """Fill ``columns`` [world_size, n], those of ``cut``, from every rank. Collective."""
        return self._parts[cut].gather(columns, numbering="local", async_op=async_op)

    def target(self, start: int, stop: int, device: torch.device | None = None) -> Tensor:  # noqa: ARG002
        """Not for frozen parameters."""
        raise StateError("frozen parameters at rest in INT8 have no update")

    def written(self, start: int, stop: int) -> None:
        """Nothing: there is no target."""

    def flush(self) -> None:
        """Nothing is on its way."""

    def fetch(self, start: int, stop: int, row: Tensor) -> Tensor:  # noqa: ARG002
        """The decoded values of a part."""
        return self._parts[start, stop].decode(self.device)

    def fetched(self) -> None:
        """Nothing was taken."""

    def _read(self) -> Tensor:
        """Decoded, on the device."""
        return torch.cat([part.decode(self.device) for part in self._parts.values()])

    def keep(self) -> None:
        """Encode the parts that have new values."""
        for (start, stop), part in self._parts.items():
            values = self.shard[start:stop].detach()
            if not torch.equal(part.decode(self.device), values):
                part.set(values)

    @property
    def nbytes(self) -> dict[str, int]:
        """Of codes and scales."""
        return {self._tier: sum(part.nbytes for part in self._parts.values())}
