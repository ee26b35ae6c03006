"""offload_states: the device holds nothing, any use raises, and after reload_states training has the same bits."""

# covers zero/offload.py

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from tests.ranks import run_ranks
from tests.zero.models import batch, loss_of, new_model
from tests.zero.training import assert_same_bits, full_values, train, zero_optimizer
from zcomm import ConfigError, StateError

SMALL = 4096  # bytes: step counters
CASES: list[tuple[dict[str, Any], torch.dtype]] = [
    ({"stage": 0}, torch.bfloat16),
    ({"stage": 1}, torch.float32),
    ({"stage": 2, "quantized_weights": True}, torch.float32),
    ({"stage": 3, "stage3_param_persistence_threshold": 200}, torch.bfloat16),
]


def _check_goes_on(rank: int) -> None:
    for options, dtype in CASES:
        results = []
        for is_lent in (False, True):
            model = new_model(dtype)
            with zero_optimizer(model, **options) as optimizer:
                train(model, optimizer, rank, steps=1)
                optimizer.scale(loss_of(model, *batch(1, 0, rank))).backward()
                before = optimizer.memory().by_kind
                if is_lent:  # between a backward and its step
                    zero.offload_states(optimizer)
                    assert max(optimizer.memory().by_kind.values()) < SMALL < max(before.values()), options
                    zero.reload_states(optimizer)
                    after = optimizer.memory().by_kind
                    assert {k: v for k, v in after.items() if k != "pool"} == {
                        k: v for k, v in before.items() if k != "pool"
                    }
                optimizer.step()
                optimizer.zero_grad()
                train(model, optimizer, rank, steps=1)
                results.append(full_values(model))
        assert_same_bits(*results)


def test_training_goes_on_with_the_same_bits() -> None:
    run_ranks(2, _check_goes_on)


def _check_uses(rank: int, folder: Path) -> None:
    for stage in (1, 3):
        model = new_model(torch.bfloat16)
        with zero_optimizer(model, stage=stage) as optimizer:
            train(model, optimizer, rank, steps=1)
            before, param = optimizer.memory(), next(model.parameters())
            zero.offload_states(optimizer, include=["optim_states", "hp_params"])
            now = optimizer.memory()
            assert now.states < SMALL
            assert (now.parameters, now.gradients) == (before.parameters, before.gradients)
            uses: dict[str, Any] = {
                "forward": lambda model=model: loss_of(model, *batch(0, 0, rank)),
                "a layer's forward": lambda model=model: next(iter(model.children()))(
                    torch.zeros(1, dtype=torch.int64)
                ),
                "step": optimizer.step,
                "unscale_": optimizer.unscale_,
                "state_dict": optimizer.state_dict,
                "a parameter": lambda param=param: param + 1,
                "GatheredParameters": lambda param=param: zero.GatheredParameters(param).__enter__(),
                "master": lambda param=param: zero.utils.safe_get_local_fp32_param(param),
                "gradient": lambda param=param: zero.utils.safe_get_local_grad(param),
                "checkpoint": lambda optimizer=optimizer: zero.save_checkpoint(optimizer, folder, "tag"),
                "offload_states": lambda optimizer=optimizer: zero.offload_states(optimizer),
            }
            for name, use in uses.items():
                with pytest.raises(StateError, match=r"optim_states, hp_params are offloaded.*reload_states") as caught:
                    use()
                assert caught.value is not None, name
            zero.reload_states(optimizer)
            zero.reload_states(optimizer)  # nothing is offloaded
            for wrong, message in (
                ({"include": ["moments"]}, "include must be names of optim_states.*'moments'"),
                ({"device": "nvme"}, "to host memory only: device='nvme'"),
            ):
                with pytest.raises(ConfigError, match=message):
                    zero.offload_states(optimizer, **wrong)
            with zero.GatheredParameters(param), pytest.raises(StateError, match="parameters are in use"):
                zero.offload_states(optimizer)
    model = new_model(torch.bfloat16)
    tiers = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    with (
        zero_optimizer(model, zero.CPUAdam(model.parameters()), stage=3, **tiers) as optimizer,
        pytest.raises(ConfigError, match="offload_param is set"),
    ):
        zero.offload_states(optimizer)


def test_what_is_away_cannot_be_used(tmp_path: Path) -> None:
    run_ranks(2, _check_uses, tmp_path)


def _check_engine(rank: int) -> None:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": 2}}
    engine, *_ = zero.initialize(model=new_model(torch.float32), config=config)
    engine.offload_states(include=["optim_states"], pin_memory=False, non_blocking=True)
    with pytest.raises(StateError, match="optim_states are offloaded"):
        loss_of(engine, *batch(0, 0, rank))
    engine.reload_states(non_blocking=True)
    engine.backward(loss_of(engine, *batch(0, 0, rank)))
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()


def test_engine() -> None:
    run_ranks(2, _check_engine)
