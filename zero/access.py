"""Reading and changing sharded parameters, and declaring their use outside the module that owns them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from zcomm import StateError, TopologyError
from zero.bucket import Bucket, ShardInfo
from zero.runtime import Runtime

__all__ = ["GatheredParameters", "register_external_parameter"]


@contextmanager
def GatheredParameters(  # noqa: N802  (DeepSpeed's name)
    params: nn.Parameter | Iterable[nn.Parameter], *, modifier_rank: int | None = None
) -> Iterator[None]:
    """Hold ``params`` whole inside the block; collective, the same parameters on every rank.

    Args:
        params: One parameter or several, of one or more models. Those that no ZeroOptimizer manages are whole anyway.
        modifier_rank: None: nothing may be changed inside. A rank: what it changes in ``params`` is taken over by every
            rank, and by the float32 masters, when the block ends. Elements that it does not change keep their masters.

    Raises:
        TopologyError: ``modifier_rank`` is not a rank. Raised before any communication.

    Cost for each rank: one all-gather of every bucket that holds one of ``params``; if ``modifier_rank`` is given also
    one broadcast of it, and a copy of this rank's part of it inside the block.
    """
    by_owner: dict[Runtime, dict[Bucket, list[int]]] = {}
    for param in [params] if isinstance(params, nn.Parameter) else list(params):
        info: ShardInfo | None = getattr(param, "zero_shard", None)
        if info is not None:
            assert isinstance(info.owner, Runtime), "zero_shard without a runtime"
            by_owner.setdefault(info.owner, {}).setdefault(info.bucket, []).append(info.slot)
    with ExitStack() as stack:
        for owner, unordered in by_owner.items():
            if owner.is_closed:
                raise StateError(
                    "the ZeroOptimizer of these parameters is closed: close it inside "
                    "zero.GatheredParameters(model.parameters()) to keep them"
                )
            world_size = owner.topology.world_size
            if modifier_rank is not None and not 0 <= modifier_rank < world_size:
                raise TopologyError(
                    f"modifier_rank must be a rank: modifier_rank={modifier_rank}, world_size={world_size}"
                )
            slots = dict(sorted(unordered.items(), key=lambda item: item[0].index))  # the same order on every rank
            stack.enter_context(owner.gathered(list(slots)))
            if modifier_rank is not None:
                stack.enter_context(owner.modified(slots, modifier_rank))
        yield


def register_external_parameter(module: nn.Module, param: nn.Parameter) -> None:
    """Declare that ``module.forward`` uses ``param``, which another module owns: it is gathered for that forward too.

    Raises:
        StateError: ``param`` is not managed by a ZeroOptimizer (construct it first).
    """
    info: ShardInfo | None = getattr(param, "zero_shard", None)
    if info is None:
        raise StateError("register_external_parameter needs a parameter of a model that a ZeroOptimizer manages")
    assert isinstance(info.owner, Runtime), "zero_shard without a runtime"
    info.owner.hooks.declare_use(module, info.bucket)
