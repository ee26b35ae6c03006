"""The report of train_gpt.py: a table, JSON lines and a plot.

The unit M is 2 x numel bytes, the model in bf16. Bytes between nodes are those that all ranks send to other nodes; in M
they are also divided by (nodes - 1). Plain ZeRO-3 in bf16 sends M for each of two gathers and one reduction: 3 M
between nodes, and 3 x nodes x (ranks_per_node - 1) M inside them.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from plot_style import label_curves, style_of
from text_data import Text

from zcomm import Topology, Traffic, volume
from zero import model_state_nbytes
from zero._runtime.memory_report import MemoryReport

mpl.use("Agg")
WORDS = {
    "ZeRO": "stage 1 shards optimizer states over all ranks, 2 gradients too, 3 parameters too",
    "qwZ": "weights are sent as int8",
    "qgZ": "gradients are sent as int4",
    "hpZ": "each node keeps a copy of the parameters, so that backward gathers them inside the node",
    "delta-hpZ": "each node keeps a copy of the parameters, updated once a step by 4-bit differences",
    "offload": "optimizer states are in host memory",
    "delayed": "they are updated during the next step",
}
"""What the names of runs are made of."""
EXCHANGES_OF_PLAIN_ZERO3 = 3  # gather for forward, gather for backward, reduction of the gradients


@dataclass
class Result:
    """Losses, times, bytes and memory of one run."""

    name: str
    numel: int
    dtype: torch.dtype
    stage: int
    losses: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    held_out_steps: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    steps_sent: list[Traffic] = field(default_factory=list)
    intra_nbytes: int = 0
    """Bytes of a typical step, over all ranks."""
    inter_nbytes: int = 0
    """Bytes of a typical step, over all ranks."""
    memory: MemoryReport | None = None

    def add_step(self, loss: float, sent: Traffic, *, seconds: float) -> None:
        """Count one training step."""
        self.losses.append(loss)
        self.step_seconds.append(seconds)
        self.steps_sent.append(sent)

    def add_held_out(self, loss: float) -> None:
        """Record the held-out loss after the steps so far."""
        self.held_out.append(loss)
        self.held_out_steps.append(len(self.losses))

    def typical_step(self) -> Traffic:
        """Return what this rank sent in the median step.

        Not the mean: an evaluation leaves parameters gathered, so the step after it sends less.
        """
        return sorted(self.steps_sent, key=lambda sent: sent.bytes())[len(self.steps_sent) // 2]

    def progress(self, tokens_per_step: int) -> str:
        """Return the name, the last losses and the last step's speed."""
        tokens_per_s = tokens_per_step / self.step_seconds[-1]
        return (
            f"{self.name}: loss {self.losses[-1]:.3f}, held out {self.held_out[-1]:.3f}, {tokens_per_s:,.0f} tokens/s"
        )

    def inter_units(self, num_nodes: int) -> float:
        """Bytes between nodes per step, in M."""
        return volume.inter_node_model_units(self.inter_nbytes, num_nodes, self.numel)


class MetricsFile:
    """``metrics.jsonl`` in the output folder, written by one rank."""

    def __init__(self, folder: Path, *, is_writer: bool) -> None:
        """Open the file on the writer; elsewhere writing does nothing."""
        self.path = folder / "metrics.jsonl"
        self._file = None
        if is_writer:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="utf-8")

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, **values: Any) -> None:
        """Write one line and flush it."""
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()


def print_words(names: list[str]) -> None:
    """Explain each word in the names of the runs, and those of the table, once."""
    found = {word for name in names for word in name.replace("ZeRO-", "ZeRO ").split()}
    for word, meaning in WORDS.items():
        if word in found:
            print(f"# {word}: {meaning}")
    print("# loss: nats per byte (0.69 of them are a bit); held out: on text that is not trained on")
    print("# M: the bytes of the model in bf16; between nodes, ZeRO-3 in bf16 sends 3 M a step", flush=True)


def print_report(
    results: list[Result], topology: Topology, text: Text, sample: str, *, tokens_per_step: int, metrics: MetricsFile
) -> None:
    """Print everything, and add the table to the metrics."""
    _print_context(results[0], topology, text)
    columns = [_measured_column(result, topology, tokens_per_step) for result in results]
    columns.append(_plain_zero3_column(results[0], topology))
    _print_table(columns)
    for column in columns:
        metrics.write(kind="summary", **column)
    print(f"# sent by rank 0 in a typical step, bytes: {_breakdown(results[0])}")
    if len(results) > 1:
        _print_curves(results)
    print(f"# held-out text | sampled continuation:\n{_indented(sample)}")
    print(f"# metrics: {metrics.path}")


def plot(results: list[Result], topology: Topology, path: Path) -> None:
    """Draw the losses, and the bytes per step on a logarithmic scale."""
    figure, (losses, sent) = plt.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    for result in results:
        style = style_of(result.name)
        losses.plot(range(1, len(result.losses) + 1), result.losses, alpha=0.35, linewidth=0.8, **style)
        losses.plot(result.held_out_steps, result.held_out, marker="o", markersize=4, label=result.name, **style)
    losses.set(xlabel="step", ylabel="loss (nats/byte)", title="Loss: training (thin) and held-out (dots)")
    label_curves(losses)
    columns = [_measured_column(result, topology, 1) for result in results]
    columns.append(_plain_zero3_column(results[0], topology))
    colours = [style_of(column["run"])["color"] for column in columns]
    for offset, link in enumerate(("within nodes", "between nodes")):
        values = [column[f"bytes per step {link}"] for column in columns]
        places = [x + 0.42 * offset for x in range(len(columns))]
        bars = sent.bar(places, values, width=0.4, color=colours, alpha=1.0 if offset else 0.4)
        labels = [f"{value / 1e6:.2f} MB\n{link}" if value else "" for value in values]
        sent.bar_label(bars, labels=labels, fontsize=8)
    sent.margins(y=0.12)  # room for the labels of two lines
    sent.set_xticks([x + 0.2 for x in range(len(columns))], [column["run"] for column in columns], fontsize=8)
    sent.set(ylabel="bytes per step, all ranks", title="Bytes sent")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"# plot: {path}")


def _print_context(result: Result, topology: Topology, text: Text) -> None:
    print(
        f"\n# torch {torch.__version__}  {topology.num_nodes} nodes x {topology.ranks_per_node} ranks  "
        f"parameters {result.numel:,}  steps {len(result.losses)}\n"
        f"# text: {text.source}, {text.train.numel():,} bytes to train on, {text.held_out.numel():,} held out"
    )


def _measured_column(result: Result, topology: Topology, tokens_per_step: int) -> dict[str, Any]:
    memory = result.memory
    assert memory is not None, "finish() measures the memory"
    column: dict[str, Any] = {
        "run": result.name,
        "held-out loss at start": result.held_out[0],
        "held-out loss at end": result.held_out[-1],
        "tokens/s (median step)": tokens_per_step / statistics.median(result.step_seconds),
        "model states per rank": memory.model_states,
        "model states per rank, formula": memory.formula,
    }
    column |= {f"{name} per rank": nbytes for name, nbytes in memory.buffers.items() if nbytes}
    if torch.cuda.is_available():
        column["peak GPU memory"] = torch.cuda.max_memory_allocated()
    column["bytes per step within nodes"] = result.intra_nbytes
    column["bytes per step between nodes"] = result.inter_nbytes
    column["between nodes, in M"] = result.inter_units(topology.num_nodes)
    return column


def _plain_zero3_column(result: Result, topology: Topology) -> dict[str, Any]:
    model_nbytes, num_nodes, per_node = 2 * result.numel, topology.num_nodes, topology.ranks_per_node
    sent = EXCHANGES_OF_PLAIN_ZERO3 * model_nbytes
    return {
        "run": "plain ZeRO-3 bf16, formula",
        "model states per rank, formula": model_state_nbytes(result.numel, 3, topology.world_size),
        "bytes per step within nodes": sent * num_nodes * (per_node - 1),
        "bytes per step between nodes": sent * (num_nodes - 1),
        "between nodes, in M": float(EXCHANGES_OF_PLAIN_ZERO3 if num_nodes > 1 else 0),
    }


def _print_table(columns: list[dict[str, Any]]) -> None:
    rows = list(dict.fromkeys(key for column in columns for key in column))
    label_width = max(map(len, rows))
    cells = {row: [_cell(row, column.get(row)) for column in columns] for row in rows}
    widths = [max(len(cells[row][i]) for row in rows) for i in range(len(columns))]
    for row in rows:
        line = "   ".join(cell.rjust(width) for cell, width in zip(cells[row], widths, strict=True))
        print(f"{row:<{label_width}}   {line}")


def _cell(row: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    if "loss" in row or "in M" in row:
        return f"{value:.3f}"
    return f"{value:,.0f}" if "tokens" in row else f"{value / 1e6:,.2f} MB"


def _breakdown(result: Result) -> str:
    parts = (f"{' '.join(key)} {count.bytes:,}" for key, count in result.typical_step())
    return ", ".join(parts) or "none"


def _print_curves(results: list[Result]) -> None:
    print(f"# held-out loss at step{''.join(f'{result.name:>26}' for result in results)}")
    for step, *losses in zip(results[0].held_out_steps, *(result.held_out for result in results), strict=True):
        print(f"# {step:>21}{''.join(f'{loss:>26.4f}' for loss in losses)}")
    difference = results[0].held_out[-1] - results[1].held_out[-1]
    print(f"# final difference: {difference:+.4f} nats/byte ({results[0].name} minus {results[1].name})")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
