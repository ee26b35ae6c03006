"""Measure the errors of weights and gradients that a configuration's communication causes.

    weights     parameters as the forward reads them, compared with the float32 masters
    gradients   the averaged gradient before clipping, compared with that of a copy of the model with the weights that
                the forward read, on the same micro-batches, summed and averaged over the ranks in float32

Both are |difference| / |exact| over all parameters together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import zcomm
from side_by_side.engines import Engine
from zcomm import Topology

__all__ = ["exact_gradients", "gradient_error", "read_by_forward", "rounded_masters", "weight_errors"]

Batch = tuple[Tensor, Tensor]


@contextmanager
def read_by_forward(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Copy the parameters, by name, as the first forward inside the block reads them."""
    names = {param: name for name, param in model.named_parameters()}
    seen: dict[str, Tensor] = {}

    def copy_params(module: nn.Module, _: object) -> None:
        for param in module.parameters(recurse=False):
            if names[param] not in seen:
                seen[names[param]] = param.detach().clone()

    handles = [module.register_forward_pre_hook(copy_params) for module in model.modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def weight_errors(engine: Engine, seen: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the error of the weights ``seen``, and of the masters rounded to the same dtype (``rounding``)."""
    masters = {name: engine.master(param) for name, param in engine.model.named_parameters()}
    rounded = {name: master.to(seen[name].dtype) for name, master in masters.items()}
    return {"weights": _relative(seen, masters), "rounding": _relative(rounded, masters)}


def rounded_masters(engine: Engine) -> Tensor:
    """Return all masters, flat, rounded to the parameters' dtype. Collective."""
    return torch.cat([engine.master(param).flatten().to(param.dtype) for param in engine.model.parameters()])


def exact_gradients(
    copy: nn.Module, seen: Mapping[str, Tensor], batches: Sequence[Batch], topology: Topology
) -> dict[str, Tensor]:
    """Return the gradients of the mean loss over all ranks' ``batches``, of ``copy`` with the weights ``seen``."""
    params = dict(copy.named_parameters())
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(seen[name])
    sums = {name: torch.zeros_like(param, dtype=torch.float32) for name, param in params.items()}
    for tokens, targets in batches:
        (copy(tokens, targets) / len(batches)).backward()
        for name, param in params.items():
            assert param.grad is not None, f"{name} has no gradient"
            sums[name] += param.grad
            param.grad = None
    flat = torch.cat([total.reshape(-1) for total in sums.values()])
    zcomm.all_reduce(flat, "avg", group=topology)
    parts = flat.split([total.numel() for total in sums.values()])
    return {name: part.view_as(sums[name]) for name, part in zip(sums, parts, strict=True)}


def gradient_error(engine: Engine, exact: Mapping[str, Tensor]) -> float:
    """Return the relative error of the engine's averaged gradient. Collective."""
    got = {name: engine.gradient(param) for name, param in engine.model.named_parameters()}
    return _relative({name: grad for name, grad in got.items() if grad is not None}, exact)


def _relative(values: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the relative error over all tensors; missing ``values`` count as zero."""
    error = torch.zeros((), dtype=torch.float64)
    norm = torch.zeros((), dtype=torch.float64)
    for name, x in exact.items():
        difference = values[name].double() - x.double() if name in values else x.double()
        error += difference.square().sum().cpu()
        norm += x.double().square().sum().cpu()
    return float((error / norm).sqrt())
