"""Checkpoints of tied parameters load under any of their names, into models that are tied in another order or not."""

# covers zero/_checkpoint/own_names.py

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.optim import SGD, AdamW

import zero
import zero._checkpoint.flat_parts as flat_parts
from tests.ranks import run_ranks
from tests.zero.test_checkpoint import assert_equal_bits, whole_state
from tests.zero.test_nested_states import TwoSided
from tests.zero.training import full_values, zero_optimizer
from zero import CheckpointError
from zero._checkpoint.model_file import save_model_file

EMBED, OUT = "embed.weight", "out.weight"


class Tied(nn.Module):
    """Modules in the order of ``names``; the first of embed and out owns the weight of both."""

    def __init__(self, *names: str, seed: int, is_tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        made = {"embed": nn.Embedding(40, 16), "middle": nn.Linear(16, 16), "out": nn.Linear(16, 40, bias=False)}
        for name in names:
            self.add_module(name, made[name])
        if is_tied and names.index("embed") < names.index("out"):
            self.out.weight = self.embed.weight
        elif is_tied:
            self.embed.weight = self.out.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(self.embed(tokens))))


def _train(model: nn.Module, optimizer: zero.ZeroOptimizer, rank: int, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(40, (32,), generator=torch.Generator().manual_seed(10 * step + rank))
        nn.functional.cross_entropy(model(tokens).float(), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def _renamed(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of the model that is tied as embed, under the names of the one that is tied as out."""
    return {key.replace(EMBED, OUT): value for key, value in values.items()}


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=1e-2),
    "nested": lambda model: [TwoSided([p for p in model.parameters() if p.ndim > 1]), SGD([model.middle.bias], lr=0.1)],
}


def _check_other_order(rank: int, folder: str, kind: str, options: dict[str, Any]) -> None:
    straight = Tied("embed", "middle", "out", seed=1)
    with zero_optimizer(straight, OPTIMIZERS[kind](straight), **options) as optimizer:
        _train(straight, optimizer, rank, range(2))
        zero.save_checkpoint(optimizer, folder, "tied")
        expected = _renamed(whole_state(optimizer, straight)) if kind == "adamw" else {}  # others keep lists
        _train(straight, optimizer, rank, range(2, 4))
        at_end = _renamed(full_values(straight))
    resumed = Tied("out", "middle", "embed", seed=2)
    with zero_optimizer(resumed, OPTIMIZERS[kind](resumed), **options) as optimizer:
        zero.load_checkpoint(optimizer, folder)
        if expected:
            assert_equal_bits(whole_state(optimizer, resumed), expected)
        residuals = optimizer.parts.runtime.mode_state.residuals
        assert all(residual.norm() > 0 for residual in residuals)
        assert bool(residuals) == ("mode" in options)
        _train(resumed, optimizer, rank, range(2, 4))
        if not residuals:  # whose blocks lie elsewhere
            assert_equal_bits(full_values(resumed), at_end)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("adamw", {"stage": 1}),
        ("adamw", {"stage": 3}),
        ("adamw", {"stage": 3, "mode": "delta_hpz", "ranks_per_node": 1}),
        ("nested", {"stage": 2}),
    ],
    ids=["stage 1", "stage 3", "delta_hpz", "nested"],
)
def test_a_model_that_ties_them_in_another_order(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    run_ranks(2, _check_other_order, str(tmp_path), kind, options)


def _check_untied(rank: int, folder: str) -> None:
    model = Tied("middle", "embed", "out", seed=1)
    with zero_optimizer(model, OPTIMIZERS["adamw"](model), stage=3) as optimizer:
        _train(model, optimizer, rank, range(2))
        zero.save_checkpoint(optimizer, folder, "tied")
        saved = full_values(model)
    model = Tied("embed", "middle", "out", seed=2, is_tied=False)
    with zero_optimizer(model, OPTIMIZERS["adamw"](model), stage=3) as optimizer:
        before = full_values(model)
        with pytest.raises(CheckpointError, match=r"'out.weight' among them \(load_optimizer_states=False"):
            zero.load_checkpoint(optimizer, folder)
        assert_equal_bits(full_values(model), before)
        for options in ({"load_optimizer_states": False}, {"load_module_only": True}):
            zero.load_checkpoint(optimizer, folder, **options)
            assert_equal_bits(full_values(model), {**saved, OUT: saved[EMBED]})
            _train(model, optimizer, rank, range(1))
            assert not torch.equal(full_values(model)[OUT], full_values(model)[EMBED]), "one memory"


def test_a_model_that_does_not_tie_them(tmp_path: Path) -> None:
    """Both have the weight that was saved; torch's ``load_state_dict`` does the same."""
    run_ranks(2, _check_untied, str(tmp_path))


def _norm(*, is_wrapped: bool) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    if is_wrapped:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.BatchNorm1d))
    return model


def _check_wrapped_buffers(rank: int, folder: str) -> None:
    """Saved now and by earlier releases, which have the wrapper in the names of buffers; loaded with and without it."""
    path = Path(folder)
    for tag, is_earlier in (("now", False), ("earlier", True)):
        saved = _norm(is_wrapped=True)
        with (
            zero_optimizer(saved, SGD(saved.parameters(), lr=0.1), stage=2) as optimizer,
            pytest.MonkeyPatch.context() as changed,
        ):
            saved[1].running_mean.fill_(3 + rank)
            if is_earlier:
                changed.setattr(flat_parts, "without_wrappers", lambda name: name)
            zero.save_checkpoint(optimizer, path, tag)
            save_model_file(optimizer, path / f"{tag}-weights" / "model.safetensors")
        for is_wrapped in (False, True):
            model = _norm(is_wrapped=is_wrapped)
            with zero_optimizer(model, SGD(model.parameters(), lr=0.1), stage=2) as optimizer:
                zero.load_checkpoint(optimizer, path / f"{tag}-weights", load_module_only=True)
                assert model[1].running_mean.tolist() == [3] * 4, "of the first rank"
                zero.load_checkpoint(optimizer, path, tag)
                assert model[1].running_mean.tolist() == [3 + rank] * 4


def test_buffers_under_activation_checkpointing(tmp_path: Path) -> None:
    run_ranks(2, _check_wrapped_buffers, str(tmp_path))
