"""install_fsdp2 on live ranks: what is exchanged, how FSDP2's features go with it, and that it can be taken back."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

import zcomm
from tests.ranks import run_ranks, topology
from tests.zcomm.models import Given, batch, mean_grad, mlp
from tests.zcomm.travelled import travelled
from zcomm import ConfigError, LayoutError, Recipe, StateError, TopologyError

TWO_HOPS = Recipe(weights="int8", gradients=("int8", "int4"))
AS_IS = Recipe(weights="none", gradients=("none", "none"))


def _sharded(model: nn.Module, **options: Any) -> nn.Module:
    """Each linear layer a unit, the rest the root's."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def _full(parameters: Any) -> Tensor:
    return torch.cat([p.full_tensor().detach().flatten().float() for p in parameters])


def _full_grad(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.full_tensor().flatten().double() for p in model.parameters() if p.grad is not None])


def _error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).float().square().mean()


# --- what is exchanged

SIZES = {"small": 100, "body": 3001, "head": 2500, "tail": 2999}
FORMATS = {"small": "none", "head": "bf16"}


def _value(name: str, rank: int, numel: int) -> Tensor:
    seed = 100 * rank + sum(name.encode())
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * (rank + 1)


def _shards(values: Tensor, world_size: int = 4) -> list[np.ndarray]:
    n = -(-values.numel() // world_size)
    padded = np.pad(values.numpy(), (0, n * world_size - values.numel()))
    return list(padded.reshape(world_size, n))


def _check_exact(rank: int) -> None:
    model = Given(SIZES)
    with torch.no_grad():
        for name, numel in SIZES.items():
            model.get_submodule(name).weight.copy_(_value(name, 9, numel))
    seen: dict[str, Tensor] = {}
    fully_shard(model)
    model.register_forward_pre_hook(
        lambda module, _: seen.update({name: p.detach().clone() for name, p in module.named_parameters()})
    )
    installed = zcomm.install_fsdp2(model, TWO_HOPS, overrides={"head": "bf16"}, topology=topology(2))
    with zcomm.traffic() as sent:
        model({name: _value(name, rank, numel) for name, numel in SIZES.items()}).backward()
    report = installed.report()
    assert (report.sent.intra, report.sent.inter) == (sent.bytes(link="intra"), sent.bytes(link="inter"))
    for members in (["small"], ["head"], ["body", "tail"]):  # one message each: blocks run over a rank's shards of both
        form = FORMATS.get(members[0], "int8")
        weights = [_shards(_value(name, 9, SIZES[name])) for name in members]
        gathered = [travelled(np.concatenate([shards[r] for shards in weights]), form) for r in range(4)]
        wires = (form, form) if form != "int8" else ("int8", "int4")
        reduced = _reduced_sum([[_shards(_value(name, r, SIZES[name])) for name in members] for r in range(4)], wires)
        start = 0
        for name, shards in zip(members, weights, strict=True):
            stop = start + len(shards[0])
            whole = np.concatenate([g[start:stop] for g in gathered])[: SIZES[name]]
            assert torch.equal(seen[f"{name}.weight"], torch.from_numpy(whole)), name
            mean = reduced[rank][start:stop] / np.float32(4)
            grad = model.get_submodule(name).weight.grad.to_local()
            assert torch.equal(grad, torch.from_numpy(mean[: grad.numel()])), name
            start = stop


def _reduced_sum(of_ranks: list[list[list[np.ndarray]]], wires: tuple[str, str]) -> list[np.ndarray]:
    """Each rank's sum, from every rank's [member][shard], by the contract: 2 nodes x 2 ranks."""
    sums = []
    for owner in range(4):
        rows = [np.concatenate([shards[owner] for shards in members]) for members in of_ranks]
        nodes = [travelled(rows[n], wires[0]) + travelled(rows[n + 1], wires[0]) for n in (0, 2)]
        sums.append(travelled(nodes[0], wires[1]) + travelled(nodes[1], wires[1]))
    return sums


def test_weights_and_gradients_travel_in_their_formats() -> None:
    run_ranks(4, _check_exact)


def _check_bytes(rank: int) -> None:
    sent_between = []
    as_bf16 = Recipe(weights="bf16", gradients=("bf16", "bf16"), min_numel=0)
    for recipe in ("zeropp", as_bf16):
        model = _sharded(mlp(256), reshard_after_forward=True)
        zcomm.install_fsdp2(model, recipe, topology=topology(2))
        with zcomm.traffic() as sent:
            _loss(model, rank, 0).backward()
        sent_between.append(sent.bytes(link="inter"))
    assert sent_between[0] <= 0.45 * sent_between[1]


def test_default_recipe_sends_at_most_45_percent_of_bf16_between_nodes() -> None:
    run_ranks(4, _check_bytes)


def _check_sums_are_wide(rank: int) -> None:
    model = Given({"body": 4000})
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))
    zcomm.install_fsdp2(model, AS_IS, topology=topology(4))
    model({"body": torch.full((4000,), [256.0, 1.0, 1.0, 1.0][rank], dtype=torch.bfloat16)}).backward()
    # in bf16, 256 + 1 is 256; in float32 the sum is 259, which is 260 in bf16
    assert bool((model.body.weight.grad.to_local() == 65).all())


def test_sums_are_in_float32_whatever_the_reduce_dtype() -> None:
    run_ranks(4, _check_sums_are_wide)


def _check_residual(rank: int) -> None:
    sizes, errors = {"a": 5000, "b": 3001, "small": 10}, []
    for has_residual in (False, True):
        model = Given(sizes)
        fully_shard(model)
        recipe = Recipe(weights="none", gradients=("int8", "int4"), residual=has_residual)
        installed = zcomm.install_fsdp2(model, recipe, topology=topology(2))
        inputs = {name: _value(name, rank, numel) for name, numel in sizes.items()}
        for _ in range(16):
            model(inputs).backward()
        exact = sum(torch.cat([_value(n, r, numel) for n, numel in sizes.items()]).double() for r in range(4)) / 4
        errors.append(_error(_full_grad(model) / 16, exact))
        keys = {span.key for residual in installed.residuals for span in residual.layout.spans}
        assert keys == ({"a.weight", "b.weight"} if has_residual else set())
    assert errors[1] < errors[0] / 4


def test_a_residual_keeps_errors_from_adding_up() -> None:
    run_ranks(4, _check_residual)


# --- FSDP2's features

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FEATURES: dict[str, dict[str, Any]] = {
    "reshard": {"reshard_after_forward": True},
    "keep": {"reshard_after_forward": False},
    "hpz": {"reshard_after_forward": 2},
    "mixed": {"mp_policy": MIXED},
    "bf16 reduce": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def _check_features(rank: int, feature: str, per_node: int) -> None:
    reference, model = mlp(), _sharded(mlp(), **FEATURES[feature])
    zcomm.install_fsdp2(
        model, Recipe(weights="int8", gradients=("int8", "int4"), min_numel=500), topology=topology(per_node)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        with torch.no_grad():
            for mine, full in zip(reference.parameters(), model.parameters(), strict=True):
                mine.copy_(full.full_tensor())
        exact = mean_grad(reference, step, dist.get_world_size())
        optimizer.zero_grad()
        _loss(model, rank, step).backward()
        assert 1e-3 < _error(_full_grad(model), exact) < 0.15
        optimizer.step()


@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str) -> None:
    run_ranks(4, _check_features, feature, 2)


@pytest.mark.parametrize(("world_size", "per_node"), [(2, 2), (2, 1), (3, 3)])
def test_one_hop(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_features, "reshard", per_node)


def _check_backward_weights(rank: int) -> None:
    model = mlp(256)
    fully_shard(model, reshard_after_forward=2)
    installed = zcomm.install_fsdp2(model, "zeropp", topology=topology(2))
    with zcomm.traffic() as forward:
        loss = _loss(model, rank, 0)
    with zcomm.traffic() as backward:
        loss.backward()
    assert forward.bytes(operation="all_gather", format="int8") > 0
    assert backward.bytes(operation="all_gather", format="int8") == 0
    assert backward.bytes(operation="all_gather", format="none", link="intra") > 0
    assert backward.bytes(operation="all_gather", link="inter") == 0
    assert any("gathered again over 2 ranks" in row.why for row in installed.report().rows)


def test_hpz_gathers_for_backward_inside_the_node_as_it_is() -> None:
    run_ranks(4, _check_backward_weights)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 64)
        self.body = nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 64, bias=False)
        self.lm_head.weight = self.embed.weight
        self.body.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(torch.tanh(self.body(self.embed(tokens))))


def _check_tied_and_frozen(rank: int) -> None:
    reference, model = _Tied(), _Tied()
    fully_shard(model.body)
    fully_shard(model)
    installed = zcomm.install_fsdp2(
        model, Recipe(gradients=("int8", "int4"), min_numel=65), overrides={"lm_head": "none"}, topology=topology(2)
    )
    tokens = [torch.randint(64, (64,), generator=torch.Generator().manual_seed(r)) for r in range(4)]
    for r in range(4):
        (reference(tokens[r]).square().mean() / 4).backward()
    model(tokens[rank]).square().mean().backward()
    for (name, mine), exact in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (exact.grad is None) == (name == "body.bias")
        if mine.grad is not None:
            assert _error(mine.grad.full_tensor(), exact.grad) < 0.15
    rows = {(row.modules, row.format.split()[0]): row for row in installed.report().rows}
    assert rows["embed", "weights"].why == "override 'lm_head'"
    assert rows["embed", "gradients"].format == "gradients as is"
    assert rows["body", "gradients"].elements == 64 * 64


def test_tied_parameters_have_both_names_and_frozen_ones_send_no_gradient() -> None:
    run_ranks(4, _check_tied_and_frozen)


def _check_accumulation(rank: int) -> None:
    reference, model = mlp(), _sharded(mlp())
    zcomm.install_fsdp2(model, AS_IS, topology=topology(2))
    exact = sum(mean_grad(reference, step, 4) for step in range(3))
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        with zcomm.traffic() as sent:
            _loss(model, rank, step).backward()
        assert (sent.calls(operation="reduce_scatter") > 0) == (step == 2)
    assert _error(_full_grad(model), exact) < 1e-6
    model.set_requires_gradient_sync(True)
    _loss(model, rank, 3).backward()  # into the shards that are there
    assert _error(_full_grad(model), exact + mean_grad(reference, 3, 4)) < 1e-6


def test_gradient_accumulation_sends_once() -> None:
    run_ranks(4, _check_accumulation)


def _check_divide_factor(rank: int) -> None:
    reference, model = mlp(), _sharded(mlp())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(10.0)
    zcomm.install_fsdp2(model, AS_IS, topology=topology(2))
    _loss(model, rank, 0).backward()
    assert _error(_full_grad(model), mean_grad(reference, 0, 4) * 4 / 10) < 1e-6


def test_a_divide_factor_is_kept() -> None:
    run_ranks(4, _check_divide_factor)


def _check_missing_gradients(rank: int) -> None:
    sizes = {"a": 3000, "b": 3000, "c": 100}
    model = Given(sizes)
    fully_shard(model)
    installed = zcomm.install_fsdp2(model, TWO_HOPS, topology=topology(2))
    model({"a": torch.full((3000,), float(rank + 1))}).backward()
    assert bool((model.a.weight.grad.to_local() == 2.5).all())
    assert model.b.weight.grad is None
    assert "some parameters had no gradient; the others' travelled as they are" in str(installed.report())


def test_a_step_in_which_some_parameters_have_no_gradient() -> None:
    run_ranks(4, _check_missing_gradients)


# --- replicas


@cache
def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def _check_hsdp_is_refused(rank: int) -> None:
    model = fully_shard(mlp(), mesh=_mesh())
    with pytest.raises(LayoutError, match=r"module '\(root\)' is sharded over a 2-D mesh .*replicate_group="):
        zcomm.install_fsdp2(model)


def test_hsdp_is_refused_with_the_remedy() -> None:
    run_ranks(4, _check_hsdp_is_refused)


def _check_replicas(rank: int, recipe: Recipe, at_most: float) -> None:
    mesh, reference = _mesh(), mlp()
    model = _sharded(mlp(), mesh=mesh["shard"])
    installed = zcomm.install_fsdp2(model, recipe, replicate_group=mesh["replicate"].get_group())
    exact = sum(mean_grad(reference, step, 4) for step in range(3))
    with mock.patch.object(dist, "all_reduce", side_effect=AssertionError("torch's own all-reduce was called")):
        for step in range(3):
            model.set_requires_all_reduce(step == 2)
            with zcomm.traffic() as sent:
                _loss(model, rank, step).backward()
            assert (sent.calls(operation="all_reduce") > 0) == (step == 2)
    assert _error(_full_grad(model), exact) < at_most
    grads = [torch.empty_like(_full_grad(model)) for _ in range(4)]
    dist.all_gather(grads, _full_grad(model))
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
        inputs = {name: _value(name, rank, numel) for name, numel in sizes.items()}
        for _ in range(16):
            model(inputs).backward()
        exact = sum(torch.cat([_value(n, r, numel) for n, numel in sizes.items()]).double() for r in range(4)) / 4
        errors.append(_error(_full_grad(model) / 16, exact))
        assert len(installed.residuals) == has_residual
    assert errors[1] < errors[0] / 4


def test_a_residual_between_replicas() -> None:
    run_ranks(4, _check_replica_residual)


@pytest.mark.parametrize(("recipe", "at_most"), [(AS_IS, 1e-6), (TWO_HOPS, 0.15)], ids=["as is", "quantized"])
def test_replicas_agree_once_an_accumulation_without_torchs_all_reduce(recipe: Recipe, at_most: float) -> None:
    as_is = Recipe(weights="none", gradients=("none", "none"), reduced="none")
    run_ranks(4, _check_replicas, as_is if at_most < 1e-3 else recipe, at_most)


# --- taking it back


def _train(model: nn.Module, rank: int, steps: range) -> tuple[Tensor, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        _loss(model, rank, step).backward()
        optimizer.step()
    return _full_grad(model), _full(model.parameters())


def _check_uninstall(rank: int) -> None:
    plain, other = _sharded(mlp()), _sharded(mlp())
    state = copy.deepcopy(other.state_dict())
    installed = zcomm.install_fsdp2(other, "zeropp", topology=topology(2))
    _train(other, rank, range(2))
    with pytest.raises(StateError, match=r"module '0' already has .*, Gather: uninstall"):
        zcomm.install_fsdp2(other)
    other.load_state_dict(state)
    with torch.no_grad():
        other(batch(rank, 0))  # the root's parameters stay whole, as decoded
    installed.uninstall()
    installed.uninstall()
    with zcomm.traffic() as sent:
        assert all(map(torch.equal, _train(other, rank, range(3)), _train(plain, rank, range(3))))
    assert sent.calls() == 0
    zcomm.install_fsdp2(other, "zeropp", topology=topology(2))


def test_uninstall_restores_the_plain_bits() -> None:
    run_ranks(4, _check_uninstall)


def _check_shadow(rank: int, factor: float | None) -> None:
    plain, other = _sharded(mlp()), _sharded(mlp())
    for model in (plain, other):
        for module in model.modules():
            if factor and isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
                module.set_force_sum_reduction_for_comms(True)
    installed = zcomm.install_fsdp2(other, TWO_HOPS, topology=topology(2), shadow=True)
    with zcomm.traffic() as sent:
        assert all(map(torch.equal, _train(other, rank, range(3)), _train(plain, rank, range(3))))
    report = installed.report()
    assert report.sent.inter == sent.bytes(link="inter") < report.plain.inter / 2
    assert "shadow" in str(report)
    for row in report.rows:
        low, high = (0, 1e-6) if row.why else (0.003, 0.01) if "weights" in row.format else (0.03, 0.15)
        assert low <= row.error <= high, row


@pytest.mark.parametrize("factor", [None, 10.0])
def test_shadow_changes_no_bit_and_reports_bytes_and_error(factor: float | None) -> None:
    run_ranks(4, _check_shadow, factor)


# --- what is refused


def _check_refusals(rank: int) -> None:
    with pytest.raises(ConfigError, match="Sequential has no module with sharded parameters: call fully_shard first"):
        zcomm.install_fsdp2(mlp())
    model = _sharded(mlp())
    with pytest.raises(ConfigError, match="the nearest name is '4'"):
        zcomm.install_fsdp2(model, overrides={"44": "bf16"})
    with pytest.raises(TopologyError, match=r"over the ranks that share parameters.*sharded over ranks \(0, 1\)"):
        zcomm.install_fsdp2(model, topology=zcomm.Topology.single())
    mixed = mlp()
    mixed[2].double()
    fully_shard(mixed)
    with pytest.raises(LayoutError, match=r"module '\(root\)' gathers .*float32, torch.float64.*param_dtype"):
        zcomm.install_fsdp2(mixed)
    custom = fully_shard(mlp())
    custom.set_custom_all_gather(mock.Mock())
    with pytest.raises(StateError, match=r"module '\(root\)' already has a communication of its own, Mock"):
        zcomm.install_fsdp2(custom)
    group = dist.group.WORLD
    with pytest.raises(TopologyError, match="replicate_group must share one rank"):
        zcomm.install_fsdp2(model, replicate_group=group)
    with pytest.raises(ConfigError, match="cannot go together"):
        zcomm.install_fsdp2(model, replicate_group=group, topology=topology(2))
    with pytest.raises(ConfigError, match="shadow"):
        zcomm.install_fsdp2(model, replicate_group=group, shadow=True)
    with zcomm.traffic() as sent:
        _loss(model, rank, 0).backward()
    assert sent.calls() == 0  # nothing was half installed


def test_what_cannot_be_served_is_refused_by_name() -> None:
    run_ranks(2, _check_refusals)


def _check_one_rank(rank: int) -> None:
    model = _sharded(mlp())
    zcomm.install_fsdp2(model, "zeropp", topology=topology(1))
    _loss(model, rank, 0).backward()  # FSDP2 communicates with nobody
    assert _error(_full_grad(model), mean_grad(mlp(), 0, 1)) < 1e-6


def test_one_rank() -> None:
    run_ranks(1, _check_one_rank)
