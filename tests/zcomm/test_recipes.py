"""The table of recipes: the formats of each row exist, its error is as stated, its bytes are within limits."""

# covers zcomm/_formats/recipes.py

from __future__ import annotations

import dataclasses

import pytest
import torch

import zcomm
from tests.ranks import run_ranks, topology
from zcomm import RECIPES, ConfigError, FormatError, Recipe, control, volume
from zcomm._formats.recipes import DEFAULT_RECIPE, get_recipe

BF16 = Recipe(gradients=("bf16", "bf16"), reduced="bf16", weights="bf16")


def _check_error(rank: int, name: str) -> None:
    """Gaussian gradients of 8 ranks on 2 nodes; every rank compares its shard with the exact mean."""
    numel, wires = 1 << 15, RECIPES[name].wires()
    of_ranks = [torch.randn(8 * numel, generator=torch.Generator().manual_seed(r)) for r in range(8)]
    exact = torch.stack(of_ranks).double().mean(0)[rank * numel : (rank + 1) * numel]
    mean = torch.empty(numel)
    zcomm.reduce_scatter_single(mean, of_ranks[rank], "avg", group=topology(4), format=wires.gradients)
    squares = torch.stack([(mean.double() - exact).square().sum(), exact.square().sum()])
    lost, whole = control.gather_float64(squares, topology(4)).sum(0).tolist()  # a shard alone has few large blocks
    assert (lost / whole) ** 0.5 == pytest.approx(RECIPES[name].error, rel=0.02)


@pytest.mark.slow  # eight ranks
@pytest.mark.parametrize("name", RECIPES)
def test_the_error_of_a_recipe_is_as_measured(name: str) -> None:
    run_ranks(8, _check_error, name)


def _between_nodes(recipe: Recipe) -> tuple[int, int]:
    """Bytes that a rank sends to other nodes: for DDP; for FSDP2 with one gather in forward and one in backward."""
    wires, shape = recipe.wires(), (1 << 20, torch.float32, 2, 4)
    reduced = volume.reduce_scatter_sent(*shape, wires.gradients).inter
    back = volume.all_gather_sent(*shape, (wires.reduced, wires.reduced)).inter
    weights = volume.all_gather_sent(*shape, (wires.weights, wires.weights)).inter
    return reduced + back, reduced + 2 * weights


@pytest.mark.parametrize(
    ("name", "ddp", "fsdp2"),
    [("zeropp", 0.40, 0.45), ("zeropp-paper", 0.40, 0.45), ("accurate", 0.40, 0.45), ("smallest", 0.27, 0.45)],
)
def test_bytes_between_nodes_are_within_their_limits(name: str, ddp: float, fsdp2: float) -> None:
    for got, plain, limit in zip(_between_nodes(RECIPES[name]), _between_nodes(BF16), (ddp, fsdp2), strict=True):
        assert got <= limit * plain


def test_recipes_go_by_name() -> None:
    assert get_recipe(DEFAULT_RECIPE) is RECIPES["zeropp"]
    own = dataclasses.replace(RECIPES["zeropp"], weights="none")
    assert get_recipe(own) is own
    with pytest.raises(ConfigError, match=r"recipe='acurate' \(did you mean 'accurate'\?\)"):
        get_recipe("acurate")
    with pytest.raises(ConfigError, match=r"must be a name or a zcomm\.Recipe: got 4"):
        get_recipe(4)  # type: ignore[arg-type]


def test_formats_that_cannot_be_are_refused() -> None:
    with pytest.raises(FormatError, match="must be a pair"):
        Recipe(gradients="int4").wires()  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="did you mean 'int8'"):
        Recipe(weights="int88").wires()
