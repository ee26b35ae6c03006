"""Gradients: out of autograd into a bucket's buffer, averaged over the ranks, summed over micro-batches.

    autograd's .grad --copy or add--> full buffer --reduce-scatter (mean)--> shard += mean           stages 2, 3
                                       (below stage 2 the shard is the buffer's own rows; stage 0 gathers them)
                                                                 shard --bucket by bucket--> host or file   offloaded

Invariants:
    G1  Buckets are reduced in one fixed order on every rank, whatever the order in which their gradients arrive, so
        exchanges match even where ranks use different parameters. At the end of a backward the ranks agree on which
        parameters anybody used; a bucket that nobody used is not exchanged.
    G2  ``.grad`` of a parameter is set exactly while this optimizer holds a gradient for it. Whatever else is there is
        a user's, on every rank: None drops what is held, a tensor replaces it, and is averaged over the ranks as if a
        backward had left it. A rank that has none adds zeros, unless it holds what others have replaced.

Waiting for other ranks' part of an exchange, without waiting for ever where they wait for this rank.

A rank that has no gradient for a parameter reduces its bucket only at the end of backward. Until then it needs what the
other ranks gather (stage 3), and there it waits for all of them: they must not stop for that reduction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from zcomm import DivergedError, StateError, Topology, Work, all_gather_single, control
from zcomm._transport.call_context import in_no_call
from zero._config.settings import Effective, ZeroSettings
from zero._gradients.bucket_gradients import BucketGrads, InFlight
from zero._gradients.grad_attribute import ShownGradients, check_dense
from zero._gradients.reduction import Reduction, commit, forget_slot, roll_back
from zero._gradients.step_consistency import OTHER_GATHERS, StepFacts
from zero._optim.gradient_files import FileGradient, GradientFiles
from zero._sharding.bucket import Bucket, master_dtype
from zero._sharding.buffer_pool import BufferPool
from zero._sharding.released import ReducedGradient
from zero._storage.host_gradient import HostGradient

logger = logging.getLogger("zero")

PATIENCE_S = 10.0
"""And ten times the longest wait so far: a slow network is no reason to go on."""


class Patience:
    """Of one rank."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._is_lost = False

    def lasts(self, works: Sequence[Work]) -> bool:
        """Whether ``works`` end before it is lost. Once it is, nothing is waited for any more."""
        started = time.perf_counter()
        limit_s = 0.0 if self._is_lost else max(PATIENCE_S, 10 * self._longest_s)
        for work in works:
            if not work.completes_within(max(started + limit_s - time.perf_counter(), 0.0)):
                self._lose(limit_s)
                return False
        self._longest_s = max(self._longest_s, time.perf_counter() - started)
        return True

    def _lose(self, after_s: float) -> None:
        if not self._is_lost:
            self._is_lost = True
            logger.warning(
                "no reduction has ended for %.0f s, as if another rank has no gradient for some parameter in this "
                "step: from here on this rank keeps the full gradients of as many layers as it takes",
                after_s,
            )


MAX_IN_FLIGHT = 2  # reductions under way at once; each holds a full gradient buffer
# Buckets that are no smaller than the largest by more get buffers that any of them can have. All that are out at once,
# in flight, complete and being filled, then waste no more than the one buffer more that another size would take.
MUCH_THE_SAME = 1 + 1 / (MAX_IN_FLIGHT + 2)


class Reducer:
    """Collects and reduces the gradients of all trainable buckets."""

    def __init__(
        self,
        buckets: list[Bucket],
        topologies: tuple[Topology, Topology],
        settings: ZeroSettings,
        effective: Effective,
        pool: BufferPool,
        gathers: Callable[[], int],
        files: GradientFiles | None = None,
    ) -> None:
        # Reductions may be ahead on some ranks when the others agree on what is left: two sets of process groups.
        self._topology, self._agreeing = topologies
        self._settings, self._effective, self._pool = settings, effective, pool
        self._gathers, self._files = gathers, files
        """The checksum of the gathers so far."""
        self._stage, self.reduction = effective.stage, Reduction(topologies[0], settings, effective)
        self.all = [self._new(bucket) for bucket in buckets if bucket.is_trainable]
        self.by_bucket = {grads.bucket.index: grads for grads in self.all}
        self._largest = max((grads.bucket.layout.numel for grads in self.all), default=0)
        self._order = list(reversed(self.all))  # G1: about the order of backward
        self._cursor = 0
        self._in_flight: list[InFlight] = []
        self._patience = Patience()
        self.shown = ShownGradients(self.all, is_whole=not self._stage.shards_states)
        self.facts = StepFacts(self.all)
        self.reduces_now = self._completes = self.ends_step = True
        self.holds_unreduced = False
        """Whether any rank may hold gradients that ``no_sync`` left it with; the same on every rank."""
        self.is_last: Callable[[], bool] = lambda: True
        """Whether the running backward is the last of a step."""
        self.rounds_means = False
        """Whether each mean is rounded to the parameters' dtype, as it is on its way to host memory."""
        self.on_reduced: Callable[[], None] = lambda: None
        """Called when a backward has reduced."""
        self.on_edit: Callable[[Tensor], None] = lambda _values: None
        """Called with what this rank has set of a reduced gradient, on every rank."""
        self.check_settable: Callable[[str], None] = lambda _name: None
        """Raises if a gradient that a user gave this parameter cannot be taken in any more."""
        self.drops = False
        """Whether a user has cleared a gradient since the last was reduced."""

    def _new(self, bucket: Bucket) -> BucketGrads:
        dtype = self._settings.gradient_dtype or master_dtype(bucket.dtype)
        grads = BucketGrads(bucket, dtype)
        grads.written, grads.used, grads.reduced = ([False] * len(bucket.params) for _ in range(3))
        grads.shown = [None] * len(bucket.params)
        for slot, param in zip(bucket.layout.slots, bucket.params, strict=True):
            if param.dtype != dtype:
                param.grad_dtype = dtype  # autograd, too, sums a parameter's several uses in it
            grads.stand_ins.append(ReducedGradient.of(slot.name, param.shape, dtype, param.device))
        shard_numel = bucket.layout.shard_numel
        if self._files is not None and bucket in self._files.groups_of:
            grads.host = self._files.new(bucket, self._mean_dtype(grads), dtype)
        elif bucket.host is not None:
            grads.host = HostGradient(shard_numel, self._mean_dtype(grads), dtype, bucket.host)
        if self._stage.shards_gradients:
            if grads.host is None:
                grads.result = torch.zeros(shard_numel, dtype=dtype, device=bucket.device)
        else:
            grads.full = torch.zeros(bucket.layout.numel, dtype=dtype, device=bucket.device)
            grads.result = self._own_rows(grads, grads.full)
        self.reduction.prepare(grads)
        return grads

    def _mean_dtype(self, grads: BucketGrads) -> torch.dtype:
        """The dtype that means come to the host in: the one they have between the ranks, if that is a dtype."""
        wire, dtype = self._effective.gradient_formats, grads.bucket.dtype
        is_exact = wire is not None and "none" in wire
        return grads.dtype if is_exact or dtype.itemsize >= grads.dtype.itemsize else dtype

    def _own_rows(self, grads: BucketGrads, full: Tensor) -> Tensor:
        start = self._topology.shard_index("local") * grads.bucket.layout.shard_numel
        return full[start : start + grads.bucket.layout.shard_numel]

    def begin_backward(self, *, reduces_now: bool) -> None:
        """A backward starts; ``reduces_now`` is False within ``no_sync`` and accumulation windows."""
        self._cursor, self.reduces_now = 0, reduces_now
        self.holds_unreduced |= not reduces_now
        self.ends_step = self.is_last()
        self._completes = not self.reduction.stays_in_node or self.ends_step
        self._take_in()
        for grads in self.all:
            grads.arrived.clear()
        self.shown.hide()

    def arrive(self, grads: BucketGrads, slot: int) -> None:
        """Autograd has set ``.grad`` of parameter number ``slot``: take it over, and reduce what is complete."""
        param = grads.bucket.params[slot]
        grad = param.grad
        if grad is None:
            return
        check_dense(grad, grads.bucket.layout.slots[slot].name)
        if not self._stage.shards_gradients and self._is_in_flight(grads):
            # Its exchange reads the buffer, and may wait for a rank that waits for this one at the end of backward.
            grads.put_aside(slot, grad)
        else:
            grads.put(slot, grad, self._writable(grads))
        param.grad = None
        if self.reduces_now:
            self._issue_complete()

    def _is_in_flight(self, grads: BucketGrads) -> bool:
        return any(flight.grads is grads for flight in self._in_flight)

    def _writable(self, grads: BucketGrads) -> Tensor:
        if self._stage.shards_gradients:
            if grads.full is None:
                dtype, numel = grads.dtype, grads.bucket.layout.numel
                if self.reduces_now and not self.holds_unreduced:  # else a rank may have it in full width already
                    dtype = self.reduction.travel_dtype(grads)
                room = self._largest if self._largest <= MUCH_THE_SAME * numel else numel
                grads.full = self._pool.take(room, dtype)[:numel]
            return grads.full
        self._finish([flight for flight in self._in_flight if flight.grads is grads])
        if grads.has_result and not any(grads.written) and grads.host is None:
            assert grads.result is not None, "a result without a tensor"
            grads.carry, grads.has_result = grads.result.clone(), False
        assert grads.full is not None, "stages 0 and 1 keep the full gradient buffer"
        return grads.full

    def _issue_complete(self) -> None:
        while self._cursor < len(self._order):
            grads = self._order[self._cursor]
            if len(grads.arrived) < len(grads.bucket.params):
                return
            self._cursor += 1
            self._issue(grads)

    def end_backward(self) -> None:
        """Reduce what is left (G1), wait for all of it, and show in ``.grad`` that there are gradients (G2)."""
        if self.reduces_now:
            self._agree_and_issue_rest()
        self._finish(list(self._in_flight))
        self.holds_unreduced &= not self.reduces_now
        self._gather_results()
        self.shown.show()
        if self.reduces_now and self._completes:
            self.on_reduced()

    def _agree_and_issue_rest(self) -> None:
        """Bring all ranks to the same exchanges (G1), by one agreement on what each has used, issued and not issued."""
        issued = set(map(id, self._order[: self._cursor]))
        used = [int(bit) for grads in self.all for bit in grads.used]
        pending = [int(grads.has_local or (self._completes and grads.has_sums)) for grads in self._order]
        late = [bit if id(grads) in issued else 0 for grads, bit in zip(self._order, pending, strict=True)]
        is_alone = self._topology.world_size == 1
        digest = 0 if is_alone else self.facts.digest(self.shown.edits(), self.ends_step)
        same = [self._gathers(), digest, int(self._completes)]
        agreed = [*same, *(-value for value in same), *used, *pending, *late, self._cursor]
        if not is_alone:
            agreed = control.agree_max(torch.tensor(agreed, dtype=torch.int64), self._agreeing).tolist()
        bits = iter(agreed)
        largest, smallest = [next(bits) for _ in same], [-next(bits) for _ in same]
        same_gathers, same_facts, all_complete = (a == b for a, b in zip(largest, smallest, strict=True))
        if not all_complete:  # some are in exchanges that the others do not have: the watch ends them
            with suppress(DivergedError):
                self._finish(list(self._in_flight))
                control.agree_max(torch.zeros(1, dtype=torch.int64), self._agreeing)
            raise self.facts.refuse(self._topology)
        for grads in self.all:
            grads.used = [bool(next(bits)) for _ in grads.used]
            grads.reduced, grads.agreed = list(grads.used), any(grads.used)
        pending, late = [next(bits) for _ in pending], [next(bits) for _ in late]
        furthest = next(bits)
        self._issue_agreed(pending, late, furthest)
        if not (same_gathers and same_facts):  # only now: no exchange may be left without its other side
            self._finish(list(self._in_flight))
        if not same_facts:
            raise self.facts.refuse(self._topology)
        if not same_gathers:
            raise StateError(OTHER_GATHERS)

    def _issue_agreed(self, pending: list[int], late: list[int], furthest: int) -> None:
        """Issue what any rank has to reduce; some have issued buckets up to ``furthest``."""
        for index in range(self._cursor, len(self._order)):
            if index < furthest or pending[index]:  # a rank whose gradients did not come catches up with the others
                self._issue(self._order[index])
        for index in range(furthest):
            if late[index]:  # a gradient came, on some rank, after its bucket was reduced
                self._issue(self._order[index])
        self._cursor = len(self._order)

    def flush(self) -> None:
        """Reduce what ``no_sync`` or an unfinished accumulation window left, or a user set. Same on every rank."""
        if self._take_in(checks=True) or not self.reduces_now or any(grads.has_sums for grads in self.all):
            if self.facts.is_deferred:  # it stands for the backward that reduces, which other ranks may have
                self.facts.count(is_deferred=False)
            self._cursor, self.reduces_now, self._completes, self.ends_step = 0, True, True, True
            with in_no_call():  # so that its exchanges meet those of that backward
                self.end_backward()

    def _issue(self, grads: BucketGrads) -> None:
        self._make_room(MAX_IN_FLIGHT)
        layout, full = grads.bucket.layout, self._writable(grads)
        grads.complete(full)
        borrowed = [full] if self._stage.shards_gradients else []
        output = grads.result if self._completes else None
        # A gradient that came again is exchanged while the bucket's first exchange may still write its result.
        is_second = grads.has_result or self._is_in_flight(grads)
        if self._completes and (output is None or (is_second and grads.host is None)):
            output = self._pool.take(layout.shard_numel, grads.dtype)  # added to a sum, or sent on, when it has come
            borrowed.append(output)
        works = self.reduction.start(grads, full, output)
        self._pool.lend(works, *borrowed)
        grads.written = [False] * len(grads.written)
        if self._stage.shards_gradients:
            grads.full = None
        self._in_flight.append(InFlight(grads, works, borrowed, output))
        if not self._settings.overlap_comm:
            self._make_room(1)

    def _make_room(self, limit: int) -> None:
        """Finish reductions until fewer than ``limit`` are under way."""
        # A rank without a gradient for some bucket reduces it at the end of backward only, and waits there for all.
        waits_for_others = self._topology.world_size > 1
        while len(self._in_flight) >= limit:
            if waits_for_others and not self._patience.lasts(self._in_flight[0].works):
                return
            self._finish(self._in_flight[:1])

    def _finish(self, flights: list[InFlight]) -> None:
        for flight in flights:
            self._in_flight.remove(flight)
            self._pool.reclaim(flight.works, *flight.borrowed)
            try:
                if flight.output is not None:
                    self._take_mean(flight.grads, flight.output)
                    flight.grads.has_result, flight.grads.is_gathered = True, False
            finally:
                for buffer in flight.borrowed:
                    self._pool.give(buffer)

    def _take_mean(self, grads: BucketGrads, mean: Tensor) -> None:
        """Add ``mean`` to the sum."""
        if grads.host is not None:
            grads.host.add(mean)
            return
        assert grads.result is not None, "a reduction without a place for its result"
        if self.rounds_means and self._mean_dtype(grads) != mean.dtype:
            mean.copy_(mean.to(self._mean_dtype(grads)))
        if mean is not grads.result:
            grads.result.add_(mean)
        if grads.carry is not None:
            grads.result.add_(grads.carry)
            grads.carry = None

    def _gather_results(self) -> None:
        """Stage 0: every rank gets the whole averaged gradient. After all reductions: in one order on all ranks."""
        for grads in self._order:
            if grads.has_result and not grads.is_gathered and not self._stage.shards_states:
                assert grads.full is not None, "stage 0 keeps the full gradient buffer"
                assert grads.result is not None, "a reduction without a place for its result"
                for start, stop in grads.bucket.layout.chunks(self._settings.reduce_bucket_size):
                    columns = grads.full.view(self._topology.world_size, -1)[:, start:stop]
                    whole = grads.full if stop - start == grads.result.numel() else columns
                    all_gather_single(whole, grads.result[start:stop], self._topology, numbering="local")
                grads.is_gathered = True

    def _take_in(self, *, checks: bool = False) -> bool:
        """G2: what users have made of ``.grad``; whether there are gradients of theirs, which are to be reduced."""
        changed = self.shown.changed()
        theirs = [(one.grads, one.slot, one.grad, one.name) for one in changed if one.grad is not None]
        if theirs and checks:
            self.check_settable(theirs[0][3])
        if changed:
            self.shown.end_edits()
        for one in changed:
            if one.grads.used[one.slot]:
                self._drop(one.grads, one.slot)
        for grads, slot, grad, _ in theirs:
            grads.put(slot, grad, self._writable(grads))
        return bool(theirs)

    def _drop(self, grads: BucketGrads, slot: int) -> None:
        grads.drop(slot, self._topology.shard_index("local"))
        forget_slot(grads, grads.bucket.layout.slots[slot])
        self.drops = True
        if self._stage.shards_gradients and grads.full is not None and not any(grads.written):
            self._pool.give(grads.full)
            grads.full = None

    def zero(self) -> None:
        """Forget every gradient. Frees what only this step needed."""
        while self._in_flight:
            with suppress(DivergedError):
                self._finish(self._in_flight[:1])
        for grads in self.all:
            grads.has_result, grads.agreed, grads.carry = False, False, None
            grads.arrived.clear()
            grads.repeated.clear()
            roll_back(grads)
            if grads.host is not None:
                grads.host.clear()
            grads.written, grads.used, grads.reduced = ([False] * len(grads.used) for _ in range(3))
            if self._stage.shards_gradients and grads.full is not None:
                self._pool.give(grads.full)
                grads.full = None
        self.shown.forget()
        self.facts.num_backwards, self.facts.is_deferred = 0, False
        self.reduces_now, self.drops, self.reduction.is_unscaled = True, False, False

    def commit(self) -> None:
        """The step is applied: what exchanges have lost counts in the next ones."""
        commit(self.all)

    def hand_off(self) -> list[HostGradient]:
        """Forget every gradient, but leave what rests in host memory to whoever has it: the next have other memory.

        Returns:
            What must be cleared before gradients are handed off again.
        """
        handed: list[HostGradient] = []
        for grads in self.all:
            if isinstance(grads.host, HostGradient):
                handed.append(grads.host)
                grads.host, grads.spare = grads.spare or grads.host.another(), grads.host
        self.zero()
        return handed

    def results(self, grads: BucketGrads, *, wide: bool = False) -> Tensor | None:
        """The reduced gradient at rest: the shard, at stage 0 the whole. None if no rank used any of the bucket.

        In host memory it may rest in the parameters' dtype; ``wide`` brings it to the dtype of sums. Of what rests in a
        file this is a copy: OSError if it cannot be read.
        """
        if not any(grads.used):
            return None
        if not grads.has_result:
            raise StateError(f"gradients of bucket {grads.bucket.name!r} were used before they were reduced")
        if grads.host is not None:
            return grads.host.values(wide=wide)
        return grads.result if self._stage.shards_states else grads.full

    def change(self, grads: BucketGrads, edit: Callable[[Tensor], object]) -> None:
        """Let ``edit`` write to the reduced gradient, if there is one, in the dtype of sums."""
        if isinstance(grads.host, FileGradient) and grads.has_result and any(grads.used):
            grads.host.change(edit)
        elif (result := self.results(grads, wide=True)) is not None:
            with self.shown.writing():
                edit(result)

    @property
    def is_empty(self) -> bool:
        """Whether no gradient is held, or none that a user has not cleared."""
        with torch._C.DisableTorchFunctionSubclass():
            held = (zip(grads.used, grads.bucket.params, strict=True) for grads in self.all)
            return not any(used and param.grad is not None for pairs in held for used, param in pairs)
