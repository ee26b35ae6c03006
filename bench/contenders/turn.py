"""Run the timed steps of one contender in a round of a comparison."""

from __future__ import annotations

import argparse

import torch

import zcomm
from contenders.contender import Contender
from contenders.job import batch
from zcomm import Topology

__all__ = ["take_steps"]


def take_steps(arguments: argparse.Namespace, contender: Contender, topology: Topology, device: torch.device) -> None:
    """Run ``arguments.steps`` optimizer steps, and record the last loss, averaged over the ranks."""
    for _ in range(arguments.steps):
        number, count = contender.num_steps, contender.accumulation
        loss = contender.step(*batch(arguments, number, topology.rank, device, num_batches=count))
        contender.num_steps += 1
    contender.settle()
    mean = loss.float().reshape(1)
    zcomm.all_reduce(mean, "avg", group=topology)  # waits for all ranks: the time is that of the slowest
    contender.loss = mean.item()
