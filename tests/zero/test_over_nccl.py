"""Training over the emulated NCCL has the bits of training over torch's groups: every stage, and what sends less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

import zcomm
from tests.ranks import ranks_over, run_ranks
from tests.zero.training import assert_same_bits, train_and_collect
from zcomm import nccl_bytes, nccl_steps
from zcomm.nccl_communicators import communicator_over

ZEROPP = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
MODES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2, quantized": {"stage": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True},
    "ZeRO++": {"stage": 3, **ZEROPP},
    "delta": {"stage": 2, "zcomm": {"mode": "delta"}},
    "delta-hpZ": {"stage": 3, "zcomm": {"mode": "delta_hpz"}},
}


@contextmanager
def _used() -> Iterator[None]:
    """Fails unless something has gone over the communicator."""
    uses: list[object] = []

    def counting(*args: Any) -> Any:
        uses.append(args)
        return communicator_over(*args)

    with pytest.MonkeyPatch.context() as patch:
        for module in (nccl_steps, nccl_bytes):
            patch.setattr(module, "communicator_over", counting)
        yield
    assert len(uses) > 3


def _check_mode(rank: int, mode: str, dtype: torch.dtype) -> None:
    results = []
    for backend in ("torch", "nccl"):
        zcomm.use_backend(backend)  # type: ignore[arg-type]
        loop = {"num_micro": 2, "max_norm": 0.5}
        with _used() if backend == "nccl" else nullcontext():
            results.append(train_and_collect(rank, dtype=dtype, loop=loop, ranks_per_node=2, **MODES[mode]))
    assert_same_bits(*results)


@pytest.mark.parametrize("mode", MODES)
def test_training_has_the_bits_of_torch(mode: str) -> None:
    with ranks_over("nccl"):
        run_ranks(4, _check_mode, mode, torch.float32)
