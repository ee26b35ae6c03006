"""Which rank gets which whole tensor: balance over nodes and ranks, by placement alone."""

# covers zero/_sharding/placement.py

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

import pytest

from tests.rotation import DAY
from zero._sharding.placement import PlacedTensor, place, work_of

GPT2_SMALL = [[(3 * 768, 768), (768, 768), (4 * 768, 768), (768, 4 * 768)]] * 12
LLAMA = [[(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (5632, 2048), (5632, 2048), (2048, 5632)]] * 24
MOE = [[(1024, 1024)] * 4 + [(8, 1024)] + [(2816, 1024), (2816, 1024), (1024, 2816)] * 8] * 12
MODELS = {"gpt2": GPT2_SMALL, "llama": LLAMA, "moe": MOE}


def _tensors(layers: list[list[tuple[int, int]]]) -> list[PlacedTensor]:
    return [
        PlacedTensor(
            index, rows * columns, work_of((rows, columns), is_whole=True), (min(rows, columns), max(rows, columns))
        )
        for index, layer in enumerate(layers)
        for rows, columns in layer
    ]


def _loads(
    tensors: list[PlacedTensor],
    places: list[tuple[int, int | None]],
    cost: Callable[[PlacedTensor], float],
    per_node: int,
) -> tuple[dict[int, float], dict[tuple[int, int], float]]:
    nodes, ranks = defaultdict(float), defaultdict(float)
    for tensor, (node, rank) in zip(tensors, places, strict=True):
        nodes[node] += cost(tensor)
        for each in range(per_node) if rank is None else (rank,):
            ranks[node, each] += cost(tensor) / (per_node if rank is None else 1)
    return nodes, ranks


@pytest.mark.parametrize("per_side", [2, 4, 8])
@pytest.mark.parametrize("name", list(MODELS))
def test_balance(name: str, per_side: int) -> None:
    tensors = _tensors(MODELS[name])
    places = place(tensors, per_side, per_side)
    costs: list[Callable[[PlacedTensor], float]] = [lambda one: one.numel, lambda one: one.work]
    for cost in costs:
        nodes, ranks = _loads(tensors, places, cost, per_side)
        total, largest = sum(nodes.values()), max(map(cost, tensors))
        assert max(nodes.values()) <= 1.1 * total / per_side
        assert max(ranks.values()) <= 1.001 * max(1.1 * total / per_side**2, largest)
    # 72 matrices of the largest size on 64 ranks: one rank would have two, however they are dealt out.
    assert any(rank is None for _, rank in places) is ((name, per_side) == ("llama", 8))


def test_any_tensors() -> None:
    """All are placed, the same way again, and every node gets one if there are enough. Seed: the day."""
    generator = random.Random(DAY)
    for _ in range(30):
        shapes = [(generator.randint(1, 60), generator.randint(1, 60)) for _ in range(generator.randint(0, 40))]
        tensors = _tensors([[shape] for shape in shapes])
        num_nodes, num_ranks = generator.randint(1, 4), generator.randint(1, 4)
        places = place(tensors, num_nodes, num_ranks)
        assert places == place(tensors, num_nodes, num_ranks)
        assert all(0 <= node < num_nodes and (rank is None or 0 <= rank < num_ranks) for node, rank in places)
        if len(tensors) >= num_nodes:
            assert {node for node, _ in places} == set(range(num_nodes))


def test_work_counts_the_shorter_side_of_whole_matrices() -> None:
    assert work_of((3, 5), is_whole=True) == 45
    assert work_of((3, 5), is_whole=False) == 15
    assert work_of((7,), is_whole=True) == 7
    assert work_of((2, 3, 5), is_whole=True) == 90
