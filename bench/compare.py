"""Compare DDP, FSDP2, HSDP, ZeroRedundancyOptimizer, DeepSpeed and this library on one model, data, seed and batch.

    python bench/compare.py                                      loopback, 1 Gbit/s, 200 Mbit/s; needs root
    python bench/compare.py --networks loopback                  without root
    python bench/compare.py --networks loopback --nodes 1 --ranks-per-node 4       one machine, as torchrun starts it
    python bench/compare.py --batch network --dtype bfloat16 --networks loopback 2gbit 1gbit 500mbit 200mbit
    python bench/compare.py --systems "fsdp2 reshard=True" zero++ delta-hpz --rounds 9
    pip install -c constraints.txt -e '.[peers]'                 once, for DeepSpeed; or set PYTHONPATH to a copy

The steps of all systems are interleaved in one process group, so that other load on the machine affects all of them
alike. Networks are emulated by network namespaces and ``tc tbf``; loopback has no limit of its rate. Peak
memory is measured for each system in separate ranks. ``--batch network`` makes a small, network-bound step, ``compute``
a large, compute-bound one;
``users`` is what users train with, at ``--hidden-size 512``: 13,003,776 parameters, 1,024 tokens a rank. ``main``: a
step of ``convergence.py --model main``, for ``to_loss.py``.
Systems named ``x4`` accumulate four batches a step, each in its fastest way, and are compared with each other only.

Results: ``--output``.json, written after every measurement, .md and .png. Run the same command again to resume.
If a peer fails, dies or hangs for ``--patience`` seconds, its row shows the error; delete the row from the JSON to try
again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from comparison.figure import draw
from comparison.records import RANKS_PER_NODE, Store, System
from comparison.tables import LOOPBACK, markdown
from contenders.catalogue import COMPARED, DEFAULT, available
from contenders.job import LEARNING_RATE
from gpt_model import choose_matmul_dtype
from tqdm import tqdm

from zcomm._bench.emulated_nodes import unavailable_reason

BATCHES = {
    "network": {"batch_size": 1, "seq_length": 16},
    "compute": {"batch_size": 8, "seq_length": 128},
    "users": {"batch_size": 4, "seq_length": 256},
    "main": {"batch_size": 4, "seq_length": 128},
}
MODEL = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
POLL_S = 0.2


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--networks", nargs="+", default=[LOOPBACK, "1gbit", "200mbit"], help="rates in the notation of tc, or loopback"
    )
    add("--batch", nargs="+", choices=BATCHES, default=["network", "compute"])
    add("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["bfloat16"])
    add(
        "--systems",
        nargs="+",
        choices=COMPARED,
        metavar="SYSTEM",
        help=f"default: all installed ones but Muon's and those with another loss. Any of: {', '.join(COMPARED)}",
    )
    add("--nodes", type=int, default=2)
    add("--ranks-per-node", type=int, default=RANKS_PER_NODE)
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=1, help="steps of each system in a round")
    add("--warmup", type=int, default=1, help="rounds before those that count, to leave a new model's first steps out")
    add("--learning-rate", type=float, default=LEARNING_RATE, help="exact changes send less at low ones")
    add("--no-memory", action="store_true", help="do not measure peak memory")
    add("--no-distance", action="store_true", help="do not repeat all steps in one process at the end")
    add(
        "--patience",
        type=float,
        default=600,
        help="seconds without a new measurement after which a system counts as hung",
    )
    add("--output", type=Path, default=Path("runs/compare/compare"), help="path of the results, without a suffix")
    for name, default in MODEL.items():
        add(f"--{name.replace('_', '-')}", type=int, default=default)
    arguments = parser.parse_args()
    reason = unavailable_reason() if any(name != LOOPBACK for name in arguments.networks) else None
    if reason is not None:
        parser.error(f"{reason}; --networks {LOOPBACK} needs no emulated network")
    return arguments


def words_of(options: dict[str, Any]) -> list[str]:
    """Write ``options`` as words of a command line."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def measure(arguments: argparse.Namespace, store: Store, key: str, words: list[str], names: list[str]) -> None:
    """Run the remaining rounds; if ranks die or hang, start them again without the system that was running."""
    network = key.split()[2]
    while todo := store.run(key).unfinished(names, arguments.rounds):
        script = str(Path(__file__).with_name("compare_ranks.py"))
        launch = {"store": store.path, "key": key}
        launch |= {name: getattr(arguments, name) for name in ("rounds", "steps", "warmup", "ranks_per_node")}
        if network == LOOPBACK:
            launch["num_ranks"] = arguments.nodes * arguments.ranks_per_node
        else:
            launch |= {"emulate_nodes": arguments.nodes, "rate": network}
        command = [script, *words_of(launch), *words, "--systems", *todo]
        problem = wait(start(command + ["--no-distance"] * arguments.no_distance), store.path, arguments.patience)
        store.values = Store(store.path).values
        run = store.run(key)
        if problem and run.running not in todo:
            raise SystemExit(f"{key}: {problem}, and no system was running")
        if problem:
            run.systems.setdefault(run.running, System()).error = problem
            store.keep(key, run)


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a Python script as a process."""
    return subprocess.Popen([sys.executable, *command], env={"OMP_NUM_THREADS": "1"} | os.environ)


def wait(process: subprocess.Popen[bytes], written: Path, timeout_s: float) -> str:
    """Wait for ``process``; return what went wrong, or "". Progress is a change of the file ``written``."""
    started = time.time()
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            changed = written.stat().st_mtime if written.exists() else started
            if time.time() - max(started, changed) > timeout_s:
                return f"no measurement in {timeout_s:g} s"
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # so that it ends its ranks and removes its nodes
            process.wait()
    return f"the ranks ended with exit code {process.returncode}" if process.returncode else ""


def take_memory(arguments: argparse.Namespace, store: Store, key: str, words: list[str], names: list[str]) -> None:
    """Measure the peak memory of each system without a figure, each in separate ranks."""
    known = store.values["memory"].setdefault(key, {})
    per_node, script = arguments.ranks_per_node, str(Path(__file__).with_name("zero_memory.py"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.nodes * per_node}"]
    for name in tqdm([name for name in names if name not in known], unit="system", desc=f"{key} memory"):
        command = [sys.executable, *torchrun, script, name, *words, f"--ranks-per-node={per_node}"]
        environment, quiet = (
            {"OMP_NUM_THREADS": "1"} | os.environ,
            {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL},
        )
        with subprocess.Popen(command, **quiet, text=True, env=environment) as agent:
            try:
                printed, _ = agent.communicate(timeout=arguments.patience)
            except subprocess.TimeoutExpired:
                printed = ""
            finally:
                agent.terminate()  # torchrun ends its ranks
        rows = [json.loads(line) for line in printed.splitlines() if line.startswith('{"case"')]
        known[name] = rows[0] if rows else {"error": "printed no figures"}
        store.write()


def commit() -> str:
    """The commit of this tree, and whether anything but results differs from it."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        name = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], check=True, capture_output=True, text=True)
        paths = ["--", ".", ":!bench/results"]
        status = subprocess.run([*git, "status", "--porcelain", *paths], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip() + ("-changed" if status.stdout.strip() else "")


def context(before: dict[str, str], dtypes: list[str]) -> dict[str, str]:
    """Describe the command, the versions, the machine, and the commits of all rounds, with those ``before``."""
    versions, memory_gib = {}, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    for package in ("zcomm-zero", "torch", "deepspeed", "torchft"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    today = time.strftime("%Y-%m-%d", time.gmtime())
    cpu = f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"
    products = {"matrix products": "in float32, also of bfloat16 parameters: this CPU has no fast bfloat16 products"}
    is_slow = "bfloat16" in dtypes and choose_matmul_dtype(torch.bfloat16, torch.device("cpu")) == torch.float32
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commits": ", ".join(dict.fromkeys([*filter(None, before.get("commits", "").split(", ")), commit()])),
        "versions": ", ".join(f"{name} {text}" for name, text in versions.items()),
        "machine": f"{cpu}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.machine()}, {today}",
        **(products if is_slow else {}),
    }


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def report(store: Store, output: Path) -> None:
    """Write the tables and the plot of everything in the store."""
    runs = {key: store.run(key) for key in store.values["runs"]}
    text = markdown(runs, store.values["memory"], store.values["context"])
    output.with_suffix(".md").write_text(text, encoding="utf-8")
    if runs:
        draw(runs, output.with_suffix(".png"))


def main() -> int:
    """Run the missing measurements and write the report."""
    arguments = parse_arguments()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that ``finally`` ends the processes it started
    store, names = Store(arguments.output.with_suffix(".json")), arguments.systems or available(DEFAULT)
    store.values["context"] = context(store.values["context"], arguments.dtype)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=arguments.output.parent) as folder:
            for batch in arguments.batch:
                shape = {name: getattr(arguments, name) for name in MODEL} | BATCHES[batch]
                if arguments.learning_rate != LEARNING_RATE:
                    shape["learning_rate"] = arguments.learning_rate
                if arguments.ranks_per_node != RANKS_PER_NODE:
                    shape["ranks_per_node"] = arguments.ranks_per_node
                of_rounds = {"nodes": arguments.nodes, "steps": arguments.steps}
                if arguments.warmup > 1:  # older files do not say that it was 1
                    of_rounds["warmup"] = arguments.warmup
                store.check_shape(batch, shape | of_rounds)
                store.write()
                for dtype in arguments.dtype:
                    words = words_of(shape | {"dtype": dtype, "nvme_folder": folder})
                    for network in arguments.networks:
                        measure(arguments, store, f"{dtype} {batch} {network}", words, names)
                        report(store, arguments.output)
                    if not arguments.no_memory:
                        take_memory(arguments, store, f"{dtype} {batch}", words, names)
                        report(store, arguments.output)
    except ValueError as error:
        sys.stderr.write(f"compare.py: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    print(arguments.output.with_suffix(".md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
