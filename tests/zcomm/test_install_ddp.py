"""install_ddp on live ranks: what is exchanged, how it works with DDP's features, and its removal."""

# covers zcomm/_kernels/profiling.py zcomm/install/ddp.py zcomm/install/ddp_hook.py zcomm/install/pieces.py

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zcomm
from tests.ranks import run_ranks, topology
from tests.zcomm.models import Given, batch, flat_grad, mean_grad, mlp
from tests.zcomm.travelled import travelled
from zcomm import ConfigError, LayoutError, Recipe, StateError, TopologyError

TWO_HOPS = Recipe(gradients=("int8", "int4"), reduced="int8")
AS_IS = Recipe(gradients=("none", "none"), reduced="none")


def _agree(tensor: Tensor) -> None:
    mine = tensor.contiguous().view(-1).view(torch.uint8)
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(others, mine)
    assert all(torch.equal(other, mine) for other in others)


def _error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


# --- what is exchanged


def _given(rank: int, name: str, numel: int) -> Tensor:
    seed = 100 * rank + sum(name.encode())
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * (rank + 1)


def _expected_mean(inputs: list[np.ndarray], per_node: int, wires: tuple[str, str, str]) -> np.ndarray:
    """The mean by the contract, shard by shard, in local shard numbering, the last shards padded with zeros."""
    world_size = len(inputs)
    n, nodes = -(-len(inputs[0]) // world_size), world_size // per_node
    rows = [np.pad(x, (0, n * world_size - len(x))).reshape(world_size, n) for x in inputs]
    result = []
    for row in range(world_size):
        of_nodes = []
        for node in range(nodes):
            terms = [travelled(rows[node * per_node + local][row], wires[0]) for local in range(per_node)]
            of_nodes.append(travelled(sum(terms[1:], terms[0]), wires[1]))
        result.append(travelled(sum(of_nodes[1:], of_nodes[0]) / np.float32(world_size), wires[2]))
    return np.concatenate(result)[: len(inputs[0])]


SIZES = {"small": 100, "body": 3001, "head": 2500, "norm": 64, "tail": 2999}


def _check_every_parameter_travels_in_its_formats(rank: int) -> None:
    model = Given(SIZES)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-6)  # one parameter a bucket, from the second step on
    zcomm.install_ddp(ddp, TWO_HOPS, overrides={"head": "bf16"}, topology=topology(2))
    for _ in range(2):
        ddp.zero_grad()
        ddp({name: _given(rank, name, numel) for name, numel in SIZES.items()}).backward()
    for name, numel in SIZES.items():
        inputs = [_given(r, name, numel).numpy() for r in range(4)]
        wires = {"small": ("none",) * 3, "norm": ("none",) * 3, "head": ("bf16",) * 3}.get(
            name, ("int8", "int4", "int8")
        )
        expected = torch.from_numpy(_expected_mean(inputs, 2, wires))
        assert torch.equal(model.get_submodule(name).weight.grad, expected), name


def test_every_parameter_travels_in_its_formats() -> None:
    run_ranks(4, _check_every_parameter_travels_in_its_formats)


def _check_parameters_share_buckets(rank: int) -> None:
    model = Given(SIZES)
    ddp = DistributedDataParallel(model)
    installed = zcomm.install_ddp(ddp, AS_IS, overrides={"head": "bf16", "body": "bf16"}, topology=topology(2))
    with zcomm.traffic() as sent:
        ddp({name: _given(rank, name, numel) for name, numel in SIZES.items()}).backward()
    for name, numel in SIZES.items():
        wires = ("bf16",) * 3 if name in ("head", "body") else ("none",) * 3
        expected = _expected_mean([_given(r, name, numel).numpy() for r in range(4)], 2, wires)
        got = model.get_submodule(name).weight.grad.numpy()
        np.testing.assert_allclose(got, expected, rtol=2**-6, atol=1e-5)  # bf16 of sums in another order of shards
    # one message of each format on each hop and way, not one a parameter
    assert sent.calls(operation="all_reduce") == 2 * (2 + 2)
    report = installed.report()
    assert (report.sent.intra, report.sent.inter) == (sent.bytes(link="intra"), sent.bytes(link="inter"))
    rows = {row.modules: row for row in report.rows}
    assert (rows["head"].why, rows["head"].format) == ("override 'head'", "bf16,bf16 back bf16")
    assert rows["small"].format == "uncompressed"


def test_parameters_of_one_format_share_messages() -> None:
    run_ranks(4, _check_parameters_share_buckets)


def _check_bytes(rank: int, recipe: str, at_most: float) -> None:
    ratios = []
    for used in (recipe, Recipe(gradients=("bf16", "bf16"), reduced="bf16", min_numel=0)):
        ddp = DistributedDataParallel(mlp(256))
        installed = zcomm.install_ddp(ddp, used, topology=topology(2))
        with zcomm.traffic() as sent:
            ddp(batch(rank, 0)).square().mean().backward()
        assert installed.report().sent.inter == sent.bytes(link="inter")
        assert installed.report().sent.intra == sent.bytes(link="intra")
        ratios.append(sent.bytes(link="inter"))
    assert ratios[0] / ratios[1] <= at_most


def test_default_recipe_sends_at_most_two_fifths_of_bf16_between_nodes() -> None:
    run_ranks(4, _check_bytes, "zeropp", 0.40)


def _check_residual(rank: int) -> None:
    sizes, errors = {"a": 5000, "b": 3001, "small": 10}, []
    for has_residual in (False, True):
        recipe = Recipe(gradients=("int8", "int4"), reduced="none", residual=has_residual)
        model = Given(sizes)
        ddp = DistributedDataParallel(model)
        installed = zcomm.install_ddp(ddp, recipe, topology=topology(2))
        inputs = {name: _given(rank, name, numel) for name, numel in sizes.items()}
        ddp(inputs).backward()  # buckets are rebuilt after this step
        ddp.zero_grad()
        for _ in range(16):  # gradients add up over steps, as weights do
            ddp(inputs).backward()
            model.total = getattr(model, "total", 0) + flat_grad(model)
            ddp.zero_grad()
        exact = sum(torch.cat([_given(r, n, numel) for n, numel in sizes.items()]).double() for r in range(4)) / 4
        errors.append(_error(model.total / 16, exact))
        keys = [span.key for residual in installed.residuals for span in residual.layout.spans]
        assert sorted(keys) == (["a.weight", "b.weight"] if has_residual else [])
        assert ("bytes held in residuals" in str(installed.report())) == has_residual
    assert errors[1] < errors[0] / 4


def test_a_residual_keeps_errors_from_adding_up() -> None:
    run_ranks(4, _check_residual)


def _check_float64_on_one_node(rank: int, engine: str) -> None:
    """The only hop loses nothing, so there is no residual, and float64 stays float64."""
    model = Given({"a": 5000}, torch.float64)
    wrapped: nn.Module = DistributedDataParallel(model) if engine == "ddp" else fully_shard(model)
    install = zcomm.install_ddp if engine == "ddp" else zcomm.install_fsdp2
    recipe = Recipe(gradients=("none", "nf4"), weights="none", reduced="none", residual=True)
    installed = install(wrapped, recipe, topology=topology(2))
    inputs = [_given(r, "a", 5000).double() + 1e-12 for r in range(2)]
    wrapped({"a": inputs[rank]}).backward()
    grad = model.a.weight.grad
    grad = grad.full_tensor() if engine == "fsdp2" else grad
    assert torch.equal(grad, (inputs[0] + inputs[1]) / 2)
    assert not installed.residuals


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_float64_on_one_node_stays_float64(engine: str) -> None:
    run_ranks(2, _check_float64_on_one_node, engine)


# --- DDP's features


def _check_features(rank: int, per_node: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    ddp = DistributedDataParallel(mlp(dtype=dtype), bucket_cap_mb=0.01, **options)
    zcomm.install_ddp(ddp, Recipe(gradients=("int8", "int4"), min_numel=500), topology=topology(per_node))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(4):  # buckets are rebuilt after the first
        exact = mean_grad(_copy(ddp), step, dist.get_world_size(), dtype)
        optimizer.zero_grad(set_to_none=step < 2)
        ddp(batch(rank, step, dtype)).float().square().mean().backward()
        got = flat_grad(ddp)
        assert got.dtype == dtype
        assert 1e-3 < _error(got, exact) < 0.15
        _agree(got)
        optimizer.step()
    _agree(torch.cat([p.detach().flatten() for p in ddp.parameters()]))


def _copy(ddp: DistributedDataParallel) -> nn.Module:
    copy = mlp(dtype=next(ddp.parameters()).dtype)
    copy.load_state_dict(ddp.module.state_dict())
    return copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}],
    ids=lambda options: next(iter(options), "default"),
)
@pytest.mark.filterwarnings("ignore")
def test_features(options: dict[str, Any], dtype: torch.dtype) -> None:
    run_ranks(4, _check_features, 2, options, dtype)


@pytest.mark.parametrize(("world_size", "per_node"), [(1, 1), (2, 2), (2, 1), (3, 3)])
def test_one_hop_and_one_rank(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_one_hop, per_node)


def _check_one_hop(rank: int, per_node: int) -> None:
    ddp = DistributedDataParallel(mlp())
    zcomm.install_ddp(ddp, AS_IS, topology=topology(per_node))
    exact = mean_grad(_copy(ddp), 0, dist.get_world_size())
    ddp(batch(rank, 0)).square().mean().backward()
    assert _error(flat_grad(ddp), exact) < 1e-6


def _check_no_sync(rank: int) -> None:
    ddp = DistributedDataParallel(mlp())
    zcomm.install_ddp(ddp, AS_IS, topology=topology(2))
    exact = sum(mean_grad(_copy(ddp), step, 4) for step in range(3))
    with zcomm.traffic() as sent, ddp.no_sync():
        for step in range(2):
            ddp(batch(rank, step)).square().mean().backward()
    assert sent.calls() == 0
    ddp(batch(rank, 2)).square().mean().backward()
    assert _error(flat_grad(ddp), exact) < 1e-6


def test_no_sync_sends_nothing_and_loses_nothing() -> None:
    run_ranks(4, _check_no_sync)


def _check_unused(rank: int) -> None:
    sizes = {"used": 3000, "by one": 3000, "by none": 3000}
    model = Given(sizes)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    zcomm.install_ddp(ddp, AS_IS, topology=topology(2))
    for _ in range(3):
        ddp.zero_grad()
        names = ["used", "by one"] if rank == 1 else ["used"]
        ddp({name: torch.full((3000,), 4.0) for name in names}).backward()
        assert bool((model.used.weight.grad == 4).all())
        assert bool((model.get_submodule("by one").weight.grad == 1).all())
        assert model.get_submodule("by none").weight.grad is None


def test_unused_parameters_count_as_zero_or_stay_without_gradient() -> None:
    run_ranks(4, _check_unused)


def _check_join(rank: int) -> None:
    ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.01)
    zcomm.install_ddp(ddp, AS_IS, topology=topology(2))
    with Join([ddp]):
        for step in range(2 + rank):
            ddp.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            last = flat_grad(ddp).clone()
    if rank == 3:  # alone in its last step: the others gave zeros
        alone = _copy(ddp)
        alone(batch(3, 4)).square().mean().backward()
        assert _error(last, flat_grad(alone).double() / 4) < 1e-6


def test_join_with_uneven_inputs() -> None:
    run_ranks(4, _check_join)


def _check_join_by_remaining(rank: int) -> None:
    ddp = DistributedDataParallel(mlp())
    zcomm.install_ddp(ddp, AS_IS, topology=topology(2))
    with (
        pytest.raises(StateError, match="divide_by_initial_world_size"),
        Join([ddp], divide_by_initial_world_size=False),
    ):
        ddp(batch(rank, 0)).square().mean().backward()


def test_join_that_divides_by_the_remaining_ranks_is_refused() -> None:
    run_ranks(4, _check_join_by_remaining)


# --- backward goes on


def _check_backward_goes_on(rank: int) -> None:
    model = mlp()
    ddp, t = DistributedDataParallel(model, bucket_cap_mb=1e-6), zcomm.Topology(ranks_per_node=2)
    zcomm.install_ddp(ddp, TWO_HOPS, topology=t)
    reached_the_first_layer, went_on = threading.Event(), []

    def hold() -> Any:
        went_on.append(reached_the_first_layer.wait(10))
        yield None

    model[0].weight.register_hook(lambda _: reached_the_first_layer.set())
    t.queue.submit(hold())  # no exchange starts before backward has ended
    ddp(batch(rank, 0)).square().mean().backward()
    assert went_on == [True]
    t.close()


def test_backward_goes_on_while_gradients_are_exchanged() -> None:
    run_ranks(4, _check_backward_goes_on)


def _check_errors_surface(rank: int) -> None:
    ddp, t = DistributedDataParallel(mlp()), zcomm.Topology(ranks_per_node=2)
    zcomm.install_ddp(ddp, TWO_HOPS, topology=t)
    t.close()
    with pytest.raises(StateError, match="the Topology is closed"):
        ddp(batch(rank, 0)).square().mean().backward()


def test_a_closed_topology_is_an_error_in_backward() -> None:
    run_ranks(4, _check_errors_surface)


def _check_failing_exchange(rank: int) -> None:
    ddp, t = DistributedDataParallel(mlp()), zcomm.Topology(ranks_per_node=2)
    installed = zcomm.install_ddp(ddp, TWO_HOPS, topology=t)
    (state,) = [state for _, state in ddp._comm_hooks]

    def fail(*_: Any) -> Any:
        yield None
        raise zcomm.MessageError("a message was damaged")

    state.compressed._steps = fail
    with pytest.raises(RuntimeError, match="a message was damaged"):
        ddp(batch(rank, 0)).square().mean().backward()
    installed.uninstall()
    t.close()


def test_an_error_of_an_exchange_is_raised_by_backward() -> None:
    run_ranks(4, _check_failing_exchange)


# --- taking it back


def _train(ddp: DistributedDataParallel, rank: int, steps: range) -> list[Tensor]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return [flat_grad(ddp), torch.cat([p.detach().flatten() for p in ddp.parameters()])]


def _check_uninstall(rank: int, options: dict[str, Any]) -> None:
    plain, other = (DistributedDataParallel(mlp(), bucket_cap_mb=0.01, **options) for _ in range(2))
    installed = zcomm.install_ddp(other, "zeropp", topology=topology(2))
    _train(plain, rank, range(3))
    _train(other, rank, range(3))
    with pytest.raises(StateError, match="already has an installation: uninstall"):
        zcomm.install_ddp(other)
    installed.uninstall()
    installed.uninstall()
    other.module.load_state_dict(plain.module.state_dict())
    with zcomm.traffic() as sent:
        assert all(map(torch.equal, _train(other, rank, range(3, 6)), _train(plain, rank, range(3, 6))))
    assert sent.calls() == 0
    zcomm.install_ddp(other, "zeropp", topology=topology(2))
    with zcomm.traffic() as sent:
        _train(other, rank, range(1))
    assert sent.calls() > 0


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"])
def test_uninstall_restores_the_plain_bits(world_size: int, options: dict[str, Any]) -> None:
    run_ranks(world_size, _check_uninstall if world_size == 4 else _check_uninstall_of_3, options)


def _check_uninstall_of_3(rank: int, options: dict[str, Any]) -> None:
    plain, other = (DistributedDataParallel(mlp(), bucket_cap_mb=0.01, **options) for _ in range(2))
    zcomm.install_ddp(other, "zeropp", topology=topology(3)).uninstall()
    assert all(map(torch.equal, _train(other, rank, range(4)), _train(plain, rank, range(4))))


def _check_shadow(rank: int) -> None:
    plain, other = (DistributedDataParallel(mlp(), bucket_cap_mb=0.01) for _ in range(2))
    installed = zcomm.install_ddp(other, TWO_HOPS, topology=topology(2), shadow=True)
    with zcomm.traffic() as sent:
        assert all(map(torch.equal, _train(other, rank, range(4)), _train(plain, rank, range(4))))
    report = installed.report()
    assert report.sent.inter == sent.bytes(link="inter") < report.plain.inter / 2
    big = [row for row in report.rows if not row.why]
    assert all(0.02 < row.error < 0.15 for row in big)
    assert all(row.error < 1e-6 for row in report.rows if row.why)
    assert "shadow" in str(report)
    assert "fewer than 2048 elements" in str(report)


def test_shadow_changes_no_bit_and_reports_bytes_and_error() -> None:
    run_ranks(4, _check_shadow)


def _check_model_is_freed(rank: int) -> None:
    model = mlp()
    freed = weakref.ref(model)
    ddp = DistributedDataParallel(model)
    zcomm.install_ddp(ddp, TWO_HOPS, topology=topology(2))
    ddp(batch(rank, 0)).square().mean().backward()
    del model, ddp
    gc.collect()
    assert freed() is None


def test_an_installation_keeps_no_model_alive() -> None:
    run_ranks(4, _check_model_is_freed)


# --- what is refused


def _check_refusals(rank: int) -> None:
    t = topology(1)
    with pytest.raises(ConfigError, match="DistributedDataParallel: got Sequential; wrap it first"):
        zcomm.install_ddp(mlp())
    ddp = DistributedDataParallel(mlp())
    with pytest.raises(ConfigError, match=r"recipe='zerop' \(did you mean 'zeropp'\?\)"):
        zcomm.install_ddp(ddp, "zerop", topology=t)
    with pytest.raises(ConfigError, match=r"overrides must name .*: '4\.wieght'; the nearest name is '4\.weight'"):
        zcomm.install_ddp(ddp, overrides={"4.wieght": "bf16"}, topology=t)
    with pytest.raises(zcomm.FormatError, match=r"overrides\['4'\]: .*did you mean 'int8'"):
        zcomm.install_ddp(ddp, overrides={"4": "int88"}, topology=t)
    with pytest.raises(LayoutError, match="module '0' has sparse gradients"):
        zcomm.install_ddp(DistributedDataParallel(nn.Sequential(nn.Embedding(4, 4, sparse=True))), topology=t)
    with pytest.raises(LayoutError, match=r"parameter 'body\.weight' must be real floating point"):
        zcomm.install_ddp(DistributedDataParallel(Given({"body": 10}, torch.complex64)), topology=t)
    quantized = mlp()  # as with QLoRA: a frozen parameter is not exchanged, whatever its dtype
    quantized.codes = nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    zcomm.install_ddp(DistributedDataParallel(quantized), topology=t).uninstall()
    other = DistributedDataParallel(mlp())
    other.register_comm_hook(None, _foreign_hook)
    with pytest.raises(StateError, match="_foreign_hook: DDP takes only one; leave it out"):
        zcomm.install_ddp(other, topology=t)


def _foreign_hook(state: object, bucket):  # type: ignore[no-untyped-def]
    raise AssertionError("never called")


def test_what_cannot_be_served_is_refused_by_name() -> None:
    run_ranks(1, _check_refusals)


def _check_other_topology(rank: int) -> None:
    with pytest.raises(TopologyError, match="must be over the ranks of DDP's process group"):
        zcomm.install_ddp(DistributedDataParallel(mlp()), topology=zcomm.Topology.single())


def test_a_topology_of_other_ranks_is_refused() -> None:
    run_ranks(2, _check_other_topology)


ENDS = """
import torch, torch.distributed as dist, zcomm
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
for _ in range(100):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(torch.nn.Linear(300, 300))
    zcomm.install_ddp(ddp)
    ddp(torch.ones(4, 300)).sum().backward()
    loss = torch.ones(1000)
    for work in [dist.all_reduce(loss, async_op=True) for _ in range(3)]:
        work.wait()
    del work
    dist.destroy_process_group()
    del ddp
print("ended")
"""


def test_a_model_that_outlives_its_process_group_ends() -> None:
    """Torch's reducer would destroy it with the GIL held, for which gloo's threads wait: one in 10 to 100 hangs."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=False, timeout=240)
    assert done.stdout.strip() == "ended", done.stderr
