"""``bench/plan_validation.py --measured``, from recorded JSON, compared with times computed by hand."""

# covers bench/plan_measured.py bench/plan_validation.py zero/plan/command.py zero/plan/planner.py zero/plan/times.py

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.job import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "bench"))
    import plan_measured
    import plan_validation
    from comparison import records

HIDDEN, LAYERS, SEQUENCE = 64, 2, 16
NUMEL = LAYERS * (12 * HIDDEN**2 + 13 * HIDDEN) + (256 + SEQUENCE + 2 + 256) * HIDDEN
KERNELS_GBPS = 2.5
LINKS = {
    "within": {"latency_us": 300.0, "bandwidth_gbps": 0.5},
    "between": {"latency_us": 700.0, "bandwidth_gbps": 1.0},
}
LOOPBACK = "bfloat16 network loopback"
SHAPE = {"hidden_size": HIDDEN, "num_layers": LAYERS, "num_attention_heads": 4, "seq_length": SEQUENCE, "batch_size": 1}


def _files(
    tmp_path: Path, systems: dict[str, Any], network: str = "200mbit", loopback: dict[str, Any] | None = None
) -> tuple[Path, Path]:
    # kernels that read 2 bytes an element and write 2: half of what they move is what the probe's rate counts
    probe: dict[str, Any] = {
        "links": LINKS,
        "kernels_gbps": {"bf16": {"quantize": KERNELS_GBPS / 2, "decode": KERNELS_GBPS / 2}},
    }
    run = {"running": "", "tokens": 64, "numel": NUMEL, "systems": systems}
    runs = {f"bfloat16 network {network}": run} | ({} if loopback is None else {LOOPBACK: run | {"systems": loopback}})
    measured = {"shape": {"network": SHAPE | {"nodes": 2, "steps": 1}}, "runs": runs}
    paths = tmp_path / "compare.json", tmp_path / "probe.json"
    for path, values in zip(paths, (measured, {"topologies": {"2x2 on 1 host": probe}}), strict=True):
        path.write_text(json.dumps(values))
    return paths


def _rows(paths: tuple[Path, Path], *, has_own: bool = False) -> dict[str, Any]:
    store = records.Store(paths[0])
    facts = None if has_own else plan_measured.probed(paths[1], store)
    return {row.system: row for row in plan_measured.planned(store, facts)}


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_measured.os, "cpu_count", lambda: 2)


def test_steps_by_hand(tmp_path: Path) -> None:
    """At 200 Mbit/s a node sends 25 MB/s, of which nine tenths are usable."""
    times = {"alone": [0.01, 0.03, 0.02], "ddp": [0.1], "fsdp2 reshard=True": [0.1], "zero stage 1": [0.05]}
    systems = {name: {"seconds": seconds} for name, seconds in times.items()}
    systems |= {"deepspeed stage 1": {"seconds": [0.1]}, "zero stage 3 offload": {"seconds": [0.1]}}
    systems |= {"zero stage 2": {"error": "died"}, "zero++ x4": {"seconds": [0.1], "accumulation": 4}}
    paths = _files(tmp_path, systems)
    rows = _rows(paths)
    assert set(rows) == {"ddp", "fsdp2 reshard=True", "zero stage 1"}, "what has no step alone, or failed, is left out"
    node = 25e6 * 0.9
    ring, peer, ours = rows["ddp"].times, rows["fsdp2 reshard=True"].times, rows["zero stage 1"].times
    assert ring.computation == peer.computation == ours.computation == 0.02  # the median
    assert ring.between == pytest.approx(1.5 * 4 * NUMEL / node, rel=0.01)
    assert ring.latency == pytest.approx(6 * 700e-6)  # twice three rounds, all in one bucket
    assert peer.between == pytest.approx((1.5 + 2 * 0.75) * 2 * NUMEL / node, rel=0.01)
    assert peer.latency == pytest.approx((2 * 3 + 6) * 3 * 700e-6)  # each block, and all other parameters
    assert ours.between == pytest.approx(2 * NUMEL / node, rel=0.05)  # half of 2 bytes, there and back; padding
    assert ours.within == pytest.approx(2 * NUMEL / 0.5e9, rel=0.05)  # measured: no peak
    assert ours.latency == pytest.approx(2 * (300e-6 + 700e-6) + 2 * 700e-6)  # with its agreements
    assert ours.kernels == pytest.approx(8 * NUMEL / (KERNELS_GBPS * 1e9), rel=0.05)
    shorter = min(ours.between, 0.02 + ours.within + ours.latency + ours.kernels)
    assert rows["zero stage 1"].hidden == ours.hidden == pytest.approx(shorter / 2)  # 4 ranks on 2 cores
    assert ours.step == pytest.approx(0.02 + ours.within + ours.between + ours.latency + ours.kernels - shorter / 2)
    assert rows["ddp"].error == pytest.approx(ring.step / 0.1 - 1)


def test_on_loopback_links_are_those_of_the_probe(tmp_path: Path) -> None:
    systems = {"alone": {"seconds": [0.02]}, "ddp": {"seconds": [0.1]}, "zero stage 1": {"seconds": [0.05]}}
    rows = _rows(_files(tmp_path, systems, "loopback"))
    assert rows["ddp"].times.within == pytest.approx(1.5 * 4 * NUMEL / 0.5e9, rel=0.01)
    assert rows["ddp"].times.between == 0
    assert rows["zero stage 1"].times.between == pytest.approx(2 * NUMEL / 1e9, rel=0.05)
    assert rows["zero stage 1"].times.hidden == 0, "it is the cores that send"


def test_own_steps_are_those_on_loopback(tmp_path: Path) -> None:
    """The network's time at nine tenths of its rate, less half of what messages cost; ours computes meanwhile."""
    systems = {"ddp": {"seconds": [0.1]}, "zero stage 1": {"seconds": [0.05]}, "zero stage 2": {"seconds": [0.05]}}
    loopback = {"alone": {"seconds": [0.05]}, "ddp": {"seconds": [0.03, 0.1, 0.07]}, "zero stage 1": {"seconds": [0.2]}}
    paths = _files(tmp_path, systems, "2mbit", loopback)
    rows = _rows(paths, has_own=True)
    assert set(rows) == {"ddp", "zero stage 1"}, "what has no step on loopback is left out"
    between = 1.5 * 4 * NUMEL / (2e6 / 8 * 0.9)
    assert rows["ddp"].step == pytest.approx(0.07 + between - 0.02 / 2, rel=0.01)
    ours = 2 * NUMEL / (2e6 / 8 * 0.9)
    assert rows["zero stage 1"].step == pytest.approx(0.2 + ours - 0.05 - 0.15 / 2, rel=0.05)  # padding
    assert "--own-steps`; formulas" in plan_measured.page(paths[0], has_own=True)
    with pytest.raises(ValueError, match="on a network and on loopback"):
        plan_measured.page(_files(tmp_path, systems)[0], has_own=True)


def test_in_float32_fsdp2_sends_twice_the_bytes(tmp_path: Path) -> None:
    store = records.Store(_files(tmp_path, {})[0])
    run = store.values["runs"].pop("bfloat16 network 200mbit")
    systems = {"alone": {"seconds": [0.02]}, "fsdp2 reshard=True": {"seconds": [1]}, "ddp": {"seconds": [1]}}
    store.values["runs"] = {f"{dtype} network 200mbit": run | {"systems": systems} for dtype in ("float32", "bfloat16")}
    facts = plan_measured.probed(tmp_path / "probe.json", store)
    wide, ddp, narrow, _ = (row.times.between for row in plan_measured.planned(store, facts))
    assert wide == pytest.approx(2 * narrow, rel=1e-4)
    assert ddp == pytest.approx(1.5 * 4 * NUMEL / (25e6 * 0.9), rel=1e-4), "DDP's gradients are float32 in both"


def test_no_more_is_hidden_than_the_network_takes(tmp_path: Path) -> None:
    loopback = {"alone": {"seconds": [0.5]}, "zero stage 1": {"seconds": [0.7]}, "ddp": {"seconds": [9.0]}}
    paths = _files(tmp_path, {"ddp": {"seconds": [1]}, "zero stage 1": {"seconds": [1]}}, "10gbit", loopback)
    assert {name: row.step for name, row in _rows(paths, has_own=True).items()} == {"ddp": 9.0, "zero stage 1": 0.7}


def test_what_follows_a_step_is_not_hidden_by_computing(tmp_path: Path) -> None:
    """Half of the bytes at stages 1 and 2, and of delta-hpZ; at stage 3 every exchange has computing beside it."""
    names = ("zero stage 1", "zero stage 3", "delta-hpz")
    loopback = {"alone": {"seconds": [0.65]}} | {name: {"seconds": [0.7]} for name in names}
    systems = {name: {"seconds": [1]} for name in names}
    rows = _rows(_files(tmp_path, systems, "4.8mbit", loopback), has_own=True)
    between = 2 * NUMEL / (4.8e6 / 8 * 0.9)
    assert rows["zero stage 1"].step == pytest.approx(0.7 + between / 2 - 0.05 / 2, rel=0.01)
    of_stage3, of_delta = (rows[name].times.between for name in names[1:])
    assert of_stage3 > 0.7, "more than computing hides"
    assert rows["zero stage 3"].step == pytest.approx(0.7 + of_stage3 - 0.65 - 0.05 / 2)
    assert rows["delta-hpz"].step == pytest.approx(0.7 + of_delta / 2 - 0.05 / 2)


@pytest.mark.parametrize("name", ["hsdp reshard=True", "hsdp reshard=True x4", "fsdp2 reshard=False x4"])
def test_hybrid_and_accumulating_peers(tmp_path: Path, name: str) -> None:
    """Bytes and rounds of 2 nodes x 2 ranks over gloo, whose reduce-scatter goes twice around the ring."""
    count = 4 if name.endswith("x4") else 1
    systems = {
        "alone": {"seconds": [0.02]},
        "alone x4": {"seconds": [0.08]},
        name: {"seconds": [1], "accumulation": count},
    }
    times = _rows(_files(tmp_path, systems))[name].times
    node, model, groups = 25e6 * 0.9, 2 * NUMEL, 3
    if name.startswith("hsdp"):
        assert times.between == pytest.approx(model / node, rel=0.01), "half of it twice, of both ranks, once a step"
        within = (2 + 2) * count * model / 2
        assert times.within == pytest.approx(within / 0.5e9, rel=0.01)
        assert times.latency == pytest.approx((2 + 2) * count * groups * 300e-6 + 2 * groups * 700e-6)
    else:
        assert times.between == pytest.approx((1 + 2) * 0.75 * model / node, rel=0.01), (
            "gathered and reduced once a step"
        )
        assert times.latency == pytest.approx((1 + 2) * groups * 3 * 700e-6)
    assert times.computation == 0.02 * count


def test_the_page_counts_rows_within_a_fifth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systems = {"alone": {"seconds": [0.02]}, "ddp": {"seconds": [9.0]}, "zero stage 1": {"seconds": [1.0]}}
    paths = _files(tmp_path, systems)
    exact = _rows(paths)["zero stage 1"].step
    paths = _files(tmp_path, systems | {"zero stage 1": {"seconds": [1.19 * exact]}})
    plan_validation.main(["--measured", str(paths[0]), "--probe", str(paths[1])])
    page = capsys.readouterr().out
    assert "1 of 2 rows within 20%: 50.0%; 1 runs, 2 systems" in page
    assert "| bfloat16 network 200mbit | zero stage 1 | 20.0 |" in page
    assert "| -16 % |" in page


def test_what_cannot_be_planned(tmp_path: Path) -> None:
    paths = _files(tmp_path, {"ddp": {"seconds": [1.0]}})
    with pytest.raises(ValueError, match="measured beside alone"):
        plan_measured.page(*paths)
    store = records.Store(paths[0])
    store.values["shape"]["network"]["nodes"] = 3
    with pytest.raises(ValueError, match="no links of '3x2 on 1 host'"):
        plan_measured.probed(paths[1], store)
    with pytest.raises(ValueError, match="a rate like 200mbit: 'slow'"):
        plan_measured.rate_gbit("slow")
    assert [plan_measured.rate_gbit(name) for name in ("200mbit", "1gbit", "2.5gbit")] == [0.2, 1.0, 2.5]


@pytest.mark.parametrize(("page", "measured"), [("measured", "measured"), ("measured_13m", "compare_13m")])
def test_committed_pages_are_what_the_command_writes(page: str, measured: str) -> None:
    results = ROOT / "bench" / "results"
    assert (results / f"{page}.md").read_text() == plan_measured.page(results / f"{measured}.json", has_own=True)
