"""Values that ZeroSettings refuses: the error names the setting and the value."""

# covers zero/reports.py

from __future__ import annotations

from typing import Any

import pytest
import torch

from zcomm import ConfigError
from zero import ZeroSettings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stage3_max_live_parameters", -1),
        ("stage3_prefetch_bucket_size", True),
        ("stage3_max_reuse_distance", "1"),
        ("overlap_comm", 1),
        ("hpz_secondary_device", "disk"),
        ("residual_beta", True),
        ("residual_beta", "1"),
        ("residual_beta", 1.5),
        ("gradient_dtype", torch.int8),
    ],
)
def test_a_value_that_cannot_be_meant_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as raised:
        ZeroSettings(**{name: value})
    assert repr(value) in str(raised.value)
