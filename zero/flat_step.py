"""One step of a flat float32 array by the native kernels: ``cpp/include/zcomm/optimizer_step.h`` has the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from zcomm import kernels
from zcomm.philox import Draw

__all__ = ["Arrays", "Factors", "Rule", "step_"]

DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOMENT_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}


class Rule(IntEnum):
    """How a step moves a parameter."""

    ADAM = 0
    ADAMW = 1
    ADAGRAD = 2
    LION = 3
    TRAFFIC = 4
    """Adam's memory traffic with next to no arithmetic: a bound for benchmarks."""


@dataclass(frozen=True)
class Factors:
    """The numbers of one step, rounded to float32 when used; which rule uses which is in the header."""

    rate: float
    grad_factor: float = 1.0
    """Multiplies the gradient first: the inverse loss scale, the clipping coefficient, -1 to maximize."""
    weight_decay: float = 0.0
    """Added to the gradient, times the parameter."""
    keep: float = 1.0
    """Multiplies the parameter first: 1 - learning rate x weight decay."""
    beta1: float = 0.0
    mix1: float = 0.0
    beta2: float = 0.0
    mix2: float = 0.0
    eps: float = 0.0
    inverse_root: float = 1.0


@dataclass(frozen=True)
class Arrays:
    """What a step reads and writes: CPU tensors, contiguous, for equally many elements."""

    param: Tensor
    """float32; written."""
    grad: Tensor
    """float32, bfloat16 or float16."""
    moment1: Tensor | None = None
    """float32, bfloat16, or records of :class:`zero.moments.Blocks` in uint8; written."""
    moment2: Tensor | None = None
    """As ``moment1``; written."""
    largest: Tensor | None = None
    """float32, amsgrad's; written."""
    out: Tensor | None = None
    """float32, bfloat16 or float16: where the new parameter goes, too, rounded to nearest even."""


def step_(rule: Rule, factors: Factors, arrays: Arrays, draw: Draw | None = None) -> None:
    """Move ``arrays`` by one step, on torch's number of threads, without the GIL.

    The same bits for every number of threads and instruction set. Moments that are not float32 are rounded
    stochastically by ``draw``, and ``moment2`` under the next tensor number.

    Raises:
        BackendUnavailableError: The native kernels are not built.
    """
    f = factors
    numbers = (f.grad_factor, f.weight_decay, f.keep, f.rate, f.beta1, f.mix1, f.beta2, f.mix2, f.eps, f.inverse_root)
    moment_dtype = torch.float32 if arrays.moment1 is None else arrays.moment1.dtype
    out_dtype = torch.float32 if arrays.out is None else arrays.out.dtype
    kernels.native().optimizer_step(
        rule, numbers, arrays.param.numel(), arrays.param.data_ptr(),
        (arrays.grad.data_ptr(), DTYPE_NUMBERS[arrays.grad.dtype]), _address(arrays.moment1), _address(arrays.moment2),
        MOMENT_NUMBERS[moment_dtype], _address(arrays.largest), (_address(arrays.out), DTYPE_NUMBERS[out_dtype]),
        None if draw is None else (draw.seed, draw.tensor, draw.step, draw.hop, draw.rank, draw.first),
        torch.get_num_threads(),
    )  # fmt: skip
    for written in (arrays.param, arrays.moment1, arrays.moment2, arrays.largest, arrays.out):
        if written is not None:
            torch.autograd.graph.increment_version(written)


def _address(array: Tensor | None) -> int:
    return 0 if array is None else array.data_ptr()
