"""When deltas are sent: each bucket's as soon as it is updated, with the bits of updating all before sending any."""

# covers zero/_gather/gather_sources.py zero/_step/bucketwise_update.py

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.ranks import run_ranks
from tests.zero.deltas import check_nodes_agree, replicas_of, residuals_of
from tests.zero.training import assert_same_bits, train, zero_optimizer
from zcomm import StateError, ZcommError
from zero._modes.delta_hpz import Replica
from zero._step import bucketwise_update
from zero._step.bucketwise_update import BucketwiseUpdate

MODE: dict[str, Any] = {"stage": 3, "mode": "delta_hpz", "changes": "quantized", "ranks_per_node": 1}
ELEMENTWISE = (
    "Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip


class OwnAdam(torch.optim.AdamW):
    """An optimizer class that the library does not know."""


class Small(nn.Module):
    """Three units; a rank has several parameters of two of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(37, 24)
        self.layers = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 37)])

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x.tanh())
        return x


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups that do not follow the buckets."""
    params = list(model.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 3e-3}]


def _trained(rank: int, optimizer_class: Any, *, early: bool, run_numel: int = 1, **options: Any) -> dict[str, Tensor]:
    model = Small().bfloat16()
    inner = optimizer_class(_groups(model), lr=1e-2)
    if inner.state:  # made before the first step
        inner, options = optimizer_class, {"lr": 1e-2}
    patch = pytest.MonkeyPatch()
    patch.setattr(bucketwise_update, "RUN_NUMEL", run_numel)
    if not early:
        patch.setattr(BucketwiseUpdate, "are_sent_early", False)
    with zero_optimizer(model, inner, **MODE, **options) as optimizer:
        torch.optim.lr_scheduler.StepLR(optimizer.parts.inner, 1)  # wraps step()
        train(model, optimizer, rank, steps=2, max_norm=0.5)
        check_nodes_agree(optimizer)
        masters = torch.cat([values.flatten() for _, _, values in optimizer.master_pieces()])
        found = {"masters": masters, "replicas": replicas_of(optimizer), "residuals": residuals_of(optimizer)}
    patch.undo()
    return found


def _check_bits(rank: int) -> None:
    on_host = {"offload_optimizer": {"device": "cpu"}}
    classes = [(getattr(torch.optim, name), {}) for name in ELEMENTWISE]
    for optimizer_class, options in (*classes, (zero.CPUAdam, {}), (torch.optim.SGD, on_host)):
        early = _trained(rank, optimizer_class, early=True, **options)
        assert_same_bits(early, _trained(rank, optimizer_class, early=False, **options))
    for optimizer_class in (torch.optim.AdamW, zero.CPUAdam):
        together = _trained(rank, optimizer_class, early=True, run_numel=bucketwise_update.RUN_NUMEL)
        assert_same_bits(together, _trained(rank, optimizer_class, early=False))


def test_every_bucket_by_itself_gives_the_same_bits() -> None:
    run_ranks(2, _check_bits)


def _events(rank: int, optimizer_class: Any, patch: pytest.MonkeyPatch, hook: Any = None) -> tuple[list[str], str]:
    """The events of two steps in order, and the text of ``effective``."""
    events: list[str] = []
    step, send = bucketwise_update.step_pieces, Replica.send_change

    def step_pieces(inner: Any, pieces: Any, *rest: Any) -> None:
        events.append(f"update {pieces[0].bucket.index}")
        step(inner, pieces, *rest)

    def send_change(self: Replica) -> None:
        events.append(f"send {self._bucket.index}")
        send(self)

    patch.setattr(bucketwise_update, "step_pieces", step_pieces)
    patch.setattr(Replica, "send_change", send_change)
    model = Small().bfloat16()
    inner = optimizer_class(_groups(model), lr=1e-2)
    with zero_optimizer(model, inner, **MODE) as optimizer:
        if hook is not None:
            inner.register_step_post_hook(hook)
        train(model, optimizer, rank, steps=1)
        described = str(optimizer.effective)
    patch.setattr(bucketwise_update, "step_pieces", step)
    patch.setattr(Replica, "send_change", send)
    return events, described


@pytest.mark.parametrize(
    ("numels", "expected"),
    [
        ([], []),
        ([3, 4, 3, 1, 9], [[3, 4, 3], [1, 9]]),
        ([1, 99, 1, 1], [[1], [99], [1, 1]]),
        ([10, 10, 99, 99], [[10], [10], [99], [99]]),
    ],
)
def test_no_bucket_waits_for_more_than_a_run(numels: list[int], expected: list[list[int]]) -> None:
    buckets: Any = [SimpleNamespace(layout=SimpleNamespace(shard_numel=numel)) for numel in numels]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucketwise_update, "RUN_NUMEL", 10)
        runs = bucketwise_update._runs_of(buckets)
    assert [[bucket.layout.shard_numel for bucket in run] for run in runs] == expected


def _check_order(rank: int) -> None:
    patch, calls = pytest.MonkeyPatch(), list[int]()
    together, _ = _events(rank, torch.optim.AdamW, patch)
    assert together == ["update 0", "send 0", "send 1", "send 2"], "small ones are updated together"
    patch.setattr(bucketwise_update, "RUN_NUMEL", 1)
    early, described = _events(rank, torch.optim.AdamW, patch)
    assert early == ["update 0", "send 0", "update 1", "send 1", "update 2", "send 2"]
    assert "the change of a bucket is sent while the next is updated" in described
    sends = ["send 0", "send 1", "send 2"]
    events, described = _events(rank, OwnAdam, patch)
    assert events == sends
    assert "changes are sent after all updates (OwnAdam is not known to" in described
    events, _ = _events(rank, torch.optim.AdamW, patch, lambda *_: calls.append(1))
    assert (events, len(calls)) == (["update 0", *sends], 1), "a hook sees one step"
    patch.undo()


def test_a_change_is_sent_before_the_next_update() -> None:
    run_ranks(2, _check_order)


def _check_failure(rank: int) -> None:
    """One rank fails in the middle of its updates: no rank may wait for a delta that is never sent."""
    patch = pytest.MonkeyPatch()
    patch.setattr(bucketwise_update, "RUN_NUMEL", 1)
    for options, is_told in (({"offload_optimizer": {"device": "cpu"}}, True), ({}, rank == 1)):
        model = Small().bfloat16()
        inner = zero.CPUAdam(_groups(model), lr=1e-2)
        with zero_optimizer(model, inner, **options, **MODE) as optimizer:
            train(model, optimizer, rank, steps=1)
            call, count = inner.step_tensor_, [0]

            def breaks(*args: Any, call: Any = call, count: list[int] = count, **options: Any) -> None:
                count[0] += 1
                if rank == 1 and count[0] == 2:
                    raise MemoryError("none is left")
                call(*args, **options)

            inner.step_tensor_ = breaks
            with pytest.raises((MemoryError, ZcommError), match="none is left") if is_told else nullcontext():
                train(model, optimizer, rank, steps=1)
            check_nodes_agree(optimizer)
            del inner.step_tensor_
            with pytest.raises(StateError, match=r"construct it again.*none is left") if is_told else nullcontext():
                optimizer.step()
    patch.undo()


def test_a_rank_that_fails_between_two_changes() -> None:
    run_ranks(2, _check_failure)
