"""The shards of parameters that :class:`zero.Init` has partitioned, before a ZeroOptimizer adopts them.

Every module's own parameters are a bucket, laid out without padding:

    built on every rank --rank 0's values--> shards --(used in a constructor)--> OPEN --(nobody holds it)--> shards
                                             shards --ZeroOptimizer--> its buckets

Before every exchange the ranks agree on what they will do. So an error on one rank is raised on all, and ranks that
build different models raise at the first module that differs, instead of a deadlock.

Invariants:
    C1  A parameter that is used while a model is built becomes full, and stays full until an exchange at which nothing
        else refers to its memory. Rank 0's values are broadcast then. So ``nn.init`` functions, ``module.apply`` and
        ``module.weight.data.normal_()`` in a parent's constructor work as without zero.Init.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from zcomm import ConfigError, StateError, Topology, all_gather_single, control
from zcomm._transport import backend
from zero._model.model_checks import check_memory
from zero._ranks.rank_errors import on_every_rank
from zero._sharding.bucket import Bucket, BucketState, Hold, ShardInfo, is_managed
from zero._sharding.buffer_pool import storage_of
from zero._sharding.layout import BucketLayout
from zero._sharding.released import make_released, nan_filled, running
from zero._sharding.units import by_kind
from zero._storage.parameter_storage import InitFiles


def construction_of(param: nn.Parameter) -> BuiltParameters | None:
    """The BuiltParameters that hold the shards of ``param``, or None: not built under zero.Init, or adopted already."""
    owner = getattr(getattr(param, "zero_shard", None), "owner", None)
    return owner if isinstance(owner, BuiltParameters) else None


def is_built(param: nn.Parameter) -> bool:
    """Whether zero.Init has partitioned ``param``, and no ZeroOptimizer has adopted it."""
    return construction_of(param) is not None


class ShapesOnly:
    """Entries of ``state_dict()`` for parameters of which this rank has a shard: names, shapes and dtypes, on meta.

    transformers' ``from_pretrained`` compares them with a checkpoint before it reads it.
    """

    def answer(self, param: nn.Parameter, name: str, args: Any) -> Tensor | None:  # noqa: ARG002
        """A tensor without memory where torch's state dict code takes the values of ``param``."""
        if name != "detach" or construction_of(param) is None or not running(nn.Module.state_dict):
            return None
        return torch.empty(param.shape, dtype=param.dtype, device="meta")


class BuiltParameters:
    """The parameters that were built within one ``zero.Init``.

    Args:
        topology: The ranks of the partition.
        device: The device of the shards.
        dtype: The dtype of floating-point parameters; None: they keep theirs.
        files: The files that store the shards, if any; ``device`` is the CPU then.
    """

    def __init__(
        self, topology: Topology, *, device: torch.device, dtype: torch.dtype | None, files: InitFiles | None = None
    ) -> None:
        self.topology, self.device, self.dtype, self._files = topology, device, dtype, files
        self.state_dicts = ShapesOnly()
        self.is_closed = False
        self.is_building = False
        """Whether constructors may be running, in which a parameter is gathered when it is used."""
        self._live = WeakIdKeyDictionary()
        """Partitioned parameters that are neither adopted nor garbage-collected."""
        self._open: dict[Bucket, int] = {}
        """Gathered buckets, and the number of references to their memory that this module holds."""
        is_alone = topology.world_size == 1
        self._exchange_device = device if is_alone else backend.device_of(topology.world.backend, device)

    def compare(self, call: str, detail: str = "") -> None:
        """Do nothing: while a model is built, every exchange compares what the ranks do."""

    def partition(self, module: nn.Module) -> None:
        """Partition the full parameters in ``module`` and its children. Collective if there are any."""
        kind = type(module).__name__
        check_memory((f"parameter '{kind}.{name}'", p) for name, p in module.named_parameters())
        for name, part in module.named_modules():
            named = _full_parameters(part)
            if named:
                title = ".".join(filter(None, (kind, name)))
                self.close_unused()
                with _without_torch_modes():
                    self._partition_own(title, type(part).__name__, named)

    def _partition_own(self, title: str, kind: str, named: dict[str, nn.Parameter]) -> None:
        shapes = str([(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in named.items()])
        fact = f"build {title} ({kind}): {zlib.crc32(shapes.encode()):08x} {shapes[:300]}"
        kinds = by_kind((f"{title}.{name}", param) for name, param in named.items())
        new = lambda: [self._new_bucket(title, same) for same in kinds.values()]  # noqa: E731
        for bucket in on_every_rank(new, self.topology, fact=fact):
            own = torch.zeros(bucket.shard_numel, dtype=bucket.dtype, device=self.device)
            pieces = {piece.slot: piece for piece in bucket.layout.pieces(bucket.row)}
            for slot, param in enumerate(bucket.params):
                value = self._to_exchange(param.detach(), bucket.dtype)
                control.broadcast_(value, 0, self.topology)
                if (piece := pieces.get(slot)) is not None:
                    own[piece.start : piece.stop] = value.view(-1)[piece.first :][: piece.stop - piece.start]
                param.data = bucket.released_data[slot]  # frees the memory of the full value
                make_released(param, bucket.released_data[slot])
                self._live[param] = None
                name = bucket.layout.slots[slot].name
                param.zero_shard = ShardInfo(  # type: ignore[attr-defined]
                    name, param.shape, bucket.dtype, bucket, slot, self
                )
            self._store(bucket, own)

    def _store(self, bucket: Bucket, own: Tensor) -> None:
        """Store this rank's shard, in memory or in a file. Collective with files."""
        if self._files is None:
            bucket.shard = own
            return
        files = self._files

        def store() -> None:
            bucket.storage = files.store(own, bucket.storage)

        on_every_rank(store, self.topology)
        bucket.shard = bucket.storage.shard

    def _own(self, bucket: Bucket) -> Tensor:
        """This rank's shard. Collective with files."""
        return bucket.shard if self._files is None else on_every_rank(bucket.storage.read, self.topology)

    def forget(self, param: nn.Parameter) -> None:
        """Called when a ZeroOptimizer has adopted ``param``."""
        bucket: Bucket = param.zero_shard.bucket  # type: ignore[attr-defined]
        del param.zero_shard, self._live[param]  # type: ignore[attr-defined]
        if self._files is not None and not any(p in self._live for p in bucket.params):
            self._files.remove(bucket.storage)

    def close_if_unused(self) -> None:
        """Free the process groups if every parameter is adopted or garbage-collected."""
        if self._live and not self.is_building:
            gc.collect()  # a parameter and its bucket are a reference cycle
        if not (self._live or self.is_building or self.is_closed):
            self.is_closed = True
            if self._files is not None:
                self._files.close()
            self.topology.close()

    def _to_exchange(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """``value`` on a device from which it can be sent."""
        return value.to(self._exchange_device, dtype).contiguous()

    def _new_bucket(self, title: str, named: list[tuple[str, nn.Parameter]]) -> Bucket:
        names, params = [name for name, _ in named], [param for _, param in named]
        layout = BucketLayout.of(names, [tuple(p.shape) for p in params], self.topology.world_size, 1)
        bucket = Bucket(0, title, layout, params, row=self.topology.rank)
        self._convert(bucket, self.device, bucket.dtype if self.dtype is None else self.dtype)
        return bucket

    def _convert(self, bucket: Bucket, device: torch.device, dtype: torch.dtype) -> None:
        bucket.device, bucket.dtype = device, dtype
        bucket.released_data = [nan_filled(slot.shape, dtype, device) for slot in bucket.layout.slots]

    def read(self, bucket: Bucket) -> Tensor:
        """Gather all values of ``bucket`` into a flat tensor. Collective."""
        if bucket.state is BucketState.FULL:
            return bucket.buffer
        shard = self._to_exchange(self._own(bucket), bucket.dtype)
        full = torch.empty(bucket.layout.numel, dtype=bucket.dtype, device=self._exchange_device)
        all_gather_single(full, shard, self.topology)
        return full

    def _acquire(self, bucket: Bucket) -> None:
        if bucket.state is BucketState.SHARDED:
            bucket.start_gathering(self.read(bucket))
            bucket.expose()

    def _release_if_unneeded(self, bucket: Bucket) -> None:
        if bucket.state is BucketState.FULL and not bucket.is_held():
            bucket.release()

    def gather_for_use(self, params: Iterable[nn.Parameter]) -> bool:
        """Gather ``params`` because they are used (C1). Returns False if no model is being built."""
        if not self.is_building:
            return False
        infos: list[ShardInfo] = [p.zero_shard for p in params if construction_of(p) is self]  # type: ignore[attr-defined]
        buckets = list(dict.fromkeys(info.bucket for info in infos))
        self.close_unused(but=buckets)
        on_every_rank(lambda: None, self.topology, fact=f"use {[info.name for info in infos]}")
        for bucket in buckets:
            bucket.hold(Hold.VIEW)
            with _without_torch_modes():
                self._acquire(bucket)
            self._open[bucket] = _num_uses(bucket)
        return True

    def close_unused(self, *, but: Collection[Bucket] = (), even_used: bool = False) -> None:
        """Broadcast rank 0's values of open buckets that nothing else refers to, and release them. Collective."""
        candidates = [bucket for bucket in self._open if bucket not in but]
        if not candidates:
            return
        on_every_rank(
            lambda: self._check_tied(candidates), self.topology, fact=f"close {[bucket.name for bucket in candidates]}"
        )
        with _without_torch_modes():
            is_used = [int(_num_uses(bucket) > self._open[bucket]) for bucket in candidates]
            agreed = control.agree_max(torch.tensor(is_used), self.topology).tolist()
            for bucket, held in zip(candidates, agreed, strict=True):
                if even_used or not held:
                    del self._open[bucket]
                    self._broadcast_values(bucket, 0)
                    bucket.drop(Hold.VIEW)
                    self._release_if_unneeded(bucket)

    def _check_tied(self, buckets: Iterable[Bucket]) -> None:
        """Raise ConfigError if a parameter was given another's memory: the shards would be trained apart."""
        held = {storage_of(b.full): b for b in self._open if b.full is not None}
        for bucket in buckets:
            for slot in bucket.moved_slots():
                other = held.get(storage_of(bucket.params[slot]))
                if other is not None:
                    raise ConfigError(
                        f"parameter {bucket.layout.slots[slot].name!r} was given memory of {other.name!r} (by .data), "
                        "and would be trained apart: tie parameters by making them one (b.weight = a.weight)"
                    )

    def _broadcast_values(self, bucket: Bucket, rank: int) -> None:
        dtypes = {param.dtype for param in bucket.params}
        # Another dtype: the module was cast in its constructor.
        if len(dtypes) == 1 and dtypes != {bucket.dtype} and bucket.full is not None:
            self._convert(bucket, bucket.device, dtypes.pop())
            bucket.full = bucket.full.to(bucket.dtype)
            for param in bucket.params:
                param.zero_shard.dtype = bucket.dtype  # type: ignore[attr-defined]
        bucket.copy_back_moved()
        control.broadcast_(bucket.buffer, rank, self.topology)
        self._store(bucket, bucket.shard_of(bucket.buffer).to(self.device, copy=True))

    @contextmanager
    def gathered(self, buckets: list[Bucket]) -> Iterator[None]:
        """Gather ``buckets`` for the block. Collective."""
        on_every_rank(lambda: None, self.topology, fact=f"gather {[bucket.name for bucket in buckets]}")
        for bucket in buckets:
            bucket.hold(Hold.ACCESS)
            with _without_torch_modes():
                self._acquire(bucket)
        try:
            yield
        finally:
            for bucket in buckets:
                bucket.drop(Hold.ACCESS)
                self._release_if_unneeded(bucket)

    @contextmanager
    def modified(self, slots: Mapping[Bucket, Collection[int]], rank: int) -> Iterator[None]:
        """Broadcast what ``rank`` has changed in the block, in full buckets, to every rank."""
        try:
            yield
        finally:
            with _without_torch_modes():
                for bucket in slots:
                    self._broadcast_values(bucket, rank)

    def convert(self, param: nn.Parameter, *, device: torch.device | None = None, dtype: torch.dtype | None) -> None:
        """Move or cast the shard of ``param``, with those that share its bucket. Collective with files."""
        info: ShardInfo = param.zero_shard  # type: ignore[attr-defined]
        bucket = info.bucket
        if bucket.state is not BucketState.SHARDED:
            raise StateError(f"{info.name!r} is gathered: move and cast models outside of zero.GatheredParameters")
        own = self._own(bucket)
        self._convert(bucket, device or bucket.device, dtype or bucket.dtype)
        self._store(bucket, own.to(bucket.device if self._files is None else self.device, bucket.dtype))
        for one, empty in zip(bucket.params, bucket.released_data, strict=True):
            if construction_of(one) is self and one.zero_shard.bucket is bucket:  # type: ignore[attr-defined]
                one.zero_shard.dtype = bucket.dtype  # type: ignore[attr-defined]
                with torch._C.DisableTorchFunctionSubclass():
                    one.data = empty


_without_torch_modes = torch._C.DisableTorchFunction
"""Disables ``torch.device("meta")`` and other modes under which a constructor may run."""


def _num_uses(bucket: Bucket) -> int:
    """The number of tensors that refer to the memory of a full bucket."""
    return int(torch._C._storage_Use_Count(bucket.buffer.untyped_storage()._cdata))


def _full_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """``module``'s own parameters that have values on this rank and are not managed yet."""
    return {
        name: param
        for name, param in module.named_parameters(recurse=False)
        if not is_lazy(param)
        and not param.is_meta
        and param.is_floating_point()
        and not is_managed(param)
        and param.numel()
    }
