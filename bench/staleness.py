"""Measure how a staleness of one step changes the loss, with plain torch in one process.

    python bench/staleness.py                                 200 steps, delayed from step 40, 100 or 150 on, and never
    python bench/staleness.py --train-iters 1000 --delay-start 40

A delayed step uses the gradient at the parameters of one update before, as in ZeRO-Offload's delayed parameter update.
AdamW is implemented below, without this library. Prints held-out losses, in nats per byte, after the last update.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from gpt_model import GPT, GPTConfig, choose_matmul_dtype
from learning_rate import warmup_cosine
from text_data import Text, held_out_windows, load_text, training_batch
from torch import Tensor
from tqdm import tqdm

BATCH_SIZE, SEQ_LENGTH, HELD_OUT_WINDOWS = 16, 128, 64
BETA1, BETA2, EPS, WEIGHT_DECAY, MAX_NORM = 0.9, 0.95, 1e-8, 0.1, 1.0


@dataclass(frozen=True)
class Update:
    """A pending update; ``number`` counts from 1."""

    grads: list[Tensor]
    number: int
    lr: float


class AdamW:
    """AdamW with float32 masters and moments of the parameters of ``model``."""

    def __init__(self, model: GPT) -> None:
        self.params = list(model.parameters())
        self.masters = [param.detach().clone() for param in self.params]
        self.first = [torch.zeros_like(master) for master in self.masters]
        self.second = [torch.zeros_like(master) for master in self.masters]

    @torch.no_grad()
    def apply(self, update: Update) -> None:
        """Update the masters; the parameters change at :meth:`write_back`."""
        of_first, of_second = 1 - BETA1**update.number, 1 - BETA2**update.number
        for master, first, second, grad in zip(self.masters, self.first, self.second, update.grads, strict=True):
            first.mul_(BETA1).add_(grad, alpha=1 - BETA1)
            second.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
            scale = (second / of_second).sqrt_().add_(EPS)
            master.mul_(1 - update.lr * WEIGHT_DECAY).addcdiv_(first / of_first, scale, value=-update.lr)

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the masters to the parameters."""
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)

    def take_gradients(self) -> list[Tensor]:
        """Return the gradients of the last backward, clipped to a total norm of 1, and clear them."""
        grads = [param.grad for param in self.params if param.grad is not None]
        assert len(grads) == len(self.params), "a parameter without a gradient"
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        factor = min(1.0, MAX_NORM / (norm.item() + 1e-6))
        for param in self.params:
            param.grad = None
        return [grad * factor for grad in grads]


def train(text: Text, arguments: argparse.Namespace, delay_start: int) -> float:
    """Return the held-out loss after ``--train-iters`` steps; steps from ``delay_start`` on are delayed."""
    torch.manual_seed(arguments.seed)
    matmul_dtype = choose_matmul_dtype(torch.bfloat16, torch.device("cpu"))
    config = GPTConfig(
        num_layers=4, hidden_size=256, num_attention_heads=4, seq_length=SEQ_LENGTH, matmul_dtype=matmul_dtype
    )
    model = GPT(config)
    optimizer, pending, steps = AdamW(model), None, arguments.train_iters
    for step in tqdm(range(steps), desc=f"delayed from {delay_start}", leave=False):
        batch = training_batch(text, step=step, seed=arguments.seed, batch_size=BATCH_SIZE, seq_length=SEQ_LENGTH)
        model(*batch).backward()
        update = Update(optimizer.take_gradients(), step + 1, arguments.lr * warmup_cosine(step, steps))
        if pending is not None:
            optimizer.apply(pending)
        pending = update if step >= delay_start else None
        if pending is None:
            optimizer.apply(update)
        optimizer.write_back()
    if pending is not None:
        optimizer.apply(pending)
        optimizer.write_back()
    with torch.no_grad():
        loss: Tensor = model(*held_out_windows(text, num_windows=HELD_OUT_WINDOWS, seq_length=SEQ_LENGTH))
    return loss.item()


def main() -> None:
    """Train without a delay and with each delay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-iters", type=int, default=200)
    parser.add_argument(
        "--delay-start", type=int, nargs="+", default=[40, 100, 150], help="steps before the first delayed one"
    )
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    text = load_text(None, max_bytes=8_000_000, seq_length=SEQ_LENGTH)
    undelayed = train(text, arguments, arguments.train_iters)
    print("| delayed from step | delayed steps | held-out loss | more |\n| --- | --- | --- | --- |")
    print(f"| never | 0 | {undelayed:.3f} | |")
    for start in arguments.delay_start:
        loss = train(text, arguments, start)
        print(
            f"| {start} | {max(arguments.train_iters - start, 0)} | {loss:.3f} | {loss - undelayed:+.3f} |", flush=True
        )


if __name__ == "__main__":
    main()
