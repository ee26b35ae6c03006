"""Compare wire formats: bits per element, error, bias and speed, on synthetic and real tensors.

    python bench/formats.py                       every format on every kind of data, 1 Mi elements
    python bench/formats.py --formats int4 nf4 int4/64:hadamard --json

The data: Gaussian, Laplace and Student-t (3 degrees of freedom) numbers; and gradients and weights of the model of
train_gpt.py after ``--train-iters`` steps. ``error`` is the relative error |decoded - x| / |x| in Euclidean norms of
one encoding; ``bias`` is that of the mean of 64 encodings, as in a sum over many steps: only stochastic rounding
reduces it. ``#wrong`` counts elements whose error exceeds the format's bound: half a step of its codes, or one step
with stochastic rounding; with rotation there is no bound.

Rows with a ``gradient_error`` are what zcomm.NodeSums(relative_error=) sends: a grid whose steps follow from the error,
entropy-coded. Two more are for comparison, and not in this library: NVFP4, and a grid with one step for all that has
the error of ``GRID_AS``, with the entropy of its codes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from gpt_model import GPT, GPTConfig
from text_data import load_text, training_batch
from torch import Tensor
from torch.distributions import Laplace, StudentT

from zcomm import Format, get_format
from zcomm._bench.harness import BenchReport, Column, interleave
from zcomm._formats.message import MessageLayout, layout_of
from zcomm._formats.philox import Draw
from zcomm._kernels import grid as own_grid
from zcomm._kernels import kernels

FORMATS = [
    *("bf16", "fp16", "int8/2048", "int8", "int8/64", "int8:asym", "int8:stochastic", "fp8_e4m3", "fp8_e4m3/32"),
    *("int4/2048", "int4/512", "int4", "int4/64", "int4/32", "int4:asym", "int4/64:asym", "int4:stochastic"),
    *("int4:hadamard", "int4/32:hadamard", "int4:hadamard:stochastic", "nf4/128", "nf4", "nf4/32", "nf4:hadamard"),
]
COLUMNS = [
    Column("data", "data".rjust(10)),
    Column("format", "format".rjust(24)),
    Column("bits", "bits/elem", ".3f"),
    Column("error", "error", ".5f"),
    Column("bias", "bias", ".5f"),
    Column("quantize_gbps", "quantize(GB/s)", ".2f", is_measurement=True),
    Column("decode_gbps", "decode(GB/s)", ".2f", is_measurement=True),
]
NUM_REPEATS = 64
ERRORS = (0.05, 0.092, 0.12, 0.15, 0.2, 0.3)
"""Values of ``gradient_error``."""
GRID_AS = "nf4"
NVFP4_BLOCK, NVFP4_VALUES = 16, (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CAST_BOUNDS = {"bf16": 2.0**-8, "fp16": 2.0**-11}
SLACK = 1 + 2.0**-7  # the scale is rounded up to bf16


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=2**20, help="elements of the synthetic tensors")
    parser.add_argument("--formats", nargs="+", default=FORMATS, metavar="FORMAT", help="such as int4/64:hadamard")
    parser.add_argument("--train-iters", type=int, default=30, help="steps of the model before its tensors are taken")
    parser.add_argument("--data", type=Path, help="text for the model; default: the standard library's sources")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def synthetic(numel: int) -> dict[str, Tensor]:
    """Draw float32 [numel] from each distribution, the same on every machine."""
    torch.manual_seed(0)
    return {
        "gauss": torch.randn(numel),
        "laplace": Laplace(0.0, 1.0).sample((numel,)),
        "student-t3": StudentT(3.0).sample((numel,)),
    }


def of_trained_model(num_steps: int, data: Path | None) -> dict[str, Tensor]:
    """Return gradients and weights of all matrices after some AdamW steps, one flat float32 tensor each."""
    torch.manual_seed(0)
    config = GPTConfig()
    text = load_text(data, max_bytes=2_000_000, seq_length=config.seq_length)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(max(num_steps, 1)):
        optimizer.zero_grad()
        model(*training_batch(text, step=step, seed=0, batch_size=8, seq_length=config.seq_length)).backward()
        if step + 1 < num_steps:
            optimizer.step()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return {
        "gradients": torch.cat([p.grad.flatten() for p in matrices if p.grad is not None]),
        "weights": torch.cat([p.detach().flatten() for p in matrices]),
    }


def tensors_of(arguments: argparse.Namespace) -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of all data; the model is trained only when its data is needed."""
    yield from synthetic(arguments.numel).items()
    yield from of_trained_model(arguments.train_iters, arguments.data).items()


class Coder:
    """Encode and decode one tensor in one format, and measure the error."""

    def __init__(self, format: Format, x: Tensor) -> None:
        """Allocate the message of ``x`` and the decoded values."""
        self.format, self.x = format, x
        self.layout: MessageLayout = layout_of("bench", format, x.dtype, 1, x.numel())
        self.message = self.layout.new(1, x.device)
        self.decoded = torch.empty_like(x)

    def encode(self, step: int = 0) -> None:
        """Encode ``x`` to ``message``; ``step`` selects the random numbers."""
        draw = Draw(seed=0, step=step) if self.format.is_random else None
        kernels.quantize(self.x, self.layout, self.message, 0, 0, draw)

    def decode(self) -> None:
        """Decode ``message`` to ``decoded``."""
        kernels.decode(self.message, self.layout, self.decoded, 0, 0)

    def relative_error(self, values: Tensor) -> float:
        """The relative error of ``values`` as an approximation of ``x``."""
        return float((values - self.x).norm() / self.x.norm())

    def bias(self) -> float:
        """The relative error of the mean of many encodings."""
        if not self.format.is_random:
            return self.relative_error(self.decoded)
        mean = torch.zeros_like(self.x)
        for step in range(NUM_REPEATS):
            self.encode(step)
            self.decode()
            mean += self.decoded / NUM_REPEATS
        return self.relative_error(mean)

    def count_wrong(self) -> int:
        """Count elements whose error exceeds the format's bound."""
        error = (self.decoded - self.x).abs()
        if self.format.rotation is not None:
            return int(self.decoded.isnan().sum())
        if self.format.name in CAST_BOUNDS:
            return int((error > CAST_BOUNDS[self.format.name] * self.x.abs() + 1e-6).sum())
        if self.format.name == "none":
            return int((error != 0).sum())
        return int((error > SLACK * self._largest_error() + 1e-30).sum())

    def _largest_error(self) -> Tensor:
        """The error bound of every element."""
        block, codec = self.format.block, self.layout.codec
        missing = -self.x.numel() % block
        blocks = torch.cat([self.x, self.x[-1:].expand(missing)]).view(-1, block)
        if self.format.symmetric:
            bound = blocks.abs().amax(1, keepdim=True) * codec.relative_rounding
        else:
            # The zero point lies below the minimum by at most a bf16 step of it, which widens the range.
            low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
            bound = (high - low + low.abs() * 2.0**-7) / codec.qmax / 2
        bound = bound * 2 if self.format.is_random else bound
        return bound.expand(-1, block).reshape(-1)[: self.x.numel()]


def nvfp4(x: Tensor) -> Tensor:
    """``x`` [n] in NVFP4: E2M1, an E4M3 scale for each 16 elements, which is relative to a float32 one for all."""
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % NVFP4_BLOCK)).view(-1, NVFP4_BLOCK)
    largest, of_all = blocks.abs().amax(1, keepdim=True), x.abs().max() / (448 * NVFP4_VALUES[-1])
    scale = (largest / NVFP4_VALUES[-1] / of_all).to(torch.float8_e4m3fn).float() * of_all
    values = torch.tensor(NVFP4_VALUES)
    codes = torch.bucketize((blocks / scale).nan_to_num(0.0).abs(), (values[1:] + values[:-1]) / 2)
    return (values[codes] * scale * blocks.sign()).view(-1)[: x.numel()]


def grid(x: Tensor, error: float) -> tuple[float, float]:
    """Entropy in bits an element, and relative error, of ``x`` on a grid of equal steps that gives about ``error``."""
    low, high = 0.0, float(x.abs().max())
    for _ in range(30):
        step = (low + high) / 2
        codes = (x / step).round()
        got = float((codes * step - x).norm() / x.norm())
        low, high = (step, high) if got < error else (low, step)
    share = codes.unique(return_counts=True)[1].double() / x.numel()
    return -float((share * share.log2()).sum()), got


def compared(x: Tensor) -> Iterator[dict[str, float | str]]:
    """The rows of what is no format here."""
    error = float((nvfp4(x) - x).norm() / x.norm())
    yield {"format": "NVFP4", "bits": 4 + 8 / NVFP4_BLOCK, "error": error}
    coder = Coder(get_format(GRID_AS), x)
    coder.encode()
    coder.decode()
    bits, error = grid(x, coder.relative_error(coder.decoded))
    yield {"format": "grid, entropy", "bits": bits, "error": error}


def coded(x: Tensor, relative_error: float, rounds: int) -> dict[str, float | str]:
    """The row of ``x`` if it is sent with this ``gradient_error``."""
    message = torch.empty(own_grid.max_message_nbytes(x.numel()), dtype=torch.uint8)

    def encode() -> int:
        return own_grid.encode(own_grid.round_to_grid(x, relative_error), message)

    used, decoded = encode(), own_grid.decode(message, x.numel())
    cases: dict[str, Callable[[], object]] = {"quantize": encode, "decode": lambda: own_grid.decode(message, x.numel())}
    times = interleave(cases, rounds=rounds)
    return {
        "format": f"gradient_error={relative_error:g}",
        "bits": 8 * used / x.numel(),
        "error": float((decoded - x).norm() / x.norm()),
    } | {f"{name}_gbps": (x.nbytes + used) / timing.p50 / 1e9 for name, timing in times.items()}


def measure(coder: Coder, rounds: int) -> dict[str, float]:
    """Measure rates in GB/s of bytes read plus bytes written."""
    cases: dict[str, Callable[[], object]] = {"quantize": coder.encode, "decode": coder.decode}
    times = interleave(cases, rounds=rounds)
    nbytes = coder.x.nbytes + coder.message.nbytes
    return {f"{name}_gbps": nbytes / timing.p50 / 1e9 for name, timing in times.items()}


def main() -> int:
    """Print the table; return 1 if an element exceeds its format's error bound."""
    arguments = parse_arguments()
    formats = [get_format(name) for name in arguments.formats]
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    report = BenchReport(COLUMNS, as_json=arguments.json)
    report.start("formats", numel=arguments.numel, threads=torch.get_num_threads())
    for data, x in tensors_of(arguments):
        for format in formats:
            coder = Coder(format, x)
            coder.encode()
            coder.decode()
            num_wrong, error = coder.count_wrong(), coder.relative_error(coder.decoded)
            row = {
                "data": data,
                "format": str(format),
                "bits": 8 * coder.message.nbytes / x.numel(),
                "error": error,
                "bias": coder.bias(),
            }
            report.row(row | measure(coder, arguments.rounds), num_wrong=num_wrong)
        for error in ERRORS:
            report.row({"data": data} | coded(x, error, arguments.rounds), num_wrong=0)
        for other in compared(x):
            report.row({"data": data} | other, num_wrong=0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
