"""``bench/compare.py`` at miniature size, on ranks that stand in for two nodes."""

# covers bench/compare.py bench/compare_ranks.py

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.job import ROOT
from tests.forks import run_on_forks

SCRIPT = str(ROOT / "bench" / "compare_ranks.py")
KEY = "float32 network loopback"
TINY = ["--num-layers=1", "--hidden-size=32", "--seq-length=16", "--batch-size=1", "--ranks-per-node=2", f"--key={KEY}"]
SYSTEMS = ["fsdp2 reshard=True", "zero stage 3"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def test_systems_take_turns_and_a_second_run_takes_the_rest(tmp_path: Path) -> None:
    store = tmp_path / "store.json"
    first = [SCRIPT, *TINY, f"--store={store}", "--rounds=1", "--systems", *SYSTEMS]
    second = [SCRIPT, *TINY, f"--store={store}", "--rounds=2", "--systems", *SYSTEMS, "zero stage 3 nvme"]
    run_on_forks(4, [first, second], cwd=ROOT)
    run = json.loads(store.read_text())["runs"][KEY]
    assert run["running"] == ""
    assert run["tokens"] == 4 * 16
    plain, ours, refused = (run["systems"][name] for name in [*SYSTEMS, "zero stage 3 nvme"])
    for system in (plain, ours):
        assert len(system["seconds"]) == len(system["wire_nbytes"]) == 2
        assert min(system["wire_nbytes"]) > 2 * run["numel"]
        assert not system["error"]
        assert 0 < system["distance"] < 1e-3  # float32: only sums are in another order
        assert 0 < system["order_distance"] < 1e-3
    assert sorted(plain["losses"]) == ["1", "2"]
    assert plain["losses"] == pytest.approx(ours["losses"], abs=5e-5)
    assert ours["units"] == pytest.approx(6, rel=0.15)  # float32: twice the three for bfloat16
    assert "nvme" in refused["error"]  # no folder was given: the row reports the failure
    assert refused["seconds"] == []


def test_on_one_machine_all_agree_and_memory_is_taken_of_each_alone(tmp_path: Path) -> None:
    store, one = tmp_path / "store.json", ["--num-layers=1", "--hidden-size=32", "--seq-length=16"]
    systems = ["ddp", "ddp bucket views", "fsdp2 reshard=False", *SYSTEMS, "zero stage 1", "zero stage 2"]
    alike = [SCRIPT, *TINY, f"--store={store}", "--rounds=1", "--warmup=2", "--no-distance", "--systems", *systems]
    memory = str(ROOT / "bench" / "zero_memory.py")
    two = [[memory, name, *one] for name in ("zero stage 1", "ddp")]
    printed = run_on_forks(2, [alike, *two], cwd=ROOT)
    found = json.loads(store.read_text())["runs"][KEY]["systems"]
    for name in systems:
        assert len(found[name]["seconds"]) == 1
        assert sorted(found[name]["losses"]) == ["1", "2", "3"], "rounds before the first that counts, too"
        assert found[name]["losses"] == pytest.approx(found["ddp"]["losses"], abs=5e-5), name
    assert found["zero stage 2"]["units"] == 0, "all ranks are in one node"
    peaks = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [row["case"] for row in peaks] == ["zero stage 1", "ddp"]
    assert all(row["peak_mib"] > row["base_mib"] > 50 for row in peaks)
    assert peaks[0]["loss"] == pytest.approx(peaks[1]["loss"], rel=1e-4)


def test_each_system_with_muon_has_its_distance_from_one_process(tmp_path: Path) -> None:
    """Where nothing is quantized it is that of rounding; a wrong update would be of the size of the movement."""
    store = tmp_path / "store.json"
    plain = [f"{name} muon" for name in ("fsdp2 reshard=True", "zero stage 1", "zero stage 2", "zero stage 3")]
    systems = ["alone muon", *plain, "delta-hpz muon"]
    run_on_forks(4, [[SCRIPT, *TINY, f"--store={store}", "--rounds=2", "--systems", *systems]], cwd=ROOT)
    found: dict[str, Any] = json.loads(store.read_text())["runs"][KEY]["systems"]
    assert not any(system["error"] for system in found.values())
    for name in plain:  # Muon computes in bfloat16, also here
        assert found[name]["distance"] < 2 * found[name]["order_distance"] + 0.01, (name, found[name])
    assert 0.001 < found["delta-hpz muon"]["distance"] < 0.5
    assert found["alone muon"]["distance"] is None


def test_peers_that_accumulate_send_gradients_once_a_step(tmp_path: Path) -> None:
    """Each contender learns the same as FSDP2 while it sends gradients once per step; HSDP sends less between nodes.

    Bytes are counted on the loopback interface, which other jobs use as well: one of three runs must be undisturbed.
    """
    assert any(_sends_once(_accumulating(tmp_path / str(attempt))) for attempt in range(3))


def _accumulating(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    store, four = (
        folder / "store.json",
        [f"{name} x4" for name in ("ddp", "fsdp2 reshard=False", "hsdp reshard=False")],
    )
    rounding = ["ddp bf16 gradients", "ddp bf16 two hops"]
    systems = ["fsdp2 reshard=True", "fsdp2 reshard=False", "hsdp reshard=True", "ddp", *four, "hsdp reshard=True x4"]
    systems += rounding
    command = [SCRIPT, *TINY, f"--store={store}", "--rounds=3", "--systems", *systems]
    run_on_forks(4, [command], cwd=ROOT)
    found: dict[str, Any] = json.loads(store.read_text())["runs"][KEY]["systems"]
    assert not any(system["error"] for system in found.values())
    for name, system in found.items():
        plain = "fsdp2 reshard=False x4" if name.endswith("x4") else "fsdp2 reshard=True"
        near = 2e-3 if name in rounding else 5e-5
        assert system["losses"] == pytest.approx(found[plain]["losses"], abs=near), name
    one_hop, two_hops = (found[name]["distance"] for name in rounding)
    assert 1e-4 < two_hops < 2 * one_hop < 0.2, "the same rounding, twice"
    assert found["ddp x4"]["losses"]["2"] != pytest.approx(found["ddp"]["losses"]["2"], abs=5e-5), "other batches"
    return found


def _sends_once(found: dict[str, Any]) -> bool:
    sent = {name: min(system["wire_nbytes"]) for name, system in found.items()}
    pairs = (("ddp x4", "ddp"), ("fsdp2 reshard=False x4", "fsdp2 reshard=False"))
    is_once = all(sent[name] < 1.2 * sent[once] for name, once in pairs)
    return is_once and sent["hsdp reshard=False x4"] < sent["fsdp2 reshard=False x4"]
