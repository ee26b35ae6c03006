"""Measure what publishing weights costs: bytes beside other encodings of the same changes, seconds, updates, kills.

    python bench/publish.py --link-numels 100     10 M parameters, three learning rates; 100 M over a slow link; kills
    python bench/publish.py --numels 1 --updates 20 --kills 3        a rehearsal
    python bench/publish.py --output bench/results/publish.md

A GPT over bytes is trained with AdamW on one rank, and published after each step. Encodings beside: a full copy in
bf16; int32 indices and bf16 values of the elements that differ; zstd, or zlib if zstandard is not installed, of the XOR
of the bits. H is the zeroth-order entropy of the changes in units in the last place.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from gpt_model import GPT, GPTConfig, choose_matmul_dtype
from text_data import load_text, training_batch
from torch import Tensor, nn

import zero
from zero._publish.manifest import MANIFEST, patch_name, publication_path

try:
    import zstandard
except ImportError:
    zstandard = None

SEQ_LENGTH, BATCH_SIZE = 64, 4
WARMUP_LR, LRS = 3e-4, (1e-4, 1e-5, 1e-6)
SHAPES = {1: (4, 128, 4), 10: (3, 512, 8), 100: (8, 1024, 16)}
"""By millions of parameters: layers, width, heads."""
LINK_BITS_S = 10e6


@dataclass(frozen=True)
class Row:
    """One publication, in bytes."""

    lr: float
    entropy: float
    published: int
    full: int
    pairs: int
    zstd: int


def new_gpt(millions: int) -> GPT:
    """Build the model in bf16; matrix products are in the dtype that is fast here."""
    dtype = choose_matmul_dtype(torch.bfloat16, torch.device("cpu"))
    return GPT(GPTConfig(*SHAPES[millions], SEQ_LENGTH, dtype)).bfloat16()


class Training:
    """A GPT that is trained on one rank, and published."""

    def __init__(self, millions: int, folder: Path) -> None:
        torch.manual_seed(0)
        self.text = load_text(None, max_bytes=2**22, seq_length=SEQ_LENGTH)
        self.model = new_gpt(millions)
        self.optimizer = zero.ZeroOptimizer(self.model, torch.optim.AdamW, stage=1, lr=WARMUP_LR, betas=(0.9, 0.95))
        self.publisher = zero.Publisher(self.optimizer, folder, snapshot_every=1000, keep=1000)
        self.numel = sum(param.numel() for param in self.model.parameters())
        self.num_steps = 0

    def step(self, lr: float) -> None:
        """Run one step."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batch = training_batch(self.text, step=self.num_steps, seed=0, batch_size=BATCH_SIZE, seq_length=SEQ_LENGTH)
        self.model(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1

    def bits(self) -> Tensor:
        """Return a copy of the parameters' bits, int16 [numel]."""
        return torch.cat([param.detach().flatten() for param in self.model.parameters()]).view(torch.int16)

    def close(self) -> None:
        """End publishing and training."""
        self.publisher.close()
        self.optimizer.close()


def entropy_of(new: Tensor, old: Tensor) -> float:
    """Bits an element of the changes in ulps, zeroth order."""
    order = [torch.where(bits < 0, -1 - (bits & 0x7FFF), bits).int() for bits in (new, old)]
    _, counts = torch.unique(order[0] - order[1], return_counts=True)
    shares = counts.double() / new.numel()
    return float(-(shares * shares.log2()).sum())


def published_nbytes(folder: Path, number: int) -> int:
    """Of a patch on one rank, with its manifest."""
    path = publication_path(folder, number)
    return sum((path / name).stat().st_size for name in (MANIFEST, patch_name(0)) if (path / name).exists())


def compressed(data: bytes) -> int:
    """Return the size of ``data`` as zstd, or else zlib, packs it."""
    return len(zlib.compress(data, 6) if zstandard is None else zstandard.ZstdCompressor(3).compress(data))


def measure_bytes(millions: int, num_warmup: int, num_steps: int) -> Iterator[Row]:
    """Train and publish; check that a subscriber gets the bits."""
    with tempfile.TemporaryDirectory() as name:
        training, folder = Training(millions, Path(name)), Path(name)
        weights: dict[str, Tensor] = {}
        subscriber = zero.Subscriber(folder, weights)
        for _ in range(num_warmup):
            training.step(WARMUP_LR)
        training.publisher.publish()
        number = 1
        for lr in LRS:
            for _ in range(num_steps):
                old = training.bits()
                training.step(lr)
                training.publisher.publish()
                training.publisher.wait()
                number += 1
                subscriber.update()
                new = training.bits()
                read = torch.cat([weights[key].flatten() for key, _ in training.model.named_parameters()])
                assert torch.equal(read.view(torch.int16), new)
                num_changed = int((new != old).sum())
                yield Row(
                    lr,
                    entropy_of(new, old),
                    published_nbytes(folder, number),
                    new.nbytes,
                    6 * num_changed,
                    compressed((new ^ old).numpy().tobytes()),
                )
        training.close()


def measure_link(millions: int, num_steps: int) -> tuple[float, float, int, int]:
    """Seconds of publish() to durable, of an update, bytes between, and those of a full copy; at the lowest rate."""
    with tempfile.TemporaryDirectory() as name:
        training, folder = Training(millions, Path(name)), Path(name)
        subscriber = zero.Subscriber(folder, new_gpt(millions))
        training.publisher.publish()
        training.publisher.wait()
        subscriber.update()
        found: list[tuple[float, float, int, int]] = []
        for step in range(num_steps):
            training.step(LRS[-1])
            begun = time.perf_counter()
            training.publisher.publish()
            training.publisher.wait()
            written = time.perf_counter()
            subscriber.update()
            read = time.perf_counter() - written
            found.append((written - begun, read, published_nbytes(folder, step + 2), 2 * training.numel))
        training.close()
    return sorted(found)[len(found) // 2]


def small_model() -> nn.Module:
    """Build a model of 50 k parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 64)).bfloat16()


def changed(model: nn.Module) -> None:
    """Change a tenth of the elements by a hundredth."""
    with torch.no_grad():
        for param in model.parameters():
            param.addcmul_(param, 0.01 * (torch.rand(param.shape) < 0.1))


def count_updates(num_updates: int) -> int:
    """How many of so many updates give the bits that were published."""
    model, ours, num_equal = small_model(), small_model(), 0
    with tempfile.TemporaryDirectory() as name, zero.Publisher(model, name) as publisher:
        subscriber = zero.Subscriber(name, ours)
        for _ in range(num_updates):
            changed(model)
            publisher.publish()
            publisher.wait()
            subscriber.update()
            subscriber.verify()
            pairs = zip(model.parameters(), ours.parameters(), strict=True)
            num_equal += all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)
    return num_equal


def forked(call: Callable[[], None]) -> int:
    """Run ``call`` in a fork; return its process id."""
    pid = os.fork()
    if not pid:
        try:
            torch.set_num_threads(1)
            call()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def count_kills(num_kills: int) -> int:
    """How many of so many receivers that are killed while they update are followed by one that goes on."""
    chance, model, num_good = random.Random(time.strftime("%Y%m%d")), small_model(), 0
    with tempfile.TemporaryDirectory() as name, zero.Publisher(model, name, snapshot_every=5, keep=3) as publisher:

        def follow() -> None:
            subscriber = zero.Subscriber(name, small_model())
            while True:
                subscriber.update()

        def go_on() -> None:
            ours = small_model()
            subscriber = zero.Subscriber(name, ours)
            subscriber.update()
            subscriber.verify()
            pairs = zip(model.parameters(), ours.parameters(), strict=True)
            assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)

        for _ in range(num_kills):
            changed(model)
            publisher.publish()
            pid = forked(follow)
            time.sleep(chance.random() * 0.05)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            publisher.wait()
            num_good += os.waitpid(forked(go_on), 0)[1] == 0
    return num_good


def report(options: argparse.Namespace) -> str:
    """Measure, and return the page."""
    packer = "zlib -6 (zstandard is not installed)" if zstandard is None else "zstd -3"
    lines = [
        "# What publishing weights costs",
        "",
        f"`python bench/publish.py --link-numels 100`: {os.cpu_count()} cores beside other processes; "
        f"torch {torch.__version__}; {time.strftime('%Y-%m-%d')}. A GPT over bytes, AdamW, bf16 with float32 masters, "
        f"one rank; {options.warmup} steps at a learning rate of {WARMUP_LR:g}, then {options.steps} at each rate "
        "below, published after each. "
        "H: zeroth-order entropy of the changes in ulps, bits an element. Bytes: the patch and its manifest. Every "
        "update gave the bits of the training.",
        "",
        "| M parameters | lr | H | published, kB | bits/element | over H | a full copy / it | 0.93 x 16/H | "
        f"index-value pairs / it | {packer} of the XOR / it |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for millions in options.numels:
        rows = list(measure_bytes(millions, options.warmup, options.steps))
        for lr in LRS:
            of_lr = [row for row in rows if row.lr == lr]
            published, full, pairs, zstd = (
                sum(getattr(row, key) for row in of_lr) for key in ("published", "full", "pairs", "zstd")
            )
            entropy, numel = sum(row.entropy for row in of_lr) / len(of_lr), full / 2
            lines.append(
                f"| {full / 2e6 / len(of_lr):.2f} | {lr:g} | {entropy:.3f} | {published / 1e3 / len(of_lr):.1f} | "
                f"{8 * published / numel:.3f} | {8 * published / numel / entropy:.3f} | {full / published:.1f} | "
                f"{0.93 * 16 / entropy:.1f} | {pairs / published:.2f} | {zstd / published:.2f} |"
            )
    for millions in options.link_numels:
        write_s, read_s, nbytes, full = measure_link(millions, options.steps)
        seconds = write_s + read_s + 8 * nbytes / LINK_BITS_S
        lines += [
            "",
            f"{full / 2e6:.1f} M parameters at a learning rate of {LRS[-1]:g} over 10 Mbit/s: {seconds:.2f} s from "
            f"`publish` to ready, of which {write_s:.2f} s until it is durable, {8 * nbytes / LINK_BITS_S:.2f} s on "
            f"the link for {nbytes / 1e6:.3f} MB, by arithmetic, and {read_s:.2f} s to read, decode and verify. A full "
            f"copy takes {8 * full / LINK_BITS_S:.0f} s on the link.",
        ]
    lines += [
        "",
        f"A model of 50 k parameters: {count_updates(options.updates)} of {options.updates} updates gave the published "
        f"digests and bits. {count_kills(options.kills)} of {options.kills} receivers that were killed while they "
        "updated were followed by one that read the newest version.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numels", type=int, nargs="*", choices=SHAPES, default=[10], help="millions of parameters")
    parser.add_argument("--link-numels", type=int, nargs="*", choices=SHAPES, default=[], help="over 10 Mbit/s")
    parser.add_argument("--warmup", type=int, default=40, help="steps before the first publication")
    parser.add_argument("--steps", type=int, default=4, help="at each learning rate")
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--output", type=Path, help="write the table there, too")
    options = parser.parse_args()
    text = report(options)
    sys.stdout.write(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
