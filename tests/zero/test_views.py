"""Views and graphs that outlive a gather: correct as in plain torch, or one named error at their use."""

# covers zero/optimizer.py

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.zero.training import zero_optimizer
from zcomm import StateError
from zero import GatheredParameters

WIDTH = 6
MODIFIED = "modified by an inplace operation"


class _Layer(nn.Module):
    """Keeps a view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.weight.t()
        return torch.tanh(x @ self.kept)


class _Autoencoder(nn.Module):
    """The first layer's view is used after that layer, and others of its size, were released."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x @ self.layers[0].kept.t()


def _new(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def _inputs(scale: float = 1.0) -> Tensor:
    return torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH) * scale


def _loss(model: nn.Module, x: Tensor | None = None) -> Tensor:
    loss: Tensor = model(_inputs() if x is None else x).square().mean()
    return loss


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def _step(loss: Tensor, optimizer: Any) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _assert_same(model: nn.Module, plain: nn.Module) -> None:
    with GatheredParameters(model.parameters()):
        for (name, got), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def _check_kept_views(rank: int) -> None:
    model, plain = _new(_Autoencoder), _new(_Autoencoder)
    reference = _sgd(plain)
    with zero_optimizer(model, _sgd(model), stage=3) as optimizer:
        pool, sizes, num_viewed = optimizer.parts.runtime.pool, [], 0
        for _ in range(4):
            expected, got = _loss(plain), _loss(model)
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
            _step(expected, reference)
            num_viewed = max(num_viewed, len(pool.viewed()))
            _step(got, optimizer)
            sizes.append(pool.nbytes)
        assert num_viewed
        assert sizes[1] == sizes[-1], "buffers come back when nobody views them any more"
        kept = model.layers[1].kept
        for use in (lambda: kept + 1, lambda: _inputs() @ kept.t(), kept.clone, kept.numpy, lambda: kept.data):
            with pytest.raises(StateError, match=r"a view of 'layers\.1\.weight' .* had changed.*clone\(\)"):
                use()
        assert "stale view of 'layers.1.weight'" in repr(kept)
        assert kept.shape == (WIDTH, WIDTH)
        _assert_same(model, plain)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_view_that_a_layer_keeps_is_right_until_the_parameter_changes(world_size: int) -> None:
    run_ranks(world_size, _check_kept_views)


def _check_views_of_a_block(rank: int) -> None:
    model = _new(_mlp)
    with zero_optimizer(model, _sgd(model), stage=3) as optimizer:
        with GatheredParameters(model.parameters()):
            weight, frozen_values = model[2].weight.detach(), model[2].weight.detach().clone()
            row, array = model[0].weight[1], model[4].weight.detach().numpy()
        other = torch.equal(model(_inputs()), _new(_mlp)(_inputs())), weight.clone()  # buffers are reused
        assert other[0]
        assert torch.equal(other[1], frozen_values)
        assert torch.equal(row, _new(_mlp)[0].weight[1])
        _step(_loss(model), optimizer)
        assert torch.equal(frozen_values, other[1]), "a copy stays"
        assert (array != array).all(), "what is no tensor is NaN"
        for view, name in ((weight, "2.weight"), (row, "0.weight")):
            with pytest.raises(StateError, match=f"a view of '{name}'"):
                view.sum()
        with GatheredParameters(model.parameters()):
            weight = model[2].weight.detach()
        model.load_state_dict(_new(_mlp).state_dict())
        with pytest.raises(StateError, match=r"a view of '2\.weight'"):
            weight.sum()


def test_a_view_that_leaves_a_block_is_right_until_the_parameter_changes() -> None:
    run_ranks(2, _check_views_of_a_block)


class _KeepsNothing(nn.Module):
    """Keeps views without elements, one of a parameter that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.layer = nn.Parameter(torch.empty(0, 3)), nn.Linear(WIDTH, WIDTH)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.kept:
            self.kept = [self.nothing.detach().t(), self.layer.weight.detach()[:0]]
        return self.layer(x) + sum(view.sum() for view in self.kept) + self.nothing.sum()


def _check_views_without_elements(rank: int, options: dict[str, Any]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(_KeepsNothing() for _ in range(3)))

    model, plain = _new(build), _new(build)
    reference = _sgd(plain)
    with zero_optimizer(model, _sgd(model), stage=3, **options) as optimizer:
        for _ in range(3):
            expected, got = (sum(_loss(each, _inputs(scale)) for scale in (1, 2)) for each in (plain, model))
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
            _step(expected, reference)
            _step(got, optimizer)
        _assert_same(model, plain)


@pytest.mark.parametrize("options", [{}, {"overlap_comm": False}, {"offload_param": {"device": "cpu"}}], ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_view_without_elements_stays_right(world_size: int, options: dict[str, Any]) -> None:
    run_ranks(world_size, _check_views_without_elements, options)


PENALTIES: dict[str, Callable[[nn.Module], Tensor]] = {
    "view": lambda model: sum(p.view(-1).pow(2).sum() for p in model.parameters()),
    "leaf": lambda model: sum(p.pow(2).sum() for p in model.parameters()),
    "transposed": lambda model: sum((p.t() @ p - 1).pow(2).sum() for p in model.parameters() if p.ndim == 2),
}


def _check_penalties(rank: int, stage: int) -> None:
    model, plain = _new(_mlp), _new(_mlp)
    reference = _sgd(plain)
    with zero_optimizer(model, _sgd(model), stage=stage) as optimizer:
        for penalty in PENALTIES.values():
            with GatheredParameters(model.parameters()):
                extra = penalty(model) * 1e-2
            _step(_loss(model) + extra, optimizer)
            _step(_loss(plain) + penalty(plain) * 1e-2, reference)
        _assert_same(model, plain)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_graph_of_a_block_runs_backward_after_it(world_size: int, stage: int) -> None:
    run_ranks(world_size, _check_penalties, stage)


class _EnablesGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x @ self.weight.t()


def _check_graph_leaves_no_grad(rank: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(_EnablesGradients(), _EnablesGradients())

    def gradient(model: nn.Module) -> Tensor:
        x = _inputs().requires_grad_()
        with torch.no_grad():
            y = model(x)
            model(x * 2)
        return torch.autograd.grad(y.sum(), x)[0]

    model = _new(build)
    with zero_optimizer(model, _sgd(model), stage=3):
        torch.testing.assert_close(gradient(model), gradient(_new(build)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_graph_that_a_forward_without_gradients_makes_is_right(world_size: int) -> None:
    run_ranks(world_size, _check_graph_leaves_no_grad)


class _ChangesInPlace(nn.Module):
    """``sigmoid`` saves its output, ``tanh_`` what it makes of its input."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.linear, self.breaks = nn.Linear(WIDTH, WIDTH), breaks

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.linear(x))
        if self.breaks:
            y += 1.0
        return (y * 2).tanh_()


def _check_in_place(rank: int, stage: int) -> None:
    for breaks in (False, True):
        model, plain = (_new(lambda: _ChangesInPlace(breaks=breaks)) for _ in range(2))  # noqa: B023
        with zero_optimizer(model, _sgd(model), stage=stage) as optimizer:
            if breaks:
                for each in (plain, model):
                    with pytest.raises(RuntimeError, match=MODIFIED):
                        _loss(each).backward()
                continue
            _step(_loss(plain), _sgd(plain))
            _step(_loss(model), optimizer)
            _assert_same(model, plain)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_saved_tensor_that_was_changed_in_place_is_an_error(stage: int) -> None:
    run_ranks(2, _check_in_place, stage)


class _Branches(nn.Module):
    """A step may use one branch and leave the other unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = _mlp(), _mlp()

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return getattr(self, branch)(x)


def _check_old_graphs(rank: int, options: dict[str, Any]) -> None:
    model, plain = _new(_Branches), _new(_Branches)
    reference = _sgd(plain)
    with zero_optimizer(model, _sgd(model), **options) as optimizer:
        for branch, is_stale in (("left", True), ("right", False)):
            for each, steps in ((plain, reference), (model, optimizer)):
                first, second = (each(_inputs(scale), branch).square().mean() for scale in (1, 2))
                between = first if is_stale else each(_inputs(), "left").square().mean()
                _step(between, steps)
                if is_stale:
                    with pytest.raises(RuntimeError, match=MODIFIED):
                        second.backward()
                    steps.zero_grad()
                else:
                    _step(second, steps)
        _assert_same(model, plain)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        *({"stage": stage} for stage in range(4)),
        {"stage": 3, "stage3_param_persistence_threshold": 10**6},
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    ],
    ids=str,
)
def test_a_graph_from_before_a_step_is_refused_if_the_step_changed_what_it_saved(
    world_size: int, options: dict[str, Any]
) -> None:
    """As in torch, which accepts graphs of parameters that had no gradient in that step."""
    run_ranks(world_size, _check_old_graphs, options)


def _check_blocks_between(rank: int, stage: int) -> None:
    for writes in (False, True):
        model, plain = _new(_mlp), _new(_mlp)
        with zero_optimizer(model, _sgd(model), stage=stage) as optimizer:
            loss = _loss(model)
            with GatheredParameters(model.parameters(), modifier_rank=1), torch.no_grad():
                if writes and rank == 1:
                    model[2].weight[0, 0] = 3.0
            if writes:
                with pytest.raises(RuntimeError, match=MODIFIED):
                    loss.backward()
                continue
            _step(loss, optimizer)
            _step(_loss(plain), _sgd(plain))
            _assert_same(model, plain)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_modifier_rank_writes_makes_graphs_old_on_every_rank(stage: int) -> None:
    """But not what it only reads."""
    run_ranks(2, _check_blocks_between, stage)
