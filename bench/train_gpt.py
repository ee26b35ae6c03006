"""Train a byte-level GPT on real text with any ZeRO stage and ZeRO++ setting; report loss, time, memory and bytes.

    python bench/train_gpt.py                        4 ranks as 2 nodes x 2, stage 3, ZeRO++
    python bench/train_gpt.py --stage 1 --no-quantized-gradients
    python bench/train_gpt.py --compare              also train plain ZeRO-3 in bf16, interleaved, on the same data
    torchrun --nnodes 2 --nproc-per-node 8 ... bench/train_gpt.py      real nodes, from torchrun's environment

Prints a table, and writes metrics.jsonl and loss.png to ``--output``. On a terminal a bar shows the progress; in a log
file, a line at each held-out loss.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpt_model import GPT, GPTConfig, choose_matmul_dtype
from learning_rate import warmup_cosine
from text_data import Text, held_out_windows, load_text, training_batch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from train_report import MetricsFile, Result, plot, print_report, print_words

import zcomm
from zcomm import Topology
from zcomm._bench.launch import choose_topology, process_group, relaunch_under_torchrun
from zero import GatheredParameters, ZeroOptimizer
from zero._storage.tier_settings import Tier

HELD_OUT_WINDOWS = 64
PROMPT_NBYTES = 48


def parse_arguments() -> argparse.Namespace:
    """Read the command line; the names are those of Megatron's scripts where they exist there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    toggle = argparse.BooleanOptionalAction
    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", type=int, default=4)
    model.add_argument("--hidden-size", type=int, default=256)
    model.add_argument("--num-attention-heads", type=int, default=4)
    model.add_argument("--seq-length", type=int, default=128)
    model.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16", help="dtype of the parameters"
    )
    training = parser.add_argument_group("training")
    training.add_argument("--batch-size", type=int, default=16, help="sequences per step over all ranks")
    training.add_argument("--train-iters", type=int, default=200)
    training.add_argument("--lr", type=float, default=2e-3)
    training.add_argument("--seed", type=int, default=1)
    training.add_argument("--data", type=Path, help="a file or folder (default: Python's standard library)")
    training.add_argument("--max-bytes", type=int, default=8_000_000, help="read no more of the text than this")
    zero = parser.add_argument_group("ZeRO")
    zero.add_argument("--stage", type=int, choices=range(4), default=3)
    zero.add_argument("--quantized-weights", action=toggle, default=True, help="qwZ: send weights as int8")
    zero.add_argument("--quantized-gradients", action=toggle, default=True, help="qgZ: send gradients as int4")
    zero.add_argument("--hpz", action=toggle, default=True, help="hpZ: a secondary partition inside each node")
    zero.add_argument(
        "--delta-hpz",
        action="store_true",
        help="a replica in every node, updated once a step by deltas; instead of qwZ, qgZ and hpZ",
    )
    zero.add_argument("--offload-optimizer", action="store_true", help="store masters and moments in host memory")
    zero.add_argument("--delayed-update", action="store_true", help="the same, updated during the next step")
    zero.add_argument("--delay-start", type=int, default=40, help="updates at the start that are not delayed")
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument("--num-ranks", type=int, help="number of ranks, without torchrun (default: one per GPU, else 4)")
    ranks.add_argument("--ranks-per-node", type=int, help="ranks that stand in for a node")
    output = parser.add_argument_group("output")
    output.add_argument("--compare", action="store_true", help="also train plain ZeRO-3 in bf16")
    output.add_argument("--eval-interval", type=int, help="steps between held-out losses (default: a fifth of them)")
    output.add_argument("--sample-bytes", type=int, default=200, help="length of the sampled continuation")
    output.add_argument("--output", type=Path, default=Path("runs/train_gpt"))
    arguments = parser.parse_args()
    arguments.eval_interval = arguments.eval_interval or max(arguments.train_iters // 5, 1)
    return arguments


class Run:
    """One model with its optimizer and its results so far."""

    def __init__(
        self, arguments: argparse.Namespace, topology: Topology, device: torch.device, *, dtype: torch.dtype,
        stage: int = 3, **switches: Any,
    ) -> None:  # fmt: skip
        """Build the model from the seed, the same on every rank and for every run, and shard it."""
        torch.manual_seed(arguments.seed)
        shape = {name: getattr(arguments, name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
        matmul_dtype = choose_matmul_dtype(dtype, device)
        config = GPTConfig(**shape, seq_length=arguments.seq_length, matmul_dtype=matmul_dtype)
        self.model = GPT(config).to(device, dtype)
        precision = {"fp16": {"enabled": True}} if dtype == torch.float16 else {}
        self.topology, self.device = topology, device
        numel = sum(p.numel() for p in self.model.parameters())
        self.optimizer = ZeroOptimizer(
            self.model, torch.optim.AdamW, topology=topology, stage=stage, lr=arguments.lr, betas=(0.9, 0.95),
            weight_decay=0.1, fused=True, **precision, **switches,
        )  # fmt: skip
        self.scheduler = LambdaLR(self.optimizer, lambda step: warmup_cosine(step, arguments.train_iters))
        self.result = Result(_name_of(self.optimizer, dtype), numel, dtype, stage)

    def train_step(self, tokens: Tensor, targets: Tensor) -> float:
        """One optimizer step on this rank's part of the batch; returns the mean loss over the ranks."""
        start_s = time.perf_counter()
        with zcomm.traffic() as sent:
            loss = self.model(tokens, targets)
            self.optimizer.scale(loss).backward()
            self.optimizer.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.optimizer.was_step_applied:
                self.scheduler.step()
        mean = self._average(loss)
        self.result.add_step(mean, sent, seconds=time.perf_counter() - start_s)
        return mean

    @torch.no_grad()
    def held_out_loss(self, tokens: Tensor, targets: Tensor) -> float:
        """Mean loss over the ranks' equal parts of the held-out windows."""
        self.model.eval()
        mean = self._average(self.model(tokens, targets))
        self.model.train()
        self.result.add_held_out(mean)
        return mean

    @torch.no_grad()
    def sample(self, prompt: Tensor, nbytes: int, seed: int) -> str:
        """Continue uint8 ``prompt`` by ``nbytes`` bytes on rank 0, while every rank gathers the full parameters."""
        generator, text = torch.Generator().manual_seed(seed), prompt.long()
        self.model.eval()
        with GatheredParameters(self.model.parameters()):
            for _ in range(nbytes if self.topology.rank == 0 else 0):
                window = text[-self.model.config.seq_length :].to(self.device)
                odds = torch.softmax(self.model.logits(window[None])[0, -1].float().cpu() / 0.8, dim=0)
                text = torch.cat([text, torch.multinomial(odds, 1, generator=generator)])
        parts = (text[: len(prompt)], text[len(prompt) :])
        return "|".join(bytes(part.tolist()).decode(errors="replace") for part in parts)

    def finish(self) -> None:
        """Sum the bytes over all ranks, and record the memory."""
        step = self.result.typical_step()
        of_rank = [step.bytes(link="intra"), step.bytes(link="inter")]
        sent = torch.tensor(of_rank, dtype=torch.float64, device=self.device)
        zcomm.all_reduce(sent, group=self.topology)
        self.result.intra_nbytes, self.result.inter_nbytes = (int(value) for value in sent.tolist())
        self.result.memory = self.optimizer.memory()

    def _average(self, loss: Tensor) -> float:
        mean = loss.detach().float().reshape(1)
        zcomm.all_reduce(mean, "avg", group=self.topology)
        return mean.item()


def _name_of(optimizer: ZeroOptimizer, dtype: torch.dtype) -> str:
    """Name the settings that are in effect, which may be fewer than requested."""
    effective = optimizer.effective
    switches = {
        "qwZ": effective.weight_format != "none",
        "qgZ": effective.gradient_formats is not None and effective.change_format is None,
        "hpZ": effective.has_secondary,
        "delta-hpZ": effective.change_format is not None,
        "exact": effective.sends_exact_changes,
    }
    name = " ".join([f"ZeRO-{effective.stage.number}", *(switch for switch, is_on in switches.items() if is_on)])
    name = name if any(switches.values()) else f"plain {name}"
    states = optimizer.parts.runtime.settings.tiers.states
    if states.tier is not Tier.DEVICE:
        name += " offload" + (" delayed" if states.delays_update else "")
    return name if dtype == torch.bfloat16 else f"{name} {str(dtype).removeprefix('torch.')}"


def build_runs(arguments: argparse.Namespace, topology: Topology, device: torch.device) -> list[Run]:
    """Build the requested run and, with ``--compare``, plain ZeRO-3 in bf16."""
    stage, dtype = arguments.stage, getattr(torch, arguments.dtype)
    switches: dict[str, Any] = {"mode": "delta_hpz"}
    if not arguments.delta_hpz:
        switches = {
            "quantized_weights": arguments.quantized_weights,
            "quantized_gradients": arguments.quantized_gradients,
            "hpz_partition_size": topology.ranks_per_node if arguments.hpz else 1,
        }
    first = Run(arguments, topology, device, dtype=dtype, stage=stage, **switches, **_offload(arguments))
    if not arguments.compare:
        return [first]
    return [first, Run(arguments, topology, device, dtype=torch.bfloat16)]


def _offload(arguments: argparse.Namespace) -> dict[str, Any]:
    if not (arguments.offload_optimizer or arguments.delayed_update):
        return {}
    delay = {"delayed_update": arguments.delayed_update, "delay_start": arguments.delay_start}
    return {"offload_optimizer": {"device": "cpu"}} | (delay if arguments.delayed_update else {})


def my_rows(tensors: tuple[Tensor, Tensor], run: Run) -> tuple[Tensor, Tensor]:
    """Return this rank's equal part of the rows of each tensor, on its device."""
    rows = tensors[0].shape[0] // run.topology.world_size
    part = slice(run.topology.rank * rows, (run.topology.rank + 1) * rows)
    return tensors[0][part].to(run.device), tensors[1][part].to(run.device)


def train(arguments: argparse.Namespace, runs: list[Run], text: Text, metrics: MetricsFile) -> None:
    """Train all ``runs`` interleaved on the same batches; show the progress on rank 0."""
    world_size, seq_length = runs[0].topology.world_size, arguments.seq_length
    num_windows = -(-HELD_OUT_WINDOWS // world_size) * world_size
    held_out = my_rows(held_out_windows(text, num_windows=num_windows, seq_length=seq_length), runs[0])
    evaluate(runs, held_out, metrics)
    is_first, has_terminal = runs[0].topology.rank == 0, sys.stderr.isatty()
    with tqdm(total=arguments.train_iters, unit="step", disable=not (is_first and has_terminal)) as bar:
        for step in range(1, arguments.train_iters + 1):
            batch = training_batch(
                text, step=step - 1, seed=arguments.seed, batch_size=arguments.batch_size, seq_length=seq_length
            )
            for run in runs:
                loss = run.train_step(*my_rows(batch, run))
                metrics.write(kind="step", run=run.result.name, step=step, loss=loss)
            is_evaluated = step % arguments.eval_interval == 0 or step == arguments.train_iters
            if is_evaluated:
                evaluate(runs, held_out, metrics)
            progress = "; ".join(run.result.progress(arguments.batch_size * seq_length) for run in runs)
            bar.set_postfix_str(progress)
            bar.update()
            if is_evaluated and is_first and not has_terminal:
                print(f"# step {step} of {arguments.train_iters}: {progress}", flush=True)


def evaluate(runs: list[Run], held_out: tuple[Tensor, Tensor], metrics: MetricsFile) -> None:
    """Take the held-out loss of every run."""
    for run in runs:
        loss = run.held_out_loss(*held_out)
        metrics.write(kind="held_out", run=run.result.name, step=run.result.held_out_steps[-1], loss=loss)


def check_batch(arguments: argparse.Namespace, topology: Topology) -> None:
    """Refuse a batch that the ranks cannot share equally, on every rank and before training."""
    if arguments.batch_size % topology.world_size:
        raise ValueError(
            "--batch-size must be a multiple of the number of ranks: "
            f"batch_size={arguments.batch_size}, world_size={topology.world_size}"
        )


def main() -> None:
    """Train, then report on rank 0."""
    arguments = parse_arguments()
    relaunch_under_torchrun(arguments.num_ranks)
    with process_group() as device:
        topology = choose_topology(arguments.ranks_per_node)
        check_batch(arguments, topology)
        text = load_text(arguments.data, max_bytes=arguments.max_bytes, seq_length=arguments.seq_length)
        runs = build_runs(arguments, topology, device)
        if topology.rank == 0:
            print_words([run.result.name for run in runs])
        with MetricsFile(arguments.output, is_writer=topology.rank == 0) as metrics:
            train(arguments, runs, text, metrics)
            for run in runs:
                run.finish()
            sample = runs[0].sample(text.held_out[:PROMPT_NBYTES], arguments.sample_bytes, arguments.seed)
            results = [run.result for run in runs]
            if topology.rank == 0:
                tokens_per_step = arguments.batch_size * arguments.seq_length
                print_report(results, topology, text, sample, tokens_per_step=tokens_per_step, metrics=metrics)
                plot(results, topology, arguments.output / "loss.png")
        for run in runs:
            run.optimizer.close()
        topology.close()


if __name__ == "__main__":
    main()
