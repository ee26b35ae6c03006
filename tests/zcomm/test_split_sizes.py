"""All-to-all with split sizes: what arrives, what is sent, and that whatever does not fit is an error on every rank."""

# covers zcomm/_collectives/uneven_all_to_all.py

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from tests.ranks import device_mesh, run_ranks, topology
from tests.variables import variables
from tests.zcomm import oracle
from tests.zcomm.data import same_values
from tests.zcomm.test_checked import checking, flipped_bit
from zcomm import BackendUnavailableError, DamagedError, DivergedError, FormatError, LayoutError, RandomKey, Topology

W = 4
ROW = (3, 37)
BLOCKS = {"int8": 256, "int4": 128, "nf4": 64, "fp8_e4m3": 128}
SPLITS: dict[str, list[list[int]]] = {
    "uneven": [[3, 0, 5, 1], [2, 2, 0, 7], [0, 0, 0, 1], [4, 1, 6, 0]],
    "nothing to send, nothing to receive": [[1, 0, 4, 2], [0, 0, 0, 0], [2, 0, 0, 3], [0, 0, 1, 0]],
    "only to itself": [[2, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 3]],
    "nothing at all": [[0] * 4] * 4,
    "even": [[2] * 4] * 4,
}
"""By name: the rows that rank i sends to rank j."""


def _of(splits: list[list[int]], rank: int) -> dict[str, list[int]]:
    return {"output_split_sizes": [row[rank] for row in splits], "input_split_sizes": splits[rank]}


def _input(rank: int, splits: list[list[int]], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn((sum(splits[rank]), *ROW), generator=generator) * (rank + 1)).to(dtype)


def _exchange(x: Tensor, rank: int, splits: list[list[int]], group: Any, **options: Any) -> Tensor:
    """The result, which must be the same of a synchronous and of an asynchronous call."""
    sizes = _of(splits, rank)
    outputs = [x.new_full((sum(sizes["output_split_sizes"]), *ROW), 9) for _ in range(2)]
    assert zcomm.all_to_all_single(outputs[0], x, group, **sizes, **options) is None
    work = zcomm.all_to_all_single(outputs[1], x, group, **sizes, async_op=True, **options)
    assert work is not None
    work.wait()
    assert same_values(*outputs)
    return outputs[0]


def _groups() -> list[Any]:
    return [None, device_mesh((W,), ("experts",)), topology(1), topology(2), topology(4)]


def _check_equals_torch(rank: int, name: str) -> None:
    splits = SPLITS[name]
    sizes = _of(splits, rank)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = _input(rank, splits, dtype)
        expected = x.new_empty((sum(sizes["output_split_sizes"]), *ROW))
        dist.all_to_all_single(expected, x, **sizes)
        for group in _groups():
            assert same_values(_exchange(x, rank, splits, group), expected)


@pytest.mark.parametrize("name", SPLITS)
def test_what_arrives_is_what_torch_sends(name: str) -> None:
    run_ranks(W, _check_equals_torch, name)


def _check_one_of_the_two(rank: int) -> None:
    """Rank 0 sends unevenly, and every rank receives equally from all: only the other size may be left out."""
    output, x = torch.empty(W, 2), torch.arange(2.0 * W).view(W, 2) + 100 * rank
    zcomm.all_to_all_single(output, x, input_split_sizes=[1] * W)
    assert output[:, 0].tolist() == [2.0 * rank + 100 * peer for peer in range(W)]
    zcomm.all_to_all_single(output, x, topology(2), output_split_sizes=[1] * W)
    assert output[:, 1].tolist() == [2.0 * rank + 1 + 100 * peer for peer in range(W)]


def test_one_of_the_two_may_be_left_out() -> None:
    run_ranks(W, _check_one_of_the_two)


def _travelled(part: np.ndarray, wire: str, random: tuple[int, ...] | None, first: int) -> np.ndarray:
    """``part`` of an input, whose first element has index ``first`` there, after one trip in ``wire``."""
    if wire in ("none", "bf16"):
        return part if wire == "none" else torch.from_numpy(part).bfloat16().float().numpy()
    name, *options = wire.split(":")
    kind = oracle.Wire(name, BLOCKS[name], symmetric="asym" not in options, random=random)  # type: ignore[arg-type]
    values = list[np.float32]()
    for index, block in enumerate(oracle.blocks_of(part, kind.block)):
        values += oracle.decode_block(*oracle.encode_block(block, kind, first + index * kind.block), kind)
    return np.array(values, np.float32)


def _arriving(rank: int, splits: list[list[int]], wire_from: Callable[[int], str], *, draws: bool = False) -> Tensor:
    parts, row = [], int(np.prod(ROW))
    for peer in range(W):
        starts = [row * start for start in accumulate(splits[peer], initial=0)]
        values = _input(peer, splits).view(-1).numpy()[starts[rank] : starts[rank + 1]]
        random = (5, 6, 7, 0, peer) if draws else None
        parts.append(_travelled(values, wire_from(peer), random, starts[rank]))
    return torch.from_numpy(np.concatenate(parts)).view(-1, *ROW)


def _check_formats(rank: int) -> None:
    splits = SPLITS["uneven"]
    x = _input(rank, splits)
    for wire in ("bf16", "int8", "int4", "nf4", "fp8_e4m3", "int4:asym"):
        expected = _arriving(rank, splits, lambda _, wire=wire: wire)
        for group in _groups():
            assert same_values(_exchange(x, rank, splits, group, format=wire), expected), wire
    for pair in (("int8", "int4"), ("none", "int8"), ("bf16", "none")):
        by_link = _arriving(rank, splits, lambda peer, pair=pair: pair[peer // 2 != rank // 2])
        assert same_values(_exchange(x, rank, splits, topology(2), format=pair), by_link), pair
        for per_node, used in ((4, pair[0]), (1, pair[1])):
            expected = _arriving(rank, splits, lambda _, used=used: used)
            assert same_values(_exchange(x, rank, splits, topology(per_node), format=pair), expected), pair


def test_each_part_is_a_message_in_the_format_of_its_link() -> None:
    run_ranks(W, _check_formats)


def _check_stochastic(rank: int) -> None:
    splits, wire = SPLITS["uneven"], "int8:stochastic"
    x, key = _input(rank, splits), RandomKey(5, 6, 7)
    expected = _arriving(rank, splits, lambda _: wire, draws=True)
    for group in _groups():
        assert same_values(_exchange(x, rank, splits, group, format=wire, random=key), expected)
    with pytest.raises(FormatError, match="needs random="):
        _exchange(x, rank, splits, None, format=wire)


def test_random_numbers_follow_the_place_in_the_input() -> None:
    run_ranks(W, _check_stochastic)


def _check_even(rank: int) -> None:
    """In one hop, equal split sizes give the bits of a call without them."""
    splits, key = SPLITS["even"], RandomKey(1, 2, 3)
    x = _input(rank, splits)
    for group in (None, topology(1), topology(4)):
        for wire, random in (("none", None), ("int8", None), ("int4/64:asym:hadamard", None), ("int4:stochastic", key)):
            expected = torch.empty_like(x)
            zcomm.all_to_all_single(expected, x, group, format=wire, random=random)
            assert same_values(_exchange(x, rank, splits, group, format=wire, random=random), expected), wire


def test_equal_split_sizes_give_the_bits_of_none() -> None:
    run_ranks(W, _check_even)


def _check_narrow_and_wide(rank: int) -> None:
    """The output has another dtype than the input; a rank alone needs no process group."""
    splits = SPLITS["uneven"]
    x, sizes = _input(rank, splits, torch.bfloat16), _of(splits, rank)
    wide = torch.empty((sum(sizes["output_split_sizes"]), *ROW))
    for wire in ("none", "int8"):
        zcomm.all_to_all_single(wide, x, topology(2), **sizes, format=wire)
        assert same_values(wide.bfloat16(), _exchange(x, rank, splits, topology(2), format=wire))
    alone, y = torch.empty(3, 2), torch.randn(3, 2)
    zcomm.all_to_all_single(alone, y, Topology.single(), output_split_sizes=[3], input_split_sizes=[3])
    assert torch.equal(alone, y)


def test_dtypes_of_output_and_input_may_differ() -> None:
    run_ranks(W, _check_narrow_and_wide)


def _message_nbytes(numel: int, wire: str) -> int:
    if wire == "none":
        return 4 * numel
    headers = -(-2 * -(-numel // BLOCKS[wire]) // 16) * 16
    return -(-(headers + -(-numel * {"int8": 8, "int4": 4}[wire] // 8) + 8) // 16) * 16


def _check_traffic(rank: int) -> None:
    splits, row = SPLITS["uneven"], int(np.prod(ROW))
    x, sizes = _input(rank, splits), _of(splits, rank)
    output = torch.empty((sum(sizes["output_split_sizes"]), *ROW))
    peers = {
        "intra": [p for p in range(W) if p != rank and p // 2 == rank // 2 and splits[rank][p]],
        "inter": [p for p in range(W) if p // 2 != rank // 2 and splits[rank][p]],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        for group, wires in (
            (topology(2), ("int8", "int4")),
            (topology(2), ("none", "int8")),
            (dist.new_group(), ("int8", "int8")),
        ):
            wire_of = wires if isinstance(group, zcomm.Topology) else wires[0]
            with zcomm.traffic() as sent:
                zcomm.all_to_all_single(output, x, group, **sizes, format=wire_of)
            for link, wire in zip(("intra", "inter"), wires, strict=True):
                numels = [splits[rank][peer] * row for peer in peers[link]]
                found = sent.bytes(operation="all_to_all", link=link), sent.calls(operation="all_to_all", link=link)
                assert found == (sum(_message_nbytes(n, wire) for n in numels), len(numels)), (wires, link)
                assert sent.elements(operation="all_to_all", format=wire, link=link) == sum(numels)
            assert sent.bytes(operation="control") == 8 * (2 * W + 1) * (W - 1)


def test_bytes_are_those_of_the_parts_and_of_the_sizes() -> None:
    run_ranks(W, _check_traffic)


FITTING: dict[str, Any] = {"output": [2] * W, "input": [2] * W, "shape": (2 * W, 5)}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "sum of input": ({"input": [2, 2, 2, 3]}, "input_split_sizes must add up to the rows of input: sum=9, rows=8"),
    "sum of output": ({"output": [2, 2, 2, 1]}, "output_split_sizes must add up to the rows of output: sum=7, rows=8"),
    "too few": ({"input": [4, 4]}, r"input_split_sizes must be a list with the rows of each rank: .*\[4, 4\]"),
    "too many": ({"output": [2] * 4 + [0]}, "output_split_sizes must be a list with the rows of each rank"),
    "none at all": ({"output": []}, "output_split_sizes must be a list with the rows of each rank"),
    "negative": ({"input": [5, -1, 2, 2]}, r"input_split_sizes\[1\] must be an integer of at least 0: .*=-1"),
    "float": ({"output": [2.0, 2, 2, 2]}, r"output_split_sizes\[0\] must be an integer"),
    "bool": ({"input": [2, True, 2, 3]}, r"input_split_sizes\[1\] must be an integer"),
    "tensor": ({"input": torch.tensor([2] * W)}, "input_split_sizes must be a list.*a Tensor of shape"),
    "no rows": ({"shape": ()}, r"must be contiguous and have rows, got shape=\(\)"),
    "uneven rows": (
        {"input": None, "shape": (7, 5)},
        "rows of input must divide over the ranks without input_split_siz",
    ),
}
"""What one rank passes instead, and its error."""


def _fails(rank: int, group: Any, culprits: list[int], passed: dict[str, Any], text: str, *, async_op: bool) -> None:
    """Of the ranks only ``culprits`` pass something else. All have an error, and the next call is as usual."""
    given = FITTING | (passed if rank in culprits else {})
    output, x = torch.full(given["shape"], 9.0), torch.ones(given["shape"])
    with pytest.raises(LayoutError, match=text if rank in culprits else r"ranks \[3\] refuse their arguments"):
        zcomm.all_to_all_single(
            output, x, group, output_split_sizes=given["output"], input_split_sizes=given["input"], async_op=async_op
        )
    assert bool((output == 9).all())
    splits = SPLITS["uneven"]
    assert same_values(_exchange(_input(rank, splits), rank, splits, group), _arriving(rank, splits, lambda _: "none"))


def _check_one_rank(rank: int, kind: str) -> None:
    passed, text = WRONG[kind]
    for group in (None, topology(2)):
        for async_op in (False, True):
            _fails(rank, group, [3], passed, text, async_op=async_op)
    with variables(ZCOMM_CHECK="1", ZCOMM_DEBUG="1"):
        _fails(rank, topology(2), [3], passed, text, async_op=False)


@pytest.mark.parametrize("kind", WRONG)
def test_what_one_rank_passes_wrong_is_an_error_on_all(kind: str) -> None:
    run_ranks(W, _check_one_rank, kind)


def _check_memory(rank: int) -> None:
    """Tensors that overlap, or are not contiguous, on one rank."""
    memory = torch.ones(16, 5)
    pairs = [(memory[:8], memory[4:12]), (memory[::2], torch.ones(8, 5)), (torch.ones(8, 5), memory[::2])]
    for pair in pairs:
        output, x = pair if rank == 3 else (torch.ones(8, 5), torch.ones(8, 5))
        with pytest.raises(LayoutError, match="overlap|contiguous" if rank == 3 else "refuse"):
            zcomm.all_to_all_single(output, x, output_split_sizes=[2] * W, input_split_sizes=[2] * W)


def test_so_is_wrong_memory() -> None:
    run_ranks(W, _check_memory)


def _check_mismatch(rank: int) -> None:
    """Every rank's own arguments are right, but two ranks' do not fit each other."""
    splits = SPLITS["uneven"]
    for group in (None, topology(2)):
        for longer in (1, -1):
            sizes = {name: list(of) for name, of in _of(splits, rank).items()}
            if rank == 2:
                sizes["output_split_sizes"][3] += longer
            output = torch.full((sum(sizes["output_split_sizes"]), *ROW), 9.0)
            with pytest.raises(LayoutError) as caught:
                zcomm.all_to_all_single(output, _input(rank, splits), group, **sizes, format="int8")
            sent, expected = 6 * 111, (6 + longer) * 111
            assert f"rank 3 sends {sent} elements to rank 2, whose output_split_sizes expect {expected}" in str(
                caught.value
            )
            assert bool((output == 9).all())
        x = _input(rank, splits, torch.bfloat16 if rank == 1 else torch.float32)
        for wire, text in (
            ("int8", r"ranks \[1\] differ"),
            ("int4" if rank else "int8", "differ from those of rank 0"),
        ):
            x = x if wire == "int8" and text.startswith("ranks") else _input(rank, splits)
            output = x.new_empty((sum(_of(splits, rank)["output_split_sizes"]), *ROW))
            with pytest.raises(LayoutError, match=text):
                zcomm.all_to_all_single(output, x, group, **_of(splits, rank), format=wire)
        _exchange(_input(rank, splits), rank, splits, group)
    for pair in (("int8", "none") if rank else ("none", "int8"), ("int8", "int4") if rank == 3 else ("int8", "int8")):
        x, output = _input(rank, splits), torch.empty((sum(_of(splits, rank)["output_split_sizes"]), *ROW))
        with pytest.raises(LayoutError, match="the same format, and a tensor of the same dtype"):
            zcomm.all_to_all_single(output, x, topology(2), **_of(splits, rank), format=pair)


def test_what_does_not_fit_between_ranks_is_the_same_error_on_all() -> None:
    run_ranks(W, _check_mismatch)


def _check_other_calls(rank: int) -> None:
    """One rank is in another call, or passes no split sizes: the watch finds it, and the topology stays usable."""
    t, splits = topology(2), SPLITS["even"]
    x = _input(rank, splits)
    others: list[Callable[[], object]] = [
        lambda: zcomm.all_gather_single(torch.empty(W * 6), torch.ones(6), t),
        lambda: zcomm.all_to_all_single(torch.empty_like(x), x, t),
    ]
    for other in others:
        with pytest.raises(DivergedError):
            other() if rank == 1 else _exchange(x, rank, splits, t)
        _exchange(x, rank, splits, t)
    with variables(ZCOMM_DEBUG="1"), pytest.raises(LayoutError, match="the ranks' calls must be equal"):
        others[1]() if rank == 1 else _exchange(x, rank, splits, t)


def test_a_rank_in_another_call_is_found() -> None:
    run_ranks(W, _check_other_calls)


def _check_damage(rank: int) -> None:
    """Exchange 1 is that of the sizes, 2 that of the parts. Rank 1 receives a flipped bit from rank 0."""
    splits = [[1, 2, 0, 1], [0, 0, 0, 0], [1, 0, 2, 0], [0, 1, 0, 0]]
    x, sizes = _input(rank, splits), _of(splits, rank)
    for group in (None, topology(2)):
        for wire in ("none", "int8"):
            output = torch.full((sum(sizes["output_split_sizes"]), *ROW), 9.0)
            with checking():
                for nth in (1, 2):
                    with flipped_bit(nth if rank == 1 else 0), pytest.raises(DamagedError, match="rank 1 received"):
                        zcomm.all_to_all_single(output, x, group, **sizes, format=wire)
                    assert wire == "none" or bool((output == 9).all())
                assert same_values(
                    _exchange(x, rank, splits, group, format=wire), _arriving(rank, splits, lambda _, wire=wire: wire)
                )


def test_damaged_parts_are_named_on_every_rank() -> None:
    run_ranks(W, _check_damage)


def _check_refused(rank: int) -> None:
    splits = SPLITS["even"]
    x = _input(rank, splits)
    for group in (None, topology(2)):
        with pytest.raises(FormatError, match="name a format"):
            _exchange(x, rank, splits, group, format="auto")
        with pytest.raises(BackendUnavailableError, match="does not serve an all_to_all with split sizes"):
            _exchange(x, rank, splits, group, backend="nccl")
    with pytest.raises(FormatError, match="a pair of formats needs a Topology"):
        _exchange(x, rank, splits, None, format=("int8", "int4"))
    with pytest.raises(FormatError, match=r"dtype=torch\.float8"):
        _exchange(x.to(torch.float8_e4m3fn), rank, splits, None)


def test_what_is_not_supported_is_named() -> None:
    run_ranks(W, _check_refused)


def _check_order(rank: int) -> None:
    """Behind queued collectives of two hops it is queued, too; a control exchange over the same ranks then waits."""
    t, splits = topology(2), SPLITS["uneven"]
    x, sizes = _input(rank, splits), _of(splits, rank)
    for _ in range(5):
        total, output = torch.ones(2_000_000), torch.empty((sum(sizes["output_split_sizes"]), *ROW))
        works = [zcomm.all_reduce(total, group=t, async_op=True)]
        works.append(zcomm.all_to_all_single(output, x, t, **sizes, async_op=True))
        zcomm.control.gather_float64(torch.ones(1), t)
        assert all(work is not None and work.is_completed() for work in works)
        assert same_values(output, _arriving(rank, splits, lambda _: "none"))
    zcomm.all_reduce(torch.ones(3), group=t, format="auto")  # agrees on a table, in which nothing is of one hop
    assert t.uses_world


def test_exchanges_over_the_same_ranks_keep_their_order() -> None:
    run_ranks(W, _check_order)
