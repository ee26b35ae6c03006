"""One outcome on all ranks: the same text, or the same error."""

from __future__ import annotations

import torch

from zcomm import Topology, control
from zero.checkpoint.errors import CheckpointError

__all__ = ["raise_together", "share_text"]


def share_text(text: str, src: int, topology: Topology) -> str:
    """Rank ``src``'s text, on every rank. Cost: two small broadcasts."""
    data = text.encode()
    length = torch.tensor([len(data)])
    control.broadcast_(length, src, topology)
    buffer = torch.zeros(int(length.item()), dtype=torch.uint8)
    if topology.rank == src and data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if buffer.numel():
        control.broadcast_(buffer, src, topology)
    return bytes(buffer.tolist()).decode()


def raise_together(error: CheckpointError | None, topology: Topology) -> None:
    """If any rank has an error, raise the first such rank's on every rank. Cost: one small exchange if none has."""
    if topology.world_size > 1:
        has_error = control.gather_float64(torch.tensor([float(error is not None)]), topology)
        ranks = [rank for rank, (value,) in enumerate(has_error.tolist()) if value]
        if ranks:
            text = share_text(str(error or ""), ranks[0], topology)
            raise CheckpointError(text) from error
    if error is not None:
        raise error
