"""``bench/gpu_check.sh``: how steps are run and read, and its report on a machine without a GPU."""

# covers bench/beside.py bench/collectives.py

from __future__ import annotations

import json
import os
import socket
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
    """Import the modules of gpu_check.py, which import each other as scripts of one folder."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import gpu_check
    import gpu_check_machine
    import gpu_check_package
    import gpu_check_plan
    import gpu_check_processes
    import gpu_check_record
    import gpu_check_rehearsal
    import gpu_check_steps

    class Modules:
        main, machine, plan, steps, record = (
            gpu_check, gpu_check_machine, gpu_check_plan, gpu_check_steps, gpu_check_record,
        )  # fmt: skip
        package, processes, rehearsal = gpu_check_package, gpu_check_processes, gpu_check_rehearsal

    monkeypatch.setattr(gpu_check_steps, "GRACE_S", 0.1)
    monkeypatch.setattr(gpu_check_steps, "LEAST_S", 0.1)
    return Modules


def _say(*lines: str, code: int = 0, then: str = "") -> list[str]:
    printed = "; ".join(f"print({line!r}, flush=True)" for line in lines)
    return [PYTHON, "-S", "-c", f"import time; {printed or 'pass'}; {then or 'pass'}; raise SystemExit({code})"]


def _figure(**values: Any) -> str:
    return json.dumps({**values, "num_wrong": 0})


def _run(bench: Any, folder: Path, steps: Any, **options: Any) -> Any:
    return bench.steps.run_steps(steps, bench.record.Record(folder, "Test"), started_at=time.monotonic(), **options)


def _rows(bench: Any, folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / bench.record.ROWS).read_text().splitlines()]


def test_each_step_ends_in_its_own_way_and_the_others_go_on(bench: Any, tmp_path: Path) -> None:
    step = bench.steps.Step
    said: list[str] = []
    steps = [
        step("good", _say("fine"), environment={"A": "1"}, read=lambda text: ("pass", f"said {text.strip()}")),
        step("bad", _say("oh no", code=7)),
        step("unwanted", _say("never"), skip_reason="not | asked for"),
        step("absent", ["/no/such/program"]),
        step("nothing done", _say("0"), read=lambda _: ("skip", "no test")),
        step("measured", _say(_figure(us=1.5), _figure(unavailable="not here")), gives_figures=True),
        step("not measured", _say("{}", '{"context": "no figure"}'), gives_figures=True),
        step("not there", _say(_figure(unavailable="no NCCL")), gives_figures=True),
        step("wrong", _say(_figure(us=2.0), code=1), gives_figures=True),
    ]
    outcomes = _run(bench, tmp_path / "out", steps, report=lambda outcome: said.append(outcome.name))
    assert [(o.name, o.verdict, o.num_figures) for o in outcomes] == [
        ("good", "pass", 0), ("bad", "FAIL", 0), ("unwanted", "skip", 0), ("absent", "FAIL", 0),
        ("nothing done", "skip", 0), ("measured", "pass", 1), ("not measured", "FAIL", 0), ("not there", "skip", 0),
        ("wrong", "FAIL", 1),
    ]  # fmt: skip
    assert said == [o.name for o in outcomes]
    notes = {o.name: o.note for o in outcomes}
    assert notes["good"] == "said fine"
    assert notes["bad"] == "exit code 7; oh no"
    assert "cannot be started" in notes["absent"]
    assert notes["not measured"] == "no figure was printed"
    assert notes["not there"] == "no NCCL"
    assert "oh no\n== FAIL" in (tmp_path / "out" / bench.record.LOG).read_text()
    assert not bench.steps.all_passed(outcomes)
    assert bench.steps.all_passed([o for o in outcomes if o.verdict in ("pass", "skip")])
    lines = bench.record.table(outcomes).splitlines()
    assert len(lines) == 11
    assert len({line.count("|") for line in lines}) == 1, "a | in a note would be a column"
    assert "no figure" in (tmp_path / "out" / bench.record.TABLES).read_text(), "a context is shown"


def test_what_a_step_leaves_over_goes_to_later_ones_and_none_takes_of_theirs(bench: Any, tmp_path: Path) -> None:
    step, sleep = bench.steps.Step, "time.sleep(2.0)"
    steps = [
        step("idle", _say("at once"), budget_s=3.0),
        step("longer than its budget", _say(then=sleep), budget_s=1.5),
        step("hangs", _say("begun", then="time.sleep(60)"), budget_s=1.0, gives_figures=True),
        step("has its own time", _say(then="time.sleep(0.2)"), budget_s=2.0),
    ]
    begin = time.monotonic()
    outcomes = _run(bench, tmp_path, steps)
    assert [o.verdict for o in outcomes] == ["pass", "pass", "LATE", "pass"]
    assert time.monotonic() - begin < 7.5, "the sum of the budgets"
    assert outcomes[2].seconds < 2.5, "a step that hangs leaves something over"
    assert outcomes[2].note.endswith("begun")
    outcomes = _run(bench, tmp_path, steps[:1], spent_s=-10.0)
    assert [(o.verdict, o.note) for o in outcomes] == [("LATE", "not started: no time was left")]


def test_what_a_step_has_started_ends_with_it_even_in_a_session_of_its_own(bench: Any, tmp_path: Path) -> None:
    marker = tmp_path / "survived"
    away = f"import time, pathlib; time.sleep(2); pathlib.Path({str(marker)!r}).touch()"
    start = f"import subprocess; subprocess.Popen([{PYTHON!r}, '-S', '-c', {away!r}], start_new_session=True)"
    for kind, then in (("hangs", "time.sleep(60)"), ("dies", "import os; os.kill(os.getpid(), 9)")):
        step = bench.steps.Step(kind, _say(then=f"{start}; {then}"), budget_s=1.0)
        outcomes = _run(bench, tmp_path / kind, [step])
        assert not bench.steps.all_passed(outcomes)
    time.sleep(2.5)
    assert not marker.exists()


def test_injected_failures_cost_only_the_figure_that_was_being_made(bench: Any, tmp_path: Path) -> None:
    good = [_figure(us=float(number)) for number in range(3)]
    steps = [
        bench.steps.Step(name, _say(*good, then="time.sleep(0.3)"), budget_s=4.0, gives_figures=True)
        for name in ("first", "fails", "hangs", "dies", "last")
    ]
    kinds = {"fails": "fail", "hangs": "hang", "dies": "kill"}
    chosen = [bench.rehearsal.injected(step, kinds[step.name]) if step.name in kinds else step for step in steps]
    outcomes = _run(bench, tmp_path, chosen)
    assert [o.verdict for o in outcomes] == ["pass", "FAIL", "LATE", "FAIL", "pass"]
    assert [o.num_figures for o in outcomes] == [3, 1, 1, 1, 3]
    rows = _rows(bench, tmp_path)
    assert [row["step"] for row in rows] == ["first"] * 3 + ["fails", "hangs", "dies"] + ["last"] * 3
    tables = (tmp_path / bench.record.TABLES).read_text()
    assert tables.count("\n## ") == 5
    assert "in progress, or killed" in tables, "nothing has finished it"


def test_a_sigkill_at_any_moment_leaves_the_figures(bench: Any, tmp_path: Path) -> None:
    program = rf"""
import sys, time
sys.path.insert(0, {str(ROOT / "bench")!r})
import gpu_check_record, gpu_check_steps
record = gpu_check_record.Record(__import__("pathlib").Path({str(tmp_path)!r}), "Test")
many = "import time\nfor i in range(10**6): print('{{\"i\": %d, \"num_wrong\": 0}}' % i, flush=True); time.sleep(.002)"
step = gpu_check_steps.Step("endless", [sys.executable, "-S", "-c", many])
gpu_check_steps.run_steps([step], record, started_at=time.monotonic())
"""
    mark = bench.processes.new_mark()
    environment = {**os.environ, bench.processes.MARK: mark}
    rows, limit = tmp_path / bench.record.ROWS, time.monotonic() + 60
    with subprocess.Popen([PYTHON, "-S", "-c", program], env=environment) as process:
        while not rows.exists() or rows.read_bytes().count(b"\n") < 50:
            assert time.monotonic() < limit
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    seen = [row["i"] for line in rows.read_text().splitlines() if (row := bench.record.row_of(line))]
    assert len(seen) >= 50
    assert seen == list(range(len(seen)))
    assert f"| {len(seen) - 2} " in (tmp_path / bench.record.TABLES).read_text()
    time.sleep(0.3)
    assert not bench.processes.marked(mark), "the step has ended with it"


def test_budgets_add_up_to_nine_minutes_and_figures_come_before_checks(bench: Any) -> None:
    plan = bench.plan
    assert plan.deadline_s("full") <= 540
    assert plan.deadline_s("quick") <= 120
    machine = bench.machine.Machine(bench.machine.GPU("Made Up", (9, 0), 80 << 30, "1"), "", {})
    for mode in ("full", "quick", "rehearsed"):
        steps = plan.make_steps(plan.Plan(machine, mode))
        total = sum(step.budget_s for step in steps) + getattr(plan.BUDGETS[plan.ENVIRONMENT], mode)
        assert total + plan.OWN_S == plan.deadline_s(mode)
        measures = [step.gives_figures for step in steps if step.name != plan.PACKAGE]
        assert measures == sorted(measures, reverse=True), "a figure would come after a check"
        assert any(measures)
    names = [step.name for step in plan.make_steps(plan.Plan(machine))]
    assert len(names) >= 12
    wanted = ["package", "kernels", "collectives", "training", "first call", "graphs", "offload", "reference", "sanit"]
    first = [min(index for index, name in enumerate(names) if word in name) for word in wanted]
    assert first == sorted(first)


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
    ]
    text = "\n".join(map(json.dumps, rows))
    assert plan.read_kernels(f"# context\n{text}") == (
        "pass", "smallest share of the copy rate from 64 MiB: decode_sum 0.50, quantize 0.85; 1 below the goal"
    )  # fmt: skip
    built = "-- zcomm: CUDA 13.0.88 for 90-real\n-Werror is on\na.cu(3): error: no such thing\nerror: exit code 1\n"
    assert plan._read_build(built)[1] == "CUDA 13.0.88 for 90-real; a.cu(3): error: no such thing"


def test_the_steps_name_what_is_there(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = bench.machine.GPU("NVIDIA Made Up 1", (9, 0), 80 << 30, "580.1")
    machine = bench.machine.Machine(gpu, "", {"GPU": gpu.name})
    full = bench.plan.make_steps(bench.plan.Plan(machine))
    quick = bench.plan.make_steps(bench.plan.Plan(machine, "quick", builds=False))
    rehearsed = bench.plan.make_steps(bench.plan.Plan(machine, "rehearsed"))
    assert [step.name for step in full] == [step.name for step in rehearsed]
    assert full[0].environment["CUDAARCHS"] == "90-real"
    assert quick[0].skip_reason == "--no-build"
    assert all(step.environment["NCCL_SOCKET_IFNAME"] == "lo" for step in full), "the machine may have no network"
    for step in [*full[1:], *quick[1:], *rehearsed]:
        for word in step.command[1:]:
            if word.startswith(("tests/", "bench/")):
                assert (ROOT / word).is_file(), word
    for real, tiny in zip(full[1:10], rehearsed[1:10], strict=True):
        scripts = [[w for w in step.command if w.endswith(".py")] for step in (real, tiny)]
        assert scripts[0] == scripts[1], "a rehearsal runs the same scripts"
        assert "cpu" in tiny.command
    assert {str(p) for p in bench.plan.gpu_test_files()} >= {"tests/cuda/test_gpu.py", "tests/zcomm/test_nccl_gpu.py"}
    assert bench.main.results_path(tmp_path, machine).name == "gpu_nvidia_made_up_1.md"
    for code, reason in (("raise ImportError('no')", "exit code 1"), ('print(\'{"reason": "asleep"}\')', "asleep")):
        monkeypatch.setattr(bench.machine, "PROBE", code)
        assert reason in bench.main.without_gpu(bench.machine.look())
    monkeypatch.setattr(bench.plan, "TEST_PACKAGES", {"pytest": "no_such_module"})
    tests = next(s for s in bench.plan.make_steps(bench.plan.Plan(machine)) if s.name == bench.plan.CUDA_TESTS)
    done = subprocess.run(tests.command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "pytest is not installed\n")


def test_ranks_may_share_a_gpu_in_every_nccl(bench: Any) -> None:
    import gpu_sharing

    old, new = [gpu_sharing.sharing(rank, (2, 29, 7)) for rank in (0, 1)], gpu_sharing.sharing(1, (2, 30, 3))
    assert old[0]["NCCL_HOSTID"] != old[1]["NCCL_HOSTID"]
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in old[0]
    assert new["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_HOSTID" not in new
    assert all(told["NCCL_SOCKET_IFNAME"] == "lo" for told in (*old, new))


def test_a_rank_that_fails_ends_the_others(bench: Any) -> None:
    import gpu_ranks

    work = "import os, sys, time; sys.exit(5) if os.environ['RANK'] == '1' else time.sleep(60)"
    begin = time.monotonic()
    assert gpu_ranks.run_ranks(3, [PYTHON, "-S", "-c", work]) == 5
    assert gpu_ranks.run_ranks(2, [PYTHON, "-S", "-c", "import os; os.kill(os.getpid(), 9)"]) == 137
    agree = "import os, sys; sys.exit(len({os.environ['MASTER_PORT'], os.environ['WORLD_SIZE']}) - 2)"
    assert gpu_ranks.run_ranks(2, [PYTHON, "-S", "-c", agree]) == 0
    assert time.monotonic() - begin < 30


def test_launches_are_counted_without_copies(bench: Any) -> None:
    import gpu_trace

    names = ["Memcpy DtoH (Device -> Pinned)", "Memset (Device)", "gemm", "ncclDevKernel_SendRecv", "gemm"]
    events = [gpu_trace.Event(name, 0.0, 1.0) for name in names]
    assert gpu_trace.count_launches(events) == (3, 2)
    assert gpu_trace.count_launches([]) is None, "a profiler that sees nothing counts nothing"


def _python_without_native(folder: Path) -> tuple[list[str], dict[str, str]]:
    """An interpreter that sees the source tree and no installed package of ours: -S reads no .pth file."""
    others = [path for path in sys.path if path.endswith("-packages")]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return [PYTHON, "-S"], {**environment, "PYTHONPATH": os.pathsep.join([str(folder), *others])}


def test_without_a_build_the_source_tree_gives_figures(bench: Any, tmp_path: Path) -> None:
    """On a machine that cannot build, figures of Triton and torch's groups are still measured."""
    folder = tmp_path / "source"
    bench.package.copy_source(folder)
    python, environment = _python_without_native(folder)
    say = "import zcomm, zcomm.triton_kernels, zcomm._kernels.native_calls as n; print(zcomm.__file__, n.module)"
    done = subprocess.run([*python, "-c", say], env=environment, capture_output=True, text=True, cwd="/", check=True)
    assert done.stdout.split() == [str(folder / "zcomm" / "__init__.py"), "None"]
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": _free_port()}
    environment |= {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1"}
    words = "--device cpu --json --sizes-kib 4 --formats int8 --rounds 1 --collectives all_reduce"
    command = [*python, str(folder / "bench" / "gpu_collectives.py"), *words.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, check=False)
    rows = [row for line in done.stdout.splitlines() if "num_wrong" in (row := json.loads(line))]
    assert done.returncode == 0, done.stderr
    assert [row.get("format") for row in rows] == [None, "torch", "int8"]
    assert "native module is not built" in rows[0]["unavailable"]
    assert all(row["host_us"] > 0 and row["num_wrong"] == 0 for row in rows[1:])


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def test_a_rehearsal_with_a_killed_step_gives_the_other_figures(bench: Any, tmp_path: Path) -> None:
    """Run as a user would: two real steps on the CPU, of which the first is killed."""
    step = "CUDA kernels beside a copy"
    run = bench.rehearsal.rehearse(tmp_path, ["kernels beside"], [bench.rehearsal.Injection("kill", step)])
    printed = (tmp_path / "printed.log").read_text()
    assert run.code == 1, printed
    assert run.is_complete
    assert run.num_left == 0
    assert run.seconds < bench.plan.deadline_s("rehearsed")
    assert run.counts[step] == 1, printed
    assert run.counts["Triton kernels beside a copy"] == 6, printed
    assert f"failed: {step}" in (tmp_path / bench.record.TABLES).read_text()


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_every_step_may_fail_hang_or_be_killed(bench: Any, tmp_path: Path) -> None:
    assert bench.rehearsal.rehearse_all(tmp_path, []) == 0, (tmp_path / "rehearsal.md").read_text()
    lines = (tmp_path / "rehearsal.md").read_text().splitlines()
    assert sum(line.startswith("| ") for line in lines) - 1 >= 12


def test_what_is_to_go_wrong_is_named(bench: Any) -> None:
    names = ["offload, 1.3 G", "collectives, 1 rank", "collectives, 2 ranks"]
    parse = bench.rehearsal.parse_injection
    assert parse("hang:off", names) == ("hang", "offload, 1.3 G")
    for text in ("hang:collectives", "burn:offload", "offload", "kill:nothing"):
        with pytest.raises(ValueError, match="KIND of fail, hang, kill"):
            parse(text, names)
    planned = bench.rehearsal.plan_of(names)
    assert [injection.step for injection in planned] == names, "each step once"
    assert {injection.kind for injection in planned} == set(bench.rehearsal.KINDS)


def test_copies_are_hidden_by_kernels_that_run_at_the_same_time(bench: Any) -> None:
    import gpu_offload
    import gpu_trace

    named = [
        ("Memcpy DtoH (Device -> Pinned)", 0.0, 10.0),
        ("Memcpy HtoD (Pinned -> Device)", 8.0, 20.0),
        ("Memcpy DtoD (Device -> Device)", 100.0, 200.0),
        ("Memset (Device)", 0.0, 20.0),
        ("gemm", 5.0, 12.0),
        ("gemm", 6.0, 10.0),
        ("add", 18.0, 30.0),
    ]
    events = [gpu_trace.Event(*event) for event in named]
    seconds, share = gpu_offload.share_hidden(events)
    assert seconds == pytest.approx(20e-6)
    assert share == pytest.approx(9 / 20)
    assert gpu_offload.share_hidden([]) == (0.0, 0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: run bench/gpu_check.sh itself")
def test_without_a_gpu_it_says_so_and_ends_with_3(tmp_path: Path) -> None:
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
