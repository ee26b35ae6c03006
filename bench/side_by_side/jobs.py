"""Training jobs: a model, its batches of real text, and the held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module

import torch
from gpt_model import GPT, VOCABULARY, GPTConfig, choose_matmul_dtype
from learning_rate import warmup_cosine
from text_data import Text, held_out_windows, load_text, training_batch
from torch import Tensor, nn

from side_by_side.halves import HalvedGPT

__all__ = ["JOBS", "Job", "unigram_entropy"]


Build = Callable[[torch.dtype, torch.device], nn.Module]


@dataclass(frozen=True)
class Job:
    """One model and how it is trained. ``model(tokens, targets)`` is the loss in nats per byte."""

    build: Build
    """Build the model in a dtype; all dtypes have the same values, up to rounding."""
    seq_length: int
    lr: float
    batch_size: int = 16
    """Sequences in a step, over all ranks and micro-batches."""
    num_held_out: int = 512
    """Number of held-out sequences."""
    max_nbytes: int = 8_000_000
    """Bytes of text to read."""
    pretrained: str = ""
    """The job whose model, after :data:`PRETRAINING` steps, is tuned at a constant rate; empty: from random weights."""

    def text(self) -> Text:
        """Return the training text: the standard library's sources, as in train_gpt.py."""
        return load_text(None, max_bytes=self.max_nbytes, seq_length=self.seq_length)

    def model(self, dtype: torch.dtype, device: torch.device, seed: int) -> nn.Module:
        """Build the model, the same on every rank."""
        torch.manual_seed(seed)
        model = self.build(dtype, device)
        if self.pretrained:
            model.load_state_dict(_trained(self.pretrained, seed))
        return model

    def rate(self, step: int, num_steps: int) -> float:
        """The factor of ``lr`` in step number ``step``, from 0."""
        return 1.0 if self.pretrained else warmup_cosine(step, num_steps)

    def batch(self, text: Text, step: int, seed: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets [batch_size, seq_length] of all ranks."""
        return training_batch(text, step=step, seed=seed, batch_size=self.batch_size, seq_length=self.seq_length)

    def held_out(self, text: Text) -> tuple[Tensor, Tensor]:
        """Tokens and targets [num_held_out, seq_length] of all ranks."""
        return held_out_windows(text, num_windows=self.num_held_out, seq_length=self.seq_length)


def _gpt(kind: type[nn.Module], num_layers: int, hidden_size: int, seq_length: int) -> Build:
    def build(dtype: torch.dtype, device: torch.device) -> nn.Module:
        config = GPTConfig(
            num_layers=num_layers, hidden_size=hidden_size, num_attention_heads=4, seq_length=seq_length,
            matmul_dtype=choose_matmul_dtype(dtype, device),
        )  # fmt: skip
        return kind(config).to(device, dtype)

    return build


def _gpt2(dtype: torch.dtype, device: torch.device) -> nn.Module:
    model: nn.Module = import_module("side_by_side.gpt2").build(dtype, device)
    return model


TINY = Job(_gpt(HalvedGPT, 2, 192, 64), seq_length=64, lr=2e-3)
TEST = Job(_gpt(HalvedGPT, 2, 64, 16), seq_length=16, lr=4e-3, num_held_out=32, max_nbytes=200_000)
JOBS = {
    "tiny": TINY,
    "tiny-tuned-1e-5": replace(TINY, lr=1e-5, pretrained="tiny"),
    "tiny-tuned-1e-6": replace(TINY, lr=1e-6, pretrained="tiny"),
    "main": Job(_gpt(GPT, 4, 256, 128), seq_length=128, lr=2e-3, num_held_out=256),
    "gpt2": Job(_gpt2, seq_length=64, lr=1e-3),
    "test": TEST,
    "test-tuned": replace(TEST, lr=1e-5, pretrained="test"),
}
"""By name: 1.0 million parameters, also tuned at two rates, 3.3 and 1.0 million, and two for tests."""
PRETRAINING = 300
"""Steps, in one process in float32."""


@cache
def _trained(name: str, seed: int) -> dict[str, Tensor]:
    """The weights after pretraining, the same on every rank: each computes them."""
    job = JOBS[name]
    text, model = job.text(), job.model(torch.float32, torch.device("cpu"), seed)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(PRETRAINING):
        for group in optimizer.param_groups:
            group["lr"] = job.lr * job.rate(step, PRETRAINING)
        loss: Tensor = model(*job.batch(text, step, seed + 1_000))  # not the batches that it is tuned on
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def unigram_entropy(text: Text) -> float:
    """Nats per byte of the held-out text under the byte frequencies of the training text: a trivial baseline."""
    counts = torch.bincount(text.train.long(), minlength=VOCABULARY).double() + 1
    held_out = torch.bincount(text.held_out.long(), minlength=VOCABULARY).double()
    value = -(held_out / held_out.sum() * (counts / counts.sum()).log()).sum().item()
    assert math.isfinite(value), "every byte has been counted once at least"
    return value
