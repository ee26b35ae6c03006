"""Leaf modules: ranks that run different experts train as a single process does, in forward and backward."""

# covers zero/_config/zero_section.py zero/_model/leaf_modules.py zero/_sharding/buffer_pool.py

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.ranks import run_ranks
from tests.zero.training import full_values, zero_optimizer
from zcomm import ConfigError, StateError
from zero import utils
from zero._config.zero_section import MOE_BLOCKS

WIDTH = 6


class Experts(nn.Module):
    """Each row of the input goes to the expert that it names; other experts do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(5)
        )

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        gated = self.gate(x)
        for index, expert in enumerate(self.experts):
            rows = choice == index
            if rows.any():
                out = out.index_put((rows,), expert(gated[rows]))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = Experts()

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        return x + self.moe(self.norm(x), choice)


class Model(nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, choice, use_reentrant=False) if self.checkpoints else block(x, choice)
        return x


def _data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Rank 0 uses experts 0 and 1, rank 1 uses 1, 2 or 3; no rank uses 4."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(2 if rank == 0 else 3, (4,), generator=generator) + rank


def _new(*, checkpoints: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Model(checkpoints=checkpoints).double()


def _check_equals_plain(rank: int) -> None:
    plain = _new()
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(4):
        x, choice = (torch.cat(both) for both in zip(_data(step, 0), _data(step, 1), strict=True))
        plain(x, choice).square().mean().backward()
        reference.step()
        reference.zero_grad()
    for stage, checkpoints in ((3, False), (3, True), (2, False)):
        model = _new(checkpoints=checkpoints)
        options: dict[str, Any] = {"stage": stage}
        if checkpoints:
            options = {"config": {"zero_optimization": {"stage": stage, "leaf_module": {"name_suffixes": ["moe"]}}}}
        else:
            utils.set_z3_leaf_modules(model, [Experts])
        with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), **options) as optimizer:
            assert [block.moe for block in model.blocks] == utils.get_z3_leaf_modules(model)
            for step in range(4):
                model(*_data(step, rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            got = full_values(model)
            with pytest.raises(StateError, match="before ZeroOptimizer"):
                utils.unset_z3_leaf_modules(model, [Experts])
        for name, value in plain.named_parameters():
            torch.testing.assert_close(got[name], value.detach(), rtol=1e-9, atol=1e-12)


def test_ranks_that_run_different_experts() -> None:
    run_ranks(2, _check_equals_plain)


def test_modules_are_found_by_class_name_and_suffix() -> None:
    model = _new()
    moes = [block.moe for block in model.blocks]
    for asked in (["Experts"], [f"{Experts.__module__}.Experts"], [Experts]):
        assert utils.set_z3_leaf_modules(model, asked) == moes == utils.get_z3_leaf_modules(model)
        assert all(utils.z3_leaf_module(moe) for moe in moes)
        assert utils.unset_z3_leaf_modules(model, asked) == moes
        assert not utils.get_z3_leaf_modules(model)
    with pytest.raises(ConfigError, match=r"none of \['Expert'\] in Model"):
        utils.set_z3_leaf_modules(model, ["Expert"])
    assert utils.set_z3_leaf_modules(model, ["Expert"], raise_if_not_found=False) == []


def test_names_and_suffixes_return_the_modules_and_what_is_missing() -> None:
    model = _new()
    first, second = (block.moe for block in model.blocks)
    for set_, unset, asked, found in (
        (
            utils.set_z3_leaf_modules_by_name,
            utils.unset_z3_leaf_modules_by_name,
            ["blocks.1.moe", "blocks.2.moe", "blocks.0.moe"],
            [second, first],
        ),
        (
            utils.set_z3_leaf_modules_by_suffix,
            utils.unset_z3_leaf_modules_by_suffix,
            ["1.moe", "blocks.2.moe", ".moe"],
            [second, first],
        ),
    ):
        with pytest.raises(ValueError, match=r"none of \['blocks.2.moe'\] in Model"):  # DeepSpeed's class
            set_(model, asked)
        assert not utils.get_z3_leaf_modules(model)
        assert set_(model, asked, raise_if_not_found=False) == (found, ["blocks.2.moe"])
        assert utils.get_z3_leaf_modules(model) == [first, second]
        assert unset(model, asked, raise_if_not_found=False) == (found, ["blocks.2.moe"])
        assert not utils.get_z3_leaf_modules(model)
        assert set_(model, [asked[0]]) == ([second], [])
        assert set_(model, [asked[0]], False) == ([second], [])  # the third argument is DeepSpeed's flag
        assert not utils.get_z3_leaf_modules(model)


def _known_block(name: str) -> type[Experts]:
    """A class with the qualified name of one in transformers, which is not imported."""
    module, _, own = name.rpartition(".")
    return type(own, (Experts,), {"__module__": module})


def _with_known_blocks() -> nn.Module:
    model = _new()
    for block, name in zip(model.blocks, MOE_BLOCKS, strict=False):
        block.moe.__class__ = _known_block(name)
    return model


def _check_defaults(rank: int) -> None:
    given: list[dict[str, Any]] = [
        {"stage": 3},
        {"config": {"zero_optimization": {"stage": 3}}},
        {"config": {"zero_optimization": {"stage": 3, "leaf_module": {"names": ["first"]}}}},
    ]
    for options in given:
        model = _with_known_blocks()
        with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), **options):
            leaves = utils.get_z3_leaf_modules(model)
            assert [block.moe for block in model.blocks] == [leaf for leaf in leaves if leaf is not model.first]
            model(*_data(0, rank)).square().mean().backward()  # each rank runs other experts
    for options in ({"stage": 2}, {"config": {"zero_optimization": {"stage": 3, "leaf_module": {"classes": []}}}}):
        model = _with_known_blocks()
        with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), **options):
            assert not utils.get_z3_leaf_modules(model)
    model = _new()  # has none of them: nothing happens
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=3):
        assert not utils.get_z3_leaf_modules(model)


def test_known_mixtures_of_experts_are_leaf_modules_at_stage_3() -> None:
    run_ranks(2, _check_defaults)


def _check_given_classes(rank: int) -> None:
    model = _with_known_blocks()
    options = {"config": {"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["LayerNorm"]}}}}
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), **options):
        assert [type(module) for module in utils.get_z3_leaf_modules(model)] == [nn.LayerNorm] * 2
    model = _new()
    utils.set_z3_leaf_modules(model, [Experts])
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=3):
        assert [block.moe for block in model.blocks] == utils.get_z3_leaf_modules(model)
    options = {"config": {"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["Expert"]}}}}
    model = _new()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(ConfigError, match=r"none of \['Expert'\]"), zero_optimizer(model, sgd, **options):
        pass


def test_classes_that_are_given_replace_the_known_ones() -> None:
    run_ranks(2, _check_given_classes)


def test_transformers_has_the_known_classes() -> None:
    for name in MOE_BLOCKS:
        module, _, own = name.rpartition(".")
        assert issubclass(getattr(pytest.importorskip(module), own), nn.Module)
