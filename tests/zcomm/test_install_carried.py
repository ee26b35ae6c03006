"""State of the drop-ins across steps: residuals through DDP's new buckets, checkpoints, random numbers."""

# covers zcomm/install/carried_state.py zcomm/install/pieces.py zcomm/install/report.py

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zcomm
from tests.ranks import device_mesh, run_ranks, topology
from tests.zcomm.models import Given, batch, flat_grad, mlp
from tests.zcomm.travelled import travelled
from zcomm import ConfigError, FormatError, Recipe, Residual, StateError
from zcomm._residuals.grad_scaler import UserLossScale
from zcomm.install.pieces import PieceExchange
from zcomm.install.report import Installation

SIZES = {"a": 3001, "small": 10, "b": 2500, "c": 4099, "d": 2999}
"""The number of parameters: four with a residual and one too small for it."""
LOSSY = Recipe(gradients=("none", "int4"), reduced="none", residual=True)


def _given(rank: int, name: str, step: int = 0) -> Tensor:
    seed = 1000 * step + 100 * rank + sum(name.encode())
    return torch.randn(SIZES[name], generator=torch.Generator().manual_seed(seed)) * (rank + 1)


def _by_parameter(residuals: Iterable[tuple[Residual, Tensor]]) -> dict[str, Tensor]:
    """Each parameter's part of these residuals, summed over all ranks, by element."""
    total = {}
    for residual, values in residuals:
        layout = residual.layout
        full = torch.zeros(layout.world_size, layout.shard_numel)
        full[layout.rows_of(residual.route.local_rank)] = values
        dist.all_reduce(full)
        for key, first, numel, offset in layout.spans:
            name = key.removesuffix(".weight")
            total.setdefault(name, torch.zeros(SIZES[name]))[offset : offset + numel] = full.view(-1)[first:][:numel]
    return total


def _held(installed: Installation) -> dict[str, Tensor]:
    for residual in installed.residuals:
        residual.commit()
    return _by_parameter((residual, residual.values()) for residual in installed.residuals)


def _lost(names: list[str], ranks: int, per_node: int) -> dict[str, np.ndarray]:
    """What a bucket of parameters ``names`` has lost in its first exchange, by parameter: sums less what arrives.

    Rows of a bucket are as numbered by the drop-in: row l * N + n goes to rank l of node n. Every element is encoded
    once by each node's rank of its row.
    """
    flat = [np.concatenate([_given(rank, name).numpy() for name in names]) for rank in range(ranks)]
    numel = len(flat[0])
    n = -(-numel // ranks)
    lost = np.zeros(n * ranks, np.float32)
    for node in range(ranks // per_node):
        of_node = [np.pad(x, (0, n * ranks - numel)) for x in flat[node * per_node : (node + 1) * per_node]]
        sums = sum(of_node[1:], of_node[0])
        for row in range(ranks):
            part = slice(row * n, (row + 1) * n)
            lost[part] += sums[part] - travelled(sums[part], "int4")
    result, first = {}, 0
    for name in names:
        result[name] = lost[first : first + SIZES[name]]
        first += SIZES[name]
    return result


class _Watched:
    """A DDP model with residuals that records the residuals at the start of each exchange."""

    def __init__(self, rank: int, per_node: int, options: dict[str, Any]) -> None:
        self._inputs = {name: _given(rank, name) for name in SIZES}
        self._ddp = DistributedDataParallel(Given(SIZES), bucket_cap_mb=1e-6, **options)  # at last one a bucket
        self.installed = zcomm.install_ddp(self._ddp, LOSSY, topology=topology(per_node))
        (state,) = [state for _, state in self._ddp._comm_hooks]
        self.found: list[tuple[Residual, Tensor]] = []
        begin = state.compressed._start

        def look(buffer: Tensor, planned: list[PieceExchange]) -> Any:
            topology(per_node).queue.drain()
            self.found += [(one.residual, one.residual.values()) for one in planned if one.residual is not None]
            return begin(buffer, planned)

        state.compressed._start = look

    def exchange(self) -> None:
        self._ddp.zero_grad()
        self.found.clear()
        self._ddp(self._inputs).backward()

    def check_found(self, before: dict[str, Tensor]) -> None:
        """Check that the last exchange started from ``before``, up to the int8 encoding, on up to 4 ranks."""
        carried, largest = _by_parameter(self.found), max(float(values.abs().max()) for values in before.values())
        assert set(carried) == set("abcd")
        for name, values in carried.items():
            assert (values - before[name]).abs().max() <= 4 * largest / 127 / 2 * (1 + 2**-7), name
            assert (values - before[name]).norm() < 0.02 * before[name].norm(), name


def _check_new_buckets(rank: int, per_node: int, options: dict[str, Any]) -> None:
    watched = _Watched(rank, per_node, options)
    watched.exchange()
    (first,) = watched.found
    before = _held(watched.installed)
    names = [span.key.removesuffix(".weight") for span in first[0].layout.spans]
    watched.found = [(first[0], first[0].values())]
    watched.check_found({name: torch.from_numpy(lost) for name, lost in _lost(names, 4, per_node).items()})
    for _ in range(2):  # new buckets in the second step or, with a static graph, the third
        watched.exchange()
        watched.check_found(before)
        before = _held(watched.installed)
    assert len(watched.installed.residuals) == 4
    restarted = _Watched(rank, per_node, options)
    restarted.installed.load_state_dict(watched.installed.state_dict())
    restarted.exchange()
    assert len(restarted.installed.residuals) == 1
    restarted.check_found(before)


@pytest.mark.parametrize("per_node", [2, 1])
def test_residuals_survive_new_buckets_by_parameter(per_node: int) -> None:
    for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        run_ranks(4, _check_new_buckets, per_node, options)


def _check_other_parameters_train(rank: int, per_node: int, *, has_replicas: bool) -> None:
    model, found = Given({"a": 3000, "b": 2400}), []
    options: dict[str, Any] = {"topology": topology(per_node)}
    mesh = device_mesh((2, 2), ("replicate", "shard")) if has_replicas else None
    if mesh is not None:
        options = {"replicate_group": mesh["replicate"].get_group()}
    model.b.weight.requires_grad_(False)
    fully_shard(model, mesh=None if mesh is None else mesh["shard"])
    installed = zcomm.install_fsdp2(model, LOSSY, **options)
    begin = UserLossScale.begin_exchange

    def look(scaling: UserLossScale, residual: Residual, of: Any) -> None:
        begin(scaling, residual, of)
        found.append(residual)

    inputs, held = {name: _given(rank, name)[:numel] for name, numel in (("a", 3000), ("b", 2400))}, {}
    for trained in ("a", "a", "ab", "ab", "b", "a", "ab"):
        for name in "ab":
            model.get_submodule(name).weight.requires_grad_(name in trained)
        found.clear()
        with mock.patch.object(UserLossScale, "begin_exchange", look):
            model(inputs).backward()
        (residual,) = found
        columns = [{"a": 3000, "b": 2400}[name] // (2 if has_replicas else 4) for name in trained]
        for name, values in zip(
            trained, torch.split(residual.values().view(-1, sum(columns)), columns, 1), strict=True
        ):
            before = held.get(name, torch.zeros(()))
            assert (values - before).norm() <= 0.02 * before.norm(), (trained, name)
        residual.commit()
        parts = torch.split(residual.values().view(-1, sum(columns)), columns, 1)
        held |= dict(zip(trained, parts, strict=True))
        assert all(part.any() for part in parts)
        assert len(installed.residuals) == 1 or trained == "a", "a residual of parameters that another one has"


@pytest.mark.parametrize(("per_node", "has_replicas"), [(2, False), (1, False), (1, True)])
def test_residuals_follow_parameters_that_begin_or_end_to_train(per_node: int, has_replicas: bool) -> None:  # noqa: FBT001
    run_ranks(4, partial(_check_other_parameters_train, has_replicas=has_replicas), per_node)


def _check_unused(rank: int, options: dict[str, Any]) -> None:
    """Gradients of parameters that only some ranks use, summed over steps, against their exact mean."""
    model = Given(SIZES)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-6, **options)
    zcomm.install_ddp(ddp, LOSSY, topology=topology(2))
    of_rank = [["a", "c", "small"], ["a", "b"], ["a", "b", "c"], ["a", "small"]]
    uses_all = bool(options.get("static_graph"))
    total = {name: torch.zeros(numel) for name, numel in SIZES.items()}
    for _ in range(16):
        ddp.zero_grad()
        names = ["a", "b", "c", "small"] if uses_all else of_rank[rank]
        ddp({name: _given(rank, name) for name in names}).backward()
        for name in "abc":
            total[name] += model.get_submodule(name).weight.grad
        assert model.d.weight.grad is None or not model.d.weight.grad.any()
    for name in "abc":
        exact = sum(_given(r, name) for r in range(4) if uses_all or name in of_rank[r]) / 4
        assert (total[name] / 16 - exact).norm() < 0.02 * exact.norm(), name  # int4 alone: 0.1


@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}], ids=["static", "find"])
def test_residuals_with_unused_parameters(options: dict[str, Any]) -> None:
    run_ranks(4, _check_unused, options)


# --- checkpoints


def _installed(kind: str, recipe: Recipe) -> tuple[nn.Module, Installation, Any]:
    if kind == "ddp":
        model = DistributedDataParallel(mlp(128), find_unused_parameters=True)  # which never has new buckets
        installed = zcomm.install_ddp(model, recipe, topology=topology(2))
    else:
        model = mlp(128)
        for module in model:
            if any(True for _ in module.parameters()):
                fully_shard(module)
        fully_shard(model)
        installed = zcomm.install_fsdp2(model, recipe, topology=topology(2))
    return model, installed, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> Tensor:
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in local])


def _check_checkpoint(rank: int, kind: str, wires: tuple[str, str], folder: str) -> None:
    recipe = Recipe(gradients=wires, residual=True, min_numel=500)
    model, installed, optimizer = _installed(kind, recipe)
    _train(model, optimizer, rank, range(3))
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "zcomm": installed.state_dict()}
    torch.save(checkpoint, f"{folder}/{rank}.pt")
    at_save = [residual.commit() or residual.state_dict() for residual in installed.residuals]
    assert all(state["codes"].any() for state in at_save)
    went_on = _train(model, optimizer, rank, range(3, 6))
    ended = [residual.commit() or residual.state_dict() for residual in installed.residuals]

    saved = torch.load(f"{folder}/{rank}.pt", weights_only=kind == "ddp")  # DTensors need more
    assert torch.equal(saved["zcomm"]["residuals"][0]["codes"], at_save[0]["codes"])
    for has_residuals in (True, False):
        model, installed, optimizer = _installed(kind, recipe)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if has_residuals:
            installed.load_state_dict(saved["zcomm"])
            again = installed.state_dict()["residuals"]  # as saved, though no bucket has been seen
            assert [state["layout"] for state in again] == [state["layout"] for state in saved["zcomm"]["residuals"]]
        parameters = _train(model, optimizer, rank, range(3, 6))
        assert torch.equal(parameters, went_on) == has_residuals
        if has_residuals:
            for residual, expected in zip(installed.residuals, ended, strict=True):
                residual.commit()
                state = residual.state_dict()
                assert torch.equal(state["codes"], expected["codes"])
                assert torch.equal(state["scales"], expected["scales"])
                assert state["num_commits"] == expected["num_commits"]


@pytest.mark.parametrize("wires", [("int8", "nf4"), ("int4:stochastic", "int4:stochastic")], ids=["nf4", "stochastic"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.filterwarnings("ignore")
def test_a_restart_has_the_same_bits(kind: str, wires: tuple[str, str], tmp_path: Path) -> None:
    run_ranks(4, _check_checkpoint, kind, wires, str(tmp_path))


def _check_refused(rank: int) -> None:
    _, installed, _ = _installed("ddp", LOSSY)
    state = installed.state_dict()
    with pytest.raises(StateError, match=r"this rank's own: .*=\(7, 4\), loaded by"):
        installed.load_state_dict({**state, "rank": 7})
    model, trained, optimizer = _installed("ddp", LOSSY)
    _train(model, optimizer, rank, range(1))
    state = trained.state_dict()
    with pytest.raises(StateError, match=r"must come before the first backward: uninstall"):
        trained.load_state_dict(state)
    other = zcomm.install_ddp(DistributedDataParallel(Given({"a": 3000})), LOSSY, topology=topology(2))
    with pytest.raises(StateError, match=r"residuals of unknown parameters: 0\.weight, 2\.weight"):
        other.load_state_dict(state)


@pytest.mark.filterwarnings("ignore")
def test_a_state_that_cannot_be_meant_is_refused() -> None:
    run_ranks(4, _check_refused)


# --- random numbers


STOCHASTIC = Recipe(gradients=("int4:stochastic", "int4:stochastic"), reduced="none", seed=7)


def _check_every_exchange_draws_anew(rank: int) -> None:
    """With equal gradients the mean over steps converges to the exact one; rounding to nearest never would."""
    sizes, num_steps, errors = {"a": 5000, "b": 3001}, 32, []
    inputs = {name: float(_given(rank, "a")[0]) * torch.linspace(0, 1, numel) for name, numel in sizes.items()}
    ramps = torch.cat([torch.linspace(0, 1, numel) for numel in sizes.values()]).double()
    exact = ramps * sum(float(_given(r, "a")[0]) for r in range(4)) / 4
    for wire in ("int4", "int4:stochastic"):
        ddp = DistributedDataParallel(Given(sizes))
        zcomm.install_ddp(ddp, Recipe(gradients=(wire, wire), reduced="none"), topology=topology(2))
        total = torch.zeros_like(exact)
        for _ in range(num_steps):
            ddp.zero_grad()
            ddp(inputs).backward()
            total += flat_grad(ddp)
        errors.append(float((total / num_steps - exact).norm() / exact.norm()))
    assert errors[1] < errors[0] / 2


def _check_keys_are_as_documented(rank: int) -> None:
    """Exchange number i of an installation is all_reduce() with RandomKey(seed, 0, i), bit for bit."""
    ddp = DistributedDataParallel(Given({"a": SIZES["a"]}))
    installed = zcomm.install_ddp(ddp, STOCHASTIC, topology=topology(2))
    for step in range(3):
        assert installed.state_dict()["num_random"] == step
        ddp.zero_grad()
        ddp({"a": _given(rank, "a")}).backward()
        expected, key = _given(rank, "a"), zcomm.RandomKey(7, 0, step)
        wires = STOCHASTIC.wires()
        zcomm.all_reduce(expected, "avg", topology(2), format=wires.gradients, gather_format="none", random=key)
        assert torch.equal(flat_grad(ddp), expected)


def test_stochastic_gradients_draw_anew_every_time_by_documented_keys() -> None:
    run_ranks(4, _check_every_exchange_draws_anew)
    run_ranks(4, _check_keys_are_as_documented)


def _check_weights_are_not_random(rank: int) -> None:
    model = mlp(128)
    fully_shard(model)
    with pytest.raises(FormatError, match=r"module '\(root\)' gathers .*weights='int8:stochastic' rounds"):
        zcomm.install_fsdp2(model, Recipe(weights="int8:stochastic"), topology=topology(2))
    with pytest.raises(ConfigError, match="seed"):
        zcomm.install_fsdp2(model, Recipe(seed=-1), topology=topology(2))


def test_weights_that_would_differ_between_forward_and_backward_are_refused() -> None:
    run_ranks(4, _check_weights_are_not_random)
