"""The ranks of compare.py: run all systems interleaved in one process group on one network; rank 0 records times.

    torchrun --nproc-per-node 4 bench/compare_ranks.py --store FILE.json --key "float32 network loopback" --systems ddp

compare.py starts this script; ``--emulate-nodes`` and ``--rate`` are those of ``zcomm bench``.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from comparison.records import Run, Store, System
from contenders.catalogue import COMPARED, ENTRIES, build
from contenders.contender import Contender
from contenders.job import add_shape, new_setup
from contenders.one_process import OneProcess
from contenders.turn import take_steps
from tqdm import tqdm

import zcomm
from zcomm import Topology, ZcommError, control
from zcomm._bench.emulated_nodes import INTERFACE
from zcomm._bench.interface import sent_nbytes
from zcomm._bench.launch import on_ranks
from zcomm._bench.options import add_launch_arguments, check_launch
from zcomm.volume import inter_node_model_units


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--key", required=True, help="key of the run in the store")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--systems", nargs="+", choices=COMPARED, required=True)
    parser.add_argument("--rounds", type=int, default=5, help="rounds, including those in the store")
    parser.add_argument("--steps", type=int, default=1, help="steps of each system in a round")
    parser.add_argument("--warmup", type=int, default=1, help="rounds that do not count, before the others")
    parser.add_argument("--no-distance", action="store_true", help="compare no weights with those of one process")
    parser.add_argument("--nvme-folder", help="folder for offloaded parameters and states")
    add_shape(parser)
    add_launch_arguments(parser)
    return parser.parse_args()


class Rounds:
    """The interleaved steps of all systems on the ranks of ``topology``."""

    def __init__(self, arguments: argparse.Namespace, topology: Topology, device: torch.device) -> None:
        self._arguments, self._topology, self._device = arguments, topology, device
        self._interface = INTERFACE if int(os.environ["GROUP_WORLD_SIZE"]) > 1 else "lo"
        self._store = Store(arguments.store) if topology.rank == 0 else None
        self._run = self._store.run(arguments.key) if self._store else Run()
        cpu = torch.device("cpu")
        self._run.numel = sum(p.numel() for p in new_setup(arguments, arguments.dtype, cpu).model.parameters())
        self._run.tokens = topology.world_size * arguments.batch_size * arguments.seq_length
        self._started, self._number = int(time.time()), 0
        self._contenders: dict[str, Contender] = {}
        self._errors: dict[str, str] = {}
        self._one_process: dict[tuple[int, bool], OneProcess] = {}

    def run_all(self) -> None:
        """Build every system and run it at least once to warm up, as it allocates then; then run the rounds.

        Each round has another random order: what a system leaves in caches and on disks affects all others alike.
        """
        names, rounds, warmup = self._arguments.systems, self._arguments.rounds, self._arguments.warmup
        mine = torch.tensor([len(self._run.systems.get(name, System()).seconds) for name in names])
        taken = control.gather_float64(mine, self._topology)[0].tolist()  # of rank 0, which has the store
        left = {name: rounds - int(count) for name, count in zip(names, taken, strict=True)}
        total = len(names) * warmup + sum(left.values())
        with tqdm(total=total, unit="run", disable=self._topology.rank != 0, desc=self._arguments.key) as bar:
            for name in names:
                bar.set_postfix_str(name)
                self._try(name, partial(self._build, name))
                for _ in range(warmup):
                    self._try(name, partial(self._run_steps, name, is_counted=False))
                    bar.update()
            for number in range(rounds):
                self._number = number
                for name in random.Random(number).sample(names, len(names)):  # the same on all ranks
                    if number < left[name]:
                        bar.set_postfix_str(name)
                        self._try(name, partial(self._run_steps, name, is_counted=True))
                        bar.update()
            for name in [] if self._arguments.no_distance else names:
                bar.set_postfix_str(f"{name}, distance")
                self._try(name, partial(self._take_distance, name))
        self._keep("")

    def close(self) -> None:
        """Close all systems."""
        for contender in self._contenders.values():
            contender.close()

    def _build(self, name: str) -> None:
        setup = new_setup(self._arguments, self._arguments.dtype, self._device, self._topology)
        self._contenders[name] = build(name, setup)

    def _run_steps(self, name: str, *, is_counted: bool) -> None:
        contender, steps, topology = self._contenders[name], self._arguments.steps, self._topology
        wire, started = sent_nbytes(self._interface), time.perf_counter()
        cpu, caller = time.process_time(), time.thread_time()
        with zcomm.traffic() as sent:
            take_steps(self._arguments, contender, topology, self._device)
        seconds = time.perf_counter() - started
        wire, cpu, caller = sent_nbytes(self._interface) - wire, time.process_time() - cpu, time.thread_time() - caller
        mine = torch.tensor([seconds, wire, sent.bytes(link="inter"), cpu, caller], dtype=torch.float64) / steps
        of_ranks = control.gather_float64(mine, topology)
        system = self._run.systems.setdefault(name, System())
        system.accumulation = contender.accumulation
        system.losses.setdefault(str(contender.num_steps), contender.loss)
        if is_counted:
            system.seconds.append(of_ranks[:, 0].max().item())
            system.rounds.append(f"{self._started}/{self._number}")
            system.wire_nbytes.append(of_ranks[:, 1].mean().item())
            system.cpu_seconds.append(of_ranks[:, 3].sum().item())
            system.caller_seconds.append(of_ranks[:, 4].sum().item())
            if ENTRIES[name].module == "zero_optimizer":
                counted = of_ranks[:, 2].sum().item()
                system.units = inter_node_model_units(counted, topology.num_nodes, self._run.numel)

    def _take_distance(self, name: str) -> None:
        """Compare the weights with those of one process, on rank 0, which has the store."""
        contender, system = self._contenders[name], self._run.systems.setdefault(name, System())
        if contender.weights is None:
            return
        mine = contender.weights()
        if self._topology.rank:
            for _ in mine:  # it is collective
                pass
            return
        weights = [one.detach().cpu() for one in mine]
        has_muon, count = bool(ENTRIES[name].options.get("has_muon")), contender.accumulation
        if (count, has_muon) not in self._one_process:
            facts = self._arguments, self._arguments.dtype, self._topology.world_size
            self._one_process[count, has_muon] = OneProcess(*facts, accumulation=count, has_muon=has_muon)
        found = self._one_process[count, has_muon].distances(contender.num_steps, weights)
        system.distance, system.order_distance = found

    def _try(self, name: str, call: Callable[[], None]) -> None:
        """Call ``call`` unless the system has failed before; the ranks agree on whether it fails now."""
        if name in self._errors:
            return
        self._keep(name)
        message = ""
        try:
            call()
        except Exception as error:  # also a peer's: the other systems continue
            text = (str(error) or type(error).__name__).splitlines()[0]
            message = f"{type(error).__name__}: {text}"
        texts = control.gather_texts(message, self._topology)  # also synchronizes the ranks
        if error := next((text for text in texts if text), ""):
            self._errors[name] = error
            self._run.systems.setdefault(name, System()).error = error

    def _keep(self, running: str) -> None:
        self._run.running = running
        if self._store is not None:
            self._store.keep(self._arguments.key, self._run)


def run_rounds(arguments: argparse.Namespace, topology: Topology, device: torch.device) -> int:
    """Run all rounds on this rank."""
    rounds = Rounds(arguments, topology, device)
    rounds.run_all()
    rounds.close()
    return 0


def main() -> int:
    """Run the rounds that are missing in the store."""
    arguments = parse_arguments()
    try:
        if "LOCAL_RANK" not in os.environ:
            check_launch(arguments)
        return on_ranks(
            arguments, sys.argv[1:], lambda topology, device: run_rounds(arguments, topology, device),
            program=[str(Path(__file__).resolve())],
        )  # fmt: skip
    except ZcommError as error:
        sys.stderr.write(f"compare_ranks.py: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
