"""Overflow is found wherever it occurs, and large finite values are not taken for it."""

# covers zero/_optim/loss_scale.py

from __future__ import annotations

import math

import pytest
import torch

from zero._optim.loss_scale import is_nonfinite, nonfinite_flag

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_anywhere_is_seen(dtype: torch.dtype, bad: float) -> None:
    largest = torch.finfo(dtype).max
    for numel in (1, 7, 64, 1000):
        values = torch.linspace(-1, 1, numel, dtype=torch.float64).to(dtype)
        values[0] = largest  # its square overflows, the value itself does not
        values[-1] = -largest
        others = [torch.empty(0, dtype=dtype), torch.ones(3)]
        assert not nonfinite_flag([*others, values], CPU)
        for at in {0, numel // 2, numel - 1}:
            spoiled = values.clone()
            spoiled[at] = bad
            assert nonfinite_flag([values, *others, spoiled], CPU)
            assert is_nonfinite([spoiled])


def test_without_elements_there_is_no_overflow() -> None:
    assert not is_nonfinite([])
    assert not is_nonfinite([torch.empty(0)])
    flag = nonfinite_flag([], CPU)
    assert (flag.dtype, flag.shape) == (torch.bool, ())
