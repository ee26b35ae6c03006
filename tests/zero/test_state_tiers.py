"""Masters and moments in host memory or in files: the same bits as without, and the bytes that move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.covering import covering_set
from tests.ranks import run_ranks
from tests.zero.models import batch, groups_of, loss_of, new_model
from tests.zero.training import assert_same_bits, full_values, zero_optimizer
from zcomm import ConfigError, StateError
from zero.tiers.moved import moved

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TIERS: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "part": {"device": "cpu", "ratio": 0.6},
}
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda groups: zero.CPUAdam(groups, lr=1e-2),
    "narrow": lambda groups: zero.CPUAdam(groups, lr=1e-2, amsgrad=True, fp32_optimizer_states=False),
    "lion": lambda groups: zero.CPULion(groups, lr=1e-3),
    "sgd": lambda groups: zero.CPUSGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
}
FACTORS: dict[str, list[Any]] = {
    "tier": list(TIERS),
    "stage": [1, 2, 3],
    "dtype": list(DTYPES),
    "num_micro": [1, 2],
    "max_norm": [0.0, 0.5],
    "plus": [False, True],
    "optimizer": list(OPTIMIZERS),
}
PLUS = {"quantized_weights": True, "quantized_gradients": True}


def _options(case: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "stage": case["stage"],
        "gradient_accumulation_steps": case["num_micro"],
        "gradient_clipping": case["max_norm"],
        "reduce_bucket_size": 3000,
        "allgather_bucket_size": 3000,
    }
    if case["plus"]:
        options |= PLUS | ({"hpz_partition_size": 1} if case["stage"] == 3 else {})
    if case["dtype"] == "fp16":
        options["fp16"] = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 1}
    elif case["dtype"] == "bf16":
        options["bf16"] = {"enabled": True}
    return options


def _train(rank: int, case: dict[str, Any], **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Three steps, one of them skipped in fp16; the losses and the parameters."""
    model, losses = new_model(has_unused=True, has_frozen=True), []
    optimizer = OPTIMIZERS[case["optimizer"]](groups_of(model))
    with zero_optimizer(model, optimizer, **_options(case), **options) as wrapped:
        for step in range(3):
            for micro in range(case["num_micro"]):
                loss = loss_of(model, *batch(step, micro, rank)) / case["num_micro"]
                overflows = case["dtype"] == "fp16" and (step, micro, rank) == (1, 0, 1)
                wrapped.scale(loss * float("inf") if overflows else loss).backward()
                losses.append(loss.item())
            wrapped.step()
            wrapped.zero_grad()
            assert wrapped.was_step_applied == (case["dtype"] != "fp16" or step != 1)
        return losses, full_values(model)


def _check_case(rank: int, cases: list[dict[str, Any]]) -> None:
    for case in cases:
        expected, got = _train(rank, case), _train(rank, case, offload_optimizer=TIERS[case["tier"]])
        assert expected[0] == got[0], case
        assert_same_bits(expected[1], got[1])


def test_every_tier_has_the_bits_of_none() -> None:
    """Any two of tier, stage, precision, accumulation, clipping, ZeRO++ and optimizer are tried together."""
    run_ranks(2, _check_case, covering_set(FACTORS, 2))


def _check_bytes(rank: int) -> None:
    for stage in (1, 2, 3):
        for num_micro in (1, 3):
            model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False))
            numel = sum(p.numel() for p in model.parameters())
            options = {"stage": stage, "gradient_accumulation_steps": num_micro, "bf16": {"enabled": True}}
            with zero_optimizer(model, zero.CPUAdam, lr=0.1, offload_optimizer={"device": "cpu"}, **options) as wrapped:
                for _ in range(2):
                    with moved() as window:
                        for _ in range(num_micro):
                            model(torch.ones(2, 64).bfloat16()).sum().backward()
                        wrapped.step()
                        wrapped.zero_grad()
                    means = 1 if stage == 1 else num_micro
                    assert window.bytes(kind="gradients", link="to_host") == 2 * numel // 2 * means
                    assert window.bytes(kind="parameters", link="to_device") == 2 * numel // 2
                    assert window.bytes() == 2 * numel // 2 * (1 + means)


def test_bf16_moves_two_bytes_down_and_two_up() -> None:
    """Of every parameter that a rank has: half of them; from stage 2 on, gradients go down after every backward."""
    run_ranks(2, _check_bytes)


def _check_torch(rank: int) -> None:
    """An optimizer of torch on host tensors, in float32, where nothing is rounded on the way."""
    case = {"stage": 2, "num_micro": 2, "max_norm": 0.5, "dtype": "fp32", "plus": False, "optimizer": "torch"}
    for stage in (1, 2, 3):
        case["stage"] = stage
        expected, got = _train(rank, case), _train(rank, case, offload_optimizer={"device": "cpu"})
        assert expected[0] == got[0]
        assert_same_bits(expected[1], got[1])


OPTIMIZERS["torch"] = lambda groups: torch.optim.AdamW(groups, lr=1e-2)


def test_torchs_optimizers_work_on_host_tensors() -> None:
    run_ranks(2, _check_torch)


class Failing(torch.optim.SGD):
    """Fails at the second step, on one rank."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise MemoryError("no memory left")
        return super().step(closure)


def _check_failure(rank: int) -> None:
    model = new_model()
    with zero_optimizer(model, Failing, lr=0.1, stage=2, offload_optimizer={"device": "cpu"}) as optimizer:
        optimizer.inside.inner.fails = rank == 1
        loss_of(model, *batch(0, 0, rank)).backward()
        with pytest.raises(MemoryError if rank == 1 else StateError, match="no memory left"):
            optimizer.step()
        with pytest.raises(StateError, match=r"load the last checkpoint.*no memory left"):
            optimizer.step()


def test_a_failed_update_is_an_error_on_every_rank_and_stays_one() -> None:
    run_ranks(2, _check_failure)


def _check_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match="float64"):
        zero.ZeroOptimizer(new_model(torch.float64), zero.CPUAdam, offload_optimizer={"device": "cpu"})
    with pytest.raises(ConfigError, match="nvme_path"):
        zero.ZeroOptimizer(new_model(), zero.CPUAdam, offload_optimizer={"device": "nvme"})


def test_what_is_refused() -> None:
    run_ranks(2, _check_refused)
