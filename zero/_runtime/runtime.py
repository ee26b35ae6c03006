"""One model under ZeRO: it owns the buckets and the parts that gather, reduce and write them back.

    model --find_units--> units --by dtype, trainable--> buckets --partition--> shards and masters
    Hooks -> Gatherer (full parameters: when, from where)      Hooks -> Reducer (gradients: when, to where)

Called by :class:`zero.ZeroOptimizer`, which adds the optimizer, and by :mod:`zero._access.gathered_parameters`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zcomm import StateError, Topology
from zero._config.settings import ZeroSettings
from zero._gather.gather_sources import GatherOptions, gather_options, start_gather
from zero._gather.gatherer import Gatherer
from zero._gather.hooks import Hooks
from zero._gradients.reducer import Reducer
from zero._model.model_layout import ModelPlan, check_ranks_agree, plan_model
from zero._modes import MODES
from zero._optim.delayed_update import DelayedUpdate
from zero._optim.masters import MasterPiece, OptimizerStates
from zero._optim.state_files import assign_states
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.gathered_edits import GatheredEdits
from zero._runtime.initial_values import gather_partitioned, partition_model
from zero._runtime.mode_state import ModeState
from zero._runtime.suspended_memory import SuspendedMemory
from zero._runtime.untracked_edits import check_model_unchanged
from zero._runtime.write_back import WriteBack
from zero._sharding.bucket import Bucket, Hold, ShardInfo, is_managed
from zero._sharding.buffer_pool import BufferPool
from zero._sharding.phases import Phases
from zero._sharding.released import StateDictHooks
from zero._storage.parameter_storage import ParameterStorage, ShardPlan
from zero._storage.runtime_part import RuntimePart
from zero._storage.tier_settings import Tier

PARTS = (
    "hooks", "reducer", "_write_back", "gatherer", "pool", "delayed", "mode_state", "parameter_storage", "state_files"
)  # fmt: skip


class Runtime:
    """Owns the buckets of ``model`` and everything that communicates for them."""

    def __init__(
        self,
        model: nn.Module,
        settings: ZeroSettings,
        topology: Topology,
        whole: Mapping[nn.Parameter, bool] | None = None,
        *,
        is_log_rank: bool,
    ) -> None:
        self.model, self.settings, self.topology = model, settings, topology
        self.is_log_rank, self.is_closed = is_log_rank, False
        plan = on_every_rank(lambda: plan_model(model, settings, topology, whole), topology)
        self.effective, self.buckets = plan.effective, plan.buckets
        self.stage = self.effective.stage
        self.is_inexact = self.effective.is_inexact
        check_ranks_agree(self.buckets, settings, topology)
        self.since_ns = time.time_ns()  # when this state was constructed or last loaded
        self.state_dicts: StateDictHooks
        """Set once, by the optimizer: makes ``model.state_dict()`` and its counterpart work on sharded parameters."""
        self.has_averages = False
        """Whether masters and averages are swapped: see zero.MovingAverage."""
        self.suspended: SuspendedMemory | None = None
        """What ``offload_states`` has moved to host memory; None: nothing."""
        self.has_noted_pending = False
        """Whether a save has said that it leaves gradients out."""
        self.states = OptimizerStates()
        """The inner optimizer's states by parameter; none before there is an optimizer."""
        self.phases, self.pool = Phases(), BufferPool(self.buckets[0].device)
        self.state_files = assign_states(self.buckets, settings, topology)
        self.delayed = DelayedUpdate([], topology)
        """Runs updates during the next step; of no buckets, if updates are not delayed."""
        try:
            self._open_gathers()
            try:
                self._build(plan)
            except Exception:
                gather_partitioned(self.buckets, self.gatherer)
                raise
        except Exception:
            with suppress(Exception):  # the error that counts is the one that broke construction off
                self._close_parts()
            raise

    @property
    def parts(self) -> list[RuntimePart]:
        """What it is made of, as far as it is built, in the order in which parts end a step, are restored and closed.

        Hooks first: nothing may start an exchange while the others close. A delayed update writes to files, so it ends
        before they are closed; and replicas are restored after the parameters that lacked it.
        """
        return [part for name in PARTS if (part := vars(self).get(name)) is not None]

    def _open_gathers(self) -> None:
        options = gather_options(self.settings, self.effective, self.topology)
        tiers, device, plans = self.settings.tiers, self.buckets[0].device, self._plans_of_shards(options)
        total_numel = sum(bucket.layout.shard_numel for bucket in self.buckets)
        self.parameter_storage = ParameterStorage(tiers, device, self.topology, plans, total_numel=total_numel)
        self.gatherer = Gatherer(
            self.buckets,
            MODES[self.effective.mode].sources(self.buckets, options, self.effective),
            self.settings,
            self.effective,
            self.pool,
            self.parameter_storage,
            phases=self.phases,
            is_log_rank=self.is_log_rank,
        )
        self._write_back = WriteBack(self.topology, self.stage, self.gatherer, self.parameter_storage)
        self.write_back, self.send_updated = self._write_back.run, self._write_back.send
        self.edits = GatheredEdits(self._write_back, lambda buckets: self.in_memory(buckets, is_changed=True))
        self.modified, self.adopt_values = self.edits.modified, self.edits.adopt_values
        self.compare = self.gatherer.compare

    def _plans_of_shards(self, options: GatherOptions) -> dict[int, ShardPlan]:
        """The shards that are stored off the device, or encoded."""
        plans: dict[int, ShardPlan] = {}
        is_off_device = self.settings.tiers.parameters.tier is not Tier.DEVICE
        for b in self.buckets if self.stage.shards_parameters else []:
            is_encoded = self.settings.quantized_nontrainable_weights and not b.is_trainable
            if not b.is_persistent and (is_off_device or is_encoded):
                name, cuts, gaps = f"bucket{b.index}", options.columns_of(b), b.layout.gaps_of(b.row)
                plans[b.index] = ShardPlan(name, b.shard_numel, b.dtype, cuts, gaps, is_encoded, b.layout.shard_numel)
        return plans

    def _build(self, plan: ModelPlan) -> None:
        topology, settings, mode = self.topology, self.settings, MODES[self.effective.mode]
        exact = self.effective.weight_format != "none" and not self.stage.shards_parameters
        # Full parameters that are quantized, or sums of changes, have exact masters, or shards, beside them.
        keeps = {"keeps_exact_master": exact, "keeps_exact_shard": mode.keeps_exact_shards}

        def partition(bucket: Bucket, full: Tensor) -> None:
            bucket.partition(full, self.stage, self.parameter_storage, **keeps)

        partition_model(self.model, self.buckets, topology, partition)
        if self.is_inexact or self.gatherer.replicas:
            read = (b for b in self.buckets if exact or b.is_persistent or b.index in self.gatherer.replicas)
            self.write_back([b for b in read if b.dtype.is_floating_point])
        self._write_back.debug_copies.remember(self.buckets)
        # Reductions have a topology, and so process groups, of their own: gathers and reductions are started in orders
        # that need not match between them, and on one group that would be a deadlock.
        companion = topology.companion

        def new_reducer() -> Reducer:
            reduction = mode.reduction(companion, settings, self.effective)
            return Reducer(self.buckets, reduction, topology, self.pool, lambda: self.gatherer.checksum, self.phases)

        self.reducer = on_every_rank(new_reducer, topology)
        residuals = self.reducer.reduction.residuals
        saved = [] if self.effective.sends_exact_changes else self.buckets
        self.mode_state = ModeState(saved, self.gatherer, residuals, self._write_back)
        self.hooks = Hooks(self.gatherer, self.reducer, self.stage)
        self._attach()
        self.hooks.install(self.model, plan.units, plan.buckets_of_unit)

    def _attach(self) -> None:
        for bucket in self.buckets:
            for index, (param, slot) in enumerate(zip(bucket.params, bucket.layout.slots, strict=True)):
                info = ShardInfo(slot.name, torch.Size(slot.shape), bucket.dtype, bucket, index, self)
                param.zero_shard = info  # type: ignore[attr-defined]

    def gather_for_use(self, params: Sequence[nn.Parameter]) -> bool:
        """Gather released ``params`` for the module whose forward uses them; False if no forward runs."""
        self.check_not_suspended()
        infos: list[ShardInfo] = [p.zero_shard for p in params if is_managed(p)]  # type: ignore[attr-defined]
        return bool(infos) and all(info.owner is self and self.hooks.use(info.bucket, info.name) for info in infos)

    def check_not_suspended(self) -> None:
        """Raise StateError if ``offload_states`` has moved anything."""
        if self.suspended is not None:
            raise StateError(f"{', '.join(self.suspended.kinds)} are offloaded to the host: call reload_states() first")

    @property
    def is_within_step(self) -> bool:
        """Whether gradients of a step that is not taken yet are held."""
        return self.reducer.accumulation.num_started > 0 and not self.reducer.is_empty

    def step_ended(self) -> None:
        """Start the next step's bookkeeping, and release what is gathered or in flight: it has the old values."""
        for part in self.parts:
            part.step_ended()

    def open_states(self, inner: Optimizer, pieces: list[MasterPiece], whole_groups: Sequence[bool]) -> None:
        """Make room for the moments of ``inner`` in the files, if there are any. Collective.

        ``whole_groups``: which of its parameter groups are updated as whole tensors.

        Raises:
            OSError: Too little space; on every rank.
            ConfigError: The optimizer's states cannot be stored in files.
        """
        self.reducer.facts.watch(lambda: inner.param_groups, lambda: self.gatherer.lost_writes.names(self.buckets))
        on_host = [bucket for bucket in self.buckets if bucket.states.is_on_host]
        if self.settings.tiers.states.delays_update and on_host:
            self.delayed = on_every_rank(lambda: DelayedUpdate(on_host, self.topology), self.topology)
        self.state_files.open_moments(inner, pieces, whole_groups)
        self.states = OptimizerStates(inner, pieces)
        notes = (note for part in self.parts for note in part.described())
        self.effective = self.effective.with_notes(details=tuple(notes))

    @property
    def has_pending_update(self) -> bool:
        """Whether parameters lack an update that is running, or is not written back yet."""
        return self.delayed.has_pending_update

    def finish_update(self, *, writes_back: bool = False) -> None:
        """Wait for a delayed update, if one runs; collective then.

        ``writes_back`` also gives parameters the new values. Callers that only read masters leave it False: looking at
        a run must not change it (U3 of :mod:`zero._optim.delayed_update`).
        """
        if not self.delayed.has_pending_update:
            return
        self.delayed.finish()
        buckets = self.delayed.write_shards() if writes_back else []
        if not buckets:
            return
        self.write_back(buckets, are_written=True)
        for bucket in buckets:
            # A bucket that is gathered right now keeps its buffer, so its values are replaced in place.
            if self.stage.shards_parameters and not bucket.is_persistent and bucket.is_full:
                own = on_every_rank(bucket.storage.read, self.topology).to(bucket.device)
                for work in start_gather(bucket, bucket.buffer, own, self.gatherer.options):
                    work.wait()

    @contextmanager
    def gathered(self, buckets: list[Bucket]) -> Iterator[None]:
        """Hold ``buckets`` full inside."""
        self.check_not_suspended()
        for bucket in buckets:
            bucket.hold(Hold.ACCESS)
        try:
            self.gatherer.acquire_all(buckets)
            self.gatherer.agree()  # what a failed read has left NaN must not be handed out
            yield
        finally:
            for bucket in buckets:
                bucket.drop(Hold.ACCESS)
                self.gatherer.release_if_unneeded(bucket)

    @contextmanager
    def in_memory(self, buckets: Iterable[Bucket], *, is_changed: bool = False) -> Iterator[None]:
        """Inside, masters and moments of ``buckets`` are in memory, wherever they are stored.

        Collective if any are in files. ``is_changed``: what is written to them inside is stored.
        """
        self.check_not_suspended()
        chosen = list(buckets)
        if chosen:
            self.finish_update(writes_back=is_changed)
        storages = [
            bucket.storage for bucket in chosen if bucket.master is bucket.shard and not bucket.storage.is_in_memory
        ]
        for bucket in chosen if is_changed else ():
            bucket.storage.settle()
        contexts = [storage.in_memory() for storage in storages]
        contexts += [self.states_in_memory(b, is_changed=is_changed) for b in chosen if b.states.is_in_files]
        with ExitStack() as stack:
            if contexts:
                on_every_rank(lambda: [stack.enter_context(context) for context in contexts], self.topology)
            yield
            if is_changed:
                for storage in storages:
                    storage.keep()
            if contexts:
                on_every_rank(stack.close, self.topology)

    @contextmanager
    def states_in_memory(self, bucket: Bucket, *, is_changed: bool = False) -> Iterator[None]:
        """The same for one bucket on this rank alone; not collective."""
        self.check_not_suspended()
        self.finish_update()
        with bucket.states.in_memory(writes=is_changed):
            yield

    @contextmanager
    def exact(self, bucket: Bucket) -> Iterator[list[Tensor]]:
        """The parameters of ``bucket`` as the masters have them, rounded once to their dtype. Collective.

        The list is empty afterwards. Keep no view of its tensors: their buffer would not go back to the pool.
        """
        has_pending_update = bucket.is_trainable and self.has_pending_update
        with ExitStack() as stack:
            if not (self.is_inexact or has_pending_update) or not bucket.dtype.is_floating_point:
                stack.enter_context(self.gathered([bucket]))
                values = [param.detach() for param in bucket.params]
            else:
                with self.in_memory([bucket]):
                    shard = bucket.master.detach().to(bucket.device, bucket.dtype)
                full = self.pool.take(bucket.layout.numel, bucket.dtype)
                works = start_gather(bucket, full, shard, replace(self.gatherer.options, format="none"))
                # Only after the works have ended may the pool hand out the buffer again: a gather may write to it.
                self.pool.lend(works, full)
                self.pool.reclaim(works, full)
                stack.callback(self.pool.give, full)
                values = bucket.views(full)
            yield values
            values.clear()

    def forget_writes(self, params: Iterable[nn.Parameter]) -> None:
        """Writes to ``params``, which are managed here, were refused."""
        for param in params:
            self.gatherer.lost_writes.forget(param.zero_shard.bucket, [param])  # type: ignore[attr-defined]

    def check_model_unchanged(self) -> None:
        """Raise StateError if a parameter was added, replaced, moved or unfrozen, or its values edited."""
        if self.is_closed:
            raise StateError("this optimizer is closed: make another one, or use it before close()")
        if self.has_averages:
            raise StateError("the model has the averages of a zero.MovingAverage: leave applied() before step()")
        self.check_not_suspended()
        if self.stage.shards_parameters and self.edits.is_open:
            raise StateError("step() inside zero.GatheredParameters(modifier_rank=) would lose its edits: end it first")
        check_model_unchanged(self.model, self.buckets)
        self.gatherer.lost_writes.check(self.buckets)
        self._write_back.debug_copies.check()

    def close(self) -> None:
        """Remove the hooks and drop the gradients. Full parameters stay and are ordinary ones again."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            self._close_parts()
        finally:
            self._detach()

    def _close_parts(self) -> None:
        """Close every part, also if closing one raises."""
        with ExitStack() as stack:  # it calls the last one first
            for part in reversed(self.parts):
                stack.callback(part.close)

    def _detach(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self.buckets:
                bucket.hold(Hold.VIEW)
                for param in bucket.params:
                    param.grad = None
                    if bucket.is_trainable:
                        param.grad_dtype = param.dtype
                    if bucket.is_full:
                        del param.zero_shard  # type: ignore[attr-defined]
