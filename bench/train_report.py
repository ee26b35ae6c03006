"""What a training run ends with: the table, the curves, and the continuation of a held-out text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from zero import model_state_nbytes

__all__ = ["RunResult", "print_table", "write_metrics", "write_plot"]

MIB = 2**20


@dataclass
class RunResult:
    """One training run, as rank 0 saw it; bytes are those of all ranks together where they say so."""

    name: str
    numel: int
    world_size: int
    num_nodes: int
    stage: int
    param_nbytes: int
    losses: list[tuple[int, float, float]]
    """Step, training loss (mean over ranks), tokens/s so far."""
    held_out_before: float
    held_out_after: float
    tokens_per_s: float
    memory: dict[str, int]
    model_states: int
    intra_nbytes: float
    """Bytes per step inside nodes, summed over ranks."""
    inter_nbytes: float
    """Bytes per step between nodes, summed over ranks."""
    continuation: str

    @property
    def inter_units(self) -> float:
        """Inter-node bytes per step over (nodes - 1), in units of M, the bytes of the model in bf16."""
        return self.inter_nbytes / max(self.num_nodes - 1, 1) / (2 * self.numel)

    @property
    def formula(self) -> float:
        """Bytes of model states that the theory gives for a rank."""
        return model_state_nbytes(
            self.numel,
            self.stage,
            self.world_size,
            param_nbytes=self.param_nbytes,
            state_nbytes=12 if self.param_nbytes == 2 else 8,
        )


def print_table(results: Sequence[RunResult]) -> None:
    """One column a run. Plain ZeRO-3's bytes are given by formula when it was not run beside."""
    names = [result.name for result in results]
    rows: list[tuple[str, list[str]]] = [
        ("held-out loss, nats/byte: start", [f"{r.held_out_before:.3f}" for r in results]),
        ("held-out loss, nats/byte: end", [f"{r.held_out_after:.3f}" for r in results]),
        ("tokens/s", [f"{r.tokens_per_s:,.0f}" for r in results]),
        ("model states per rank, measured", [f"{r.model_states / MIB:.2f} MiB" for r in results]),
        ("model states per rank, formula", [f"{r.formula / MIB:.2f} MiB" for r in results]),
    ]
    for kind in results[0].memory:
        rows.append((f"  {kind}", [f"{r.memory.get(kind, 0) / MIB:.2f} MiB" for r in results]))
    rows += [
        ("bytes/step inside nodes, all ranks", [f"{r.intra_nbytes / MIB:.2f} MiB" for r in results]),
        ("bytes/step between nodes, all ranks", [f"{r.inter_nbytes / MIB:.2f} MiB" for r in results]),
        ("  in M = 2 bytes x parameters", [f"{r.inter_units:.3f} M" for r in results]),
    ]
    if len(results) == 1 and results[0].num_nodes > 1:
        plain = 3.0 if results[0].param_nbytes == 2 else 6.0
        rows.append(
            (f"  plain ZeRO-3 in its dtype ({plain:.1f} M, formula)", [f"{results[0].inter_units / plain:.3f} of it"])
        )
    width = max(len(label) for label, _ in rows) + 2
    print(" " * width + "".join(f"{name:>20}" for name in names))
    for label, cells in rows:
        print(f"{label:<{width}}" + "".join(f"{cell:>20}" for cell in cells))
    if len(results) == 2:
        first, second = results
        print(f"held-out loss of {first.name} minus {second.name}: {first.held_out_after - second.held_out_after:+.4f}")
        print(
            f"inter-node bytes of {first.name}: {first.inter_nbytes / max(second.inter_nbytes, 1):.3f} of {second.name}"
        )
    for result in results:
        print(f"\n{result.name} continues a held-out text:\n{result.continuation}")


def write_metrics(results: Sequence[RunResult], path: Path) -> None:
    """JSON lines: one a logged step, then one summary a run."""
    with path.open("w") as file:
        for result in results:
            for step, loss, rate in result.losses:
                row = {"run": result.name, "step": step, "loss": loss, "tokens_per_s": rate}
                file.write(json.dumps(row) + "\n")
            summary = {key: value for key, value in asdict(result).items() if key != "losses"}
            file.write(json.dumps({"summary": summary | {"inter_units": result.inter_units}}) + "\n")


def write_plot(results: Sequence[RunResult], path: Path) -> bool:
    """Loss curves as a PNG; False without matplotlib (extra ``bench``)."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for result in results:
        axes.plot([s for s, _, _ in result.losses], [loss for _, loss, _ in result.losses], label=result.name)
        axes.plot(result.losses[-1][0], result.held_out_after, "o", label=f"{result.name}, held out")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=f"{results[0].numel / 1e6:.1f} M parameters")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True
