"""Collects and reduces gradients: from autograd to a bucket's buffer, averaged over ranks, summed over micro-batches.

    autograd's .grad --copy or add--> full buffer --reduce-scatter (mean)--> shard += mean           stages 2, 3
                                       (below stage 2 the shard is the buffer's own rows; stage 0 gathers them)
                                                                 shard --bucket by bucket--> host or file   offloaded

Invariants:
    G1  Buckets are reduced in one fixed order on every rank, whatever the order in which their gradients arrive, so
        exchanges match even if ranks use different parameters. At the end of a backward the ranks agree on which
        parameters any rank used; a bucket that no rank used is not exchanged.
    G2  ``.grad`` of a parameter is set exactly while this optimizer holds a gradient for it. Anything else there is a
        user's: None drops the gradient; a tensor replaces it, and is averaged over the ranks as if a backward had
        computed it. A rank whose user set none adds zeros, unless it holds the gradient that others replaced.
    G3  No rank waits without limit for a reduction during backward. A rank that has no gradient for a parameter
        reduces its bucket only at the end of backward; at stage 3 it needs the others in gathers until then. If they
        blocked in that reduction, both would deadlock (tests/zero/test_late_gradients.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from zcomm import DivergedError, StateError, Topology, Work, all_gather_single, control
from zcomm._base.rank_context import clock
from zcomm._transport.call_context import outside_public_call
from zero._gradients.accumulation import SCALED_BACKWARDS, Accumulation
from zero._gradients.bucket_gradients import BucketGrads, InFlight
from zero._gradients.bucket_reduce_scatter import GradientReduceScatter
from zero._gradients.grad_attribute import GradAttributes
from zero._gradients.step_consistency import OTHER_GATHERS, StepFacts
from zero._sharding.bucket import Bucket, master_dtype
from zero._sharding.buffer_pool import BufferPool
from zero._sharding.phases import Phases, in_phase
from zero._sharding.released import ReducedGradient
from zero._storage.gradient_store import GradientStore, rounded
from zero._storage.runtime_part import RuntimePart

logger = logging.getLogger("zero")

MIN_WAIT_S = 10.0
"""The limit is at least this, and ten times the longest wait so far: a slow network is not a deadlock."""


class ReductionWait:
    """Waits for reductions with a limit (G3)."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._has_timed_out = False

    def completes(self, works: Sequence[Work]) -> bool:
        """Whether ``works`` complete within the limit. After a first timeout it does not wait any more."""
        started = clock().monotonic()
        limit_s = 0.0 if self._has_timed_out else max(MIN_WAIT_S, 10 * self._longest_s)
        for work in works:
            if not work.completes_within(max(started + limit_s - clock().monotonic(), 0.0)):
                if not self._has_timed_out:
                    logger.warning(
                        "no reduction has completed for %.0f s; another rank may have no gradient for some parameter "
                        "in this step: from here on this rank keeps the full gradients of more layers instead of "
                        "waiting",
                        limit_s,
                    )
                self._has_timed_out = True
                return False
        self._longest_s = max(self._longest_s, clock().monotonic() - started)
        return True


MAX_IN_FLIGHT = 2  # reductions at a time; each holds a full gradient buffer
# Buckets that are nearly as large as the largest, by this factor, share buffers of one size. The buffers in use at a
# time (in flight, complete, being filled) then waste no more than the extra buffer that a second size would need.
SIMILAR_SIZE = 1 + 1 / (MAX_IN_FLIGHT + 2)


class GradientConsumer:
    """Uses the reduced gradients between backward and step. This one, before there is an optimizer, does nothing."""

    rounds_means = False
    """Whether each mean is rounded to the parameters' dtype, as copies to host memory are."""

    def settle(self) -> None:
        """Multiply held gradients by the factor that a step has used but not applied, before others are added or set.

        Called on this rank alone, so it must not raise, except while an update uses them: then nothing can be set.
        """

    def settled(self, rows: Tensor) -> Tensor:
        """``rows`` of a held gradient as they would be after :meth:`settle`; not changed."""
        return rows

    def last_backward_starts(self) -> None:
        """The last backward of a step starts. Called on this rank alone, so it must not raise."""

    def reduced(self) -> None:
        """A backward has reduced its gradients."""

    def backward_ended(self) -> None:
        """A backward is over, after :meth:`reduced`, if it was called. Called on every rank."""

    def scaler_steps(self) -> None:
        """A GradScaler is about to read the gradients for its step. Called on every rank."""

    def edited(self, own: Tensor) -> None:
        """This rank's part of a reduced gradient was set to ``own`` by a user. Called on every rank."""

    def check_settable(self, name: str) -> None:
        """Raise if it is too late in the step to adopt a gradient that a user set for parameter ``name``."""


class Reducer(RuntimePart):
    """Collects and reduces the gradients of all trainable buckets."""

    def __init__(
        self,
        buckets: list[Bucket],
        reduction: GradientReduceScatter,
        agreeing: Topology,
        pool: BufferPool,
        gathers: Callable[[], int],
        phases: Phases | None = None,
    ) -> None:
        self.phases = phases or Phases()
        # Two sets of process groups: some ranks may still have reductions in flight when others start the agreement. On
        # one group, torch would match the agreement of one rank with a reduction of another.
        self.reduction, self._topology, self._agreeing = reduction, reduction.topology, agreeing
        self._settings, self._effective, self._pool = reduction.settings, reduction.effective, pool
        self._gathers = gathers
        """Returns the checksum of the gathers so far."""
        self._stage = self._effective.stage
        self.all = [self._new(bucket) for bucket in buckets if bucket.is_trainable]
        self.by_bucket = {grads.bucket.index: grads for grads in self.all}
        self._largest = max((grads.bucket.layout.numel for grads in self.all), default=0)
        self._order = list(reversed(self.all))  # G1: about the order of backward
        self._cursor = 0
        self._in_flight: list[InFlight] = []
        self._reduction_wait = ReductionWait()
        self.shown = GradAttributes(self.all, is_full=not self._stage.shards_states)
        self.facts = StepFacts(self.all)
        self.reduces_now = self._reaches_all_nodes = self.ends_step = True
        self.accumulation = Accumulation(
            self._settings.gradient_accumulation_steps, reduces_each=self._stage.reduces_every_micro_batch
        )
        self.consumer = GradientConsumer()
        """Uses the reduced gradients: set once, by the optimizer that is made after this."""
        self.factor = 1.0
        """Multiplies the gradients of backwards whose loss nobody has divided; not those that a user sets (G2)."""
        self.has_cleared = False
        """Whether a user has cleared a gradient since the last reduction."""

    def _new(self, bucket: Bucket) -> BucketGrads:
        dtype = self._settings.gradient_dtype or master_dtype(bucket.dtype)
        full, rows = None, None
        if not self._stage.shards_gradients:
            full = torch.zeros(bucket.layout.numel, dtype=dtype, device=bucket.device)
            rows = bucket.shard_of(full)
        store = bucket.states.new_gradient(bucket.shard_numel, self._mean_dtype(bucket, dtype), dtype, rows)
        grads = BucketGrads(bucket, dtype, store, full=full, rows=rows)
        grads.written, grads.used, grads.reduced = ([False] * len(bucket.params) for _ in range(3))
        grads.shown = [None] * len(bucket.params)
        for slot, param in zip(bucket.layout.slots, bucket.params, strict=True):
            if param.dtype != dtype:
                param.grad_dtype = dtype  # autograd, too, sums a parameter's several uses in it
            grads.stand_ins.append(ReducedGradient.of(slot.name, param, dtype))
        self.reduction.prepare(grads)
        return grads

    def _mean_dtype(self, bucket: Bucket, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which means are copied to the host: that of the exchange, if it sends a plain dtype."""
        wire = self._effective.gradient_formats
        is_exact = wire is not None and "none" in wire and not self._effective.gradient_error
        return dtype if is_exact or bucket.dtype.itemsize >= dtype.itemsize else bucket.dtype

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See :meth:`zero.ZeroOptimizer.no_sync`."""
        try:
            with self.accumulation.no_sync():
                yield
        finally:
            self.facts.is_deferred = True  # also where no backward has run inside, as it may have on other ranks

    def start_backward(self) -> None:
        """A backward starts."""
        self.consumer.settle()
        self._cursor, self.reduces_now = 0, self.accumulation.start_backward()
        self.facts.count(is_deferred=self.accumulation.is_deferred)
        self.ends_step = self.accumulation.is_boundary
        self._reaches_all_nodes = not self.reduction.stays_in_node or self.ends_step
        if self.ends_step and self.reduces_now:  # within no_sync() more backwards follow
            self.consumer.last_backward_starts()
        self._adopt_user_gradients()
        for grads in self.all:
            grads.arrived.clear()
        self.shown.hide()

    def take_gradient(self, grads: BucketGrads, slot: int) -> None:
        """Take the ``.grad`` that autograd has set for parameter number ``slot``, and reduce complete buckets."""
        param = grads.bucket.params[slot]
        grad = param.grad
        if grad is None:
            return
        if self.factor != 1 and not SCALED_BACKWARDS().num_running:
            grad = grad * self.factor
        if grads.num_in_flight and not self._stage.shards_gradients:
            # The exchange in flight reads the buffer, so adding to it would send a mix. Waiting for it could deadlock:
            # another rank may join it only at the end of its backward (G3).
            grads.defer(slot, grad)
        else:
            grads.put(slot, grad, self._writable(grads))
        param.grad = None
        if self.reduces_now and len(grads.arrived) == len(grads.bucket.params):
            self._issue_complete()

    def _writable(self, grads: BucketGrads) -> Tensor:
        if self._stage.shards_gradients:
            if grads.full is None:
                dtype, numel = grads.dtype, grads.bucket.layout.numel
                # With unreduced gradients of no_sync, another rank may have the buffer in the wider dtype already, and
                # all ranks must exchange the same.
                if self.reduces_now and not self.accumulation.holds_unreduced:
                    dtype = self.reduction.travel_dtype(grads)
                room = self._largest if self._largest <= SIMILAR_SIZE * numel else numel
                grads.full = self._pool.take(room, dtype)[:numel]
            return grads.full
        if grads.num_in_flight:
            self._finish([flight for flight in self._in_flight if flight.grads is grads])
        if grads.has_result and not any(grads.written):
            grads.has_result = not grads.store.set_aside()
        assert grads.full is not None, "stages 0 and 1 keep the full gradient buffer"
        return grads.full

    @in_phase("reduce")
    def _issue_complete(self) -> None:
        """Reduce buckets whose gradients have all arrived, but only in the fixed order (G1)."""
        while self._cursor < len(self._order):
            grads = self._order[self._cursor]
            if len(grads.arrived) < len(grads.bucket.params):
                return
            self._cursor += 1
            self._issue(grads)

    @in_phase("reduce")
    def end_backward(self) -> None:
        """Reduce the remaining buckets (G1), wait for all reductions, and set ``.grad`` (G2)."""
        if self.reduces_now:
            self._agree_and_issue_rest()
        self._finish(list(self._in_flight))
        self.accumulation.holds_unreduced &= not self.reduces_now
        self._gather_results()
        self.shown.show()
        if self.reduces_now and self._reaches_all_nodes:
            self.consumer.reduced()

    def _agree_and_issue_rest(self) -> None:
        """Agree on what each rank has used and issued, so that all ranks make the same exchanges (G1)."""
        issued = set(map(id, self._order[: self._cursor]))
        used = [bit for grads in self.all for bit in grads.used]
        all_nodes, has_sums = self._reaches_all_nodes, self.reduction.has_sums
        pending = [grads.has_local or (all_nodes and has_sums(grads)) for grads in self._order]
        late = [id(grads) in issued and bit for grads, bit in zip(self._order, pending, strict=True)]
        digest = 0 if self._topology.world_size == 1 else self.facts.digest(self.shown.edits(), self.ends_step)
        numbers = [self._gathers(), digest, all_nodes, self._cursor]
        smallest, largest, agreed = control.agree(numbers, used + pending + late, self._agreeing)
        same_gathers, same_facts, all_complete, _ = (a == b for a, b in zip(smallest, largest, strict=True))
        # Some ranks reduce over all nodes and some inside the node only: their exchanges have no counterpart, and only
        # the deadlock watch ends them.
        if not all_complete:
            with suppress(DivergedError):
                self._finish(list(self._in_flight))
                control.agree_max(torch.zeros(1, dtype=torch.int64), self._agreeing)
            raise self.facts.divergence(self._topology)
        bits = iter(agreed)
        for grads in self.all:
            grads.used = [next(bits) for _ in grads.used]
            grads.reduced, grads.agreed = list(grads.used), any(grads.used)
        pending, late = [next(bits) for _ in pending], [next(bits) for _ in late]
        self._issue_agreed(pending, late, furthest=largest[-1])
        if not (same_gathers and same_facts):  # only now: an error before this would leave other ranks in an exchange
            self._finish(list(self._in_flight))
        if not same_facts:
            raise self.facts.divergence(self._topology)
        if not same_gathers:
            raise StateError(OTHER_GATHERS)

    def _issue_agreed(self, pending: list[bool], late: list[bool], furthest: int) -> None:
        """Issue every bucket that any rank has to reduce; some ranks have issued buckets up to ``furthest``."""
        for index in range(self._cursor, len(self._order)):
            if index < furthest or pending[index]:  # a rank without these gradients catches up with the others
                self._issue(self._order[index])
        for index in range(furthest):
            if late[index]:  # on some rank a gradient arrived after its bucket was reduced
                self._issue(self._order[index])
        self._cursor = len(self._order)

    def flush(self) -> None:
        """Reduce gradients left by ``no_sync`` or an unfinished accumulation window, or set by a user. Collective."""
        has_adopted = self._adopt_user_gradients(checks=True)
        holds_unreduced = self.accumulation.holds_unreduced or not self.reduces_now
        if has_adopted or holds_unreduced or any(self.reduction.has_sums(one) for one in self.all):
            self.consumer.settle()  # as on ranks that reduce in a backward
            if self.facts.is_deferred:  # it takes the place of the reducing backward that other ranks may run
                self.facts.count(is_deferred=False)
            self._cursor, self.reduces_now, self._reaches_all_nodes, self.ends_step = 0, True, True, True
            with outside_public_call():  # so that its exchanges match those of such a backward
                self.end_backward()

    def _issue(self, grads: BucketGrads) -> None:
        self._limit_in_flight(MAX_IN_FLIGHT)
        full = self._writable(grads)
        grads.complete(full)
        borrowed = [full] if self._stage.shards_gradients else []
        output = None
        if self._reaches_all_nodes:
            # A second exchange of the bucket needs an output of its own: the first may still write to the result.
            output = grads.store.target(is_first=not grads.has_result and not grads.num_in_flight)
            output = grads.rows if output is None and not grads.store.is_on_device else output
        if self._reaches_all_nodes and output is None:
            # Added to the sum, or offloaded, when complete.
            output = self._pool.take(grads.bucket.shard_numel, grads.dtype)
            borrowed.append(output)
        works = self.reduction.start(grads, full, output)
        self._pool.lend(works, *borrowed)
        grads.written = [False] * len(grads.written)
        if self._stage.shards_gradients:
            grads.full = None
        grads.num_in_flight += 1
        self._in_flight.append(InFlight(grads, works, borrowed, output))
        if not self._settings.overlap_comm:
            self._limit_in_flight(1)

    def _limit_in_flight(self, limit: int) -> None:
        """Finish reductions until fewer than ``limit`` are in flight, or the wait times out (G3)."""
        waits_for_others = self._topology.world_size > 1
        while len(self._in_flight) >= limit:
            if waits_for_others and not self._reduction_wait.completes(self._in_flight[0].works):
                return
            self._finish(self._in_flight[:1])

    def _finish(self, flights: list[InFlight]) -> None:
        for flight in flights:
            self._in_flight.remove(flight)
            flight.grads.num_in_flight -= 1
            self._pool.reclaim(flight.works, *flight.borrowed)
            try:
                if (mean := flight.output) is not None:
                    grads = flight.grads
                    if self.consumer.rounds_means and grads.store.is_on_device:
                        mean = rounded(mean, self._mean_dtype(grads.bucket, grads.dtype))
                    grads.store.add(mean)
                    grads.has_result, grads.is_gathered = True, False
            finally:
                for buffer in flight.borrowed:
                    self._pool.give(buffer)

    def _gather_results(self) -> None:
        """Stage 0: gather the full averaged gradient on every rank.

        After all reductions, so that these exchanges have the same order on every rank.
        """
        for grads in self._order:
            if grads.has_result and not grads.is_gathered and not self._stage.shards_states:
                assert grads.full is not None, "stage 0 keeps the full gradient buffer"
                assert grads.rows is not None, "stage 0 keeps this rank's rows of it"
                for start, stop in grads.bucket.layout.chunks(self._settings.reduce_bucket_size):
                    columns = grads.full.view(self._topology.world_size, -1)[:, start:stop]
                    output = grads.full if stop - start == grads.rows.numel() else columns
                    all_gather_single(output, grads.rows[start:stop], self._topology, numbering="local")
                grads.is_gathered = True

    def _adopt_user_gradients(self, *, checks: bool = False) -> bool:
        """G2: adopt what users assigned to ``.grad``; returns whether there are gradients to reduce."""
        changed = self.shown.changed()
        theirs = [one for one in changed if one.grad is not None]
        if theirs and checks:
            self.consumer.check_settable(theirs[0].name)
        if changed:
            self.consumer.settle()
            self.shown.end_edits()
        # Where gradients are summed, too, the mean of what was set counts, unless it replaces this rank's own gradient.
        num_summed = self._topology.world_size if self.reduction.op == "sum" else 1
        parts = [1 if one.grads.written[one.slot] else num_summed for one in theirs]
        for one in changed:
            if one.grads.used[one.slot]:
                self._drop(one.grads, one.slot)
        for one, part in zip(theirs, parts, strict=True):
            assert one.grad is not None, "a gradient that was set"
            grad = one.grad if part == 1 else one.grad / part
            one.grads.put(one.slot, grad, self._writable(one.grads))
        return bool(theirs)

    def _drop(self, grads: BucketGrads, slot: int) -> None:
        grads.drop(slot)
        self.reduction.forget_slot(grads, grads.bucket.layout.slots[slot])
        self.has_cleared = True
        if self._stage.shards_gradients and grads.full is not None and not any(grads.written):
            self._pool.give(grads.full)
            grads.full = None

    def zero(self) -> None:
        """Drop every gradient, and free the buffers that only this step needed."""
        while self._in_flight:
            with suppress(DivergedError):
                self._finish(self._in_flight[:1])
        for grads in self.all:
            grads.has_result, grads.agreed, grads.num_in_flight = False, False, 0
            grads.arrived.clear()
            grads.repeated.clear()
            self.reduction.roll_back(grads)
            grads.store.clear()
            grads.written, grads.used, grads.reduced = ([False] * len(grads.used) for _ in range(3))
            if self._stage.shards_gradients and grads.full is not None:
                self._pool.give(grads.full)
                grads.full = None
        self.shown.forget()
        self.facts.num_backwards, self.facts.is_deferred = 0, False
        self.reduces_now, self.has_cleared, self.reduction.is_unscaled = True, False, False

    def discard_step(self) -> None:
        """Drop all gradients: the next backward is the first of a new step."""
        self.zero()
        self.accumulation.num_started = 0

    def step_ended(self) -> None:
        self.accumulation.num_started = 0
        self.facts.end_step(self.shown.edits())

    def held(self) -> dict[str, int]:
        return {"sums of the node": self.reduction.sums_nbytes}

    def detach_host_sums(self) -> list[GradientStore]:
        """Drop every gradient, but leave those in host memory to the caller: the next step uses other memory.

        Without that, a delayed update would read gradients of the next step.

        Returns:
            The gradients in host memory; the caller clears them before the next call.
        """
        handed: list[GradientStore] = []
        for grads in self.all:
            if (spare := grads.spare or grads.store.new_like()) is not None:
                handed.append(grads.store)
                grads.store, grads.spare = spare, grads.store
        self.zero()
        return handed

    def results(self, grads: BucketGrads, *, wide: bool = False) -> Tensor | None:
        """The reduced gradient: the shard, or at stage 0 all of it. None if no rank used the bucket.

        Args:
            grads: Those of the bucket.
            wide: Convert a gradient in host memory from the parameters' dtype to the dtype of sums.

        Raises:
            StateError: The gradient is not reduced yet.
            OSError: The gradient is in a file, of which this returns a copy, and cannot be read.
        """
        if not any(grads.used):
            return None
        if not grads.has_result:
            raise StateError(
                f"gradients must be reduced before they are used: bucket={grads.bucket.name!r}; run the backward that "
                "ends the step, outside of no_sync(), before"
            )
        return grads.store.values(wide=wide) if self._stage.shards_states else grads.full

    def change(self, grads: BucketGrads, edit: Callable[[Tensor], object]) -> None:
        """Call ``edit`` on the reduced gradient, if there is one, in the dtype of sums."""
        if grads.store.is_in_file and grads.has_result and any(grads.used):
            grads.store.change(edit)
        elif (result := self.results(grads, wide=True)) is not None:
            self.shown.end_edits()
            edit(result)
            self.shown.note_versions()

    @property
    def is_empty(self) -> bool:
        """Whether there are no gradients, or users have cleared all of them."""
        with torch._C.DisableTorchFunctionSubclass():
            held = (zip(grads.used, grads.bucket.params, strict=True) for grads in self.all)
            return not any(used and param.grad is not None for pairs in held for used, param in pairs)
