"""Ranks load one checkpoint or none; an error of one rank while saving or loading is one error on all ranks."""

# covers zero/_checkpoint/dcp.py

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.ranks import run_ranks
from tests.zero.models import new_model
from tests.zero.test_checkpoint import assert_equal_bits, whole_state
from tests.zero.test_checkpoint_failures import _refuses
from tests.zero.training import full_values, train, zero_optimizer
from zcomm import StateError
from zero._checkpoint.dcp import FolderWriter


def _check_one_for_all(rank: int, folder: Path, stage: int) -> None:
    model = new_model()
    local = folder / f"disk{rank}"  # of a node
    with zero_optimizer(model, stage=stage) as optimizer:
        train(model, optimizer, rank, steps=1)
        zero.save_checkpoint(optimizer, folder, "a", client_state={"step": 1})
        train(model, optimizer, rank, steps=2)
        zero.save_checkpoint(optimizer, folder, "b", client_state={"step": 3})
        shutil.copytree(folder / "a", local / "a")
        shutil.copytree(folder / "b", local / "b")
        shutil.copytree(folder / ("b" if rank else "a"), local / "same name")
        (local / "latest").write_text("a" if rank else "b")
        saved = whole_state(optimizer, model)
        train(model, optimizer, rank, steps=1)
        before = whole_state(optimizer, model)

        def load(where: Path, tag: str | None, **options: Any) -> Any:
            return zero.load_checkpoint(optimizer, where, tag, **options)

        _refuses(
            rank, lambda: load(folder, "b" if rank else "a"), "every rank must ask for the same: tag is 'a' on rank 0"
        )
        _refuses(rank, lambda: load(folder, "b" if rank else None), "tag is None on rank 0")
        _refuses(
            rank,
            lambda: load(folder, "b", load_optimizer_states=rank == 0),
            "optimizer_states is True on rank 0 and False on rank 1",
        )
        words = ("every rank must load the same", f"{folder}/disk0/same name", f"{folder}/disk1/same name", "copy one")
        _refuses(rank, lambda: load(local, "same name"), *words)
        _refuses(rank, lambda: load(local, "same name", load_module_only=True), *words)
        if rank == 1:
            (local / "b").rename(local / "gone")
        _refuses(rank, lambda: load(local, None), "there is no checkpoint 'b'", "disk1")
        if rank == 1:
            (local / "gone").rename(local / "b")
        assert_equal_bits(whole_state(optimizer, model), before)
        assert load(local, None) == (local / "b", {"step": 3}), "what the first rank's latest names, on every rank"
        assert_equal_bits(whole_state(optimizer, model), saved)


@pytest.mark.parametrize(("world_size", "stage"), [(2, 1), (3, 3)])
def test_ranks_load_the_same_checkpoint_or_none(tmp_path: Path, world_size: int, stage: int) -> None:
    run_ranks(world_size, _check_one_for_all, tmp_path, stage)


def _check_one_file(rank: int, folder: Path) -> None:
    model = new_model()
    with zero_optimizer(model, stage=3) as optimizer:
        for step in range(2):
            train(model, optimizer, rank, steps=1)
            zero.checkpoints.save_model_file(optimizer, folder / f"step{step}" / "model.safetensors")
        saved = full_values(model)
        local = folder / f"disk{rank}"
        shutil.copytree(folder / f"step{rank}", local / "mixed")
        shutil.copytree(folder / "step1", local / "copied")
        train(model, optimizer, rank, steps=1)
        before = full_values(model)

        def load(name: str) -> None:
            zero.load_checkpoint(optimizer, local / name, load_module_only=True)

        _refuses(rank, lambda: load("mixed"), "every rank must load the same", "disk0/mixed", "disk1/mixed")
        if rank == 0:
            (local / "some").mkdir()
        _refuses(
            rank,
            lambda: load("some" if rank == 0 else "copied"),
            "every rank must load the same: the checkpoint is none",
        )
        assert all(torch.equal(value, before[name]) for name, value in full_values(model).items())
        load("copied")
        assert all(torch.equal(value, saved[name]) for name, value in full_values(model).items())


def test_ranks_load_the_same_weights_or_none(tmp_path: Path) -> None:
    run_ranks(2, _check_one_file, tmp_path)


def _check_invisible(rank: int, folder: Path) -> None:
    model = new_model()
    with zero_optimizer(model, stage=1) as optimizer, pytest.MonkeyPatch.context() as patch:
        construct = FolderWriter.__init__

        def on_own_disk(self: FolderWriter, path: Path, *args: Any, **kwargs: Any) -> None:
            construct(self, folder / f"disk{rank}" / path.name, *args, **kwargs)

        patch.setattr(FolderWriter, "__init__", on_own_disk)
        _refuses(
            rank,
            lambda: zero.save_checkpoint(optimizer, folder, "x"),
            "the first rank does not see",
            "that all ranks share",
        )
        assert not (folder / "disk0" / "latest").exists()


def test_a_folder_that_ranks_do_not_share_is_told_when_saving(tmp_path: Path) -> None:
    run_ranks(2, _check_invisible, tmp_path)


class Counter:
    """A user's object in ``stateful``; raises when asked to, after half of its work."""

    def __init__(self, count: int = 0) -> None:
        self.count, self.half, self.fails = count, count, ""

    def state_dict(self) -> dict[str, int]:
        if self.fails == "save":
            raise LookupError("nothing to give")
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.half = state["count"]
        if self.fails == "load":
            self.fails = ""
            raise LookupError("not mine")
        self.count = state["count"]


class WithExtra(nn.Module):
    """Has extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.extra = new_model(), Counter(7)

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)

    def get_extra_state(self) -> Any:
        return self.extra.state_dict()

    def set_extra_state(self, state: Any) -> None:
        self.extra.load_state_dict(state)


def _check_users_errors(rank: int, folder: Path, stage: int) -> None:
    model, first, second = WithExtra(), Counter(1), Counter(2)
    stateful = {"first": first, "second": second}
    with zero_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage) as optimizer:

        def save(tag: str, **options: Any) -> None:
            zero.save_checkpoint(optimizer, folder, tag, stateful=stateful, **options)

        train(model, optimizer, rank, steps=1)
        save("good")
        train(model, optimizer, rank, steps=1)
        before = whole_state(optimizer, model)
        for failing, title in ((first, "first"), (model.extra, "extra state of ''")):
            failing.fails = "save" if rank == 1 else ""
            for async_op in (False, True):
                _refuses(
                    rank,
                    lambda async_op=async_op: save("bad", async_op=async_op),
                    title,
                    "cannot be saved",
                    "nothing to give",
                )
            failing.fails = ""
        if rank == 1:
            _hold(optimizer)
        save("held by one rank")
        optimizer.zero_grad()
        assert not (folder / "bad").exists()
        first.count, second.count, model.extra.count = 11, 12, 17
        random.seed(rank)
        drawn = random.getstate()
        for failing, title in ((second, "state of 'second'"), (model.extra, "extra state of ''")):
            failing.fails = "load" if rank == 1 else ""
            _refuses(
                rank,
                lambda: zero.load_checkpoint(optimizer, folder, "good", stateful=stateful),
                f"the {title} cannot be loaded",
                "not mine",
                "model and optimizer are unchanged",
            )
            assert_equal_bits(whole_state(optimizer, model), before)
            assert (first.count, second.count, model.extra.count) == (11, 12, 17)
            assert (first.half, second.half, model.extra.half)[failing is second] != 1
            assert random.getstate() == drawn
        train(model, optimizer, rank, steps=1)
        zero.load_checkpoint(optimizer, folder, "good", stateful=stateful)
        assert (first.count, second.count, model.extra.count) == (1, 2, 7)
        save("in the background of one", async_op=rank == 1)
        assert zero.load_checkpoint(optimizer, folder, stateful=stateful).path == folder / "in the background of one"


def _hold(optimizer: zero.ZeroOptimizer) -> None:
    """Hold gradients as after a backward on this rank alone, in which the others would have to take part."""
    runtime = optimizer.parts.runtime
    runtime.reducer.accumulation.num_started = 1
    grads = runtime.reducer.all[0]
    grads.used[0], grads.bucket.params[0].grad = True, grads.stand_ins[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_an_object_that_raises_on_one_rank_stops_all_and_changes_nothing(tmp_path: Path, stage: int) -> None:
    run_ranks(2, _check_users_errors, tmp_path, stage)


def _check_inner(rank: int, folder: Path) -> None:
    """An error found after the optimizer was changed says so, and the optimizer is unusable on every rank."""
    model = new_model()
    with zero_optimizer(model, stage=1) as optimizer, pytest.MonkeyPatch.context() as patch:
        train(model, optimizer, rank, steps=1)
        zero.save_checkpoint(optimizer, folder, "good")

        def fail(*_: Any) -> None:
            raise LookupError("not these")

        if rank == 1:
            patch.setattr(optimizer.parts.inner, "load_state_dict", fail)
        _refuses(
            rank, lambda: zero.load_checkpoint(optimizer, folder), "not these", "construct model and optimizer anew"
        )
        with pytest.raises(StateError, match="construct it again"):
            train(model, optimizer, rank, steps=1)


def test_a_load_that_fails_half_way_ends_the_optimizer_on_every_rank(tmp_path: Path) -> None:
    run_ranks(2, _check_inner, tmp_path)


def test_generators_go_on_with_every_number(tmp_path: Path) -> None:
    """Python's generator makes normal numbers in pairs and keeps the second: it must be saved, too."""
    model = nn.Linear(2, 2)
    optimizer = zero.ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    random.gauss(0, 1)
    zero.save_checkpoint(optimizer, tmp_path, "x")
    expected = [random.gauss(0, 1) for _ in range(3)]
    zero.load_checkpoint(optimizer, tmp_path)
    assert [random.gauss(0, 1) for _ in range(3)] == expected
    optimizer.close()
