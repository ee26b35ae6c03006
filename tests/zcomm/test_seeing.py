"""Observability: spans in a profiler's trace, scalars, sampled errors."""

# covers zcomm/_kernels/relative_error.py

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import zcomm
from tests.ranks import run_ranks, topology
from zcomm import LayoutError, relative_error, relative_errors


def _spans(trace: Any) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [e for e in events if str(e.get("name", "")).startswith("zcomm::") and e.get("ph") == "X"]
    return [e["name"].removeprefix("zcomm::") for e in sorted(found, key=lambda e: e["ts"])]


def _check_trace(rank: int) -> None:
    x, shard, t = torch.randn(4 * 256), torch.empty(256), topology(2)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        zcomm.reduce_scatter_single(shard, x, group=t, format=("int8", "int4"))
    assert _spans(trace) == [
        "quantize int8",
        "reduce_scatter int8 intra",
        "decode_sum_requantize int8 int4",
        "reduce_scatter int4 inter",
        "decode_sum int4",
    ]
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        zcomm.all_gather_single(torch.empty(4 * 256), shard, t, format="int8", numbering="local")
    assert _spans(trace) == ["quantize int8", "all_gather int8 inter", "all_gather int8 intra", "decode int8"]
    assert rank >= 0


def test_a_trace_shows_each_phase_by_name() -> None:
    run_ranks(4, _check_trace)


def _check_scalars(rank: int) -> None:
    with zcomm.traffic() as sent:
        zcomm.all_gather_single(torch.empty(400), torch.randn(100), topology(2), format="int8")
    scalars = sent.scalars("net")
    assert scalars["net/all_gather/int8/inter"] == sent.bytes(link="inter") == scalars["net/inter"] > 0
    assert scalars["net/intra"] == sent.bytes(link="intra")
    assert rank >= 0


def test_scalars() -> None:
    run_ranks(4, _check_scalars)


def test_relative_error_of_a_tensor() -> None:
    x = torch.linspace(-1, 1, 1000, dtype=torch.float64).view(10, 100).t()
    assert relative_error(x.float(), "none") == 0
    step = 2 / 254  # of int8 codes over [-1, 1], whose errors are spread evenly over half a step
    assert relative_error(x, "int8/1000") == pytest.approx(step / 12**0.5 / (1 / 3) ** 0.5, rel=0.05)
    assert relative_error(torch.zeros(5), "int4") == 0
    assert relative_error(torch.tensor([1.0, float("nan")]), "int4") != relative_error(torch.ones(2), "int4")
    errors = relative_errors({"w": torch.randn(512, dtype=torch.bfloat16), "frozen": None}, "nf4")
    assert list(errors) == ["w"]
    assert 0.08 < errors["w"] < 0.1
    for bad, named in ((torch.arange(3), "int64"), (torch.empty(3, device="meta"), "device=meta")):
        with pytest.raises(LayoutError, match=named):
            relative_error(bad, "int8")
