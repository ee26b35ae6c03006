"""A call that one rank makes alone, simulated with the library as it was at a commit.

    python -m tests.simulation.lone_calls --at 6aae586~1      before exchanges were tagged sends and receives
    python -m tests.simulation.lone_calls                     the library as it is

Prints how jobs ended: ``aborted``, where gloo gets a longer message than it expects and ends the process; ``named``,
with a DivergedError on every rank; ``late``, with another error, after the timeout of the group, or none on some rank.
Until the mend gloo matched collectives by their number alone. Older commits know no context of a rank: each simulated
rank gets modules of its own, in which ``threading`` and ``time`` are replaced.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import zcomm
from tests.variables import variables
from zcomm._base.rank_context import clock, threads
from zcomm.testing import Outcome, Simulation

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
CALLS: dict[str, tuple[str, str]] = {
    "more values": ("GA", "A"),
    "fewer values": ("AG", "G"),
    "a call less": ("G", "AG"),
}
"""What rank 1 and the other one call: G gathers 30 float64 of each rank, A asks whether any rank has a flag."""


def program(library: list[ModuleType], kind: str, rank: int) -> None:
    """Rank 1 makes a call more than the other, or one less."""
    own: Any = library[rank]
    topology = own.Topology(ranks_per_node=1)
    for call in CALLS[kind][0 if rank == 1 else 1]:
        if call == "G":
            own.control.gather_float64(torch.zeros(30, dtype=torch.float64), topology)
        else:
            own.control.any_(torch.tensor(data=False), topology)


def ending(outcomes: list[Outcome]) -> str:
    """How a job has ended, in one word."""
    errors = [one.error for one in outcomes]
    if any("gloo ends the process" in repr(error) for error in errors):
        return "aborted"
    if all(type(error).__name__ == "DivergedError" for error in errors):
        return "named"
    return "late"


def _all_gather(output: Any, part: torch.Tensor, group: Any = None, **options: bool) -> Any:
    """Over a simulated group: the n-th of a rank meets the n-th of another, as gloo matches collectives."""
    group = dist.group.WORLD if group is None else group
    rows = list(output if isinstance(output, list) else output.view(dist.get_world_size(group), -1))
    rank, tag = dist.get_rank(group), getattr(group, "num_collectives", 0) + 1
    group.num_collectives, peers = tag, [peer for peer in range(len(rows)) if peer != rank]
    rows[rank].copy_(part.view_as(rows[rank]))
    works = [group.recv([rows[peer].view(-1)], peer, tag) for peer in peers]
    works += [group.send([part.contiguous()], peer, tag) for peer in peers]
    pending = SimpleNamespace(wait=lambda: [work.wait() for work in works])
    return pending if options.get("async_op") else pending.wait()


@contextmanager
def library_of_each_rank(folder: Path, world_size: int) -> Any:
    """The package ``zcomm`` in ``folder``, imported once for each rank."""
    own = {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("zcomm", "triton_kernels")
    }
    finders, path = list(sys.meta_path), list(sys.path)
    names = [name for name in ("all_gather_single", "all_gather_into_tensor", "all_gather") if hasattr(dist, name)]
    before = {name: getattr(dist, name) for name in names}
    sys.meta_path[:] = [finder for finder in finders if "editable" not in type(finder).__module__.lower()]
    sys.path.insert(0, str(folder))
    copies: list[dict[str, ModuleType]] = []
    try:
        for name in names:
            setattr(dist, name, _all_gather)
        for _ in range(world_size):
            for name in [name for name in sys.modules if name.partition(".")[0] == "zcomm"]:
                del sys.modules[name]
            __import__("zcomm.control")
            copies.append({name: module for name, module in sys.modules.items() if name.partition(".")[0] == "zcomm"})
        yield copies
    finally:
        sys.meta_path[:], sys.path[:] = finders, path
        sys.modules.update(own)
        for name, function in before.items():
            setattr(dist, name, function)


def _replace_waits(modules: dict[str, ModuleType]) -> None:
    """Let ``modules`` wait on the clock of the rank that calls this."""
    time = clock()
    fakes = {name: getattr(threads(), name) for name in ("Thread", "Event", "Lock", "RLock", "SimpleQueue")}
    own = SimpleNamespace(**{**vars(threading), **fakes, "main_thread": threads().main_thread})
    for module in modules.values():
        for name, value in {**fakes, "threading": own, "time": time, "ThreadPoolExecutor": threads().Executor}.items():
            if name in vars(module):
                setattr(module, name, value)


def endings(folder: Path | None, seeds: range) -> Counter[str]:
    """How jobs end with the library in ``folder``, or as it is here: by kind of the lone call."""
    found: Counter[str] = Counter()
    with nullcontext([{"zcomm": zcomm}] * 2) if folder is None else library_of_each_rank(folder, 2) as copies:
        for seed in seeds:
            kind = list(CALLS)[seed % len(CALLS)]

            def run(rank: int, kind: str = kind) -> None:
                if folder is not None:
                    _replace_waits(copies[rank])
                program([modules["zcomm"] for modules in copies], kind, rank)

            outcomes = Simulation(2, seed, timeout_s=TIMEOUT_S, limit_s=1e4).run(run)
            found[f"{kind}: {ending(outcomes)}"] += 1
    return found


def main() -> int:
    """Returns 1 if a job has not ended with a named error."""
    parser = argparse.ArgumentParser(description="Calls of one rank alone, at a commit.")
    parser.add_argument("--at", default="", help="a commit; default: the working tree")
    parser.add_argument("--count", type=int, default=60)
    chosen = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as name, variables(ZCOMM_DIVERGED_AFTER_S="5", ZCOMM_KERNELS="reference"):
        folder = None
        if chosen.at:
            folder = Path(name, "old")
            subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
            subprocess.run(["git", "checkout", "--quiet", chosen.at], cwd=folder, check=True)
            kernels = folder / "zcomm" / "triton_kernels"  # where setup.py installs it
            if not kernels.exists():
                kernels.symlink_to(folder / "triton_kernels")
        found = endings(folder, range(chosen.count))
    for kind, number in sorted(found.items()):
        print(f"{number:5} {kind}", flush=True)
    return any(not kind.endswith(": named") for kind in found)


if __name__ == "__main__":
    sys.exit(main())
