"""Measure how the communication of each configuration changes held-out loss, with the same seeds, data and batches.

    python bench/convergence.py                            the tiny model, 3 seeds, 1,500 steps, on 4 ranks as 2 x 2
    python bench/convergence.py --minutes 3                stop after 3 minutes; run it again to resume
    python bench/convergence.py --model main --seeds 1     the main job's model; gpt2: transformers' GPT2LMHeadModel
    python bench/convergence.py --steps 2000 --seeds 1 --only delta-hpz       drift of the replicas from the masters
    python bench/convergence.py --outlier-at 200           rank 0's loss times --outlier-factor in that step
    python bench/convergence.py --table                    train nothing; table and plot of the finished runs

Every finished run is a JSON file in ``--results``, and is not repeated. If the library refuses a configuration, its row
shows the error, and it is tried again next time. Columns:

    held-out loss      nats per byte after the last step: mean ± standard error over the seeds
    minus bf16-zero3   mean ± standard error of the paired differences, each between two runs of one seed; of how many.
                       Muon's configurations: minus bf16-zero3-muon
    M between nodes    bytes of the median step over all ranks, by zcomm.traffic, in M, the model in bf16; seeds' mean
    gradient error     |averaged gradient - exact| / |exact|, sampled, the exact one from every rank's own micro-batches
    weight error       |what the forward reads - float32 masters| / |masters|; bf16 rounding: of the masters
    drift              the weight error at the end over the larger of that at step 20 and of bf16 rounding
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import re
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from side_by_side.checkpoints import Checkpoints
from side_by_side.configurations import CONFIGURATIONS, DEFAULT
from side_by_side.jobs import JOBS, unigram_entropy
from side_by_side.records import Key, LibraryLog, Record
from side_by_side.report import rows_of, table
from side_by_side.run import Run, Settings
from text_data import Text
from tqdm import tqdm

from zcomm import Topology
from zcomm._bench.launch import choose_topology, process_group, relaunch_under_torchrun

RESULTS = Path(__file__).parent / "results" / "convergence"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=JOBS, default="tiny")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 1 on")
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=DEFAULT, metavar="NAME",
                        help=f"of {', '.join(CONFIGURATIONS)}; default: the first {len(DEFAULT)}")  # fmt: skip
    parser.add_argument("--eval-interval", type=int, default=50, help="steps between held-out losses")
    parser.add_argument("--outlier-at", type=int, metavar="STEP", help="inject a large gradient in this step")
    parser.add_argument("--outlier-factor", type=float, default=1e4)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for finished runs")
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/convergence"), help="folder for unfinished runs")
    parser.add_argument("--minutes", type=float, help="stop after this time; run again to resume")
    parser.add_argument("--table", action="store_true", help="train nothing; show the finished runs")
    parser.add_argument("--num-ranks", type=int, default=4, help="number of ranks, without torchrun")
    parser.add_argument("--ranks-per-node", type=int, help="default: torchrun's nodes; on one machine, two a node")
    return parser.parse_args()


def keys(arguments: argparse.Namespace) -> list[Key]:
    """The requested runs: all configurations of a seed, then the next seed."""
    return [
        Key(arguments.model, name, seed, arguments.steps, arguments.outlier_at)
        for seed in range(1, arguments.seeds + 1)
        for name in arguments.only
    ]


class Session:
    """The runs of this command, in one process group."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self._arguments, self._device = arguments, device
        self._started = time.monotonic()
        self._settings = Settings(arguments.eval_interval, arguments.outlier_factor)
        self._text: Text = JOBS[arguments.model].text()

    def run(self) -> bool:
        """Train the unfinished runs one after another until time is up; return whether all are finished."""
        done = [Record.read(key, self._arguments.results) for key in keys(self._arguments)]
        todo = [key for key, record in zip(keys(self._arguments), done, strict=True) if not _is_finished(record)]
        with tqdm(total=sum(key.steps for key in todo), unit="step", disable=dist.get_rank() != 0) as bar:
            return all(self._run_one(key, bar) for key in todo)

    def _run_one(self, key: Key, bar: tqdm) -> bool:
        """Train one run; return whether it is finished."""
        topology = choose_topology(self._arguments.ranks_per_node)
        record = self._new_record(key, topology)
        bar.set_description(str(key))
        is_finished = True
        with LibraryLog(record):
            try:
                is_finished = self._train(record, topology, bar)
            except Exception as error:  # recorded in the row of this run; the other runs continue
                record.error = f"{type(error).__name__}: {error}".splitlines()[0]
                bar.total -= key.steps - record.steps_done
        if is_finished and topology.rank == 0:
            record.write(self._arguments.results)
        topology.close()
        return is_finished

    def _train(self, record: Record, topology: Topology, bar: tqdm) -> bool:
        checkpoints = Checkpoints(self._arguments.checkpoints / str(record.key), topology)
        run = Run(record, self._settings, self._text, topology, self._device, checkpoints)
        bar.total -= record.steps_done

        def show(loss: float) -> None:
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            bar.update()

        try:
            is_finished = run.train(self._has_time, show)
        finally:
            run.close()
        if is_finished:
            checkpoints.remove()
        return is_finished

    def _has_time(self) -> bool:
        minutes = self._arguments.minutes
        return minutes is None or time.monotonic() - self._started < 60 * minutes

    def _new_record(self, key: Key, topology: Topology) -> Record:
        command = " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
        command = re.sub(r" --(results|checkpoints)[= ]\S+", "", command)  # where it is kept is not what was run
        versions = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
        return Record(key, command, versions, f"{topology.num_nodes}x{topology.ranks_per_node}")


def _is_finished(record: Record | None) -> bool:
    return record is not None and record.is_finished


def report(arguments: argparse.Namespace, *, draws: bool) -> None:
    """Print and save the table, and if ``draws`` the plot, of all runs of this model, length and outlier."""
    alike = [
        record
        for record in Record.all_in(arguments.results)
        if (record.key.model, record.key.steps, record.key.outlier_at)
        == (arguments.model, arguments.steps, arguments.outlier_at)
    ]
    if not alike:
        print(f"# no runs of this model and length in {arguments.results}")
        return
    rows, name = rows_of(alike), f"{arguments.model}-{arguments.steps}"
    name += "" if arguments.outlier_at is None else f"-outlier{arguments.outlier_at}"
    text = _head(alike, unigram_entropy(JOBS[arguments.model].text())) + "\n\n" + table(rows)
    (arguments.results / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    if draws and importlib.util.find_spec("matplotlib") is None:
        print("# no plot: pip install matplotlib")
    elif draws:
        path = arguments.results / f"{name}.png"
        import_module("side_by_side.plot").draw(rows, path, title=name)
        print(f"# plot: {path}")


def _head(records: Sequence[Record], entropy: float) -> str:
    record = max(records, key=lambda record: record.numel)
    job = JOBS[record.key.model]
    commands = sorted({record.command for record in records})
    return (
        f"# {record.key.model}, {record.key.steps} steps\n\n"
        f"{record.numel:,} parameters, {job.batch_size} x {job.seq_length} bytes a step over {record.nodes_x_ranks} "
        f"ranks (nodes x ranks), AdamW (with Muon where named), clipped to norm 1; {record.versions}. "
        f"Unigram entropy of the held-out text: {entropy:.3f} nats per byte.\n\n"
        + "\n".join(f"    {command}" for command in commands)
    )


def main() -> None:
    """Train the missing runs, and report on rank 0."""
    arguments = parse_arguments()
    if arguments.table:
        report(arguments, draws=True)
        return
    relaunch_under_torchrun(arguments.num_ranks)
    with process_group() as device:
        is_complete = Session(arguments, device).run()
        if dist.get_rank() == 0:
            report(arguments, draws=is_complete)


if __name__ == "__main__":
    main()
