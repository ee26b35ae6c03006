"""Stages 1 and 2 with Muon: new parameters of a bucket are gathered while the next is updated, with the same bits."""

# covers zero/_runtime/write_back.py zero/_step/bucketwise_update.py zero/_step/update.py

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

import zcomm
import zero
from tests.ranks import run_ranks, topology
from tests.zero.models import as_vector, batch, loss_of, new_model
from tests.zero.test_joint_update import _sharing
from tests.zero.training import assert_same_bits, full_values, train, zero_optimizer
from tests.zero.whole_optimizers import WideMuon, matrices_and_others, steps_in_turn
from zcomm import StateError
from zero._runtime import write_back
from zero._step import bucketwise_update
from zero._step.bucketwise_update import BucketwiseUpdate
from zero.utils import safe_get_full_fp32_param, safe_set_full_grad

SMALL = {"reduce_bucket_size": 2000}
"""Buckets of stages 1 and 2 are layers."""
CPU: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}}
LINE = "the new parameters of a bucket are sent while the next is updated"


def _muon(model: nn.Module, cls: Any = Muon) -> list[Optimizer]:
    matrices, others = matrices_and_others(model)
    return [cls(matrices, lr=0.02, weight_decay=0.1), AdamW(others, lr=3e-3)]


def _zeros_muon(model: nn.Module) -> list[Optimizer]:
    return _muon(model, zero.Muon)


def _adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)]


@contextmanager
def _one_by_one(*, early: bool = True) -> Iterator[pytest.MonkeyPatch]:
    """Every bucket is a run; ``early`` False: all updates come before all gathers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucketwise_update, "RUN_NUMEL", 1)
        if not early:
            patch.setattr(BucketwiseUpdate, "are_sent_early", False)
        yield patch


def _edit(model: nn.Module) -> None:
    """What users do between backward and step, the same on every rank."""
    params = dict(model.named_parameters())
    weight = params["blocks.0.mlp.0.weight"]
    weight.grad = torch.ones(weight.shape)
    params["norm.weight"].grad = None
    other = params["blocks.2.mlp.2.weight"]
    before = zero.utils.safe_get_full_grad(other)
    assert before is not None
    safe_set_full_grad(other, before * 2)


def _trained(rank: int, build: Callable[[nn.Module], Any], given: dict[str, Any], *, early: bool) -> dict[str, Tensor]:
    options = SMALL | given
    dtype, edits = options.pop("dtype", torch.float32), options.pop("edits", False)
    loop = {name: options.pop(name) for name in ("num_micro", "max_norm", "uses_no_sync") if name in options}
    model = new_model(dtype, has_unused=True)
    with _one_by_one(early=early), zero_optimizer(model, build(model), ranks_per_node=2, **options) as optimizer:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps step()
        train(model, optimizer, rank, steps=2, **loop)
        if edits:
            loss_of(model, *batch(9, 0, rank)).backward()
            _edit(model)
            optimizer.step()
            optimizer.zero_grad()
            train(model, optimizer, rank, steps=1)
        values = full_values(model)
        digests = zcomm.control.gather_float64(as_vector(values.values()), optimizer.topology)
        assert (digests == digests[0]).all(), f"ranks differ: {options}"
        masters = {f"master of {name}": safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
        return values | {name: value for name, value in masters.items() if value is not None}


CASES: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16},
    {"max_norm": 0.5, "num_micro": 2},
    {"gradient_clipping": 0.5, "dtype": torch.bfloat16, "uses_no_sync": True, "num_micro": 2},
    {"edits": True},
    {"overlap_comm": False, "allgather_bucket_size": 500},
    {"gradient_clipping": 0.5, **FP16},
    {"dtype": torch.bfloat16, **CPU, "edits": True},
]


def _check_bits(rank: int, stage: int, build: Callable[[nn.Module], Any]) -> None:
    for options in (case | {"stage": stage} for case in CASES):
        early, late = (_trained(rank, build, options, early=early) for early in (True, False))
        assert_same_bits(early, late)


@pytest.mark.parametrize(("stage", "build"), [(1, _zeros_muon), (2, _muon), (2, _adamw), (3, _muon)])
def test_the_same_bits_as_updating_all_before(stage: int, build: Callable[[nn.Module], Any]) -> None:
    run_ranks(4, _check_bits, stage, build)


def _check_other_ways(rank: int, folder: str) -> None:
    """Encoded parameters, states in files, delayed updates, and matrices that the ranks of a node update together."""
    files = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    in_part = {"offload_optimizer": {"device": "cpu", "ratio": 0.4}}
    for options in ({"zero_quantized_weights": True}, files, in_part, {**CPU, "delayed_update": True}):
        case = {"stage": 2, "dtype": torch.bfloat16, **options}
        early, late = (_trained(rank, _muon, case, early=early) for early in (True, False))
        assert_same_bits(early, late)
    with _sharing(2):
        early, late = (_trained(rank, _muon, {"stage": 1}, early=early) for early in (True, False))
    assert_same_bits(early, late)


def test_the_same_bits_with_other_settings(tmp_path: Path) -> None:
    run_ranks(4, _check_other_ways, str(tmp_path))


def _events(rank: int, build: Callable[[nn.Module], Any], *, hook: Any = None, **options: Any) -> tuple[list[str], str]:
    """The updates and gathers of one step, in order, and the text of ``effective``."""
    events: list[str] = []
    step, gather = bucketwise_update.step_pieces, write_back.start_gather

    def step_pieces(inner: Any, pieces: Any, *rest: Any) -> None:
        events.append(f"update {pieces[0].bucket.index}")
        step(inner, pieces, *rest)

    def start_gather(bucket: Any, *rest: Any) -> Any:
        events.append(f"gather {bucket.index}")
        return gather(bucket, *rest)

    model = new_model()
    given = build(model)
    with _one_by_one() as patch, zero_optimizer(model, given, ranks_per_node=1, **SMALL, **options) as optimizer:
        if hook is not None:
            given[0].register_step_post_hook(hook)
        loss_of(model, *batch(0, 0, rank)).backward()
        patch.setattr(bucketwise_update, "step_pieces", step_pieces)
        patch.setattr(write_back, "start_gather", start_gather)
        optimizer.step()
        described = str(optimizer.effective)
    return events, described


def _check_order(rank: int) -> None:
    for stage in (1, 2):
        events, described = _events(rank, _muon, stage=stage)
        gathers = [event for event in events if event.startswith("gather")]
        assert events != gathers, "this rank updates something"
        assert gathers == [f"gather {index}" for index in range(len(gathers))]
        for number, event in enumerate(events):
            if event.startswith("update"):
                assert events[number + 1] == event.replace("update", "gather"), events
        assert LINE in described
        calls: list[int] = []
        late, _ = _events(rank, _muon, stage=stage, hook=lambda *_, calls=calls: calls.append(1))
        assert (late[0][:6], late[1:], len(calls)) == ("update", gathers, 1), "a hook sees one step"
        for build in (_adamw, lambda model: _muon(model, WideMuon)):
            late, described = _events(rank, build, stage=stage)
            assert late == gathers, "a short update, and one that is not known: as one"
            assert LINE not in described


def test_a_bucket_is_sent_before_the_next_update() -> None:
    run_ranks(2, _check_order)


def _check_hook_of_one_rank(rank: int, hooked: int) -> None:
    calls: list[int] = []
    for options in ({"stage": 1}, {"stage": 2, "overlap_comm": False}, {"stage": 2, **CPU}):
        calls.clear()
        hook = (lambda *_: calls.append(1)) if rank == hooked else None
        events, _ = _events(rank, _muon, hook=hook, **options)
        assert sum(event.startswith("update") for event in events) == 1 or rank != hooked
        assert len(calls) == (rank == hooked)


@pytest.mark.parametrize("hooked", [0, 1])
def test_a_hook_of_one_rank_makes_no_other_wait(hooked: int) -> None:
    run_ranks(2, _check_hook_of_one_rank, hooked)


def _check_hook_without_pieces(rank: int) -> None:
    """One matrix, so one rank has nothing to update: a hook that communicates must run on it, too."""
    torch.manual_seed(0)
    model, calls = nn.Linear(4, 4, bias=False), list[int]()
    given = Muon(model.parameters(), lr=0.1)
    with zero_optimizer(model, given, ranks_per_node=1, stage=2) as optimizer:
        given.register_step_post_hook(lambda *_: calls.append(1))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert len(calls) == 1


def test_a_hook_runs_on_a_rank_without_pieces() -> None:
    run_ranks(2, _check_hook_without_pieces)


def _host_adam_beside_muon(model: nn.Module) -> list[Optimizer]:
    matrices, others = matrices_and_others(model)
    return [zero.CPUAdam(others, lr=3e-3), Muon(matrices, lr=0.02)]


def _check_hook_of_a_fused_one(rank: int) -> None:
    calls: list[int] = []
    _events(rank, _host_adam_beside_muon, hook=lambda *_: calls.append(1), stage=2, **CPU)
    assert len(calls) == 1


def test_a_hook_of_zeros_own_beside_muon_sees_one_step() -> None:
    run_ranks(2, _check_hook_of_a_fused_one)


def _check_no_rank_waits(rank: int, folder: str, slow: int) -> None:
    """Rank ``slow`` begins its first update after all others have ended their last: none may need its parameters."""
    calls, step_in_turn = steps_in_turn(rank, folder, slow)
    model = new_model(torch.bfloat16)
    with _one_by_one() as patch, zero_optimizer(model, _muon(model), ranks_per_node=2, stage=2, **SMALL) as optimizer:
        patch.setattr(BucketwiseUpdate, "_step", step_in_turn)
        train(model, optimizer, rank, steps=1)
        digests = zcomm.control.gather_float64(as_vector(full_values(model).values()), optimizer.topology)
        assert (digests == digests[0]).all()
    assert len(calls) > 2


@pytest.mark.parametrize("slow", [0, 3])
def test_no_rank_waits_for_anothers_update(slow: int, tmp_path: Path) -> None:
    run_ranks(4, _check_no_rank_waits, str(tmp_path), slow)


def _fail_in_update(rank: int, per_node: int, options: dict[str, Any], number: int) -> None:
    model, step, calls = new_model(torch.bfloat16), BucketwiseUpdate._step, list[int]()

    def breaks(self: BucketwiseUpdate, *arguments: Any) -> None:
        step(self, *arguments)
        calls.append(1)
        if rank == 1 and len(calls) > number:
            raise MemoryError("none is left")

    with _one_by_one() as patch, zero_optimizer(model, _muon(model), ranks_per_node=per_node, **options) as optimizer:
        train(model, optimizer, rank, steps=1)
        loss_of(model, *batch(1, 0, rank)).backward()
        patch.setattr(BucketwiseUpdate, "_step", breaks)
        with pytest.raises(MemoryError if rank == 1 else StateError, match="none is left") as caught:
            optimizer.step()
        assert rank == 1 or "rank 1: MemoryError" in str(caught.value)
        patch.setattr(BucketwiseUpdate, "_step", step)
        held = torch.cat([param.detach().double().flatten() for param in model.parameters()])
        digests = zcomm.control.gather_float64(held, topology(per_node))
        assert (digests == digests[0]).all(), "ranks differ"
        with pytest.raises(StateError, match=r"construct it again.*none is left"):
            optimizer.step()


def _check_failure(rank: int, per_node: int) -> None:
    """One rank fails in an update: its error on all, no rank waits, all hold the same, and no further steps."""
    for options in ({"stage": 1}, {"stage": 2, **CPU}):
        for number in range(3):
            _fail_in_update(rank, per_node, SMALL | options, number)


@pytest.mark.parametrize(("world_size", "per_node"), [(2, 2), (4, 2)])
def test_an_error_in_an_update_is_raised_on_all_ranks(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_failure, per_node)
