"""How a kernel is launched: tile, warps, grid. Tuned once where there is a driver and enough to do.

Results do not depend on any of this: ranks may choose differently.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from .arithmetic import INTERPRETED

TUNED_NUMEL = 1 << 20
"""From here on a launch takes longer than its overhead, and is worth tuning."""
TILES, WARPS = (1024, 2048, 4096, 8192), (4, 8)
LARGEST_TILE = 1 << 16


def columns(block: int) -> int:
    """The width of a tile whose rows are blocks."""
    return 1 << (block - 1).bit_length()


def run(
    kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], *, num_units: int, numel: int, block: int,
    written: tuple[str, ...] = (), widest: int = 0,
) -> None:  # fmt: skip
    """Launch ``kernel`` for ``num_units`` segments of ``numel`` elements in blocks of ``block``.

    ``written`` names pointers to what the kernel reads and overwrites, which tuning must put back; a tile has at least
    ``widest`` elements.
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
        tuned = _tuned(kernel, tuple(constants), written)
        tuned[grid](*arguments, **constants, enable_fp_fusion=False)
    else:
        tile, warps = _default(cols, numel)
        kernel[grid](*arguments, **constants, TILE=tile, num_warps=warps, enable_fp_fusion=False)


def _is_tuned(cols: int, numel: int) -> bool:
    if INTERPRETED.value or numel < TUNED_NUMEL or cols > TILES[0]:
        return False
    return not torch.cuda.is_current_stream_capturing()  # measuring waits for the device


def _default(cols: int, numel: int) -> tuple[int, int]:
    """Elements and warps of a program."""
    if INTERPRETED.value:  # a program's cost is per operation, not per element
        return max(cols, min(LARGEST_TILE, columns(max(numel, 2)))), 4
    return max(cols, 2048), max(4, min(32, cols // 512))


def tuner_of(kernel: Any, key: tuple[str, ...], written: tuple[str, ...]) -> Any:
    """``kernel``, tuned once for each value of its arguments ``key`` and each dtype."""
    configs = [triton.Config({"TILE": tile}, num_warps=warps) for tile in TILES for warps in WARPS]
    return triton.autotune(configs, key=list(key), restore_value=list(written))(kernel)


_tuned = cache(tuner_of)
