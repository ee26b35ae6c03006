"""What the state dicts of model and optimizer contain, and how they load."""

# covers zero/_access/state_dict.py zero/_activations/random_states.py zero/_checkpoint/model_file.py

from __future__ import annotations

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tests.ranks import run_ranks
from tests.zero.models import new_model
from tests.zero.training import assert_same_bits, full_values, train, zero_optimizer
from zcomm import StateError
from zero import GatheredParameters, ZeroOptimizer
from zero._checkpoint.model_file import save_model_file


def _differs_from_masters(saved: dict[str, torch.Tensor], model: nn.Module, optimizer: ZeroOptimizer) -> list[str]:
    names = {param: name for name, param in model.named_parameters()}
    wrong = []
    for param, first, master in optimizer.master_pieces():
        values = saved[names[param]].flatten()[first : first + master.numel()]
        if not torch.equal(values, master.to(values.dtype)):
            wrong.append(names[param])
    return wrong


def _check_saved_exactly(rank: int, stage: int, dtype: torch.dtype) -> None:
    model = new_model(dtype, has_frozen=True)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with zero_optimizer(model, stage=stage, quantized_weights=True) as optimizer:
        is_here = stage < 3 or rank == 0
        if stage:
            kept = model.state_dict(keep_vars=True)
            assert stage == 3 or kept["norm.weight"] is model.norm.weight
        saved = model.state_dict()
        assert_same_bits(saved, start if is_here else {})
        train(model, optimizer, rank, steps=2)
        saved = model.state_dict()
        if is_here:
            assert not _differs_from_masters(saved, model, optimizer)
            assert torch.equal(saved["norm.bias"], start["norm.bias"]), "frozen"
            assert not torch.equal(saved["norm.weight"], start["norm.weight"])
        model.load_state_dict(saved)
        assert_same_bits(model.state_dict(), saved)
        train(model, optimizer, rank, steps=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_quantized_weights_are_saved_exactly(stage: int, dtype: torch.dtype) -> None:
    run_ranks(2, _check_saved_exactly, stage, dtype)


def _check_file_size(rank: int, stage: int) -> None:
    model = nn.Linear(512, 512)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage) as optimizer:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
    numel = 512 * 513
    assert file.tell() < 4 * numel / (2 if stage else 1) + 10_000


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_saves_its_shard_alone(stage: int) -> None:
    run_ranks(2, _check_file_size, stage)


def _check_one_bucket_at_a_time(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    model.append(model[0])  # tied
    other = copy.deepcopy(model)
    for param in other.parameters():
        nn.init.normal_(param)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3) as optimizer:
        incompatible = model.load_state_dict(other.state_dict())
        assert not incompatible.missing_keys
        assert optimizer.memory().buffers["pool"] < 1.2 * 4 * (64 * 64 + 64)
        assert_same_bits(full_values(model), dict(other.named_parameters()))


def test_loading_at_stage_3_holds_one_bucket_at_a_time() -> None:
    run_ranks(2, _check_one_bucket_at_a_time)


def _check_saving_one_bucket_at_a_time(rank: int, folder: str) -> None:
    torch.manual_seed(0)
    one = 4 * (64 * 64 + 64)
    for save in (
        lambda model, _: model.state_dict(),
        lambda _, optimizer: save_model_file(optimizer, Path(folder) / "a.bin"),
        lambda _, optimizer: save_model_file(optimizer, Path(folder) / "a.safetensors"),
    ):
        for options in ({}, {"quantized_weights": True}):
            model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            with zero_optimizer(model, sgd, stage=3, **options) as optimizer:  # type: ignore[arg-type]
                save(model, optimizer)
                assert optimizer.memory().buffers["pool"] < 1.2 * one


def test_saving_at_stage_3_holds_one_bucket_at_a_time(tmp_path: Path) -> None:
    run_ranks(2, _check_saving_one_bucket_at_a_time, str(tmp_path))


def _check_gathered_before(rank: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]), torch.ones(2, 8)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3) as optimizer:
        saved, expected = copy.deepcopy(optimizer.state_dict()), full_values(model)
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
        model[0](x)  # prefetches the second layer
        with GatheredParameters(model[2].weight):
            optimizer.load_state_dict(saved)
            assert torch.equal(full_values(model)["2.weight"], expected["2.weight"])
        assert_same_bits(full_values(model), expected)


def test_loading_an_optimizer_forgets_what_was_gathered() -> None:
    run_ranks(2, _check_gathered_before)


def _check_alone_inside_a_block(rank: int, stage: int) -> None:
    """DeepSpeed's scripts load and save on one rank, inside zero.GatheredParameters."""
    model, other = new_model(torch.float32), new_model(torch.float32)
    for param in other.parameters():
        nn.init.normal_(param)
    with zero_optimizer(model, stage=stage) as optimizer:
        train(model, optimizer, rank, steps=1)
        with GatheredParameters(model.parameters(), modifier_rank=1):
            if rank == 1:
                assert not model.load_state_dict(other.state_dict()).missing_keys
        assert_same_bits(full_values(model), dict(other.named_parameters()))
        assert not _differs_from_masters(full_values(model), model, optimizer)
        with GatheredParameters(model.parameters()):
            saved = model.state_dict() if rank == 0 else None
        if saved is not None:
            assert_same_bits(saved, other.state_dict())
        block, values = model.blocks[1], {name: 2 * value for name, value in other.blocks[1].state_dict().items()}
        with GatheredParameters(block.parameters(), modifier_rank=0):
            if rank == 0:
                block.load_state_dict(values, assign=True)
        other.blocks[1].load_state_dict(values)
        assert_same_bits(full_values(model), dict(other.named_parameters()))
        train(model, optimizer, rank, steps=1)
        with GatheredParameters(model.norm.parameters(), modifier_rank=0):  # not all of them: every rank calls it
            model.load_state_dict(other.state_dict() if rank == 0 else {})
        assert_same_bits(full_values(model), dict(other.named_parameters()))
        assert bool(model.state_dict()) == (stage < 3 or rank == 0)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_rank_loads_and_saves_alone_inside_a_block(stage: int) -> None:
    run_ranks(2, _check_alone_inside_a_block, stage)


def _check_masters_follow(rank: int, options: dict[str, Any], dtype: torch.dtype, *, by_all: bool) -> None:
    """Zeros, and after small steps the values from before: what forward reads is the same already in places."""
    model = new_model(dtype)
    start = {name: value.clone() for name, value in new_model(dtype).state_dict().items()}
    zeros = {name: torch.zeros_like(value) for name, value in start.items()}
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    with zero_optimizer(model, sgd, **options) as optimizer:
        for wanted in (zeros, start):
            model.load_state_dict(start)
            train(model, optimizer, rank, steps=2)
            with GatheredParameters(model.parameters(), modifier_rank=0):
                if rank == 0 or by_all:
                    model.load_state_dict(wanted if rank == 0 else {})
            for param, first, master in optimizer.master_pieces():
                name = next(name for name, one in model.named_parameters() if one is param)
                assert torch.equal(master, wanted[name].flatten()[first : first + master.numel()].float()), name


@pytest.mark.parametrize("by_all", [False, True])
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"stage": 3, "quantized_weights": True}, torch.float32),
        ({"stage": 1, "quantized_weights": True}, torch.float32),
        ({"stage": 3}, torch.bfloat16),
        ({"stage": 2}, torch.bfloat16),
        ({"stage": 0}, torch.bfloat16),
    ],
)
def test_masters_follow_a_load_inside_a_block(options: dict[str, Any], dtype: torch.dtype, *, by_all: bool) -> None:
    run_ranks(2, partial(_check_masters_follow, options=options, dtype=dtype, by_all=by_all))


def _check_half_inside(rank: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    """A container, which is not loaded as a whole: one of its modules is in the block, the other is not."""
    torch.manual_seed(3)
    model, other = new_model(dtype), new_model(dtype)
    for param in other.parameters():
        nn.init.normal_(param)
    with zero_optimizer(model, **options):
        pair, values = (nn.ModuleList([one.blocks[0], one.blocks[1]]) for one in (model, other))
        for given in (values.state_dict() if rank == 0 else {}, values.state_dict()):
            with GatheredParameters(model.blocks[0].parameters(), modifier_rank=0):
                pair.load_state_dict(given, strict=False)
            found = full_values(model)
            for index in range(2):
                for name, value in other.blocks[index].named_parameters():
                    assert torch.equal(found[f"blocks.{index}.{name}"], value), (index, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_load_half_inside_a_block_reaches_every_rank(stage: int, dtype: torch.dtype) -> None:
    small = {"reduce_bucket_size": 2000, "allgather_bucket_size": 2000} if stage == 2 else {}
    run_ranks(2, _check_half_inside, {"stage": stage, **small}, dtype)


def _check_without_parameters(rank: int, stage: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False), nn.GELU())
    with zero_optimizer(model, stage=stage):
        with GatheredParameters(model.parameters(), modifier_rank=0):
            if rank == 0:
                for module in model:
                    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})
        assert model[1].num_batches_tracked.item() == (rank == 0)
        zcomm.all_reduce(torch.ones(3))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_without_parameters_loads_alone_inside_a_block(stage: int) -> None:
    run_ranks(2, _check_without_parameters, stage)


def _check_two_modifiers(rank: int, stage: int) -> None:
    model = new_model()
    with zero_optimizer(model, stage=stage):
        with GatheredParameters(model.parameters(), modifier_rank=0):
            if rank == 0:
                model.position.data.fill_(7)
            with (
                pytest.raises(StateError, match=r"modifier_rank=1\) would overwrite .*, of modifier_rank=0"),
                GatheredParameters(model.blocks[0].parameters(), modifier_rank=1),
            ):
                pass
            with GatheredParameters(model.blocks[0].parameters(), modifier_rank=0):
                pass
        assert bool((full_values(model)["position"] == 7).all())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_block_of_another_rank_inside_one_is_refused(stage: int) -> None:
    run_ranks(2, _check_two_modifiers, stage)
