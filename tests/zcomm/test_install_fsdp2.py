"""install_fsdp2 on live ranks: what is exchanged, and how it works with FSDP2's features."""

# covers zcomm/install/fsdp2.py zcomm/install/fsdp2_comms.py zcomm/install/fsdp2_units.py

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

import zcomm
from tests.ranks import run_ranks, topology
from tests.zcomm.fsdp2 import AS_IS, TWO_HOPS, error_of, full_grad, loss_of, sharded, value_of
from tests.zcomm.models import Given, mean_grad, mlp
from tests.zcomm.travelled import travelled
from zcomm import Recipe

# --- what is exchanged

SIZES = {"small": 100, "body": 3001, "head": 2500, "tail": 2999}
FORMATS = {"small": "none", "head": "bf16"}


def _shards(values: Tensor, world_size: int = 4) -> list[np.ndarray]:
    n = -(-values.numel() // world_size)
    padded = np.pad(values.numpy(), (0, n * world_size - values.numel()))
    return list(padded.reshape(world_size, n))


def _check_exact(rank: int) -> None:
    model = Given(SIZES)
    with torch.no_grad():
        for name, numel in SIZES.items():
            model.get_submodule(name).weight.copy_(value_of(name, 9, numel))
    seen: dict[str, Tensor] = {}
    fully_shard(model)
    model.register_forward_pre_hook(
        lambda module, _: seen.update({name: p.detach().clone() for name, p in module.named_parameters()})
    )
    installed = zcomm.install_fsdp2(model, TWO_HOPS, overrides={"head": "bf16"}, topology=topology(2))
    with zcomm.traffic() as sent:
        model({name: value_of(name, rank, numel) for name, numel in SIZES.items()}).backward()
    report = installed.report()
    assert (report.sent.intra, report.sent.inter) == (sent.bytes(link="intra"), sent.bytes(link="inter"))
    for members in (["small"], ["head"], ["body", "tail"]):  # one message each: blocks run over a rank's shards of both
        form = FORMATS.get(members[0], "int8")
        weights = [_shards(value_of(name, 9, SIZES[name])) for name in members]
        gathered = [travelled(np.concatenate([shards[r] for shards in weights]), form) for r in range(4)]
        wires = (form, form) if form != "int8" else ("int8", "int4")
        reduced = _reduced_sum([[_shards(value_of(name, r, SIZES[name])) for name in members] for r in range(4)], wires)
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
    """Each rank's sum of every rank's [member][shard], by the contract: 2 nodes x 2 ranks."""
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
        model = sharded(mlp(256), reshard_after_forward=True)
        zcomm.install_fsdp2(model, recipe, topology=topology(2))
        with zcomm.traffic() as sent:
            loss_of(model, rank, 0).backward()
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
        inputs = {name: value_of(name, rank, numel) for name, numel in sizes.items()}
        for _ in range(16):
            model(inputs).backward()
        exact = sum(torch.cat([value_of(n, r, numel) for n, numel in sizes.items()]).double() for r in range(4)) / 4
        errors.append(error_of(full_grad(model) / 16, exact))
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
    reference, model = mlp(), sharded(mlp(), **FEATURES[feature])
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
        loss_of(model, rank, step).backward()
        assert 1e-3 < error_of(full_grad(model), exact) < 0.15
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
        loss = loss_of(model, rank, 0)
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
            assert error_of(mine.grad.full_tensor(), exact.grad) < 0.15
    rows = {(row.modules, row.format.split()[0]): row for row in installed.report().rows}
    assert rows["embed", "weights"].why == "override 'lm_head'"
    assert rows["embed", "gradients"].format == "gradients uncompressed"
    assert rows["body", "gradients"].elements == 64 * 64


def test_tied_parameters_have_both_names_and_frozen_ones_send_no_gradient() -> None:
    run_ranks(4, _check_tied_and_frozen)


def _check_trained_may_change(rank: int) -> None:
    """Parameters of equal sizes and other formats: each gradient travels in its own, whichever train now."""
    model = Given({"a": 3000, "b": 3000})
    model.b.weight.requires_grad_(False)
    fully_shard(model)
    installed = zcomm.install_fsdp2(model, TWO_HOPS, topology=topology(2), overrides={"b": "none"})
    whole = [torch.arange(3000.0).remainder(100 * (r + 1)) for r in range(4)]  # sums of integers are exact
    quantized = _reduced_sum([[_shards(value_of("a", r, 3000))] for r in range(4)], ("int8", "int4"))[rank]
    expected = {"a": torch.from_numpy(quantized / np.float32(4)), "b": sum(whole, torch.zeros(())).chunk(4)[rank] / 4}
    for trained in ("a", "b", "ab", "b", "a"):
        for name in "ab":
            model.get_submodule(name).weight.requires_grad_(name in trained)
        model.zero_grad()
        model({"a": value_of("a", rank, 3000), "b": whole[rank]}).backward()
        for name in "ab":
            grad = model.get_submodule(name).weight.grad
            assert (grad is not None) == (name in trained)
            assert grad is None or torch.equal(grad.to_local(), expected[name]), (trained, name)
    assert "had no gradient" not in str(installed.report())


def test_which_parameters_train_may_change() -> None:
    run_ranks(4, _check_trained_may_change)


def _check_accumulation(rank: int) -> None:
    reference, model = mlp(), sharded(mlp())
    zcomm.install_fsdp2(model, AS_IS, topology=topology(2))
    exact = sum(mean_grad(reference, step, 4) for step in range(3))
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        with zcomm.traffic() as sent:
            loss_of(model, rank, step).backward()
        assert (sent.calls(operation="reduce_scatter") > 0) == (step == 2)
    assert error_of(full_grad(model), exact) < 1e-6
    model.set_requires_gradient_sync(True)
    loss_of(model, rank, 3).backward()  # into the shards that are there
    assert error_of(full_grad(model), exact + mean_grad(reference, 3, 4)) < 1e-6


def test_gradient_accumulation_sends_once() -> None:
    run_ranks(4, _check_accumulation)


def _check_divide_factor(rank: int) -> None:
    reference, model = mlp(), sharded(mlp())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(10.0)
    zcomm.install_fsdp2(model, AS_IS, topology=topology(2))
    loss_of(model, rank, 0).backward()
    assert error_of(full_grad(model), mean_grad(reference, 0, 4) * 4 / 10) < 1e-6


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
    assert "some parameters had no gradient; the others' were sent uncompressed" in str(installed.report())


def test_a_step_in_which_some_parameters_have_no_gradient() -> None:
    run_ranks(4, _check_missing_gradients)


def _check_missing_gradients_of_one_format(rank: int) -> None:
    """Gradients may be missing anywhere: those that exist are sent as all would be."""
    model = Given({"a": 3000, "b": 3000})
    fully_shard(model)
    installed = zcomm.install_fsdp2(model, TWO_HOPS, topology=topology(2))
    model({"a": value_of("a", rank, 3000)}).backward()
    expected = _reduced_sum([[_shards(value_of("a", r, 3000))] for r in range(4)], ("int8", "int4"))[rank]
    assert torch.equal(model.a.weight.grad.to_local(), torch.from_numpy(expected / np.float32(4)))
    assert model.b.weight.grad is None
    assert "had no gradient" not in str(installed.report())


def test_a_step_in_which_some_have_no_gradient_and_all_have_one_format() -> None:
    run_ranks(4, _check_missing_gradients_of_one_format)
