"""Measure the lossless coder of changes in ulps: bits per element beside their entropy, speed, and zstd and lz4.

    python bench/ulps.py                          changes of 1 Mi bf16 elements, one core
    ZCOMM_ISA=avx2 python bench/ulps.py --json

The data: weights N(0, 0.02) in bf16 before and after a step of about the learning rate (``lr``), changes in ulps of a
Laplace distribution (``laplace``, by its scale), and changes by one of a share of the elements (``share``). ``entropy``
is zeroth-order, of the changes in ulps, in bits an element; ``ratio`` what the message costs, over it. Rates are GB/s
of bf16 elements; ``memcpy`` is the rate of a plain copy. Where installed (``pip install zstandard lz4``), zstd (level
1) and lz4 code the same change, from the new and the old values, and apply it: XOR of the bits, compressed. ``alone``
is zstd's decompression without the XOR; and ``planes`` is zstd of the changes in ulps as a plane of low and a plane of
high bytes, without the time to make the planes or to apply them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Laplace

from zcomm._bench.harness import BenchReport, Column, interleave
from zcomm._kernels import ulps

LEARNING_RATES = (2e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 1e-6)
LAPLACE_SCALES = (30.0, 10.0, 3.0, 1.0, 0.5, 0.2)
SHARES = (0.1, 0.03, 0.01, 0.001, 0.0)
COLUMNS = [
    Column("data", "data".rjust(14)),
    Column("entropy", "entropy", ".3f"),
    Column("bits", "bits/elem", ".3f"),
    Column("ratio", "ratio", ".3f"),
    Column("encode_gbps", "encode(GB/s)", ".2f", is_measurement=True),
    Column("decode_gbps", "decode(GB/s)", ".2f", is_measurement=True),
    Column("memcpy_gbps", "memcpy(GB/s)", ".1f", is_measurement=True),
    Column("zstd_bits", "zstd bits", ".3f"),
    Column("zstd_encode_gbps", "zstd enc", ".2f", is_measurement=True),
    Column("zstd_decode_gbps", "zstd dec", ".2f", is_measurement=True),
    Column("alone_decode_gbps", "alone dec", ".2f", is_measurement=True),
    Column("lz4_bits", "lz4 bits", ".3f"),
    Column("lz4_encode_gbps", "lz4 enc", ".2f", is_measurement=True),
    Column("lz4_decode_gbps", "lz4 dec", ".2f", is_measurement=True),
    Column("planes_bits", "planes bits", ".3f"),
    Column("planes_encode_gbps", "planes enc", ".2f", is_measurement=True),
    Column("planes_decode_gbps", "planes dec", ".2f", is_measurement=True),
]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=2**20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def order(values: Tensor) -> Tensor:
    """16-bit floating-point values as int32 in their order, one apart for an ulp."""
    bits = values.view(torch.int16).to(torch.int32)
    return torch.where(bits >= 0, bits, -32769 - bits)


def moved(values: Tensor, steps: Tensor) -> Tensor:
    """bf16 ``values`` some ulps further."""
    moved = (order(values) + steps.to(torch.int32) + 32768) % 65536 - 32768
    return torch.where(moved >= 0, moved, -32769 - moved).to(torch.int16).view(torch.bfloat16)


def entropy_bits(new: Tensor, old: Tensor) -> float:
    """Zeroth-order entropy of the changes in ulps, in bits an element."""
    counts = torch.unique((order(new) - order(old)) % 65536, return_counts=True)[1]
    share = counts.double() / counts.sum()
    return abs(float((share * share.log2()).sum()))


def changes(numel: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, new and old values of all data, the same on every machine."""
    torch.manual_seed(0)
    weights = torch.randn(numel) * 0.02
    for rate in LEARNING_RATES:
        step = (torch.randn(numel) * rate / 2).clamp(-rate, rate)
        yield f"lr {rate:g}", (weights + step).bfloat16(), weights.bfloat16()
    old = weights.bfloat16()
    for scale in LAPLACE_SCALES:
        yield f"laplace {scale:g}", moved(old, Laplace(0.0, scale).sample((numel,)).round()), old
    for share in SHARES:
        yield (
            f"share {share:g}",
            moved(old, (torch.rand(numel) < share) * torch.randint(0, 2, (numel,)).mul(2).sub(1)),
            old,
        )


class Coded:
    """One change, and what it is coded to."""

    def __init__(self, new: Tensor, old: Tensor) -> None:
        """Code it once."""
        self.new, self.old, self.values = new, old, old.clone()
        self.message = torch.empty(ulps.max_message_nbytes(new.numel()), dtype=torch.uint8)
        self.nbytes = ulps.encode(new, old, self.message)

    def encode(self) -> None:
        """Code the change."""
        ulps.encode(self.new, self.old, self.message)

    def decode(self) -> None:
        """Apply the message to what ``values`` are; any values take the same time."""
        ulps.decode(self.message[: self.nbytes], self.values)

    def copy(self) -> None:
        """Copy the new values."""
        self.values.copy_(self.new)

    def count_wrong(self) -> int:
        """Count the elements that do not come back bit for bit."""
        self.values.copy_(self.old)
        self.decode()
        return int((self.values.view(torch.int16) != self.new.view(torch.int16)).sum())


class XorCoded:
    """The same change as the XOR of the bits, compressed."""

    def __init__(self, coded: Coded, compress: Callable[[Any], bytes], decompress: Callable[[bytes], Any]) -> None:
        """Code it once."""
        self._new, self._old = coded.new.view(torch.int16).numpy(), coded.old.view(torch.int16).numpy()
        self._values, self._xor = self._old.copy(), np.empty_like(self._old)
        self._compress, self._decompress = compress, decompress
        self.message = self.encode()

    def encode(self) -> bytes:
        """Code the change."""
        np.bitwise_xor(self._new, self._old, out=self._xor)
        return self._compress(self._xor)

    def decode(self) -> None:
        """Apply the message to what the values are."""
        np.bitwise_xor(self._values, np.frombuffer(self._decompress(self.message), np.int16), out=self._values)


Calls = dict[str, Callable[[], object]]
"""What is timed, by name."""


def other_coders(coded: Coded) -> tuple[Calls, dict[str, int]]:
    """What to time of those that are installed, and the bytes of their messages."""
    calls: Calls = {}
    nbytes = {}
    with contextlib.suppress(ImportError):
        zstd = importlib.import_module("zstandard")
        compress, decompress = zstd.ZstdCompressor(level=1).compress, zstd.ZstdDecompressor().decompress
        xor = XorCoded(coded, compress, decompress)
        calls |= {"zstd_encode": xor.encode, "zstd_decode": xor.decode}
        calls["alone_decode"] = lambda: decompress(xor.message)
        plain = planes(coded.new, coded.old)
        compressed = compress(plain)
        calls |= {"planes_encode": lambda: compress(plain), "planes_decode": lambda: decompress(compressed)}
        nbytes |= {"zstd": len(xor.message), "planes": len(compressed)}
    with contextlib.suppress(ImportError):
        lz4 = importlib.import_module("lz4.block")
        of_lz4 = XorCoded(coded, lz4.compress, partial(lz4.decompress, return_bytearray=True))
        calls |= {"lz4_encode": of_lz4.encode, "lz4_decode": of_lz4.decode}
        nbytes["lz4"] = len(of_lz4.message)
    return calls, nbytes


def planes(new: Tensor, old: Tensor) -> bytes:
    """The changes in zigzag form: all low bytes, then all high bytes."""
    difference = (order(new) - order(old) + 32768) % 65536 - 32768
    zigzag = (2 * difference) ^ (difference >> 31)
    return bytes(torch.cat([zigzag & 0xFF, zigzag >> 8 & 0xFF]).to(torch.uint8).numpy())


def measure(coded: Coded, rounds: int) -> dict[str, float]:
    """Rates in GB/s of elements, of this coder and others, and the others' bits an element."""
    others, nbytes = other_coders(coded)
    cases: Calls = {"encode": coded.encode, "decode": coded.decode, "memcpy": coded.copy, **others}
    row = {f"{name}_bits": 8 * size / coded.new.numel() for name, size in nbytes.items()}
    times = interleave(cases, rounds=rounds)
    return row | {f"{name}_gbps": coded.new.nbytes / timing.p50 / 1e9 for name, timing in times.items()}


def main() -> int:
    """Print the table; return 1 if a bit is wrong."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    report = BenchReport(COLUMNS, as_json=arguments.json)
    report.start("ulps", numel=arguments.numel)
    for name, new, old in changes(arguments.numel):
        coded, entropy = Coded(new, old), entropy_bits(new, old)
        bits = 8 * coded.nbytes / new.numel()
        row = {"data": name, "entropy": entropy, "bits": bits}
        row |= {"ratio": bits / entropy} if entropy else {}
        report.row(row | measure(coded, arguments.rounds), num_wrong=coded.count_wrong())
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
