"""backend= and kernels= belong to a Topology, to ZeroOptimizer and to installations; nothing belongs to the process."""

# covers zcomm/functional.py zcomm/_base/env.py zcomm/_kernels/kernels.py

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zcomm
from tests.nccl_job import nccl_alone
from tests.ranks import run_ranks
from tests.variables import variables
from zcomm import Topology, functional
from zcomm._kernels import kernels
from zcomm._transport import backend, backend_choice, route
from zcomm.errors import BackendUnavailableError, ConfigError

F32 = torch.float32
CHOICES = {
    "all_gather": [[1024, "int8", 2]],
    "reduce_scatter": [[1024, "int8+nf4", 2]],
    "all_reduce": [[1024, "int8+int4", 2]],
}


@contextmanager
def nccl_is_there(reason: str = "") -> Iterator[None]:
    """Pretend a build with CUDA, or one where ``reason`` explains why NCCL is missing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_choice, "nccl_unavailable_reason", lambda: reason)
        yield


def _check_all_ranks_choose_alike(rank: int) -> None:
    with nccl_is_there(), pytest.raises(ConfigError, match="backend is torch on rank 0 and nccl on rank 1"):
        Topology(ranks_per_node=1, backend="nccl" if rank else "torch")
    with pytest.raises(ConfigError, match="kernels is auto on rank 0 and reference on rank 1"):
        Topology(ranks_per_node=1, kernels="reference" if rank else "auto")
    expected = r"(?s)must be available on every rank:\n  rank 1: backend='nccl' cannot be used: no NCCL here$"
    with nccl_is_there("no NCCL here" if rank else ""), pytest.raises(BackendUnavailableError, match=expected):
        Topology(ranks_per_node=1, backend="nccl")
    with (
        nccl_is_there("none at all"),
        pytest.raises(BackendUnavailableError, match=r"^backend='nccl' cannot be used: no"),
    ):
        Topology(ranks_per_node=1, backend="nccl")
    built = "kernels='cuda' cannot be used: .*without CUDA"
    if not kernels.calls.module.build_info()["cuda"]:
        with pytest.raises(BackendUnavailableError, match=built):
            Topology(ranks_per_node=1, kernels="cuda")


def _check_copies_keep_the_choice(rank: int) -> None:
    with nccl_is_there():
        made = [
            Topology(ranks_per_node=1, backend="nccl", kernels="reference"),
            Topology.from_env(backend="nccl", kernels="reference"),
            Topology.single(backend="nccl", kernels="reference"),
        ]
        for t in [*made, made[0].clone(), made[0].companion, made[2].companion]:
            assert (t.backend, t.kernels) == ("nccl", "reference")
            found = route.find_route("all_gather", t, "int8", first="inter")
            assert (found.backend, found.kernels) == ("nccl", "reference")
            assert found.layout(zcomm.get_format("int8"), F32, 1, 8).kernels == "reference"
        assert route.find_route("all_gather", made[0], "int8", first="inter", backend="torch").backend == "torch"
        assert route.find_route("all_gather", None, "int8", first="inter").backend == "torch"
        with pytest.raises(BackendUnavailableError, match=r"does not serve this all_reduce: .* device=cpu"):
            functional.all_reduce(torch.ones(4), "sum", made[0])  # by the topology's name
        for t in made:
            t.close()
    assert Topology.single().backend == "torch"


def _check_kernels_of_a_topology(rank: int) -> None:
    """Two topologies of one process: one uses the native module, the other never; both have the same bits."""
    full, shard = torch.empty(2000), torch.linspace(-1, 1, 1000) * (rank + 1)
    made = {}
    for chosen in ("native", "reference"):
        t, asked = Topology(ranks_per_node=1, kernels=chosen), []
        with pytest.MonkeyPatch.context() as patch:
            call = kernels.calls.call
            patch.setattr(
                kernels.calls, "call", lambda name, *a, call=call, asked=asked: asked.append(name) or call(name, *a)
            )
            residual = zcomm.Residual(t, [("p", 0, 2000)], 2000)
            zcomm.all_gather_single(full, shard, t, format="int8")
            zcomm.reduce_scatter_single(shard, full, group=t, format="int8", residual=residual)
            residual.commit()
        made[chosen] = [full.clone(), shard.clone(), residual.values()]
        assert bool(asked) == (chosen == "native"), asked
        t.close()
        shard = torch.linspace(-1, 1, 1000) * (rank + 1)
    assert all(torch.equal(a, b) for a, b in zip(*made.values(), strict=True))


def _ddp() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(64, 65))


def _check_installations(rank: int, probe: str) -> None:
    with variables(ZCOMM_PROBE=probe if rank == 0 else "/no/such/file"):
        ddp, t = _ddp(), Topology(ranks_per_node=1, kernels="reference")
        with pytest.raises(BackendUnavailableError, match=r"does not serve this install_ddp: .* got device=cpu"):
            zcomm.install_ddp(ddp, backend="nccl")
        with pytest.raises(ConfigError, match="kernels='native', but the given topology has kernels='reference'"):
            zcomm.install_ddp(ddp, topology=t, kernels="native")
        with pytest.raises(ConfigError, match="backend is torch on rank 0, nccl on rank 1"):
            zcomm.install_ddp(ddp, backend="nccl" if rank else "torch")
        installed = zcomm.install_ddp(ddp, "auto", topology=t)
        ddp(torch.ones(2, 64)).sum().backward()
        report = installed.report()
        assert "recipe auto (int8,int4 for 16,900 bytes), 2 nodes x 1 ranks, backend torch, kernels reference" in str(
            report
        )
        assert {row.format for row in report.rows} >= {"int8,int4 back int8"}
        installed.uninstall()
        t.close()


def _check_two_ranks(rank: int, probe: str) -> None:
    _check_all_ranks_choose_alike(rank)
    _check_copies_keep_the_choice(rank)
    _check_kernels_of_a_topology(rank)
    _check_installations(rank, probe)


def test_a_topology_and_an_installation_own_the_choice(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    table = {"device": "cpu", "choices": CHOICES}
    path.write_text(json.dumps({"version": 1, "topologies": {"2x1 on 1 host": table}}))
    run_ranks(2, _check_two_ranks, str(path))


def test_kernels_that_do_not_serve_the_device_are_named() -> None:
    for chosen, device, said in (
        ("cuda", "cpu", "they take tensors in GPU memory"), ("native", "cuda", "they take tensors in host memory"),
        ("triton", "cpu", "TRITON_INTERPRET"),
    ):  # fmt: skip
        with pytest.raises(BackendUnavailableError, match=f"kernels='{chosen}' do not serve this training.*{said}"):
            route.check_backend("training", None, "auto", chosen, torch.device(device))  # type: ignore[arg-type]
    route.check_backend("training", None, "torch", "reference", torch.device("cuda"))


def _check_hosts_agree_without_a_device(rank: int) -> None:
    """With only NCCL groups, control exchanges use no tensor of such a group: asking it for a device would raise."""
    with nccl_alone() as made:
        t = Topology(ranks_per_node=2)
        assert t.world.backend == "cuda:nccl"
        assert backend.gather_ints(rank - 7, None) == [-7, -6, -5, -4]
        assert zcomm.control.are_equal("same", None)
        assert not zcomm.control.are_equal(f"of {rank % 2}", None)
        assert zcomm.control.gather_texts(f"rank {rank}" + "x" * 600 * (rank == 1), None)[1:3] == [
            "rank 1" + "x" * 506, "rank 2",
        ]  # fmt: skip
        assert zcomm.control.agree_max(torch.tensor([rank]), t).tolist() == [3]
        assert zcomm.control.are_equal("same", t)
        assert t.companion.on_host.backend == "gloo"
        assert len(zcomm._collectives.auto_format.shape_of(t)) > 3
        assert t.background.group in made
        t.close()


def test_hosts_agree_over_gloo_in_a_job_of_nccl() -> None:
    run_ranks(4, _check_hosts_agree_without_a_device)
