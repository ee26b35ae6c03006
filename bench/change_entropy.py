"""Measure how much information the changes of bf16 weights carry from one training step to the next.

    python bench/change_entropy.py                                  a GPT of 1 M parameters, about a minute
    python bench/change_entropy.py --models 1M 10M --steps 500
    python bench/change_entropy.py --models 100M --steps 1500       about an hour on many cores

One process trains with AdamW on float32 masters; forward and backward see bf16(master) and give bf16 gradients. The
schedule is a linear warm-up and a cosine down to a tenth of ``--lr``. Two kinds of rows:

    step     at steps of the schedule
    rate     ``--settle`` steps at each of ``--rates`` from half of the schedule on, each from the same state

A row has the zeroth-order entropy of the change of bf16(master), in units in the last place and in bits an element;
what the lossless coder really uses (``bits``), and the same for each kind of tensor. ``int4`` and ``nf4``: the entropy
of the gradients' codes in these formats, without their scales; sent as they are, a code has 4 bits. With error feedback
what a message has rounded off is added to the next one: ``int4+res`` is the entropy of a gradient's codes then, and
``changes`` that of the codes in which ``mode="delta_hpz"`` with ``changes="quantized"`` sends the changes.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpt_model import GPT, GPTConfig, choose_matmul_dtype
from learning_rate import warmup_cosine
from text_data import Text, load_text, training_batch
from torch import Tensor
from ulps import entropy_bits

from zcomm import get_format
from zcomm._bench.harness import BenchReport, Column
from zcomm._formats.message import layout_of
from zcomm._kernels import kernels, ulps

MODELS = {
    "tiny": GPTConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=16),
    "1M": GPTConfig(num_layers=4, hidden_size=136),
    "10M": GPTConfig(num_layers=8, hidden_size=320, num_attention_heads=5),
    "100M": GPTConfig(num_layers=12, hidden_size=832, num_attention_heads=13),
}
ROLES = ("all", "embedding", "attention", "mlp", "norms")
COLUMNS = [
    Column("model", "model"),
    Column("at", "at"),
    Column("lr", "lr", ".2g"),
    Column("loss", "loss", ".3f"),
    Column("role", "role".rjust(9)),
    Column("numel", "numel"),
    Column("entropy", "entropy", ".3f"),
    Column("bits", "bits/elem", ".3f"),
    Column("ratio", "ratio", ".3f"),
    Column("unchanged", "unchanged", ".4f"),
    Column("int4", "int4 codes", ".3f"),
    Column("nf4", "nf4 codes", ".3f"),
    Column("int4_residual", "int4+res", ".3f"),
    Column("int4_changes", "changes", ".3f"),
]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["1M"])
    parser.add_argument("--steps", type=int, default=200, help="of the schedule")
    parser.add_argument("--lr", type=float, default=2e-3, help="the schedule's peak")
    parser.add_argument("--points", type=int, default=4, help="rows of the schedule")
    parser.add_argument("--rates", type=float, nargs="*", default=[1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 1e-6])
    parser.add_argument("--settle", type=int, default=10, help="steps at a rate before its change is measured")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--data", type=Path, help="text; default: the standard library's sources")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def role_of(name: str) -> str:
    """Of a parameter: one of ROLES. Biases count with the norms, the head with the embedding."""
    if name.endswith("bias") or "norm" in name:
        return "norms"
    if "embedding" in name or name.startswith("head"):
        return "embedding"
    return "mlp" if "mlp" in name else "attention"


class Trainee:
    """A model in bf16, its float32 masters, and AdamW."""

    def __init__(self, config: GPTConfig, text: Text, batch_size: int) -> None:
        """Initialize the weights, the same in every run."""
        torch.manual_seed(0)
        dtype = choose_matmul_dtype(torch.bfloat16, torch.device("cpu"))
        self.config, self.text, self.batch_size = config, text, batch_size
        model = GPT(
            GPTConfig(config.num_layers, config.hidden_size, config.num_attention_heads, config.seq_length, dtype)
        )
        self.masters = {name: param.detach().clone() for name, param in model.named_parameters()}
        self.model = model.bfloat16()
        self.optimizer = torch.optim.AdamW(self.masters.values(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.step_number, self.loss = 0, float("nan")
        self.gradients: dict[str, Tensor] = {}
        self.residuals = {name: torch.zeros(master.numel()) for name, master in self.masters.items()}
        """What int4 messages of gradients have rounded off."""
        self.held = {name: master.flatten().clone() for name, master in self.masters.items()}
        """What a receiver of int4 changes has."""
        self.codes: dict[str, tuple[Tensor, Tensor]] = {}
        """Of the last step: of gradients with residuals, and of changes."""

    def step(self, lr: float) -> dict[str, tuple[Tensor, Tensor]]:
        """Train one step; new and old bf16 values of each parameter, flat."""
        sizes = {"batch_size": self.batch_size, "seq_length": self.config.seq_length}
        loss: Tensor = self.model(*training_batch(self.text, step=self.step_number, seed=0, **sizes))
        loss.backward()
        self.step_number, self.loss = self.step_number + 1, loss.item()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        changes, self.gradients = {}, {}
        for name, param in self.model.named_parameters():
            assert param.grad is not None, name
            self.gradients[name], param.grad = param.grad.flatten(), None
            self.masters[name].grad = self.gradients[name].view(param.shape).float()
        self.optimizer.step()
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                old = param.detach().flatten().clone()
                param.copy_(self.masters[name])
                changes[name] = param.detach().flatten(), old
                self.codes[name] = self._gradient_codes(name), self._change_codes(name)
        return changes

    def _gradient_codes(self, name: str) -> Tensor:
        wanted = self.residuals[name].add_(self.gradients[name])
        codes, sent = coded(wanted, "int4")
        wanted -= sent
        return codes

    def _change_codes(self, name: str) -> Tensor:
        codes, sent = coded(self.masters[name].flatten() - self.held[name], "int4")
        self.held[name] += sent
        return codes

    def clone(self) -> Trainee:
        """Another one in the same state."""
        other = Trainee(self.config, self.text, self.batch_size)
        other.model.load_state_dict(self.model.state_dict())
        with torch.no_grad():
            for name, master in self.masters.items():
                other.masters[name].copy_(master)
                other.residuals[name].copy_(self.residuals[name])
                other.held[name].copy_(self.held[name])
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        other.step_number = self.step_number
        return other


def coded_bits(new: Tensor, old: Tensor) -> float:
    """Bits an element of the message."""
    message = torch.empty(ulps.max_message_nbytes(new.numel()), dtype=torch.uint8)
    return 8 * ulps.encode(new, old, message) / new.numel()


def coded(values: Tensor, format_name: str) -> tuple[Tensor, Tensor]:
    """The 4-bit codes of ``values`` [n], the last of an odd number left out, and what they decode to, both [n]."""
    layout = layout_of("bench", get_format(format_name), values.dtype, 1, values.numel())
    message, decoded = layout.new(1, values.device), torch.empty_like(values)
    kernels.quantize(values, layout, message, 0, 0)
    kernels.decode(message, layout, decoded, 0, 0)
    packed = message[0, layout.codes_offset : layout.codes_offset + values.numel() // 2]
    return torch.cat([packed & 0xF, packed >> 4]), decoded


def code_entropy(codes: Tensor) -> float:
    """Their zeroth-order entropy, in bits an element."""
    share = torch.bincount(codes.long()).double()
    share = share[share > 0] / share.sum()
    return abs(float((share * share.log2()).sum()))


def rows_of(trainee: Trainee, changes: dict[str, tuple[Tensor, Tensor]]) -> Iterator[dict[str, Any]]:
    """A row for all tensors together, and one for each role."""
    for role in ROLES:
        names = [name for name in changes if role in ("all", role_of(name))]
        new, old = (torch.cat([changes[name][i] for name in names]) for i in (0, 1))
        gradient = torch.cat([trainee.gradients[name] for name in names])
        entropy, bits = entropy_bits(new, old), coded_bits(new, old)
        yield {
            "role": role,
            "numel": new.numel(),
            "entropy": entropy,
            "bits": bits,
            "unchanged": float((new.view(torch.int16) == old.view(torch.int16)).double().mean()),
            "int4": code_entropy(coded(gradient, "int4")[0]),
            "nf4": code_entropy(coded(gradient, "nf4")[0]),
            "int4_residual": code_entropy(torch.cat([trainee.codes[name][0] for name in names])),
            "int4_changes": code_entropy(torch.cat([trainee.codes[name][1] for name in names])),
        } | ({"ratio": bits / entropy} if entropy else {})


def measure(name: str, arguments: argparse.Namespace, report: BenchReport) -> None:
    """Print the rows of one model."""
    config = MODELS[name]
    text = load_text(arguments.data, max_bytes=8_000_000, seq_length=config.seq_length)
    trainee, steps = Trainee(config, text, arguments.batch_size), arguments.steps
    points = {steps * (i + 1) // arguments.points - 1 for i in range(arguments.points)}
    at_half = None
    for step in range(steps):
        report.status(f"{name}, step {step + 1} of {steps}")
        lr = arguments.lr * warmup_cosine(step, steps)
        changes = trainee.step(lr)
        if step in points:
            for row in rows_of(trainee, changes):
                report.row({"model": name, "at": f"step {step + 1}", "lr": lr, "loss": trainee.loss} | row, num_wrong=0)
        if step == steps // 2:
            at_half = trainee.clone()
    for rate in arguments.rates:
        report.status(f"{name}, {arguments.settle} steps at {rate:g}")
        assert at_half is not None
        other = at_half.clone()
        for _ in range(arguments.settle):
            changes = other.step(rate)
        for row in rows_of(other, changes):
            report.row({"model": name, "at": "rate", "lr": rate, "loss": other.loss} | row, num_wrong=0)


def main() -> int:
    """Print the table."""
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    report = BenchReport(COLUMNS, as_json=arguments.json)
    report.start("change_entropy", steps=arguments.steps, lr=arguments.lr, settle=arguments.settle)
    for name in arguments.models:
        measure(name, arguments, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
