"""The rows of DDP, FSDP2 and HSDP in ``zero plan``: bytes by hand and as measured, memory as torch holds it."""

# covers zero/plan/peers.py zero/plan/report.py

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks
from zero.cli import main
from zero.plan import CLUSTERS, Cluster, Job, Model, plan, plan_peers
from zero.plan.formulas import Counts
from zero.plan.peers import PEERS, memory_of, peer_moved

WIDTH, LAYERS = 64, 3
MEASURED = json.loads((Path(__file__).parents[2] / "bench" / "results" / "compare_13m.json").read_text())
CONTENDERS = {
    "ddp": "DDP", "ddp bf16 gradients": "DDP bf16 gradients", "ddp x4": "DDP, once",
    "ddp bf16 gradients x4": "DDP bf16 gradients, once",
    "fsdp2 reshard=True": "FSDP2", "fsdp2 reshard=False": "FSDP2 reshard=False",
    "fsdp2 reshard=False x4": "FSDP2 reshard=False, once",
    "hsdp reshard=True": "HSDP", "hsdp reshard=False": "HSDP reshard=False",
    "hsdp reshard=True x4": "HSDP, once", "hsdp reshard=False x4": "HSDP reshard=False, once",
}  # fmt: skip
"""bench/contenders' names of the peers."""


def _sent(name: str, numel: int, nodes: int, per_node: int, num_micro: int) -> tuple[int, int]:
    moved = peer_moved(PEERS[name], Counts(numel=numel), (nodes, per_node), 1, num_micro).values()
    return sum(part.sent.intra for part in moved), sum(part.sent.inter for part in moved)


def test_bytes_by_hand() -> None:
    """1,600 elements, two micro-batches, 4 nodes x 2 ranks: bytes of a rank, a mean over its node, in and out of it.

    Over all 8 ranks a ring sends 7 of 8 parts, half of them out of the node; over the 2 of a node 1 of 2, over 4 nodes
    3 of 4 parts of half the model.
    """
    numel = 1600
    flat, in_node, between = 2 * numel * 7 // 8, 2 * numel // 2, 2 * numel // 2 * 3 // 4
    half = flat // 2
    by_hand = {
        "DDP": (2 * 2 * 2 * half,) * 2,  # twice as wide, twice a ring, twice
        "DDP, once": (2 * 2 * half,) * 2,
        "DDP bf16 gradients": (2 * 2 * half,) * 2,
        "DDP bf16 gradients, once": (2 * half,) * 2,
        "FSDP2": ((4 + 2) * half,) * 2,  # forward and backward, and a sum, of two micro-batches
        "FSDP2 reshard=False": ((2 + 2) * half,) * 2,
        "FSDP2 reshard=False, once": ((1 + 1) * half,) * 2,
        "HSDP": ((4 + 2) * in_node, 2 * 2 * between),
        "HSDP reshard=False": ((2 + 2) * in_node, 2 * 2 * between),
        "HSDP, once": ((4 + 2) * in_node, 2 * between),
        "HSDP reshard=False, once": ((1 + 1) * in_node, 2 * between),
    }
    assert {name: _sent(name, numel, 4, 2, 2) for name in PEERS} == by_hand


def test_on_two_nodes_an_all_reduce_is_a_tree() -> None:
    """Each node sends its sum, or the sum of both, once: half of what a ring sends of large nodes."""
    numel, per_node = 1600, 8
    assert _sent("DDP", numel, 2, per_node, 1)[1] == 4 * numel // per_node
    assert _sent("HSDP", numel, 2, per_node, 1)[1] == 2 * numel // per_node
    ring = 2 * (4 * numel * 15 // 16)
    gloo = peer_moved(PEERS["DDP"], Counts(numel=numel), (2, per_node), 1, is_gloo=True)["reductions"].sent
    assert gloo.inter == ring // per_node


@pytest.mark.parametrize("contender", CONTENDERS)
def test_bytes_are_those_that_interfaces_counted(contender: str) -> None:
    """Of 2 nodes x 2 ranks over gloo, where a reduce-scatter is an all-reduce; with headers and acknowledgements."""
    run = MEASURED["runs"]["bfloat16 network 200mbit"]
    num_micro, counts = run["systems"][contender]["accumulation"], Counts(numel=run["numel"])
    moved = peer_moved(PEERS[CONTENDERS[contender]], counts, (2, 2), 1, num_micro, is_gloo=True).values()
    counted = run["systems"][contender]["wire_nbytes"]
    assert 2 * sum(part.sent.inter for part in moved) == pytest.approx(sorted(counted)[len(counted) // 2], rel=0.01)


@pytest.mark.parametrize("contender", ["ddp", "ddp bf16 gradients", "fsdp2 reshard=True", "hsdp reshard=True"])
def test_states_are_those_that_were_measured(contender: str) -> None:
    numel = MEASURED["runs"]["bfloat16 network 200mbit"]["numel"]
    kinds = ("parameters", "gradients", "states") + (("buckets",) if contender.startswith("ddp") else ())
    memory = memory_of(PEERS[CONTENDERS[contender]], Counts(numel=numel), (2, 2)).usage()
    planned = sum(use.nbytes for use in memory if use.kind in kinds)
    assert planned / 2**20 == pytest.approx(MEASURED["memory"]["bfloat16 network"][contender]["states_mib"], rel=0.01)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))


def _check_memory(rank: int, name: str) -> None:
    model: nn.Module = _model()
    if name == "DDP":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        shape, names = ((4,), ("ranks",)) if name == "FSDP2" else ((2, 2), ("nodes", "ranks"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
        for layer in model:
            fully_shard(layer, **options)
        fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, WIDTH)).float().sum().backward()
    optimizer.step()
    held = {"parameters": 0, "gradients": 0, "states": 0}
    for param in model.parameters():
        held["parameters"] += _nbytes(param)
        assert param.grad is not None
        held["gradients"] += _nbytes(param.grad)
        held["states"] += sum(_nbytes(optimizer.state[param][moment]) for moment in ("exp_avg", "exp_avg_sq"))
    numel = LAYERS * (WIDTH * WIDTH + WIDTH)
    planned = {use.kind: use.nbytes for use in memory_of(PEERS[name], Counts(numel=numel), (2, 2)).usage()}
    assert {kind: planned[kind] for kind in held} == held


def _nbytes(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


@pytest.mark.parametrize("name", ["DDP", "FSDP2", "HSDP"])
def test_memory_is_what_torch_holds(name: str) -> None:
    """Parameters, gradients and AdamW's moments, to the byte."""
    run_ranks(4, _check_memory, name)


def test_a_step_by_hand() -> None:
    """10^9 parameters in one layer on 4 nodes x 2 ranks; a ring takes as long as its slower links."""
    cluster = Cluster(
        num_nodes=4, ranks_per_node=2, tflops=100, between_gbit=80, within_gbps=100, device_gbps=1000, device_gib=1e3
    )
    model = Model.of_numel(1e9, 1, sequence=1000)
    rows = {row.variant: row for row in plan_peers(model, cluster, Job(is_checkpointed=False))}
    assert set(rows) == {name for name in PEERS if not name.endswith("once")}, "which are the same in one micro-batch"
    of = rows["FSDP2"].times
    assert of.computation == pytest.approx((6e9 + 12 * model.hidden * 1000) * 1000 / (100e12 * 0.45))
    assert of.between == pytest.approx(3 * 2e9 * 7 / 8 / (10e9 * 0.9), rel=1e-3)
    assert (of.within, of.pcie, of.host, of.nvme) == (0, 0, 0, 0)
    assert of.latency == pytest.approx(3 * (18e-6 + 11.8e-6))
    assert of.kernels == pytest.approx(3 * 2e9 * 7 / 8 / (1000e9 * 0.9), rel=1e-3)
    hybrid = rows["HSDP"].times
    assert hybrid.within == pytest.approx(3 * 2e9 / 2 / (100e9 * 0.9), rel=1e-3)
    assert hybrid.between == pytest.approx(2 * (3 / 4) * 1e9 * 2 / (10e9 * 0.9), rel=1e-3)
    assert hybrid.latency == pytest.approx(3 * 11.8e-6 + 2 * 18e-6), "an all-reduce counts as two exchanges"
    fast = plan_peers(model, replace(cluster, between_gbit=8000), Job(is_checkpointed=False))
    assert all((row.times.within == 0) != (row.times.between == 0) for row in fast if row.variant != "HSDP"
               and row.variant != "HSDP reshard=False")  # fmt: skip
    assert [row.tokens_per_s for row in fast] == sorted((row.tokens_per_s for row in fast), reverse=True)


def test_without_resharding_more_is_held() -> None:
    model, cluster = Model.of_shape(8, 1024), replace(CLUSTERS["8xa100"], num_nodes=2)
    job = Job(num_micro=4)
    nbytes = {row.variant: row.memory.nbytes() for row in plan_peers(model, cluster, job)}
    layers = 2 * 2 * max(12 * 1024**2 + 13 * 1024, 50257 * 1024)
    whole = 2 * model.numel
    assert nbytes["FSDP2 reshard=False"] - nbytes["FSDP2"] == pytest.approx(whole - layers, rel=1e-3)
    assert nbytes["FSDP2 reshard=False, once"] - nbytes["FSDP2 reshard=False"] == pytest.approx(whole, rel=1e-3)
    assert nbytes["HSDP, once"] - nbytes["HSDP"] == pytest.approx(whole / 8, rel=1e-3)
    stage_0 = next(row for row in plan(model, cluster, job) if (row.stage, row.tier) == (0, "device"))
    assert nbytes["DDP"] == pytest.approx(stage_0.memory.nbytes(), rel=1e-3), "as much as stage 0"


def test_peers_stand_below_and_never_first(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "13b", "--nodes", "2", "--accumulation", "4"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert shown.index("ZeRO++") < shown.index("delta-hpZ") < shown.index("torch's own ways") < shown.index("FSDP2 ")
    assert shown.index("HSDP reshard=False, once") < shown.index("fastest: stage")
    lines = [line for line in shown.splitlines() if line.startswith("    ") and line[4] in "0123"]
    assert len({line.index(".") for line in lines}) == 1, "columns stay in line"
    assert main([*arguments, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["config"] == {} for row in rows] == [False] * (len(rows) - len(PEERS)) + [True] * len(PEERS)


def test_one_node_has_no_hsdp_and_muon_no_peers() -> None:
    model = Model.of_shape(4, 512)
    assert {row.variant for row in plan_peers(model, Cluster())} == {name for name in PEERS if name in (
        "DDP", "DDP bf16 gradients", "FSDP2", "FSDP2 reshard=False")}  # fmt: skip
    assert plan_peers(model, Cluster(num_nodes=2), Job(optimizer="muon")) == []
    (alone, *_) = plan_peers(model, Cluster(ranks_per_node=1))
    assert (alone.nbytes_sent, alone.times.communication) == ((0, 0), 0)
