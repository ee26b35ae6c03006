"""Diverged ranks: one named error on every rank at the next backward, with each rank's value."""

# covers zero/_gradients/accumulation.py zero/_sharding/stages.py

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from tests.zero.training import full_values, zero_optimizer
from zcomm import ConfigError, DivergedError, Topology
from zero import ZeroOptimizer, load_checkpoint, save_checkpoint
from zero._checkpoint.model_file import save_model_file
from zero.utils import safe_get_full_fp32_param

STAGES = [0, 1, 2, 3]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage {stage}": (2, {"stage": stage}) for stage in STAGES},
    "three ranks": (3, {"stage": 2}),
    "two hops": (4, {"stage": 3, "ranks_per_node": 2}),
    "hpz": (4, {"stage": 3, "ranks_per_node": 2, "zero_hpz_partition_size": 2}),
    "delta": (4, {"stage": 2, "ranks_per_node": 2, "mode": "delta"}),
    "delta_hpz": (4, {"stage": 3, "ranks_per_node": 2, "mode": "delta_hpz"}),
}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))


def _backward(model: nn.Module, rank: int) -> None:
    model(torch.full((2, 24), 1.0 + rank)).square().sum().backward()


def _step(model: nn.Module, optimizer: ZeroOptimizer, rank: int) -> None:
    _backward(model, rank)
    optimizer.step()
    optimizer.zero_grad()


def _raises(model: nn.Module, rank: int, *texts: str) -> None:
    with pytest.raises(DivergedError) as caught:
        _backward(model, rank)
    for text in texts:
        assert text in str(caught.value)


def _last(rank: int) -> bool:
    return rank == torch.distributed.get_world_size() - 1


def _check_settings(rank: int, options: dict[str, Any]) -> None:
    """Every scalar setting, alone and in a tuple; once the difference is removed, training continues."""
    model, last = _net(), torch.distributed.get_world_size() - 1
    others = ", ".join(str(r) for r in range(last))
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    with zero_optimizer(model, adam, **options) as optimizer:
        _step(model, optimizer, rank)
        group = optimizer.param_groups[0]
        for name, value, text in (
            ("lr", 1e-5, "1e-05"),
            ("weight_decay", 0.5, "0.5"),
            ("betas", (0.9, 0.9), "(0.9, 0.9)"),
        ):
            before, values = group[name], full_values(model)
            group[name] = value if rank == last else before
            _raises(model, rank, f"parameter group 0 {name} is {before} on rank {others} and {text} on rank {last}")
            group[name] = before
            optimizer.zero_grad()
            assert all(torch.equal(a, b) for a, b in zip(values.values(), full_values(model).values(), strict=True))
            _step(model, optimizer, rank)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_settings_that_part_are_named(layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    run_ranks(world_size, _check_settings, options)


def _check_scheduler(rank: int, num_micro: int) -> None:
    """ReduceLROnPlateau with each rank's own loss: found before a step uses the different rate."""
    for lr in (0.01, torch.tensor(0.01)):
        model = _net()
        adam = torch.optim.AdamW(model.parameters(), lr=lr)
        with zero_optimizer(model, adam, stage=2, gradient_accumulation_steps=num_micro) as optimizer:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            for step in range(2):
                for _ in range(num_micro):
                    _backward(model, rank)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step(1.0 + (step if rank else -step))
            with pytest.raises(DivergedError, match=r"group 0 lr is 0\.0\d+ on rank 0 and 0\.00\d+ on rank 1"):
                _backward(model, rank)


@pytest.mark.parametrize("num_micro", [1, 2])
def test_a_scheduler_that_follows_each_ranks_own_loss_is_found(num_micro: int) -> None:
    run_ranks(2, _check_scheduler, num_micro)


def _check_cleared(rank: int, options: dict[str, Any]) -> None:
    model = _net()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01), **options) as optimizer:
        _step(model, optimizer, rank)
        _backward(model, rank)
        if _last(rank):
            model.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        _raises(model, rank, "the gradient of '0.bias' in the last step is applied on rank 0")
        optimizer.zero_grad()
        _step(model, optimizer, rank)
        _backward(model, rank)
        if _last(rank):
            model.zero_grad()
        _raises(model, rank, "the gradient of '0.bias' before this backward is held on rank 0")
        optimizer.zero_grad()
        _step(model, optimizer, rank)
        for _ in range(2):  # either way to clear them, after a step
            _backward(model, rank)
            optimizer.step()
            (model if _last(rank) else optimizer).zero_grad()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_cleared_on_one_rank_are_named(layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    run_ranks(world_size, _check_cleared, options)


def _check_failed_update(rank: int, options: dict[str, Any], folder: str) -> None:
    """One rank's update fails and its script goes on, as after running out of memory; the others have applied it."""
    model = _net()
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    failing = [False]

    def fail(*_: object) -> None:
        if failing[0]:
            raise MemoryError("no room")

    adam.register_step_pre_hook(fail)
    with zero_optimizer(model, adam, **options) as optimizer:

        def step(*, fails: bool) -> None:
            _backward(model, rank)
            failing[0] = fails
            with pytest.raises(MemoryError, match="no room") if fails else nullcontext():
                optimizer.step()
            failing[0] = False

        _step(model, optimizer, rank)
        for is_saved in (False, True):
            step(fails=_last(rank))
            optimizer.zero_grad()
            if is_saved:
                with pytest.raises(DivergedError, match="the last step is done on rank 0 and unfinished"):
                    save_checkpoint(optimizer, folder, "1")
            _raises(model, rank, "the last step is done on rank 0 and unfinished, as it raised an error, on rank 1")
            optimizer.zero_grad()
        step(fails=True)  # on every rank: nothing is lost, and it is done again
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state_dict()
        step(fails=_last(rank))
        optimizer.zero_grad()
        optimizer.load_state_dict(state)  # which undoes it on every rank
        _step(model, optimizer, rank)


def _check_once(rank: int) -> None:
    """A difference that one rank meets in its backward, and the other in step(), is reported once."""
    model = _net()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01), stage=2) as optimizer:
        _step(model, optimizer, rank)
        optimizer.param_groups[0]["lr"] = 0.01 * (rank + 1)
        if rank == 0:
            _raises(model, rank, "lr is")
        else:
            with optimizer.no_sync():
                _backward(model, rank)
            with pytest.raises(DivergedError, match="lr is"):
                optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.zero_grad()
        for _ in range(2):
            _step(model, optimizer, rank)


def test_what_a_backward_and_a_step_meet_is_reported_once() -> None:
    run_ranks(2, _check_once)


def test_an_update_that_fails_on_one_rank_is_named(tmp_path: Path) -> None:
    run_ranks(2, _check_failed_update, {"stage": 3}, str(tmp_path))


def _check_not_saved(rank: int, options: dict[str, Any], folder: str) -> None:
    model = _net()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01), **options) as optimizer:
        _step(model, optimizer, rank)
        save_checkpoint(optimizer, folder, "good")
        saved = full_values(model)
        _backward(model, rank)
        if _last(rank):
            model.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(2):  # the same value again is no difference
            for save in (
                lambda: save_checkpoint(optimizer, folder, "bad"),
                lambda: save_model_file(optimizer, Path(folder) / "bad.safetensors"),
            ):
                with pytest.raises(
                    DivergedError, match=r"the gradient of '0\.bias' in the last step is applied on rank"
                ):
                    save()
        assert [path.name for path in Path(folder).iterdir() if path.is_dir()] == ["good"]
        assert (Path(folder) / "latest").read_text().split()[-1] == "good"
        load_checkpoint(optimizer, folder)
        assert all(torch.equal(a, b) for a, b in zip(saved.values(), full_values(model).values(), strict=True))
        for tag in ("first", "second"):
            save_checkpoint(optimizer, folder, tag)
            _step(model, optimizer, rank)
        optimizer.param_groups[0]["lr"] = 0.1 if _last(rank) else 0.01
        with pytest.raises(DivergedError, match=r"group 0 lr is 0\.01 on rank 0.* and 0\.1 on rank"):
            save_checkpoint(optimizer, folder, "bad")


@pytest.mark.parametrize("layout", ["stage 0", "stage 1", "stage 3", "three ranks"])
def test_a_step_that_not_all_took_is_not_saved(layout: str, tmp_path: Path) -> None:
    world_size, options = LAYOUTS[layout]
    run_ranks(world_size, _check_not_saved, options, str(tmp_path))


def _check_edited(rank: int) -> None:
    """Stage 0: one rank alone writes to the averaged gradient."""
    model = _net()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01), stage=0) as optimizer:
        _backward(model, rank)
        if rank == 1:
            model[0].weight.grad *= 2
        optimizer.step()
        optimizer.zero_grad()
        _raises(model, rank, "in the last step is as reduced on rank 0 and edited in place on rank 1")
        optimizer.zero_grad()
        _step(model, optimizer, rank)
        _backward(model, rank)
        if rank == 1:
            model[0].weight.grad *= 2
        optimizer.clip_grad_norm_(1.0)  # writes to the gradients, too
        _raises(model, rank, "before this backward is as reduced on rank 0 and edited in place on rank 1")


def test_a_gradient_edited_on_one_rank_is_named() -> None:
    run_ranks(2, _check_edited)


def _check_boundary(rank: int, options: dict[str, Any]) -> None:
    model, last = _net(), torch.distributed.get_world_size() - 1
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with zero_optimizer(model, sgd, gradient_accumulation_steps=2, **options) as optimizer:
        for _ in range(2):
            _backward(model, rank)
        optimizer.step()
        optimizer.zero_grad()
        if rank == last:
            optimizer.is_boundary = True

        def window() -> None:
            _backward(model, rank)
            _backward(model, rank)

        with pytest.raises(DivergedError) as caught:
            window()
        text = str(caught.value)
        assert "one within a step on rank 0" in text or "since the last step is 2 on rank 0" in text
        assert f"rank {last}" in text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_boundary_on_one_rank_is_named(layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    run_ranks(world_size, _check_boundary, options)


def _check_uneven(rank: int, stage: int) -> None:
    """Ranks may have different numbers of backwards in no_sync; step() or a backward outside may end them."""
    model = _net()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01), stage=stage) as optimizer:
        for step in range(3):
            for micro in range(1 + rank + step):
                is_last = micro == rank + step
                defers = not is_last or (rank == 1 and step == 1)
                with optimizer.no_sync() if defers else nullcontext():
                    _backward(model, rank)
            optimizer.step()
            optimizer.zero_grad()
        for reducing in (0, 1):  # rank 1 runs none inside
            before = {name: value.clone() for name, value in full_values(model).items()}
            for _ in range(reducing):
                _backward(model, 0)
            with optimizer.no_sync():
                if rank == 0:
                    _backward(model, 0)
            optimizer.step()
            optimizer.zero_grad()
            alone = _net()
            alone.load_state_dict(before)
            _backward(alone, 0)
            torch.optim.SGD(alone.parameters(), lr=0.01 * (reducing + 1 / 2)).step()
            for name, value in full_values(model).items():
                torch.testing.assert_close(value, alone.state_dict()[name])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_uneven_batches_within_no_sync_are_alike(stage: int) -> None:
    run_ranks(2, _check_uneven, stage)


def _check_ends(rank: int, end: str) -> None:
    """One rank's backward reduces, the other's is within no_sync: the next call ends the window."""
    model = _net()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01), stage=2) as optimizer:
        for step in range(2):

            def backward(defers: bool = rank == step) -> None:  # noqa: FBT001  (a closure's)
                with optimizer.no_sync() if defers else nullcontext():
                    _backward(model, rank)

            if end == "closure":
                optimizer.step(backward)
            else:
                backward()
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Topology, "meets_by_tag", end == "clip")
                    optimizer.clip_grad_norm_(1.0)
                optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("end", ["closure", "clip", "clip without tags"])
def test_what_no_sync_left_on_one_rank_meets_the_backward_of_another_in_any_call(end: str) -> None:
    run_ranks(2, _check_ends, end)


def _check_unmet(rank: int) -> None:
    model = _net()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01), stage=2) as optimizer:
        with optimizer.no_sync():
            _backward(model, rank)
        with pytest.raises(DivergedError, match=r"0: safe_get_full_fp32_param.*rank 1: ZeroOptimizer\.step\(\) at"):
            (lambda: safe_get_full_fp32_param(model[0].weight), optimizer.step)[rank]()


def test_a_step_that_reduces_what_no_sync_left_and_meets_none_is_named() -> None:
    run_ranks(2, _check_unmet)


def _check_members(rank: int) -> None:
    model = _net()
    params = list(model.parameters())
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.1}]
    if rank:
        groups = [{"params": params[2:]}, {"params": params[:2], "lr": 0.1}]
    adam = torch.optim.AdamW(groups, lr=0.01)
    with pytest.raises(
        ConfigError, match=r"the parameter group of '0\.bias' is 0 on rank 0 and 1 on rank 1; .*'0\.weight"
    ):
        ZeroOptimizer(model, adam, stage=3)
    groups = [{"params": params[::-1] if rank else params}]
    with zero_optimizer(model, torch.optim.AdamW(groups, lr=0.01), stage=3) as optimizer:  # any order in a group
        _step(model, optimizer, rank)


def test_members_of_parameter_groups_are_compared() -> None:
    run_ranks(2, _check_members)
