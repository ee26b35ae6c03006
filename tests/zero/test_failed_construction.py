"""A failed construction raises on every rank, restores the model, and leaves nothing allocated."""

# covers zero/_runtime/initial_values.py

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks, topology
from tests.zero.models import batch, loss_of, new_model
from tests.zero.training import assert_same_bits, train, zero_optimizer
from zcomm import ConfigError, LayoutError, StateError, TopologyError
from zero import ZeroOptimizer, initialize
from zero._gather.hooks import Hooks
from zero._runtime.write_back import WriteBack
from zero._sharding.bucket import Bucket


class FailingSGD(torch.optim.SGD):
    """Fails on all ranks but rank 0, and only after the elementwise check."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        if torch.distributed.get_rank() and any(frame.function == "build_updater" for frame in inspect.stack()):
            raise OSError("disk full")


def _check_failing_close(rank: int, folder: str) -> None:
    """A part that fails to close hides neither the cause nor the other parts' files."""
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    broken = (
        mock.patch.object(Hooks, "install", side_effect=OSError("no hooks")),
        mock.patch.object(WriteBack, "close", side_effect=RuntimeError("in flight")),
    )
    with broken[0], broken[1], pytest.raises(OSError, match="no hooks"):
        ZeroOptimizer(new_model(), torch.optim.AdamW, ranks_per_node=2, stage=2, **offload)
    torch.distributed.barrier()
    assert [path.name for path in Path(folder).rglob("*") if path.is_file()] == []


def test_files_of_a_failed_construction_go_even_if_a_part_cannot_close(tmp_path: Path) -> None:
    run_ranks(2, _check_failing_close, str(tmp_path))


def _num_groups() -> int:
    return len(torch.distributed.distributed_c10d._world.pg_names)


def _frozen() -> nn.Module:
    return new_model().requires_grad_(False)


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return new_model()


def _with_integers() -> nn.Module:
    model = new_model()
    model.codes = nn.Parameter(torch.arange(5), requires_grad=False)
    return model


class NoParameters(nn.Module):
    """Raises an exception of a class that is not the library's, as another library's module may."""

    def named_modules(self, *_: Any, **__: Any) -> Any:
        return super().named_modules(self.missing)


LOCAL: dict[str, tuple[type[Exception], str, Callable[[], nn.Module], dict[str, Any]]] = {
    "nothing to train": (ConfigError, "none of them trainable", _frozen, {}),
    "on meta": (LayoutError, "is on meta", _on_meta, {}),
    "integers": (LayoutError, r"'codes' is torch\.int64", _with_integers, {}),
    "misspelt": (ConfigError, "did you mean 'quantized_weights'", new_model, {"quantised_weights": True}),
    "partition": (TopologyError, "hpz_partition_size=7", new_model, {"hpz_partition_size": 7}),
    "another's": (StateError, "rank 1: AttributeError: .*no attribute|no attribute", NoParameters, {}),
}


def _check_local_error(rank: int, name: str) -> None:
    error, text, build, options = LOCAL[name]
    model = build() if rank == 1 else new_model()
    expected = AttributeError if name == "another's" and rank == 1 else error
    with pytest.raises(expected, match=text if rank == 1 else f"rank 1: .*({text})"):
        ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=3, topology=topology(3), **(options if rank == 1 else {}))


@pytest.mark.parametrize("name", LOCAL)
def test_an_error_on_one_rank_is_raised_on_all(name: str) -> None:
    run_ranks(3, _check_local_error, name)


def _check_late_error(rank: int, stage: int) -> None:
    model, plain = new_model(), new_model()
    groups = _num_groups()
    with pytest.raises(OSError if rank else StateError, match="disk full"):
        ZeroOptimizer(model, FailingSGD, lr=0.1, stage=stage, ranks_per_node=1)
    assert _num_groups() == groups
    assert_same_bits(dict(model.named_parameters()), dict(plain.named_parameters()))
    loss_of(copy.deepcopy(model), *batch(0, 0, 0)).backward()
    with zero_optimizer(model, stage=stage) as optimizer:
        train(model, optimizer, rank, steps=1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_model_is_left_as_it_was(stage: int) -> None:
    run_ranks(2, _check_late_error, stage)


def _check_no_group_left(rank: int) -> None:
    groups = _num_groups()
    with pytest.raises(ConfigError, match="stage=9"):
        ZeroOptimizer(new_model(), torch.optim.SGD, lr=0.1, stage=9, ranks_per_node=2)
    with pytest.raises(LayoutError, match="must be the same on every rank"):
        ZeroOptimizer(nn.Linear(2 + rank, 2), torch.optim.SGD, lr=0.1, ranks_per_node=2)
    assert _num_groups() == groups


def test_no_process_group_is_left() -> None:
    run_ranks(2, _check_no_group_left)


def _check_load_of_another_layout(rank: int) -> None:
    model = new_model()
    with zero_optimizer(model, stage=1) as optimizer:
        saved = copy.deepcopy(optimizer.state_dict())
        if rank == 1:
            saved["layout"]["world_size"] = 5
        with pytest.raises(LayoutError, match="world_size: saved 5, here 2"):
            optimizer.load_state_dict(saved)
        train(model, optimizer, rank, steps=1)


def test_a_shard_that_does_not_fit_one_rank_is_refused_on_all() -> None:
    run_ranks(2, _check_load_of_another_layout)


class OutOfMemoryError(RuntimeError):
    """Raised as a device's own error."""


def _check_out_of_memory(rank: int) -> None:
    """One rank runs out of memory after it has divided two buckets, at any of three places."""
    for stage, method in ((3, "flatten"), (3, "partition"), (1, "partition")):
        model, plain = new_model(), new_model()
        whole, calls = getattr(Bucket, method), []

        def limited(bucket: Bucket, *args: Any, _whole: Any = whole, _calls: list[int] = calls, **options: Any) -> Any:
            _calls.append(bucket.index)
            if len(_calls) == 3 - (stage == 1) * 2 and rank == 1:  # noqa: B023
                raise OutOfMemoryError("tried to allocate 20 GiB")
            return _whole(bucket, *args, **options)

        groups = _num_groups()
        with (
            mock.patch.object(Bucket, method, limited),
            pytest.raises(OutOfMemoryError if rank == 1 else StateError, match="20 GiB") as error,
        ):
            ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=stage, ranks_per_node=1)
        assert rank == 1 or "rank 1: OutOfMemoryError" in str(error.value)
        assert _num_groups() == groups
        assert_same_bits(dict(model.named_parameters()), dict(plain.named_parameters()))
        with zero_optimizer(model, stage=stage) as optimizer:
            train(model, optimizer, rank, steps=1)


def test_memory_that_runs_out_on_one_rank() -> None:
    run_ranks(2, _check_out_of_memory)


def _fails_on_rank_1(_: Any) -> Any:
    if torch.distributed.get_rank() == 1:
        raise OSError("no such file")
    return torch.optim.SGD(_, lr=0.1) if isinstance(_, list) else torch.optim.lr_scheduler.StepLR(_, 1)


def _check_initialize(rank: int) -> None:
    config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    broken: list[tuple[str, dict[str, Any]]] = [
        ("no such file", {"config": config, "optimizer": _fails_on_rank_1}),
        ("no such file", {"config": config, "lr_scheduler": _fails_on_rank_1}),
        ("did you mean 'stage'", {"config": {**config, "zero_optimization": {"stag" if rank else "stage": 3}}}),
    ]
    for text, options in broken:
        model = new_model()
        groups = _num_groups()
        with pytest.raises((OSError, ConfigError) if rank else (StateError, ConfigError), match=text) as error:
            initialize(model=model, **options)
        assert rank or "rank 1: " in str(error.value)
        assert _num_groups() == groups
        assert_same_bits(dict(model.named_parameters()), dict(new_model().named_parameters()))


def test_initialize_fails_on_every_rank() -> None:
    run_ranks(2, _check_initialize)
