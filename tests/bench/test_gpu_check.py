"""``bench/gpu_check.sh``: how steps are run and read, and what it says on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable
TESTED = "=== 3 passed, 1 skipped in 2.00s ==="


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of gpu_check.py, which import one another as scripts of one folder do."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import gpu_check
    import gpu_check_machine
    import gpu_check_plan
    import gpu_check_steps

    class Modules:
        main, machine, plan, steps = gpu_check, gpu_check_machine, gpu_check_plan, gpu_check_steps

    return Modules


def _say(text: str, code: int = 0) -> list[str]:
    return [PYTHON, "-S", "-c", f"print({text!r}); raise SystemExit({code})"]


def test_each_step_ends_in_its_own_way_and_the_others_go_on(bench: Any, tmp_path: Path) -> None:
    step = bench.steps.Step
    marker = tmp_path / "survived"
    late = f"trap '' TERM; (sleep 1.2; touch {marker}) & echo begun; sleep 20"
    bench.steps.KILL_AFTER_S = 0.1
    begin = time.monotonic()
    said: list[str] = []
    outcomes = bench.steps.run_steps(
        [
            step("good", _say("fine"), environment={"A": "1"}, read=lambda text: ("pass", f"said {text.strip()}")),
            step("bad", _say("oh no", 7)),
            step("late", ["bash", "-c", late], budget_s=0.5),
            step("after bad", _say("never"), needs=["good", "bad"]),
            step("unwanted", _say("never"), skip_reason="not | asked for"),
            step("absent", ["/no/such/program"]),
            step("nothing done", _say("0"), read=lambda _: ("skip", "no test")),
            step("last", _say("end"), needs=["good", "not among them"]),
        ],
        tmp_path / "logs",
        deadline_s=60,
        report=lambda outcome: said.append(outcome.name),
    )
    assert time.monotonic() - begin < 10
    assert [(o.name, o.verdict) for o in outcomes] == [
        ("good", "pass"), ("bad", "FAIL"), ("late", "LATE"), ("after bad", "skip"), ("unwanted", "skip"),
        ("absent", "FAIL"), ("nothing done", "skip"), ("last", "pass"),
    ]  # fmt: skip
    assert said == [o.name for o in outcomes]
    notes = {o.name: o.note for o in outcomes}
    assert notes["good"] == "said fine"
    assert notes["bad"] == "exit code 7; oh no"
    assert notes["late"] == "stopped after 0 s; begun"
    assert notes["after bad"] == "needs: bad"
    assert "cannot be started" in notes["absent"]
    assert (tmp_path / "logs" / "01_bad.log").read_text() == "oh no\n"
    assert not bench.steps.all_passed(outcomes)
    assert bench.steps.all_passed([o for o in outcomes if o.verdict in ("pass", "skip")])
    lines = bench.steps.table(outcomes).splitlines()
    assert len(lines) == 10
    assert len({line.count("|") for line in lines}) == 1, "a | in a note would be a column"
    remaining = 1.5 - (time.monotonic() - begin)
    if remaining > 0:
        time.sleep(remaining)
    assert not marker.exists(), "what a late step has started is ended with it"


def test_when_no_time_is_left_a_check_is_late_and_a_measurement_skipped(bench: Any, tmp_path: Path) -> None:
    steps = [bench.steps.Step("check", _say("")), bench.steps.Step("measurement", _say(""), is_check=False)]
    outcomes = bench.steps.run_steps(steps, tmp_path, deadline_s=0)
    assert [o.verdict for o in outcomes] == ["LATE", "skip"]
    assert all(o.seconds == 0 and "not begun" in o.note for o in outcomes)


def test_what_steps_print_is_read(bench: Any) -> None:
    plan = bench.plan
    assert plan.read_tests(TESTED) == ("pass", "3 passed, 1 skipped in 2.00s")
    skipped = "SKIPPED [2] tests/a.py:3: no NCCL\n2 skipped in 0.10s"
    assert plan.read_tests(skipped) == ("skip", "2 skipped in 0.10s (skipped: no NCCL)")
    assert plan.read_tests("FAILED tests/a.py::test_b - x\n1 failed, 1 passed in 1s")[1].endswith("tests/a.py::test_b)")
    assert plan.read_tests("Traceback")[0] == "skip"
    row = {"operation": "decode_sum of 4", "kernels": "cuda", "size": 1 << 26, "over_copy": 0.5, "num_wrong": 0}
    rows = [
        row,
        row | {"operation": "quantize", "over_copy": 0.95},
        row | {"operation": "quantize", "over_copy": 0.85},
        row | {"operation": "quantize", "over_copy": 0.1, "size": 1 << 20},
        row | {"operation": "decode", "kernels": "triton", "over_copy": 0.91},
    ]
    text = "\n".join(map(json.dumps, rows))
    verdict, note = plan.read_kernels(f"# context\n{text}")
    assert verdict == "pass"
    assert note == (
        "5 rows, 0 wrong; least share of the copy rate from 64 MiB: cuda: decode_sum 0.50, quantize 0.85; "
        "triton: decode 0.91; 1 below the goal"
    )
    assert plan.read_kernels("nothing")[0] == "FAIL"
    assert "| quantize | cuda | 1048576 | 0.1 | 0 |" in bench.main.printed(text)
    built = "-- zcomm: CUDA 13.0.88 for 90-real\n-Werror is on\na.cu(3): error: no such thing\nerror: exit code 1\n"
    assert plan._read_build(built)[1] == "CUDA 13.0.88 for 90-real; a.cu(3): error: no such thing"
    job = "RESULT 1.30 G parameters\ntokens/s (median step)    12,345   -\npeak GPU memory   4,000.00 MB   -\n"
    assert plan.read_results(job)[1] == (
        "1.30 G parameters; tokens/s (median step) 12,345; peak GPU memory 4,000.00 MB"
    )


def test_the_steps_name_what_is_there(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = bench.machine.GPU("NVIDIA Made Up 1", (9, 0), 80 << 30, "580.1")
    machine = bench.machine.Machine(gpu, "", {"GPU": gpu.name})
    full = bench.plan.make_steps(bench.plan.Plan(machine))
    quick = bench.plan.make_steps(bench.plan.Plan(machine, is_quick=True, builds=False))
    assert [step.name for step in full] == [step.name for step in quick]
    assert full[0].environment["CUDAARCHS"] == "90-real"
    assert quick[0].skip_reason == "--no-build"
    assert all(step.environment["NCCL_SOCKET_IFNAME"] == "lo" for step in full), "the machine may have no network"
    for step in full[1:]:
        assert "build" in step.needs
        for word in step.command[1:]:
            if word.startswith(("tests/", "bench/")):
                assert (ROOT / word).is_file(), word
    assert {str(p) for p in bench.plan.gpu_test_files()} >= {"tests/cuda/test_gpu.py", "tests/zcomm/test_nccl_gpu.py"}
    assert bench.main.results_path(tmp_path, machine).name == "gpu_nvidia_made_up_1.md"
    outcome = bench.steps.Outcome("build", "FAIL", 1.0, "no")
    assert "a step failed" in bench.main.document(machine, [outcome], "bench/gpu_check.sh", 1.0)
    for code, reason in (("raise ImportError('no')", "exit code 1"), ('print(\'{"reason": "asleep"}\')', "asleep")):
        monkeypatch.setattr(bench.machine, "PROBE", code)
        assert reason in bench.main.without_gpu(bench.machine.look())
    monkeypatch.setattr(bench.plan, "TEST_PACKAGES", {"pytest": "no_such_module"})
    tests = bench.plan.make_steps(bench.plan.Plan(machine))[1]
    done = subprocess.run(tests.command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "pytest is not installed\n")


def test_the_table_is_kept_and_the_exit_code_says_what_became_of_it(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = bench.machine.Machine(bench.machine.GPU("Fast-1", (9, 0), 1, "2"), "", {"driver": "580"})
    row = json.dumps({"operation": "decode", "kernels": "cuda", "size": 1, "num_wrong": 0})
    steps = [
        bench.steps.Step("build", _say("built")),
        bench.steps.Step("kernels beside a copy", _say(row), read=bench.plan.read_kernels),
        bench.steps.Step("tests", _say("1 failed", 1)),
    ]
    monkeypatch.setattr(bench.main, "look", lambda _: machine)
    monkeypatch.setattr(bench.main, "make_steps", lambda _: steps)
    options = ["gpu_check.py", f"--results={tmp_path}", f"--output={tmp_path / 'logs'}"]
    monkeypatch.setattr(sys, "argv", [*options, "--only", "build", "beside"])
    assert bench.main.main() == 0
    kept = (tmp_path / "gpu_fast_1.md").read_text()
    assert "every step passed" in kept
    assert "| driver | 580 |" in kept
    assert "## kernels beside a copy\n\n| operation | kernels | size | num_wrong |\n" in kept
    monkeypatch.setattr(sys, "argv", options)
    assert bench.main.main() == 1
    assert "| tests                 | FAIL   |" in (tmp_path / "gpu_fast_1.md").read_text()
    assert "FAIL    0." in capsys.readouterr().out


def test_copies_are_hidden_by_kernels_that_run_at_the_same_time(bench: Any) -> None:
    import gpu_offload

    events = [
        ("Memcpy DtoH (Device -> Pinned)", 0.0, 10.0),
        ("Memcpy HtoD (Pinned -> Device)", 8.0, 20.0),
        ("Memcpy DtoD (Device -> Device)", 100.0, 200.0),
        ("Memset (Device)", 0.0, 20.0),
        ("gemm", 5.0, 12.0),
        ("gemm", 6.0, 10.0),
        ("add", 18.0, 30.0),
    ]
    seconds, share = gpu_offload.share_hidden(events)
    assert seconds == pytest.approx(20e-6)
    assert share == pytest.approx(9 / 20)
    assert gpu_offload.share_hidden([]) == (0.0, 0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: run bench/gpu_check.sh itself")
def test_without_a_gpu_it_says_so_and_ends_with_3(tmp_path: Path) -> None:
    """As a user would start it."""
    done = subprocess.run(
        [str(ROOT / "bench" / "gpu_check.sh"), "--quick", "--results", str(tmp_path)],
        capture_output=True, text=True, timeout=250, check=False, env={**os.environ, "PYTHON": PYTHON}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "No GPU: " in done.stdout
    assert "Nothing was built, tested or measured" in done.stdout
    assert f"torch {torch.__version__}" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def test_the_kernels_are_checked_and_timed_on_the_cpu_too(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import gpu_kernels

    def run(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
        sys.argv = ["gpu_kernels.py", "--device=cpu", "--sizes-mib=0.25", "--rounds=1", "--json", *arguments]
        status = gpu_kernels.main()
        lines = map(json.loads, capsys.readouterr().out.splitlines())
        return status, [line for line in lines if "operation" in line]

    before, num_threads = sys.argv, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        status, rows = run("--formats", "int8", "--compare", "eager")
        assert status == 0
        assert len(rows) == 6
        assert all(row["num_wrong"] == 0 and row["gbps"] > 0 and row["eager"] > 0 for row in rows)
        by_hand = rows[0]["gbps"] * rows[0]["p50_us"] * 1e3
        numel = (1 << 18) // 2
        assert rows[0]["operation"] == "quantize"
        assert by_hand == pytest.approx(2 * numel + numel + 2 * numel / 256, rel=1e-3), "read bf16, write codes, scales"
    finally:
        sys.argv = before
        torch.set_num_threads(num_threads)


def test_a_wrong_kernel_is_seen(bench: Any) -> None:
    import gpu_kernels_cases as cases

    native = cases.kernels_of("native")
    data = cases.Data("int4", torch.bfloat16, 200 * 1024, torch.device("cpu"), 8)
    data.fill(native)
    for case in cases.make_cases(data):
        case.call(native)
        assert case.count_wrong() == 0
        target = data.message if case.operation.startswith(("quantize", "requantize")) else data.out
        last = data.layout.codes_offset + data.layout.segment_nbytes - 1 if target is data.message else -1
        target.view(-1)[last] += 1
        assert case.count_wrong() == 1, case.operation
