"""A rank that alone leaves the recorded order: one named error on every rank within seconds."""

# covers zero/_ranks/distributed.py

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcomm
from tests.ranks import run_ranks, topology
from tests.zero.test_order_check import WRONG, Layers
from tests.zero.training import assert_same_bits, full_values, zero_optimizer
from zcomm import DivergedError, control
from zcomm._transport.deadlock_watch import DeadlockWatch
from zcomm._transport.work import Steps
from zero import GatheredParameters, ZeroOptimizer

FIRST = r"parameter 'layers\.0\.weight' \(6, 6\) and 1 more of module 'layers\.0'"
LEAVES = {
    "skips a layer": r"rank 1: gathers parameter 'layers\.2\.weight' .* in forward, use 1 of training, where the "
    r"recorded order has parameter 'layers\.1\.weight' .* of module 'layers\.1'",
    "skips the last layer": r"rank 1: gathers .*'layers\.2\.weight'.* in backward, use 3 of training, where .* has .*"
    r"'layers\.3\.weight'",
    "skips a layer in backward": r"rank 1: has reached the end of backward, use 7 of training, where .* has " + FIRST,
}


def _step(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _raises_soon(message: str, call: Callable[[], object]) -> None:
    """``call`` must raise, and all ranks must get there within 10 seconds and be able to continue."""
    start = time.perf_counter()
    with pytest.raises(DivergedError, match=message):
        call()
    assert time.perf_counter() - start < 10


@contextmanager
def _watched(ranks_per_node: int, period_s: float) -> Iterator[DeadlockWatch]:
    """Make the deadlock watch of this pool's topology sample more often; later tests use the same topology."""
    watch = topology(ranks_per_node).watch
    watch.period_s, usual = period_s, watch.period_s
    try:
        yield watch
    finally:
        watch.period_s = usual


def _check_leaving(rank: int, options: dict[str, Any]) -> None:
    """Rank 1 leaves the order in several ways, one after the other; all ranks train in between."""
    torch.manual_seed(0)
    model = Layers()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"stage3_param_persistence_threshold": 0, "ranks_per_node": dist.get_world_size()} | options
    with zero_optimizer(model, sgd, stage=3, **options) as optimizer, _watched(options["ranks_per_node"], 0.1):
        for name, message in LEAVES.items():
            _step(model, optimizer)
            _step(model, optimizer)
            before = full_values(model)
            if rank == 1:
                vars(model).update(WRONG[name][0])
            _raises_soon(f"every rank must run the same modules.*{message}", lambda: _step(model, optimizer))
            vars(model).update(order=(0, 1, 2, 3), cuts_graph=False)
            optimizer.zero_grad()
            assert_same_bits(full_values(model), before)
        _step(model, optimizer)
        assert all(value.isfinite().all() for value in full_values(model).values())


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {}),
        (2, {"stage3_max_live_parameters": 1, "overlap_comm": False}),
        (4, {"ranks_per_node": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True}),
    ],
    ids=["prefetching", "one by one", "two hops, quantized"],
)
def test_a_rank_that_leaves_alone_is_a_named_error_on_all(world_size: int, options: dict[str, Any]) -> None:
    run_ranks(world_size, _check_leaving, options)


def _check_other_modes(rank: int) -> None:
    """One rank evaluates while the others train, ends a step early, or fails while it holds full parameters."""
    torch.manual_seed(0)
    model = Layers()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    with zero_optimizer(model, sgd, stage=3) as optimizer, _watched(2, 0.1):
        _step(model, optimizer)
        _step(model, optimizer)
        with torch.no_grad():
            model(torch.ones(2, 6))
        _step(model, optimizer)

        def trains_or_evaluates() -> None:
            with torch.no_grad() if rank else nullcontext():
                loss = model(torch.ones(2, 6)).sum()
            loss.backward()

        _raises_soon(f"rank 1: gathers {FIRST} in forward, use 0 of inference", trains_or_evaluates)
        optimizer.zero_grad()
        _step(model, optimizer)

        def accumulates_or_goes_on() -> None:
            model(torch.ones(2, 6)).sum().backward()
            if rank == 0:
                model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            _step(model, optimizer)

        _raises_soon(f"rank 0: gathers {FIRST} in forward, use 9 of training, where .* ends", accumulates_or_goes_on)
        optimizer.zero_grad()
        _step(model, optimizer)

        def fails_holding_parameters() -> None:
            with GatheredParameters(model.layers[0].weight):
                if rank == 1:
                    raise ValueError("of rank 1 alone")
                model(torch.ones(2, 6)).sum().backward()

        error = r"rank 1: has raised ValueError inside zero\.GatheredParameters: of rank 1 alone"
        _raises_soon(error, fails_holding_parameters)
        optimizer.zero_grad()
        _step(model, optimizer)


def test_ranks_in_different_phases_are_a_named_error_on_all() -> None:
    run_ranks(2, _check_other_modes)


def _check_slow_rank(rank: int) -> None:
    """A straggler is never taken for a diverged rank, however long the others wait."""
    torch.manual_seed(0)
    model = Layers()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    with zero_optimizer(model, sgd, stage=3) as optimizer, _watched(2, 0.02) as watch:
        found = watch.num_deadlocks
        for step in range(3):
            for late in range(2):
                if rank == late:
                    time.sleep(0.2)
                _step(model, optimizer)
            if step == 1:
                model.order = (0, 1, 3)
        assert watch.num_deadlocks == found


def test_a_late_rank_is_waited_for() -> None:
    run_ranks(2, _check_slow_rank)


def _sleeps() -> Steps:
    time.sleep(0.5)
    yield None


def _check_busy_thread(rank: int) -> None:
    """Rank 1 waits for its own thread, which computes before an exchange that the others wait for."""
    t = topology(2)
    with _watched(2, 0.02) as watch:
        found = watch.num_deadlocks
        for _ in range(2):
            if rank == 1:
                t.queue.submit(_sleeps())
            gathered = torch.empty(4)
            work = zcomm.all_gather_single(gathered, torch.full((1,), float(rank)), t, async_op=True)
            assert work is not None
            work.wait()
            assert gathered.tolist() == [0, 1, 2, 3]
        assert watch.num_deadlocks == found


def test_a_rank_whose_thread_computes_is_waited_for() -> None:
    run_ranks(4, _check_busy_thread)


def _check_reused_ident(rank: int) -> None:
    """A thread gathers and ends; a new thread gets its ident and computes on: the watch must tell them apart."""
    t, end = topology(2), threading.Event()

    def gathers() -> None:
        zcomm.all_gather_single(torch.empty(2), torch.full((1,), float(rank)), t)

    def computes() -> None:
        while not end.is_set():
            time.sleep(0.001)

    def gathers_otherwise() -> None:
        if rank == 0:
            gathers()
        else:
            control.broadcast_(torch.ones(1), 0, t)

    try:
        gone = threading.Thread(target=gathers)
        gone.start()
        gone.join()
        threads = [gone]
        while threads[-1].ident != gone.ident or len(threads) == 1:
            assert len(threads) < 100, "no new thread gets the ident of one that has ended"
            threads.append(threading.Thread(target=computes, daemon=True))
            threads[-1].start()
        with _watched(2, 0.1):
            _raises_soon("the ranks make different calls", gathers_otherwise)
    finally:
        end.set()


def test_an_ident_that_a_thread_leaves_behind_is_nobodys() -> None:
    run_ranks(2, _check_reused_ident)
