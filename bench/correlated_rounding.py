"""Measure rounding that is correlated between the ranks of a reduction, in PyTorch, on synthetic and real data.

    python bench/correlated_rounding.py            Gaussian, Laplace, and gradients of train_gpt.py

The error of the mean over L ranks is the mean of their rounding errors. Three ways to round int4 codes in blocks of
128, all of the same bytes:

    nearest       the error is a function of the value: ranks with equal values have equal errors
    stochastic    up or down by a random number, independent on each rank
    correlated    the ranks share a random number u, and rank r takes u + r / L modulo 1: where the values are equal the
                  errors cancel in the sum ("Correlated Quantization for Distributed Mean Estimation", arXiv:2203.04925)

A fourth column is nearest with a residual: the error of the last hop, kept in int8 and added to the next step's values.
``one hop``: L ranks. ``two hops``: two nodes of L ranks, with int4 also between the nodes, rounded to nearest there.
``step`` is the relative error of the mean of one step, ``sum`` that of the sum of the means of all steps, which shows
how errors of a persistent direction add up in the weights. ``correlated+residual``: correlated inside the nodes, a
residual between them; ``int8+residual``: int8 to nearest inside the nodes, a residual between them. ``share`` is the
part of a rank's gradient that all ranks have in common.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from gpt_model import GPT, GPTConfig
from text_data import load_text, training_batch
from torch import Tensor
from torch.distributions import Laplace

from zcomm import get_format
from zcomm._bench.harness import BenchReport, Column
from zcomm._formats.blocks import decode_blocks, encode_blocks
from zcomm._formats.formats import CODECS

BLOCK = get_format("int4").block
RESIDUAL_BLOCK = get_format("int8").block
NUM_NODES = 2
COLUMNS = [
    Column("data", "data".rjust(20)),
    Column("ranks", "L", "d"),
    Column("share", "share", ".3f"),
    Column("hops", "hops", "d"),
    Column("nearest_step", "step: nearest", ".4f"),
    Column("stochastic_step", "stochastic", ".4f"),
    Column("correlated_step", "correlated", ".4f"),
    Column("nearest_sum", "sum: nearest", ".4f"),
    Column("stochastic_sum", "stochastic", ".4f"),
    Column("correlated_sum", "correlated", ".4f"),
    Column("residual_sum", "nearest+residual", ".4f"),
    Column("both_sum", "correlated+residual", ".4f"),
    Column("int8_sum", "int8+residual", ".4f"),
]
Encoded = Callable[[Sequence[Tensor]], Tensor]
"""Encode and decode the values of L ranks [n]; return the mean."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=2**15, help="elements of every gradient")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="L: ranks of a node")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.0, 0.5, 0.9, 0.999], help="shares of the synthetic data"
    )
    parser.add_argument("--train-iters", type=int, default=30, help="training steps before gradients are taken")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per step and rank, of the trained model")
    parser.add_argument("--data", type=Path, help="text for the model; default: the standard library's sources")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def synthetic(draw: Callable[[], Tensor], share: float, num_ranks: int, num_steps: int) -> list[list[Tensor]]:
    """Gradients by step and rank: a direction common to all steps and ranks, plus independent noise."""
    signal = draw()
    return [[share**0.5 * signal + (1 - share) ** 0.5 * draw() for _ in range(num_ranks)] for _ in range(num_steps)]


def of_trained_model(arguments: argparse.Namespace, num_ranks: int) -> list[list[Tensor]]:
    """Gradients of some of train_gpt.py's matrices by step and rank, on different sequences, at fixed weights."""
    torch.manual_seed(0)
    config = GPTConfig()
    text = load_text(arguments.data, max_bytes=2_000_000, seq_length=config.seq_length)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def backward(step: int, seed: int) -> None:
        optimizer.zero_grad()
        size = arguments.batch_size
        batch = training_batch(text, step=step, seed=seed, batch_size=size, seq_length=config.seq_length)
        model(*batch).backward()

    for step in range(arguments.train_iters):
        backward(step, seed=0)
        optimizer.step()
    block = model.blocks[1]
    matrices = [m.weight for m in (block.query_key_value, block.attention_output, block.mlp_input, block.mlp_output)]
    of_steps = []
    for step in range(arguments.steps):
        of_ranks = []
        for rank in range(num_ranks):
            backward(step, seed=1 + rank)
            part = arguments.numel // len(matrices)
            of_ranks.append(torch.cat([m.grad.flatten()[:part] for m in matrices if m.grad is not None]))
        of_steps.append(of_ranks)
    return of_steps


def rounded(x: Tensor, uniform: Tensor | None) -> Tensor:
    """``x`` rounded to int4 codes: to nearest, or up where ``uniform`` in [0, 1) is below the fraction, else down."""
    blocks, codec = x.view(-1, BLOCK), CODECS["int4"]
    headers, codes = encode_blocks(blocks, codec)
    if uniform is not None:
        scales = (headers << 16).view(torch.float32)
        scaled = torch.where(scales > 0, blocks / scales, 0.0)
        chosen = scaled.floor() + (uniform.view_as(scaled) < scaled - scaled.floor())
        codes = chosen.clamp(-codec.qmax, codec.qmax).to(torch.int8)
    return decode_blocks(headers, codes, codec).view(-1)


def mean_of(values: Sequence[Tensor]) -> Tensor:
    """The mean of tensors of one shape."""
    return torch.stack(list(values)).mean(0)


def nearest(of_ranks: Sequence[Tensor]) -> Tensor:
    """Every rank rounds to nearest."""
    return mean_of([rounded(x, None) for x in of_ranks])


def stochastic(of_ranks: Sequence[Tensor]) -> Tensor:
    """Every rank draws independent random numbers."""
    return mean_of([rounded(x, torch.rand_like(x)) for x in of_ranks])


def correlated(of_ranks: Sequence[Tensor]) -> Tensor:
    """The ranks share random numbers, shifted by r / L."""
    shared, num_ranks = torch.rand_like(of_ranks[0]), len(of_ranks)
    return mean_of([rounded(x, (shared + rank / num_ranks) % 1.0) for rank, x in enumerate(of_ranks)])


def in_8_bits(of_ranks: Sequence[Tensor]) -> Tensor:
    """Every rank rounds to nearest int8 codes, which take twice the bytes."""
    return mean_of([through_int8(x) for x in of_ranks])


def through_int8(x: Tensor) -> Tensor:
    """``x`` rounded to int8 codes."""
    headers, codes = encode_blocks(x.view(-1, RESIDUAL_BLOCK), CODECS["int8"])
    return decode_blocks(headers, codes, CODECS["int8"]).view(-1)


class WithResiduals:
    """Round to nearest on the last hop; each sender keeps the error in int8 and adds it to its next values."""

    def __init__(self, num_senders: int, numel: int) -> None:
        """Start with residuals of zero."""
        self._residuals = [torch.zeros(numel) for _ in range(num_senders)]

    def __call__(self, of_senders: Sequence[Tensor]) -> Tensor:
        """Return the mean of the rounded values."""
        sent = []
        for index, x in enumerate(of_senders):
            corrected = x + self._residuals[index]
            sent.append(rounded(corrected, None))
            self._residuals[index] = through_int8(corrected - sent[-1])
        return mean_of(sent)


def reduced(gradients: list[list[Tensor]], hop_1: Encoded, hop_2: Encoded | None) -> list[Tensor]:
    """The mean of every step; ``hop_2`` reduces the results of ``hop_1`` between nodes."""
    if hop_2 is None:
        return [hop_1(of_ranks) for of_ranks in gradients]
    per_node = len(gradients[0]) // NUM_NODES
    return [
        hop_2([hop_1(of_ranks[node * per_node : (node + 1) * per_node]) for node in range(NUM_NODES)])
        for of_ranks in gradients
    ]


def errors_of(means: list[Tensor], exact: list[Tensor]) -> tuple[float, float]:
    """Relative errors of the steps' means, and of their sum."""
    got, expected = torch.stack(means).double(), torch.stack(exact).double()
    step = (got - expected).norm() / expected.norm()
    total = (got.sum(0) - expected.sum(0)).norm() / expected.sum(0).norm()
    return float(step), float(total)


def share_of(gradients: list[list[Tensor]]) -> float:
    """The part of a rank's squared norm that two ranks of a step have in common, on average."""
    pairs = [(a[0].double(), a[1].double()) for a in gradients]
    return float(sum(a @ b for a, b in pairs) / sum((a @ a + b @ b) / 2 for a, b in pairs))


def measure(gradients: list[list[Tensor]], num_hops: int) -> dict[str, float]:
    """Measure the errors of every way to round."""
    exact, numel = [mean_of(of_ranks) for of_ranks in gradients], gradients[0][0].numel()
    last = None if num_hops == 1 else nearest
    found = {}
    for way in (nearest, stochastic, correlated):
        step, total = errors_of(reduced(gradients, way, last), exact)
        found |= {f"{way.__name__}_step": step, f"{way.__name__}_sum": total}
    if num_hops == 1:
        means = reduced(gradients, WithResiduals(len(gradients[0]), numel), None)
        return {**found, "residual_sum": errors_of(means, exact)[1], "both_sum": math.nan, "int8_sum": math.nan}
    for key, way in (("residual_sum", nearest), ("both_sum", correlated), ("int8_sum", in_8_bits)):
        found[key] = errors_of(reduced(gradients, way, WithResiduals(NUM_NODES, numel)), exact)[1]
    return found


def cases(arguments: argparse.Namespace, num_ranks: int) -> Iterator[tuple[str, list[list[Tensor]]]]:
    """Yield names and gradients of ``num_ranks`` ranks, by step and rank."""
    torch.manual_seed(0)
    draws: dict[str, Callable[[], Tensor]] = {
        "gauss": lambda: torch.randn(arguments.numel),
        "laplace": lambda: Laplace(0.0, 0.5**0.5).sample((arguments.numel,)),
    }
    for name, draw in draws.items():
        for share in arguments.shares:
            yield name, synthetic(draw, share, num_ranks, arguments.steps)
    yield "main job", of_trained_model(arguments, num_ranks)


def main() -> int:
    """Print the table."""
    arguments = parse_arguments()
    report = BenchReport(COLUMNS, as_json=arguments.json)
    report.start("correlated rounding", numel=arguments.numel, steps=arguments.steps, nodes=NUM_NODES)
    for ranks in arguments.ranks:
        for name, gradients in cases(arguments, NUM_NODES * ranks):
            facts = {"data": name, "ranks": ranks, "share": share_of(gradients)}
            report.row({**facts, "hops": 1, **measure([of_ranks[:ranks] for of_ranks in gradients], 1)}, num_wrong=0)
            report.row({**facts, "hops": 2, **measure(gradients, 2)}, num_wrong=0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
