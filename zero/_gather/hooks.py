"""Module and autograd hooks: when parameters are gathered and released, and when a gradient is taken.

    forward of a module:    acquire its buckets ... release those that nothing else needs
    backward:               a gradient reaches a unit's output -> acquire;  its inputs' gradients are done -> release
    a parameter's gradient: copied into its bucket by autograd's post-accumulate hook

Tensors that autograd saves in the forward go through saved_tensors.py.

torch calls the hook that ends a forward after an Exception, but not after KeyboardInterrupt or SystemExit. So each
running forward is identified by its Python frame: it has ended when that frame is no longer on the stack of its thread.
References to the frame tell nothing: a notebook keeps the traceback, and so the frame (tests/zero/test_interrupts.py).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from zcomm import StateError
from zcomm._base.rank_context import threads
from zcomm._transport.stacks import stacks_of
from zero._gather.gatherer import Gatherer, IterationKind
from zero._gather.saved_tensors import SavedTensors, SavingHooks
from zero._gradients.reducer import Reducer
from zero._sharding.bucket import Bucket, Hold
from zero._sharding.stages import Stage
from zero._sharding.units import Unit, external_parameters, is_compiled, own_parameters
from zero._storage.runtime_part import RuntimePart

HOOKING = frozenset({__name__, "torch._dynamo.eval_frame"})
"""Modules whose frames are hooks or call them."""
FREED_WITHIN_S = 0.1
"""How long the graph of a failed backward may outlive its error."""


def calling_frame() -> FrameType:
    """The innermost frame outside of hooks: it runs the module whose hook calls this."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") in HOOKING and frame.f_back is not None:
        frame = frame.f_back
    return frame


@dataclass(slots=True, eq=False)
class RunningForward:
    """The forward of one module."""

    module: nn.Module
    frame: FrameType
    saving: SavingHooks | None = None
    """The saved-tensor hooks that were pushed when it started."""
    thread: int = field(default_factory=get_ident)

    @property
    def is_here(self) -> bool:
        """Whether this thread runs it."""
        return self.thread == get_ident()

    def is_running(self) -> bool:
        """Whether it is still on its thread's stack. Cost: a walk over the frames above it."""
        if not self.is_here:
            return any(place.frame == id(self.frame) for place in stacks_of((self.thread,)).get(self.thread, []))
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


logger = logging.getLogger("zero")


class RunningBackward:
    """A running backward. Autograd's callback owns it, so an exception that ends the backward frees it, too."""


class LastGradient:
    """A hook on ``count`` tensors that calls ``then`` once a backward has the gradients of all of them.

    torch's multi-grad hook also handles tensors that a backward leaves out, by holding their nodes. That would be a
    reference cycle of the graph: a forward without a backward would keep its activations for good. Here ``then`` is not
    called if one is left out.
    """

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._count, self._then = count, then
        self._num_arrived, self._task = 0, -1

    def __call__(self, grad: Tensor) -> None:  # noqa: ARG002
        task = torch._C._current_graph_task_id()
        self._num_arrived = self._num_arrived + 1 if task == self._task else 1
        self._task = task
        if self._num_arrived == self._count:
            self._then()


class Hooks(RuntimePart):
    """The hooks on one model.

    Args:
        gatherer: Gathers its parameters.
        reducer: Reduces its gradients.
        stage: Below 3 only gradients are hooked.
    """

    def __init__(self, gatherer: Gatherer, reducer: Reducer, stage: Stage) -> None:
        self._gatherer, self._reducer = gatherer, reducer
        self._shards_parameters = stage.shards_parameters
        self._buckets_of: dict[nn.Module, list[Bucket]] = {}
        self._unit_modules: set[nn.Module] = set()
        self._within: dict[nn.Module, set[nn.Module]] = {}
        """By unit, the modules within it that need no more than it gathers."""
        self._forwards: list[RunningForward] = []
        """Outermost first."""
        self._entering = threads().Lock()
        self._mode = IterationKind.INFERENCE
        """The mode of the outermost running forward."""
        self._backward: ReferenceType[RunningBackward] | None = None
        self._ignores_inference = False
        self._saved = SavedTensors(gatherer, self._start_backward)
        self._handles: list[Any] = []
        self._arrivals: list[tuple[dict[int, Any], int]] = []
        """For each trainable parameter, its post-accumulate hooks, and the id of the one that takes its gradient."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Hooks:
        """A copy of the model shares these hooks, which ignore its modules."""
        return self

    def install(self, model: nn.Module, units: list[Unit], buckets_of_unit: list[list[Bucket]]) -> None:
        """Hook ``model``; ``buckets_of_unit[i]`` are the buckets of ``units[i]``."""
        for grads in self._reducer.all:
            for slot, param in enumerate(grads.bucket.params):
                self._hook_gradient(param, grads.bucket.index, slot)
        if not self._shards_parameters:
            return
        for unit, buckets in zip(units, buckets_of_unit, strict=True):
            self._buckets_of[unit.module] = list(buckets)
            self._unit_modules.add(unit.module)
        owner = {param: bucket for buckets in buckets_of_unit for bucket in buckets for param in bucket.params}
        # The whole model is divided also if it is compiled, so its graph breaks at each of its units.
        whole = {unit.module for unit in units if is_compiled(unit.module)} - ({model} if len(units) > 1 else set())
        inlined = {m for module in whole for m in module.modules()}
        for module in model.modules():
            if module in inlined - self._unit_modules and not external_parameters(module):
                continue  # its unit gathers it; a hook would only break the compiled graph
            known = self._buckets_of.setdefault(module, [])
            direct = [owner[param] for _, param in own_parameters(module) if param in owner]
            direct += [owner[param] for param in external_parameters(module) if param in owner]
            known.extend(b for b in dict.fromkeys(direct) if b not in known)
        self._buckets_of = {m: buckets for m, buckets in self._buckets_of.items() if buckets or m is model}
        for module in self._buckets_of:
            self._hook_module(module)
        for unit_module in self._unit_modules & self._buckets_of.keys():
            gathered = set(self._buckets_of[unit_module])
            self._within[unit_module] = {
                module
                for module in unit_module.modules()
                if module not in self._unit_modules and gathered.issuperset(self._buckets_of.get(module, ()))
            }

    def declare_use(self, module: nn.Module, bucket: Bucket) -> None:
        """Gather ``bucket`` for ``module``'s forward, too."""
        if not self._shards_parameters:
            return
        if module not in self._buckets_of:
            self._buckets_of[module] = []
            self._hook_module(module)
        self._add(module, bucket)

    def _add(self, module: nn.Module, bucket: Bucket) -> bool:
        """Have the forward of ``module`` gather ``bucket``; whether it did not before."""
        if bucket in self._buckets_of[module]:
            return False
        for within in self._within.values():  # first: an interrupt must not leave a module there that gathers more
            within.discard(module)
        self._buckets_of[module].append(bucket)
        return True

    def use(self, bucket: Bucket, name: str) -> bool:
        """Gather ``bucket`` for the innermost running forward, now and in later ones; False if none is running.

        That is the unit's, if the module within it gathers nothing by itself.
        """
        if not self._forwards:
            return False
        module = self._forwards[-1].module
        if self._gatherer.is_log_rank:
            text = "%r is used by the forward of a %s that does not own it: gathered for it from here on"
            logger.info(text, name, type(module).__name__)
        if self._add(module, bucket):
            bucket.hold(Hold.FORWARD)
        self._gatherer.acquire(bucket, self._mode)
        return True

    def keep(self, handles: Iterable[Any]) -> None:
        """Have :meth:`close` remove these handles, too."""
        self._handles += handles

    def close(self) -> None:
        """Remove all hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._arrivals.clear()
        for forward in self._forwards:
            if forward.is_here and not forward.is_running():
                self._saved.stop(forward.saving)

    def recover(self) -> None:
        """Forget forwards and a backward that an exception or interrupt ended, with its partial gradients.

        torch runs the hooks that end a forward only after an Exception, and none that end a backward.
        """
        if self._forwards and not self._forwards[-1].is_running():
            while self._forwards and not self._forwards[-1].is_running():
                self._end_forward(self._forwards.pop(), None)
            if not self._forwards and (self._backward is None or self._backward() is None):
                self._gatherer.release_all(but_access=True)
        running = self._backward
        if running is not None and running() is None:
            self._backward = None
            logger.warning("a backward ended with an exception: gradients since the last zero_grad() are dropped")
            self.abort_step()

    def abort_step(self) -> None:
        """Drop the gradients of a step that was interrupted, and release what is gathered."""
        self._reducer.discard_step()
        self._reducer.accumulation.num_aborted += 1
        self._gatherer.release_all(but_access=True)
        self._gatherer.abandon_iteration(IterationKind.TRAINING)

    def saving(self) -> AbstractContextManager[None]:
        """Within the block, autograd saves no views of gathered parameters; below stage 3 this does nothing."""
        return self._saved.saving() if self._shards_parameters else nullcontext()

    @contextmanager
    def ignoring_inference(self) -> Iterator[None]:
        """Within the block, forwards without gradients gather nothing: the caller holds what they use."""
        before, self._ignores_inference = self._ignores_inference, True
        try:
            yield
        finally:
            self._ignores_inference = before

    def _hook_gradient(self, param: nn.Parameter, bucket: int, slot: int) -> None:
        # Weakly: Python's garbage collector does not look into these hooks. With a strong reference to this object,
        # which refers to the parameter, neither would be freed before the optimizer is closed.
        own = ref(self)

        def after(param: Tensor) -> None:  # noqa: ARG001
            if (hooks := own()) is not None:
                hooks._gradient_arrived(bucket, slot)

        arrival = param.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
        self._arrivals.append((arrival.hooks_dict_ref(), arrival.id))
        self._handles += [param.register_hook(self._start_backward), arrival]  # type: ignore[no-untyped-call]

    def _gradient_arrived(self, bucket: int, slot: int) -> None:
        grads = self._reducer.by_bucket[bucket]
        num_before = len(grads.arrived)
        self._reducer.take_gradient(grads, slot)
        if num_before < len(grads.arrived) == len(grads.written):
            self._end_of_use_in_backward([grads.bucket])

    def _hook_module(self, module: nn.Module) -> None:
        # Dynamo must not trace the hooks: it would bake this iteration's decisions into the compiled graph. A call that
        # is not traced costs 1.3 us.
        disable: Callable[[Any], Any] = torch.compiler.disable
        before, after = disable(self._before_forward), disable(self._after_forward)
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module not in self._buckets_of or (self._ignores_inference and not torch.is_grad_enabled()):
            return
        if self._is_within_running(module) and self._forwards[-1].is_running() and self._saved.are_on_top():
            return  # its unit has gathered what it needs: so it is for most modules of a transformer
        is_in_backward = torch._C._current_graph_task_id() != -1
        is_recomputing = torch.is_grad_enabled() and is_in_backward
        forward = RunningForward(module, calling_frame())
        with self._entering:  # two threads must not both find the model unused, and start
            self.recover()
            self._check_thread(is_in_backward=is_in_backward)
            self._forwards.append(forward)
        if len(self._forwards) == 1:
            self._unpin()
            is_training = is_recomputing or (torch.is_grad_enabled() and module.training)
            self._mode = IterationKind.TRAINING if is_training else IterationKind.INFERENCE
            self._gatherer.abandon_iteration(IterationKind.INFERENCE)
        forward.saving = self._saved.start()
        if is_recomputing:  # under activation checkpointing
            self._start_backward()
        for bucket in self._buckets_of[module]:
            bucket.hold(Hold.FORWARD)
            if is_recomputing:
                bucket.hold(Hold.BACKWARD)
            self._gatherer.acquire(bucket, self._mode)
        if module in self._unit_modules and torch.is_grad_enabled():
            # Not leaves: those outlive the step, and would collect one hook per step.
            inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.grad_fn is not None]
            if inputs:
                buckets = self._buckets_of[module]
                last = LastGradient(len(inputs), lambda: self._end_of_use_in_backward(buckets))
                for tensor in inputs:
                    tensor.register_hook(last)  # type: ignore[no-untyped-call]

    def _is_within_running(self, module: nn.Module) -> bool:
        """Whether the innermost running forward is that of a unit which gathers all that ``module`` needs."""
        for top in self._forwards[-1:]:
            return top.is_here and module in self._within.get(top.module, ())
        return False

    def _unpin(self) -> None:
        for bucket in self._gatherer.by_storage.copy().values():
            if bucket.is_held(Hold.VIEW):
                bucket.drop(Hold.VIEW)
                self._gatherer.release_if_unneeded(bucket)

    def _check_thread(self, *, is_in_backward: bool) -> None:
        """Refuse a forward while another thread uses the model.

        The threads of autograd's engine may: they work for a thread that waits for them.
        """
        is_taken = not self._forwards[-1].is_here if self._forwards else self._backward is not None
        if is_taken and not is_in_backward and not self._failed_backward_is_freed():
            raise StateError(
                "two threads use one model at stage 3 at a time, and would release parameters that the other needs: "
                "put a lock around forward and backward"
            )

    def _failed_backward_is_freed(self) -> bool:
        """Whether the backward that takes the model has failed, and its graph is freed within ``FREED_WITHIN_S``.

        With a GPU a thread of autograd's engine frees it, and needs the GIL for that. A backward that ends by itself
        meanwhile is another thread's, and still waits for its exchanges.
        """
        running, end = self._backward, time.monotonic() + FREED_WITHIN_S
        if self._forwards or running is None:
            return False
        while self._backward is running and running() is not None and time.monotonic() < end:
            time.sleep(1e-3)
        if self._backward is not running or running() is not None:
            return False
        self.recover()
        return self._backward is None

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        if self._is_within_running(module):
            self._hold_views(output)
            return
        if output is not None and self._forwards and self._forwards[-1].module is not module:
            self.recover()  # the module has caught an interrupt of a forward within it
        if not self._forwards or self._forwards[-1].module is not module or not self._forwards[-1].is_here:
            return  # another hook raised before ours; or this is a copy of the model
        self._end_forward(self._forwards[-1], output)
        self._forwards.pop()
        if not self._forwards and output is not None:
            if self._mode is IterationKind.INFERENCE:
                self._gatherer.end_iteration(IterationKind.INFERENCE)
            if torch._C._current_graph_task_id() == -1:
                self._gatherer.agree()

    def _hold_views(self, output: Any) -> list[Tensor]:
        """Hold the bucket of a parameter, or a view of one, that leaves its module; returns the tensors of ``output``.

        A release would invalidate it, and it may go where the output of its unit does not show it.
        """
        leaves = [output] if isinstance(output, Tensor) else tree_leaves(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if (aliased := self._saved.bucket_under(tensor)) is not None:
                aliased.hold(Hold.VIEW)
        return tensors

    def _end_forward(self, forward: RunningForward, output: Any) -> None:
        """``output``: None after an exception."""
        if forward.is_here:
            self._saved.stop(forward.saving)
        module = forward.module
        buckets = self._buckets_of[module]
        # An embedding's backward uses only indices. If a user's hook has saved the weight, unpacking it gathers it.
        needs_parameters = module in self._unit_modules and type(module) is not nn.Embedding
        uses_in_backward = needs_parameters and torch.is_grad_enabled()
        for tensor in self._hold_views(output):
            if uses_in_backward and tensor.requires_grad:
                tensor.register_hook(lambda _: self._start_of_use_in_backward(buckets))  # type: ignore[no-untyped-call]
        for bucket in buckets:
            bucket.drop(Hold.FORWARD)
            self._gatherer.release_if_unneeded(bucket, may_keep=output is not None)

    def _start_backward(self, _: Tensor | None = None) -> None:
        """Note that a backward is running. It is itself the hook of each parameter, which passes a gradient."""
        if self._backward is not None and self._backward() is not None and not self._forwards:
            return  # it is running: every gradient comes here
        self.recover()
        if self._backward is None:
            running = RunningBackward()
            self._backward = ref(running)
            Variable._execution_engine.queue_callback(partial(self._end_backward, running))
            for hooks, ours in self._arrivals:
                # Ours takes the gradient away, so hooks that users added after it would find none: make it the last.
                if len(hooks) > 1:
                    hooks[ours] = hooks.pop(ours)  # autograd does not notice move_to_end()
            self._reducer.start_backward()

    def _start_of_use_in_backward(self, buckets: list[Bucket]) -> None:
        self._start_backward()
        for bucket in buckets:
            bucket.hold(Hold.BACKWARD)
            self._gatherer.acquire(bucket, IterationKind.TRAINING)

    def _end_of_use_in_backward(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            bucket.drop(Hold.BACKWARD)
            self._gatherer.release_if_unneeded(bucket)

    def _end_backward(self, running: RunningBackward) -> None:  # noqa: ARG002  (kept alive by being an argument)
        self._backward = None
        self._gatherer.end_backward()
        try:
            self._reducer.end_backward()
            self._reducer.consumer.backward_ended()
            self._gatherer.agree()
        except BaseException:
            self.abort_step()
            raise
        self._end_of_use_in_backward(list(self._gatherer.by_storage.values()))
