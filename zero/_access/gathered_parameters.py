"""``zero.GatheredParameters``: full parameters inside a block, to read or change them; and external parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from torch import nn

from zcomm import StateError, Topology, TopologyError
from zero._ranks.collective_calls import calling_over, on_exit
from zero._ranks.rank_errors import is_agreed, on_every_rank, raise_on_every_rank
from zero._runtime.runtime import Runtime
from zero._sharding.bucket import Bucket, ShardInfo, is_managed, num_writes
from zero._sharding.units import EXTERNAL, external_parameters

BLOCK_END = "has reached the end of zero.GatheredParameters"
"""How errors describe a rank that has left the block."""


class ShardOwner(Protocol):
    """What holds the shards: zero._runtime.runtime.Runtime or zero._model.init_shards.BuiltParameters."""

    topology: Topology
    is_closed: bool

    def compare(self, call: str, detail: str = "", /) -> None:
        """Raise on every rank unless all make the same ``call``, where ranks may be in different exchanges."""

    def gathered(self, buckets: list[Bucket], /) -> AbstractContextManager[None]:
        """Hold ``buckets`` full."""

    def modified(self, slots: Mapping[Bucket, Collection[int]], rank: int, /) -> AbstractContextManager[None]:
        """Broadcast what ``rank`` changes inside, and update shards and masters."""


@contextmanager
def GatheredParameters(  # noqa: N802  (DeepSpeed's name)
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,  # noqa: FBT001  (DeepSpeed's signature)
) -> Iterator[None]:
    """Gather ``params`` for the block. Collective; every rank must pass the same parameters.

    What autograd records inside may run backward later: the parameters are gathered again for it. At stage 3 a view
    that outlives the block keeps its values until the parameter changes; using it after that is a StateError.

    Args:
        params: One parameter or several, of one or more models. Those that are not sharded are always full.
        modifier_rank: None: nothing may be changed inside. A rank: what it changes in ``params`` is broadcast when the
            block ends, to the parameters and float32 masters of every rank. Masters of unchanged elements stay.
        fwd_module: A module whose forward uses ``params``, too: see :func:`register_external_parameter`.
        enabled: False: do nothing.

    Raises:
        TopologyError: ``modifier_rank`` is not a rank. Raised before any communication.
        StateError: ``params`` were changed without a ``modifier_rank`` (changes through ``param.data`` are not
            detected: at stage 3 they are lost); or the block raised on another rank. Raised on every rank.

    Cost for each rank: one all-gather of every bucket that holds one of ``params``, and 512 bytes to every other rank.
    With ``modifier_rank`` also one broadcast of each such bucket, and memory for this rank's part of it.
    """
    if not enabled:
        yield
        return
    given = [params] if isinstance(params, nn.Parameter) else list(params)
    by_owner: dict[Any, dict[Bucket, list[int]]] = {}
    for param in given:
        if fwd_module is not None:
            register_external_parameter(fwd_module, param)
        info: ShardInfo | None = getattr(param, "zero_shard", None)
        if info is not None:
            by_owner.setdefault(info.owner, {}).setdefault(info.bucket, []).append(info.slot)
    with ExitStack() as stack:
        name = f"zero.GatheredParameters(modifier_rank={modifier_rank})"
        for owner, unordered in by_owner.items():
            _check_owner(owner, modifier_rank)
            has_all = on_exit(stack, owner.topology, name)
            with calling_over(owner.topology, name):
                if modifier_rank is not None and isinstance(owner, Runtime):
                    owner.finish_update(writes_back=True)
                # The same order of gathers on every rank, else deadlock.
                slots = dict(sorted(unordered.items(), key=lambda item: item[0].index))
                stack.enter_context(owner.gathered(list(slots)))
                if modifier_rank is not None:
                    stack.enter_context(owner.modified(slots, modifier_rank))
                stack.enter_context(_agreed_block(owner, [] if modifier_rank is not None else _named_params(slots)))
                if isinstance(owner, Runtime):
                    stack.enter_context(owner.hooks.saving())
            has_all()
        yield


def _named_params(slots: Mapping[Bucket, Iterable[int]]) -> list[tuple[str, nn.Parameter]]:
    return [(bucket.layout.slots[i].name, bucket.params[i]) for bucket, chosen in slots.items() for i in chosen]


def _check_owner(owner: ShardOwner, modifier_rank: int | None) -> None:
    if owner.is_closed:
        raise StateError(
            "the ZeroOptimizer of these parameters is closed: close it inside "
            "zero.GatheredParameters(model.parameters()) to keep them"
        )
    world_size = owner.topology.world_size
    if modifier_rank is not None and not 0 <= modifier_rank < world_size:
        raise TopologyError(f"modifier_rank must be a rank: modifier_rank={modifier_rank}, world_size={world_size}")


@contextmanager
def _agreed_block(owner: ShardOwner, read_only: list[tuple[str, nn.Parameter]]) -> Iterator[None]:
    """End the block with the same error, or none, on every rank; raise if ``read_only`` parameters were changed."""
    writes = [num_writes(param) for _, param in read_only]
    try:
        yield
    except Exception as error:
        if owner.is_closed or is_agreed(error):
            raise
        # The other ranks are at the end of the block, or in another collective. Without these exchanges they would
        # deadlock with this rank's next collective.
        owner.compare(BLOCK_END, f"has raised {type(error).__name__} inside zero.GatheredParameters: {error}")
        raise_on_every_rank(error, owner.topology)
    if not owner.is_closed:
        owner.compare(BLOCK_END)
        try:
            on_every_rank(lambda: _check_same(read_only, writes), owner.topology)
        finally:
            if isinstance(owner, Runtime):
                owner.forget_writes(param for _, param in read_only)


def _check_same(read_only: list[tuple[str, nn.Parameter]], writes: list[int]) -> None:
    changed = [name for (name, param), old in zip(read_only, writes, strict=True) if num_writes(param) != old]
    if changed:
        raise StateError(
            f"in-place modification of {len(changed)} parameters inside zero.GatheredParameters, first {changed[:3]}: "
            "pass modifier_rank=, the rank whose changes all ranks get"
        )


def register_external_parameter(module: nn.Module, param: nn.Parameter) -> None:
    """Declare that ``module.forward`` uses ``param``, which another module owns, so that it is gathered for it, too.

    It may be called at any time, also in the constructor of ``module``. Without it the first use in a forward gathers
    ``param`` then, and declares it for the innermost running module with parameters.
    """
    if all(param is not known for known in external_parameters(module)):
        module.__dict__[EXTERNAL] = [*external_parameters(module), param]
    info: ShardInfo | None = getattr(param, "zero_shard", None)
    if info is not None and isinstance(info.owner, Runtime):
        info.owner.hooks.declare_use(module, info.bucket)


def unregister_external_parameter(module: nn.Module, param: nn.Parameter) -> None:
    """Undo :func:`register_external_parameter`; an existing ZeroOptimizer goes on gathering ``param``.

    Raises:
        StateError: ``param`` was not registered.
    """
    left = [known for known in external_parameters(module) if known is not param]
    if len(left) == len(external_parameters(module)):
        raise StateError(f"the parameter is not registered as an external parameter of this {type(module).__name__}")
    module.__dict__[EXTERNAL] = left


@contextmanager
def gathered_for_generation(model: nn.Module) -> Iterator[None]:
    """Gather all parameters of ``model`` for the block, so that forwards without gradients do not communicate.

    Inside, ranks may generate sequences of different lengths. Entering is collective.

    Args:
        model: A model whose parameters a ZeroOptimizer manages, or a part of one; at any stage.

    Raises:
        StateError: The model was built in :class:`zero.Init`, and has no ZeroOptimizer yet.

    Cost for each rank: one all-gather of every bucket, and the memory of the full model until the block ends.
    """
    owners = dict.fromkeys(p.zero_shard.owner for p in model.parameters() if is_managed(p))  # type: ignore[attr-defined]
    if not all(isinstance(owner, Runtime) for owner in owners):
        raise StateError("the model must have an optimizer: construct the ZeroOptimizer before generating")
    with GatheredParameters(model.parameters()), ExitStack() as stack:
        for owner in owners:
            stack.enter_context(owner.hooks.ignoring_inference())
        yield
