"""Measure the native CPU kernels, compared with a memory copy of the same bytes and with plain torch operations.

    python bench/kernels.py [--size-mib 64] [--threads N] [--codecs int8 int4] [--json] [--compile]

All rates are GB/s of bytes read plus bytes written, medians over rounds that interleave the contenders. ``torch`` is
the fastest form on full arrays, named under ``form``; ``chunked`` the same operations, cut by hand into chunks that
stay in the cache (see torch_forms.py). ``#wrong`` counts the bytes or elements in which the native result differs from
any of them, over the full array. Sums decode 4 messages. With stochastic rounding only the operations that round are
measured: torch's forms are checked with the wire format's random numbers, and timed with torch's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_forms import CODECS, CodecSpec, Forms, TorchForms

from zcomm import _native
from zcomm._bench.harness import BenchReport, Column, interleave
from zcomm._formats import formats
from zcomm._formats.message import MessageLayout
from zcomm._formats.philox import Draw
from zcomm._kernels import kernels

COLUMNS = [
    Column("op", "                   op"),
    Column("codec", "          codec"),
    Column("dtype", "   dtype"),
    Column("nbytes", "    bytes(B)"),
    Column("p50_us", "  p50(us)", ".1f", is_measurement=True),
    Column("p99_us", "  p99(us)", ".1f", is_measurement=True),
    Column("native_gbps", "native(GB/s)", ".2f", is_measurement=True),
    Column("copy_gbps", "copy(GB/s)", ".2f", is_measurement=True),
    Column("torch_gbps", "torch(GB/s)", ".2f", is_measurement=True),
    Column("form", "    form", is_measurement=True),
    Column("chunked_gbps", "chunked(GB/s)", ".2f", is_measurement=True),
    Column("over_copy", "/copy", ".2f", is_measurement=True),
    Column("over_torch", "/torch", ".1f", is_measurement=True),
    Column("over_chunked", "/chunked", ".1f", is_measurement=True),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_SUMMED = 4
NUMEL_MULTIPLE = 256  # torch's forms need full blocks
DRAW = Draw(seed=1)


@dataclass(frozen=True)
class Case:
    """One row: the native call, torch's forms of it, the bytes both move, and the count of differences."""

    op: str
    nbytes: int
    native: Callable[[], None]
    forms: dict[str, Callable[[], object]]
    count_wrong: Callable[[], int]
    draw: Callable[[Draw | None], None]
    """Set the random numbers of the forms."""


class Arrays:
    """The operands of one codec and dtype, [numel] elements a message."""

    def __init__(self, spec: CodecSpec, dtype: torch.dtype, numel: int) -> None:
        """Create random data, ``NUM_SUMMED`` messages of it, and buffers for the results."""
        generator = torch.Generator().manual_seed(0)
        self.spec, self.numel = spec, numel
        self.random = DRAW if spec.is_random else None
        codec = formats.CODECS[spec.name]
        self.layout = MessageLayout("bench", codec, spec.block, 1, numel, is_rotated=spec.is_rotated)
        self.nbytes = self.layout.nbytes
        self.x = torch.randn(numel, generator=generator).to(dtype)
        self.messages = self.layout.new(NUM_SUMMED, self.x.device)
        for message in self.messages:
            self.quantize(message)
        self.message = torch.zeros(self.nbytes, dtype=torch.uint8)
        self.out = torch.zeros(numel, dtype=dtype)

    def quantize(self, message: Tensor) -> None:
        """Encode ``x`` to ``message`` with the native kernel."""
        kernels.quantize(self.x, self.layout, message.view(1, -1), self.numel, self.numel, self.random)

    def decode(self) -> None:
        """Decode the first message to ``out`` with the native kernel."""
        kernels.decode(self.messages[:1], self.layout, self.out, self.numel, self.numel)

    def decode_sum(self) -> None:
        """Decode the mean of all messages to ``out`` with the native kernel."""
        kernels.decode_sum(self.messages, self.layout, self.out, self.numel, NUM_SUMMED)

    def decode_sum_requantize(self) -> None:
        """Encode the sum of all messages to ``message`` with the native kernel."""
        out = self.message.view(1, -1)
        kernels.decode_sum_requantize(self.messages, self.layout, out, self.layout, self.random)


def make_cases(arrays: Arrays, *, compiled: bool) -> Iterator[Case]:
    """Yield the four operations on one codec and dtype; the last only for float32, as it has only messages."""
    forms = TorchForms(arrays.spec, arrays.numel, arrays.out.dtype, compiled=compiled)
    x_nbytes = arrays.x.nbytes

    def differing_message() -> int:
        return forms.count_differing_bytes(arrays.message)

    def differing_elements() -> int:
        return int((arrays.out != forms.out.view(-1)).sum())

    def case(op: str, nbytes: int, native: Callable[[], None], of_torch: Forms, count_wrong: Callable[[], int]) -> Case:
        return Case(op, nbytes, native, of_torch, count_wrong, forms.draw if arrays.random else lambda _: None)

    once, summed = x_nbytes + arrays.nbytes, x_nbytes + NUM_SUMMED * arrays.nbytes
    quantized = forms.quantize(arrays.x)
    yield case("quantize", once, lambda: arrays.quantize(arrays.message), quantized, differing_message)
    if arrays.random is None:
        decoded, sums = forms.decode(arrays.messages[:1], divisor=1), forms.decode(arrays.messages, divisor=NUM_SUMMED)
        yield case("decode", once, arrays.decode, decoded, differing_elements)
        yield case("decode_sum", summed, arrays.decode_sum, sums, differing_elements)
    if arrays.out.dtype == torch.float32:
        requantized, nbytes = forms.requantize(arrays.messages), (NUM_SUMMED + 1) * arrays.nbytes
        yield case("decode_sum_requantize", nbytes, arrays.decode_sum_requantize, requantized, differing_message)


def run_case(case: Case, *, rounds: int) -> tuple[dict[str, object], int]:
    """Check every form against the native result, then time all forms and the copy interleaved."""
    case.native()
    num_wrong = 0
    case.draw(DRAW)
    for form in case.forms.values():
        form()
        num_wrong = max(num_wrong, case.count_wrong())
    case.draw(None)
    source = torch.zeros(case.nbytes // 2, dtype=torch.uint8)
    target = torch.zeros(case.nbytes // 2, dtype=torch.uint8)
    calls = {"native": case.native, "copy": lambda: target.copy_(source), **case.forms}
    times = interleave(calls, rounds=rounds)
    gbps = {name: case.nbytes / timing.p50 / 1e9 for name, timing in times.items()}
    best = max(set(case.forms) - {"chunked"}, key=lambda name: gbps[name])
    return {
        "op": case.op,
        "nbytes": case.nbytes,
        "p50_us": times["native"].p50 * 1e6,
        "p99_us": times["native"].p99 * 1e6,
        "native_gbps": gbps["native"],
        "copy_gbps": gbps["copy"],
        "torch_gbps": gbps[best],
        "form": best,
        "chunked_gbps": gbps["chunked"],
        "over_copy": gbps["native"] / gbps["copy"],
        "over_torch": gbps["native"] / gbps[best],
        "over_chunked": gbps["native"] / gbps["chunked"],
    }, num_wrong


def main() -> int:
    """Print all rows; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=float, default=64.0, help="float32 bytes of the array (default 64)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of every contender")
    parser.add_argument("--rounds", type=int, default=7, help="times each contender is timed (default 7)")
    parser.add_argument(
        "--codecs", nargs="+", choices=CODECS, default=list(CODECS), metavar="NAME", help="codecs to measure"
    )
    parser.add_argument("--compile", action="store_true", help="also measure torch.compile")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines")
    options = parser.parse_args()
    if options.threads < 1 or options.size_mib <= 0 or options.rounds < 1:
        parser.error("--threads, --size-mib and --rounds must be positive")
    torch.set_num_threads(options.threads)
    if kernels.native_unavailable_reason():
        parser.error(kernels.native_unavailable_reason())
    numel = int(options.size_mib * 2**20) // 4 // NUMEL_MULTIPLE * NUMEL_MULTIPLE
    if numel == 0:
        parser.error(f"--size-mib must give at least {NUMEL_MULTIPLE} elements")
    report = BenchReport(COLUMNS, as_json=options.json)
    report.start("kernels", isa=_native.isa(), threads=options.threads, numel=numel, rounds=options.rounds)
    for spec in (CODECS[name] for name in options.codecs):
        for dtype in DTYPES:
            arrays = Arrays(spec, dtype, numel)
            for case in make_cases(arrays, compiled=options.compile):
                values, num_wrong = run_case(case, rounds=options.rounds)
                report.row(
                    {**values, "codec": spec.label, "dtype": str(dtype).removeprefix("torch.")}, num_wrong=num_wrong
                )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
