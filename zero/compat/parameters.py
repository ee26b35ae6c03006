"""DeepSpeed's attributes ``ds_*`` of parameters at stage 3, computed from what this library knows of them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from zero import Engine, GatheredParameters
from zero._access import safe_access
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.runtime import Runtime
from zero._sharding.bucket import BucketState, ShardInfo, is_managed

logger = logging.getLogger("zero")
_NUMBERS = itertools.count()
_ENGINE = "engine_of_the_door"
"""An attribute of what an engine trains with: the engine."""
_orig_torch_arange = torch.arange
partitioned_param_data_shape = [0]
"""The shape of DeepSpeed's released parameters; here they keep theirs: see ``ds_status``."""


class ZeroParamStatus(Enum):
    """Whether the values of a parameter are on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """What a parameter is to stage 3."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


_STATUS = {BucketState.SHARDED: ZeroParamStatus.NOT_AVAILABLE, BucketState.GATHERING: ZeroParamStatus.INFLIGHT}


def is_zero_param(parameter: Any) -> bool:
    """Whether ``parameter`` is sharded at stage 3, or built under zero.Init."""
    return isinstance(parameter, Tensor) and hasattr(parameter, "ds_id")


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Tensor], *_: Any, **__: Any) -> Callable[..., Tensor]:
    """``fn``: zero.Init here converts parameters when a module is complete, and leaves torch's constructors alone."""
    return fn


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """:func:`zero.utils.safe_get_full_fp32_param`; None for frozen parameters, as DeepSpeed's. Collective."""
    return safe_access.safe_get_full_fp32_param(param) if param.requires_grad else None


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """:func:`zero.utils.safe_get_local_fp32_param`; None for frozen parameters, as DeepSpeed's."""
    return safe_access.safe_get_local_fp32_param(param) if param.requires_grad else None


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the gradient of each parameter that has one by ``update_func(gradient, parameter)``. Collective."""
    for param in param_list:
        grad = safe_access.safe_get_full_grad(param)
        if grad is not None:
            safe_access.safe_set_full_grad(param, update_func(grad, param))


def end_engines(model: Any, check: Callable[[], None]) -> None:
    """Destroy the engines that hold parameters of ``model``, which stay full and keep their values. Collective.

    DeepSpeed's scripts may initialize a model again: an engine from before cannot train on. If ``check()`` raises on
    any rank, all raise, and the engines stay.
    """
    params = list(model.parameters()) if isinstance(model, nn.Module) else []
    owners = dict.fromkeys(param.zero_shard.owner for param in params if is_managed(param))  # type: ignore[attr-defined]
    for owner in owners:
        if (engine := getattr(owner, _ENGINE, None)) is not None:
            on_every_rank(check, owner.topology)
            if owner.is_log_rank:
                logger.warning("zero.compat: the model is initialized again: the engine that it had is destroyed")
            with GatheredParameters(owner.model.parameters()):
                engine.destroy()


def hold_engine(engine: Engine) -> None:
    """Until :func:`drop_engine`, or until the model is freed: whether a script still refers to it differs by rank."""
    vars(engine.optimizer.parts.runtime)[_ENGINE] = engine


def drop_engine(engine: Engine) -> None:
    """After it is destroyed."""
    vars(engine.optimizer.parts.runtime).pop(_ENGINE, None)


def _info(param: nn.Parameter) -> ShardInfo:
    info: ShardInfo | None = getattr(param, "zero_shard", None)
    if info is None or (isinstance(info.owner, Runtime) and not info.owner.stage.shards_parameters):
        raise AttributeError("a parameter that is not sharded has no attributes ds_*")
    return info


def _number(param: nn.Parameter) -> int:
    _info(param)
    if "_zero_compat_number" not in param.__dict__:
        param._zero_compat_number = next(_NUMBERS)  # type: ignore[attr-defined]
    number: int = param._zero_compat_number  # type: ignore[attr-defined]
    return number


def _status(param: nn.Parameter) -> ZeroParamStatus:
    return _STATUS.get(_info(param).bucket.state, ZeroParamStatus.AVAILABLE)


def _own_values(param: nn.Parameter) -> Tensor:
    """This rank's part, flat and in the parameter's dtype; its ``ds_numel`` is its number of elements."""
    info = _info(param)
    pieces = info.bucket.layout.pieces(info.bucket.row)
    own = next((piece for piece in pieces if piece.slot == info.slot), None)
    values = info.bucket.storage.read()
    values = values[own.start : own.stop] if own is not None else values[:0]
    values.ds_numel = values.numel()  # type: ignore[attr-defined]
    return values


_ATTRIBUTES: dict[str, Callable[[nn.Parameter], Any]] = {
    "ds_id": _number,
    "ds_status": _status,
    "ds_shape": lambda param: _info(param).shape,
    "ds_numel": lambda param: _info(param).shape.numel(),
    "ds_persist": lambda param: _info(param).bucket.is_persistent,
    "ds_tensor": _own_values,
}


def add_attributes() -> None:
    """Give torch's Parameter the attributes, in this process. A parameter that is not sharded has none of them."""
    for name, compute in _ATTRIBUTES.items():
        setattr(nn.Parameter, name, property(compute))
