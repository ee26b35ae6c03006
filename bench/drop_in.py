"""Measure install_ddp and install_fsdp2 on a third-party model: transformers' GPT2LMHeadModel, trained on real text.

    python bench/drop_in.py                       DDP, 4 ranks as 2 nodes x 2, 300 steps a case
    python bench/drop_in.py --engine fsdp2 --steps 100 --recipes zeropp --json

Every case trains the same model from the same random weights on the same batches (the standard library's source files,
bytes as tokens). ``plain`` is torch's own communication. The loss is on held-out text. ``M`` is bytes between nodes in
a step, in units of the bf16 model; ``vs bf16`` is their ratio to the same exchanges in bf16. ``#wrong`` counts a loss
that differs from plain by more than ``--tolerance``, and bytes above the limit of the recipe; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch
import torch.distributed as dist
from text_data import Text, held_out_windows, load_text, training_batch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import zcomm
from zcomm import Recipe, Topology
from zcomm._bench.harness import BenchReport, Column
from zcomm._bench.launch import choose_topology, process_group, relaunch_under_torchrun
from zcomm.volume import inter_node_model_units

LIMITS = {("ddp", "zeropp"): 0.40, ("ddp", "accurate"): 0.40, ("ddp", "smallest"): 0.27, ("fsdp2", "zeropp"): 0.45}
"""The most bytes between nodes, as a share of the same exchanges in bf16."""
BF16 = Recipe(name="bf16", weights="bf16", gradients=("bf16", "bf16"), reduced="bf16", min_numel=0)
COLUMNS = [
    Column("case", "case".rjust(18)),
    Column("loss", "loss", ".4f"),
    Column("difference", "vs plain", "+.4f"),
    Column("units", "M/step", ".3f", is_measurement=True),
    Column("ratio", "vs bf16", ".3f", is_measurement=True),
    Column("step_ms", "step(ms)", ".1f", is_measurement=True),
]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--recipes", nargs="+", default=["zeropp", "smallest"], metavar="NAME")
    parser.add_argument("--num-ranks", "--nproc", type=int, default=4, help="number of ranks, without torchrun")
    parser.add_argument("--ranks-per-node", type=int, help="default: torchrun's nodes; on one machine, two a node")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per step and rank")
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tolerance", type=float, default=0.02, help="largest difference of the loss, in nats")
    parser.add_argument("--max-bytes", type=int, default=4_000_000, help="bytes of text to read")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    return parser.parse_args()


def build_model(arguments: argparse.Namespace, device: torch.device) -> nn.Module:
    """Build GPT-2 under DDP or FSDP2, with the same random weights on every rank."""
    config = GPT2Config(
        vocab_size=256, n_positions=arguments.seq_length, n_embd=arguments.hidden_size, n_layer=arguments.num_layers,
        n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    model: nn.Module = GPT2LMHeadModel(config).to(device)
    if arguments.engine == "ddp":
        return DistributedDataParallel(model)
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model)


def train(
    arguments: argparse.Namespace, recipe: str | Recipe | None, text: Text, device: torch.device, topology: Topology
) -> dict[str, Any]:
    """Train a new model; ``recipe`` None is torch's own communication."""
    model = build_model(arguments, device)
    install = zcomm.install_ddp if arguments.engine == "ddp" else zcomm.install_fsdp2
    installed = install(model, recipe, topology=topology) if recipe is not None else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, fused=True)
    global_batch = arguments.batch_size * topology.world_size
    steps = arguments.steps if recipe is not BF16 else 1  # only its bytes are needed
    started = time.perf_counter()
    with zcomm.traffic() as sent:
        for step in range(steps):
            tokens, targets = training_batch(
                text, step=step, seed=1, batch_size=global_batch, seq_length=arguments.seq_length
            )
            mine = slice(topology.rank, None, topology.world_size)
            loss_of(model, tokens[mine].to(device), targets[mine].to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
    seconds = time.perf_counter() - started
    loss = held_out_loss(model, text, arguments.seq_length, device)
    if installed is not None:
        installed.uninstall()
    numel = sum(p.numel() for p in model.parameters())
    between = torch.tensor(float(sent.bytes(link="inter")) / steps, dtype=torch.float64, device=device)
    dist.all_reduce(between)
    units = inter_node_model_units(between.item(), topology.num_nodes, numel)
    return {"loss": loss, "units": units, "step_ms": 1e3 * seconds / steps, "numel": numel}


def held_out_loss(model: nn.Module, text: Text, seq_length: int, device: torch.device) -> float:
    """The mean over 64 windows; every rank computes all of them."""
    tokens, targets = held_out_windows(text, num_windows=64, seq_length=seq_length)
    with torch.no_grad():
        return float(loss_of(model, tokens.to(device), targets.to(device)))


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy per token, in nats."""
    return cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())


def compare(arguments: argparse.Namespace, device: torch.device, topology: Topology) -> int:
    """Train one case after another, print a row for each, and return the exit status."""
    text = load_text(None, max_bytes=arguments.max_bytes, seq_length=arguments.seq_length)
    plain = train(arguments, None, text, device, topology)
    as_bf16 = train(arguments, BF16, text, device, topology)
    table = BenchReport(COLUMNS, as_json=arguments.json)
    if topology.rank == 0:
        shape = f"{topology.num_nodes}x{topology.ranks_per_node}"
        table.start("drop_in", backend=dist.get_backend(), nodes_x_ranks=shape, engine=arguments.engine)
        table.note(f"{text.source}; GPT2LMHeadModel, {plain['numel']:,} parameters, {arguments.steps} steps")
        row = {"case": f"{arguments.engine} plain", "difference": 0.0, "ratio": float("nan"), **plain}
        table.row({**row, "units": float("nan")}, num_wrong=0)  # torch's own bytes are not counted
    for name in arguments.recipes:
        result = train(arguments, name, text, device, topology)
        difference, ratio = result["loss"] - plain["loss"], result["units"] / as_bf16["units"]
        num_wrong = int(not abs(difference) <= arguments.tolerance)
        num_wrong += int(ratio > LIMITS.get((arguments.engine, name), 1.0))
        row = {"case": f"{arguments.engine} {name}", "difference": difference, "ratio": ratio, **result}
        if topology.rank == 0:
            table.row(row, num_wrong=num_wrong)
    return table.finish() if topology.rank == 0 else 0


def main() -> int:
    """Run the comparison; return 1 if a loss or the bytes are wrong."""
    arguments = parse_arguments()
    relaunch_under_torchrun(arguments.num_ranks)
    with process_group() as device:
        topology = choose_topology(arguments.ranks_per_node)
        if topology.num_nodes == 1:
            raise SystemExit(f"there must be at least two nodes: {topology}; pass --ranks-per-node")
        status = compare(arguments, device, topology)
        topology.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
