"""``bench/predict.py``: predictions by hand, compared with recorded JSON, and those committed."""

# covers bench/predict.py bench/plan_measured.py

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.job import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "bench"))
    import plan_measured
    import predict
    from comparison import records

RESULTS = ROOT / "bench" / "results"
SHAPE = {"hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "batch_size": 1, "nodes": 2, "steps": 1}
NUMEL = 2 * (12 * 64**2 + 13 * 64) + (256 + 32 + 2 + 256) * 64
NODE = 10e6 / 8 * 0.9
"""Bytes a second of a node at 10 Mbit/s."""


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_measured.os, "cpu_count", lambda: 2)


def _store(path: Path, batch: str, sizes: dict[str, int], runs: dict[str, dict[str, Any]]) -> Path:
    values = {
        "context": {"machine": "CPU", "versions": "torch"},
        "shape": {batch: SHAPE | sizes},
        "runs": {
            f"bfloat16 {batch} {network}": {"running": "", "tokens": 64, "numel": NUMEL, "systems": systems}
            for network, systems in runs.items()
        },
    }
    path.write_text(json.dumps(values))
    return path


def _files(folder: Path) -> tuple[Path, Path]:
    known = {"alone": {"seconds": [2.2, 2.0, 2.4]}, "alone x4": {"seconds": [8.0], "accumulation": 4}}
    on_loopback = {
        "alone": {"seconds": [0.1]},
        "alone x4": {"seconds": [0.4], "accumulation": 4},
        "ddp": {"seconds": [0.3, 0.2, 0.9]},
        "delta-hpz x4": {"seconds": [0.6], "accumulation": 4},
        "deepspeed stage 1": {"seconds": [0.2]},
        "fsdp2 reshard=True": {"seconds": [], "error": "died"},
    }
    slow = {"deepspeed stage 1": {"seconds": [9.0], "wire_nbytes": [1e6, 3e6, 2e6]}}
    alone = _store(folder / "alone.json", "users", {"seq_length": 32}, {"loopback": known})
    runs = {"loopback": on_loopback, "200mbit": slow}
    return alone, _store(folder / "before.json", "network", {"seq_length": 16}, runs)


def test_predictions_by_hand(tmp_path: Path) -> None:
    """Alone takes 2 s: DDP added 0.2 s, of which half is hidden on the network, and its ring sends 1.5 x 4 bytes."""
    known, before = (records.Store(path) for path in _files(tmp_path))
    found = predict.predict(known, before, ("loopback", "10mbit"))["step_s"]
    assert list(found) == ["bfloat16 users loopback", "bfloat16 users 10mbit"]
    fast, slow = found.values()
    assert set(fast) == set(slow) == {"ddp", "delta-hpz x4", "deepspeed stage 1"}, "what failed is not predicted"
    assert (fast["ddp"], fast["delta-hpz x4"]) == (pytest.approx(2.2), pytest.approx(8.2))
    assert slow["ddp"] == pytest.approx(2.2 + 1.5 * 4 * NUMEL / NODE - 0.1, rel=1e-3)
    assert slow["delta-hpz x4"] == pytest.approx(8.2), "all of its bytes are sent while it computes"
    assert slow["deepspeed stage 1"] == pytest.approx(2.1 + 2e6 / NODE - 0.05), "bytes as counted"


def test_what_cannot_be_predicted(tmp_path: Path) -> None:
    known, before = (records.Store(path) for path in _files(tmp_path))
    before.values["shape"]["network"]["hidden_size"] = 128
    with pytest.raises(ValueError, match="must be of the same model"):
        predict.predict(known, before)
    before = records.Store(tmp_path / "before.json")
    del before.values["runs"]["bfloat16 network 200mbit"]
    with pytest.raises(ValueError, match="bytes of 'deepspeed stage 1'"):
        predict.predict(known, before)
    del known.values["runs"]["bfloat16 users loopback"]["systems"]["alone x4"]
    with pytest.raises(ValueError, match="alone after 4 micro-batches"):
        predict.predict(known, before, ("loopback",))


def test_the_comparison_counts_rows_within_a_fifth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone, before = map(str, _files(tmp_path))
    output = tmp_path / "predictions"
    predict.main(["--alone", alone, "--calibration", before, "--networks", "loopback", "--output", str(output)])
    assert "Predicted, not measured" in capsys.readouterr().out
    # as many batches, so that they are compared
    taken = {
        name: {"seconds": [seconds], "wire_nbytes": [0.0], "accumulation": 4}
        for name, seconds in (("ddp", 2.2 / 1.19), ("delta-hpz x4", 8.2 / 0.79))
    }
    measured = str(_store(tmp_path / "new.json", "users", {"seq_length": 32}, {"loopback": taken}))
    arguments = ["--predictions", str(output.with_suffix(".json")), "--measured", measured]
    predict.main([*arguments, "--output", str(tmp_path / "beside")])
    page = capsys.readouterr().out
    assert page == (tmp_path / "beside.md").read_text()
    assert "1 of 2 rows within 20%: 50.0%" in page
    assert "| bfloat16 users loopback | ddp | 2,200 | 1,849 | +19 % |" in page
    assert "-21 % |" in page
    assert "0 of 1 ratios" in page
    assert page.endswith("| bfloat16 users loopback | delta-hpz x4 | ddp | 0.27 | 0.18 |\n")
    other = str(_store(tmp_path / "new.json", "users", {"seq_length": 64}, {"loopback": taken}))
    with pytest.raises(ValueError, match="must have the batch 'users'"):
        predict.main([*arguments[:-1], other])
    none = str(_store(tmp_path / "new.json", "users", {"seq_length": 32}, {}))
    with pytest.raises(ValueError, match="no step that was predicted"):
        predict.main([*arguments[:-1], none])


def test_the_committed_predictions_follow_from_what_they_name(tmp_path: Path) -> None:
    committed = json.loads((RESULTS / "predictions.json").read_text())
    assert (RESULTS / "predictions.md").read_text() == predict.page(committed)
    (batch,) = committed["shape"]
    assert [key.split()[2] for key in committed["step_s"]] == list(predict.NETWORKS)
    assert len({len(systems) for systems in committed["step_s"].values()}) == 1
    for systems in committed["step_s"].values():
        for name, step in systems.items():
            count = name.endswith("x4")
            assert step >= committed["alone_s"]["alone x4" if count else "alone"], f"{batch}: {name}"
