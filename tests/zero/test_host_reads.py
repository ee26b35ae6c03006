"""No step makes the host read values that a GPU computes, except the one number by which fp16 skips a step.

Here everything is on the CPU: a wait would show as a read of a floating-point or bool value, or as an operation whose
result has a size that depends on values. Integers in the ranks' agreements are in host memory on a GPU, too.
"""

# covers zero/optimizer.py

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import run_ranks, topology
from zero import ZeroOptimizer

WARM_UP, NUM_STEPS = 3, 2
aten = torch.ops.aten
READS = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten.unique_dim, aten._unique2}
MASKED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
COPIES = ("tolist", "numpy", "cpu", "__array__")


def _is_of_a_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.dtype == torch.bool)


class HostReads(TorchDispatchMode):
    """The lines of this repository that led to a read of a value by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_read = func.overloadpacket in READS and any(map(_is_of_a_gpu, args))
        if func.overloadpacket in MASKED:
            is_read = any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])
        if is_read:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        frames = traceback.extract_stack()
        ours = [f for f in frames if "/zero/" in f.filename or "/zcomm/" in f.filename]
        self.places.append(" < ".join(f"{f.name}:{f.lineno}" for f in reversed(ours[-4:])) or frames[-3].name)


@contextmanager
def host_reads() -> Iterator[HostReads]:
    with pytest.MonkeyPatch.context() as patch, HostReads() as reads:
        for name in COPIES:
            original = getattr(Tensor, name)

            def copied(self: Tensor, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if _is_of_a_gpu(self):
                    reads.note()
                return _original(self, *args, **kwargs)

            patch.setattr(Tensor, name, copied)
        original_to = Tensor.to

        def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            waits = not kwargs.get("non_blocking", False)
            if waits and _is_of_a_gpu(self) and any(str(v) == "cpu" for v in (*args, kwargs.get("device"))):
                reads.note()
            return original_to(self, *args, **kwargs)

        patch.setattr(Tensor, "to", to)
        yield reads


def _count(rank: int, stage: int, *, clips: bool, is_fp16: bool, is_quantized: bool) -> list[str]:
    torch.manual_seed(0)
    dtype = torch.float16 if is_fp16 else torch.bfloat16
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(dtype)
    options: dict[str, Any] = {"zero_quantized_weights": is_quantized, "zero_quantized_gradients": is_quantized}
    if clips:
        options["gradient_clipping"] = 1e-3
    if is_fp16:
        options["fp16"] = {"enabled": True, "initial_scale_power": 8}
    ranks = topology(dist.get_world_size())
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-3, fused=True, stage=stage, topology=ranks, **options)
    x = torch.randn(4, 64, dtype=dtype, generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        optimizer.scale(model(x).square().mean()).backward()
        if clips and stage % 2:  # both a user's clipping and the configuration's
            optimizer.clip_grad_norm_(1e-4)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    with host_reads() as reads:
        for _ in range(NUM_STEPS):
            step()
        steady = list(reads.places)
        if clips:
            before = len(reads.places)
            norm = optimizer.last_grad_norm
            assert norm is not None
            assert norm > 0
            assert len(reads.places) == before + 1, "the counter misses a read"
    assert optimizer.was_step_applied
    optimizer.close()
    return steady


def _check_counts(rank: int) -> None:
    for stage in (0, 1, 2, 3):
        for clips in (False, True):
            for is_fp16 in (False, True):
                is_quantized = stage > 0 and clips
                found = _count(rank, stage, clips=clips, is_fp16=is_fp16, is_quantized=is_quantized)
                expected = NUM_STEPS * is_fp16
                case = f"stage {stage}, clips={clips}, is_fp16={is_fp16}"
                assert len(found) == expected, f"{case}: {len(found)} reads, expected {expected}: {found}"
                assert all("has_overflow" in place for place in found), found


def test_a_step_reads_nothing_but_the_overflow_of_fp16() -> None:
    run_ranks(2, _check_counts)


@pytest.mark.parametrize(
    "read",
    [lambda x: x.sum().item(), lambda x: bool((x > 0).any()), lambda x: x.tolist(), lambda x: x.cpu(),
     lambda x: x.to("cpu", torch.float64), lambda x: x.to(device=torch.device("cpu")), lambda x: x[x > 0],
     lambda x: torch.equal(x, x), lambda x: x.numpy(), lambda x: x.bool().nonzero(), lambda x: float(x[0])],
)  # fmt: skip
def test_a_read_is_counted(read: Any) -> None:
    with host_reads() as reads:
        torch.ones(3) + torch.ones(3)
        assert not reads.places
        read(torch.ones(3))
    assert reads.places
