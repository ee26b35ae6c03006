"""Train a byte-level GPT on real text with ZeRO: the main job.

    python bench/train_gpt.py                          4 ranks as 2 nodes x 2, stage 3, ZeRO++ on
    python bench/train_gpt.py --compare                and plain ZeRO-3 on the same data, beside it
    torchrun --nproc-per-node 8 bench/train_gpt.py     ranks and nodes as torchrun has them

Started without torchrun, it starts itself under torchrun. CPU with gloo, or GPUs with NCCL if there are enough.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from gpt_model import GPT, GPTConfig
from text_data import Corpus, load_corpus
from train_report import RunResult, print_table, write_metrics, write_plot

import zcomm
from zero import ZeroOptimizer

try:
    from tqdm import tqdm
except ImportError:  # the extra `bench` has it; without it there is no progress bar
    tqdm = None

HELD_OUT_SEQUENCES = 64


def parse_arguments() -> argparse.Namespace:
    """The command line; sizes are named as in Megatron's scripts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-attention-heads", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences a step, over all ranks")
    parser.add_argument("--train-iters", type=int, default=240)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="a file or folder; default: the Python standard library's sources")
    parser.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3))
    parser.add_argument("--quantized-weights", action=argparse.BooleanOptionalAction, default=True, help="qwZ")
    parser.add_argument("--quantized-gradients", action=argparse.BooleanOptionalAction, default=True, help="qgZ")
    parser.add_argument("--hpz", action=argparse.BooleanOptionalAction, default=True, help="secondary partition a node")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--ranks-per-node", type=int, help="default: torchrun's; on one machine, half of the ranks")
    parser.add_argument("--nproc-per-node", type=int, default=4, help="ranks, when not started by torchrun")
    parser.add_argument("--compare", action="store_true", help="also train plain ZeRO-3, and show both")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/train_gpt"), help="folder for metrics.jsonl, loss.png"
    )
    parser.add_argument("--sample-bytes", type=int, default=160)
    return parser.parse_args()


def restart_under_torchrun(nproc: int) -> None:
    """Replace this process by torchrun, unless torchrun started it."""
    if "RANK" in os.environ:
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // nproc, 1)))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])


@dataclass
class Job:
    """What every run of this process shares."""

    args: argparse.Namespace
    corpus: Corpus
    device: torch.device
    topology: zcomm.Topology

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.topology.rank

    def mine(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's sequences of a batch."""
        tokens, targets = (part.chunk(self.topology.world_size)[self.rank].to(self.device) for part in batch)
        return tokens, targets

    def total(self, values: list[float]) -> list[float]:
        """Sums over the ranks, in rank order."""
        of_ranks = zcomm.control.gather_float64(torch.tensor(values, dtype=torch.float64), self.topology)
        return [float(column) for column in of_ranks.sum(0)]

    def mean(self, loss: torch.Tensor) -> float:
        """The mean of ``loss`` over the ranks."""
        return self.total([loss.item()])[0] / self.topology.world_size


def choose_topology(args: argparse.Namespace) -> zcomm.Topology:
    """Nodes as asked for, as torchrun made them, or one machine standing in for two."""
    if args.ranks_per_node is not None:
        return zcomm.Topology(ranks_per_node=args.ranks_per_node)
    world_size, per_machine = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    if world_size == per_machine and world_size >= 4 and world_size % 2 == 0:
        return zcomm.Topology(ranks_per_node=world_size // 2)
    return zcomm.Topology.from_env()


def learning_rate(step: int, num_steps: int) -> float:
    """Linear warm-up over a tenth of the steps, then linear decay to a tenth of the peak."""
    warmup = max(num_steps // 10, 1)
    return min((step + 1) / warmup, 1 - 0.9 * max(step - warmup, 0) / max(num_steps - warmup, 1))


@torch.no_grad()
def evaluate(job: Job, model: GPT) -> float:
    """Loss on held-out text in nats per byte."""
    model.eval()
    loss = model(*job.mine(job.corpus.held_out_batch(HELD_OUT_SEQUENCES)))
    model.train()
    return job.mean(loss)


@torch.no_grad()
def sample(job: Job, model: GPT, num_bytes: int) -> str:
    """The most likely of sampled continuations of a held-out text; every rank takes part in the gathers."""
    model.eval()
    generator = torch.Generator().manual_seed(job.args.seed)
    length = job.corpus.seq_length
    text = job.corpus.held_out[: length // 2].long().unsqueeze(0)
    prompt = text.shape[1]
    for _ in range(num_bytes):
        logits = model.logits(text[:, -length:].to(job.device))[0, -1].float().cpu()
        chosen = torch.multinomial(torch.softmax(logits / 0.7, 0), 1, generator=generator)
        text = torch.cat([text, chosen.view(1, 1)], 1)
    model.train()
    shown = bytes(text[0].tolist())
    return shown[:prompt].decode("utf-8", "replace") + "|" + shown[prompt:].decode("utf-8", "replace")


def train(job: Job, name: str, *, quantized: bool) -> RunResult:
    """One run: build, train, measure."""
    args, corpus = job.args, job.corpus
    torch.manual_seed(args.seed)
    config = GPTConfig(args.num_layers, args.hidden_size, args.num_attention_heads, args.seq_length)
    model = GPT(config).to(job.device, getattr(torch, args.dtype))
    numel = sum(p.numel() for p in model.parameters())
    optimizer = ZeroOptimizer(
        model,
        torch.optim.AdamW,
        topology=job.topology,
        stage=args.stage,
        quantized_weights=quantized and args.quantized_weights,
        quantized_gradients=quantized and args.quantized_gradients,
        hpz_partition_size=job.topology.ranks_per_node if quantized and args.hpz and args.stage == 3 else 1,
        lr=args.lr,
        weight_decay=0.1,
        betas=(0.9, 0.95),
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, args.train_iters))
    before = evaluate(job, model)
    losses = []
    bar = tqdm(total=args.train_iters, desc=name, disable=job.rank != 0) if tqdm is not None else None
    started = time.perf_counter()
    with zcomm.traffic() as sent:
        for step in range(args.train_iters):
            loss = model(*job.mine(corpus.batch(step, args.seed, args.batch_size)))
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if bar is not None:
                bar.update()
            if step % 10 == 9 or step == args.train_iters - 1:
                rate = (step + 1) * args.batch_size * args.seq_length / (time.perf_counter() - started)
                losses.append((step + 1, job.mean(loss), rate))
                if bar is not None:
                    bar.set_postfix_str(f"loss {losses[-1][1]:.3f}, {rate:,.0f} tokens/s")
    if bar is not None:
        bar.close()
    steps = max(args.train_iters, 1)
    intra, inter = job.total([float(sent.bytes(link="intra")) / steps, float(sent.bytes(link="inter")) / steps])
    memory = optimizer.memory()
    result = RunResult(
        name=name,
        numel=numel,
        world_size=job.topology.world_size,
        num_nodes=job.topology.num_nodes,
        stage=args.stage,
        param_nbytes=2 if args.dtype == "bfloat16" else 4,
        losses=losses,
        held_out_before=before,
        held_out_after=evaluate(job, model),
        tokens_per_s=losses[-1][2] if losses else 0.0,
        memory=memory.by_kind,
        model_states=memory.model_states,
        intra_nbytes=intra,
        inter_nbytes=inter,
        continuation=sample(job, model, args.sample_bytes),
    )
    optimizer.close()
    return result


def main() -> None:
    """Run what the command line says."""
    args = parse_arguments()
    restart_under_torchrun(args.nproc_per_node)
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    try:
        world_size = dist.get_world_size()
        for size, what in ((args.batch_size, "batch-size"), (HELD_OUT_SEQUENCES, "number of held-out sequences")):
            if size % world_size:
                raise SystemExit(f"the {what} must be a multiple of the number of ranks: {size}, {world_size} ranks")
        job = Job(args, load_corpus(args.data, args.seq_length), device, choose_topology(args))
        is_plus = args.quantized_weights or args.quantized_gradients or args.hpz
        results = [train(job, f"ZeRO-{args.stage}{'++' if is_plus else ''}", quantized=True)]
        if args.compare:
            results.append(train(job, f"plain ZeRO-{args.stage}", quantized=False))
        if job.rank == 0:
            args.output.mkdir(parents=True, exist_ok=True)
            write_metrics(results, args.output / "metrics.jsonl")
            has_plot = write_plot(results, args.output / "loss.png")
            print_table(results)
            files = "metrics.jsonl" + (" and loss.png" if has_plot else "; no plot: matplotlib is not installed")
            print(f"\nwritten to {args.output}: {files}")
        job.topology.close()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
