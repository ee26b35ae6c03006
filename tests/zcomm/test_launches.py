"""Counts the launches of each collective on a GPU when Python drives it: each costs host time.

Kernels that stand for the GPU's are counted, and every operation of torch's but views and allocations. And that what an
exchange receives has no trailers before, so that a short message is refused, whichever kernel clears them.
"""

# covers triton_kernels/tiles.py

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zcomm
from tests.ranks import run_ranks, topology
from zcomm._formats import message, reference
from zcomm._formats.message import MessageLayout
from zcomm._kernels import kernels
from zcomm._transport import backend, chunks

NUMEL = 4096
Counts = dict[str, int]


class _Gpu(TorchDispatchMode):
    """Counts launches: of this library's kernels, in place of a GPU's module, and of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._is_in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_launch = func.namespace == "aten" and not func.is_view and not name.startswith(("empty", "new_empty", "_to"))
        if is_launch and not self._is_in_kernel and name not in ("detach", "alias", "_local_scalar_dense"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def serves(self, *_: Any) -> bool:
        return True

    def _kernel(self, name: str, run: Callable[[], None]) -> None:
        self.counts[name] += 1
        self._is_in_kernel = True
        try:
            run()
        finally:
            self._is_in_kernel = False

    def quantize(self, *arguments: Any, expected: Tensor | None = None, **_: Any) -> None:
        self._kernel("quantize", lambda: _clear_and(reference.quantize, arguments, expected))

    def decode(self, *arguments: Any) -> None:
        self._kernel("decode", lambda: reference.decode(*arguments))

    def decode_sum(self, *arguments: Any) -> None:
        self._kernel("decode_sum", lambda: reference.decode_sum(*arguments))

    def decode_sum_requantize(self, *arguments: Any, expected: Tensor | None = None, **_: Any) -> None:
        self._kernel("decode_sum_requantize", lambda: _clear_and(reference.decode_sum_requantize, arguments, expected))


def _clear_and(encode: Callable[..., None], arguments: tuple[Any, ...], expected: Tensor | None) -> None:
    if expected is not None:
        message.clear_trailers(expected)
    encode(*arguments)


def _counted(call: Callable[[], object]) -> Counts:
    usual = kernels._gpu_kernels
    with _Gpu() as gpu:
        kernels._gpu_kernels = lambda *_, **__: gpu  # type: ignore[assignment,misc]
        try:
            call()
        finally:
            kernels._gpu_kernels = usual
    return dict(gpu.counts)


def _check_launches(rank: int) -> None:
    nodes, full = topology(2), torch.randn(4 * NUMEL)
    shard, other = torch.randn(NUMEL), torch.empty(4 * NUMEL)
    part = torch.empty(NUMEL)

    def gather(group: Any, wire: Any, numbering: Any = "local") -> Counts:
        return _counted(lambda: zcomm.all_gather_single(other, shard, group, format=wire, numbering=numbering))

    def reduce(group: Any, wire: Any) -> Counts:
        return _counted(lambda: zcomm.reduce_scatter_single(part, full, "avg", group=group, format=wire))

    def exchange(group: Any, wire: Any) -> Counts:
        return _counted(lambda: zcomm.all_to_all_single(other, full, group, format=wire))

    both = ("int8", "int4")
    one, two = {"copy_": 1}, {"copy_": 2}  # of a rank's own part, over gloo: NCCL's collective makes it itself
    expected: dict[str, tuple[Counts, Counts]] = {
        "gather, one hop": (gather(None, "int8", "rank"), {"quantize": 1, "decode": 1}),
        "gather, forwarded": (gather(nodes, "int8"), {"quantize": 1, "decode": 1}),
        "gather, by rank": (gather(nodes, "int8", "rank"), {"quantize": 1, "decode": 2}),
        "gather, recoded": (gather(nodes, both), {"quantize": 2, "decode": 2}),
        "reduce, one hop": (reduce(None, "int8"), {"quantize": 1, "decode_sum": 1, **one}),
        "reduce": (reduce(nodes, both), {"quantize": 1, "decode_sum_requantize": 1, "decode_sum": 1, **two}),
        "exchange, one hop": (exchange(None, "int8"), {"quantize": 1, "decode": 1, **one}),
        "exchange, forwarded": (exchange(nodes, "int8"), {"quantize": 1, "clone": 2, "decode": 1, **two}),
        "exchange, recoded": (exchange(nodes, both), {"quantize": 2, "clone": 2, "decode": 2, **two}),
    }
    usual, chunks.MIN_CHUNK_NUMEL = chunks.MIN_CHUNK_NUMEL, 1024
    try:
        of_chunks = {"quantize": 4, "decode_sum_requantize": 4, "decode_sum": 4, "copy_": 8}
        expected["4 chunks"] = reduce(nodes, both), of_chunks
        expected["4 chunks gathered"] = gather(nodes, "int8"), {"quantize": 4, "decode": 4}
    finally:
        chunks.MIN_CHUNK_NUMEL = usual
    for name, (got, wanted) in expected.items():
        assert got == wanted, f"{name}: {got}, expected {wanted}"


def test_launches_of_each_collective() -> None:
    run_ranks(4, _check_launches)


class _Trailers:
    """Counts, before each exchange, messages to be received that still have a trailer. Memory is not zero by chance."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self._usual = MessageLayout.new, backend.all_gather, backend.all_to_all

    def __enter__(self) -> _Trailers:
        new, gather, exchange = self._usual

        def gathered(output: Tensor, own: Tensor, *rest: Any) -> Any:
            self.found.append(_with_trailers(output) - own.shape[0])
            return gather(output, own, *rest)

        def exchanged(output: Tensor, sent: Tensor, *rest: Any) -> Any:
            self.found.append(_with_trailers(output))
            return exchange(output, sent, *rest)

        MessageLayout.new = lambda *arguments: new(*arguments).fill_(0xAB)  # type: ignore[method-assign]
        backend.all_gather, backend.all_to_all = gathered, exchanged
        return self

    def __exit__(self, *_: object) -> None:
        MessageLayout.new, backend.all_gather, backend.all_to_all = self._usual  # type: ignore[method-assign]


def _with_trailers(messages: Tensor) -> int:
    return int((messages[..., -message.TRAILER_NBYTES :] != 0).any(-1).sum())


def _check_trailers(rank: int) -> None:
    nodes, full, shard = topology(2), torch.randn(4 * NUMEL), torch.randn(NUMEL)
    other, part, both = torch.empty(4 * NUMEL), torch.empty(NUMEL), ("int8", "int4")
    sums, delta = zcomm.NodeSums(nodes, NUMEL, both), zcomm.DeltaGather(torch.zeros(4 * NUMEL), nodes)
    delta.refresh(shard)
    calls: list[tuple[int, Callable[[], object]]] = [
        (1, lambda: zcomm.all_gather_single(other, shard, format="int8")),
        (2, lambda: zcomm.all_gather_single(other, shard, nodes, format="int8")),
        (2, lambda: zcomm.all_gather_single(other, shard, nodes, format=both)),
        (1, lambda: zcomm.reduce_scatter_single(part, full, format="int8")),
        (2, lambda: zcomm.reduce_scatter_single(part, full, group=nodes, format=both)),
        (2, lambda: zcomm.reduce_scatter_single(part, full, group=nodes, format=("none", "int8"))),
        (1, lambda: zcomm.all_to_all_single(other, full, format="int8")),
        (2, lambda: zcomm.all_to_all_single(other, full, nodes, format="int8")),
        (2, lambda: zcomm.all_to_all_single(other, full, nodes, format=both)),
        (2, lambda: zcomm.EncodedShard(shard, nodes).gather(other, numbering="local")),
        (2, lambda: sums.reduce(part, full)),
        (1, lambda: sums.add(full)),
        (1, lambda: sums.reduce(part)),
        (2, lambda: delta.update(shard)),
    ]
    for number, (num_exchanges, call) in enumerate(calls):
        with _Trailers() as trailers:
            call()
        plain = [0] * num_exchanges
        if number == 5:  # the first hop's messages are plain arrays, of 8 bytes that are not zero
            trailers.found[0] = 0
        assert trailers.found == plain, f"call {number}: {trailers.found} messages with trailers, expected {plain}"


def test_what_an_exchange_brings_has_no_trailers_before() -> None:
    run_ranks(4, _check_trailers)
