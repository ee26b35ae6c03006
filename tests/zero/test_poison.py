"""With ZERO_DEBUG=1 all freed memory is filled with NaN, and training has the same bits: nothing reads it any more."""

# covers zero/_activations/arena.py zero/_gradients/bucket_gradients.py zero/_gradients/reducer.py

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.ranks import run_ranks
from tests.variables import variables
from tests.zero.models import groups_of, new_model
from tests.zero.training import assert_same_bits, full_values, train, zero_optimizer
from zcomm import DivergedError, StateError, Work
from zero._activations.arena import Arena, ArenaSpan
from zero._gather.gatherer import Gatherer
from zero._gradients.bucket_gradients import BucketGrads
from zero._gradients.reducer import Reducer
from zero._sharding import buffer_pool
from zero._sharding.bucket import Bucket
from zero._sharding.buffer_pool import BufferPool, storage_of
from zero._storage import host_gradient, transfer_buffers
from zero._storage.host_gradient import HostGradient
from zero._storage.host_memory import HostMemory
from zero._storage.transfer_buffers import HostBuffers

PLACES = {"pool": buffer_pool, "files": transfer_buffers, "gradients": host_gradient}
PLUS = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
CPU = {"offload_optimizer": {"device": "cpu"}}
CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "stage 3": ({"stage": 3, "stage3_prefetch_bucket_size": 3000}, {"pool"}),
    "ZeRO++": ({"stage": 3, "zero_hpz_partition_size": 2, **PLUS}, {"pool"}),
    "part on the host": ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.6}}, {"pool", "gradients"}),
    "host": ({"stage": 3, **CPU, "offload_param": {"device": "cpu"}}, {"pool", "gradients"}),
    "delayed": ({"stage": 3, **CPU, "delayed_update": True, "delay_start": 1}, {"pool", "gradients"}),
    "files": (
        {
            "stage": 3,
            "sub_group_size": 1601,
            "offload_optimizer": {"device": "nvme", "pipeline_read": True, "pipeline_write": True},
            "offload_param": {"device": "nvme", "max_in_cpu": 0, "buffer_size": 600},
        },
        {"pool", "files"},
    ),
}
"""Options, and the memory that is freed and poisoned under them."""
SAME_BITS = ("part on the host", "host", "files")
"""As at stage 3 without offload."""


@contextmanager
def _debugging() -> Iterator[Counter[str]]:
    """Count how often each memory was poisoned."""
    counts = Counter[str]()
    with variables(ZERO_DEBUG="1"), pytest.MonkeyPatch.context() as patch:
        for name, module in PLACES.items():

            def counted(buffer: Tensor, _name: str = name, _poison: Any = module.poison) -> None:
                counts[_name] += 1
                _poison(buffer)

            patch.setattr(module, "poison", counted)
        yield counts


def _options(case: str, folder: str) -> dict[str, Any]:
    options = dict(CASES[case][0])
    for key in ("offload_optimizer", "offload_param"):
        if options.get(key, {}).get("device") == "nvme":
            options[key] = options[key] | {"nvme_path": folder}
    return {"reduce_bucket_size": 3000, "allgather_bucket_size": 3000, "gradient_clipping": 0.5} | options


def _train(rank: int, case: str, folder: str) -> dict[str, Tensor]:
    model = new_model(torch.bfloat16)
    optimizer = zero.CPUAdam(groups_of(model), lr=1e-2)
    with zero_optimizer(model, optimizer, ranks_per_node=2, **_options(case, folder)) as wrapped:
        train(model, wrapped, rank, steps=2, num_micro=2)
        deadline = time.monotonic() + 10
        while wrapped.parts.runtime.pool.viewed() and time.monotonic() < deadline:
            time.sleep(0.01)  # threads of gloo hold tensors for a moment after their exchange has ended
        assert not wrapped.parts.runtime.pool.viewed(), "training keeps views of buffers"
        return full_values(model)


def _check_cases(rank: int, folder: str) -> None:
    at_stage_3 = _train(rank, "stage 3", folder)
    assert not any(value.isnan().any() for value in at_stage_3.values())
    for case, (_, places) in CASES.items():
        is_same = case in ("stage 3", *SAME_BITS)
        expected = at_stage_3 if is_same else _train(rank, case, folder)
        with _debugging() as counts:
            assert_same_bits(_train(rank, case, folder), expected)
        assert {name for name in places if counts[name]} == places, (case, counts)


def test_training_reads_nothing_that_was_given_back(tmp_path: Path) -> None:
    run_ranks(2, _check_cases, str(tmp_path))


def test_what_is_given_back_is_nan() -> None:
    cpu = torch.device("cpu")
    with _debugging():
        buffers = BufferPool(cpu)
        taken = buffers.take(100, torch.bfloat16).fill_(1)
        buffers.give(taken)
        assert taken.isnan().all()
        staged = HostBuffers()
        part = staged.take(4096).fill_(1)
        staged.give(part)
        assert all(part.view(dtype).isnan().all() for dtype in (torch.float32, torch.bfloat16, torch.float16))
        gradient = HostGradient(8, torch.bfloat16, torch.float32, HostMemory(cpu, pins=False))
        for _ in range(2):
            gradient.add(torch.ones(8))
        held = gradient.values()
        assert (held == 2).all()
        gradient.clear()
        assert held.isnan().all()
        inputs = Arena(1, cpu, is_pinned=False)
        ticket = inputs.start_checkpoint(64)
        assert ticket is not None
        slot = inputs.allocate(64, ticket)
        saved = inputs.view(ArenaSpan(0, 64)).fill_(1)
        del slot
        assert inputs.nbytes == 64  # frees what was dropped
        assert saved.view(torch.float32).isnan().all()
    taken = buffers.take(100, torch.bfloat16).fill_(1)
    buffers.give(taken)
    assert (taken == 1).all()


class _Exchange:
    """Completes when it is waited for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.has_ended = error, False

    def wait(self) -> None:
        self.has_ended = True
        if self.error is not None:
            raise self.error


def _works(*errors: Exception | None) -> list[Any]:
    return [_Exchange(error) for error in errors]


@pytest.mark.parametrize("numel", [100, 0])
def test_a_lent_buffer_stays_where_it_is(numel: int) -> None:
    buffers, works = BufferPool(torch.device("cpu")), _works(None)
    taken = buffers.take(numel, torch.float32)
    buffers.lend(works, taken)
    with pytest.raises(StateError, match=rf"given back while an exchange uses it.*{numel} elements of torch.float32"):
        buffers.give(taken)
    with pytest.raises(StateError, match="lent to an exchange while an exchange uses it"):
        buffers.lend(_works(None), taken)
    with pytest.raises(StateError, match="reclaimed only from the exchange it is lent to"):
        buffers.reclaim(list(works), taken)
    works.append(_Exchange())  # a gather starts its exchanges one by one
    buffers.reclaim(works, taken)
    assert all(work.has_ended for work in works)
    buffers.give(taken)
    for call in (buffers.give, lambda buffer: buffers.lend(works, buffer)):
        with pytest.raises(StateError, match=r"only between take\(\) and give\(\)"):
            call(taken)
    with pytest.raises(StateError, match="reclaimed only from"):
        buffers.reclaim(works, taken)
    assert storage_of(buffers.take(numel, torch.float32)) == storage_of(taken)


def test_buffers_without_elements_are_as_different_as_others() -> None:
    buffers = BufferPool(torch.device("cpu"))
    first, second = (buffers.take(0, torch.float64) for _ in range(2))
    buffers.set_aside(first, "the first")
    assert [each.of for each in buffers.viewed()] == ["the first"]
    buffers.give(second)
    assert storage_of(buffers.take(0, torch.float64)) == storage_of(second), "the first is viewed still"
    del first
    assert not buffers.viewed()


def test_a_buffer_of_a_failed_exchange_is_not_handed_out_before_all_have_ended() -> None:
    buffers, works = BufferPool(torch.device("cpu")), _works(DivergedError("another call"), None)
    taken = buffers.take(100, torch.float32)
    buffers.lend(works, taken)
    with pytest.raises(DivergedError, match="another call"):
        buffers.reclaim(works, taken)
    assert all(work.has_ended for work in works)
    assert buffers.take(100, torch.float32).data_ptr() == taken.data_ptr()
    works = _works(RuntimeError("connection lost"), None)
    buffers.lend(works, taken)
    with pytest.raises(RuntimeError, match="connection lost"):
        buffers.reclaim(works, taken)
    assert buffers.take(100, torch.float32).data_ptr() != taken.data_ptr()


def _reduced_early(patch: pytest.MonkeyPatch) -> None:
    issue = Reducer._issue

    def issue_and_give(self: Reducer, grads: BucketGrads) -> None:
        issue(self, grads)
        self._pool.give(self._in_flight[-1].borrowed[0])

    patch.setattr(Reducer, "_issue", issue_and_give)


def _given_when_lent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BufferPool, "lend", lambda self, _works, *buffers: [self.give(buffer) for buffer in buffers])


def _gathered_early(patch: pytest.MonkeyPatch) -> None:
    issue = Gatherer._issue

    def issue_and_give(self: Gatherer, bucket: Bucket, stop: int | None = None) -> None:
        issue(self, bucket, stop)
        if bucket.full is not None:
            self._pool.give(bucket.full)

    patch.setattr(Gatherer, "_issue", issue_and_give)


def _taken_for_granted(patch: pytest.MonkeyPatch) -> None:
    """Does not wait for the exchange."""

    def reclaim(self: BufferPool, _works: list[Work], *_buffers: Tensor) -> None:
        pass

    patch.setattr(BufferPool, "reclaim", reclaim)


MUTANTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    _reduced_early,
    _given_when_lent,
    _gathered_early,
    _taken_for_granted,
]


def _check_early_release_is_found(rank: int) -> None:
    for mutant in MUTANTS:
        model = new_model(torch.bfloat16)
        options = {"stage": 3, "reduce_bucket_size": 3000}
        optimizer = torch.optim.SGD(groups_of(model), lr=1e-2)
        with zero_optimizer(model, optimizer, **options) as wrapped, pytest.MonkeyPatch.context() as patch:
            mutant(patch)
            with pytest.raises(StateError, match=r"while an exchange uses it|reclaimed only|between take"):
                train(model, wrapped, rank, steps=1, num_micro=1)


def test_a_buffer_given_back_too_early_is_found() -> None:
    """Without any debug mode: on a CPU most exchanges have copied a buffer before they return, so no NaN would show."""
    run_ranks(2, _check_early_release_is_found)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["stage 3", "ZeRO++", "host", "delayed"])
def test_streams_read_nothing_that_was_given_back(case: str) -> None:
    """The current stream fills with NaN: another stream that has not finished reading would see it."""

    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to("cuda", torch.bfloat16)
        options = _options(case, "")
        options.pop("zero_hpz_partition_size", None)  # one process: the node has no second rank
        wrapped = zero.ZeroOptimizer(model, zero.CPUAdam(model.parameters()) if "offload_optimizer" in options else
                                     torch.optim.AdamW(model.parameters(), fused=True), **options)  # fmt: skip
        x = torch.randn(16, 512, device="cuda", dtype=torch.bfloat16)
        for _ in range(6):
            (model(x).square().mean()).backward()
            wrapped.step()
            wrapped.zero_grad()
        with zero.GatheredParameters(model.parameters()):
            values = [param.detach().cpu() for param in model.parameters()]
        wrapped.close()
        return values

    expected = trained()
    with _debugging() as counts:
        got = trained()
    assert counts["pool"]
    assert all(map(torch.equal, got, expected))
