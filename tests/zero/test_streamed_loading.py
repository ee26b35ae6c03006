"""Loading checkpoints into states in files: one sub-group at a time in memory, and all of it or nothing."""

# covers zero/optimizer.py

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero
from tests.ranks import run_ranks
from tests.zero.test_init import LiveBytes
from tests.zero.training import assert_same_bits, full_values, zero_optimizer
from zcomm import StateError

WIDTH, DEPTH = 256, 16
SHARD_NBYTES = 12 * WIDTH * WIDTH * DEPTH // 2


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def _options(folder: str, **more: Any) -> dict[str, Any]:
    tier = {"device": "nvme", "nvme_path": folder}
    return {
        "lr": 1e-2,
        "stage": 3,
        "bf16": {"enabled": True},
        "offload_optimizer": tier,
        "offload_param": tier | {"max_in_cpu": 0, "buffer_size": 2**14},
        "sub_group_size": 2**13,
        "reduce_bucket_size": 2**16,
        "allgather_bucket_size": 2**16,
        **more,
    }


def _step(model: nn.Module, optimizer: zero.ZeroOptimizer, rank: int) -> None:
    model(torch.ones(1, WIDTH, dtype=torch.bfloat16) * (rank + 1)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _states(model: nn.Module) -> dict[str, Tensor]:
    found = full_values(model)
    for name, param in model.named_parameters():
        found[f"{name} master"] = zero.utils.safe_get_full_fp32_param(param)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {key}"] = zero.utils.safe_get_full_optimizer_state(param, key)
    return found


def _check(rank: int, folder: str) -> None:
    checkpoints, model = f"{folder}/checkpoints", _model(0)
    with zero_optimizer(model, zero.CPUAdam, **_options(folder)) as optimizer:
        for _ in range(2):
            _step(model, optimizer, rank)
        zero.save_checkpoint(optimizer, checkpoints, "two")
        expected = _states(model)
        _step(model, optimizer, rank)
        later = _states(model)
    model = _model(1)
    with zero_optimizer(model, zero.CPUAdam, **_options(folder)) as optimizer:
        with LiveBytes() as live:
            zero.load_checkpoint(optimizer, checkpoints)
        assert live.peak < SHARD_NBYTES / 4, (live.peak, SHARD_NBYTES)
        assert_same_bits(_states(model), expected)
        _step(model, optimizer, rank)
        assert_same_bits(_states(model), later)
        zero.load_checkpoint(optimizer, checkpoints, load_optimizer_states=False)
        moments = {name: value for name, value in later.items() if "exp_avg" in name}
        assert_same_bits(_states(model), expected | moments)
    _damage(rank, checkpoints)
    for keeps in (True, False):
        model = _model(1)
        options = _options(folder, keep_previous_states=keeps)
        with zero_optimizer(model, zero.CPUAdam, **options) as optimizer:
            _step(model, optimizer, rank)
            before = _states(model)
            with pytest.raises(zero.CheckpointError, match="is damaged: the checksum"):
                zero.load_checkpoint(optimizer, checkpoints)
            if keeps:
                assert_same_bits(_states(model), before)
                _step(model, optimizer, rank)
            else:
                with pytest.raises(StateError, match="construct it again"):
                    _step(model, optimizer, rank)


def _damage(rank: int, checkpoints: str) -> None:
    """Change one byte, far behind those that are read first."""
    dist.barrier()
    if rank == 0:
        path = max(Path(checkpoints).glob("two/*.safetensors"))
        data = bytearray(path.read_bytes())
        data[len(data) * 2 // 3] ^= 1
        path.write_bytes(data)
    dist.barrier()


def test_a_shard_is_loaded_a_sub_group_at_a_time(tmp_path: Path) -> None:
    run_ranks(2, _check, str(tmp_path))
