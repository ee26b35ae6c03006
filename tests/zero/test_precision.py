"""dtypes of parameters, accumulation and wire: each option's effect on values and bytes, at every stage."""

# covers zcomm/_base/env.py zero/_optim/loss_scale.py

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zcomm
import zero
from tests.ranks import run_ranks
from tests.zero.models import as_vector, batch, loss_of, new_model, relative_error
from tests.zero.training import full_values, zero_optimizer
from zcomm import ConfigError
from zcomm._base import env
from zero._optim.loss_scale import StaticLossScale

STAGES = (0, 1, 2, 3)


class Sum(nn.Module):
    """Computes the sum of ``w`` times the input: the gradient is the input."""

    def __init__(self, numel: int = 600, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, gradient: float) -> Tensor:
        return (self.w * gradient).sum()


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def _check_accumulation(rank: int) -> None:
    """1, then 16 times 2^-8, which is half a unit of bfloat16 at 1: a sum in bfloat16 never leaves 1."""
    for stage in STAGES:
        for key, expected in ((None, 1.0625), ("fp32", 1.0625), ("bf16", 1.0)):
            options: dict[str, Any] = {"data_types": {"grad_accum_dtype": key}} if key else {}
            options |= {"stage": stage, "gradient_accumulation_steps": 17, "bf16": {"enabled": True}}
            model = Sum()
            with zero_optimizer(model, _sgd(model.parameters()), **options) as optimizer:
                for gradient in (1.0, *[2**-8] * 16):
                    model(gradient).backward()
                optimizer.step()
                values = full_values(model)["w"]
            assert set((-values).tolist()) == {expected}, (stage, key)


def test_gradients_accumulate_in_float32_unless_asked() -> None:
    run_ranks(2, _check_accumulation)


class Segments(nn.Module):
    """The gradient of ``w`` arrives in parts: 1 from the segment whose backward is first, then 16 times 2^-8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.w, self.last = (nn.Parameter(torch.zeros(600, dtype=torch.bfloat16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first
        for gradient in (*[2**-8] * 16, 1.0):
            x = checkpoint(self._segment, x, gradient, use_reentrant=True)
        return (x + self.last).sum()

    def _segment(self, x: Tensor, gradient: float) -> Tensor:
        return x + self.w * gradient


def _check_segments(rank: int) -> None:
    """2^-8 is half a unit of bfloat16 at 1, so a sum in bfloat16 would lose the later parts."""
    model, x = Segments(), torch.zeros(600, dtype=torch.bfloat16, requires_grad=True)
    with zero_optimizer(model, _sgd(model.parameters()), stage=2) as optimizer, zcomm.traffic() as sent:
        model(x).backward()
        optimizer.step()
        assert set((-full_values(model)["w"]).tolist()) == {1.0625}
        assert set((-full_values(model)["first"]).tolist()) == {1.0}
    assert sent.calls(operation="reduce_scatter") == 1, "a gradient that comes again completes no bucket"


def test_gradients_that_come_several_times_are_summed_in_float32() -> None:
    run_ranks(2, _check_segments)


class Two(nn.Module):
    """Two parameters of different modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sum(dtype=torch.bfloat16) for _ in range(2))

    def forward(self, *used: int) -> Tensor:
        return torch.stack([self.layers[i](1.0) for i in used]).sum()


def _check_widths(rank: int) -> None:
    """Within ``no_sync`` rank 1 uses one parameter, or none; the compared exchanges of the ranks stay equal."""
    usual, model = env.is_set, Two()
    options = {"stage": 2, "reduce_bucket_size": 600}
    with pytest.MonkeyPatch.context() as patch, zero_optimizer(model, _sgd(model.parameters()), **options) as optimizer:
        patch.setattr(env, "is_set", lambda name: name == "ZCOMM_DEBUG" or usual(name))
        assert len(optimizer.parts.runtime.buckets) == 2
        for used, backwards in (((0,), 1), ((), 1), ((0,), 0)):
            with optimizer.no_sync():
                if rank == 0 or used:
                    model(*((0, 1) if rank == 0 else used)).backward()
            for _ in range(backwards):
                model(0, 1).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert -full_values(model)["layers.1.w"][0] == 3 * 0.5 + 2


def test_the_width_of_gradients_goes_by_what_all_ranks_know() -> None:
    run_ranks(2, _check_widths)


def _check_wire(rank: int) -> None:
    """1 + 2^-10 is a float16 number, but not a bfloat16 one."""
    exact = 1 + 2**-10
    for stage in STAGES:
        for key, expected, nbytes in ((None, exact, 4), ("fp32", exact, 4), ("fp16", exact, 2), ("bf16", 1.0, 2)):
            options = {"communication_data_type": key} if key else {}
            model = Sum(1024)
            with zero_optimizer(model, torch.optim.SGD, stage=stage, lr=1.0, **options) as optimizer:
                with zcomm.traffic() as sent:
                    model(exact).backward()
                optimizer.step()
                values = full_values(model)["w"]
            assert set((-values).tolist()) == {expected}, (stage, key)
            payload = nbytes * 1024 // 2  # to the one other rank, and some bytes of header
            assert payload <= sent.bytes(operation="reduce_scatter") <= payload + 64, (stage, key)


def test_gradients_travel_in_the_chosen_dtype() -> None:
    run_ranks(2, _check_wire)


def _two_losses(model: nn.Module, step: int, rank: int) -> list[Tensor]:
    return [loss_of(model, *batch(step, loss, rank)) * weight for loss, weight in ((0, 1.0), (1, 0.3))]


def _check_several_losses(rank: int) -> None:
    """Each loss has its own backward; one overflow of any, on any rank, skips exactly this step, on all ranks."""
    overflows = {1: (0, 1), 3: (1, 0)}  # step: loss, rank
    plain = new_model(torch.float64)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in (0, 2, 4):
        sum((loss / 2 for r in range(2) for loss in _two_losses(plain, step, r)), torch.zeros(())).backward()
        reference.step()
        reference.zero_grad()
    for stage in STAGES:
        model, applied = new_model(torch.float64), []
        with zero_optimizer(model, torch.optim.AdamW, lr=1e-2, stage=stage) as optimizer:
            optimizer.loss_scale = StaticLossScale(2.0**12)
            for step in range(5):
                for index, loss in enumerate(_two_losses(model, step, rank)):
                    bad = overflows.get(step) == (index, rank)
                    with optimizer.scale_loss(loss * float("inf") if bad else loss) as scaled:
                        scaled.backward()
                optimizer.step()
                optimizer.zero_grad()
                applied.append(optimizer.was_step_applied)
            got = as_vector(full_values(model).values())
        assert applied == [True, False, True, False, True]
        assert relative_error(got, as_vector(plain.parameters())) < 1e-12, stage


def test_several_losses_of_one_optimizer() -> None:
    run_ranks(2, _check_several_losses)


class Normed(nn.Module):
    """Linear layers in 16 bits around a norm that may stay in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x.to(self.first.weight.dtype))
        inner = self.norm(inner.to(self.norm.weight.dtype))
        out: Tensor = self.last(inner.to(self.last.weight.dtype))
        return out


def _x(step: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(7 * step + rank))


def _normed() -> Normed:
    torch.manual_seed(3)
    return Normed()


def _check_mixed_dtypes(rank: int) -> None:
    """The oracle casts float32 masters itself, except for the norm."""
    plain = _normed()
    for name, param in plain.named_parameters():
        if "norm" not in name:
            param.data = param.data.bfloat16().float()
    start = {name: param.detach().clone() for name, param in plain.named_parameters()}
    reference = _sgd(plain.parameters())
    for step in range(3):
        values = {n: p if "norm" in n else p.bfloat16() for n, p in plain.named_parameters()}
        x = torch.cat([_x(step, r) for r in range(2)])
        functional_call(plain, values, (x,)).float().square().mean().backward()
        reference.step()
        reference.zero_grad()
    for stage in STAGES:
        model = _normed()
        config = {
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": True},
            "data_types": {"keep_in_fp32_modules": ["norm"]},
        }
        engine, *_ = zero.initialize(model=model, optimizer=_sgd, config=config)
        for step in range(3):
            engine.backward(engine(_x(step, rank)).float().square().mean())
            engine.step()
        got = full_values(model)
        engine.destroy()
        for name, param in plain.named_parameters():
            assert got[name].dtype == (torch.float32 if "norm" in name else torch.bfloat16)
            excess = (got[name].double() - param.double()).abs()
            if "norm" not in name:
                excess = torch.relu(excess - got[name].double().abs() * 2**-8)
            assert excess.norm() < 0.03 * (param - start[name]).norm(), (stage, name)


def test_one_model_with_several_dtypes() -> None:
    run_ranks(2, _check_mixed_dtypes)


def _check_autocast(rank: int) -> None:
    """float32 parameters under torch.autocast, with a loss scale for float16."""
    for dtype, wanted in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        plain = _normed()
        reference = _sgd(plain.parameters())
        for step in range(3):
            with torch.autocast("cpu", dtype=wanted):
                out = plain(torch.cat([_x(step, r) for r in range(2)]))
            out.float().square().mean().backward()
            reference.step()
            reference.zero_grad()
        update = as_vector(plain.parameters()) - as_vector(_normed().parameters())
        for stage in STAGES:
            model = _normed()
            config = {
                "zero_optimization": {"stage": stage},
                "torch_autocast": {"enabled": True, "dtype": dtype},
                "fp16": {"enabled": False, "initial_scale_power": 10},
            }
            engine, optimizer, *_ = zero.initialize(model=model, optimizer=_sgd, config=config)
            assert (optimizer.loss_scale is not None) == (dtype == "float16")
            for step in range(3):
                out = engine(_x(step, rank))
                assert out.dtype == wanted
                engine.backward(out.float().square().mean())
                engine.step()
            assert engine.skipped_steps == 0
            got = full_values(model)
            engine.destroy()
            assert {value.dtype for value in got.values()} == {torch.float32}
            moved = as_vector(got.values()) - as_vector(_normed().parameters())
            assert relative_error(moved, update) < 0.03, (stage, dtype)


def test_autocast_inside_the_engine() -> None:
    run_ranks(2, _check_autocast)


class _Casts(TorchDispatchMode):
    """Tracks 16-bit copies of matrices, and which of them are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16 and out.shape == (9, 9):
            self._made.append(weakref.ref(out))
        return out

    @property
    def num_alive(self) -> int:
        return sum(ref() is not None for ref in self._made)


def _check_autocast_cache(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(6)))
    alive: list[int] = []
    with zero_optimizer(model, _sgd(model.parameters()), stage=3) as optimizer, _Casts() as casts:
        for layer in model:
            layer.register_forward_hook(lambda *_: alive.append(casts.num_alive))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                first = model(torch.ones(2, 9))
                assert len(alive) == 6
                assert max(alive) <= 2, alive  # otherwise as much as the model, in 16 bits
            model(torch.ones(2, 9)).float().sum().backward()
            optimizer.step()
            with torch.no_grad():
                after_step = model(torch.ones(2, 9))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(model(torch.ones(2, 9)), after_step)
        assert not torch.equal(first, after_step)


def test_autocast_keeps_no_casts_of_released_parameters() -> None:
    run_ranks(2, _check_autocast_cache)


def test_presets() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    kinds = {}
    for level in ("O0", "O1", "O2", "O3"):
        model.float()
        preset = zero.precision_preset(level, model)
        engine, optimizer, *_ = zero.initialize(model=model, optimizer=_sgd, config=preset)
        out = engine(torch.ones(3, 4, dtype=model[0].weight.dtype))
        masters = {p.dtype for group in optimizer.param_groups for p in group["params"]}
        scale = None if optimizer.loss_scale is None else optimizer.loss_scale.scale
        kinds[level] = (model[0].weight.dtype, model[1].weight.dtype, out.dtype, scale)
        assert masters == {torch.float32}
        engine.destroy()
    half = torch.float16
    assert kinds == {
        "O0": (torch.float32, torch.float32, torch.float32, None),
        "O1": (torch.float32, torch.float32, half, 2.0**16),
        "O2": (half, torch.float32, half, 2.0**16),
        "O3": (half, half, half, 1.0),
    }
    with pytest.raises(ConfigError, match="O0, O1, O2, O3"):
        zero.precision_preset("O4")


class Rotary(nn.Module):
    """A table that must not lose precision, and a norm that computes in one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("frequencies", torch.tensor([1.0, 1.0 + 2**-12]))
        self.register_buffer("index", torch.arange(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).float().sum()  # type: ignore[no-any-return]


def _check_buffers(rank: int, stage: int) -> None:
    for given, expected in ((None, torch.float32), ("fp16", torch.float16)):
        types = {} if given is None else {"data_types": {"buffer_dtype": given, "param_dtype": "bf16"}}
        model = Rotary()
        with zero_optimizer(model, _sgd(model.parameters()), stage=stage, bf16={"enabled": True}, **types) as optimizer:
            assert (model.frequencies.dtype, model.index.dtype) == (expected, torch.int64)
            assert model.norm.running_mean is not None
            assert model.norm.running_mean.dtype == (torch.bfloat16 if given is None else torch.float16)
            if given is None:
                assert model.frequencies[1] == 1.0 + 2**-12
                model(torch.ones(3, 4, dtype=torch.bfloat16)).backward()
                optimizer.step()


def _kept_in_float32(*, starts_sharded: bool) -> nn.Module:
    with zero.Init(enabled=starts_sharded):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    norm = model[1]
    norm.register_buffer("wide", torch.ones(2, dtype=torch.float64) + 2**-40)
    norm.running_var.fill_(1e6)
    turns = torch.polar(torch.ones(3), torch.arange(3.0))
    model.register_buffer("turns", turns)
    model[0].register_buffer("same_turns", turns)
    model[0].register_buffer("table", table := torch.ones(2))
    model.register_buffer("same_table", table)
    with zero.GatheredParameters([norm.weight], modifier_rank=0), torch.no_grad():
        norm.weight.fill_(1.0001)
    return model


def _check_kept_bits(rank: int, stage: int) -> None:
    model = _kept_in_float32(starts_sharded=stage == 3)
    options: Any = {"fp16": {"enabled": True}, "data_types": {"keep_in_fp32_modules": ["1"], "buffer_dtype": "fp16"}}
    with zero_optimizer(model, _sgd(model.parameters()), stage=stage, **options):
        norm = model[1]
        with zero.GatheredParameters([norm.weight]):
            assert (norm.weight == torch.tensor(1.0001)).all(), "it did not pass through float16"
        assert (norm.running_var == 1e6).all(), "which float16 does not have"
        assert (norm.wide == 1 + 2**-40).all()
        assert model.turns is model[0].same_turns
        assert torch.equal(torch.view_as_real(model.turns)[:, 1], torch.arange(3.0).sin())
        assert model.same_table is model[0].table
        assert model.same_table.dtype == torch.float16


@pytest.mark.parametrize("stage", [0, 3])
def test_modules_kept_in_float32_keep_their_bits_and_complex_buffers_their_imaginary_part(stage: int) -> None:
    run_ranks(2, _check_kept_bits, stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_keep_their_dtype_unless_asked(stage: int) -> None:
    run_ranks(2, _check_buffers, stage)


@pytest.mark.parametrize("enabled", [False, True])
def test_the_dtype_of_parameters_is_that_of_fp16_or_bf16(enabled: bool) -> None:  # noqa: FBT001
    with pytest.raises(ConfigError, match=r"data_types\.param_dtype must be that of fp16 or bf16"):
        zero.ZeroOptimizer(
            Sum(), torch.optim.SGD, lr=1.0, data_types={"param_dtype": "bf16"}, fp16={"enabled": enabled}
        )
