"""``allgather_bucket_size`` and ``reduce_bucket_size`` limit the size of each call of torch.distributed."""

# covers zero/_storage/shard_storage.py

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.zero.training import zero_optimizer
from zcomm._transport import backend

WORLD_SIZE = 2
LEAST = WORLD_SIZE * 256
"""In elements: a run of every shard."""


class _Seen:
    """The largest buffers of gathers and of gradient exchanges, in bytes over all ranks."""

    def __init__(self) -> None:
        self.gathered = self.exchanged = self.calls = 0

    def gather(self, whole: Any) -> None:
        nbytes = _nbytes(whole) if isinstance(whole, Tensor) else sum(map(_nbytes, whole))
        self.gathered, self.calls = max(self.gathered, nbytes), self.calls + 1

    def exchange(self, nbytes: int) -> None:
        self.exchanged, self.calls = max(self.exchanged, nbytes), self.calls + 1


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _spying(stack: ExitStack, seen: _Seen) -> None:
    def spy(owner: Any, name: str, note: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            note(*args, **kwargs)
            return original(*args, **kwargs)

        stack.enter_context(mock.patch.object(owner, name, called))

    def note(whole: Tensor, *_: Any, is_gather: bool) -> None:
        seen.gather(whole) if is_gather else seen.exchange(_nbytes(whole))

    spy(backend, "_unchecked", note)


def _model() -> nn.Module:
    """Small layers that would share an exchange, and one that is larger than any limit here."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)), nn.Linear(16, 700), nn.Linear(700, 16))


def _check_caps(rank: int) -> None:
    for stage in (0, 1, 2, 3):
        for gather_cap, reduce_cap in ((2048, 5120), (5120, 2048), (10, 1)):
            sizes = {"allgather_bucket_size": gather_cap, "reduce_bucket_size": reduce_cap}
            model, seen = _model(), _Seen()
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            with zero_optimizer(model, sgd, stage=stage, **sizes) as optimizer, ExitStack() as stack:
                _spying(stack, seen)
                for _ in range(2):
                    model(torch.ones(2, 16) * (rank + 1)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert seen.calls > 0
            gathered_cap = gather_cap if stage else reduce_cap  # stage 0 gathers gradients
            for nbytes, cap in ((seen.gathered, gathered_cap), (seen.exchanged, reduce_cap)):
                assert 0.5 * cap <= nbytes / 4 <= max(cap, LEAST), (stage, sizes, nbytes / 4)


def test_no_exchange_is_larger_than_its_bucket() -> None:
    run_ranks(WORLD_SIZE, _check_caps)
