"""Stage 3 in use: unusual orders of forward and backward, inference, and access to released parameters."""

# covers zero/_gradients/reducer.py

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from unittest import mock
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.ranks import run_ranks
from tests.zero.models import batch, loss_of, new_model
from tests.zero.training import full_values, zero_optimizer
from zcomm import StateError
from zero import GatheredParameters
from zero._gradients import reducer

Loop = Callable[[nn.Module, int, int], Tensor]


def _two_forwards(model: nn.Module, step: int, rank: int) -> Tensor:
    first = loss_of(model, *batch(step, 0, rank))
    second = loss_of(model, *batch(step, 1, rank))
    return first + second


def _inference_between(model: nn.Module, step: int, rank: int) -> Tensor:
    loss = loss_of(model, *batch(step, 0, rank))
    model.eval()
    with torch.no_grad():
        loss_of(model, *batch(step, 5, rank))
    model.train()
    return loss + loss_of(model, *batch(step, 1, rank))


def _submodule_directly(model: nn.Module, step: int, rank: int) -> Tensor:
    x = model.wte(batch(step, 0, rank)[0])
    return model.blocks[0].mlp[0](x).float().square().mean() + loss_of(model, *batch(step, 1, rank))


def _checkpointed(model: nn.Module, step: int, rank: int) -> Tensor:
    tokens, targets = batch(step, 0, rank)
    blocks = [block.forward for block in model.blocks]
    for block, forward in zip(model.blocks, blocks, strict=True):
        block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)
    try:
        return loss_of(model, tokens, targets)
    finally:
        for block in model.blocks:
            del block.forward


LOOPS = {
    "several forwards before a backward": _two_forwards,
    "inference between": _inference_between,
    "a submodule called directly": _submodule_directly,
    "activation checkpointing": _checkpointed,
}


def _run(rank: int, stage: int, loop: Loop) -> dict[str, Tensor]:
    model = new_model()
    with zero_optimizer(model, stage=stage) as optimizer:
        for step in range(3):
            loop(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_values(model)


def _check_equals_stage_2(rank: int, name: str) -> None:
    expected, got = _run(rank, 2, LOOPS[name]), _run(rank, 3, LOOPS[name])
    for key, value in got.items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("name", LOOPS)
def test_equals_stage_2(name: str) -> None:
    run_ranks(2, _check_equals_stage_2, name)


def _check_released_parameter(rank: int) -> None:
    model = new_model()
    weight = model.blocks[1].mlp[0].weight
    with zero_optimizer(model, stage=3):
        assert weight.shape == (53, 24)
        assert weight.numel() == 53 * 24
        assert isinstance(weight, nn.Parameter)
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in new_model().parameters())
        for use in (
            lambda: weight + 1,
            weight.detach,
            weight.clone,
            lambda: weight.data,
            lambda: copy.deepcopy(weight),
        ):
            with pytest.raises(StateError, match=r"blocks\.1\.mlp\.0\.weight.*GatheredParameters.*register_external"):
                use()
        with GatheredParameters(weight):
            assert torch.equal(weight, new_model().blocks[1].mlp[0].weight)
        with pytest.raises(StateError):
            weight.sum()


def test_released_parameter_is_a_named_error() -> None:
    run_ranks(2, _check_released_parameter)


def _check_modifier_rank(rank: int) -> None:
    for stage in (0, 1, 2, 3):
        for dtype in (torch.float32, torch.bfloat16):
            model = new_model(dtype)
            bias = model.shared.bias
            with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=stage) as optimizer:
                with GatheredParameters(bias, modifier_rank=1), torch.no_grad():
                    bias.fill_(rank + 2.0)
                loss_of(model, *batch(0, 0, rank)).backward()
                optimizer.step()  # writes the masters back: they must have the loaded values
                assert torch.equal(
                    full_values(model)["shared.bias"], torch.full_like(full_values(model)["shared.bias"], 3)
                )


def test_modifier_rank_wins_on_every_rank() -> None:
    run_ranks(2, _check_modifier_rank)


def _check_broken_forward(rank: int) -> None:
    model = new_model()
    with zero_optimizer(model, stage=3) as optimizer:
        for broken in (lambda: model(torch.tensor([[10**6]])), lambda: _raise_in_backward(model, rank)):
            with pytest.raises((IndexError, ZeroDivisionError)):
                broken()
        loss_of(model, *batch(0, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        got = full_values(model)
    expected = _run_once(rank)
    for key, value in got.items():
        assert torch.equal(value, expected[key]), key


def _raise_in_backward(model: nn.Module, rank: int) -> None:
    loss = loss_of(model, *batch(3, 0, rank))
    hidden = model.wte(batch(3, 0, rank)[0])
    hidden.register_hook(lambda _: 1 / 0)
    (loss + model.blocks[0](hidden).sum()).backward()


def _run_once(rank: int) -> dict[str, Tensor]:
    model = new_model()
    with zero_optimizer(model, stage=3) as optimizer:
        loss_of(model, *batch(0, 0, rank)).backward()
        optimizer.step()
        return full_values(model)


def test_recovers_from_an_exception_in_forward_and_backward() -> None:
    run_ranks(2, _check_broken_forward)


def _check_boundaries(rank: int) -> None:
    model = new_model()
    with zero_optimizer(model, stage=3, gradient_accumulation_steps=2) as optimizer:
        with pytest.raises(ZeroDivisionError):
            _raise_in_backward(model, rank)
        ends = []
        for micro in range(2):
            loss_of(model, *batch(0, micro, rank)).backward()
            ends.append(optimizer.is_boundary)
        assert ends == [False, True], "the step has two whole backwards"


def test_a_broken_backward_gives_the_step_up() -> None:
    run_ranks(2, _check_boundaries)


def test_nothing_reads_freed_or_reused_memory() -> None:
    """In a separate process with poisoned released buffers: it must end without a signal or NaN."""
    script = """
        import torch
        from tests.zero.models import batch, loss_of, new_model
        from zero import ZeroOptimizer
        losses = []
        for stage in (2, 3):
            model = new_model()
            optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=1e-2)
            for step in range(4):
                both = loss_of(model, *batch(step, 0, 0)) + loss_of(model, *batch(step, 1, 0))
                both.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(both.item())
        assert losses[:4] == losses[4:], losses
    """
    env = os.environ | {"ZERO_DEBUG": "1"}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


def _check_state_dict(rank: int) -> None:
    for stage in (0, 1, 2, 3):
        model, plain = new_model(seed=1), new_model(seed=1)
        with zero_optimizer(model, stage=stage) as optimizer:
            saved = model.state_dict()
            if stage == 3 and rank != 0:
                assert saved == {}
            else:
                assert saved.keys() == plain.state_dict().keys()
                assert all(torch.equal(saved[k], v) for k, v in plain.state_dict().items())
            other = new_model(seed=2)
            model.load_state_dict(other.state_dict())
            for param in model.parameters():
                param.grad = None
            optimizer.step()
            assert all(torch.equal(v, dict(other.named_parameters())[k]) for k, v in full_values(model).items())


def test_state_dict_of_the_model_is_whole_and_loads() -> None:
    run_ranks(2, _check_state_dict)


class Experts(nn.Module):
    """Have equal sizes: only the order check can tell that two ranks gather different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: Tensor, index: int) -> Tensor:
        return self.experts[index](x)


class _Scaled(nn.Module):
    """A layer with an optional parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(16, 16), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, *, has_scale: bool) -> Tensor:
        y = self.linear(x).tanh()
        return y * self.scale if has_scale else y


class _ScaledLayers(nn.Module):
    """One layer in the middle has its scale on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Scaled() for _ in range(8))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, has_scale=rank == 0 or index != 5)
        return x.square().mean()


def _check_unused_on_one_rank(rank: int) -> None:
    for overlap, steps in ((True, 3), (False, 2)):
        torch.manual_seed(0)
        model, alone = _ScaledLayers(), _ScaledLayers()
        alone.load_state_dict(model.state_dict())
        plain = torch.optim.SGD(alone.parameters(), lr=0.5)
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        x = torch.linspace(-1, 1, 64).view(2, 2, 16)
        with (
            mock.patch.object(reducer, "MIN_WAIT_S", 0.3),
            zero_optimizer(model, sgd, stage=3, overlap_comm=overlap) as optimizer,
        ):
            for _ in range(steps):
                model(x[rank], rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                sum(alone(x[each], each) / 2 for each in range(2)).backward()
                plain.step()
                plain.zero_grad()
            for name, value in full_values(model).items():
                torch.testing.assert_close(value, alone.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


def test_a_parameter_that_one_rank_does_not_use_stops_no_other() -> None:
    """In backward more layers follow it than reductions may be in flight."""
    run_ranks(2, _check_unused_on_one_rank)


class _Mark:
    """An object that a weak reference can track."""


def _check_graph_dies(rank: int) -> None:
    """Without garbage collection: unreferenced objects are freed at once."""
    model = _ScaledLayers()
    model.layers[2].requires_grad_(False)
    marks = []

    def mark(module: nn.Module, args: object, output: Tensor) -> None:
        marks.append(_Mark())
        assert output.grad_fn is not None
        output.grad_fn.metadata["mark"] = marks[-1]

    for layer in model.layers:
        layer.register_forward_hook(mark)
    with zero_optimizer(model, torch.optim.SGD, lr=0.5, stage=3):
        gc.collect()
        gc.disable()
        try:
            for runs_backward in (False, True):
                loss = model(torch.ones(2, 16), 0)
                if runs_backward:
                    loss.backward()
                nodes = [ref(each) for each in marks]
                marks.clear()
                assert len(nodes) == 8
                assert all(node() is not None for node in nodes) or runs_backward
                del loss
                assert all(node() is None for node in nodes), f"{runs_backward=}"
        finally:
            gc.enable()


def test_a_graph_dies_with_its_loss() -> None:
    """Even without a backward: otherwise every evaluation that records gradients would cost its activations."""
    run_ranks(2, _check_graph_dies)


def _check_ranks_run_different_modules(rank: int) -> None:
    model = Experts()
    named = r"rank 0: .*'experts\.0\.weight'.*; rank 1: .*'experts\.1\.weight'"
    with (
        zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=3),
        pytest.raises(StateError, match=named),
    ):
        model(torch.ones(2, 5), rank)
    assert _run(rank, 3, LOOPS["inference between"]).keys()  # no exchange remains on the same groups


def test_ranks_that_run_different_modules_all_raise() -> None:
    run_ranks(2, _check_ranks_run_different_modules)
