"""Checks an installed wheel on two ranks, without a compiler: run by ``tools/wheel.py``.

With ZCOMM_KERNELS=triton the collective alone: Triton's interpreter is slow.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zcomm
import zero
from zcomm._base import env
from zcomm._kernels import kernels
from zcomm._transport.backend_choice import nccl_unavailable_reason


def tell(text: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def check_install() -> None:
    """Check that the package is the installed one, its module is native, and no compiler is found."""
    found = [name for name in ("gcc", "g++", "cc", "c++", "clang", "cmake", "nvcc") if shutil.which(name)]
    assert not found, f"compilers in reach: {found}"
    assert "site-packages" in Path(zcomm.__file__).parts, zcomm.__file__
    assert not kernels.native_unavailable_reason(), kernels.native_unavailable_reason()
    tell(f"no compiler on the PATH; native kernels: {kernels.native_description()}")
    tell(f"backend='nccl': {nccl_unavailable_reason().partition(chr(10))[0] or 'available'}")


def check_gather() -> None:
    """Check that both ranks get the same bits, close to what was sent."""
    topology = zcomm.Topology(ranks_per_node=1)
    full = torch.empty(2 * 4096)
    shards = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0))
    zcomm.all_gather_single(full, shards[dist.get_rank()], topology, format="int8")
    error = ((full.view(2, -1) - shards).norm() / shards.norm()).item()
    assert 0 < error < 0.01, error
    topology.close()
    digest = hashlib.blake2b(full.numpy().tobytes(), digest_size=8).hexdigest()
    digests: list[str] = [""] * 2
    dist.all_gather_object(digests, digest)
    assert len(set(digests)) == 1, digests
    tell(f"int8 all-gather on 2 ranks: relative error {error:.4f}, digest {digest}")


def check_training() -> None:
    """Check that the loss decreases."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(torch.bfloat16)
    optimizer = zero.ZeroOptimizer(
        model, zero.CPUAdam, stage=3, lr=1e-2, quantized_weights=True, quantized_gradients=True
    )
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    losses = []
    for _ in range(10):
        loss = (model(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.close()
    assert losses[-1] < losses[0], losses
    tell(f"ZeRO++ stage 3 with zero.CPUAdam on 2 ranks: loss {losses[0]:.3f} -> {losses[-1]:.3f} in 10 steps")


def main() -> int:
    """Run all checks and print a summary on the first rank."""
    dist.init_process_group("gloo")
    check_install()
    check_gather()
    if env.value("ZCOMM_KERNELS") != "triton":
        check_training()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
