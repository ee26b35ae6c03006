"""``zcomm bench``: its output format, its verdicts, the options it refuses, and its columns against formulas."""

# covers zcomm/_bench/checking.py zcomm/_bench/collectives.py zcomm/_bench/command.py zcomm/_bench/error_bounds.py

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zcomm
from tests.forks import run_on_forks
from tests.ranks import run_ranks, topology
from tests.zcomm import oracle
from tests.zcomm.oracle import Wire as OracleWire
from zcomm import cli
from zcomm._bench import error_bounds
from zcomm._bench.checking import check
from zcomm._bench.data import Tiles
from zcomm._bench.harness import BenchReport, Column, Timing, interleave
from zcomm._bench.interface import sent_nbytes
from zcomm._bench.options import sizes_of
from zcomm._bench.workloads import Workload, wire_of
from zcomm._collectives.auto_format import FormatTable


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        status: Any = cli.main(["bench", *arguments])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ({"stepbytes": None, "stepfactor": 2}, [1000, 2000]),
        ({"stepbytes": None, "stepfactor": 3}, [1000, 3000]),
        ({"stepbytes": 900, "stepfactor": 2}, [1000, 1900, 2800]),
        ({"stepbytes": None, "stepfactor": 1}, [1000]),
    ],
)
def test_sizes(step: dict[str, Any], expected: list[int]) -> None:
    assert sizes_of(argparse.Namespace(minbytes=1000, maxbytes=3000, **step)) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-b", "1T"], "must be a number of bytes, optionally with K, M or G"),
        (["-b", "2M", "-e", "1M"], "--minbytes must be at most --maxbytes: --minbytes 2097152 --maxbytes 1048576"),
        (["--formats", "int5"], "did you mean 'int"),
        (["--collectives", "broadcast"], "must be one of all_gather, reduce_scatter"),
        (
            ["--backend", "nccl", "--device", "cpu"],
            "it takes tensors on GPUs, got --device cpu; --backend torch runs on",
        ),
        (["--rate", "1mbit"], "--rate needs --emulate-nodes"),
        (["--plot", "/nowhere/at/all.png"], "must name a file in a folder that exists"),
        (["--interface", "nothing0"], "must name a network interface of this machine: 'nothing0'"),
        (["-n", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_run_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str) -> None:
    assert expected in _refused(capsys, *arguments)


@pytest.mark.parametrize("command", ["bench", "probe"])
def test_a_gpu_that_is_not_there(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main([command, "--device", "cuda"]) == 2
    assert "--device cuda needs a GPU, but torch.cuda.is_available() is False" in capsys.readouterr().err


def test_emulated_nodes_need_root(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert "emulated nodes need root" in _refused(capsys, "--emulate-nodes", "2")


def test_tiles_are_what_they_say() -> None:
    tiles = Tiles(torch.bfloat16)
    x = tiles.of_rank(3, 5, 200_000)
    for i in (0, 1, 65_531, 65_532, 150_000, 199_994):
        assert x[i] == tiles.tile[(i + 5 + 3 * 7919) % 65537]
    parts = [tiles.of_rank(rank, 70_000, 70_100).double() for rank in range(2, 5)]
    assert torch.equal(tiles.sum_of(range(2, 5), 70_000, 70_100), sum(parts))
    assert torch.equal(tiles.magnitudes(range(2, 5), 70_000, 70_100), sum(part.abs() for part in parts))


@pytest.mark.parametrize(
    ("text", "at_least"),
    [
        *((name, 0.9) for name in ("int8", "int4", "nf4", "fp8_e4m3", "int8:asym", "int4:asym")),
        *((name, 0.9) for name in ("int8:stochastic", "int4/64:asym:stochastic")),
        *((name, 0.01) for name in ("int4/64:hadamard", "int4/64:asym:hadamard:stochastic")),  # a bound on any data
    ],
)
def test_a_bound_holds_and_is_met(text: str, at_least: float) -> None:
    """By the oracle, which shares no code: no error exceeds the bound, and some come close to it."""
    format = zcomm.get_format(text)
    drawn = (1, 2, 3, 4, 5) if format.is_random else None
    wire = OracleWire(format.name, format.block, format.symmetric, format.rotation is not None, drawn)
    x = np.random.default_rng(0).uniform(-1, 1, 20_000).astype(np.float32)
    off = np.abs(oracle.decode([x], wire)[0].astype(np.float64) - x)
    bound = error_bounds.step_bound(torch.from_numpy(x).double().abs(), format, torch.float32).numpy()
    assert (off <= bound).all()
    assert (off / bound).max() > at_least


def test_a_cast_to_fp16_may_lose_all_of_the_smallest_values() -> None:
    """They are rounded to multiples of 2^-24, so a bound that is relative alone would call them wrong."""
    x = torch.tensor([1e-7, 3e-6, 1e-5, 6e-5, 1.0, 1234.5])
    off = (x.half().double() - x.double()).abs()
    bound = error_bounds.step_bound(x.double().abs(), zcomm.get_format("fp16"), torch.float32)
    assert (off > x.double() * 2**-11).any()
    assert (off <= bound).all()
    assert (bound[:3] == 2**-25).all()


USUAL = ("none", "int8", "int4", "int8+int4")
WITH_OPTIONS = ("int4/64:asym:stochastic", "int8:stochastic+int4:hadamard", "int8/128:asym:hadamard:stochastic")


def _check_verdicts(rank: int, op: str, dtypes: tuple[torch.dtype, ...], texts: tuple[str, ...]) -> None:
    t = topology(2)
    for dtype in dtypes:
        tiles = Tiles(dtype)
        for collective in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "secondary_gather"):
            w = Workload(collective, 300_000, tiles, t, op)
            wires = [(wire_of(text, hops)) for text in texts for hops in (1, 2)]
            for wire in [None, *wires]:
                if wire is None or (wire.num_hops == 1 and wire.inside != wire.between):
                    continue
                w.poison()
                w.call_zcomm(wire)
                verdict = check(w, wire)
                assert verdict.num_wrong == 0, (collective, str(wire), wire.num_hops)
                if collective != "secondary_gather":
                    _check_a_fault_is_seen(rank, w, wire)
            w.poison()
            w.call_torch()
            assert check(w, None).num_wrong == 0, collective


def _check_a_fault_is_seen(rank: int, w: Workload, wire: Any) -> None:
    """Change one element on one rank by slightly more than the bound, or make ranks hold different values."""
    part = list(w.parts())[-1]
    spot = part.start + part.numel // 2
    usual = w.output[spot].clone()
    if rank == 2:
        w.output[spot] = usual.double() + 3 * w.bound(part, 0, part.numel, wire)[part.numel // 2] + 1e-2
    assert check(w, wire).num_wrong >= 1
    w.output[spot] = usual
    if w.is_replicated:
        if rank == 1:
            w.output[-1] = torch.nextafter(w.output[-1], torch.tensor(9.0, dtype=w.dtype))
        assert check(w, wire).num_wrong >= 1


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_verdicts(op: str) -> None:
    run_ranks(4, _check_verdicts, op, (torch.bfloat16, torch.float32), USUAL)


def test_verdicts_on_formats_with_options() -> None:
    run_ranks(4, _check_verdicts, "avg", (torch.bfloat16,), WITH_OPTIONS)


def _check_other_numbers(rank: int) -> None:
    w = Workload("all_gather", 40_000, Tiles(torch.float32), topology(2), "sum")
    results = []
    for _ in range(2):
        w.call_zcomm(wire_of("int4:stochastic", 2))
        results.append(w.output.clone())
    assert not torch.equal(*results)


def test_every_call_draws_other_random_numbers() -> None:
    run_ranks(4, _check_other_numbers)


def test_an_interfaces_counter() -> None:
    assert sent_nbytes("lo") >= 0
    with pytest.raises(zcomm.ConfigError, match="'lo0'"):
        sent_nbytes("lo0")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_what_is_being_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = BenchReport([Column("case", "case")])
    report.status("nobody sees this")
    assert capsys.readouterr() == ("", "")
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    report.status("checking int8" + 500 * " and on")
    shown = terminal.getvalue()
    assert "checking int8" in shown
    assert len(shown) < 200  # no line break
    report.row({"case": "int8"}, num_wrong=0)
    assert terminal.getvalue() == shown + "\r\x1b[K"  # erased before the row
    assert capsys.readouterr().out.split() == ["int8", "0"]


def _zcomm(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The JSON lines of a run in ``folder``, outside the source tree."""
    command = [sys.executable, "-m", "zcomm", *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=350, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_round_of_times_has_an_order_of_its_own() -> None:
    called: list[str] = []
    cases = {name: partial(called.append, name) for name in "abcd"}
    timings = interleave(cases, rounds=40, warmup=2)
    orders = ["".join(called[i : i + 4]) for i in range(0, len(called), 4)]
    assert len(orders) == 42
    assert {"".join(sorted(order)) for order in orders} == {"abcd"}
    assert len(set(orders)) > 15
    assert {len(timing.seconds) for timing in timings.values()} == {40}
    first, called[:] = list(called), []
    interleave(cases, rounds=40, warmup=2)
    assert called == first, "ranks would call in different orders"


def test_times_are_compared_round_by_round() -> None:
    mine, none = Timing((1.0, 10.0, 4.0)), Timing((2.0, 5.0, 12.0))
    assert mine.faster_than(none) == 2.0  # of 2, 1/2 and 3; the medians' ratio is 5/4
    assert mine.faster_than(mine) == 1.0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_rows_and_plot_of_a_run(tmp_path: Path) -> None:
    picture = tmp_path / "bench.png"
    lines = _zcomm(tmp_path, "bench", "-b", "8K", "-e", "64K", "-f", "8", "-n", "3",
                   "--formats", "none,int8,int4:asym:stochastic", "--plot", str(picture))  # fmt: skip
    rows = [line for line in lines if "collective" in line]
    assert len(rows) == 2 * (4 * 7 + 2)
    for row in rows:
        assert row["num_wrong"] == 0
        assert row["p50_us"] > 0
        assert row["algbw_gbps"] == pytest.approx(row["nbytes"] / row["p50_us"] / 1e3)
    by_key = {(r["collective"], r["nbytes"], r["format"], r["hops"]): r for r in rows}
    row = by_key["all_gather", 65536, "int8", 2]
    sent = zcomm.volume.all_gather_sent(8192, torch.bfloat16, 2, 2, ("int8", "int8"))
    assert (row["sent_nbytes"], row["inter_nbytes"]) == (sum(sent), 2 * sent.inter)
    assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"] * 3 / 4)
    assert 0 < row["relative_error"] < 0.01
    assert by_key["all_gather", 65536, "torch", "-"]["over_torch"] == 1
    assert [by_key["all_gather", 65536, "none", hops]["over_none"] for hops in (1, 2)] == [1, 1]
    assert row["over_none"] > 0
    assert "over_none" not in by_key["all_gather", 65536, "torch", "-"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert lines[-1]["context"] == "wrong results : 0 OK"


@pytest.mark.timeout(400)
def test_probe_writes_what_auto_reads(tmp_path: Path) -> None:
    path = tmp_path / "new" / "probe.json"
    arguments = ["-b", "64K", "-e", "256K", "-n", "3", "--formats", "int8", "--output", str(path)]
    printed = run_on_forks(4, [["-m", "zcomm", "probe", *arguments, "--json"]], cwd=tmp_path)
    rows = [row for line in printed.splitlines() if line.startswith("{") and "collective" in (row := json.loads(line))]
    facts = json.loads(path.read_text())["topologies"]["2x2 on 1 host"]
    assert facts["links"]["within"]["bandwidth_gbps"] > 0
    assert facts["links"]["between"]["latency_us"] > 0
    assert facts["kernels_gbps"]["int8"].keys() == {"quantize", "decode"}
    table = FormatTable.parse(str(path), path.read_text(), shape="2x2 on 1 host")
    assert len(rows) == 4 * 2
    for row in rows:
        choice = table.choose(row["collective"], row["nbytes"], torch.device("cpu"))
        assert (str(choice.inside), choice.num_hops) == (row["format"], row["hops"])
        assert row["format"] == "none" or row["speedup"] >= 1.25


def test_probe_overwrites_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = tmp_path / "precious.json"
    other.write_text('{"mine": 1}')
    assert cli.main(["probe", "--output", str(other)]) == 2
    assert "precious.json is not a file of `zcomm probe`" in capsys.readouterr().err
    assert other.read_text() == '{"mine": 1}'
