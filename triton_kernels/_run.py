"""Launch a kernel with its tile, warps and grid; large launches on a GPU are tuned once.

The bits do not depend on any of this, so ranks may choose differently. Tuning results are stored in files (_kept.py):
only the first process on a type of GPU measures, for example ``zcomm probe``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from ._kept import Choice, TunedChoices
from .arithmetic import INTERPRETED

TUNED_NUMEL = 1 << 20
"""Elements from which a launch takes longer than its overhead, and is worth tuning."""
CANDIDATES: tuple[Choice, ...] = ((1024, 4), (2048, 4), (4096, 4), (8192, 4))
"""Elements and warps per program: 8 to 64 elements per thread."""
LARGEST_TILE = 1 << 16


def columns(block: int) -> int:
    """The width of a tile whose rows are blocks: the next power of two."""
    return 1 << (block - 1).bit_length()


def run(
    kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], *, num_units: int, numel: int, block: int,
    written: tuple[str, ...] = (), widest: int = 0,
) -> None:  # fmt: skip
    """Launch ``kernel`` for ``num_units`` segments of ``numel`` elements in blocks of ``block``.

    ``written`` names the pointers whose memory the kernel both reads and writes: tuning runs the kernel many times, and
    must restore it. A tile has at least ``widest`` elements.
    """
    if num_units == 0:
        return
    cols = columns(block)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        elements = block * max(1, meta["TILE"] // cols)
        return (num_units * max(1, -(-numel // elements)),)

    device = next(argument for argument in arguments if isinstance(argument, Tensor)).device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        _launch(kernel, grid, arguments, constants, max(cols, widest), num_units * numel, written)
    else:
        with torch.cuda.device(device):
            _launch(kernel, grid, arguments, constants, max(cols, widest), num_units * numel, written)


def _launch(
    kernel: Any, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any], cols: int, numel: int,
    written: tuple[str, ...],
) -> None:  # fmt: skip
    if _is_tuned(cols, numel):
        choice = _tuned_choice(kernel, grid, arguments, constants, written)
    else:
        choice = _default(cols, numel)
    if choice is not None:
        tile, warps = choice
        kernel[grid](*arguments, **constants, TILE=tile, num_warps=warps, enable_fp_fusion=False)


def _is_tuned(cols: int, numel: int) -> bool:
    return not INTERPRETED.value and numel >= TUNED_NUMEL and cols <= CANDIDATES[0][0]


def _tuned_choice(
    kernel: Any, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any], written: tuple[str, ...]
) -> Choice | None:
    """The fastest choice; None if it was measured just now, which also did the launch's work."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    launch = (kernel, *constants.items(), *[tensor.dtype for tensor in tensors], tensors[0].device)
    choice = _kept().recall(launch)
    if choice is not None:
        return choice
    description = _description(kernel, constants, tensors)
    choice = _kept().load(launch, description)
    if choice is not None:
        return choice
    if _is_capturing():  # measuring synchronizes with the device, which would invalidate the capture
        return _default(0, 0)
    tuned = _tuned(kernel, tuple(constants), written)
    tuned[grid](*arguments, **constants, enable_fp_fusion=False)
    found = tuned.best_config
    _kept().keep(launch, description, (found.kwargs["TILE"], found.num_warps))
    return None


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _description(kernel: Any, constants: dict[str, Any], tensors: list[Tensor]) -> str:
    """Everything that the fastest choice depends on, except the number of elements."""
    device = tensors[0].device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    dtypes = [str(tensor.dtype) for tensor in tensors]
    return repr((gpu, triton.__version__, kernel.cache_key, candidates_of(kernel), sorted(constants.items()), dtypes))


def _default(cols: int, numel: int) -> Choice:
    """The choice without tuning."""
    if INTERPRETED.value:  # the interpreter's cost is per operation, not per element
        return max(cols, min(LARGEST_TILE, columns(max(numel, 2)))), 4
    return max(cols, 2048), max(4, min(32, cols // 512))


def candidates_of(kernel: Any) -> tuple[Choice, ...]:
    """The choices to measure; kernels that sum messages would spill registers with 64 elements per thread."""
    return CANDIDATES[:-1] if "num_messages" in kernel.arg_names else CANDIDATES


def tuner_of(kernel: Any, key: tuple[str, ...], written: tuple[str, ...]) -> Any:
    """``kernel`` with autotuning, once for each value of its arguments ``key`` and each dtype."""
    configs = [triton.Config({"TILE": tile}, num_warps=warps) for tile, warps in candidates_of(kernel)]
    return triton.autotune(configs, key=list(key), restore_value=list(written))(kernel)


_tuned = cache(tuner_of)


@cache
def _kept() -> TunedChoices:
    return TunedChoices(CANDIDATES)
