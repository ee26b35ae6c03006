"""What whole tensors cost: Muon beside AdamW. Balance of placement, bytes between nodes, and CPU time of updates.

    python bench/whole_tensors.py                    4 ranks as 2 nodes of 2; prints all tables
    python bench/whole_tensors.py --only balance     placement alone, without ranks; or batches

balance     the fullest node, and the fullest rank, over the mean; ``bound``: max(1.1 x the mean, the largest tensor)
bytes       sent between nodes in a step by all ranks together, Muon + AdamW over AdamW alone, counted; ``momentum
            gathered``: what it would be if equal shards stayed and every rank gathered the momentum in bfloat16
batches     a step of zero.Muon, which updates small matrices of one shape together, beside torch.optim.Muon's
update      CPU seconds of the ranks' updates together, over those of one process that updates every tensor
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from contenders.job import add_shape, batch
from contenders.muon import optimizers
from gpt_model import GPT, GPTConfig
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

import zcomm
import zero
from zcomm import Topology, control
from zcomm._bench.launch import process_group, relaunch_under_torchrun
from zero import ZeroOptimizer
from zero._sharding.placement import PlacedTensor, place, work_of

MODELS = {
    "GPT-2 small": [[(3 * 768, 768), (768, 768), (4 * 768, 768), (768, 4 * 768)]] * 12,
    "Llama, 24 layers": [[(2048, 2048)] * 2 + [(512, 2048)] * 2 + [(5632, 2048)] * 2 + [(2048, 5632)]] * 24,
    "mixture of 8 experts": [[(1024, 1024)] * 4 + [(8, 1024)] + [(2816, 1024)] * 16 + [(1024, 2816)] * 8] * 12,
}
"""The hidden matrices of each layer."""
SIDES = (2, 4, 8)
RUNS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "zero++": {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True, "hpz_partition_size": 2},
    "delta": {"stage": 2, "mode": "delta", "changes": "quantized"},
    "delta-hpz": {"stage": 3, "mode": "delta_hpz", "changes": "quantized"},
}
STEPS = 3
ROUNDS = 9
BATCHES = [((64, 64), 16), ((256, 64), 16), ((128, 128), 16), ((512, 128), 12), ((256, 256), 12), ((1024, 256), 6)]
BATCHES += [((768, 768), 6), ((3072, 768), 4)]


def balance() -> None:
    """Print the balance of the three models on nodes of as many ranks."""
    print(f"{'model':<22}{'nodes x ranks':>14}{'of':>9}{'node':>7}{'rank':>7}{'bound':>7}")
    for name, layers in MODELS.items():
        tensors = [
            PlacedTensor(index, rows * columns, work_of((rows, columns), is_whole=True), (columns, rows))
            for index, layer in enumerate(layers)
            for columns, rows in map(sorted, layer)
        ]
        for side in SIDES:
            places = place(tensors, side, side)
            for what in ("numel", "work"):
                _print_balance(f"{name:<22}{f'{side} x {side}':>14}{what:>9}", tensors, places, what, side)


def _print_balance(
    title: str, tensors: list[PlacedTensor], places: list[tuple[int, int | None]], what: str, side: int
) -> None:
    nodes, ranks = defaultdict[int, float](float), defaultdict[tuple[int, int], float](float)
    costs = [float(getattr(tensor, what)) for tensor in tensors]
    for cost, (node, rank) in zip(costs, places, strict=True):
        nodes[node] += cost
        for each in range(side) if rank is None else (rank,):
            ranks[node, each] += cost if rank is not None else cost / side
    of_node, of_rank = sum(costs) / side, sum(costs) / side**2
    bound = max(1.1, max(costs) / of_rank)
    print(f"{title}{max(nodes.values()) / of_node:>7.3f}{max(ranks.values()) / of_rank:>7.3f}{bound:>7.3f}")


def batches() -> None:
    """Print the time of a step on matrices of one shape."""
    print(f"\n{'matrices':<18}{'torch, ms':>11}{'zero, ms':>11}{'ratio':>8}")
    for shape, count in BATCHES:
        both = []
        for cls in (Muon, zero.Muon):
            params = [nn.Parameter(torch.randn(shape)) for _ in range(count)]
            for param in params:
                param.grad = torch.randn(shape)
            both.append(cls(params, lr=1e-3))
        times: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for optimizer, of_one in zip(both, times, strict=True):
                start = time.perf_counter()
                optimizer.step()
                of_one.append(time.perf_counter() - start)
        ours, theirs = (1000 * statistics.median(of_one) for of_one in reversed(times))
        print(f"{f'{count} of {shape[0]} x {shape[1]}':<18}{theirs:>11.1f}{ours:>11.1f}{ours / theirs:>8.2f}")


def _muon(model: nn.Module) -> list[Optimizer]:
    return optimizers(model, 1e-3)


def _adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=1e-3)]


def bytes_between_nodes(arguments: argparse.Namespace, topology: Topology) -> None:
    """Print the bytes of each stage and mode."""
    if topology.rank == 0:
        print(f"\n{'bytes between nodes':<22}{'AdamW':>12}{'Muon':>12}{'ratio':>8}", flush=True)
    for name, options in RUNS.items():
        sent = [_sent(arguments, topology, build, options) for build in (_adamw, _muon)]
        if topology.rank == 0:
            print(f"{name:<22}{sent[0]:>12,.0f}{sent[1]:>12,.0f}{sent[1] / sent[0]:>8.4f}", flush=True)
        if name == "stage 3":
            gathered = sent[0] + _sent_by_a_gather(arguments, topology)
            if topology.rank == 0:
                title = "  momentum gathered"
                print(f"{title:<22}{sent[0]:>12,.0f}{gathered:>12,.0f}{gathered / sent[0]:>8.4f}", flush=True)


def _sent(
    arguments: argparse.Namespace,
    topology: Topology,
    build: Callable[[nn.Module], list[Optimizer]],
    options: dict[str, Any],
) -> float:
    """Bytes between nodes of one step, the last, of all ranks together."""
    model = _model(arguments).bfloat16()
    optimizer = ZeroOptimizer(model, build(model), topology=topology, **options)
    for step in range(STEPS):
        with zcomm.traffic() as counts:
            model(*batch(arguments, step, topology.rank, torch.device("cpu"))).backward()
            optimizer.step()
            optimizer.zero_grad()
            for replica in optimizer.parts.runtime.gatherer.replicas.values():
                replica.wait()
    optimizer.close()
    own = torch.tensor([float(counts.bytes(link="inter"))], dtype=torch.float64)
    return float(control.gather_float64(own, topology).sum())


def _sent_by_a_gather(arguments: argparse.Namespace, topology: Topology) -> float:
    """Bytes between nodes of gathering the momentum of every matrix in bfloat16 on every rank."""
    (muon, *_) = _muon(_model(arguments))
    numel = sum(param.numel() for group in muon.param_groups for param in group["params"])
    full = torch.zeros(topology.world_size, -(-numel // topology.world_size), dtype=torch.bfloat16)
    with zcomm.traffic() as counts:
        zcomm.all_gather_single(full, full[0].clone(), topology)
    own = torch.tensor([float(counts.bytes(link="inter"))], dtype=torch.float64)
    return float(control.gather_float64(own, topology).sum())


def _model(arguments: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    return GPT(GPTConfig(**{name: getattr(arguments, name) for name in names}))


def updates(arguments: argparse.Namespace, topology: Topology) -> None:
    """Print the CPU time of the updates: rounds of the ranks' and of one process's, in turn."""
    model, whole = _model(arguments), _model(arguments)
    optimizer, alone = ZeroOptimizer(model, _muon(model), topology=topology, stage=2), _muon(whole)
    ratios = []
    for step in range(ROUNDS):
        model(*batch(arguments, step, topology.rank, torch.device("cpu"))).backward()
        for param in whole.parameters():
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
        optimizer._gradients.prepare_update(widens=True)
        mine = _cpu_seconds(optimizer.parts.inner.step)
        of_ranks = control.gather_float64(mine, topology).sum()
        control.gather_float64(mine, topology)  # the first rank's turn alone
        one = torch.zeros(1, dtype=torch.float64)
        if topology.rank == 0:
            one = _cpu_seconds(lambda: [each.step() for each in alone])
        control.gather_float64(one, topology)
        ratios.append(float(of_ranks / one) if topology.rank == 0 else 0.0)
        optimizer.zero_grad()
    optimizer.close()
    if topology.rank == 0:
        print(f"\nCPU time of updates, {topology.world_size} ranks over one process: {statistics.median(ratios):.3f}")


def _cpu_seconds(call: Callable[[], object]) -> Tensor:
    start = time.process_time()
    call()
    return torch.tensor([time.process_time() - start], dtype=torch.float64)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("balance", "batches", "bytes", "update"))
    add_shape(parser)
    arguments = parser.parse_args()
    chosen = (arguments.only,) if arguments.only else ("balance", "batches", "bytes", "update")
    if chosen[0] in ("balance", "batches") and len(chosen) == 1:
        (balance if chosen[0] == "balance" else batches)()
        return
    relaunch_under_torchrun(4)
    with process_group("cpu"):
        topology = Topology(ranks_per_node=2)
        if "balance" in chosen and topology.rank == 0:
            balance()
            batches()
        if "bytes" in chosen:
            bytes_between_nodes(arguments, topology)
        if "update" in chosen:
            updates(arguments, topology)
        topology.close()


if __name__ == "__main__":
    main()
