"""install_fsdp2 with replicas (HSDP): shards over one dimension of the mesh, our all-reduce over the other."""

# covers zcomm/__init__.py

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import zcomm
from tests.ranks import device_mesh, run_ranks
from tests.zcomm.fsdp2 import AS_IS, TWO_HOPS, error_of, full_grad, loss_of, sharded, value_of
from tests.zcomm.models import Given, mean_grad, mlp
from zcomm import LayoutError, Recipe, StateError


def _mesh() -> DeviceMesh:
    return device_mesh((2, 2), ("replicate", "shard"))


def _check_hsdp_is_refused(rank: int) -> None:
    model = fully_shard(mlp(), mesh=_mesh())
    with pytest.raises(LayoutError, match=r"module '\(root\)' is sharded over a 2-D mesh .*replicate_group="):
        zcomm.install_fsdp2(model)


def test_hsdp_is_refused_with_the_remedy() -> None:
    run_ranks(4, _check_hsdp_is_refused)


def _check_replicas(rank: int, recipe: Recipe, at_most: float) -> None:
    mesh, reference = _mesh(), mlp()
    model = sharded(mlp(), mesh=mesh["shard"])
    installed = zcomm.install_fsdp2(model, recipe, replicate_group=mesh["replicate"].get_group())
    exact = sum(mean_grad(reference, step, 4) for step in range(3))
    with mock.patch.object(dist, "all_reduce", side_effect=AssertionError("torch's own all-reduce was called")):
        for step in range(3):
            model.set_requires_all_reduce(step == 2)
            with zcomm.traffic() as sent:
                loss_of(model, rank, step).backward()
            assert (sent.calls(operation="all_reduce") > 0) == (step == 2)
    assert error_of(full_grad(model), exact) < at_most
    grads = [torch.empty_like(full_grad(model)) for _ in range(4)]
    dist.all_gather(grads, full_grad(model))
    assert all(torch.equal(grad, grads[0]) for grad in grads)
    assert any(row.format.startswith("replicas") for row in installed.report().rows)
    installed.uninstall()


def _check_replica_residual(rank: int) -> None:
    mesh, errors, sizes = _mesh(), [], {"a": 5000, "b": 3001}
    for has_residual in (False, True):
        model = Given(sizes)
        fully_shard(model, mesh=mesh["shard"])
        recipe = Recipe(weights="none", gradients=("int8", "int4"), reduced="none", residual=has_residual)
        installed = zcomm.install_fsdp2(model, recipe, replicate_group=mesh["replicate"].get_group())
        inputs = {name: value_of(name, rank, numel) for name, numel in sizes.items()}
        for _ in range(16):
            model(inputs).backward()
        exact = sum(torch.cat([value_of(n, r, numel) for n, numel in sizes.items()]).double() for r in range(4)) / 4
        errors.append(error_of(full_grad(model) / 16, exact))
        assert len(installed.residuals) == has_residual
    assert errors[1] < errors[0] / 4


def test_a_residual_between_replicas() -> None:
    run_ranks(4, _check_replica_residual)


def _check_sums_of_other_parameters_are_refused(rank: int) -> None:
    mesh = _mesh()
    model = Given({"a": 3000, "b": 3000})
    model.b.weight.requires_grad_(False)
    fully_shard(model, mesh=mesh["shard"])
    zcomm.install_fsdp2(model, AS_IS, replicate_group=mesh["replicate"].get_group())
    model.set_requires_all_reduce(False)
    inputs = {name: value_of(name, rank, 3000) for name in "ab"}
    model(inputs).backward()
    model.a.weight.requires_grad_(False)
    model.b.weight.requires_grad_(True)
    model.set_requires_all_reduce(True)
    with pytest.raises(StateError, match=r"other parameters have gradients .*set_requires_all_reduce\(True\)"):
        model(inputs).backward()


def test_sums_of_other_parameters_are_not_added() -> None:
    run_ranks(4, _check_sums_of_other_parameters_are_refused)


@pytest.mark.parametrize(("recipe", "at_most"), [(AS_IS, 1e-6), (TWO_HOPS, 0.15)], ids=["as is", "quantized"])
def test_replicas_agree_once_an_accumulation_without_torchs_all_reduce(recipe: Recipe, at_most: float) -> None:
    as_is = Recipe(weights="none", gradients=("none", "none"), reduced="none")
    run_ranks(4, _check_replicas, as_is if at_most < 1e-3 else recipe, at_most)
