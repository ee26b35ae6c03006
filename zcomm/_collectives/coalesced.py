"""Lists of tensors in one exchange: they lie side by side in a flat buffer, which is sent as one tensor.

    tensors      [n0], [n1], ... or [world_size, n0], [world_size, n1], ...
    buffer       | n0 | padding | n1 | padding | ...        each begins at a multiple of the formats' blocks

No block has elements of two tensors, so the bits are those of a call for each tensor. For that the padding must not
change the scale or zero point of a block: it repeats the last element up to the end of a block and, if formats have
blocks of several sizes, that block up to the end of a larger one, which then has no other values, also decoded.

The bits differ with a rotation, which also rotates the padded block; with stochastic rounding, which numbers elements
by their place in the buffer; if ``"auto"`` chooses blocks of more than 256 elements; and if one block size is no
multiple of another.

Cost: a copy into the buffer and one out of it. Each tensor, or each rank's row of it, takes whole blocks: many tensors
that are much smaller than a block send more bytes than one flat tensor would.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from zcomm._collectives.auto_format import AUTO
from zcomm._formats.formats import Format, get_format
from zcomm._transport.call_context import current_context, in_bucket
from zcomm._transport.route import Group, WireFormat, as_flat, check_arguments, check_shard, rows_of
from zcomm._transport.topology import Topology, hop_of_group
from zcomm._transport.work import Steps, Work, run
from zcomm.errors import LayoutError

AUTO_BLOCK = 256
"""The largest block that ``"auto"`` chooses by default."""


LIST = list, tuple


def check_no_residual(residual: object) -> None:
    if residual is not None:
        raise LayoutError("residual needs one tensor, since it knows elements by their place: leave it out with a list")


def world_size_of(group: Group) -> int:
    return group.world_size if isinstance(group, Topology) else hop_of_group(group).size


def rows_and_shards(group: Group, formats: Sequence[Any], **lists: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The first of two ``lists`` by name as [world_size, n], the second as [n].

    Raises:
        LayoutError: As :func:`as_lists`, or a tensor is not as long as its counterpart.
    """
    (rows_name, shards_name), (rows, shards) = lists, as_lists(group, formats, **lists)
    for index, shard in enumerate(shards):
        rows[index] = rows_of(f"{rows_name}[{index}]", rows[index], world_size_of(group))
        check_shard(f"{shards_name}[{index}]", shard, f"{rows_name}[{index}]", rows[index])
    return rows, shards


def as_lists(group: Group, formats: Sequence[Any], **lists: Any) -> list[list[Tensor]]:
    """``lists`` by name, their tensors flat if they are contiguous.

    Raises:
        LayoutError: Not all are lists of as many tensors, or those of a list differ in dtype or device.
    """
    lengths = {name: len(one) if isinstance(one, LIST) else None for name, one in lists.items()}
    if len(set(lengths.values())) > 1 or not all(lengths.values()):
        raise LayoutError(
            f"{' and '.join(lists)} must be tensors, or lists of equally many tensors, at least one: lengths="
            f"{list(lengths.values())}"
        )
    return [_as_list(group, formats, name, tensors) for name, tensors in lists.items()]


def _as_list(group: Group, formats: Sequence[Any], name: str, tensors: Sequence[Any]) -> list[Tensor]:
    found = check_arguments(group, *formats, **{f"{name}[{index}]": tensor for index, tensor in enumerate(tensors)})
    first = found[0]
    for index, tensor in enumerate(found):
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise LayoutError(
                f"the tensors of {name} must have one dtype and device: {name}[{index}] is {tensor.dtype} on "
                f"{tensor.device}, {name}[0] {first.dtype} on {first.device}"
            )
    return [as_flat(tensor) for tensor in found]


def coalesced(
    exchange: Callable[..., Work | None],
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    *formats: WireFormat,
    async_op: bool,
    then: Callable[[], None] = lambda: None,
) -> Work | None:
    """Run ``exchange`` of all ``sources`` and ``targets``, [n] or [world_size, n], then ``then``.

    ``exchange(target, source, async_op=...)`` is a collective of the buffers. ``targets`` may be ``sources``: the
    exchange is in place.
    """
    blocks = _blocks(formats)
    columns, numel = _columns([source.shape[-1] for source in sources], math.lcm(*blocks))
    source = sources[0].new_empty((*sources[0].shape[:-1], numel))
    for tensor, part in zip(sources, columns, strict=True):
        source[..., part].copy_(tensor)
        _pad(source, part, blocks)
    target = source if targets is sources else targets[0].new_empty((*targets[0].shape[:-1], numel))

    def finish() -> None:
        for tensor, part in zip(targets, columns, strict=True):
            tensor.copy_(target[..., part])
        then()

    # Lists of other lengths may make buffers of the same size: their exchanges must not match.
    digest = zlib.crc32(repr(columns).encode())
    with in_bucket(f"{current_context().bucket}{len(sources)} tensors {digest:08x}"):
        work = exchange(target, source, async_op=async_op)
    if work is None:
        finish()
        return None
    return run(_finishing(work, finish), target, *targets, async_op=True, queue=None)


def _finishing(work: Work, finish: Callable[[], None]) -> Steps:
    yield work
    finish()


def _blocks(formats: Sequence[WireFormat]) -> list[int]:
    """The block sizes of ``formats``, ascending."""
    wires = [wire for given in formats for wire in ((given,) if isinstance(given, (str, Format)) else given)]
    return sorted({AUTO_BLOCK if wire == AUTO else get_format(wire).block or 1 for wire in wires})


def _columns(numels: Sequence[int], multiple: int) -> tuple[list[slice], int]:
    """The columns of each tensor in the buffer, and their number with the padding."""
    columns, end = list[slice](), 0
    for numel in numels:
        columns.append(slice(end, end + numel))
        end += -(-numel // multiple) * multiple
    return columns, end


def _pad(buffer: Tensor, part: slice, blocks: Sequence[int]) -> None:
    """Fill the columns of ``buffer`` after those of a tensor, ``part``, up to a multiple of all ``blocks``."""
    numel, period = part.stop - part.start, 1
    for block in (*blocks, math.lcm(*blocks)):
        missing = -numel % block
        if missing:
            last = buffer[..., part.start + numel - period : part.start + numel]
            copies = last.repeat(*[1] * (buffer.ndim - 1), -(-missing // period))
            buffer[..., part.start + numel : part.start + numel + missing].copy_(copies[..., :missing])
        numel, period = numel + missing, block
