"""One model under ZeRO: its buckets, and the parts that move them.

    model --find_units--> units --by dtype, trainable--> buckets --settle--> shards and masters
    Hooks -> Gatherer (full parameters: when, from where)      Hooks -> Reducer (gradients: when, to where)

Called by :class:`zero.ZeroOptimizer`, which adds the optimizer, and by :mod:`zero.access`.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zcomm import LayoutError, StateError, Topology, control
from zero.agreement import on_every_rank
from zero.bucket import Bucket, BucketState, ShardInfo
from zero.edits import Published
from zero.gather import Gatherer, Mode
from zero.grads import Reducer
from zero.hooks import Hooks
from zero.init_shards import is_built
from zero.layout import BucketLayout
from zero.masters import OptimizerStates
from zero.pool import BufferPool
from zero.residents import choose_residents, set_apart
from zero.settings import Effective, ZeroSettings, resolve
from zero.settle import make_whole, settle
from zero.sources import start_gather
from zero.units import Unit, find_units

__all__ = ["Runtime", "check_model"]

MERGED_NUMEL = 2**20
"""Larger exchanges gain nothing more from being fewer, and begin later in backward."""


class Runtime:
    """Owns the buckets of ``model`` and everything that communicates for them."""

    def __init__(self, model: nn.Module, settings: ZeroSettings, topology: Topology) -> None:
        self.model, self.settings, self.topology = model, settings, topology
        plan = on_every_rank(lambda: _plan(model, settings, topology), topology)
        self.effective, self.buckets = plan.effective, plan.buckets
        self.stage = self.effective.stage
        _check_ranks_agree(self.buckets, settings, topology)
        # Gathers and reductions each have process groups of their own: their orders need not match one another.
        self.pool = BufferPool(self.buckets[0].device)
        self.is_saving = False
        self.states: OptimizerStates | None = None
        """What the optimizer keeps, once there is one."""
        self._published = Published(topology, is_always_full=not self.stage.shards_parameters)
        self.gatherer = Gatherer(self.buckets, topology, settings, self.effective, self.pool)
        self.compare, self.is_closed = self.gatherer.compare, False
        try:
            self._build(plan)
        except Exception:
            make_whole(self.buckets, self.gatherer)
            raise

    def _build(self, plan: _Plan) -> None:
        exact = self.is_inexact and not self.stage.shards_parameters
        settle(self.model, self.buckets, self.stage, self.topology, keeps_exact_masters=exact)
        if self.is_inexact:
            self.publish([b for b in self.buckets if (exact or b.is_resident) and b.dtype.is_floating_point])
        self._published.remember(self.buckets)
        topology, settings = self.topology, self.settings
        topologies = (topology.companion, topology)
        self.reducer = on_every_rank(
            lambda: Reducer(
                self.buckets, topologies, settings, self.effective, self.pool, lambda: self.gatherer.checksum
            ),
            topology,
        )
        self.hooks = Hooks(
            self.gatherer, self.reducer, self._should_reduce, shards_parameters=self.stage.shards_parameters
        )
        self._attach()
        self.hooks.install(self.model, plan.units, plan.buckets_of_unit)
        self._syncs = True
        self._num_backwards = 0
        self.boundary: bool | None = None
        """Whether the next step ends with this backward, if somebody else counts them."""

    def _attach(self) -> None:
        for bucket in self.buckets:
            for index, (param, slot) in enumerate(zip(bucket.params, bucket.layout.slots, strict=True)):
                shape = torch.Size(slot.shape)
                param.zero_shard = ShardInfo(  # type: ignore[attr-defined]
                    slot.name, shape, bucket.dtype, bucket, index, lambda: self.is_saving, self
                )

    def open(self, params: Sequence[nn.Parameter]) -> bool:
        """Gather released ``params`` for the module whose forward uses them, if one runs."""
        infos: list[ShardInfo] = [p.zero_shard for p in params if hasattr(p, "zero_shard")]
        return bool(infos) and all(info.owner is self and self.hooks.use(info.bucket, info.name) for info in infos)

    def _should_reduce(self) -> bool:
        self._num_backwards += 1
        if not self._syncs:
            return False
        return self.is_boundary or self.stage.reduces_every_micro_batch

    @property
    def is_boundary(self) -> bool:
        """Whether the running or last backward completes the gradient of a step."""
        if self.boundary is not None:
            return self.boundary
        return self._num_backwards % self.settings.gradient_accumulation_steps == 0

    @property
    def is_within_step(self) -> bool:
        """Whether gradients of a step that is not taken yet are held."""
        return self._num_backwards > 0 and any(any(g.used) or any(g.written) for g in self.reducer.all)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients on this rank."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def step_ended(self, *, has_new_values: bool = True) -> None:
        """Masters have new values, unless the step was skipped: publish them, start the next step's bookkeeping."""
        self._num_backwards = 0
        self.gatherer.release_all()
        self.gatherer.end_iteration(Mode.TRAINING)
        self.pool.drop_unused()
        if has_new_values:
            self.publish([bucket for bucket in self.buckets if bucket.is_trainable])

    def publish(self, buckets: list[Bucket]) -> None:
        """Bring what the forward reads in line with the masters."""
        works = []
        for bucket in buckets:
            bucket.update_shard()
            if self.stage.shards_states and (bucket.is_resident or not self.stage.shards_parameters):
                assert bucket.full is not None, "residents, and below stage 3 all parameters, are always full"
                works += start_gather(bucket.layout, bucket.full, bucket.shard, self.gatherer.options)
        for work in works:
            work.wait()
        self._published.remember(buckets)
        self.gatherer.parameters_changed(buckets)

    @contextmanager
    def gathered(self, buckets: list[Bucket]) -> Iterator[None]:
        """Hold ``buckets`` full."""
        for bucket in buckets:
            bucket.forward_depth += 1
        self.gatherer.acquire_all(buckets)
        try:
            yield
        finally:
            for bucket in buckets:
                bucket.forward_depth = max(bucket.forward_depth - 1, 0)
                self.gatherer.release_if_unneeded(bucket)

    @property
    def is_inexact(self) -> bool:
        """Whether forward reads quantized weights, which are not what is to be saved."""
        return self.effective.weight_format != "none"

    @contextmanager
    def exact(self, bucket: Bucket) -> Iterator[list[Tensor]]:
        """The parameters of ``bucket`` as the masters have them, rounded once to their dtype. Collective."""
        if not self.is_inexact or not bucket.dtype.is_floating_point:
            with self.gathered([bucket]):
                yield [param.detach() for param in bucket.params]
            return
        shard = bucket.master.to(bucket.dtype)
        full = self.pool.take(bucket.layout.numel, bucket.dtype)
        try:
            for work in start_gather(bucket.layout, full, shard, replace(self.gatherer.options, format="none")):
                work.wait()
            yield bucket.views(full)
        finally:
            self.pool.give(full)

    @contextmanager
    def modified(self, slots: Mapping[Bucket, Collection[int]], rank: int) -> Iterator[None]:
        """What ``rank`` changes inside, in these parameters of full buckets, is taken over by every rank.

        Elements that it leaves as they are keep their masters, of which the forward sees only a rounding.
        """
        before = {bucket: self._own_rows(bucket).clone() for bucket in slots}
        try:
            yield
        finally:
            for bucket in slots:
                bucket.take_back()
            self.take_values(slots, rank, before)

    def take_values(
        self, slots: Mapping[Bucket, Collection[int]], rank: int, before: Mapping[Bucket, Tensor] | None = None
    ) -> None:
        """Take over ``rank``'s values of these parameters of full buckets, where they differ from ``before``."""
        for bucket, chosen in slots.items():
            assert bucket.full is not None, "values can only be taken from full parameters"
            control.broadcast_(bucket.full, rank, self.topology)
            rows = self._own_rows(bucket)
            base = self.topology.shard_index("local") * rows.numel() if self.stage.shards_states else 0
            for piece, master in bucket.master_pieces(self.stage, self.topology.shard_index("local")):
                if piece.slot in chosen:
                    part = slice(piece.start - base, piece.stop - base)
                    values = rows[part].to(master.dtype)
                    if before is not None:
                        values = torch.where(rows[part] == before[bucket][part], master, values)
                    master.copy_(values)
        self.publish(list(slots))

    def _own_rows(self, bucket: Bucket) -> Tensor:
        """The rows of a full bucket whose masters this rank has."""
        assert bucket.full is not None, "rows of a bucket that is not full"
        if not self.stage.shards_states:
            return bucket.full
        row, numel = self.topology.shard_index("local"), bucket.layout.shard_numel
        return bucket.full[row * numel : (row + 1) * numel]

    def check_model_unchanged(self) -> None:
        """Raise if a parameter was added, replaced, moved or unfrozen after construction, or changed in vain."""
        managed = {param for bucket in self.buckets for param in bucket.params}
        for name, param in self.model.named_parameters():
            if param not in managed:
                raise StateError(
                    f"parameter {name!r} was added or replaced after ZeroOptimizer was constructed and would never be "
                    "updated: construct ZeroOptimizer after the model is complete"
                )
            info: ShardInfo = param.zero_shard  # type: ignore[attr-defined]
            if param.requires_grad and not info.bucket.is_trainable:
                raise StateError(
                    f"parameter {name!r} was frozen when ZeroOptimizer was constructed and requires grad now: "
                    "construct ZeroOptimizer after unfreezing"
                )
        for bucket in self.buckets:
            for slot in bucket.moved():
                name, param = bucket.layout.slots[slot].name, bucket.params[slot]
                raise StateError(
                    f"parameter {name!r} got other memory, of {param.dtype} on {param.device}, after ZeroOptimizer was "
                    "constructed and would never be updated: call model.to() before, and assign values inside "
                    "zero.GatheredParameters([param], modifier_rank=0)"
                )
        self._published.check()

    def close(self) -> None:
        """Take the hooks off and drop the gradients. Full parameters stay, and are nobody's any more."""
        if self.is_closed:
            return
        self.hooks.remove()
        self.is_closed = True
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self.buckets:
                bucket.is_pinned = True
                for param in bucket.params:
                    param.grad = None
                    if bucket.is_trainable:
                        param.grad_dtype = param.dtype
                    if bucket.state is BucketState.FULL:
                        del param.zero_shard  # type: ignore[attr-defined]


class _Plan(NamedTuple):
    """How a model will be laid out."""

    effective: Effective
    units: list[Unit]
    buckets_of_unit: list[list[Bucket]]
    """Units that share an exchange have the same buckets."""
    buckets: list[Bucket]


def _plan(model: nn.Module, settings: ZeroSettings, topology: Topology) -> _Plan:
    effective = resolve(settings, topology)
    check_model(model)
    if effective.stage.shards_parameters:
        _check_is_gatherable(model)
    units, residents = _cut_into_units(model, settings, effective)
    buckets = _cut_into_buckets([residents], topology.world_size, effective.align, is_resident=True)
    buckets_of_unit: list[list[Bucket]] = []
    for run in _runs_of(units, _numel_to_merge(settings, effective)):
        of_run = _cut_into_buckets(run, topology.world_size, effective.align, first=len(buckets))
        buckets_of_unit += [of_run] * len(run)
        buckets += of_run
    return _Plan(effective, units, buckets_of_unit, buckets)


def _cut_into_units(model: nn.Module, settings: ZeroSettings, effective: Effective) -> tuple[list[Unit], Unit]:
    """The units, and what is no part of them: parameters that stay whole at stage 3."""
    if not effective.stage.shards_parameters:
        return set_apart(find_units(model), set(), model)
    units = find_units(model, effective.limits.live_numel)
    residents = choose_residents(
        units,
        less_than=settings.stage3_param_persistence_threshold,
        total=settings.stage3_model_persistence_threshold,
    )
    return set_apart(units, residents, model)


def _numel_to_merge(settings: ZeroSettings, effective: Effective) -> int:
    """Elements up to which small units share an exchange. At stage 3 a unit is gathered and released by itself."""
    if effective.stage.shards_parameters:
        return 0
    return min(MERGED_NUMEL, settings.reduce_bucket_size, settings.allgather_bucket_size)


def check_model(model: nn.Module) -> torch.device:
    """The device of ``model``'s parameters; an error for models that cannot be sharded."""
    named = list(model.named_parameters())
    devices = {param.device: name for name, param in named}
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise LayoutError(f"all parameters must be on one device: {where}")
    device = named[0][1].device
    if device.type == "meta":
        raise LayoutError(
            f"parameters must have values: {named[0][0]!r} is on meta; call model.to_empty(device=...) first"
        )
    for name, param in named:
        if hasattr(param, "zero_shard") and not is_built(param):
            raise StateError(
                f"parameter {name!r} is managed by another ZeroOptimizer already: close() that one first, at stage 3 "
                "inside zero.GatheredParameters(model.parameters()), which keeps the parameters whole"
            )
        if param.requires_grad and not param.is_floating_point():
            raise LayoutError(f"trainable parameters must be real floating point: {name!r} is {param.dtype}")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise LayoutError(f"gradients must be dense: module {name!r} was built with sparse=True; use sparse=False")
    return device


def _check_is_gatherable(model: nn.Module) -> None:
    """Raise if a parameter, frozen then, has a dtype that no all-gather takes."""
    for name, param in model.named_parameters():
        if not param.is_floating_point():
            raise LayoutError(
                f"stage 3 gathers real floating-point parameters only: {name!r} is {param.dtype}; use stage 1 or 2, or "
                "make it a buffer"
            )


def _runs_of(units: list[Unit], max_numel: int) -> list[list[Unit]]:
    """Consecutive units that share buckets: at least one, and more as long as they have ``max_numel`` elements."""
    runs: list[list[Unit]] = []
    numel = 0
    for unit in units:
        unit_numel = sum(param.numel() for _, param in unit.parameters)
        if not runs or numel + unit_numel > max_numel:
            runs.append([])
            numel = 0
        runs[-1].append(unit)
        numel += unit_numel
    return runs


def _cut_into_buckets(
    run: list[Unit], world_size: int, align: int, *, first: int = 0, is_resident: bool = False
) -> list[Bucket]:
    """The buckets of a run, numbered from ``first``: one for each dtype and requires_grad in it."""
    kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, param in (named for unit in run for named in unit.parameters):
        kinds.setdefault((param.dtype, param.requires_grad), []).append((name, param))
    buckets = []
    for index, named in enumerate(kinds.values(), first):
        names, params = [name for name, _ in named], [param for _, param in named]
        layout = BucketLayout.of(names, [tuple(p.shape) for p in params], world_size, align)
        title = " .. ".join(dict.fromkeys((run[0].name or names[0], run[-1].name or names[-1])))
        buckets.append(Bucket(index, title, layout, params, is_resident=is_resident))
    return buckets


def _check_ranks_agree(buckets: list[Bucket], settings: ZeroSettings, topology: Topology) -> None:
    """Same model and settings everywhere, or the same error everywhere, before anything else is exchanged."""
    if topology.world_size == 1:
        return
    facts = [repr(settings), *(f"{b.layout} {b.dtype} {b.is_trainable}" for b in buckets)]
    mine = torch.tensor([float(len(buckets)), *_digests(facts)], dtype=torch.float64)
    of_ranks = control.gather_float64(mine, topology)
    for column, what in enumerate(("number of buckets", "settings", "model")):
        values = of_ranks[:, column].tolist()
        if len(set(values)) > 1:
            raise LayoutError(
                f"the {what} given to ZeroOptimizer must be the same on every rank: by rank {[int(v) for v in values]} "
                f"({'count' if column == 0 else 'checksums'}); this rank: "
                + (repr(settings) if column == 1 else f"{sum(b.layout.numel for b in buckets)} padded elements")
            )


def _digests(facts: list[str]) -> list[float]:
    """Checksums of the settings and of the model, exact in float64."""
    return [float(zlib.crc32(facts[0].encode())), float(zlib.crc32("\n".join(facts[1:]).encode()))]
