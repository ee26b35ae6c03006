"""CPU optimizers equal torch's: 16-bit parameters and moments, states, and refusals."""

# covers zero/_model/cast.py zero/_optim/cpu_optimizer_base.py zero/_optim/cpu_optimizers.py zero/optimizer.py

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import zero
from zcomm import ConfigError, StateError
from zero import CPUAdagrad, CPUAdam, CPULion

Make = Callable[[list[Tensor]], Optimizer]

SAME: dict[str, tuple[Make, Make]] = {
    "adamw": (lambda p: CPUAdam(p, 0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
    "adam": (
        lambda p: CPUAdam(p, 0.01, adamw_mode=False, weight_decay=0.1, betas=(0.8, 0.95)),
        lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1, betas=(0.8, 0.95)),
    ),
    "amsgrad": (
        lambda p: CPUAdam(p, 0.01, amsgrad=True, maximize=True),
        lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True, maximize=True, weight_decay=0),
    ),
    "adagrad": (
        lambda p: CPUAdagrad(p, 0.1, lr_decay=0.01, weight_decay=0.01, initial_accumulator_value=0.1),
        lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.01, weight_decay=0.01, initial_accumulator_value=0.1),
    ),
}


class Lion(Optimizer):
    """The paper's algorithm 2."""

    def __init__(self, params: list[Tensor], lr: float, betas: tuple[float, float], decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002  (torch's signature)
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = torch.sign(first * m + (1 - first) * p.grad)
                p.mul_(1 - group["lr"] * group["decay"]).sub_(group["lr"] * update)
                m.copy_(second * m + (1 - second) * p.grad)


SAME["lion"] = (
    lambda p: CPULion(p, 1e-3, betas=(0.9, 0.98), weight_decay=0.1),
    lambda p: Lion(p, 1e-3, (0.9, 0.98), 0.1),
)


def _grads(step: int, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=drawn) * (0.1 + i) for i, shape in enumerate(shapes)]


SHAPES: list[tuple[int, ...]] = [(37, 11), (5,), (), (0,), (2000,)]


@pytest.mark.parametrize("name", SAME)
def test_thousand_steps_are_torchs(name: str) -> None:
    torch.manual_seed(0)
    mine = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in mine]
    optimizers = [SAME[name][0](mine), SAME[name][1](theirs)]
    for step in range(1000):
        for p, q, grad in zip(mine, theirs, _grads(step, SHAPES), strict=True):
            p.grad, q.grad = grad, grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    got = torch.cat([p.detach().flatten() for p in mine]).double()
    expected = torch.cat([p.detach().flatten() for p in theirs]).double()
    assert expected.norm() > 10
    assert (got - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_are_the_rounding_of_a_float32_run(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    narrow = torch.nn.Parameter(torch.randn(3001).to(dtype))
    wide = torch.nn.Parameter(narrow.detach().float())
    pair = [CPUAdam([narrow], 0.01, weight_decay=0.1), CPUAdam([wide], 0.01, weight_decay=0.1)]
    for step in range(20):
        narrow.grad = _grads(step, [(3001,)])[0].to(dtype)
        wide.grad = narrow.grad.float()
        for optimizer in pair:
            optimizer.step()
        assert torch.equal(narrow, wide.to(dtype))
    assert torch.equal(pair[0].state[narrow]["master"], wide)


def test_scaled_gradients_and_an_output_in_one_pass() -> None:
    """ZeRO updates a shard in one pass: the bits must be those of a separate division, step and cast."""
    torch.manual_seed(0)
    apart = torch.nn.Parameter(torch.randn(5000))
    fused = torch.nn.Parameter(apart.detach().clone())
    first, second = CPUAdam([apart], 0.01), CPUAdam([fused], 0.01)
    out = torch.full((5001,), 7.0, dtype=torch.bfloat16)
    for step in range(3):
        grad = (1024 * _grads(step, [(5000,)])[0]).to(torch.bfloat16)
        apart.grad = grad.float() * (0.7 / 1024)
        first.step()
        second.step_tensor_(fused, grad, second.param_groups[0], grad_factor=0.7 / 1024, out=out[1:])
        assert torch.equal(apart, fused)
        assert torch.equal(out[1:], apart.bfloat16())
    assert out[0] == 7
    version = fused._version
    second.step_tensor_(fused, out[1:], second.param_groups[0])
    assert fused._version > version  # autograd sees the change


def test_bfloat16_moments_train_as_well() -> None:
    """The second moment of a quadratic changes by less than a bfloat16 step: rounding to nearest would freeze it."""
    torch.manual_seed(0)
    target, start = torch.randn(4096), torch.zeros(4096)
    ends = {}
    for full in (True, False):
        p = torch.nn.Parameter(start.clone())
        optimizer = CPUAdam([p], 0.01, betas=(0.9, 0.999), fp32_optimizer_states=full)
        for step in range(400):
            p.grad = p.detach() - target + _grads(step, [(4096,)])[0]
            optimizer.step()
        ends[full] = ((p - target).square().mean().item(), optimizer.state[p]["exp_avg_sq"].float().mean().item())
    assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16
    assert ends[False][0] == pytest.approx(ends[True][0], rel=0.1)
    assert ends[False][1] == pytest.approx(ends[True][1], rel=0.02)


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_restart_from_the_state_has_the_same_bits(moments: str) -> None:
    def make() -> tuple[list[torch.nn.Parameter], CPUAdam]:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(300).bfloat16()), torch.nn.Parameter(torch.randn(20))]
        groups = [{"params": params[:1], "amsgrad": True}, {"params": params[1:], "lr": 0.1}]
        return params, CPUAdam(groups, 0.01, fp32_optimizer_states=moments == "float32")

    def run(params: list[torch.nn.Parameter], optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            for p, grad in zip(params, _grads(step, [(300,), (20,)]), strict=True):
                p.grad = grad.to(p.dtype)
            optimizer.step()

    through, optimizer = make()
    run(through, optimizer, range(10))
    stopped, before = make()
    run(stopped, before, range(5))
    saved = copy.deepcopy(before.state_dict())
    again, after = make()
    for p, q in zip(again, stopped, strict=True):
        p.data.copy_(q)
    after.load_state_dict(saved)
    run(again, after, range(5, 10))
    for p, q in zip(through, again, strict=True):
        assert torch.equal(p, q)
        for name, value in optimizer.state[p].items():
            assert torch.equal(value, after.state[q][name])
            assert value.dtype == after.state[q][name].dtype


def test_steps_that_were_counted_in_a_plain_number_go_on_as_torchs() -> None:
    """torch's optimizers before 1.12 saved the number of steps as a plain number, which has no shape."""

    def run(optimizer: Optimizer, p: Tensor, steps: range) -> None:
        for step in steps:
            (p.grad,) = _grads(step, [(300,)])
            optimizer.step()

    torch.manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(300))
    make_mine, make_theirs = SAME["adamw"]
    through = make_theirs([theirs])
    run(through, theirs, range(5))
    mine = torch.nn.Parameter(theirs.detach().clone())
    resumed = make_mine([mine])
    state = copy.deepcopy(through.state_dict()["state"])
    state[0]["step"] = 5
    resumed.load_state_dict({"state": state, "param_groups": resumed.state_dict()["param_groups"]})
    run(through, theirs, range(5, 10))
    run(resumed, mine, range(5, 10))
    assert (mine - theirs).norm() <= 1e-6 * theirs.norm()
    assert resumed.state[mine]["step"] == 10


def test_moments_are_taken_over_in_the_dtype_of_here() -> None:
    p = torch.nn.Parameter(torch.zeros(300))
    wide, narrow = CPUAdam([p], 0.01), CPUAdam([p], 0.01, fp32_optimizer_states=False)
    p.grad = _grads(0, [(300,)])[0]
    wide.step()
    narrow.load_state_dict(wide.state_dict())
    assert torch.equal(narrow.state[p]["exp_avg"], wide.state[p]["exp_avg"].bfloat16())
    wide.load_state_dict(narrow.state_dict())
    assert torch.equal(wide.state[p]["exp_avg"], narrow.state[p]["exp_avg"].float())


def test_moments_of_another_size_are_refused() -> None:
    """For example the int8 records that earlier versions could save."""
    p = torch.nn.Parameter(torch.zeros(300))
    optimizer = CPUAdam([p], 0.01)
    p.grad = torch.ones(300)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(2 * 260, dtype=torch.uint8)
    with pytest.raises(
        StateError, match=r"'exp_avg' of parameter 0 must have as many elements .*got 520, expected 300"
    ):
        optimizer.load_state_dict(saved)


def test_threads_do_not_change_the_bits() -> None:
    results = []
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            torch.manual_seed(0)
            p = torch.nn.Parameter(torch.randn(300_001))
            optimizer = CPUAdam([p], 0.01, fp32_optimizer_states=False)
            for step in range(3):
                p.grad = _grads(step, [(300_001,)])[0]
                optimizer.step()
            results.append(p.detach())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_nan_and_infinity_stay_where_they_are() -> None:
    p = torch.nn.Parameter(torch.ones(40))
    optimizer = CPUAdam([p], 0.1, amsgrad=True)
    grad = torch.ones(40)
    grad[3], grad[20] = torch.nan, torch.inf
    for _ in range(2):
        p.grad = grad.clone()
        optimizer.step()
        grad = torch.ones(40)
    broken = [i for i in range(40) if not p[i].isfinite()]
    assert broken == [3, 20]


def test_what_is_refused() -> None:
    good = torch.nn.Parameter(torch.ones(4, 4))
    for params, words in (
        ([torch.nn.Parameter(torch.ones(4, 4).t()[:, :2])], "contiguous tensor"),
        ([torch.nn.Parameter(torch.ones(4, device="meta"))], "device=meta"),
        ([torch.nn.Parameter(torch.ones(4, dtype=torch.float64))], "float64"),
    ):
        with pytest.raises(ConfigError, match=words):
            CPUAdam(params)
    with pytest.raises(ConfigError, match=r"betas must be in \[0.0, 1.0\): betas=1.0"):
        CPUAdam([good], betas=(0.9, 1.0))
    with pytest.raises(ConfigError, match="lr=-1"):
        CPULion([good], -1.0)
    with pytest.raises(ConfigError, match="eps=-1"):
        CPUAdagrad([good], eps=-1.0)
    optimizer = CPUAdam([good, table := torch.nn.Parameter(torch.ones(3, 2))])
    good.grad = torch.ones(4, 4)
    table.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 2), (3, 2), check_invariants=True)
    with pytest.raises(ConfigError, match="dense gradients"):
        optimizer.step()
    assert torch.equal(good, torch.ones(4, 4))  # the failed step has changed nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adagrad_takes_sparse_gradients_as_torch_does(dtype: torch.dtype) -> None:
    torch.manual_seed(int(time.strftime("%Y%m%d")))
    ours = torch.nn.Parameter(torch.randn(50, 6).to(dtype))
    theirs = torch.nn.Parameter(ours.detach().double())
    still = torch.nn.Parameter(torch.ones(3))
    optimizers = CPUAdagrad([ours, still], 0.1), torch.optim.Adagrad([theirs], 0.1)
    untouched = ours[40:].detach().clone()
    for step in range(6):
        still.grad = torch.ones(3) if step % 2 else None
        rows = torch.randint(0, 40, (1, 30))  # some more than once
        values = torch.randn(30, 6).to(dtype)
        ours.grad, theirs.grad = (
            torch.sparse_coo_tensor(rows, values.to(param.dtype), (50, 6), check_invariants=True)
            for param in (ours, theirs)
        )
        if dtype == torch.bfloat16:  # rows that come twice are summed once, by one rule
            theirs.grad = ours.grad.to_dense().double().to_sparse(1)
        with torch.sparse.check_sparse_tensor_invariants():
            for optimizer in optimizers:
                optimizer.step()
        assert ours.grad.is_sparse
    torch.testing.assert_close(ours, theirs.to(dtype), rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    assert torch.equal(ours[40:], untouched)


@pytest.mark.parametrize("setting", [{"weight_decay": 0.1}, {"eps": 0.0}])
def test_adagrad_refuses_sparse_gradients_where_all_rows_change(setting: dict[str, float]) -> None:
    first, table = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, 2))
    optimizer = CPUAdagrad([first, table], **setting)
    first.grad = torch.ones(3)
    table.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 2), (3, 2), check_invariants=True)
    with pytest.raises(ConfigError, match=f"takes sparse gradients with weight_decay=0.*{next(iter(setting))}="):
        optimizer.step()
    assert torch.equal(first, torch.ones(3))


def test_it_works_under_zero() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).bfloat16()
    twin = copy.deepcopy(model)
    optimizer = zero.ZeroOptimizer(model, CPUAdam, stage=2, lr=0.01)
    single = CPUAdam(twin.parameters(), 0.01)
    for step in range(5):
        x = _grads(step, [(16, 8)])[0].bfloat16()
        for module, stepper in ((model, optimizer), (twin, single)):
            module(x).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    optimizer.close()
