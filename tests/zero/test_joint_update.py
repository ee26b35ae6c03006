"""Matrices that a node's ranks update together with Muon: beside one process; balance; errors on one rank."""

# covers zero/_step/joint_update.py

from __future__ import annotations

import copy
import itertools
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import zcomm
import zero
from tests.ranks import run_ranks, topology
from tests.zero.models import as_vector
from tests.zero.test_delta_hpz import EXACT
from tests.zero.training import full_values
from zcomm import StateError
from zero import load_checkpoint, save_checkpoint
from zero._model import model_layout
from zero._sharding import placement
from zero._step import joint_update

WIDTH, STEPS = 64, 4
TALL_TOLERANCE = 1e-6 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 5e-3
"""One process iterates on the transposed view of a tall matrix, ranks on a copy by rows. Without AVX-512 torch may
round the bfloat16 product x @ x.T of the two differently. A master was seen to differ by 7e-4."""
CPU: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
SCALED: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 1000}}
"""By a power of two, so unscaling is exact."""


def _model() -> nn.Sequential:
    """Four square matrices, a tall one and a wide one."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False))


def _optimizers(
    model: nn.Module, cls: type[Optimizer] = Muon, adam: type[Optimizer] = AdamW, **options: Any
) -> list[Optimizer]:
    params = list(model.parameters())
    return [
        cls([p for p in params if p.ndim == 2], lr=0.02, weight_decay=0.1, **options),
        adam([p for p in params if p.ndim != 2], lr=1e-3, weight_decay=0.01),
    ]


@contextmanager
def _sharing(num: int) -> Any:
    """Every node shares so many matrices, if it has them."""

    def place(tensors: list[placement.PlacedTensor], num_nodes: int, per_node: int) -> list[tuple[int, int | None]]:
        places = placement.place(tensors, num_nodes, per_node)
        of_nodes = [[i for i, (of, _) in enumerate(places) if of == node] for node in range(num_nodes)]
        for node, alike in enumerate(placement._alike(tensors, of_nodes) if per_node > 1 else ()):
            for index in alike[:num]:
                places[index] = (node, None)
        return places

    with mock.patch.object(model_layout, "place", place):
        yield


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def _step(model: nn.Module, optimizer: Any, step: int, rank: int) -> None:
    _loss(model, step, rank).backward()
    optimizer.step()
    optimizer.zero_grad()


def _num_joint(optimizer: zero.ZeroOptimizer) -> int:
    return sum(len(bucket.layout.joint_slots) for bucket in optimizer.parts.runtime.buckets)


def _check_gradients(rank: int, cls: type[Optimizer], per_node: int, options: dict[str, Any], steps: int) -> None:
    """Fed the gradients of the ranks, one process gives the same parameters to 1e-6, tall ones to TALL_TOLERANCE.

    That process is the first rank: the others have its bits.
    """
    plain, model = _model().half().float() if "fp16" in options else _model(), _model()
    options = dict(options)
    of_muon, adam = options.pop("muon", {}), options.pop("adam", AdamW)
    optimizers = _optimizers(plain, cls, **of_muon)
    with _sharing(2):
        given = _optimizers(model, cls, adam, **of_muon)
        optimizer = zero.ZeroOptimizer(model, given, topology=topology(per_node), **options)
    assert _num_joint(optimizer) > 0
    assert "are updated by the ranks of a node together, each of which sends" in str(optimizer.effective)
    for step in range(steps):
        optimizer.scale(_loss(model, step, rank)).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            theirs.grad = zero.utils.safe_get_full_grad(ours) / (2**10 if "fp16" in options else 1)
        optimizer.step()
        optimizer.zero_grad()
        for one in optimizers if rank == 0 else ():
            one.step()
        masters = [zero.utils.safe_get_full_fp32_param(param) for param in model.parameters()]
        got, values = as_vector(masters), full_values(model).values()
        rounded = as_vector([one.to(value.dtype) for one, value in zip(masters, values, strict=True)])
        assert (as_vector(values) - rounded).abs().max() < 1e-6, f"step {step}: parameters are not the rounded masters"
        for master, param in zip(masters, plain.parameters(), strict=True) if rank == 0 else ():
            tolerance = TALL_TOLERANCE if param.ndim == 2 and param.shape[0] > param.shape[1] else 1e-6
            assert (difference := (master - param).abs().max()) < tolerance, (step, param.shape, difference)
        of_ranks = zcomm.control.gather_float64(got, optimizer.topology)
        assert (of_ranks == of_ranks[0]).all(), f"step {step}: ranks differ"
    momentum = zero.utils.safe_get_full_optimizer_state(model[4].weight, "momentum_buffer")
    of_ranks = zcomm.control.gather_float64(as_vector([momentum]), optimizer.topology)
    assert (of_ranks == of_ranks[0]).all(), "momentum differs"
    if rank == 0:
        assert (momentum - optimizers[0].state[plain[4].weight]["momentum_buffer"]).abs().max() < 1e-6
    optimizer.close()


@pytest.mark.parametrize("cls", [Muon, zero.Muon])
@pytest.mark.parametrize(
    "options",
    [
        *({"stage": stage} for stage in (1, 2, 3)),
        {"stage": 3, "stage3_param_persistence_threshold": 0},
        {"stage": 3, "mode": "delta_hpz", **EXACT},
        {"stage": 2, "mode": "delta", "weight_format": "none"},
    ],
)
def test_on_the_gradients_of_the_ranks(cls: type[Optimizer], options: dict[str, Any]) -> None:
    run_ranks(4, _check_gradients, cls, 2, options, 20 if options == {"stage": 2} else 5)


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 2, "muon": {"nesterov": False}, **SCALED},
        {"stage": 2, "adam": zero.CPUAdam, **SCALED},  # zero's own beside it: unscaling is a factor of the update
        {"stage": 1, **CPU, **SCALED},
        {"stage": 2, **CPU, "zero_force_ds_cpu_optimizer": False},
        {"stage": 3, **CPU, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0},
        {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.4}},
        {"stage": 3, "mode": "delta_hpz", **EXACT, **CPU},
    ],
    ids=["scaled", "CPUAdam", "host scaled", "host AdamW", "host parameters", "host in part", "host delta-hpz"],
)
def test_scaled_and_with_states_in_host_memory(options: dict[str, Any]) -> None:
    run_ranks(4, _check_gradients, Muon, 2, options, 5)


@pytest.mark.parametrize(("world_size", "per_node"), [(2, 2), (4, 4)])
def test_on_one_node(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_gradients, Muon, per_node, {"stage": 2}, 5)


def _check_narrow(rank: int, stage: int) -> None:
    """16-bit parameters are the rounded masters, at first and after a step."""
    model = _model().bfloat16()
    with _sharing(2):
        optimizer = zero.ZeroOptimizer(model, _optimizers(model), topology=topology(2), stage=stage)
    assert _num_joint(optimizer) > 0
    for step in range(2):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, values in full_values(model).items():
            master = zero.utils.safe_get_full_fp32_param(model.get_parameter(name))
            assert torch.equal(values, master.bfloat16()), (step, name)
    optimizer.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_16_bit_parameters(stage: int) -> None:
    run_ranks(4, _check_narrow, stage)


def _check_where(rank: int, folder: str) -> None:
    """Not with states in files or delayed updates, another optimizer, one rank in a node, or no need."""
    for options, cls, per_node in (
        ({"offload_optimizer": {"device": "nvme", "nvme_path": folder}}, Muon, 2),
        ({**CPU, "delayed_update": True, "delay_start": 0}, Muon, 2),
        ({}, type("Other", (Muon,), {"zero_updates": "tensors"}), 2),
        ({}, Muon, 1),
    ):
        model = _model()
        with _sharing(2):
            optimizer = zero.ZeroOptimizer(
                model, _optimizers(model, cls), topology=topology(per_node), stage=2, **options
            )
        assert _num_joint(optimizer) == 0
        _step(model, optimizer, 0, rank)
        optimizer.close()
    model = _model()
    optimizer = zero.ZeroOptimizer(model, _optimizers(model), topology=topology(2), stage=2)
    assert _num_joint(optimizer) == 0, "a placement of whole matrices is balanced"
    optimizer.close()


def test_where_matrices_are_updated_together(tmp_path: Path) -> None:
    run_ranks(4, _check_where, str(tmp_path))


def _check_bytes(rank: int) -> None:
    """Nothing more between nodes; inside it what ``effective`` says."""
    sent = []
    for num in (0, 2):
        model = _model()
        with _sharing(num):
            optimizer = zero.ZeroOptimizer(model, _optimizers(model), topology=topology(2), stage=2)
        _step(model, optimizer, 0, rank)
        with zcomm.traffic() as counts:
            _step(model, optimizer, 1, rank)
        own = torch.tensor([float(counts.bytes(link="inter")), float(counts.bytes(link="intra"))])
        sent.append(zcomm.control.gather_float64(own, optimizer.topology).sum(0))
        text = str(optimizer.effective)
        optimizer.close()
    assert sent[1][0] <= 1.01 * sent[0][0]
    stated = int(text.split("each of which sends ")[1].split(" bytes")[0].replace(",", ""))
    joint = sent[1][1] - sent[0][1]
    assert abs(joint - 4 * stated) < 0.1 * sent[0][1] + 0.01 * joint, (joint, stated)


def test_bytes() -> None:
    run_ranks(4, _check_bytes)


def _everything(model: nn.Module) -> Tensor:
    momenta = [zero.utils.safe_get_full_optimizer_state(p, "momentum_buffer") for p in model.parameters()]
    return as_vector([*full_values(model).values(), *(values for values in momenta if values is not None)])


def _check_checkpoints(rank: int, folder: str) -> None:
    """Saved with matrices that are updated together, loaded without, and back."""
    for before, shared_before, after, shared_after in ((2, 2, 3, 0), (3, 0, 1, 2), (1, 2, 0, 0), (3, 2, 3, 1)):
        model = _model()
        with _sharing(shared_before):
            place = CPU if before == 3 else {}
            optimizer = zero.ZeroOptimizer(model, _optimizers(model), topology=topology(2), stage=before, **place)
        for step in range(2):
            _step(model, optimizer, step, rank)
        expected = _everything(model)
        save_checkpoint(optimizer, folder, f"{before}{after}")
        state = copy.deepcopy(optimizer.state_dict())
        _step(model, optimizer, 2, rank)
        optimizer.load_state_dict(state)
        assert torch.equal(_everything(model), expected), (before, "of the ranks")
        optimizer.close()
        model = _model()
        with _sharing(shared_after):
            optimizer = zero.ZeroOptimizer(model, _optimizers(model), topology=topology(4), stage=after)
        assert (_num_joint(optimizer) > 0) is (shared_after > 0)
        load_checkpoint(optimizer, folder, f"{before}{after}")
        assert torch.equal(_everything(model), expected), (before, after)
        _step(model, optimizer, 3, rank)
        optimizer.close()


def test_checkpoints(tmp_path: Path) -> None:
    run_ranks(4, _check_checkpoints, str(tmp_path))


def _check_unused(rank: int) -> None:
    """A matrix that no rank has used in a step is left alone, together with its momentum."""
    model = _model()
    with _sharing(2):
        optimizer = zero.ZeroOptimizer(model, _optimizers(model), topology=topology(2), stage=2)
    _step(model, optimizer, 0, rank)
    before = full_values(model)
    layers = list(model)
    for used in (layers[:2], layers[2:3], layers):
        x = torch.randn(2, WIDTH)
        for layer in used:
            x = layer(x)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after = full_values(model)
        for number, layer in enumerate(layers):
            is_same = torch.equal(before[f"{number}.weight"], after[f"{number}.weight"])
            assert is_same is (layer not in used), number
        before = after
    optimizer.close()


def test_unused() -> None:
    run_ranks(4, _check_unused)


class _NoMemoryAt(TorchDispatchMode):
    """The allocation of this number fails, of those of 1,000 bytes or more; torch's own, on this thread."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left < 0:  # it has failed
            return func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in pytree.tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage().nbytes() >= 1000:
                self.left -= made.untyped_storage().data_ptr() not in given
        if self.left < 0:
            raise MemoryError("no memory")
        return result


def _check_error(rank: int, options: dict[str, Any]) -> None:
    """Whichever allocation fails on one rank: its error on all, and no rank waits; no further steps."""
    run = joint_update.JointUpdate.run
    for number in range(50):
        model = _model()
        with _sharing(2):
            optimizer = zero.ZeroOptimizer(model, _optimizers(model), topology=topology(2), stage=2, **options)
        _loss(model, 0, rank).backward()
        fails = _NoMemoryAt(number)

        def run_and_fail(self: joint_update.JointUpdate, factor: float, fails: _NoMemoryAt = fails) -> None:
            with fails if rank == 1 else nullcontext():
                run(self, factor)

        error: Exception | None = None
        with mock.patch.object(joint_update.JointUpdate, "run", run_and_fail):
            try:
                optimizer.step()
            except (MemoryError, StateError) as failure:
                error = failure
        has_failed = zcomm.control.gather_float64(torch.tensor([float(fails.left < 0)]), optimizer.topology)[1]
        assert (error is None) is not bool(has_failed), (number, error)
        if error is None:
            optimizer.close()
            assert number > 6
            return
        assert "no memory" in str(error), (number, error)
        assert rank == 1 or "rank 1" in str(error), (number, error)
        with pytest.raises(StateError, match=r"an earlier step failed"):
            optimizer.step()
        optimizer.close()
    raise AssertionError("every number has failed")


@pytest.mark.parametrize("options", [{}, CPU], ids=["device", "host"])
def test_an_error_on_one_rank_is_raised_on_all(options: dict[str, Any]) -> None:
    run_ranks(4, _check_error, options)


def test_every_node_shares_alike() -> None:
    """With ZCOMM_CHECK=1 an exchange inside a node waits for an equal one of the other nodes."""
    total = 0
    for nodes, ranks in itertools.product((1, 2, 3), (2, 4)):
        for num in range(1, 3 * nodes * ranks):
            sides = [(), (20, 50), (25, 40)]
            tensors = [placement.PlacedTensor(0, 1000, 1000.0, sides[i % 3]) for i in range(num)]
            places = placement.place(tensors, nodes, ranks)
            shared = [
                sorted(one.divisible for one, place in zip(tensors, places, strict=True) if place == (node, None))
                for node in range(nodes)
            ]
            assert all(of_node == shared[0] for of_node in shared), shared
            assert () not in shared[0]
            total += len(shared[0])
    assert total > 20
