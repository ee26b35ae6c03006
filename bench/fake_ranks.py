"""Run one rank of a job without the others, on torch's fake process group and with tensors on ``meta``.

    with fake_ranks(16384, ranks_per_node=8) as topology:
        optimizer = ZeroOptimizer(model_on_meta, torch.optim.AdamW, topology=topology, stage=3)

The code of zero and zcomm runs unchanged, as rank 0, except for exchanges (the fake process group completes them at
once, as if every rank sent this rank's data), the arithmetic of kernels, and the checks that refuse ``meta``. Code that
compares addresses gets a unique one for each tensor on ``meta``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import Tensor, nn
from torch.distributed import HashStore

from zcomm import Topology
from zcomm._kernels import kernels
from zcomm._transport import route
from zero._model import model_layout
from zero._runtime import validate

__all__ = ["compute_nothing", "fake_ranks", "num_exchanges"]

KERNELS = ("quantize", "decode", "decode_sum", "decode_sum_requantize", "quantize_difference", "decode_add")
ADDRESS_BITS = 48
"""Bits of the address inside a storage; the bits above number the storages."""

_real_address, _real_storage_address = Tensor.data_ptr, torch.UntypedStorage.data_ptr
_check_sendable, _check_model = route.check_sendable, model_layout.check_model


def _address(tensor: Tensor) -> int:
    if not tensor.is_meta:
        return _real_address(tensor)
    return _storage_address(tensor.untyped_storage()) + tensor.storage_offset() * tensor.element_size()


def _storage_address(storage: torch.UntypedStorage) -> int:
    return storage._cdata << ADDRESS_BITS if storage.device.type == "meta" else _real_storage_address(storage)


def _check_sendable_or_meta(name: str, tensor: object) -> Tensor:
    return tensor if isinstance(tensor, Tensor) and tensor.is_meta else _check_sendable(name, tensor)


def _check_model_or_meta(model: nn.Module) -> torch.device:
    """Return the device for the optimizer check, which compares results: the CPU if the model is on ``meta``."""
    is_meta = all(param.is_meta for param in model.parameters())
    return torch.device("cpu") if is_meta else _check_model(model)


def compute_nothing(*_: Any, **__: Any) -> None:
    """Stand in for a kernel."""


@contextmanager
def fake_ranks(world_size: int, ranks_per_node: int) -> Iterator[Topology]:
    """Run the body as rank 0 of ``world_size`` ranks; torch.distributed must not be initialized."""
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=world_size)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        stack.enter_context(patch.object(Tensor, "data_ptr", _address))
        stack.enter_context(patch.object(torch.UntypedStorage, "data_ptr", _storage_address))
        stack.enter_context(patch.object(route, "check_sendable", _check_sendable_or_meta))
        for module in (model_layout, validate):
            stack.enter_context(patch.object(module, "check_model", _check_model_or_meta))
        for name in KERNELS:
            stack.enter_context(patch.object(kernels, name, compute_nothing))
        topology = Topology(ranks_per_node=ranks_per_node)
        stack.callback(topology.close)
        yield topology


def num_exchanges(topology: Topology) -> int:
    """Count the exchanges that this rank has started over ``topology`` and its companions."""
    topologies = (topology, topology.companion, topology.companion.companion)
    hops = [hop for t in topologies for hop in (t.world, t.intra, t.inter, t.on_host)]
    return sum(log.num_started for log in {id(hop.log): hop.log for hop in hops}.values())
