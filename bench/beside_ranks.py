"""The ranks of one version in beside.py: they run the steps that it requests, and rank 0 answers with the times."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from contenders.catalogue import build
from contenders.contender import Contender
from contenders.job import add_shape, new_setup
from contenders.turn import take_steps

from zcomm import Topology, control
from zcomm._bench.emulated_nodes import INTERFACE
from zcomm._bench.interface import sent_nbytes
from zcomm._bench.launch import on_ranks
from zcomm._bench.options import add_launch_arguments

END = "end"
ANSWERS = "answers"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="holds a pipe for each rank, and one for the answers"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--steps", type=int, default=4, help="steps of a request")
    add_shape(parser)
    add_launch_arguments(parser)
    return parser.parse_args()


def serve(arguments: argparse.Namespace, topology: Topology, device: torch.device) -> int:
    """Run the requested systems until the request to end. A system is built at its first request."""
    interface = INTERFACE if int(os.environ["GROUP_WORLD_SIZE"]) > 1 else "lo"
    contenders: dict[str, Contender] = {}
    arguments.nvme_folder = str(arguments.folder)
    with (arguments.folder / str(topology.rank)).open(encoding="utf-8") as requests:
        while (name := requests.readline().strip()) != END:
            if name not in contenders:
                contenders[name] = build(name, new_setup(arguments, arguments.dtype, device, topology))
            wire, started = sent_nbytes(interface), time.perf_counter()
            take_steps(arguments, contenders[name], topology, device)
            took = time.perf_counter() - started
            mine = torch.tensor([took, sent_nbytes(interface) - wire], dtype=torch.float64) / arguments.steps
            of_ranks = control.gather_float64(mine, topology)
            if topology.rank == 0:
                seconds, nbytes = of_ranks[:, 0].max().item(), of_ranks[:, 1].mean().item()
                answer = {"seconds": seconds, "wire_nbytes": nbytes, "loss": contenders[name].loss}
                with (arguments.folder / ANSWERS).open("a", encoding="utf-8") as answers:
                    answers.write(json.dumps(answer) + "\n")
    for contender in contenders.values():
        contender.close()
    return 0


def main() -> int:
    """Join the ranks and serve requests."""
    arguments = parse_arguments()
    return on_ranks(
        arguments, sys.argv[1:], lambda topology, device: serve(arguments, topology, device),
        program=[str(Path(__file__).resolve())],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
