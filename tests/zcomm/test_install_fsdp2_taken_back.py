"""install_fsdp2: removal, shadow mode, refusals, and a single rank."""

# covers zcomm/__init__.py

from __future__ import annotations

import copy
import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import zcomm
from tests.ranks import run_ranks, topology
from tests.zcomm.fsdp2 import TWO_HOPS, error_of, full, full_grad, loss_of, sharded
from tests.zcomm.models import batch, mean_grad, mlp
from zcomm import ConfigError, LayoutError, StateError, TopologyError
from zcomm.install.fsdp2_comms import UnitPlanner


def _train(model: nn.Module, rank: int, steps: range) -> tuple[Tensor, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return full_grad(model), full(model.parameters())


def _planners() -> list[weakref.ref[UnitPlanner]]:
    return [weakref.ref(each) for each in gc.get_objects() if type(each) is UnitPlanner]


def _check_uninstall(rank: int) -> None:
    gc.disable()  # what is freed below must not wait for the collector; nor must what the refused call has seen
    plain, other = sharded(mlp()), sharded(mlp())
    of_other_tests = _planners()
    state = copy.deepcopy(other.state_dict())
    installed = zcomm.install_fsdp2(other, "zeropp", topology=topology(2))
    _train(other, rank, range(2))
    with pytest.raises(StateError, match=r"module '0' already has .*, ZcommAllGather: uninstall"):
        zcomm.install_fsdp2(other)
    other.load_state_dict(state)
    with torch.no_grad():
        other(batch(rank, 0))  # the root's parameters stay whole, as decoded
    planners = [planner for planner in _planners() if planner not in of_other_tests]
    assert planners
    installed.uninstall()
    installed.uninstall()
    del installed
    assert all(planner() is None for planner in planners), "residuals would stay until the collector runs"
    gc.enable()
    with zcomm.traffic() as sent:
        assert all(map(torch.equal, _train(other, rank, range(3)), _train(plain, rank, range(3))))
    assert sent.calls() == 0
    zcomm.install_fsdp2(other, "zeropp", topology=topology(2))


def test_uninstall_restores_the_plain_bits() -> None:
    run_ranks(4, _check_uninstall)


def _check_shadow(rank: int, factor: float | None) -> None:
    plain, other = sharded(mlp()), sharded(mlp())
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
    model = sharded(mlp())
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
    with pytest.raises(StateError, match=r"module '\(root\)' already has a custom communication, Mock"):
        zcomm.install_fsdp2(custom)
    group = dist.group.WORLD
    with pytest.raises(TopologyError, match="replicate_group must share one rank"):
        zcomm.install_fsdp2(model, replicate_group=group)
    with pytest.raises(ConfigError, match="replicate_group= and topology= cannot be combined"):
        zcomm.install_fsdp2(model, replicate_group=group, topology=topology(2))
    with pytest.raises(ConfigError, match="shadow"):
        zcomm.install_fsdp2(model, replicate_group=group, shadow=True)
    with zcomm.traffic() as sent:
        loss_of(model, rank, 0).backward()
    assert sent.calls() == 0  # nothing was half installed


def test_what_cannot_be_served_is_refused_by_name() -> None:
    run_ranks(2, _check_refusals)


def _check_one_rank(rank: int) -> None:
    model = sharded(mlp())
    zcomm.install_fsdp2(model, "zeropp", topology=topology(1))
    loss_of(model, rank, 0).backward()  # FSDP2 does not communicate
    assert error_of(full_grad(model), mean_grad(mlp(), 0, 1)) < 1e-6


def test_one_rank() -> None:
    run_ranks(1, _check_one_rank)
