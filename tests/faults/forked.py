"""Runs the job on forks of one process that has imported everything; each attempt has a new pool."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.broken import mounted
from tests.faults.definition import CONFIGS, FAULTS, SAVE_EVERY, TIMEOUT_S
from tests.faults.job import flip, live
from tests.ranks import forkserver

SLACK_S = 60
"""Slack for slow machines, in seconds: a deadlock would last longer than any slack."""

Report = dict[str, Any]


def _serve(folder: Path, attempt: int, rank: int, world_size: int) -> None:
    gc.freeze()
    null = os.open(folder / f"output-{attempt}-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(null, 1)
    os.dup2(null, 2)
    store = f"file://{folder}/store-{attempt}"
    os._exit(live(folder, attempt, init_method=store, rank=rank, world_size=world_size))


def ranks_of(spec: dict[str, Any]) -> int:
    return CONFIGS[spec["config"]].ranks


def attempt_forked(spec: dict[str, Any], folder: Path, attempt: int) -> bool:
    """Run the ranks; return whether all ended in time."""
    processes: list[Any] = []
    for rank in range(ranks_of(spec)):
        arguments = folder, attempt, rank, ranks_of(spec)
        processes.append(forkserver().Process(target=_serve, args=arguments, daemon=True))
        processes[-1].start()
    deadline = time.monotonic() + TIMEOUT_S + SLACK_S
    while time.monotonic() < deadline and any(process.exitcode is None for process in processes):
        time.sleep(0.02)
    is_over = all(process.exitcode is not None for process in processes)
    for process in processes:
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
        process.join()
    return is_over


def read_reports(folder: Path, attempt: int, what: str) -> dict[int, Report]:
    """By rank, what it reported in an attempt."""
    paths = sorted(folder.glob(f"{attempt}-*-{what}.json"))
    return {int(path.name.split("-")[1]): json.loads(path.read_text()) for path in paths}


def saved_at_first(folder: Path) -> int:
    """The last step that the attempt with the fault saved."""
    path = folder / "saved-0"
    return int(path.read_text()) if path.exists() else 0


def _damage(folder: Path, spec: dict[str, Any]) -> None:
    """Flip a bit of the newest checkpoint, ``latest`` included, between two attempts."""
    saved = saved_at_first(folder)
    (folder / "before").write_text(f"step{saved - SAVE_EVERY}" if saved > SAVE_EVERY else "")
    draw = random.Random(spec["draw"])
    files = sorted(p for p in (folder / "checkpoints" / f"step{saved}").rglob("*") if p.is_file())
    flip(draw.choice([*files, folder / "checkpoints" / "latest"]), draw)


def run_forked(spec: dict[str, Any], folder: Path, reference: str) -> dict[str, Any]:
    """Run the attempt with the fault, then another; return the outcome."""
    (folder / "files").mkdir()
    (folder / "spec.json").write_text(json.dumps(spec))
    started = time.monotonic()
    with ExitStack() as stack:
        if spec["fault"].startswith("disk full"):
            room = 2**14 if "NVMe" in spec["fault"] else 2**15
            stack.enter_context(mounted(folder / "small", room))
        is_over = attempt_forked(spec, folder, 0)
    saved = saved_at_first(folder)
    if is_damaged(spec) and saved:
        _damage(folder, spec)
        is_over = attempt_forked(spec, folder, 1) and is_over
    elif (is_over and read_reports(folder, 0, "error")) or len(read_reports(folder, 0, "end")) < ranks_of(spec):
        is_over = attempt_forked(spec, folder, 1) and is_over
    found = judge(spec, folder, reference, saved) if is_over else {"outcome": "hang"}
    return {**spec, **found, "took_s": round(time.monotonic() - started, 2)}


def is_damaged(spec: dict[str, Any]) -> bool:
    """Whether the fault damages a file between two attempts."""
    return bool(spec["fault"] == "bit in a checkpoint")


def judge(spec: dict[str, Any], folder: Path, reference: str, saved: int) -> dict[str, Any]:
    """Compare the ranks' reports with what must follow from the fault."""
    fault = FAULTS[spec["fault"]]
    damaged = is_damaged(spec)
    errors = read_reports(folder, 1, "load") if damaged else read_reports(folder, 0, "error")
    problems = (
        [] if fault.goes_on and not errors else list(wrong_errors(spec, errors, set(read_reports(folder, 0, "end"))))
    )
    ends = next((found for attempt in (2, 1, 0) if (found := read_reports(folder, attempt, "end"))), {})
    hashes = {one["hash"] for one in ends.values()}
    begins = {one["began"] for one in read_reports(folder, 1, "began").values()}
    outcome = "ok"
    if problems:
        outcome = "unnamed"
    if begins and min(begins) < (saved - SAVE_EVERY * damaged):
        outcome, problems = "lost", [*problems, f"began at {begins}, saved {saved}"]
    if (
        len(ends) < ranks_of(spec)
        or len(hashes) != 1
        or (reference != "any" and hashes != {reference})
        or "not finite" in hashes
    ):
        left = {rank: one["text"][:300] for rank, one in read_reports(folder, 1, "error").items()}
        outcome, problems = "wrong", [*problems, f"{len(ends)} ends, {len(hashes)} hashes, {left}"]
    fault_at = float((folder / "fault").read_text()) if (folder / "fault").exists() else None
    late = [one["at"] - fault_at for one in errors.values()] if fault_at else []
    return {
        "outcome": outcome, "problems": problems, "errors": {r: [e["error"], e["text"]] for r, e in errors.items()},
        "error_after_s": round(max(late), 2) if late else None, "happened": fault_at is not None or damaged,
        "began": sorted(begins), "saved": saved,
    }  # fmt: skip


def wrong_errors(spec: dict[str, Any], errors: dict[int, Report], ended: set[int]) -> Iterator[str]:
    """Yield errors that are missing, or that do not follow from the fault; ``ended``: ranks that trained to the end."""
    fault = FAULTS[spec["fault"]]
    for rank in range(ranks_of(spec)):
        wanted = fault.victim if rank == spec["victim"] else fault.survivors
        if wanted is None:
            continue
        if rank not in errors:
            has_all = rank in ended and not is_damaged(spec)  # it needed nothing more from the victim
            if wanted and not has_all and not fault.may_miss:
                yield f"rank {rank} has no error"
            continue
        text = f"{errors[rank]['error']}: {errors[rank]['text']}"
        if not wanted or not re.match(rf"(?:{wanted})\b", text) or not re.search(fault.text, text):
            yield f"rank {rank}: {text[:300]}"
    same = {(one["error"], re.sub(r"^rank \d+: ", "", one["text"])) for one in errors.values()}  # the others name whose
    if fault.is_same and len(same) > 1:
        yield f"not the same: {[one['text'][:200] for one in errors.values()]}"
