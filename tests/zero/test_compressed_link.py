"""A compressed link between the device and offloaded states, against the formats' definition in NumPy.

Gradients of the model here do not depend on its parameters and are exact in every dtype on their way, so the oracle
needs no autograd: it knows rounding, blocks and plain SGD.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zero
from tests.broken import Breaks
from tests.covering import covering_set
from tests.ranks import run_ranks
from tests.zero.models import batch, groups_of, loss_of, new_model
from tests.zero.training import assert_same_bits, full_values, train, zero_optimizer
from zcomm import ConfigError
from zero.tiers.moved import moved

Array = Any
F32 = np.float32
SHAPES = {"a": (600,), "b": (17, 31), "c": (1500,)}
RATE, STEPS = 0.125, 4
FACTORS: dict[str, list[Any]] = {
    "stage": [1, 2, 3],
    "tier": ["cpu", "nvme"],
    "num_micro": [1, 2],
    "dtype": ["bf16", "fp16"],
    "delays": [False, True],
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LINK: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}, "compressed_link": True}


class Products(nn.Module):
    """The gradient of each parameter is what it is multiplied by."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        return sum((getattr(self, name) * factor).sum().float() for name, factor in factors.items())


def _factors(step: int, micro: int, rank: int) -> dict[str, Array]:
    """Few bits, so that sums are exact, and another magnitude every 100 elements. Step 2 does not use all."""
    random, found = np.random.default_rng([step, micro, rank]), {}
    for name, shape in list(SHAPES.items())[: 1 if step == 2 else None]:
        values = random.integers(-60, 61, size=shape).astype(F32) / F32(64)
        found[name] = (values.ravel() * F32(2.0) ** -(np.arange(values.size) // 100 % 5)).reshape(shape).astype(F32)
    return found


def _rounded(x: Array, dtype: str) -> Array:
    """To nearest, ties to even, in float32."""
    if dtype == "fp16":
        return x.astype(np.float16).astype(F32)
    bits = x.astype(F32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(F32)


def _through(x: Array, block: int, qmax: int) -> Array:
    """What a message of ``x`` decodes to."""
    flat = np.zeros(-(-x.size // block) * block, F32)
    flat[: x.size] = x.ravel()
    rows = flat.reshape(-1, block)
    largest = np.abs(rows).max(1, keepdims=True)
    scale = (largest / F32(qmax)).view(np.uint32) + np.uint32(0xFFFF)
    scale = (scale & np.uint32(0xFFFF0000)).view(F32)
    inverse = np.divide(F32(1), scale, where=largest > 0, out=np.zeros_like(scale))
    codes = np.clip(np.rint(rows * inverse), -qmax, qmax)
    return (codes * scale).astype(F32).ravel()[: x.size].reshape(x.shape)


class Oracle:
    """All ranks' masters, and what their devices have."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        model = Products(DTYPES[case["dtype"]])
        self.masters = {name: p.detach().float().numpy().copy() for name, p in model.named_parameters()}
        self.held = {name: values.copy() for name, values in self.masters.items()}

    def step(self, step: int) -> None:
        num_micro = self.case["num_micro"]
        each = [[_factors(step, micro, rank) for rank in range(2)] for micro in range(num_micro)]
        for name in each[0][0]:
            means = [(first[name] + second[name]) / F32(2) for first, second in each]
            if self.case["stage"] == 1:  # reduced once a step
                means = [sum(means[1:], means[0])]
            gradient = sum((_through(mean, 256, 127) for mean in means[1:]), _through(means[0], 256, 127))
            self.masters[name] = self.masters[name] - F32(RATE) * gradient
        for name, master in self.masters.items():  # what the last message of an unused one has lost is sent
            change = _rounded(master, self.case["dtype"]) - self.held[name]
            self.held[name] = _rounded(self.held[name] + _through(change, 128, 7), self.case["dtype"])


def _assert_equal(model: nn.Module, optimizer: zero.ZeroOptimizer, oracle: Oracle, case: dict[str, Any]) -> None:
    values = full_values(model)
    for name, expected in oracle.held.items():
        np.testing.assert_array_equal(values[name].float().numpy(), expected, err_msg=f"{name}, {case}")
        master = zero.utils.safe_get_full_fp32_param(getattr(model, name))
        np.testing.assert_array_equal(master.numpy(), oracle.masters[name], err_msg=f"master of {name}, {case}")
    for bucket, rest in optimizer.inside.runtime.tracked.items():
        assert rest.held.data_ptr() != bucket.shard.data_ptr()
        assert torch.equal(rest.held, bucket.shard)


def _options(case: dict[str, Any], folder: str) -> dict[str, Any]:
    return {
        "stage": case["stage"],
        "gradient_accumulation_steps": case["num_micro"],
        "offload_optimizer": {"device": case["tier"], "nvme_path": folder},
        "sub_group_size": 300,
        "compressed_link": True,
        "delayed_update": case["delays"],
        "delay_start": 1,
    }


def _backward(model: nn.Module, optimizer: Any, rank: int, step: int, num_micro: int) -> None:
    dtype = next(model.parameters()).dtype
    for micro in range(num_micro):
        factors = {name: torch.from_numpy(f).to(dtype) for name, f in _factors(step, micro, rank).items()}
        optimizer.scale(model(factors)).backward()


def _check_bits(rank: int, cases: list[dict[str, Any]], folder: str) -> None:
    for case in cases:
        oracle, model = Oracle(case), Products(DTYPES[case["dtype"]])
        with zero_optimizer(model, torch.optim.SGD, lr=RATE, **_options(case, folder)) as optimizer:
            assert len(optimizer.inside.runtime.tracked) > 0
            for step in range(STEPS):
                _backward(model, optimizer, rank, step, case["num_micro"])
                optimizer.step()
                optimizer.zero_grad()
                oracle.step(step)
                if not case["delays"]:
                    _assert_equal(model, optimizer, oracle, case)
            optimizer.finish_update()
            _assert_equal(model, optimizer, oracle, case)


def test_device_and_masters_have_the_bits_of_the_formats(tmp_path: Path) -> None:
    """Any two of stage, tier, accumulation, dtype and delay are tried together."""
    run_ranks(2, _check_bits, covering_set(FACTORS, 2), str(tmp_path))


def _message_nbytes(numel: int, block: int, bits: int) -> int:
    """Scales of 2 bytes and codes, each from a multiple of 16, and a trailer of 8."""
    scales = -(-2 * -(-numel // block) // 16) * 16
    return -(-(scales + numel * bits // 8 + 8) // 16) * 16


def _check_bytes(rank: int, folder: str) -> None:
    for stage, tier, num_micro in ((1, "cpu", 2), (2, "nvme", 1), (3, "cpu", 2)):
        model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 128, bias=False))
        options: dict[str, Any] = {"stage": stage, "bf16": {"enabled": True}, "gradient_accumulation_steps": num_micro}
        options |= LINK | {"offload_optimizer": {"device": tier, "nvme_path": folder}}
        with zero_optimizer(model, zero.CPUAdam, lr=0.1, **options) as optimizer:
            shards = [bucket.layout.shard_numel for bucket in optimizer.inside.runtime.buckets]
            numel = sum(shards)
            for _ in range(2):
                with moved() as window:
                    for _ in range(num_micro):
                        model(torch.ones(2, 256).bfloat16()).float().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                means = 1 if stage == 1 else num_micro
                down = window.bytes(kind="gradients", link="to_host")
                up = window.bytes(kind="parameters", link="to_device")
                assert down == means * sum(_message_nbytes(n, 256, 8) for n in shards)
                assert up == sum(_message_nbytes(n, 128, 4) for n in shards)
                assert window.bytes(link="to_host") + window.bytes(link="to_device") == down + up
                assert down / means + up <= 1.53 * numel


def test_a_parameter_moves_a_byte_down_and_half_a_byte_up(tmp_path: Path) -> None:
    """And its part of the scales, 3 bytes for 128 elements; from stage 2 on gradients go down after every backward."""
    run_ranks(2, _check_bytes, str(tmp_path))


def _losses(rank: int, **options: Any) -> float:
    """The mean of the last losses, over both ranks' batches."""
    model, losses = new_model(torch.bfloat16), []
    with zero_optimizer(model, zero.CPUAdam(groups_of(model), lr=1e-2), stage=2, **options) as optimizer:
        for step in range(60):
            loss_of(model, *batch(step % 4, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses = [loss_of(model, *batch(step, 0, of)).item() for step in range(4) for of in range(2)]
    return sum(losses) / len(losses)


def _check_loss(rank: int) -> None:
    plain = _losses(rank, offload_optimizer={"device": "cpu"})
    assert plain < 1.0, "it has learnt"
    assert _losses(rank, **LINK) == pytest.approx(plain, abs=0.02)


def test_the_loss_is_that_of_a_link_as_it_is() -> None:
    run_ranks(2, _check_loss)


def _check_overflow(rank: int, folder: str) -> None:
    for tier in ("cpu", "nvme"):
        model = new_model()
        options = LINK | {"offload_optimizer": {"device": tier, "nvme_path": folder}, "stage": 2}
        fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        with zero_optimizer(model, zero.CPUAdam(groups_of(model), lr=1e-2), fp16=fp16, **options) as optimizer:
            for step, overflows in enumerate((False, True, False)):
                before = full_values(model)
                loss = loss_of(model, *batch(step, 0, rank))
                optimizer.scale(loss * float("inf") if overflows and rank == 1 else loss).backward()
                with moved() as window:
                    optimizer.step()
                optimizer.zero_grad()
                assert optimizer.was_step_applied is not overflows
                assert bool(window.bytes(kind="parameters")) is not overflows
                if overflows:
                    assert_same_bits(full_values(model), before)
            assert optimizer.loss_scale.scale == 2**7
            assert all(value.isfinite().all() for value in full_values(model).values())


def test_an_overflow_travels_and_skips_the_step(tmp_path: Path) -> None:
    run_ranks(2, _check_overflow, str(tmp_path))


def _check_norm(rank: int) -> None:
    """The norm of what was decoded, by which it is clipped."""
    case = {"stage": 2, "num_micro": 1, "dtype": "bf16"}
    model, before = Products(torch.bfloat16), Oracle(case)
    with zero_optimizer(model, torch.optim.SGD, lr=RATE, stage=2, gradient_clipping=0.5, **LINK) as optimizer:
        _backward(model, optimizer, rank, 0, 1)
        optimizer.step()
        moves = {n: zero.utils.safe_get_full_fp32_param(p).numpy() for n, p in model.named_parameters()}
    means = {n: (_factors(0, 0, 0)[n] + _factors(0, 0, 1)[n]) / F32(2) for n in SHAPES}
    gradients = {n: _through(mean, 256, 127).astype(np.float64) for n, mean in means.items()}
    norm = sum((g**2).sum() for g in gradients.values()) ** 0.5
    assert norm > 0.5
    assert optimizer.last_grad_norm == pytest.approx(norm, rel=1e-6)
    for name, master in before.masters.items():
        np.testing.assert_allclose(moves[name], master - RATE * 0.5 / norm * gradients[name], rtol=1e-5, atol=1e-6)


def test_clipping_sees_the_gradients_that_arrive() -> None:
    run_ranks(2, _check_norm)


RUNS: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 3, "delayed_update": True, "delay_start": 2},
    {"stage": 2, "delayed_update": True, "delay_start": 9},
]


def _run(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        loss_of(model, *batch(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _end(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """What forward reads now, then masters and parameters with all updates."""
    seen = full_values(model)
    optimizer.finish_update()
    found = {f"seen {name}": value for name, value in seen.items()} | full_values(model)
    return found | {f"master {n}": zero.utils.safe_get_full_fp32_param(p) for n, p in model.named_parameters()}


def _check_resume(rank: int, folder: str) -> None:
    for number, case in enumerate(RUNS):
        options, model = LINK | case, new_model(torch.bfloat16)
        with zero_optimizer(model, zero.CPUAdam(groups_of(model), lr=1e-2), **options) as optimizer:
            _run(model, optimizer, rank, range(6))
            expected = _end(model, optimizer)
        model = new_model(torch.bfloat16)
        with zero_optimizer(model, zero.CPUAdam(groups_of(model), lr=1e-2), **options) as optimizer:
            _run(model, optimizer, rank, range(4))
            state = copy.deepcopy(optimizer.state_dict())
            zero.save_checkpoint(optimizer, folder, f"run{number}")
            seen = full_values(model)
            _run(model, optimizer, rank, range(4, 6))
            assert_same_bits(_end(model, optimizer), expected)  # who looks changes nothing
            optimizer.load_state_dict(state)
            assert_same_bits(full_values(model), seen)
            _run(model, optimizer, rank, range(4, 6))
            assert_same_bits(_end(model, optimizer), expected)
        there = options | ({"stage": 2} if case["stage"] == 3 else {"stage": 3})
        model = new_model(torch.bfloat16, seed=7)
        with zero_optimizer(model, zero.CPUAdam(groups_of(model), lr=1e-2), **there) as optimizer:
            zero.load_checkpoint(optimizer, folder, f"run{number}")
            assert_same_bits(full_values(model), seen)
            _run(model, optimizer, rank, range(4, 6))
            assert_same_bits(_end(model, optimizer), expected)
    model = new_model(torch.bfloat16, seed=7)
    with zero_optimizer(model, zero.CPUAdam(groups_of(model), lr=1e-2), offload_optimizer={"device": "cpu"}) as plain:
        zero.load_checkpoint(plain, folder, "run0")
        masters = {name: zero.utils.safe_get_full_fp32_param(p).bfloat16() for name, p in model.named_parameters()}
        assert_same_bits(full_values(model), masters)  # where nothing is compressed, the device has them exactly


def test_a_resumed_run_has_the_bits_of_one_that_was_never_saved(tmp_path: Path) -> None:
    """From a state dict, and from a checkpoint at another stage."""
    run_ranks(2, _check_resume, str(tmp_path))


def _differing(model: nn.Module) -> set[str]:
    """The parameters that are not their masters rounded."""
    values = full_values(model)
    masters = {name: zero.utils.safe_get_full_fp32_param(p).bfloat16() for name, p in model.named_parameters()}
    return {name for name, value in values.items() if not torch.equal(value, masters[name])}


def _check_writes(rank: int) -> None:
    for stage in (1, 3):
        model = new_model(torch.bfloat16)
        with zero_optimizer(model, zero.CPUAdam(groups_of(model), lr=1e-2), stage=stage, **LINK) as optimizer:
            train(model, optimizer, rank, steps=3)
            assert _differing(model) >= {"blocks.0.mlp.0.weight", "shared.weight"}
            masters = {n: zero.utils.safe_get_full_fp32_param(p).bfloat16() for n, p in model.named_parameters()}
            saved = model.state_dict()
            assert_same_bits({n: value for n, value in saved.items() if n in masters}, masters if saved else {})
            weight = model.get_parameter("blocks.0.mlp.0.weight")
            zero.utils.safe_set_full_fp32_param(weight, torch.full((53, 24), 0.7))
            with zero.GatheredParameters([model.shared.weight], modifier_rank=0), torch.no_grad():
                model.shared.weight += 1
            assert not _differing(model) & {"blocks.0.mlp.0.weight", "shared.weight"}
            for bucket, rest in optimizer.inside.runtime.tracked.items():
                assert torch.equal(rest.held, bucket.shard)
            train(model, optimizer, rank, steps=1)
            assert all(value.isfinite().all() for value in full_values(model).values())


def test_what_is_not_a_steps_arrives_exactly() -> None:
    run_ranks(2, _check_writes)


def _refused(text: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    with pytest.raises(ConfigError, match=text):
        zero.ZeroOptimizer(new_model(dtype), zero.CPUAdam, ranks_per_node=1, **(LINK | options))


def _check_refused(rank: int) -> None:
    _refused("compressed_link is not combined with offload_param", stage=3, offload_param={"device": "cpu"})
    _refused("compressed_link is not combined with weight_format='int8' below", stage=2, quantized_weights=True)
    _refused("delta_hpz' is not combined with compressed_link", stage=3, mode="delta_hpz")
    with zero_optimizer(new_model(), zero.CPUAdam, stage=2, **LINK) as optimizer:
        assert "inactive: compressed_link (no parameters in 16 bit" in str(optimizer.effective)
        assert not optimizer.inside.runtime.tracked
    model = new_model(torch.bfloat16)
    options: dict[str, Any] = {"stage": 3, "quantized_weights": True, "quantized_gradients": True, **LINK}
    with zero_optimizer(model, zero.CPUAdam(groups_of(model), lr=1e-2), **options) as optimizer:
        assert "gradients go there as int8, changes of parameters come back as int4" in str(optimizer.effective)
        train(model, optimizer, rank, steps=1)


def test_what_is_refused_and_what_is_said() -> None:
    run_ranks(2, _check_refused)


def _check_failed_step(rank: int, folder: str) -> None:
    options = LINK | {"offload_optimizer": {"device": "nvme", "nvme_path": folder}, "sub_group_size": 512}
    model = new_model(torch.bfloat16)
    with zero_optimizer(model, zero.CPUAdam(groups_of(model), lr=1e-2), stage=2, **options) as optimizer:
        _run(model, optimizer, rank, range(3))
        before = {name: zero.utils.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
        assert _differing(model)
        loss_of(model, *batch(3, 0, rank)).backward()
        store = optimizer.inside.runtime.state_files.store
        call = store.write
        if rank == 1:
            store.write = Breaks(call, 3, OSError(28, "no space", "disk"))
        with pytest.raises(OSError, match="no space"):
            optimizer.step()
        store.write = call
        assert_same_bits({n: zero.utils.safe_get_full_fp32_param(p) for n, p in model.named_parameters()}, before)
        assert not _differing(model), "the masters before the step, rounded"
        for bucket, rest in optimizer.inside.runtime.tracked.items():
            assert torch.equal(rest.held, bucket.shard)
        optimizer.step()
        optimizer.zero_grad()
        _run(model, optimizer, rank, range(4, 5))


def test_a_step_on_files_that_failed_leaves_exact_parameters(tmp_path: Path) -> None:
    run_ranks(2, _check_failed_step, str(tmp_path))
