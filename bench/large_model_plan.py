"""Predict and measure the memory and disk space of bench/large_model.py, in bytes by kind.

    kind         bytes an element      where
    parameters   2                     --parameters
    masters      4                     --states
    moments      8, or 4 in bf16       --states
    gradients    2                     --states

Plain torch.optim.AdamW with float32 parameters stores parameters, gradients and two moments, 16 bytes per parameter, in
memory; mixed precision also needs 16 (2 + 2 + 4 + 8).
"""

from __future__ import annotations

import shutil
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from gpt_model import GPTConfig

from zero._storage.transfer_counters import TransferCounts

PLAIN_NBYTES = 16
SIZES = {
    "1m": (2, 192, 4),
    "10m": (4, 448, 7),
    "50m": (8, 720, 12),
    "125m": (18, 768, 12),
    "350m": (28, 1024, 16),
    "1.3b": (26, 2048, 16),
    "4b": (36, 3072, 24),
}
"""Layers, hidden size and heads."""


def shape_of(size: str, seq_length: int) -> GPTConfig:
    """Return the model of a named size, or of ``LAYERSxHIDDEN`` with heads of 64."""
    if size in SIZES:
        num_layers, hidden_size, heads = SIZES[size]
    else:
        num_layers, hidden_size = (int(part) for part in size.split("x"))
        heads = max(1, hidden_size // 64)
    return GPTConfig(num_layers=num_layers, hidden_size=hidden_size, num_attention_heads=heads, seq_length=seq_length)


def numel_of(config: GPTConfig) -> int:
    """Count the elements of a GPT: embeddings, head, 12 h^2 + 13 h per block, and the last norm."""
    hidden = config.hidden_size
    return config.num_layers * (12 * hidden**2 + 13 * hidden) + (2 * 256 + config.seq_length + 2) * hidden


@dataclass(frozen=True)
class Needs:
    """Required bytes over all ranks."""

    parameters: int
    masters: int
    moments: int
    gradients: int

    @classmethod
    def of(cls, numel: int, *, moment_nbytes: int) -> Needs:
        """Compute the needs of ``numel`` elements with ``moment_nbytes`` for the moments of each."""
        return cls(2 * numel, 4 * numel, moment_nbytes * numel, 2 * numel)

    def on_disk(self, parameters: str, states: str) -> dict[str, int]:
        """Return the bytes in files, by kind."""
        kinds = {"parameters": self.parameters} if parameters == "nvme" else {}
        of_states = {"masters": self.masters, "moments": self.moments, "gradients": self.gradients}
        return kinds | (of_states if states == "nvme" else {})


def check_space(folder: Path, needed: dict[str, int]) -> str:
    """Describe the bytes that will be written.

    Raises:
        OSError: The disk under ``folder`` has less space; names the bytes by kind.
    """
    free, total = shutil.disk_usage(folder).free, sum(needed.values())
    kinds = ", ".join(f"{kind} {nbytes / 1e9:.1f} GB" for kind, nbytes in needed.items()) or "nothing"
    if total > free:
        raise OSError(
            f"the disk must have {total / 1e9:.1f} GB free ({kinds}): folder={folder}, free={free / 1e9:.1f} GB; "
            "choose a smaller --size, or --bf16-moments to halve the moments"
        )
    return f"{folder}: {kinds}; {total / 1e9:.1f} GB of {free / 1e9:.1f} GB free"


@dataclass
class Cost:
    """The cost of a run so far."""

    numel: int
    held_out: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    read: dict[str, int] = field(default_factory=dict)
    """Bytes of all ranks, by kind."""
    written: dict[str, int] = field(default_factory=dict)

    def count(self, moved: TransferCounts, world_size: int) -> None:
        """Add the bytes of all ranks: this rank's times ``world_size``, as shards have equal sizes."""
        for movement, count in moved.counts.items():
            into = {"read": self.read, "write": self.written}.get(movement.link)
            if into is not None:
                into[movement.kind] = world_size * count.bytes

    def table(self, rss: int, pss: int, seconds: dict[str, float]) -> str:
        """Return the table, one figure a line."""
        plain = PLAIN_NBYTES * self.numel
        rows = [
            ("parameters", f"{self.numel:,}"),
            ("held-out loss", " ".join(f"{loss:.4f}" for loss in self.held_out)),
            ("peak resident memory, sum of RSS", f"{rss / 2**30:.2f} GiB"),
            ("peak resident memory, sum of PSS", f"{pss / 2**30:.2f} GiB"),
            ("plain AdamW, parameters and states", f"{plain / 2**30:.2f} GiB, {plain / max(rss, 1):.1f} x as much"),
            ("median step", f"{statistics.median(self.step_seconds):.1f} s" if self.step_seconds else "-"),
        ]
        rows += [(f"read, {kind}", f"{nbytes / 1e9:.2f} GB") for kind, nbytes in sorted(self.read.items())]
        rows += [(f"written, {kind}", f"{nbytes / 1e9:.2f} GB") for kind, nbytes in sorted(self.written.items())]
        rows += [(f"time, {phase}", f"{s:.1f} s") for phase, s in sorted(seconds.items(), key=lambda one: -one[1])]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}   {value}" for name, value in rows)
