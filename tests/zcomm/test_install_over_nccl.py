"""install_ddp and install_fsdp2 over backend="nccl", emulated, in a job of NCCL alone: the bits of torch's groups."""

# covers zcomm/_transport/nccl_communicators.py

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import zcomm
from tests.nccl_job import nccl_alone
from tests.ranks import ranks_over, run_ranks
from tests.zcomm import fsdp2
from tests.zcomm.models import batch, flat_grad, mlp
from zcomm._transport import nccl_communicators

RECIPE = zcomm.Recipe(weights="int8", gradients=("int8", "int4:asym"), reduced="int8", residual=True, min_numel=256)


def _ddp_gradients(rank: int, **options: Any) -> list[Tensor]:
    """The gradients of two steps; the installation is removed afterwards."""
    ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.01)
    installed = zcomm.install_ddp(ddp, RECIPE, **options)
    made = []
    for step in range(2):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        made.append(flat_grad(ddp))
    assert f"backend {options['backend']}, kernels" in str(installed.report())
    installed.uninstall()
    return made


def _fsdp2_gradients(rank: int, **options: Any) -> list[Tensor]:
    model = fsdp2.sharded(mlp())
    installed = zcomm.install_fsdp2(model, RECIPE, **options)
    made = []
    for step in range(2):
        model.zero_grad()
        fsdp2.loss_of(model, rank, step).backward()
        made.append(fsdp2.full_grad(model))
    assert f"backend {options['backend']}, kernels" in str(installed.report())
    installed.uninstall()
    return made


def _check_installations(rank: int) -> None:
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    make = nccl_communicators._make

    class Native:
        def __init__(self, native: Any) -> None:
            self.native = native
            made.add(self)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.native, name)

    def counted(*arguments: Any) -> Any:
        one = make(*arguments)
        return one._replace(native=Native(one.native))

    for gradients in (_ddp_gradients, _fsdp2_gradients):
        expected = gradients(rank, backend="torch")
        with nccl_alone(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(nccl_communicators, "_make", counted)
            got = gradients(rank, backend="nccl")
            num_made = len(made)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), gradients
        gc.collect()
        assert not made, f"{num_made} communicators outlive {gradients}"


def test_installations_over_nccl_have_the_bits_of_torch() -> None:
    with ranks_over("nccl"):
        run_ranks(4, _check_installations)
