"""The model and the batches of every contender, made from the command line's arguments."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch
from gpt_model import GPT, GPTConfig, choose_matmul_dtype
from torch import Tensor

from contenders.contender import ContenderSetup

if TYPE_CHECKING:
    from zcomm import Topology

__all__ = ["LEARNING_RATE", "SHAPE", "add_shape", "batch", "new_setup"]

SHAPE = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 64, "batch_size": 2}
"""The job's arguments and defaults; the batch is the number of sequences of a rank in a step."""
LEARNING_RATE = 1e-3


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of :data:`SHAPE`, and the learning rate."""
    for name, default in SHAPE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)


def new_setup(
    arguments: argparse.Namespace, dtype: str, device: torch.device, topology: Topology | None = None
) -> ContenderSetup:
    """Make a model of the arguments' shape, with the same values each time, which ``dtype`` has, too."""
    torch.manual_seed(1)
    matmul_dtype = choose_matmul_dtype(getattr(torch, dtype), device)
    config = GPTConfig(
        num_layers=arguments.num_layers,
        hidden_size=arguments.hidden_size,
        num_attention_heads=arguments.num_attention_heads,
        seq_length=arguments.seq_length,
        matmul_dtype=matmul_dtype,
    )
    with device:  # created on the device: a CPU takes long for hundreds of millions of random numbers
        model = GPT(config)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.to(getattr(torch, dtype)))  # else contenders would start from different masters
    folder = getattr(arguments, "nvme_folder", None)
    rate = getattr(arguments, "learning_rate", LEARNING_RATE)
    dtypes = getattr(torch, dtype), matmul_dtype
    return ContenderSetup(model, *dtypes, rate, arguments.batch_size, topology, folder)


def batch(
    arguments: argparse.Namespace, step: int, rank: int, device: torch.device, *, num_batches: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the tokens and targets of a rank's step."""
    generator = torch.Generator().manual_seed(step * 1_000 + rank)
    shape = (num_batches * arguments.batch_size, arguments.seq_length + 1)
    tokens = (
        torch.randint(0, 256, shape, generator=generator).square() // 256
    )  # a skewed distribution, so that the loss falls
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device)
