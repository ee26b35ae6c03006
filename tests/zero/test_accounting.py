"""The bytes that the optimizer sends and the memory that it holds equal the theory's."""

# covers zcomm/control.py zero/_storage/gradient_store.py

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import zcomm
from tests.ranks import run_ranks
from tests.zero.training import zero_optimizer
from zcomm import control
from zero import model_state_nbytes

WIDTH, DEPTH = 256, 3


def _wide_model(dtype: torch.dtype) -> nn.Module:
    """Large enough that padding to 256 elements per parameter is below one percent."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(DEPTH)]
    return nn.Sequential(*layers).to(dtype)


def _step(model: nn.Module, optimizer: Any, rank: int) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank)).to(next(model.parameters()).dtype)
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _check_elements(rank: int, stage: int, world_size: int, ranks_per_node: int) -> None:
    model = _wide_model(torch.float32)
    with zero_optimizer(
        model, torch.optim.AdamW(model.parameters()), stage=stage, ranks_per_node=ranks_per_node,
        stage3_max_reuse_distance=0,
    ) as optimizer:  # fmt: skip
        _step(model, optimizer, rank)
        with zcomm.traffic() as sent:
            _step(model, optimizer, rank)
    elements = sent.elements() - sent.elements(operation="control")
    one_way = _numel(model) * (world_size - 1) / world_size
    expected = (3 if stage == 3 else 2) * one_way
    if ranks_per_node not in (1, world_size):  # two hops send (L - 1)N + (N - 1) shards instead of W - 1
        nodes = world_size // ranks_per_node
        expected *= ((ranks_per_node - 1) * nodes + nodes - 1) / (world_size - 1)
    assert expected <= elements <= 1.01 * expected


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(2, 2), (3, 3), (4, 1), (4, 2)])
def test_elements_sent_per_step(stage: int, world_size: int, ranks_per_node: int) -> None:
    run_ranks(world_size, _check_elements, stage, world_size, ranks_per_node)


DOCUMENT = Path(__file__).parents[2] / "docs" / "optimizer.md"


def _documented(text: str) -> dict[int, dict[torch.dtype, int]]:
    """The bytes that the documentation says a rank sends for one parameter, by stage and dtype."""
    rows = [[cell.strip().removeprefix("at most ") for cell in line.split("|")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == 9 and row[5] in ("2P", "3P")]
    of = {torch.bfloat16: 6, torch.float32: 7}
    return {int(row[1]): {dtype: int(row[column].removesuffix("P")) for dtype, column in of.items()} for row in rows}


def _check_bytes(rank: int, stage: int, expected: dict[torch.dtype, int]) -> None:
    for dtype, of_parameter in expected.items():
        model = _wide_model(dtype)
        with zero_optimizer(
            model, torch.optim.AdamW(model.parameters()), stage=stage, ranks_per_node=2, stage3_max_reuse_distance=0
        ) as optimizer:
            _step(model, optimizer, rank)
            with zcomm.traffic() as sent:
                _step(model, optimizer, rank)
        nbytes = sent.bytes() - sent.bytes(operation="control")
        assert of_parameter <= nbytes / (_numel(model) / 2) <= 1.01 * of_parameter, dtype


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_sent_are_those_of_the_document(stage: int) -> None:
    documented = _documented(DOCUMENT.read_text())
    assert sorted(documented) == [0, 1, 2, 3]
    run_ranks(2, _check_bytes, stage, documented[stage])


def _check_inter_node_bytes(rank: int, num_micro: int) -> None:
    units = {}
    for name, switches in (
        ("plain", {"stage3_max_reuse_distance": 0}),
        ("ZeRO++", {"quantized_weights": True, "quantized_gradients": True, "hpz_partition_size": 2}),
    ):
        model = _wide_model(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters())
        with zero_optimizer(model, optimizer, stage=3, ranks_per_node=2, **switches) as wrapped:
            _step(model, wrapped, rank)
            with zcomm.traffic() as sent:
                _step(model, wrapped, rank)
            loss = model(torch.randn(4, WIDTH, dtype=torch.bfloat16)).float().square().mean()
            with zcomm.traffic() as backward:
                loss.backward()
            if name == "ZeRO++":
                gathers = [k for k, _ in backward if k.operation in ("all_gather", "secondary_gather")]
                assert gathers, "backward gathers its parameters again"
                assert all(key.link == "intra" for key in gathers)
            t = wrapped.topology
            model_bytes = sent.bytes(link="inter") - sent.bytes(link="inter", operation="control")
            of_ranks = control.gather_float64(torch.tensor([float(model_bytes)]), t)
            units[name] = of_ranks.sum().item() / (t.num_nodes - 1) / (2 * _numel(model))
    assert 2.99 <= units["plain"] <= 3.03
    assert units["ZeRO++"] <= 0.26 * 3.0
    assert num_micro == 1


def test_inter_node_bytes_of_zeropp() -> None:
    run_ranks(4, _check_inter_node_bytes, 1)


def _has_no_storage(tensor: Tensor) -> bool:
    """torch.compile leaves fake tensors behind, which take no memory; other tests may leave sparse ones."""
    if isinstance(tensor, FakeTensor) or torch._is_functional_tensor(tensor) or tensor.device.type == "meta":
        return True
    return tensor.layout is not torch.strided


def _storages_of(tensors: list[Tensor]) -> dict[int, int]:
    with torch._C.DisableTorchFunctionSubclass():  # released parameters raise when their storage is read
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not _has_no_storage(t)}


def _all_tensors() -> list[Tensor]:
    gc.collect()
    found = []
    for thing in gc.get_objects():
        if type(thing).__name__ != "weakproxy" and issubclass(type(thing), Tensor):
            found.append(thing)
    return found


def _check_memory(rank: int, stage: int, grad_nbytes: int, world_size: int) -> None:
    """Sum all new storages in this process, found by the garbage collector, not by the library's own accounting."""
    before = _storages_of(_all_tensors())
    model = _wide_model(torch.bfloat16)
    numel = _numel(model)
    dtype = torch.float32 if grad_nbytes == 4 else torch.bfloat16
    optimizer = torch.optim.AdamW(model.parameters())
    with zero_optimizer(model, optimizer, stage=stage, gradient_dtype=dtype) as wrapped:
        for _ in range(2):
            _step(model, wrapped, rank)
        after = {k: v for k, v in _storages_of(_all_tensors()).items() if k not in before}
        report = wrapped.memory()
        expected = model_state_nbytes(numel, stage, world_size, gradient_nbytes=grad_nbytes)
        held = sum(after.values()) - sum(report.buffers.values())
        assert abs(held - expected) <= 0.05 * expected, (held, expected)
        assert abs(report.model_states - expected) <= 0.05 * expected
        assert report.formula == pytest.approx(expected)
        assert report.unreduced_gradients == 0
        by_hand = {
            0: 2 + grad_nbytes + 12,
            1: 2 + grad_nbytes + 12 / world_size,
            2: 2 + (grad_nbytes + 12) / world_size,
            3: (2 + grad_nbytes + 12) / world_size,
        }
        assert expected == pytest.approx(numel * by_hand[stage])


@pytest.mark.parametrize("grad_nbytes", [4, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_memory_is_what_the_theory_says(stage: int, grad_nbytes: int, world_size: int) -> None:
    run_ranks(world_size, _check_memory, stage, grad_nbytes, world_size)


def _check_summed_gradients(rank: int) -> None:
    for stage in (0, 1):
        model = _wide_model(torch.bfloat16)
        before = _storages_of(_all_tensors())
        with zero_optimizer(model, torch.optim.AdamW(model.parameters()), stage=stage) as wrapped:
            _step(model, wrapped, rank)
            held = []
            for _ in range(3):
                model(torch.ones(4, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
                after = {k: v for k, v in _storages_of(_all_tensors()).items() if k not in before}
                held.append(sum(after.values()) - sum(wrapped.memory().buffers.values()))
        assert max(held) <= 1.01 * held[0], held


def test_backwards_that_are_summed_up_hold_no_more_than_one() -> None:
    """Each backward is reduced into the sum: a copy of the previous sum beside it would show as more memory."""
    run_ranks(2, _check_summed_gradients)


def _check_exact_masters(rank: int) -> None:
    """With quantized float32 weights, forward reads rounded values, and the optimizer updates exact masters."""
    before = _storages_of(_all_tensors())
    model = _wide_model(torch.float32)
    options = {"stage": 1, "quantized_weights": True}
    with zero_optimizer(model, torch.optim.AdamW(model.parameters()), **options) as wrapped:
        _step(model, wrapped, rank)
        report = wrapped.memory()
        after = {k: v for k, v in _storages_of(_all_tensors()).items() if k not in before}
        expected = _numel(model) * (4 + 4 + 12 / 2)
        assert sum(after.values()) - sum(report.buffers.values()) == pytest.approx(expected, rel=0.05)
        assert report.formula == pytest.approx(expected)


def test_exact_masters_are_counted() -> None:
    run_ranks(2, _check_exact_masters)


def _exchanges_of_a_step(rank: int, **options: Any) -> tuple[int, int]:
    model = _wide_model(torch.float32)  # 3 units of some 263,000 elements
    with zero_optimizer(model, torch.optim.AdamW(model.parameters()), **options) as wrapped:
        _step(model, wrapped, rank)
        with zcomm.traffic() as sent:
            _step(model, wrapped, rank)
    return sent.calls(operation="reduce_scatter"), sent.calls(operation="all_gather")


def _check_exchanges(rank: int) -> None:
    for stage in (1, 2):
        assert _exchanges_of_a_step(rank, stage=stage) == (1, 1), "small units travel together"
        assert _exchanges_of_a_step(rank, stage=stage, reduce_bucket_size=300_000) == (3, 3)
        reductions, gathers = _exchanges_of_a_step(rank, stage=stage, reduce_bucket_size=100_000)
        assert reductions == 3 * 3, "each unit in thirds"
        assert gathers == 3
    assert _exchanges_of_a_step(rank, stage=3) == (3, 5), "the last unit stays from forward to backward"
    apart = _exchanges_of_a_step(rank, stage=3, stage3_max_reuse_distance=0)
    assert apart == (3, 6), "a unit is gathered for forward and for backward"


def test_bucket_sizes_say_what_an_exchange_carries() -> None:
    run_ranks(2, _check_exchanges)


def _check_names(rank: int) -> None:
    for stage in (0, 1, 2, 3):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        options = {"stage": stage, "reduce_bucket_size": 1}  # each layer separately
        with zero_optimizer(model, torch.optim.AdamW(model.parameters()), ranks_per_node=2, **options) as wrapped:
            model(torch.ones(2, 8)).sum().backward()
            reductions = [f for f in zcomm.flight_record(wrapped.topology.companion) if f.operation == "all_to_all"]
        assert [flight.bucket for flight in reductions[-4:]] == ["3", "2", "1", "0"], "modules, as backward comes by"


def test_a_reduction_in_the_flight_record_names_its_module() -> None:
    run_ranks(2, _check_names)


def _check_no_sync_memory(rank: int) -> None:
    model = _wide_model(torch.bfloat16)
    with zero_optimizer(model, torch.optim.AdamW(model.parameters()), stage=3) as wrapped:
        with wrapped.no_sync():
            model(torch.randn(4, WIDTH, dtype=torch.bfloat16)).float().sum().backward()
        assert wrapped.memory().unreduced_gradients >= 4 * _numel(model)
        _step(model, wrapped, rank)
        assert wrapped.memory().unreduced_gradients == 0


def test_no_sync_reports_what_it_holds() -> None:
    run_ranks(2, _check_no_sync_memory)
