"""A shard stored as an encoded message: encoded once, then gathered any number of times.

values --quantize--> message, stored --all-gather--> messages --decode--> output
"""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm._collectives.all_gather import gather_messages, own_message
from zcomm._formats.formats import FORMATS
from zcomm._kernels import kernels
from zcomm._transport.route import Group, check_numbering, find_route, rows_of
from zcomm._transport.topology import Numbering
from zcomm._transport.work import Steps, Work, nothing, run
from zcomm.errors import FormatError

INT8 = FORMATS["int8"]


class EncodedShard:
    """This rank's shard of a tensor, stored as INT8 blocks of 256.

    Args:
        values: The shard [n], floating point; only its encoding is kept. n is the same on every rank.
        group: A ProcessGroup (default: all ranks) for one hop, or a :class:`zcomm.Topology` for two.
        device: Where the message is stored; default: the device of ``values``.

    Raises:
        FormatError: The format does not support the dtype.
    """

    def __init__(self, values: Tensor, group: Group = None, *, device: torch.device | None = None) -> None:
        self._route = find_route("all_gather", group, INT8, first="inter")
        self._layout = self._route.layout(INT8, values.dtype, 1, values.numel())
        self.numel, self.dtype = values.numel(), values.dtype
        self._message = self._layout.new(1, device or values.device)
        self.set(values)

    @property
    def nbytes(self) -> int:
        """Bytes held on this rank."""
        return self._message.numel()

    def set(self, values: Tensor) -> None:
        """Encode and store ``values`` [n]. Setting what :meth:`decode` returned changes nothing."""
        message = self._layout.new(1, values.device)
        kernels.quantize(values, self._layout, message, 0, 0)
        self._message.copy_(message)

    def decode(self, device: torch.device | None = None) -> Tensor:
        """The values of this shard that a gather gives all ranks: [n] on ``device``, default where it is stored."""
        message = self._message if device is None else self._message.to(device)
        values = torch.empty(self.numel, dtype=self.dtype, device=message.device)
        kernels.decode(message, self._layout, values, 0, 0)
        return values

    def gather(self, output: Tensor, *, numbering: Numbering = "rank", async_op: bool = False) -> Work | None:
        """Decode every rank's shard into ``output``, [world_size * n] or [world_size, n]. Collective.

        Gives the bits of :func:`zcomm.all_gather_single` of the values that were set, but encodes nothing. On two hops
        ``numbering`` must be "local".

        Raises:
            FormatError: The numbering is "rank", on two hops.
            LayoutError: ``output`` does not fit. Both are raised before any communication.
        """
        check_numbering(numbering)
        if numbering == "rank" and len(self._route.hops) == 2:
            raise FormatError('on two hops numbering must be "local": numbering="rank"')
        rows = rows_of("output", output, self._route.world_size)
        self._route.check_device(rows.device)
        self._route.compare(numel=self.numel, dtype=self.dtype, numbering=numbering, stored="encoded")
        steps = self._steps(rows) if self.numel else nothing()
        queue, num_exchanges = self._route.queue, len(self._route.hops)
        return run(steps, output, self._message, async_op=async_op, queue=queue, num_exchanges=num_exchanges)

    def _steps(self, rows: Tensor) -> Steps:
        messages = self._layout.new_to_receive(self._route.world_size, rows.device)
        # From host memory this is asynchronous; the exchange is queued behind it on the same stream.
        own = own_message(messages, self._route).copy_(self._message, non_blocking=True)
        yield from gather_messages(messages, own, self._layout, self._route)
        kernels.decode(messages, self._layout, rows, rows.stride(0), 0)
