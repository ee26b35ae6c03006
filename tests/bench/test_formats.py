"""The rows of ``bench/formats.py`` that are no formats of this library, against figures by hand."""

# covers bench/formats.py

from __future__ import annotations

import math

import pytest
import torch

from tests.end_to_end.job import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "bench"))
    import formats


def test_nvfp4_rounds_to_its_eight_magnitudes() -> None:
    """The largest of the tensor is 6 x 448 steps of the scale for all, so the first block's scale is 448 of it."""
    x = torch.zeros(40)
    x[:5] = torch.tensor([6.0, -2.4, 2.6, 0.2, -0.3])  # steps of 1: 6, 2, 3, 0 and 0.5
    x[16:19] = torch.tensor([3.0, 0.6, -1.6])  # a scale of a half, which E4M3 has: 3, 0.5 and 1.5
    got = formats.nvfp4(x)
    assert got[:5].tolist() == pytest.approx([6.0, -2.0, 3.0, 0.0, -0.5])
    assert got[16:19].tolist() == pytest.approx([3.0, 0.5, -1.5])
    assert not got[19:].any(), "a block of zeros, and one that is not whole"


def test_coded_gradients_have_the_error_that_is_asked_for() -> None:
    torch.manual_seed(0)
    row = formats.coded(torch.randn(1 << 18), 0.15, 1)
    assert row["error"] == pytest.approx(0.15, rel=0.02)
    of_grid = 0.5 * math.log2(2 * math.pi * math.e / 12) - math.log2(0.15)
    assert row["bits"] == pytest.approx(of_grid + 16 / 128, abs=0.05), "with 16 bits for each block's step"


def test_a_grid_has_the_entropy_of_theory() -> None:
    """With fine steps d a uniform distribution over [0, 1) has log2(1 / d) bits, and an error of d / sqrt(12)."""
    torch.manual_seed(0)
    x = torch.rand(1 << 20)
    error = 1 / 64 / math.sqrt(12) / math.sqrt(1 / 3)
    bits, got = formats.grid(x, error)
    assert got == pytest.approx(error, rel=0.01)
    assert bits == pytest.approx(6.0, abs=0.05)
    bits, _ = formats.grid(torch.randn(1 << 20), 0.0922)  # theory: differential entropy - log2(step)
    assert bits == pytest.approx(0.5 * math.log2(2 * math.pi * math.e) - math.log2(0.0922 * math.sqrt(12)), abs=0.01)
