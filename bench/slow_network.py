"""Tokens/s of a training step on emulated nodes behind a slow network, beside FSDP2, DDP and DeepSpeed.

    python bench/slow_network.py                                     2 nodes x 2 ranks, 200 Mbit/s; needs root
    python bench/slow_network.py --rate 1gbit --rounds 9
    python bench/slow_network.py --systems zero++ "fsdp2 reshard=True"
    PYTHONPATH=FOLDER python bench/slow_network.py                   with a DeepSpeed that is installed there

All systems train the same model in bfloat16 in one process group and take turns: a round is ``--steps`` optimizer steps
of each, so that whatever else the machine does falls on all of them alike. A row is the median over rounds. ``x4``:
four batches a step. What a system refuses, or a peer's failure, is a row with its error. Columns:

    vs fsdp2        tokens/s over FSDP2's, the median of the rounds' ratios
    comm(ms)        the step less the same rank's step alone: the same computation, nothing sent, in the same round
    share           comm over the step: how much of it the network takes that is not hidden behind computation
    wire(MB)        sent by a node in a step by the counter of its interface, headers and all
    M               bytes that zcomm counted between nodes in a step, in units of the bfloat16 model
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders.catalogue import ENTRIES, SLOW_NETWORK, available, build
from contenders.contender import Contender
from contenders.job import add_shape, new_setup
from contenders.turn import take_steps

import zcomm
from zcomm import Topology, ZcommError, control
from zcomm.bench.emulated_nodes import INTERFACE
from zcomm.bench.harness import Column, Report
from zcomm.bench.interface import sent_nbytes
from zcomm.bench.launch import on_ranks
from zcomm.bench.options import add_launch_arguments, check_launch
from zcomm.volume import inter_node_model_units

DTYPE = "bfloat16"
LOSS_TOLERANCE = 5e-2
"""Relative, beside FSDP2 after the same batches."""
PEER = "fsdp2 reshard=True"
COLUMNS = [
    Column("case", "case".rjust(18)),
    Column("step_ms", "step(ms)", ".1f", is_measurement=True),
    Column("tokens_per_s", "tokens/s", ",.0f", is_measurement=True),
    Column("vs_fsdp2", "vs fsdp2", ".3f", is_measurement=True),
    Column("comm_ms", "comm(ms)", ".1f", is_measurement=True),
    Column("share", "share", ".3f", is_measurement=True),
    Column("wire_mb", "wire(MB)", ".2f", is_measurement=True),
    Column("units", "M", ".3f", is_measurement=True),
    Column("loss", "loss", ".4f"),
]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SLOW_NETWORK, help="default: all that are installed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="of each system in a round")
    parser.add_argument("--json", action="store_true", help="the same rows as JSON lines")
    add_shape(parser)
    add_launch_arguments(parser)
    parser.set_defaults(emulate_nodes=2, rate="200mbit", batch_size=1, seq_length=32)
    arguments = parser.parse_args()
    arguments.rate = None if arguments.rate == "none" else arguments.rate
    return arguments


@dataclass
class System:
    """One row: a system in training, and what each of its turns took."""

    name: str
    contender: Contender | None = None
    error: str = ""
    seconds: list[float] = field(default_factory=list)
    wire_nbytes: list[int] = field(default_factory=list)
    """Sent by the node of this rank."""
    counted_nbytes: list[int] = field(default_factory=list)
    """Sent to other nodes by this rank, as zcomm counts it."""


class Comparison:
    """All systems on the ranks of ``topology``."""

    def __init__(self, arguments: argparse.Namespace, topology: Topology, device: torch.device) -> None:
        self._arguments, self._topology, self._device = arguments, topology, device
        self._interface = INTERFACE if int(os.environ["GROUP_WORLD_SIZE"]) > 1 else None
        names = arguments.systems or available(SLOW_NETWORK)
        self.systems = [System(name) for name in names]

    def build(self) -> None:
        """Build every system and take its first turn, in which peers allocate and compile."""
        for system in self.systems:
            self._try(system, partial(self._build, system))
            self._try(system, partial(self._take_turn, system))
            for taken in (system.seconds, system.wire_nbytes, system.counted_nbytes):
                taken.clear()

    def measure(self, report: Report) -> None:
        """Let the systems take turns."""
        begun, rounds = time.monotonic(), self._arguments.rounds
        for number in range(rounds):
            for system in self.systems:
                self._try(system, partial(self._take_turn, system))
            if self._topology.rank == 0:
                left = (time.monotonic() - begun) / (number + 1) * (rounds - number - 1)
                report.status(f"round {number + 1} of {rounds}, {left:.0f} s left")

    def close(self) -> None:
        """Free what was made for the systems."""
        for system in self.systems:
            if system.contender is not None:
                system.contender.close()

    def _build(self, system: System) -> None:
        setup = new_setup(self._arguments, DTYPE, self._device, self._topology)
        system.contender = build(system.name, setup)

    def _take_turn(self, system: System) -> None:
        assert system.contender is not None, f"{system.name} was not built"
        wire, started = self._sent_by_node(), time.perf_counter()
        with zcomm.traffic() as sent:
            take_steps(self._arguments, system.contender, self._topology, self._device)
        system.seconds.append(time.perf_counter() - started)
        system.wire_nbytes.append(self._sent_by_node() - wire)
        system.counted_nbytes.append(sent.bytes(link="inter"))

    def _sent_by_node(self) -> int:
        return 0 if self._interface is None else sent_nbytes(self._interface)

    def _try(self, system: System, call: Callable[[], None]) -> None:
        """Do it unless the system has failed before; whether it has now is agreed."""
        if system.error:
            return
        said = ""
        try:
            call()
        except Exception as error:  # a peer's, too: the others go on
            said = (str(error) or type(error).__name__).splitlines()[0]
            said = f"{type(error).__name__}: {said}"
        texts = control.gather_texts(said, self._topology)  # and all begin the next turn together
        system.error = next((text for text in texts if text), "")

    def rows(self) -> list[dict[str, Any]]:
        """The measurements by column, the same on every rank. Collective."""
        return [self._row(system) for system in self.systems]

    def _row(self, system: System) -> dict[str, Any]:
        if system.error or system.contender is None:
            return {"case": system.name}
        arguments, topology, contender = self._arguments, self._topology, system.contender
        mine = torch.tensor([self._median(system.wire_nbytes), self._median(system.counted_nbytes)])
        wire, counted = control.gather_float64(mine, topology).sum(0).tolist()
        numel = sum(p.numel() for p in new_setup(arguments, DTYPE, torch.device("cpu")).model.parameters())
        seconds = statistics.median(system.seconds) / arguments.steps
        row: dict[str, Any] = {
            "case": system.name,
            "step_ms": 1e3 * seconds,
            "tokens_per_s": self._tokens(contender) / seconds,
            "loss": contender.loss,
        }
        if self._interface is not None:
            row["wire_mb"] = wire / topology.world_size / 1e6
        if ENTRIES[system.name].module == "zero_optimizer":
            row["units"] = inter_node_model_units(counted, topology.num_nodes, numel)
        return row | self._beside(system, contender)

    def _beside(self, system: System, contender: Contender) -> dict[str, float]:
        """The columns that need another system's times of the same rounds."""
        row = {}
        if (peer := self._find(PEER)) is not None and peer.contender is not None:
            batches = contender.accumulation / peer.contender.accumulation
            row["vs_fsdp2"] = batches * self._median_ratio(peer.seconds, system.seconds)
        alone = self._find("alone" if contender.accumulation == 1 else f"alone x{contender.accumulation}")
        if alone is not None and not system.name.startswith("alone"):
            sent = [a - b for a, b in zip(system.seconds, alone.seconds, strict=True)]
            row["comm_ms"] = 1e3 * statistics.median(sent) / self._arguments.steps
            row["share"] = self._median_ratio(sent, system.seconds)
        return row

    def _find(self, name: str) -> System | None:
        return next((s for s in self.systems if s.name == name and not s.error), None)

    def _tokens(self, contender: Contender) -> int:
        return (
            self._topology.world_size * contender.accumulation * self._arguments.batch_size * self._arguments.seq_length
        )

    def _median(self, values: list[int]) -> float:
        return statistics.median(values) / self._arguments.steps

    @staticmethod
    def _median_ratio(above: list[float], below: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(above, below, strict=True))


def compare(arguments: argparse.Namespace, topology: Topology, device: torch.device) -> int:
    """Measure and print; 1 if a loss is wrong."""
    comparison = Comparison(arguments, topology, device)
    report = Report(COLUMNS, as_json=arguments.json)
    is_first, status = topology.rank == 0, 0
    if is_first:
        start(arguments, report, topology)
    comparison.build()
    comparison.measure(report)
    rows = comparison.rows()
    if is_first:
        right = next((row.get("loss") for row in rows if row["case"] == PEER), None)
        for system, row in zip(comparison.systems, rows, strict=True):
            is_same_data = system.contender is not None and system.contender.accumulation == 1
            is_checked = right is not None and "loss" in row and is_same_data
            report.row(row, num_wrong=int(is_checked and not abs(row["loss"] - right) <= LOSS_TOLERANCE * right))
            if system.error:
                report.note(f"{system.name}: {system.error}")
        status = report.finish()
    comparison.close()
    return status


def start(arguments: argparse.Namespace, report: Report, topology: Topology) -> None:
    """Say what is measured."""
    numel = sum(p.numel() for p in new_setup(arguments, DTYPE, torch.device("cpu")).model.parameters())
    shape, rate = f"{topology.num_nodes}x{topology.ranks_per_node}", arguments.rate or "unlimited"
    report.start("slow_network", backend=dist.get_backend(), nodes_x_ranks=shape, rate=rate, dtype=DTYPE)
    report.note(
        f"parameters {numel:,}  batch {arguments.batch_size} x {arguments.seq_length} per rank  "
        f"rounds {arguments.rounds} x {arguments.steps} steps, interleaved"
    )


def main() -> int:
    """Run the benchmark."""
    arguments = parse_arguments()
    try:
        if "LOCAL_RANK" not in os.environ:
            check_launch(arguments)
        return on_ranks(
            arguments, sys.argv[1:], lambda topology, device: compare(arguments, topology, device),
            program=[str(Path(__file__).resolve())],
        )  # fmt: skip
    except ZcommError as error:
        sys.stderr.write(f"slow_network.py: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
