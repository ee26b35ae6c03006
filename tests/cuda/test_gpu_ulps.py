"""On a GPU: changes in ulps have the bytes of the CPU's messages, come back bit for bit, and damage clears the flag."""

# covers zcomm/_kernels/ulps_on_cuda.py

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from zcomm._kernels import ulps, ulps_on_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not ulps_on_cuda.is_built(), reason="built without CUDA"),
]
SIZES = [0, 1, 33, 5000, (1 << 18) + 77, 3_000_001]


def _changed(numel: int, share: float, scale: float, seed: int) -> tuple[Tensor, Tensor]:
    """New and old bits of which a share differs, by some ulps."""
    draw = np.random.default_rng(seed)
    old = draw.integers(0, 1 << 15, numel)
    steps = np.where(draw.random(numel) < share, np.rint(draw.laplace(0, scale, numel)), 0).astype(np.int64)
    new = np.clip(old + steps, 0, (1 << 15) - 1)
    first, second = (torch.from_numpy(bits.astype(np.int16)).view(torch.bfloat16) for bits in (new, old))
    return first, second


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(
    ("share", "scale"), [(0.0, 1.0), (0.005, 1.0), (0.05, 3.0), (1.0, 0.5), (1.0, 20.0), (1.0, 1e4)]
)
def test_messages_are_the_cpus(numel: int, share: float, scale: float) -> None:
    seed = random.SystemRandom().randrange(1 << 20)
    new, old = _changed(numel, share, scale, seed)
    expected = torch.zeros(ulps.max_message_nbytes(numel), dtype=torch.uint8)
    used = ulps.encode(new, old, expected)
    message = torch.zeros(expected.numel(), dtype=torch.uint8, device="cuda")
    ulps_on_cuda.encode(new.cuda(), old.cuda(), message)
    assert ulps.message_nbytes(message[: ulps.HEAD_NBYTES].cpu()) == used, seed
    assert torch.equal(message[:used].cpu(), expected[:used]), seed
    values, is_valid = old.cuda(), torch.ones(1, dtype=torch.int32, device="cuda")
    ulps_on_cuda.decode(message, values, is_valid)
    assert is_valid.item() == 1, seed
    assert torch.equal(values.cpu().view(torch.int16), new.view(torch.int16)), seed


def test_damage_clears_the_flag_and_leaves_the_values() -> None:
    new, old = _changed(100_000, 1.0, 5.0, 1)
    message = torch.zeros(ulps.max_message_nbytes(new.numel()), dtype=torch.uint8)
    used = ulps.encode(new, old, message)
    for at in (0, 5, 21, 40, used - 1):
        damaged = message[:used].cuda()
        damaged[at] ^= 16
        values, is_valid = old.cuda(), torch.ones(1, dtype=torch.int32, device="cuda")
        ulps_on_cuda.decode(damaged, values, is_valid)
        assert is_valid.item() == 0, at
        assert torch.equal(values.cpu().view(torch.int16), old.view(torch.int16)), at
