"""One model under ZeRO: its buckets, and the parts that move them.

    model --find_units--> units --by dtype, trainable--> buckets --settle--> shards and masters
    Hooks -> Gatherer (full parameters: when, from where)      Hooks -> Reducer (gradients: when, to where)

Called by :class:`zero.ZeroOptimizer`, which adds the optimizer, and by :mod:`zero._access.gathered_parameters`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zcomm import StateError, Topology
from zero._config.settings import ZeroSettings
from zero._gather.gather_sources import GatherOptions, gather_options, start_gather
from zero._gather.gatherer import Gatherer, Mode
from zero._gather.hooks import Hooks
from zero._gradients.reducer import Reducer
from zero._model.model_layout import ModelPlan, check_ranks_agree, plan_model
from zero._optim.delayed_update import DelayedUpdate
from zero._optim.file_update import FileUpdate, moments_of
from zero._optim.gradient_files import GradientFiles
from zero._optim.masters import MasterPiece, OptimizerStates
from zero._optim.state_placement import assign_states, describe_states
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.gathered_edits import Edits
from zero._runtime.initial_values import make_whole, settle
from zero._runtime.suspended_memory import Away
from zero._runtime.untracked_edits import check_model_unchanged
from zero._runtime.write_back import Publisher
from zero._sharding.bucket import Bucket, BucketState, ShardInfo, is_managed, master_dtype
from zero._sharding.buffer_pool import BufferPool
from zero._storage.parameter_storage import ParameterRests, ShardPlan
from zero._storage.tier_settings import Tier


class Runtime:
    """Owns the buckets of ``model`` and everything that communicates for them."""

    def __init__(self, model: nn.Module, settings: ZeroSettings, topology: Topology, *, speaks: bool) -> None:
        self.model, self.settings, self.topology, self.speaks = model, settings, topology, speaks
        plan = on_every_rank(lambda: plan_model(model, settings, topology), topology)
        self.effective, self.buckets = plan.effective, plan.buckets
        self.stage = self.effective.stage
        check_ranks_agree(self.buckets, settings, topology)
        self.state_files = assign_states(self.buckets, settings, topology)
        self.gradient_files: GradientFiles | None = None
        self.file_update: FileUpdate | None = None
        """How states in files are reached, once there is an optimizer."""
        # Gathers and reductions each have process groups of their own: their orders need not match one another.
        self.pool = BufferPool(self.buckets[0].device)
        self.since_ns = time.time_ns()  # since when it is what it is: new, or last loaded
        self.state_dicts: object | None = None
        """What makes the model's own methods work on sharded parameters: a :class:`zero._access.state_dict.StateDicts`."""
        self.away: Away | None = None
        """What ``offload_states`` has moved to the host."""
        self.saves_masters = False
        """Whether ``model.state_dict()``, called on every rank, gives the masters' values at every stage."""
        self.left_out: frozenset[nn.Parameter] = frozenset()
        """Parameters that ``model.state_dict()`` leaves out."""
        self.delayed: DelayedUpdate | None = None
        """Updates that run during the next step."""
        self.states: OptimizerStates | None = None
        """What the optimizer keeps, once there is one."""
        options = gather_options(settings, self.effective, topology)
        tiers = settings.tiers
        self.rests = ParameterRests(tiers, self.buckets[0].device, topology, self._plans_of_shards(options))
        own_numel = sum(bucket.layout.shard_numel for bucket in self.buckets)
        self.effective = self.effective.and_more(details=self.rests.described(own_numel))
        self.gatherer = Gatherer(self.buckets, options, settings, self.effective, self.pool, self.rests, speaks=speaks)
        self.compare, self.is_closed = self.gatherer.compare, False
        self._publisher = Publisher(topology, self.stage, self.gatherer, self.rests, self.state_files)
        edits = Edits(self.stage, topology, lambda buckets: self.in_memory(buckets, is_changed=True), self.publish)
        self.modified, self.take_values = edits.modified, edits.take_values
        try:
            self._build(plan)
        except Exception:
            make_whole(self.buckets, self.gatherer)
            self.rests.close()
            self._close_files()
            raise

    def _plans_of_shards(self, options: GatherOptions) -> dict[int, ShardPlan]:
        """The shards that are to rest off the device, or encoded."""
        plans: dict[int, ShardPlan] = {}
        row, is_off_device = self.topology.shard_index("local"), self.settings.tiers.parameters.tier is not Tier.DEVICE
        for b in self.buckets if self.stage.shards_parameters else []:
            is_encoded = self.settings.quantized_nontrainable_weights and not b.is_trainable
            if not b.is_resident and (is_off_device or is_encoded):
                name, cuts, gaps = f"bucket{b.index}", options.columns(b.layout), b.layout.gaps_of(row)
                plans[b.index] = ShardPlan(name, b.layout.shard_numel, b.dtype, cuts, gaps, is_encoded)
        return plans

    def _build(self, plan: ModelPlan) -> None:
        exact = self.effective.weight_format != "none" and not self.stage.shards_parameters
        keeps = {
            "keeps_exact_masters": exact,
            "keeps_exact_shards": self.effective.change_format is not None and not self.stage.shards_parameters,
        }
        settle(self.model, self.buckets, self.stage, self.topology, (self.rests, self.state_files), **keeps)
        if self.is_inexact:
            read = (b for b in self.buckets if exact or b.is_resident or b.index in self.gatherer.replicas)
            self.publish([b for b in read if b.dtype.is_floating_point])
        self._publisher.published.remember(self.buckets)
        topology, settings = self.topology, self.settings
        topologies = (topology.companion, topology)
        files = self.gradient_files = self._open_gradients()
        self.reducer = on_every_rank(
            lambda: Reducer(
                self.buckets, topologies, settings, self.effective, self.pool, lambda: self.gatherer.checksum, files
            ),
            topology,
        )
        self.reducer.is_last = lambda: self.is_boundary
        self.hooks = Hooks(self.gatherer, self.reducer, self._should_reduce, self.give_up_step, self.stage)
        self._attach()
        self.hooks.install(self.model, plan.units, plan.buckets_of_unit)
        self._syncs = True
        self._num_backwards = 0
        self.boundary: bool | None = None
        """Whether the next step ends with this backward, if somebody else counts them."""

    def _open_gradients(self) -> GradientFiles | None:
        """Make room for the gradients whose masters are in files, if there are any. Collective.

        Those of a delayed update stay in memory, where the next step's have a place beside them.
        """
        if self.state_files is None or self.settings.tiers.states.delays_update:
            return None
        chosen, groups = self.settings.gradient_dtype, self.state_files.groups_of
        return GradientFiles(
            groups, lambda bucket: chosen or master_dtype(bucket.dtype), self.settings.tiers, self.topology
        )

    def _attach(self) -> None:
        for bucket in self.buckets:
            for index, (param, slot) in enumerate(zip(bucket.params, bucket.layout.slots, strict=True)):
                shape = torch.Size(slot.shape)
                param.zero_shard = ShardInfo(  # type: ignore[attr-defined]
                    slot.name, shape, bucket.dtype, bucket, index, self
                )

    def open(self, params: Sequence[nn.Parameter]) -> bool:
        """Gather released ``params`` for the module whose forward uses them, if one runs."""
        self.check_present()
        infos: list[ShardInfo] = [p.zero_shard for p in params if is_managed(p)]  # type: ignore[attr-defined]
        return bool(infos) and all(info.owner is self and self.hooks.use(info.bucket, info.name) for info in infos)

    def check_present(self) -> None:
        """Raise StateError if anything is away."""
        if self.away is not None:
            raise StateError(f"{', '.join(self.away.kinds)} are offloaded to the host: call reload_states() first")

    def _should_reduce(self) -> bool:
        self._num_backwards += 1
        self.reducer.facts.count(is_deferred=not self._syncs)
        return self._syncs and (self.is_boundary or self.stage.reduces_every_micro_batch)

    @property
    def is_boundary(self) -> bool:
        """Whether the running or last backward completes the gradient of a step."""
        if self.boundary is not None:
            return self.boundary
        return self._num_backwards % self.settings.gradient_accumulation_steps == 0

    @property
    def is_within_step(self) -> bool:
        """Whether gradients of a step that is not taken yet are held."""
        return self._num_backwards > 0 and not self.reducer.is_empty

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients on this rank."""
        before, self._syncs = self._syncs, False
        self.reducer.holds_unreduced = True  # if only on ranks that have a backward here
        try:
            yield
        finally:
            self._syncs = before
            self.reducer.holds_unreduced = True

    def give_up_step(self) -> None:
        """Forget all gradients: the next backward is the first of another step."""
        self.reducer.zero()
        self._num_backwards = 0

    def step_ended(self) -> None:
        """Start the next step's bookkeeping: what is gathered, or on its way, has the old values."""
        self._num_backwards = 0
        self.reducer.facts.end_step(self.reducer.shown.edits())
        self.gatherer.release_all()
        self.gatherer.end_iteration(Mode.TRAINING)
        self.pool.drop_unused()

    def publish(
        self,
        buckets: list[Bucket],
        *,
        are_written: bool = False,
        changed: set[int] | None = None,
        params: Collection[nn.Parameter] | None = None,
    ) -> None:
        """Bring what the forward reads in line with the masters: see :meth:`zero._runtime.write_back.Publisher.publish`."""
        self._publisher.publish(buckets, are_written=are_written, changed=changed, params=params)

    def hold(self, shards: Mapping[Bucket, Tensor]) -> None:
        """Let replicas have these values instead: see :meth:`zero._runtime.write_back.Publisher.hold`."""
        self._publisher.hold(shards)

    def open_states(self, inner: Optimizer, pieces: list[MasterPiece]) -> None:
        """Make room for the moments of ``inner`` in the files, if there are any. Collective.

        Raises:
            OSError: On every rank: too little space.
            ConfigError: An optimizer whose states cannot rest in files.
        """
        self.effective = self.effective.and_more(
            details=describe_states(self.buckets, self.settings.tiers.states, inner)
        )
        self.reducer.facts.watch(lambda: inner.param_groups)
        files, tier = self.state_files, self.settings.tiers.states
        late = [bucket for bucket in self.buckets if bucket.host is not None]
        if tier.delays_update and late:
            self.delayed = on_every_rank(lambda: DelayedUpdate(late, self.topology), self.topology)
        if files is not None:
            dtype = next(iter(files.groups_of)).master.dtype
            files.reserve_moments(on_every_rank(lambda: moments_of(inner, dtype), self.topology))
            self.file_update = FileUpdate(files, self.gradient_files, inner, pieces)

    @property
    def is_behind(self) -> bool:
        """Whether parameters lack an update that is under way, or not published yet."""
        return self.delayed is not None and self.delayed.is_behind

    def finish_update(self, *, publishes: bool = False) -> None:
        """Wait for an update that is under way; collective then. ``publishes``: let parameters have it, too."""
        if self.delayed is None or not self.delayed.is_behind:
            return
        self.delayed.finish()
        buckets = self.delayed.write_shards() if publishes else []
        if not buckets:
            return
        self.publish(buckets, are_written=True)
        for bucket in buckets:
            if self.stage.shards_parameters and not bucket.is_resident and bucket.state is BucketState.FULL:
                own = on_every_rank(bucket.rest.read, self.topology).to(bucket.device)
                assert bucket.full is not None, f"bucket {bucket.name!r} is full without a buffer"
                for work in start_gather(bucket, bucket.full, own, self.gatherer.options):
                    work.wait()

    def is_in_files(self, bucket: Bucket) -> bool:
        """Whether the master and the moments of ``bucket`` rest in files."""
        return self.state_files is not None and bucket in self.state_files.groups_of

    @contextmanager
    def gathered(self, buckets: list[Bucket]) -> Iterator[None]:
        """Hold ``buckets`` full."""
        self.check_present()
        for bucket in buckets:
            bucket.forward_depth += 1
        try:
            self.gatherer.acquire_all(buckets)
            yield
        finally:
            for bucket in buckets:
                bucket.forward_depth = max(bucket.forward_depth - 1, 0)
                self.gatherer.release_if_unneeded(bucket)

    @contextmanager
    def in_memory(self, buckets: Iterable[Bucket], *, is_changed: bool = False) -> Iterator[None]:
        """Inside, masters of ``buckets`` have their values, and so have moments, wherever they rest.

        Collective if any rest in files. ``is_changed``: what is written to them inside is kept.
        """
        self.check_present()
        chosen = list(buckets)
        if chosen:
            self.finish_update(publishes=is_changed)
        rests = [bucket.rest for bucket in chosen if bucket.master is bucket.shard and not bucket.rest.is_in_memory]
        contexts = [rest.in_memory() for rest in rests]
        contexts += [self.states_in_memory(b, is_changed=is_changed) for b in chosen if self.is_in_files(b)]
        with ExitStack() as stack:
            if contexts:
                on_every_rank(lambda: [stack.enter_context(context) for context in contexts], self.topology)
            yield
            if is_changed:
                for rest in rests:
                    rest.keep()
            if contexts:
                on_every_rank(stack.close, self.topology)

    @contextmanager
    def states_in_memory(self, bucket: Bucket, *, is_changed: bool = False) -> Iterator[None]:
        """The same for the master and the moments of one bucket on this rank alone."""
        self.check_present()
        self.finish_update()
        if self.file_update is None or not self.is_in_files(bucket):
            yield
            return
        with self.file_update.in_memory(bucket, writes=is_changed):
            yield

    @contextmanager
    def saving_weights(self, left_out: Iterable[nn.Parameter]) -> Iterator[None]:
        """Inside, ``model.state_dict()`` has what was last updated, without the parameters ``left_out``.

        Every rank calls it.
        """
        self.saves_masters, self.left_out = self.is_behind, frozenset(left_out)
        try:
            yield
        finally:
            self.saves_masters, self.left_out = False, frozenset()

    @property
    def is_inexact(self) -> bool:
        """Whether forward reads what is not to be saved: quantized weights, or replicas."""
        return self.effective.weight_format != "none" or self.effective.change_format is not None

    @contextmanager
    def exact(self, bucket: Bucket) -> Iterator[list[Tensor]]:
        """The parameters of ``bucket`` as the masters have them, rounded once to their dtype. Collective.

        The list is empty afterwards. Keep no view of its tensors: their buffer would not go back to the pool.
        """
        is_behind = bucket.is_trainable and self.is_behind
        if not (self.is_inexact or is_behind) or not bucket.dtype.is_floating_point:
            with self.gathered([bucket]):
                values = [param.detach() for param in bucket.params]
                yield values
                values.clear()
            return
        with self.in_memory([bucket]):
            shard = bucket.master.detach().to(bucket.device, bucket.dtype)
        full = self.pool.take(bucket.layout.numel, bucket.dtype)
        works = start_gather(bucket, full, shard, replace(self.gatherer.options, format="none"))
        self.pool.lend(works, full)
        self.pool.reclaim(works, full)
        try:
            values = bucket.views(full)
            yield values
            values.clear()
        finally:
            self.pool.give(full)

    def check_model_unchanged(self) -> None:
        """Raise if a parameter was added, replaced, moved or unfrozen after construction, or changed in vain."""
        self.check_present()
        check_model_unchanged(self.model, self.buckets)
        self._publisher.published.check()

    def _close_files(self) -> None:
        for files in (self.state_files, self.gradient_files):
            if files is not None:
                files.close()

    def close(self) -> None:
        """Take the hooks off and drop the gradients. Full parameters stay, and are nobody's any more."""
        if self.is_closed:
            return
        self.hooks.remove()
        self._publisher.close()
        self.is_closed = True
        if self.delayed is not None:
            self.delayed.close()
        self._close_files()
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self.buckets:
                bucket.is_pinned = True
                for param in bucket.params:
                    param.grad = None
                    if bucket.is_trainable:
                        param.grad_dtype = param.dtype
                    if bucket.state is BucketState.FULL:
                        del param.zero_shard  # type: ignore[attr-defined]
        self.rests.close()


def time_exchanges(runtime: Runtime, timed: Callable[[str], AbstractContextManager[None]]) -> None:
    """From now on everything that gathers parameters or reduces gradients runs within ``timed``.

    ``timed("gather")`` is entered for each gather that is issued and waited for, and for the one after a step;
    ``timed("reduce")`` for each gradient that is taken over, and for the end of each backward.
    """
    gatherer, reducer = runtime.gatherer, runtime.reducer
    for owner, names, phase in (
        (gatherer, ("acquire",), "gather"),
        (runtime, ("publish",), "gather"),
        (reducer, ("arrive", "end_backward"), "reduce"),
    ):
        for name in names:
            setattr(owner, name, _within(timed, phase, getattr(owner, name)))


def _within(timed: Callable[[str], AbstractContextManager[None]], phase: str, call: Callable[..., Any]) -> Any:
    @wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with timed(phase):
            return call(*args, **kwargs)

    return wrapped
