"""ZeRO's papers and tutorials beyond the stages, and their JSONs: the last table of docs/conformance.md."""

# covers zero/_config/__init__.py zero/_optim/loss_scale.py zero/cli.py

from __future__ import annotations

import gc
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import zcomm
import zero
from tests.ranks import run_ranks
from tests.zero.configs import CONFIGS
from tests.zero.logs import logged
from tests.zero.training import zero_optimizer
from zero._config import resolve_config
from zero._optim.loss_scale import loss_scale_of
from zero.cli import main

HALF = torch.float16


# The loss scale


def test_the_first_loss_scale() -> None:
    """2^16 by default, as DeepSpeed documents it; the 2^32 of the course's JSONs where they set it."""
    scales = {}
    for name, config in {"absent": {"fp16": {"enabled": True}}, "zero_dp": CONFIGS["zero_dp"]}.items():
        scale = loss_scale_of(resolve_config(config, {}).configuration.values)
        assert scale is not None
        scales[name] = scale.scale
    assert scales == {"absent": 2.0**16, "zero_dp": 2.0**32}


# O2: normalisation layers in float32


class StrictRMSNorm(nn.Module):
    """A user's norm that accepts float32 only, like GPU kernels with one dtype for all operands."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor, *, eps: float) -> Tensor:
        assert x.dtype == self.weight.dtype == torch.float32
        return x * self.weight * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


class NormalizedLinear(nn.Linear):
    """No normalization layer, in spite of its name."""


class PreNorm(nn.Module):
    """A block that has a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = StrictRMSNorm(width), NormalizedLinear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x, eps=1e-5))


def _normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), PreNorm(8), nn.RMSNorm(8),
        nn.BatchNorm1d(8), nn.Unflatten(1, (4, 2)), nn.LayerNorm((4, 2)), nn.GroupNorm(2, 4),
        nn.InstanceNorm1d(4, affine=True), nn.Flatten(), NormalizedLinear(8, 2),
    )  # fmt: skip


def _by_hand(model: nn.Sequential, x: Tensor) -> Tensor:
    """The forward in float32, rounded to float16 after each layer."""
    for module in model:
        x = module(x)
        x = x.half().float()
    return x


def _check_presets(rank: int) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
    wide = _normed()
    with torch.no_grad():  # the values of the float16 parameters
        for name, param in wide.named_parameters():
            param.copy_(param.half() if _is_matrix(name) else param)
    expected = _by_hand(wide, x.half().float())
    for stage in (0, 1, 3):
        model = _normed()
        config = zero.precision_preset("O2", model) | {"zero_optimization": {"stage": stage}}
        config["fp16"] |= {"initial_scale_power": 4}
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = zero.initialize(model=model, optimizer=sgd, config=config)
        assert {n: p.dtype for n, p in model.named_parameters()} == {
            n: HALF if _is_matrix(n) else torch.float32 for n, _ in model.named_parameters()
        }
        assert model[5].running_mean.dtype == torch.float32
        out = engine(x)  # cast to float32, as Apex does
        assert out.dtype == HALF
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
        engine.backward(out.float().square().mean())
        engine.step()
        assert engine.was_step_applied()
        engine.destroy()


def _is_matrix(name: str) -> bool:
    return name.split(".")[0] in ("0", "2", "11") or ".inner." in name


def test_o2_keeps_every_norm_in_float32() -> None:
    run_ranks(2, _check_presets)


# ZeRO-Infinity stores its parameters in files


def _check_infinity(rank: int, config: dict[str, Any]) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    engine, optimizer, *_ = zero.initialize(model=model, optimizer=torch.optim.Adam(model.parameters()), config=config)
    shards = optimizer.memory().shards
    assert shards["nvme"] >= 2 * sum(p.zero_shard.shape.numel() for p in model.parameters()) // 2
    assert (shards["cpu"], shards["device"]) == (0, 0)
    engine.destroy()


def test_the_infinity_json_puts_all_parameters_into_files(tmp_path: Path) -> None:
    text = json.dumps(CONFIGS["zero_infinity"])
    assert "max_in_cpu" not in text
    config = json.loads(text.replace("/local_nvme", str(tmp_path)))
    run_ranks(2, _check_infinity, config)
    found = zero.estimate(zero.Counts(numel=10**9), config, 1, 4, prints=False)
    places = {u.place: u.nbytes for u in found.usage() if u.kind == "parameters" and u.nbytes}
    assert places == {"nvme": 2 * 10**9 / 4}


# Offload: zero's CPUAdam replaces torch's Adam


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(17, 40), nn.Tanh(), nn.Linear(40, 9))


def _loss(model: nn.Module, step: int, ranks: range) -> Tensor:
    x = torch.cat([torch.randn(4, 17, generator=torch.Generator().manual_seed(100 * step + r)) for r in ranks])
    return model(x.to(next(model.parameters()).dtype)).square().mean()


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:2], "lr": 3e-3, "betas": (0.5, 0.9)}, {"params": params[2:], "weight_decay": 0.3}]


def _adam_by_formula(options: dict[str, Any], steps: int, *, decouples: bool) -> list[Tensor]:
    """Adam as in its paper, in float64, in one process with the whole batch."""
    model = _model().double()
    defaults = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01 if decouples else 0.0} | options
    state: dict[Tensor, list[Tensor]] = {}
    for step in range(1, steps + 1):
        model.zero_grad()
        _loss(model, step, range(2)).backward()
        for group in _groups(model):
            of = {**defaults, **group}
            (b1, b2), lr, decay = of["betas"], of["lr"], of["weight_decay"]
            for p in group["params"]:
                theta, grad = p.data, -p.grad if of.get("maximize") else p.grad
                grad = grad if decouples else grad + decay * theta
                m, v, largest = state.setdefault(p, [torch.zeros_like(theta) for _ in range(3)])
                m.copy_(b1 * m + (1 - b1) * grad)
                v.copy_(b2 * v + (1 - b2) * grad**2)
                largest.copy_(torch.maximum(largest, v))
                second = (largest if of.get("amsgrad") else v) / (1 - b2**step)
                shrunk = theta * (1 - lr * decay) if decouples else theta
                theta.copy_(shrunk - lr * (m / (1 - b1**step)) / (second.sqrt() + of["eps"]))
    return [p.detach() for p in model.parameters()]


ADAMS: list[dict[str, Any]] = [
    {},
    {"amsgrad": True, "eps": 1e-3},
    {"maximize": True, "foreach": True},
    {"lr": torch.tensor(0.02), "foreach": False},
]


def _check_adam(rank: int, folder: str) -> None:
    start = [p.detach().double() for p in _model().parameters()]
    for number, options in enumerate(ADAMS):
        kind, steps = (torch.optim.Adam, torch.optim.AdamW)[number % 2], 6
        for stage, device in ((1, "cpu"), (2, "nvme"), (3, "cpu")):
            model = _model()
            given = kind(_groups(model), **{"lr": 1e-2, **options})
            tier = {"device": device} | ({"nvme_path": folder} if device == "nvme" else {})
            with zero_optimizer(model, given, stage=stage, offload_optimizer=tier) as optimizer:
                described = f"updated on the host by zero's CPUAdam in place of the torch.optim.{kind.__name__}"
                assert described in str(optimizer.effective)
                for step in range(1, steps + 1):
                    _loss(model, step, range(rank, rank + 1)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                with zero.GatheredParameters(model.parameters()):
                    got = [p.detach().double().clone() for p in model.parameters()]
            expected = _adam_by_formula(options, steps, decouples=kind is torch.optim.AdamW)
            for a, b, before in zip(got, expected, start, strict=True):
                assert (a - b).norm() < 2e-5 * (b - before).norm(), (options, stage, device)


def test_torchs_adam_on_the_host_is_adam(tmp_path: Path) -> None:
    run_ranks(2, _check_adam, str(tmp_path))


def _steps(model: nn.Module, optimizer: Any, rank: int, numbers: range) -> None:
    for step in numbers:
        _loss(model, step, range(rank, rank + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _check_checkpoints(rank: int, folder: str) -> None:
    expected = _adam_by_formula({}, 6, decouples=True)
    start = [p.detach().double() for p in _model().parameters()]
    on_device, on_host = {"stage": 1}, {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    for number, (before, after) in enumerate(((on_device, on_host), (on_host, on_device))):
        model = _model()
        with zero_optimizer(model, torch.optim.AdamW(_groups(model), lr=1e-2), **before) as optimizer:
            _steps(model, optimizer, rank, range(1, 4))
            zero.save_checkpoint(optimizer, folder, tag=str(number))
            shard = optimizer.state_dict()
        for from_files in (True, False):
            model = _model()
            with zero_optimizer(model, torch.optim.AdamW(_groups(model), lr=1e-2), **after) as optimizer:
                if from_files:
                    zero.load_checkpoint(optimizer, folder, tag=str(number))
                else:
                    optimizer.load_state_dict(shard)
                _steps(model, optimizer, rank, range(4, 7))
                for p, b, a in zip(model.parameters(), expected, start, strict=True):
                    assert (p.detach().double() - b).norm() < 2e-5 * (b - a).norm(), (number, from_files)
    model = _model()
    others = zero.CPUAdam(_groups(model), adamw_mode=False)
    with (
        zero_optimizer(model, others, **on_host) as optimizer,
        pytest.raises(zero.CheckpointError, match="the optimizer is AdamW in the checkpoint and CPUAdam here"),
    ):
        zero.load_checkpoint(optimizer, folder, tag="0")  # with another weight decay


def test_checkpoints_go_both_ways_between_torchs_adam_and_zeros(tmp_path: Path) -> None:
    run_ranks(2, _check_checkpoints, str(tmp_path))


class OwnAdam(torch.optim.Adam):
    """A class that the library does not know."""


def _check_kept(rank: int) -> None:
    def hooked(groups: Any) -> torch.optim.Optimizer:
        made = torch.optim.Adam(groups)
        made.register_step_pre_hook(lambda *_: None)
        return made

    cases: list[tuple[Any, dict[str, Any], str]] = [
        (OwnAdam, {}, "tests's OwnAdam (a custom class)"),
        (hooked, {}, "torch's Adam (it has hooks)"),
        (torch.optim.AdamW, {"zero_force_ds_cpu_optimizer": False}, "torch's AdamW"),
        (torch.optim.SGD, {}, "torch's SGD"),
    ]
    for make, options, named in cases:
        model = _model()
        tier = {"offload_optimizer": {"device": "cpu"}}
        with zero_optimizer(model, make(_groups(model)), stage=2, **tier, **options) as optimizer:
            assert str(optimizer.effective).endswith(f"updated on the host by {named}"), optimizer.effective
            _steps(model, optimizer, rank, range(1))
    model = _model().double()
    with zero_optimizer(model, torch.optim.Adam(_groups(model)), stage=2, offload_optimizer={"device": "cpu"}) as kept:
        assert "torch's Adam" in str(kept.effective)
        assert isinstance(kept.parts.inner, torch.optim.Adam)


def test_what_zeros_adam_does_not_do_stays_torchs() -> None:
    run_ranks(2, _check_kept)


def _check_scheduler(rank: int) -> None:
    """A scheduler that was built on the user's optimizer still drives the rate."""
    model = _model()
    given = torch.optim.Adam(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(given, step_size=1, gamma=0.0)
    with zero_optimizer(model, given, stage=2, offload_optimizer={"device": "cpu"}) as optimizer:
        _steps(model, optimizer, rank, range(1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler.step()  # no warning that the scheduler stepped first
        before = [p.detach().clone() for p in model.parameters()]
        _steps(model, optimizer, rank, range(1, 2))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))  # lr is 0 now
        assert given.state is optimizer.state
        optimizer.load_state_dict(optimizer.state_dict())
        given.param_groups[0]["lr"] = 1.0
        scheduler.base_lrs, scheduler.last_epoch = [1.0], -1
        before = [p.detach().clone() for p in model.parameters()]
        _steps(model, optimizer, rank, range(2, 3))
        assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == given.param_groups[0]["lr"]
        assert given.state is optimizer.state
    model = _model()
    matrices, others = [[p for p in model.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False)]
    both = torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.5)
    with zero_optimizer(model, list(both), stage=2, offload_optimizer={"device": "cpu"}) as optimizer:
        assert "CPUAdam" in str(optimizer.effective)
        _steps(model, optimizer, rank, range(1))
        optimizer.load_state_dict(optimizer.state_dict())
        for one, group in zip(both, optimizer.param_groups, strict=True):
            assert one.param_groups[0] is group


def test_a_scheduler_of_the_given_adam_goes_on() -> None:
    run_ranks(2, _check_scheduler)


class Coupled(torch.optim.SGD):
    """The update of an element depends on all gradients."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(grad.norm() for grad in grads)
        for grad in grads:
            grad.div_(norm)
        return super().step(closure)


def _check_trials(rank: int, folder: str) -> None:
    """A scheduler wraps its optimizer's step(), which trial steps must not call."""
    model = _model()
    coupled = Coupled(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(coupled, step_size=1)
    with pytest.raises(zcomm.ConfigError, match="Coupled is not elementwise"):
        zero.ZeroOptimizer(model, coupled)
    model = _model()
    given = torch.optim.RMSprop(model.parameters())
    torch.optim.lr_scheduler.StepLR(given, step_size=1)
    tier = {"device": "nvme", "nvme_path": folder}
    with zero_optimizer(model, given, stage=2, offload_optimizer=tier) as optimizer:
        _steps(model, optimizer, rank, range(2))


def test_trial_steps_are_those_of_optimizers_with_schedulers_too(tmp_path: Path) -> None:
    run_ranks(2, _check_trials, str(tmp_path))


# Gradients summed in 16 bits


def _storages() -> dict[int, int]:
    """All live storages in this process, found by the garbage collector."""
    gc.collect()
    with torch._C.DisableTorchFunctionSubclass():  # released parameters raise when their storage is read
        found = [x for x in gc.get_objects() if type(x).__name__ != "weakproxy" and issubclass(type(x), Tensor)]
        real = [
            x.untyped_storage()
            for x in found
            if x.device.type == "cpu" and x.layout is torch.strided and not isinstance(x, FakeTensor)
        ]
        return {storage.data_ptr(): storage.nbytes() for storage in real}


def _check_sums(rank: int, world_size: int) -> None:
    for dtype, sums in (("bf16", 2), ("fp32", 4)):
        formulas = {
            0: 2 + sums + 12,
            1: 2 + sums + 12 / world_size,
            2: 2 + (sums + 12) / world_size,
            3: (2 + sums + 12) / world_size,
        }
        for stage, per_parameter in formulas.items():
            before = _storages()
            model = nn.Sequential(*(nn.Linear(256, 256 * world_size, bias=False) for _ in range(2)))
            numel = sum(p.numel() for p in model.parameters())
            config: dict[str, Any] = {
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": stage},
                **({"data_types": {"grad_accum_dtype": dtype}} if dtype == "bf16" else {}),
            }
            with zero_optimizer(model, torch.optim.Adam(model.parameters()), config=config) as optimizer:
                for _ in range(2):
                    sum(layer(torch.ones(1, 256).bfloat16()).float().sum() for layer in model).backward()
                    optimizer.step()
                after, report = _storages(), optimizer.memory()
                found = zero.estimate(model, config, 1, world_size, prints=False)
                optimizer.zero_grad()
            # A count of steps for each parameter, of 4 bytes, is no state of its elements.
            held = sum(n for at, n in after.items() if at not in before and n > 64) - sum(report.buffers.values())
            of_kinds = sum(u.nbytes for u in found.usage() if u.kind in ("parameters", "gradients", "states"))
            assert (held, of_kinds) == (numel * per_parameter,) * 2, (dtype, stage)
            assert ("as the ZeRO paper counts them" in str(found)) == (dtype == "fp32")


def test_plans_say_in_how_many_bytes_gradients_are_summed(capsys: Any) -> None:
    gigabytes = {}
    for flags in ([], ["--narrow-gradients"]):
        assert main(["plan", "--parameters=1e9", "--layers=4", *flags]) == 0
        text = capsys.readouterr().out
        assert ("as the ZeRO paper counts them" in text) == (not flags)
        assert ('"grad_accum_dtype": "bf16"' in text) == bool(flags)
        row = next(line.split() for line in text.splitlines() if line.split()[:3] == ["0", "plain", "device"])
        gigabytes[bool(flags)] = float(row[3])
    assert gigabytes[False] - gigabytes[True] == pytest.approx(2 * 1e9 / 2**30, abs=0.02)


@pytest.mark.parametrize("world_size", [2, 4])
def test_states_take_what_the_paper_says(world_size: int) -> None:
    """Exactly 16, 4 + 12/N, 2 + 14/N and 16/N bytes a parameter; 2 more, sharded from stage 2, by default."""
    run_ranks(world_size, _check_sums, world_size)


# Which rank logs


class Mpu:
    """Ranks 0, 1 and 2, 3 each hold the parts of one model."""

    def __init__(self, rank: int) -> None:
        made = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        self._parts, self._data = made[rank // 2], made[2 + rank % 2]
        self._rank = rank % 2

    def get_data_parallel_group(self) -> Any:
        return self._data

    def get_model_parallel_group(self) -> Any:
        return self._parts

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_rank(self) -> int:
        return self._rank


class Borrows(nn.Module):
    """Checkpoints its layers, and uses a weight that another module owns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = zero.checkpoint(layer, x)
        return x @ self.layers[0].weight


def _check_notices(rank: int) -> None:
    logging.getLogger("zero").setLevel(logging.INFO)
    config = {
        "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_prefetch_bucket_size": 100},
        "steps_per_print": 1,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "dump_state": True,
        "comms_logger": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "activation_checkpointing": {
            "contiguous_memory_optimization": True, "number_checkpoints": 2, "partition_activations": True,
            "profile": True,
        },
    }  # fmt: skip
    for mpu in (None, Mpu(rank)):
        torch.manual_seed(0)
        data = None if mpu is None else mpu.get_data_parallel_group()
        with logged() as lines:
            with zero.Init(data_parallel_group=data, zero_quantized_weights=True):
                model = Borrows()
            engine, *_ = zero.initialize(model=model, optimizer=torch.optim.SGD, config=config, mpu=mpu)
            for _ in range(2):
                engine.backward(engine(torch.ones(512, 8)).sum())
                engine.step()
            assert not engine.load_checkpoint("/nonexistent")[0]
            engine.destroy()
        kinds = (
            "zero.Init:", "ZeRO stage 3", "no batch size", "has no effect", "number_checkpoints=2", "step=1,",
            "memory after", "sent by", "is used by the forward", "activation checkpoints: ", "raised to",
            "no file 'latest'",
        )  # fmt: skip
        counts = torch.tensor([float(any(kind in line for line in lines)) for kind in kinds])
        torch.distributed.all_reduce(counts)
        found = dict(zip(kinds, counts.tolist(), strict=True))
        assert set(found.values()) == {1.0}, (mpu, found, lines)
        assert (len(lines) > 0) == (rank == 0)


def test_what_every_rank_knows_is_said_by_one() -> None:
    """Common messages are logged by one rank, also where ranks hold parts of a model and each part has a first rank."""
    run_ranks(4, _check_notices)
