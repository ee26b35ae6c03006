"""All-gather and reduce-scatter of shards of different lengths: bits and bytes.

Sizes and values come from the date: ``ZERO_TEST_DAY=NUMBER`` repeats a day.
"""

# covers zcomm/_collectives/uneven_shards.py zcomm/volume.py

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from tests.ranks import device_mesh, run_ranks, topology
from tests.rotation import DAY
from tests.zcomm import oracle
from tests.zcomm.data import same_values
from zcomm import LayoutError, RandomKey, Topology, volume
from zcomm._kernels import kernels
from zcomm._transport import backend, chunks

ROW = (3, 5)
ROW_NUMEL = 15
BLOCKS = {"int8": 256, "int4": 128}
KEY = RandomKey(5, 6, 7)
PLACES = [(3, 1), (3, 3), (4, 1), (4, 2), (4, 4), (2, 2)]
"""Ranks, and how many of them are in a node."""
NUMBERINGS = ("rank", "local")


@pytest.fixture(autouse=True)
def _day() -> None:
    print(f"ZERO_TEST_DAY={DAY}")  # noqa: T201  (pytest shows it with a failure)


def _many_sizes(world_size: int, seed: int) -> list[list[int]]:
    """Rows of each shard: zeros, one element, one shard that has all, all alike, nothing at all, and random ones."""
    draw = random.Random(seed)
    chosen = [draw.choice((0, 1, 2, draw.randrange(3, 60))) for _ in range(world_size)]
    one = [0] * world_size
    one[draw.randrange(world_size)] = draw.randrange(1, 40)
    return [chosen, [draw.randrange(1, 90) for _ in range(world_size)], one, [7] * world_size, [0] * world_size]


def _owners(world_size: int, per_node: int, numbering: str) -> list[int]:
    """The rank that owns each row."""
    if numbering == "rank":
        return list(range(world_size))
    nodes = world_size // per_node
    return [node * per_node + local for local in range(per_node) for node in range(nodes)]


def _whole(rank: int, rows: int, seed: int, dtype: torch.dtype = torch.float32, row: Sequence[int] = ROW) -> Tensor:
    """Small integers: every sum of them is exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-4, 5, (rows, *row), generator=generator).to(dtype)


def _normal(rank: int, rows: int, seed: int, row: Sequence[int] = ROW) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn((rows, *row), generator=generator) * (rank + 1)


def _places(world_size: int, per_node: int) -> list[tuple[str, Any]]:
    """Numberings and groups. On one hop both numberings are the same."""
    if 1 < per_node < world_size:
        return [(numbering, topology(per_node)) for numbering in NUMBERINGS]
    return [("local", topology(per_node)), ("rank", None)]


def _gather(shard: Tensor, sizes: list[int], group: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """The result, which must be the same of a synchronous and of an asynchronous call."""
    made = [shard.new_full((sum(sizes), *shard.shape[1:]), 9, dtype=dtype or shard.dtype) for _ in range(2)]
    assert zcomm.all_gather_single(made[0], shard, group, output_split_sizes=sizes, **options) is None
    work = zcomm.all_gather_single(made[1], shard, group, output_split_sizes=sizes, async_op=True, **options)
    assert work is not None
    work.wait()
    assert work.is_completed()
    assert same_values(*made)
    return made[0]


def _reduce(
    source: Tensor,
    rows: int,
    sizes: list[int],
    group: Any,
    op: str = "sum",
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    made = [source.new_full((rows, *source.shape[1:]), 9, dtype=dtype or source.dtype) for _ in range(2)]
    given = {"group": group, "input_split_sizes": sizes, **options}
    assert zcomm.reduce_scatter_single(made[0], source, op, **given) is None
    work = zcomm.reduce_scatter_single(made[1], source, op, async_op=True, **given)
    assert work is not None
    work.wait()
    assert same_values(*made)
    return made[0]


def _check_exact(rank: int, world_size: int, per_node: int, seed: int) -> None:
    cases = [(sizes, *place) for sizes in _many_sizes(world_size, seed) for place in _places(world_size, per_node)]
    for (sizes, numbering, group), dtype in (
        (case, dtype) for case in cases for dtype in (torch.float32, torch.bfloat16, torch.float64)
    ):
        owners = _owners(world_size, per_node, numbering)
        own, about = owners.index(rank), (sizes, numbering, group, dtype)
        shards = [_whole(owner, rows, seed, dtype) for owner, rows in zip(owners, sizes, strict=True)]
        assert same_values(_gather(shards[own], sizes, group, numbering=numbering), torch.cat(shards)), about
        sources = [_whole(r, sum(sizes), seed, dtype) for r in range(world_size)]
        total = sum(source.double() for source in sources)
        assert isinstance(total, Tensor)
        exact = torch.split(total, sizes)[own]
        for op, divisor in (("sum", 1), ("avg", world_size)):
            if dtype != torch.bfloat16 or world_size != 3 or op == "sum":  # a third is rounded twice
                got = _reduce(sources[rank], sizes[own], sizes, group, op, numbering=numbering)
                assert same_values(got, (exact / divisor).to(dtype)), (op, about)
        assert same_values(sources[rank], _whole(rank, sum(sizes), seed, dtype))


@pytest.mark.parametrize(("world_size", "per_node"), PLACES)
def test_values_are_those_of_torch(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_exact, world_size, per_node, DAY)


def _check_other_dtype(rank: int) -> None:
    """The result is wider, or narrower, than what is sent; and a mesh is a group."""
    sizes = [4, 0, 9, 1]
    for group in (topology(2), topology(4), device_mesh((4,), ("shards",))):
        for numbering in NUMBERINGS if group is topology(2) else ("rank",):
            owners = _owners(4, 2, numbering)
            own = owners.index(rank)
            shards = [_whole(owner, rows, DAY) for owner, rows in zip(owners, sizes, strict=True)]
            total = torch.split(sum(_whole(r, 14, DAY) for r in range(4)), sizes)[own]  # type: ignore[arg-type]
            for sent, got in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
                for wire in ("none", "bf16", ("bf16", "none"))[: 3 if isinstance(group, Topology) else 2]:
                    options: dict[str, Any] = {"dtype": got, "format": wire, "numbering": numbering}
                    full = _gather(shards[own].to(sent), sizes, group, **options)
                    assert same_values(full, torch.cat(shards).to(got)), options
                    part = _reduce(_whole(rank, 14, DAY, sent), sizes[own], sizes, group, **options)
                    assert same_values(part, total.to(got)), options


def test_dtypes_of_output_and_input_may_differ() -> None:
    run_ranks(4, _check_other_dtype)


def _check_alone(_: int) -> None:
    x = _normal(0, 3, DAY)
    for group in (Topology.single(), None):
        for wire in ("none", "bf16"):
            assert same_values(_gather(x, [3], group, format=wire), x if wire == "none" else x.bfloat16().float())
            assert same_values(_reduce(x, 3, [3], group, format=wire), x if wire == "none" else x.bfloat16().float())


def test_one_rank_alone() -> None:
    run_ranks(1, _check_alone)


ONE_FORMAT = ["none", "bf16", "fp16", "int8", "int4", "nf4", "fp8_e4m3", "int8/64:asym", "int4/32:hadamard"]
DRAWING = ["int4:stochastic", ("int8:stochastic", "int4/64:stochastic"), ("int8", "int4:stochastic")]
PAIRS = [("int8", "int4"), ("none", "int8"), ("int8", "none"), ("bf16", "int4"), ("int4", "bf16"), ("none", "bf16")]


@contextmanager
def _large_from(numel: int) -> Iterator[None]:
    """Shards of more elements are large: the even form cuts them into chunks, the uneven one avoids a copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "MIN_CHUNK_NUMEL", numel)
        yield


def _check_even(rank: int, world_size: int, per_node: int, seed: int) -> None:
    numel = 700 + seed % 90
    sizes = [numel] * world_size
    x = _normal(rank, world_size * numel, seed, ())
    for numbering, group in _places(world_size, per_node):
        pairs: list[Any] = DRAWING[:1] if group is None else [*PAIRS, *DRAWING]
        for index, wire in enumerate([*ONE_FORMAT, *pairs]):
            key = KEY if "stochastic" in str(wire) else None
            options: dict[str, Any] = {"format": wire, "numbering": numbering, "random": key}
            dtype = (torch.float32, torch.bfloat16)[(index + seed) % 2]
            full, part = x.new_empty(world_size * numel, dtype=dtype), x.new_empty(numel, dtype=dtype)
            zcomm.all_gather_single(full, x[:numel], group, **options)
            zcomm.reduce_scatter_single(part, x, "avg", group=group, **options)
            assert same_values(_gather(x[:numel], sizes, group, dtype, **options), full), options
            assert same_values(_reduce(x, numel, sizes, group, "avg", dtype, **options), part), options
            if 1 < per_node < world_size:
                with _large_from(256):
                    assert same_values(_gather(x[:numel], sizes, group, dtype, **options), full), options


@pytest.mark.parametrize(("world_size", "per_node"), PLACES[:5])
def test_equal_sizes_give_the_bits_of_even_shards(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_even, world_size, per_node, DAY)


def _check_chunks(rank: int, world_size: int, per_node: int, seed: int) -> None:
    """Large shards are reduced in chunks, with the bits and the bytes of one piece; block formats at once."""
    draw, t, nodes = random.Random(seed), topology(per_node), world_size // per_node
    for index, wire in enumerate([("none", "none"), ("bf16", "bf16"), ("none", "bf16"), ("bf16", "none"), "int8"]):
        numbering: Any = NUMBERINGS[index % 2]
        sizes = [draw.choice((0, 1, 257, draw.randrange(600, 1500), 2000)) for _ in range(world_size - 1)] + [1900]
        own, dtype = t.shard_index(numbering), (torch.float32, torch.bfloat16)[index // 2 % 2]
        x = _normal(rank, sum(sizes), seed + index, ()).to(dtype)
        options: dict[str, Any] = {"format": wire, "numbering": numbering}
        calls, found = [], []
        for least in (2**18, 256):
            with _large_from(least), zcomm.traffic() as sent:
                found.append(_reduce(x, sizes[own], sizes, t, "avg", torch.float32, **options))
            calls.append(sent.calls(operation="reduce_scatter"))
            pair = wire if isinstance(wire, tuple) else (wire, wire)
            formula = volume.uneven_reduce_scatter_sent(sizes, own, dtype, nodes, per_node, pair, numbering)
            assert sent.bytes(operation="reduce_scatter") == 2 * sum(formula), (sizes, options)  # two calls
        assert same_values(*found), (sizes, options)
        assert (calls[1] > calls[0]) is (wire != "int8"), (sizes, options, calls)


@pytest.mark.parametrize(("world_size", "per_node"), [(4, 2), (6, 2), (6, 3)])
def test_chunks_change_nothing(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_chunks, world_size, per_node, DAY)


def _travelled(values: np.ndarray, wire: str, draw: tuple[int, int] | None = None, first: int = 0) -> np.ndarray:
    """Float32 ``values`` after one trip in ``wire``; ``draw``: hop and rank; ``first``: the number of element 0."""
    if wire == "none":
        return values
    name = wire.partition(":")[0]
    kind = oracle.Wire(name, BLOCKS[name], random=(5, 6, 7, *draw) if draw and "stochastic" in wire else None)
    found = list[np.float32]()
    for index, block in enumerate(oracle.blocks_of(values, kind.block)):
        found += oracle.decode_block(*oracle.encode_block(block, kind, first + index * kind.block), kind)
    return np.array(found, np.float32)


def _rows_of(rank: int, sizes: list[int], seed: int) -> list[np.ndarray]:
    return [part.numpy() for part in torch.split(_normal(rank, sum(sizes), seed, ()), sizes)]


def _sum_of(terms: list[np.ndarray]) -> np.ndarray:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _reduced(
    row: int, sizes: list[int], owners: list[int], per_node: int, wire: tuple[str, str], seed: int
) -> np.ndarray:
    """By the contract: rank order inside the node, then node order. Numbers are drawn by place in the input, or in the
    sums that one rank encodes."""
    starts, world_size = list(accumulate(sizes, initial=0)), len(owners)
    nodes, local = world_size // per_node, owners[row] % per_node
    inside = wire[1] if per_node == 1 else wire[0]
    came = [_travelled(_rows_of(r, sizes, seed)[row], inside, (0, r), starts[row]) for r in range(world_size)]
    if nodes == 1 or per_node == 1:
        return _sum_of(came)
    sums = [_sum_of(came[n * per_node : (n + 1) * per_node]) for n in range(nodes)]
    before = sum(sizes[owners.index(n * per_node + local)] for n in range(owners[row] // per_node))
    return _sum_of([_travelled(s, wire[1], (1, n * per_node + local), before) for n, s in enumerate(sums)])


def _gathered(sizes: list[int], owners: list[int], per_node: int, wire: tuple[str, str], seed: int) -> list[np.ndarray]:
    nodes = len(owners) // per_node
    first = wire[1] if nodes == 1 else wire[0]
    values = [_normal(owner, n, seed, ()).numpy() for owner, n in zip(owners, sizes, strict=True)]
    found = [_travelled(v, first, (0, owner)) for owner, v in zip(owners, values, strict=True)]
    if wire[0] != wire[1] and 1 < per_node < len(owners):
        for local in range(per_node):  # numbered through what the nodes' ranks of a local rank hold
            before = 0
            for row in (owners.index(n * per_node + local) for n in range(nodes)):
                found[row] = _travelled(found[row], wire[1], (1, local), before)
                before += sizes[row]
    return found


def _check_lossy(rank: int, world_size: int, per_node: int, seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randrange(100, 400) for _ in range(world_size)]
    sizes[draw.randrange(world_size)], sizes[draw.randrange(world_size)] = 0, 1
    for wire in (
        ("int8", "int8"),
        ("int8", "int4"),
        ("none", "int4"),
        ("int4", "none"),
        ("int4:stochastic", "int8:stochastic"),
    ):
        for numbering in NUMBERINGS:
            owners = _owners(world_size, per_node, numbering)
            own = owners.index(rank)
            key = KEY if "stochastic" in str(wire) else None
            options: dict[str, Any] = {"format": wire, "numbering": numbering, "random": key}
            expected = _reduced(own, sizes, owners, per_node, wire, seed)
            source = _normal(rank, sum(sizes), seed, ())
            got = _reduce(source, sizes[own], sizes, topology(per_node), **options)
            assert same_values(got, torch.from_numpy(expected)), (sizes, options)
            gathered = np.concatenate(_gathered(sizes, owners, per_node, wire, seed))
            full = _gather(_normal(rank, sizes[own], seed, ()), sizes, topology(per_node), **options)
            assert same_values(full, torch.from_numpy(gathered)), (sizes, options)


@pytest.mark.parametrize(("world_size", "per_node"), [(3, 1), (4, 2), (2, 2)])
def test_lossy_formats_follow_the_contract(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_lossy, world_size, per_node, DAY)


def _sent(call: Callable[[], object], operation: str) -> volume.Sent:
    with zcomm.traffic() as counted:
        call()
    return volume.Sent(*(counted.bytes(operation=operation, link=link) for link in ("intra", "inter")))


def _check_traffic(rank: int, world_size: int, per_node: int, seed: int) -> None:
    t, nodes = topology(per_node), world_size // per_node
    for sizes, numbering in ((s, n) for s in _many_sizes(world_size, seed) for n in NUMBERINGS):
        own = t.shard_index(numbering)  # type: ignore[arg-type]
        numels = [ROW_NUMEL * rows for rows in sizes]
        full, shard = torch.ones(sum(sizes), *ROW), torch.ones(sizes[own], *ROW)
        for wire in (("none", "none"), ("int8", "int8"), ("bf16", "int4"), ("int4", "none")):
            options: dict[str, Any] = {"format": wire, "numbering": numbering}
            place = numels, own, torch.float32, nodes, per_node, wire, numbering
            gather = partial(zcomm.all_gather_single, full, shard, t, output_split_sizes=sizes, **options)
            assert _sent(gather, "all_gather") == volume.uneven_all_gather_sent(*place), (sizes, options)
            reduce = partial(zcomm.reduce_scatter_single, shard, full, group=t, input_split_sizes=sizes, **options)
            assert _sent(reduce, "reduce_scatter") == volume.uneven_reduce_scatter_sent(*place), (sizes, options)


@pytest.mark.parametrize(("world_size", "per_node"), PLACES)
def test_traffic_is_what_the_formulas_say(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_traffic, world_size, per_node, DAY)


def _check_traffic_by_hand(rank: int) -> None:
    """2 nodes of 2; float32 in its own dtype, so bytes are 4 for each element. Also by link over a ProcessGroup."""
    sizes = [100, 0, 30, 7]
    full, shard = torch.ones(137), torch.ones(sizes[rank])
    with zcomm.traffic() as sent:
        zcomm.all_gather_single(full, shard, topology(2), output_split_sizes=sizes)
        zcomm.reduce_scatter_single(shard, full, group=topology(2), input_split_sizes=sizes)
    counts = {
        f"{op}|none|{link}": c["elements"]
        for op, link, c in ((*k.split("|")[::2], v) for k, v in sent.as_dict().items())
    }
    inside, opposite, other = (
        sizes[rank % 2] + sizes[rank % 2 + 2],
        sizes[rank ^ 2],
        sizes[(rank + 1) % 2] + sizes[(rank + 1) % 2 + 2],
    )
    expected = {
        "all_gather|none|intra": inside, "all_gather|none|inter": sizes[rank],
        "reduce_scatter|none|intra": other, "reduce_scatter|none|inter": opposite,
    }  # fmt: skip
    assert counts == {key: numel for key, numel in expected.items() if numel}
    assert sent.bytes() == 4 * sum(expected.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        group = dist.new_group()  # of which nothing is known yet
        with zcomm.traffic() as sent:
            zcomm.reduce_scatter_single(shard, full, group=group, input_split_sizes=sizes)
        assert sent.bytes(link="intra") == 4 * sizes[rank ^ 1]
        assert sent.bytes(link="inter") == 4 * (137 - sizes[rank] - sizes[rank ^ 1])
        with zcomm.traffic() as sent:
            zcomm.all_gather_single(full, shard, group, output_split_sizes=sizes)
        assert (sent.bytes(link="intra"), sent.bytes(link="inter")) == (4 * sizes[rank], 8 * sizes[rank])


def test_bytes_by_hand() -> None:
    run_ranks(4, _check_traffic_by_hand)


def test_between_nodes_uneven_shards_send_no_more() -> None:
    """In sum over the ranks, for the same total."""
    draw = random.Random(DAY)
    cut = sorted(draw.randrange(0, 65) for _ in range(7))
    numels = [2048 * (b - a) for a, b in zip([0, *cut], [*cut, 64], strict=True)]
    for wire in (("none", "none"), ("int8", "int8"), ("bf16", "int4"), ("int4", "none")):
        for numbering in ("rank", "local"):
            place = torch.float32, 4, 2, wire
            gathered = [volume.uneven_all_gather_sent(numels, row, *place, numbering) for row in range(8)]  # type: ignore[arg-type]
            reduced = [volume.uneven_reduce_scatter_sent(numels, row, *place, numbering) for row in range(8)]  # type: ignore[arg-type]
            assert sum(sent.inter for sent in gathered) <= 8 * volume.all_gather_sent(2048 * 8, *place).inter
            assert sum(sent.inter for sent in reduced) <= 8 * volume.reduce_scatter_sent(2048 * 8, *place).inter
    with pytest.raises(LayoutError, match="numels must have one number for each rank"):
        volume.uneven_all_gather_sent([1, 2, 3], 0, torch.float32, 2, 2, ("none", "none"))


@contextmanager
def _without_kernels(*names: str) -> Iterator[None]:
    """Whatever encodes or decodes would be a copy."""

    def called(*_args: object, **_options: object) -> None:
        raise AssertionError(f"{names} must not be called")

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(kernels, name, called)
        yield


def _check_in_place(rank: int) -> None:
    """A shard may be this rank's own rows. In its own dtype nothing is copied, in the cases of even shards."""
    sizes = [700, 0, 300, 512]
    cases: list[tuple[Any, Any, int]] = [
        (None, "rank", 2**18),
        (topology(4), "rank", 2**18),
        (topology(2), "local", 2**18),
    ]
    for group, numbering, least in [*cases, (topology(2), "rank", 600)]:
        owners = _owners(4, 2 if group is topology(2) else 4, numbering)
        own, parts = owners.index(rank), [_normal(o, n, DAY, ()) for o, n in zip(owners, sizes, strict=True)]
        full = torch.full((sum(sizes),), 9.0)
        mine = torch.split(full, sizes)[own]
        mine.copy_(parts[own])
        with _large_from(least), _without_kernels("quantize", "decode"):
            zcomm.all_gather_single(full, mine, group, output_split_sizes=sizes, numbering=numbering)
            assert same_values(full, torch.cat(parts))
            full.fill_(9)
            zcomm.all_gather_single(full, parts[own], group, output_split_sizes=sizes, numbering=numbering)
            assert same_values(full, torch.cat(parts))
        if least == 2**18:
            with _without_kernels("quantize", "decode"):
                out = torch.empty(sizes[own])
                zcomm.reduce_scatter_single(out, full, "avg", group=group, input_split_sizes=sizes, numbering=numbering)
            assert same_values(out, parts[own])
        if sizes[own] > 1:
            overlapping = full[1 : 1 + sizes[own]] if own == 0 else full[: sizes[own]]
            with pytest.raises(LayoutError, match="own rows in it"):
                zcomm.all_gather_single(full, overlapping, group, output_split_sizes=sizes, numbering=numbering)


def test_gather_in_place() -> None:
    run_ranks(4, _check_in_place)


def _check_in_flight(rank: int) -> None:
    """Many calls at once, waited for in another order, over the queue of a Topology and a ProcessGroup."""
    for group in (topology(2), topology(4), None):
        works, results, expected = list[Any](), list[Tensor](), list[Tensor]()
        for seed, sizes in enumerate(_many_sizes(4, DAY) * 2):
            source = _whole(rank, sum(sizes), seed)
            part, full = torch.empty(sizes[rank], *ROW), torch.empty(sum(sizes), *ROW)
            works.append(zcomm.reduce_scatter_single(part, source, group=group, input_split_sizes=sizes, async_op=True))
            works.append(
                zcomm.all_gather_single(full, source[: sizes[rank]], group, output_split_sizes=sizes, async_op=True)
            )
            all_sources = [_whole(r, sum(sizes), seed) for r in range(4)]
            total = all_sources[0] + all_sources[1] + all_sources[2] + all_sources[3]
            results += [part, full]
            expected += [torch.split(total, sizes)[rank], torch.cat([all_sources[r][: sizes[r]] for r in range(4)])]
        for work in reversed(works):
            work.wait()
        for got, exact in zip(results, expected, strict=True):
            assert same_values(got, exact)


def test_calls_in_flight() -> None:
    run_ranks(4, _check_in_flight)


def _check_trailers(rank: int) -> None:
    """Memory that still holds an earlier message of this layout must not make a message that is too short pass (M4)."""
    usual_empty, usual_exchange, seen = torch.empty, backend.exchange_parts, list[int]()

    def empty(*args: Any, **options: Any) -> Tensor:
        made = usual_empty(*args, **options)
        return made.fill_(255) if made.dtype == torch.uint8 else made

    def exchange_parts(received: Sequence[Tensor], sent: Sequence[Tensor], hop: Any, *args: Any, **options: Any) -> Any:
        parts = [part for peer, part in enumerate(received) if peer != hop.rank and part.numel()]
        assert not any(bool(part[-8:].any()) for part in parts)
        seen.append(len(parts))
        return usual_exchange(received, sent, hop, *args, **options)

    sizes = [3, 40, 5, 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(backend, "exchange_parts", exchange_parts)
        for group, wire in ((topology(4), "int8"), (topology(2), "int8"), (topology(2), ("int8", "int4"))):
            full = _normal(rank, sum(sizes), DAY)
            shard = full.new_zeros(sizes[rank], *ROW)
            zcomm.reduce_scatter_single(shard, full, group=group, input_split_sizes=sizes, format=wire)
            zcomm.all_gather_single(full, shard, group, output_split_sizes=sizes, format=wire)
    assert seen == [3, 3, *[1] * 8]


def test_receive_buffers_have_no_trailers() -> None:
    run_ranks(4, _check_trailers)
