"""The tables of ``bench/compare.py``, from recorded JSON."""

# covers bench/beside.py bench/compare.py

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.job import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "bench"))
    from comparison import figure, records, tables

PEER = "fsdp2 reshard=True"
RECORDED = {
    "runs": {
        "float32 network loopback": {
            "tokens": 64, "numel": 10, "systems": {PEER: {"seconds": [0.1, 0.2, 0.1], "wire_nbytes": [9]}},
        },
        "float32 network 200mbit": {
            "running": "", "tokens": 64, "numel": 10,
            "systems": {
                "alone": {"seconds": [0.1, 0.1, 0.3], "wire_nbytes": [0, 0, 0], "losses": {"4": 5.1}},
                PEER: {"seconds": [2.0, 4.0, 1.0], "wire_nbytes": [2e6, 3e6, 4e6], "losses": {"1": 5.5, "4": 5.12345}},
                "ddp": {"seconds": [1.0, 1.0, 1.0], "wire_nbytes": [1e6] * 3, "losses": {"1": 5.5, "4": 5.12348}},
                "zero++": {"seconds": [0.5, 0.5, 0.5], "wire_nbytes": [1e5] * 3, "units": 0.76, "distance": 0.0125,
                           "losses": {"1": 5.5, "4": 5.12445}},
                "fsdp2 reshard=False x4": {"seconds": [4.0, 8.0, 2.0], "wire_nbytes": [1e6] * 3, "losses": {"4": 4.5},
                                           "accumulation": 4},
                "hsdp reshard=False x4": {"seconds": [2.0, 3.0, 2.0], "wire_nbytes": [1e6] * 3, "losses": {"4": 4.5},
                                          "accumulation": 4},
                "zero++ x4": {"seconds": [1.0, 1.0, 1.0], "wire_nbytes": [1e5] * 3, "losses": {"4": 4.502},
                              "accumulation": 4},
                "alone x4": {"seconds": [0.5, 0.5, 0.5], "wire_nbytes": [0] * 3, "losses": {"4": 1.0},
                             "accumulation": 4},
                "deepspeed stage 3": {"error": "RuntimeError: a | b"},
            },
        },
    },
    "memory": {"float32 network": {"ddp": {"peak_mib": 1234.5, "states_mib": 50.25, "base_mib": 1.0}}},
}  # fmt: skip


def test_tables_from_recorded_json(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    path.write_text(json.dumps(RECORDED))
    store = records.Store(path)
    runs = {key: store.run(key) for key in store.values["runs"]}
    key = "float32 network 200mbit"
    rows = {row["system"]: row for row in tables.rows_of(key, runs, store.values["memory"])}
    plain, ddp, narrow, four, failed = (
        rows[name] for name in (PEER, "ddp", "zero++", "zero++ x4", "deepspeed stage 3")
    )
    assert plain["step_ms"] == 2000
    assert plain["step_range_ms"] == (1000, 4000)
    assert plain["tokens_per_s"] == 32
    assert plain["wire_mb"] == 3
    assert plain["network_share"] == pytest.approx(0.95)
    assert plain["compute_share"] == pytest.approx(0.05)  # of 0.05, 0.025 and 0.3
    assert narrow["vs_fsdp2"] == 4
    assert narrow["vs_best"] == 2, "beside ddp"
    assert (narrow["distance"], plain["distance"]) == (0.0125, None)
    assert four["tokens_per_s"] == 4 * 64
    assert four["vs_fsdp2"] == 4, "beside what accumulates as many batches, not beside four steps of what does not"
    assert four["vs_best"] == 2
    assert four["compute_share"] == 0.5
    assert (ddp["peak_mib"], ddp["states_mib"]) == (1234.5, 50.25)
    assert ddp["remark"] == ""
    assert rows["alone"]["remark"] == "", "it trains on a part of the batch"
    assert narrow["remark"] == "loss does not agree to 4 decimals: +0.00100 beside FSDP2's after step 4"
    assert four["remark"] == "loss does not agree to 4 decimals: +0.00200 beside FSDP2's after step 4"
    assert "step_ms" not in failed
    text = tables.markdown(runs, store.values["memory"], {"command": "c", "machine": "a chip, 2 cores"})
    assert "FSDP2 waits for the network 95.0% of its step." in text
    assert "| 5.12445 | 1.25e-02 | loss does not agree" in text
    assert (
        "| ddp | 1,000.0 | 1,000.0 to 1,000.0 | 64 | 2.00 | 1.00 |  | 10.0% | 1.00 |  | 1,234 | 50.2 | 5.12348 |  |"
        in text
    )
    assert "RuntimeError: a / b |" in text
    assert "One batch a step. FSDP2: `fsdp2 reshard=True`. Best peer: `ddp`." in text
    one, accumulating = text.split("4 batches a step, accumulated. FSDP2: `fsdp2 reshard=False x4`. HSDP: `hsdp ")
    assert "x4" not in one.partition("## float32, network, 200mbit")[2]
    assert accumulating.count("\n| ") == 5
    assert runs[key].unfinished(["ddp", "deepspeed stage 3", "zero stage 1"], 3) == ["zero stage 1"]
    assert runs[key].unfinished(["ddp"], 4) == ["ddp"]


def _row(peers: list[str], ours: list[str]) -> dict[str, Any]:
    """The row of ours, with a step of 1 s in its rounds, beside a peer with as many seconds as a round's last digit."""
    systems = {
        "ddp": records.System(seconds=[float(one[-1]) for one in peers], rounds=peers, wire_nbytes=[0.0]),
        "delta-hpz": records.System(seconds=[1.0] * len(ours), rounds=ours, wire_nbytes=[0.0]),
    }
    key = "bfloat16 network loopback"
    runs = {key: records.Run(tokens=64, systems=systems)}
    peer, row = tables.rows_of(key, runs, {})
    assert "vs_best_interval" not in peer, "it is the best peer itself"
    assert ("95% interval |" in tables.markdown(runs, {}, {})) == ("vs_best_interval" in row)
    return row


def test_ratios_are_of_rounds_in_common_and_an_interval_needs_six() -> None:
    rounds = [f"7/{number}" for number in range(1, 10)]
    row = _row(rounds, rounds[::-1])
    assert row["vs_best"] == 5
    assert row["vs_best_interval"] == (2, 8), "the second and the eighth of nine"
    assert _row(rounds[:6], rounds)["vs_best_interval"] == (1, 6)
    assert "vs_best_interval" not in _row(rounds[:5], rounds)
    row = _row([f"7/{number}" for number in (1, 2, 3, 4)], ["8/1", "7/1", "7/3", "8/4", "8/5", "8/6"])
    assert row["vs_best"] == 2, "of rounds 7/1 and 7/3"
    assert _row(["7/3", "7/5"], ["8/3", "8/5"])["vs_best"] == 4, "none in common: of the medians"


def test_speeds_by_rate_and_what_bytes_and_computing_allow() -> None:
    def run(alone: float, peer: float, ours: float) -> records.Run:
        times = {"alone": (alone, 0.0), "ddp": (peer, 9e6), "delta-hpz": (ours, 5e6), "zero++": (1.0, 1e6)}
        systems = {name: records.System(seconds=[s], wire_nbytes=[n]) for name, (s, n) in times.items()}
        systems["delta-hpz"].cpu_seconds = [ours + 0.5]
        systems["zero++"].error = "gone" if peer > 2 else ""
        return records.Run(tokens=100, systems=systems)

    runs = {
        "bfloat16 users 10mbit": run(1.0, 16.0, 5.0),
        "bfloat16 users loopback": run(1.0, 2.0, 1.25),
        "float32 users 10mbit": run(1.0, 1.0, 1.0),
    }
    lines = tables.rates(runs, {"bfloat16 users": {"ddp": {"states_mib": 7.0}}}, "bfloat16", "users", 1, 2)
    assert lines[0] == "| tokens/s | loopback | 10mbit | model states, MiB |"
    assert lines[2:] == [
        "| alone | 100 | 100 |  |",
        "| ddp | 50 | 6 | 7.0 |",
        "| delta-hpz | 80 | 20 |  |",
        "| zero++ | 100 |  |  |",
        "| best peer | ddp | ddp |  |",
        "| delta-hpz over the best peer | 1.60 | 3.20 |  |",
        "| delta-hpz over a peer that hides all it can | 0.80 | 1.44 |  |",  # 1 of 1.25 s; 9 MB in 7.2 of 5 s
        "| delta-hpz over computing alone or its bytes | 0.80 | 0.80 |  |",  # 1 of 1.25 s; 5 MB in 4 of 5 s
        "| cores busy with delta-hpz | 0.70 | 0.55 |  |",  # 1.75 s of 2 x 1.25, 5.5 of 2 x 5
    ]
    text = tables.markdown(runs, {}, {"machine": "a chip, 2 cores"})
    assert text.count(", by rate") == 1, "of the batch that has two rates"


def test_a_curve_is_of_the_system_that_most_networks_have() -> None:
    slow = [{"system": name, "tokens_per_s": speed} for name, speed in (("hsdp a", 3.0), ("hsdp b", 2.0), ("ddp", 1.0))]
    fast = [{"system": name, "tokens_per_s": speed} for name, speed in (("hsdp b", 4.0), ("ddp", 5.0), ("other", 9.0))]
    curves = figure.fastest_of_kinds([slow, [{"system": "hsdp b"}], fast, [{"system": "ddp", "tokens_per_s": 6.0}]])
    assert list(curves) == ["ddp", "hsdp b"]
    assert str(curves) == "{'ddp': [1.0, nan, 5.0, 6.0], 'hsdp b': [2.0, nan, 4.0, nan]}"


def test_peers_are_systems_of_others_with_the_same_loss() -> None:
    """One line of this library under FSDP2 is no FSDP2, and PowerSGD trains to another loss."""
    times = {"zcomm fsdp2 reshard=False": 1.0, "zero++": 1.0, "ddp powersgd 4": 2.0, "ddp": 3.0}
    fsdp2 = {"fsdp2 reshard=True": 5.0, "fsdp2 reshard=False": 4.0}
    systems = {name: records.System(seconds=[s], wire_nbytes=[0.0]) for name, s in (times | fsdp2).items()}
    run = records.Run(tokens=1, systems=systems)
    assert tables.best_peer(run, 1) == "ddp"
    assert tables.best_peer(run, 1, tables.FSDP2) == "fsdp2 reshard=False"
    assert tables.best_peer(run, 4) is None
    rows = {
        row["system"]: row
        for row in tables.rows_of("bfloat16 users loopback", {"k": run, "bfloat16 users loopback": run}, {})
    }
    assert rows["zero++"]["vs_fsdp2"] == 4
    assert rows["zero++"]["vs_best"] == 3
