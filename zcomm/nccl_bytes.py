"""Single hops over NCCL, of bytes that are there already: for what the pipeline in C++ has no kernels for.

The collective is the one that runs over torch's groups, with the same kernels, messages and bits; only the exchanges go
through the communicator of :mod:`zcomm.nccl_communicators`. Each hop has a stream of its own, so hops of several chunks
overlap one another and the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm.backend import Hop
from zcomm.errors import BackendUnavailableError, CommunicationError
from zcomm.ledger import call_here
from zcomm.nccl_communicators import communicator_over, inside_first
from zcomm.nccl_library import is_emulated
from zcomm.pending import Pending

__all__ = ["check_device", "over_nccl"]


def over_nccl(*hops: Hop) -> tuple[Hop, ...]:
    """The hops of one route, in any order, carried by the communicator over all of them."""
    ordered = inside_first(hops)
    return tuple(_carried(hop, ordered) for hop in hops)


def _carried(hop: Hop, ordered: tuple[Hop, ...]) -> Hop:
    index = next(i for i, other in enumerate(ordered) if other is hop)
    return hop.with_carrier(_NcclBytes(ordered, index))


def check_device(operation: str, device: torch.device) -> None:
    """Raise BackendUnavailableError unless tensors on ``device`` go over NCCL: CUDA's, or, emulated, the CPU's."""
    taken = "cpu" if is_emulated() else "cuda"
    if device.type != taken:
        raise BackendUnavailableError(
            f"backend='nccl' does not serve this {operation}: it takes {taken.upper()} tensors, got device={device}; "
            "use backend='torch'"
        )


class _NcclBytes:
    """Hop number ``index`` of ``hops``, which are ordered: a :class:`zcomm.backend.Carrier`."""

    def __init__(self, hops: tuple[Hop, ...], index: int) -> None:
        self._hops, self._index = hops, index

    def all_gather(self, output: Tensor, message: Tensor) -> Pending:
        """Of contiguous ``message``; ``output`` is contiguous or has contiguous rows."""
        stride = message.nbytes if output.is_contiguous() else output.stride(0) * output.element_size()
        return self._exchange(output, message, stride, message.nbytes, is_gather=True)

    def all_to_all(self, output: Tensor, messages: Tensor) -> Pending:
        """Of contiguous tensors."""
        nbytes = messages.nbytes // self._hops[self._index].size
        return self._exchange(output, messages, nbytes, nbytes, is_gather=False)

    def _exchange(self, output: Tensor, source: Tensor, stride: int, nbytes: int, *, is_gather: bool) -> Pending:
        check_device("exchange", source.device)
        over = communicator_over(self._hops, source.device)
        call = call_here("all_gather" if is_gather else "all_to_all", source.nbytes, source.device.type)
        with over.streams.beside(self._index, source.device, (output, source), call) as lane:
            place = stride, nbytes, lane.address
            try:
                over.native.exchange_bytes(self._index, is_gather, source.data_ptr(), output.data_ptr(), *place)
            except RuntimeError as error:
                raise CommunicationError(f"an exchange of bytes over NCCL: {error}") from error
            return lane.ended()
