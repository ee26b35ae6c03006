"""Gradients that a user sets: step() applies ``.grad``, averaged over the ranks, or refuses it."""

# covers zero/utils.py

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.zero.training import full_values, zero_optimizer
from zcomm import StateError
from zero.utils import safe_get_full_grad, safe_set_full_grad

STAGES = [0, 1, 2, 3]
WIDTH = 40  # 1,600 elements of a weight: in the shards of several ranks


class Net(nn.Module):
    """Layers in several buckets at stage 3; the last one is used on request only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, uses_spare: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.spare(x) if uses_spare else x


def _net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def _x(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _value(param: nn.Parameter, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(param.shape), generator=generator, dtype=torch.float64)


class Oracle:
    """Plain torch: all ranks' gradients in one process, with the user's changes written out for each."""

    def __init__(self, world_size: int) -> None:
        self.model, self.world_size = _net(), world_size
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def mean(self, of_rank: Callable[[nn.Module, int], list[Tensor | None]]) -> list[Tensor | None]:
        """The mean of the ranks' gradients; None counts as zeros unless all are None."""
        rows = zip(*(of_rank(self.model, rank) for rank in range(self.world_size)), strict=True)
        means: list[Tensor | None] = []
        for row in rows:
            given = [grad for grad in row if grad is not None]
            means.append(torch.stack(given).sum(0) / self.world_size if given else None)
        return means

    def step(self, grads: list[Tensor | None]) -> None:
        for param, grad in zip(self.model.parameters(), grads, strict=True):
            param.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self, model: nn.Module) -> None:
        got = full_values(model)
        for name, param in self.model.named_parameters():
            torch.testing.assert_close(got[name], param.detach(), rtol=0, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def _grads(model: nn.Module, seed: int, **options: bool) -> list[Tensor | None]:
    loss = model(_x(seed), **options).square().sum()
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


def _check_without_backward(rank: int, stage: int, world_size: int, options: dict[str, Any]) -> None:
    """torch.autograd.grad and p.grad = g, as in meta-learning; rank 0 alone sets the spare layer's in one step."""
    oracle, model = Oracle(world_size), _net()
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    with zero_optimizer(model, adam, stage=stage, **options) as optimizer:
        for step in range(3):

            def of(net: nn.Module, r: int, step: int = step) -> list[Tensor | None]:
                grads = _grads(net, 10 * step + r, uses_spare=step == 2)
                return grads if r == 0 else [*grads[:-2], None, None]

            oracle.step(oracle.mean(of))
            for param, grad in zip(model.parameters(), of(model, rank), strict=True):
                param.grad = grad
            optimizer.step()
            assert optimizer.was_step_applied
            optimizer.zero_grad()
        oracle.check(model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_without_a_backward_are_averaged(stage: int, world_size: int) -> None:
    run_ranks(world_size, _check_without_backward, stage, world_size, {})


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 3}, {"offload_optimizer": {"device": "cpu"}}])
def test_so_they_are_in_a_window_and_with_offloaded_states(options: dict[str, Any]) -> None:
    run_ranks(2, _check_without_backward, 2, 2, options)


def _replace(param: nn.Parameter, index: int) -> None:
    """The replacement of each parameter's gradient after a backward; the same on every rank."""
    if index % 4 == 0:
        param.grad = _value(param, index)
    elif index % 4 == 1:
        param.grad = None


def _check_after_backward(rank: int, stage: int, world_size: int, num_micro: int, options: dict[str, Any]) -> None:
    oracle, model = Oracle(world_size), _net()
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    with zero_optimizer(model, adam, stage=stage, gradient_accumulation_steps=num_micro, **options) as optimizer:
        for step in range(3):

            def loss(net: nn.Module, r: int, micro: int, step: int = step) -> Tensor:
                return net(_x(100 * step + 10 * micro + r)).square().sum()

            for param in oracle.model.parameters():
                param.grad = None
            for micro in range(num_micro):
                for r in range(world_size):
                    (loss(oracle.model, r, micro) / world_size).backward()
                loss(model, rank, micro).backward()
            for index, (theirs, mine) in enumerate(zip(oracle.model.parameters(), model.parameters(), strict=True)):
                _replace(theirs, index)
                _replace(mine, index)
            if stage == 0:
                model.layers[1].weight.grad *= 2
                oracle.model.layers[1].weight.grad *= 2
            if step == 1:
                torch.nn.utils.clip_grad_norm_(oracle.model.parameters(), 0.5)
                optimizer.clip_grad_norm_(0.5)
            oracle.step([param.grad for param in oracle.model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        oracle.check(model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("world_size", "num_micro"), [(1, 1), (2, 2), (3, 1)])
def test_a_replaced_gradient_is_the_one_that_is_applied(stage: int, world_size: int, num_micro: int) -> None:
    run_ranks(world_size, _check_after_backward, stage, world_size, num_micro, {})


def test_it_is_with_gradients_in_host_memory_and_in_files(tmp_path: Any) -> None:
    run_ranks(2, _check_after_backward, 2, 2, 2, {"offload_optimizer": {"device": "cpu"}})
    device = {"device": "nvme", "nvme_path": str(tmp_path)}
    run_ranks(2, _check_after_backward, 3, 2, 2, {"offload_optimizer": device})


def _check_accumulating(rank: int, stage: int) -> None:
    """A backward adds to gradients that a user set, also within no_sync; clearing drops earlier backwards' sums."""
    oracle, model = Oracle(2), _net()
    with zero_optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=stage) as optimizer:

        def of(net: nn.Module, r: int) -> list[Tensor | None]:
            first, second, third = (_grads(net, seed + r) for seed in (0, 10, 20))
            own = [_value(param, 7 + r) for param in net.parameters()]
            kept = [i for i, _ in enumerate(own) if i != 2]
            sums = [own[i] + sum(g[i] for g in (first, second, third) if g[i] is not None) for i in range(len(own))]
            assert len(kept) == len(own) - 1
            sums[2] = third[2]
            return sums

        for param, value in zip(model.parameters(), of(model, rank), strict=True):
            assert value is not None
            param.grad = _value(param, 7 + rank)
        model(_x(rank)).square().sum().backward()
        with optimizer.no_sync():
            model(_x(10 + rank)).square().sum().backward()
        list(model.parameters())[2].grad = None
        model(_x(20 + rank)).square().sum().backward()
        oracle.step(oracle.mean(of))
        optimizer.step()
        oracle.check(model)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_adds_to_what_a_user_has_set(stage: int) -> None:
    run_ranks(2, _check_accumulating, stage)


def _check_unused_on_one(rank: int, stage: int) -> None:
    """After a backward rank 0 alone sets a gradient in a bucket that no rank used: the others count as zeros."""
    model = _net()
    model.spare.float()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=stage) as optimizer:
        before = full_values(model)
        model(_x(rank)).sum().backward()
        model.layers[0].weight.grad = torch.full((WIDTH, WIDTH), 3.0).double()
        if rank == 0:
            model.spare.weight.grad = torch.ones(WIDTH, WIDTH)
        optimizer.step()
        after = full_values(model)
        for name, change in (("layers.0.weight", 3.0), ("spare.weight", 0.5), ("spare.bias", 0.0)):
            torch.testing.assert_close(after[name], before[name] - change, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_one_rank_has_counts_its_share(stage: int) -> None:
    run_ranks(2, _check_unused_on_one, stage)


def _check_refused(rank: int, stage: int) -> None:
    model = _net()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage) as optimizer:
        model(_x(rank)).sum().backward()
        weight, other = model.layers[0].weight, model.layers[1].weight
        with pytest.raises(StateError, match=r"gradient of 'layers\.0\.weight' is sharded"):
            weight.grad *= 2
        kept = weight.grad
        other.grad = weight.grad
        with pytest.raises(StateError, match=r"'layers\.1\.weight' was set to a stand-in for .*'layers\.0\.weight'"):
            optimizer.step()
        optimizer.zero_grad()
        model(_x(rank)).sum().backward()
        weight.grad = kept  # of a gradient that is gone
        with pytest.raises(StateError, match=r"'layers\.0\.weight' was set to a stand-in for"):
            optimizer.step()
        optimizer.zero_grad()
        model(_x(rank)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_cannot_be_taken_in_is_refused_by_name(stage: int) -> None:
    run_ranks(2, _check_refused, stage)


FP16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}


def _infect(model: nn.Module, how: str, value: float) -> None:
    weight = model.layers[1].weight
    if how == "in place":
        weight.grad[3, 4] = value
    elif how == "replaced":
        weight.grad = torch.full((WIDTH, WIDTH), value)
    else:
        safe_set_full_grad(weight, torch.full((WIDTH, WIDTH), value))


def _check_overflow(rank: int, stage: int, how: str, options: dict[str, Any]) -> None:
    model = _net(torch.float32)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with zero_optimizer(model, sgd, stage=stage, fp16=FP16, **options) as optimizer:
        for value in (float("inf"), float("nan"), 1.0):
            before, scale = full_values(model), optimizer.loss_scale.scale
            optimizer.scale(model(_x(rank, torch.float16)).float().sum()).backward()
            _infect(model, how, value)
            optimizer.step()
            assert optimizer.was_step_applied == (value == 1.0)
            assert optimizer.loss_scale.scale == (scale if value == 1.0 else scale / 2)
            optimizer.zero_grad()
            after = full_values(model)
            assert any(not torch.equal(before[name], after[name]) for name in before) == (value == 1.0)


@pytest.mark.parametrize(
    ("stage", "how"), [(0, "in place"), *((stage, how) for stage in STAGES for how in ("replaced", "set"))]
)
def test_an_infinity_written_after_backward_skips_the_step(stage: int, how: str) -> None:
    run_ranks(2, _check_overflow, stage, how, {})
    if stage == 2:
        run_ranks(2, _check_overflow, stage, how, {"offload_optimizer": {"device": "cpu"}})


def _check_scaler(rank: int, stage: int, how: str) -> None:
    """torch.amp.GradScaler unscales gradients that a user sets, and finds their overflow, on every rank."""
    model, plain = _net(torch.float32), _net(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage) as optimizer:
        for value in (float("inf"), 512.0):
            before, scale = full_values(model), scaler.get_scale()
            scaler.scale(model(_x(rank, torch.float32)).sum()).backward()
            _infect(model, how, value)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = full_values(model)
            if value == 512.0:
                expected = plain.layers[1].weight.detach() - 0.1 * value / scale
                rows = slice(4, None) if how == "in place" else slice(None)
                if how != "in place":
                    torch.testing.assert_close(after["layers.1.weight"][rows], expected[rows])
                assert not torch.equal(before["layers.0.weight"], after["layers.0.weight"])
            else:
                assert scaler.get_scale() == scale / 2
                assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("stage", "how"), [(0, "in place"), *((stage, how) for stage in STAGES for how in ("replaced", "set"))]
)
def test_a_grad_scaler_sees_it(stage: int, how: str) -> None:
    run_ranks(2, _check_scaler, stage, how)


def _check_scaler_order(rank: int) -> None:
    """Whether a gradient was set before or after scaler.unscale_() is unknown, so step() refuses it."""
    model = _net(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2) as optimizer:
        scaler.scale(model(_x(rank, torch.float32)).sum()).backward()
        scaler.unscale_(optimizer)
        _infect(model, "replaced", 1.0)
        with pytest.raises(StateError, match=r"'layers\.1\.weight' was set by hand, and a GradScaler"):
            scaler.step(optimizer)


def test_a_gradient_set_around_unscale_is_refused() -> None:
    run_ranks(2, _check_scaler_order)


def _check_not_scaled(rank: int) -> None:
    """A loss scale divides what step() applies, so a user who sets all gradients must scale them."""
    model = _net(torch.float32)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=2, fp16=FP16) as optimizer:
        weight = model.layers[0].weight
        weight.grad = torch.ones(WIDTH, WIDTH)
        with pytest.raises(StateError, match="scaled loss, loss_scale=256"):
            optimizer.step()
        optimizer.zero_grad()
        before = full_values(model)["layers.0.weight"]
        weight.grad = optimizer.scale(torch.full((WIDTH, WIDTH), 0.5))
        optimizer.step()
        torch.testing.assert_close(full_values(model)["layers.0.weight"], before - 0.5, rtol=0, atol=1e-3)


def test_gradients_are_in_units_of_the_loss_scale() -> None:
    run_ranks(2, _check_not_scaled)


def _check_unscaled_residual(rank: int) -> None:
    """A gradient set after unscale_() is not scaled, so the residual added to it must not be, either."""
    model = _net(torch.float32)
    options: dict[str, Any] = {"stage": 3, "mode": "delta_hpz", "ranks_per_node": 2, "fp16": FP16}
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0), **options) as optimizer:
        for step in range(2):
            optimizer.scale(1e-3 * model(_x(rank, torch.float16)).float().square().sum()).backward()
            before = full_values(model)["layers.1.weight"]
            if step:
                optimizer.unscale_()
                model.layers[1].weight.grad = torch.zeros(WIDTH, WIDTH)
            optimizer.step()
            assert optimizer.was_step_applied
            optimizer.zero_grad()
        change = (full_values(model)["layers.1.weight"] - before).abs().max()
        assert change < 2e-3  # a residual, but no 256 of them


def test_a_residual_has_the_units_of_what_is_set() -> None:
    run_ranks(4, _check_unscaled_residual)


def _check_sanitised(rank: int, stage: int) -> None:
    """After a user has removed an overflow the step is not skipped."""
    model = _net(torch.float32)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, fp16=FP16) as optimizer:
        for how in ("cleared", "replaced", "set"):
            optimizer.scale(model(_x(rank, torch.float16)).float().sum()).backward()
            _infect(model, "set", float("nan"))
            if how == "cleared":
                model.layers[1].weight.grad = None
            else:
                _infect(model, how, 1.0)
            optimizer.step()
            assert optimizer.was_step_applied
            optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_overflow_that_was_taken_out_is_none(stage: int) -> None:
    run_ranks(2, _check_sanitised, stage)


def _check_create_graph(rank: int, stage: int) -> None:
    oracle, model = Oracle(2), _net()
    with zero_optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=stage) as optimizer:
        for step in range(3):

            def of(net: nn.Module, r: int, step: int = step) -> list[Tensor | None]:
                return _grads(net, 10 * step + r)

            oracle.step(oracle.mean(of))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Using backward")
                model(_x(10 * step + rank)).square().sum().backward(create_graph=step != 1)
            buffers = [grads.full for grads in optimizer.parts.runtime.reducer.all]
            assert not any(full is not None and full.requires_grad for full in buffers)
            optimizer.step()
            optimizer.zero_grad()
        oracle.check(model)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_creates_a_graph_leaves_none(stage: int) -> None:
    run_ranks(2, _check_create_graph, stage)


def _check_moved(rank: int, stage: int, num_micro: int) -> None:
    """The masters' gradients are the library's: other memory under one is not taken for the reduced gradient."""
    oracle, model = Oracle(2), _net()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    with zero_optimizer(model, inner, stage=stage, gradient_accumulation_steps=num_micro) as optimizer:
        for step in range(2):
            for micro in range(num_micro):
                (model(_x(10 * step + rank)).square().sum() / num_micro).backward()
                *masters, _ = optimizer.param_groups[0]["params"]  # the last is the overflow flag
                used = [master for master in masters if master.grad is not None]
                assert used or micro < num_micro - 1
                for master in used:
                    master.grad.data = torch.zeros_like(master.grad)
            oracle.step(oracle.mean(lambda net, r, step=step: _grads(net, 10 * step + r)))
            optimizer.step()
            optimizer.zero_grad()
        oracle.check(model)


@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_of_a_master_whose_memory_is_moved_is_given_again(stage: int, num_micro: int) -> None:
    run_ranks(2, _check_moved, stage, num_micro)


def _check_cleared_sum(rank: int) -> None:
    """One that came twice is summed beside the 16-bit buffer; the other parameter's stays."""
    model = nn.Linear(WIDTH, WIDTH).bfloat16()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2) as optimizer:
        (grads,) = optimizer.parts.runtime.reducer.all
        full = torch.full((grads.bucket.layout.numel,), 9.0, dtype=torch.bfloat16)
        for _ in range(2):
            for slot, param in enumerate(grads.bucket.params):
                grads.put(slot, torch.ones_like(param), full)
        grads.drop(0)
        grads.complete(full)
        expected = torch.zeros_like(full)
        bias = grads.bucket.layout.slots[1].offset
        expected[bias : bias + WIDTH] = 2
        assert torch.equal(full, expected)


def test_a_sum_that_is_cleared_leaves_nothing() -> None:
    run_ranks(1, _check_cleared_sum)


def _check_late_hook(rank: int, stage: int) -> None:
    """A hook added after construction receives this rank's gradient, and may change it."""
    oracle, model, seen = Oracle(2), _net(), list[bool]()
    with zero_optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=stage) as optimizer:

        def double(param: Tensor) -> None:
            seen.append(param.grad is not None)
            if param.grad is not None:
                param.grad = param.grad * 2

        handles = [param.register_post_accumulate_grad_hook(double) for param in model.parameters()]
        for step in range(2):

            def of(net: nn.Module, r: int, step: int = step) -> list[Tensor | None]:
                factor = 2 - step
                return [None if g is None else g * factor for g in _grads(net, 10 * step + r)]

            oracle.step(oracle.mean(of))
            model(_x(10 * step + rank)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for handle in handles:
                handle.remove()
        assert seen
        assert all(seen)
        oracle.check(model)


@pytest.mark.parametrize("stage", STAGES)
def test_a_hook_added_later_sees_the_gradient(stage: int) -> None:
    run_ranks(2, _check_late_hook, stage)


def _check_is_within_step(rank: int) -> None:
    model = _net()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2) as optimizer:
        runtime = optimizer.parts.runtime
        model(_x(rank)).sum().backward()
        assert runtime.is_within_step
        model.zero_grad()
        assert not runtime.is_within_step
        model(_x(rank)).sum().backward()
        assert runtime.is_within_step
        assert safe_get_full_grad(model.layers[0].weight) is not None


def test_a_step_that_the_model_cleared_is_none() -> None:
    run_ranks(2, _check_is_within_step)


def test_the_oracle_averages() -> None:
    oracle = Oracle(2)
    first = copy.deepcopy(oracle.model)
    means = oracle.mean(lambda net, rank: [torch.full_like(p, 2.0 * rank) for p in net.parameters()])
    oracle.step(means)
    assert all(grad is not None and grad.eq(1).all() for grad in means)
    assert not torch.equal(first.spare.weight, oracle.model.spare.weight)
