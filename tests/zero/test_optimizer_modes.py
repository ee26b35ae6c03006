"""Schedule-free optimizers, which evaluate other parameters than they train, against themselves in one process."""

# covers zero/optimizer.py zero/_optim/optimizer_clone.py

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from tests.zero.models import batch, groups_of, loss_of, new_model
from tests.zero.training import full_values, zero_optimizer
from zero import load_checkpoint, save_checkpoint

WORLD, STEPS = 2, 4


class Averaging(torch.optim.Optimizer):
    """SGD that evaluates the mean of its iterates ``z``: parameters are z in training, and the mean in evaluation."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "train_mode": False, "k": 0})

    def _swap(self, *, to_training: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != to_training else ():
                if "mean" in self.state[p]:
                    state = self.state[p]
                    other = state["other"].clone() if to_training else state["mean"]
                    if not to_training:
                        state["other"] = p.detach().clone()
                    p.data.copy_(other)
            group["train_mode"] = to_training

    def train(self) -> None:
        self._swap(to_training=True)

    def eval(self) -> None:
        self._swap(to_training=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])
                    self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p, 1 / group["k"])


def _new(name: str, model: nn.Module) -> Any:
    if name == "own":
        return Averaging(groups_of(model), lr=0.1)
    return getattr(pytest.importorskip("schedulefree"), name)(groups_of(model), lr=0.1)


def _train_plain(model: nn.Module, optimizer: Any, steps: range) -> None:
    optimizer.train()
    for step in steps:
        sum(loss_of(model, *batch(step, 0, rank)) / WORLD for rank in range(WORLD)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    optimizer.train()
    for step in steps:
        loss_of(model, *batch(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _check(rank: int, name: str, options: dict[str, Any], folder: str) -> None:
    plain, model = new_model(torch.float64), new_model(torch.float64)
    expected = _new(name, plain)
    with zero_optimizer(model, _new(name, model), **options) as optimizer:
        for first in (0, STEPS):
            steps = range(first, first + STEPS)
            _train_plain(plain, expected, steps)
            _train(model, optimizer, rank, steps)
            trained = dict(plain.named_parameters())
            _assert_close(full_values(model), trained)
            expected.eval()
            optimizer.eval()
            averaged = dict(plain.named_parameters())
            _assert_close(full_values(model), averaged)
        save_checkpoint(optimizer, folder, "averaged")
    again = new_model(torch.float64, seed=1)
    with zero_optimizer(again, _new(name, again), **options) as optimizer:
        load_checkpoint(optimizer, folder, "averaged")
        _assert_close(full_values(again), averaged)
        _train_plain(plain, expected, range(2 * STEPS, 3 * STEPS))
        _train(again, optimizer, rank, range(2 * STEPS, 3 * STEPS))
        _assert_close(full_values(again), dict(plain.named_parameters()))


def _assert_close(got: Any, wanted: Any) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["own", "AdamWScheduleFree", "SGDScheduleFree"])
def test_modes_change_the_parameters_as_in_one_process(name: str, stage: int, tmp_path: Any) -> None:
    if name != "own":
        pytest.importorskip("schedulefree")
    run_ranks(WORLD, _check, name, {"stage": stage}, str(tmp_path))


def test_modes_with_states_on_the_host(tmp_path: Any) -> None:
    run_ranks(WORLD, _check, "own", {"stage": 3, "offload_optimizer": {"device": "cpu"}}, str(tmp_path))


def _check_without_modes(rank: int) -> None:
    model = new_model()
    with zero_optimizer(model, stage=3) as optimizer:
        _train(model, optimizer, rank, range(2))
        before = full_values(model)
        optimizer.eval()
        assert all(torch.equal(value, before[name]) for name, value in full_values(model).items())


def test_other_optimizers_have_one_mode() -> None:
    run_ranks(WORLD, _check_without_modes)
