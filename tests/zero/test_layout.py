"""Buckets, slots, shards, pieces and units: the arithmetic is checked against brute force."""

# covers triton_kernels/_layout.py zero/_model/model_layout.py zero/_sharding/layout.py

from __future__ import annotations

from math import prod
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.zero.models import new_model
from zcomm import Topology
from zero._config.settings import ZeroSettings
from zero._model.model_layout import layouts_of
from zero._runtime.exchanges import TopologyShape
from zero._sharding.layout import BucketLayout
from zero._sharding.units import find_units

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes=SHAPES, world_size=st.integers(1, 7), align=st.sampled_from([1, 4, 256]))
def test_every_element_of_every_parameter_is_in_one_piece(
    shapes: list[tuple[int, ...]], world_size: int, align: int
) -> None:
    layout = BucketLayout.of([str(i) for i in range(len(shapes))], shapes, world_size, align)
    owners: dict[int, int] = {}
    for shard in range(world_size):
        base = shard * layout.shard_numel
        for piece in layout.pieces(shard):
            assert piece.start % align == 0
            slot = layout.slots[piece.slot]
            assert slot.offset + piece.first == base + piece.start
            assert piece.stop % align == 0 or base + piece.stop == slot.offset + slot.numel
            assert 0 <= piece.start < piece.stop <= layout.shard_numel
            for element in range(base + piece.start, base + piece.stop):
                assert element not in owners
                owners[element] = piece.slot
    for index, slot in enumerate(layout.slots):
        assert slot.numel == prod(shapes[index])
        assert slot.offset % align == 0
        assert all(owners.pop(e) == index for e in range(slot.offset, slot.offset + slot.numel))
    assert not owners
    whole = [(piece.slot, piece.first, piece.start, piece.stop) for piece in layout.pieces(None)]
    assert whole == [(i, 0, s.offset, s.offset + s.numel) for i, s in enumerate(layout.slots) if s.numel]


@given(shapes=SHAPES, world_size=st.integers(1, 7))
def test_gaps_and_slots_cover_the_bucket_once(shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = BucketLayout.of([str(i) for i in range(len(shapes))], shapes, world_size, 8)
    covered = [0] * layout.numel
    for start, stop in [*layout.gaps, *((s.offset, s.offset + s.numel) for s in layout.slots)]:
        for element in range(start, stop):
            covered[element] += 1
    assert covered == [1] * layout.numel
    of_shards = [
        element + shard * layout.shard_numel
        for shard in range(world_size)
        for start, stop in layout.gaps_of(shard)
        for element in range(start, stop)
    ]
    assert of_shards == [element for start, stop in layout.gaps for element in range(start, stop)]


@given(shard_runs=st.integers(0, 9), world_size=st.integers(1, 5), max_numel=st.integers(1, 12000))
def test_chunks_cover_the_shard_within_the_cap(shard_runs: int, world_size: int, max_numel: int) -> None:
    layout = BucketLayout.of(["w"], [(shard_runs * world_size * 256,)], world_size)
    chunks = layout.chunks(max_numel)
    assert [e for a, b in chunks for e in range(a, b)] == list(range(layout.shard_numel))
    for start, stop in chunks:
        assert (stop - start) * world_size <= max(max_numel, 256 * world_size)


def test_units_are_layers_and_the_other_children() -> None:
    units = {u.name: [name for name, _ in u.parameters] for u in find_units(new_model())}
    assert list(units) == ["", "wte", "blocks.0", "blocks.1", "blocks.2", "shared", "norm"]
    assert units[""] == ["position"]
    assert units["wte"] == ["wte.weight"]  # the tied head belongs to its first owner
    assert units["blocks.1"] == [
        "blocks.1.norm.weight",
        "blocks.1.norm.bias",
        "blocks.1.mlp.0.weight",
        "blocks.1.mlp.0.bias",
        "blocks.1.mlp.2.weight",
    ]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.Linear(2, 2), [""]),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), ["0", "2"]),
        (nn.ModuleDict({"stack": nn.Sequential(new_model().blocks[0], new_model().blocks[1])}), ["stack.0", "stack.1"]),
    ],
    ids=["one layer", "leaves", "sequential of blocks"],
)
def test_units_of_small_models(model: nn.Module, names: list[str]) -> None:
    assert [unit.name for unit in find_units(model)] == names


@pytest.mark.parametrize(
    ("num_nodes", "settings", "numels"),
    [
        (1, ZeroSettings(stage=2), [3_600_000, 1_200_000]),  # of units of 0.6 million elements, as many as fit
        (2, ZeroSettings(stage=2), [600_000] * 8),
        (1, ZeroSettings(stage=2, allgather_bucket_size=1_300_000), [1_200_000] * 4),
        (1, ZeroSettings(stage=3), [600_000] * 8),
    ],
    ids=["one node", "two nodes", "a setting limits them", "stage 3"],
)
def test_small_units_share_buckets(num_nodes: int, settings: ZeroSettings, numels: list[int]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2000, 300, bias=False) for _ in range(8)))
    layouts = layouts_of(model, settings, cast(Topology, TopologyShape(num_nodes, 2)), {})
    assert [layout.numel for layout, _ in layouts] == pytest.approx(numels, abs=4096)  # padding
