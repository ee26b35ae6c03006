"""Frozen weights stored as INT8: their memory, the bytes sent, and the effect on training."""

# covers zero/optimizer.py

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zcomm
import zero
from tests.ranks import run_ranks
from tests.zero.training import full_values, zero_optimizer
from zero import GatheredParameters

WIDTH, RANK = 256, 4


class Adapted(nn.Module):
    """A frozen layer with a trainable low-rank change, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def _model(dtype: torch.dtype, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(Adapted() for _ in range(3))).to(dtype)


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4, WIDTH, generator=generator).to(next(model.parameters()).dtype)
    return model(x).double().square().mean()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def _largest_error(values: Tensor) -> float:
    """The error bound of INT8 blocks: half a scale, which is rounded up to 8 bits; plus rounding to bfloat16."""
    return float(values.abs().max()) * ((1 + 2**-7) / 127 / 2 + 2**-8)


def _check(rank: int, world_size: int, dtype: torch.dtype, options: dict[str, object]) -> None:
    model, plain = _model(dtype), _model(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    trained = [name for name in before if name not in frozen]
    settings = {"stage": 3, "zero_quantized_nontrainable_weights": True, "gradient_dtype": None, **options}
    with zero_optimizer(model, _sgd(model), **settings) as optimizer:
        optimizer.memory()
        held = sum(b.storage.nbytes["device"] for b in optimizer._runtime.buckets if not b.is_trainable)
        of_bf16 = 2 * sum(before[name].numel() for name in frozen) / world_size
        assert 0.5 < held / of_bf16 < 0.53
        values = full_values(model)
        for name in frozen:
            error = (values[name].double() - before[name].double()).abs().max()
            assert 0 < error <= _largest_error(before[name].double()), name
        _assert_same_everywhere(values)
        for name, param in plain.named_parameters():
            param.data.copy_(values[name])
        sgd = _sgd(plain)
        with zcomm.traffic() as sent:
            for step in range(3):
                _loss(model, step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                sum(_loss(plain, step, of) / world_size for of in range(world_size)).backward()
                sgd.step()
                sgd.zero_grad()
        gathered = sent.bytes(format="int8")
        # Forward and backward of each step gather; frozen weights never change, so the node's copies stay valid.
        num_gathers = 0 if "zero_hpz_partition_size" in options else 2 * 3
        expected = num_gathers * held * (world_size - 1)
        assert 0.8 * expected <= gathered <= 1.01 * expected, gathered / expected
        after = full_values(model)
        assert all(torch.equal(after[name], values[name]) for name in frozen)
        for name in trained:
            moved = dict(plain.named_parameters())[name].detach()
            assert not torch.equal(after[name], before[name])
            torch.testing.assert_close(after[name], moved, rtol=1e-2, atol=1e-5 if dtype == torch.float32 else 1e-2)
        _check_changes(model, frozen[0], after)


def _assert_same_everywhere(values: dict[str, Tensor]) -> None:
    mine = torch.cat([v.double().flatten() for v in values.values()])
    of_ranks = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(of_ranks, mine)
    assert all(torch.equal(mine, other) for other in of_ranks)


def _check_changes(model: nn.Module, name: str, before: dict[str, Tensor]) -> None:
    """Values written by a user are rounded as at the start; all others keep their bits."""
    param = dict(model.named_parameters())[name]
    with GatheredParameters(param, modifier_rank=1):
        if torch.distributed.get_rank() == 1:
            param.data.mul_(0).add_(0.25)
    after = full_values(model)
    torch.testing.assert_close(after[name], torch.full_like(after[name], 0.25), rtol=2**-7, atol=0)
    others = [n for n in before if n != name and not n.startswith("0.base")]
    assert all(torch.equal(after[n], before[n]) for n in others)


@pytest.mark.parametrize(
    ("world_size", "dtype", "options"),
    [
        (2, torch.float32, {}),
        (2, torch.bfloat16, {"allgather_bucket_size": 40_000, "overlap_comm": False}),
        (4, torch.bfloat16, {"ranks_per_node": 2}),
        (4, torch.float32, {"ranks_per_node": 2, "zero_hpz_partition_size": 2}),
    ],
    ids=["float32", "in parts", "two hops", "hpz"],
)
def test_frozen_weights_rest_and_travel_as_int8(
    world_size: int, dtype: torch.dtype, options: dict[str, object]
) -> None:
    run_ranks(world_size, _check, world_size, dtype, options)


def _check_checkpoint(rank: int, folder: Path) -> None:
    """Stored encoded; loading into a model with the same base gives the same bits, otherwise within one rounding."""
    values = {}
    for seed in (0, 0, 1):
        model = _model(torch.bfloat16, seed)
        engine, *_ = zero.initialize(
            model=model,
            optimizer=_sgd(model),
            config={
                "train_micro_batch_size_per_gpu": 4,
                "zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True},
            },
        )
        if not values:
            engine.backward(_loss(engine, 0, rank))
            engine.step()
            engine.save_checkpoint(folder, tag="one")
            values = copy.deepcopy(full_values(engine.module))
        else:
            engine.load_checkpoint(folder)
            for name, value in full_values(engine.module).items():
                if seed == 0 or "base" not in name:
                    assert torch.equal(value, values[name]), name
                assert (value.float() - values[name].float()).abs().max() <= _largest_error(values[name].double())
        engine.destroy()


def test_checkpoints_hold_the_decoded_values(tmp_path: Path) -> None:
    run_ranks(2, _check_checkpoint, tmp_path)
