"""States that are lists of tensors, as SOAP's preconditioners are: checkpoints between stages and ranks, access."""

# covers zero/_optim/masters.py zero/_optim/file_update.py zero/_checkpoint/flat_parts.py zero/_checkpoint/restore.py

from __future__ import annotations

import copy
import importlib
import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import AdamW, Optimizer

import zcomm
import zero
from tests.ranks import run_ranks, topology
from tests.zero.models import as_vector, batch, loss_of, new_model
from tests.zero.training import full_values, train, zero_optimizer
from tests.zero.whole_optimizers import check_moves, matrices_and_others, train_plainly
from zcomm import ConfigError, StateError
from zero import load_checkpoint, save_checkpoint
from zero._optim.file_update import FileUpdate
from zero._optim.masters import is_nested, tensors_in
from zero.errors import CheckpointError


class TwoSided(Optimizer):
    """Divides a matrix by square roots of sums of its rows and columns, which it keeps in a list, as SOAP does."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], param.grad
                if not state:
                    sides = [grad.new_zeros(n, n) if n < 50 else [] for n in grad.shape]
                    state |= {"sides": sides, "more": {"count": 0, "last": (torch.zeros_like(grad), None)}, "step": 0}
                state["step"] += 1
                state["more"]["count"] += 1
                last = state["more"]["last"][0]
                last.lerp_(grad, 0.3)  # in place
                update = last
                for axis, side in enumerate(state["sides"]):
                    if isinstance(side, Tensor):
                        matrix = grad.movedim(axis, 0).flatten(1) if grad.ndim > 1 else grad.view(-1, 1)
                        side.add_(matrix @ matrix.T)
                        scale = (side.diagonal() + 1e-3).rsqrt()
                        update = update * scale.view(*[-1 if i == axis else 1 for i in range(grad.ndim)])
                param.sub_(update, alpha=group["lr"] / state["step"] ** 0.5)


def _optimizers(model: nn.Module) -> list[Optimizer]:
    matrices, others = matrices_and_others(model)
    return [TwoSided(matrices), AdamW(others, lr=3e-3)]


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_checkpoints_move_between_stages(device: str, tmp_path: Path) -> None:
    run_ranks(4, check_moves, _optimizers, str(tmp_path), device)


def _save(rank: int, folder: str) -> None:
    model = new_model(torch.float64)
    with zero_optimizer(model, _optimizers(model), stage=2) as optimizer:
        train(model, optimizer, rank, steps=1)
        save_checkpoint(optimizer, folder, "saved")


def _load(rank: int, folder: str) -> None:
    model = new_model(torch.float64)
    with zero_optimizer(model, _optimizers(model), stage=3) as optimizer:
        load_checkpoint(optimizer, folder, "saved")
        shapes = [
            [list(side.shape) if isinstance(side, Tensor) else side for side in state["sides"]]
            for state in optimizer.parts.inner.state.values()
            if "sides" in state
        ]
        assert all(shape in ([], [24, 24]) for of_one in shapes for shape in of_one), shapes
        for state in optimizer.parts.inner.state.values():
            if "sides" in state:
                assert state["more"]["count"] == state["step"] == 1
                assert type(state["more"]["last"]) is tuple
        train(model, optimizer, rank, steps=1)


def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    run_ranks(3, _save, str(tmp_path))
    run_ranks(2, _load, str(tmp_path))
    run_ranks(1, _load, str(tmp_path))


def _check_stacked(rank: int, folder: str) -> None:
    """Each part of a stack has its own, which fit the declaration that they were saved with."""
    for step, parts in enumerate((3, 3, 1)):
        model = new_model()
        model.shared.weight.stacked_parts = parts
        with zero_optimizer(model, _optimizers(model), stage=1 + step % 2) as optimizer:
            if parts == 1:
                with pytest.raises(
                    CheckpointError, match=r"'shared.weight' was updated as 3 tensors, and is as 1 here"
                ):
                    load_checkpoint(optimizer, folder, "stacked")
                continue
            if step:
                load_checkpoint(optimizer, folder, "stacked")
            train(model, optimizer, rank, steps=1)
            sides = [
                tuple(optimizer.parts.inner.state[piece.master]["sides"][0].shape)
                for piece in optimizer.parts.pieces
                if piece.param is model.shared.weight
            ]
            assert sides in ([(8, 8)] * 3, [])
            save_checkpoint(optimizer, folder, "stacked")


def test_of_stacked_tensors(tmp_path: Path) -> None:
    run_ranks(2, _check_stacked, str(tmp_path))


def _check_access(rank: int) -> None:
    model = new_model()
    with zero_optimizer(model, _optimizers(model), stage=3) as optimizer:
        train(model, optimizer, rank, steps=1)
        with pytest.raises(
            StateError, match=r"keeps 'sides' of 'shared.weight' as a list: these functions read numbers"
        ):
            zero.utils.safe_get_full_optimizer_state(model.shared.weight, "sides")
        with pytest.raises(StateError, match=r"as a (list|dict), which torch's helpers cannot gather"):
            get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        total = sum(
            t.numel() * 4
            for state in optimizer.parts.inner.state.values()
            for v in state.values()
            for t in tensors_in(v)
        )
        assert sum(of.states for of in optimizer.bytes_by_parameter().values()) == total


def test_access() -> None:
    run_ranks(2, _check_access)


class Hidden(TwoSided):
    """Keeps what no checkpoint can hold, within a list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state["sides"] = [*state["sides"][:2], object()]


def test_what_cannot_be_saved_is_an_error_at_construction() -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(ConfigError, match=r"Hidden .*keeps 'sides' .* as a list"):
        zero.ZeroOptimizer(model, Hidden(model.parameters()), stage=0)


def test_is_nested() -> None:
    tensor = torch.ones(3)
    assert is_nested([tensor, [], (None, 1, 2.0, True), {"a": tensor, 3: [tensor]}])
    assert len(list(tensors_in([tensor, (tensor, {"a": tensor}), None]))) == 3
    for wrong in (tensor, 1, None, "abc", ["abc"], [object()], {(1, 2): tensor}, [tensor.to_sparse()], {1, 2}):
        assert not is_nested(wrong), wrong


@pytest.mark.skipif(importlib.util.find_spec("pytorch_optimizer") is None, reason="pytorch_optimizer is not installed")
@pytest.mark.parametrize("name", ["SOAP"])
def test_of_pytorch_optimizer(name: str, tmp_path: Path) -> None:
    run_ranks(4, _check_soap, name, str(tmp_path))


def _check_soap(rank: int, name: str, folder: str) -> None:
    """States come back as they were saved. SOAP magnifies rounding: 0.04 with the batches in another order."""
    cls = getattr(importlib.import_module("pytorch_optimizer"), name)

    def build(stage: int, per_node: int) -> tuple[nn.Module, zero.ZeroOptimizer]:
        model = new_model(torch.float64)
        matrices, others = matrices_and_others(model)
        given = [cls(matrices, lr=0.01), AdamW(others, lr=3e-3)]
        return model, zero.ZeroOptimizer(model, given, topology=topology(per_node), stage=stage)

    def states_of(optimizer: zero.ZeroOptimizer) -> list[Any]:
        return [optimizer.parts.inner.state.get(piece.master) for piece in optimizer.parts.pieces]

    for stage, per_node in ((2, 2), (3, 4)):
        model, optimizer = build(stage, per_node)
        train(model, optimizer, rank, steps=2)
        save_checkpoint(optimizer, folder, "saved")
        expected = copy.deepcopy(states_of(optimizer))
        num_lists = float(sum(isinstance((state or {}).get("GG"), list) for state in expected))
        assert zcomm.control.gather_float64(torch.tensor([num_lists]), optimizer.topology).sum() > 3
        optimizer.close()
        model, optimizer = build(stage, per_node)
        load_checkpoint(optimizer, folder, "saved")
        torch.testing.assert_close(states_of(optimizer), expected, rtol=0, atol=0)
        optimizer.close()
        model, optimizer = build(5 - stage, 2)
        load_checkpoint(optimizer, folder, "saved")
        train(model, optimizer, rank, steps=2)
        optimizer.close()


def _check_retry(rank: int, folder: str) -> None:
    """A step that failed on one rank, after it had run, leaves the lists as they were: the next one is that step."""
    expected = new_model(torch.float64)
    train_plainly(expected, _optimizers(expected), world_size=2, steps=range(3))
    model, run = new_model(torch.float64), FileUpdate.run

    def fail(self: FileUpdate, *args: Any, **options: Any) -> None:
        run(self, *args, **options)
        raise OSError(28, "no space")

    offload = {"device": "nvme", "nvme_path": folder}
    with zero_optimizer(model, _optimizers(model), stage=2, offload_optimizer=offload) as optimizer:
        for step in range(3):
            loss_of(model, *batch(step, 0, rank)).backward()
            if step == 1:
                fails = mock.patch.object(FileUpdate, "run", fail) if rank else nullcontext()
                with fails, pytest.raises(OSError, match="no space"):
                    optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
        got = as_vector(full_values(model).values())
    assert (got - as_vector(expected.parameters())).abs().max() < 1e-10


def test_a_failed_step_leaves_them(tmp_path: Path) -> None:
    run_ranks(2, _check_retry, str(tmp_path))
