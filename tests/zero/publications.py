"""Publications of a small model whose every element is the version, for the tests of zero's publishers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import zero

LAST = 3


def model_at(version: int = 0) -> nn.Module:
    """A model whose every element is ``version``."""
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20)).bfloat16()
    for param in model.parameters():
        nn.init.constant_(param, version)
    return model


def values_of(model: nn.Module) -> list[float]:
    """The distinct values of all elements: one, if they are of one version."""
    return torch.cat([param.detach().flatten() for param in model.parameters()]).unique().tolist()


def publish(model: nn.Module, publisher: zero.Publisher, version: int) -> None:
    for param in model.parameters():
        nn.init.constant_(param, version)
    publisher.publish(version)
    publisher.wait()


def publish_all(
    folder: Path, *, first: int = 1, last: int = LAST, done: Callable[[int], None] = lambda _: None, **options: int
) -> None:
    """Versions up to ``last``, every second with a snapshot; ``done`` is called with each once it is durable."""
    model = model_at()
    with zero.Publisher(model, folder, **{"snapshot_every": 2, "keep": 1, **options}) as publisher:
        for version in range(first, last + 1):
            publish(model, publisher, version)
            done(version)


def follow(folder: Path, model: nn.Module | None = None) -> int | None:
    """The version that a new subscriber reaches, whose bits are checked."""
    ours = model_at(-1) if model is None else model
    subscriber = zero.Subscriber(folder, ours)
    subscriber.update()
    assert values_of(ours) == [-1 if subscriber.version is None else subscriber.version]
    return subscriber.version
