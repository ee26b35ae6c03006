"""KeyboardInterrupt and SystemExit anywhere in a step: no context stays entered, no gradient counts twice. And threads.

torch calls the hooks that end a forward after an Exception only, so the library recognizes interrupted forwards by the
calls that still run.
"""

# covers zero/_activations/routing.py zero/_activations/scope.py

from __future__ import annotations

import linecache
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.ranks import run_ranks
from tests.zero.training import zero_optimizer
from zcomm import StateError
from zero import GatheredParameters

WIDTH = 6
INTERRUPTS: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit)
REFUSED = "an earlier step failed after some parameters were updated"


class _Interrupted(nn.Module):
    """Raises once, when told to, in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.then: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        then, self.then = self.then, lambda: None
        then()
        return torch.tanh(y)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(_Interrupted(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.catches = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            try:
                x = layer(x)
            except INTERRUPTS:
                if not self.catches:
                    raise
        return x


def _new() -> _Model:
    torch.manual_seed(0)
    return _Model().double()


def _loss(model: nn.Module, scale: float = 1.0) -> Tensor:
    x = torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH) * scale
    loss: Tensor = model(x).square().mean()
    return loss


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def _values(model: nn.Module) -> list[Tensor]:
    with GatheredParameters(model.parameters()):
        return [param.detach().clone() for param in model.parameters()]


def _assert_same(model: nn.Module, plain: nn.Module) -> None:
    for got, expected in zip(_values(model), plain.parameters(), strict=True):
        torch.testing.assert_close(got, expected.detach(), rtol=0, atol=1e-12)


def _assert_nothing_entered(optimizer: Any) -> None:
    runtime = optimizer.parts.runtime
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not any(bucket.is_held() for bucket in runtime.buckets)
    if runtime.stage.shards_parameters:
        assert all(bucket.state.value == "sharded" for bucket in runtime.buckets)


def _raising(kind: type[BaseException]) -> Callable[[], None]:
    def fail() -> None:
        raise kind

    return fail


def _step(loss: Tensor, optimizer: Any) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _check_forward(rank: int, stage: int) -> None:
    model, plain = _new(), _new()
    reference = _sgd(plain)
    with zero_optimizer(model, _sgd(model), stage=stage) as optimizer:
        tracebacks = []
        for kind in INTERRUPTS:
            for around in (torch.enable_grad, torch.no_grad, torch.autograd.graph.save_on_cpu):
                model.layers[1][0].then = _raising(kind)
                with pytest.raises(kind) as error, around():
                    _loss(model)
                tracebacks.append(error)  # as a notebook does
                with torch.no_grad():
                    torch.testing.assert_close(_loss(model), _loss(plain), rtol=0, atol=1e-12)
                _assert_nothing_entered(optimizer)
                _step(_loss(plain), reference)
                _step(_loss(model), optimizer)
                _assert_nothing_entered(optimizer)
            model.layers[1][0].then = _raising(kind)
            with pytest.raises(kind):
                _loss(model)
            optimizer.zero_grad()
            _assert_nothing_entered(optimizer)
        for each in (model, plain):
            each.catches = True
            each.layers[1][0].then = _raising(KeyboardInterrupt)
        _step(_loss(plain), reference)
        _step(_loss(model), optimizer)
        _assert_nothing_entered(optimizer)
        _assert_same(model, plain)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_interrupted_forward_leaves_nothing_entered(world_size: int, stage: int) -> None:
    run_ranks(world_size, _check_forward, stage)


def _check_backward(rank: int, stage: int) -> None:
    model, plain = _new(), _new()
    reference = _sgd(plain)
    with zero_optimizer(model, _sgd(model), stage=stage) as optimizer:
        for kind in INTERRUPTS:
            model.layers[1].register_full_backward_hook(lambda *_, kind=kind: _raising(kind)())
            with pytest.raises(kind):
                _loss(model).backward()
            model.layers[1]._backward_hooks.clear()
            before = _values(model)
            optimizer.step()  # gradients of the interrupted backward are dropped
            assert all(map(torch.equal, _values(model), before))
            _step(_loss(plain), reference)
            _step(_loss(model), optimizer)
            _assert_nothing_entered(optimizer)
        _assert_same(model, plain)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_interrupted_backward_counts_for_nothing(stage: int) -> None:
    run_ranks(2, _check_backward, stage)


@contextmanager
def _interrupted_update(optimizer: Any, kind: type[BaseException], *, is_after: bool) -> Iterator[None]:
    inner = optimizer.parts.inner
    step = inner.step

    def interrupted(*args: Any, **kwargs: Any) -> None:
        if is_after:
            step(*args, **kwargs)
        raise kind

    inner.step = interrupted
    try:
        yield
    finally:
        inner.step = step


def _check_step(rank: int, stage: int) -> None:
    for kind in INTERRUPTS:
        model = _new()
        with zero_optimizer(model, _sgd(model), stage=stage) as optimizer:
            _step(_loss(model), optimizer)
            _loss(model).backward()
            with _interrupted_update(optimizer, kind, is_after=True), pytest.raises(kind):
                optimizer.step()
            assert not optimizer.was_step_applied
            moved = _values(model)
            for _ in range(2):
                with pytest.raises(StateError, match=f"{REFUSED}.*{kind.__name__}"):
                    optimizer.step()
                optimizer.zero_grad()
                _loss(model).backward()
            assert all(map(torch.equal, _values(model), moved))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_after_an_interrupted_update_no_other_runs(stage: int) -> None:
    run_ranks(2, _check_step, stage)


def _check_before_update(rank: int, stage: int) -> None:
    model, plain = _new(), _new()
    reference = _sgd(plain)
    with zero_optimizer(model, _sgd(model), stage=stage, gradient_clipping=1e9) as optimizer:
        runtime = optimizer.parts.runtime
        for where, name in ((runtime.reducer, "flush"), (runtime, "step_ended"), (optimizer, "_prepare_gradients")):
            _loss(model).backward()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(where, name, _raising(KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
            before = _values(model)
            optimizer.step()  # no gradient remains
            assert all(map(torch.equal, _values(model), before))
            _step(_loss(plain), reference)
            _step(_loss(model), optimizer)
        _assert_same(model, plain)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_interrupt_before_the_update_drops_the_gradients(stage: int) -> None:
    run_ranks(2, _check_before_update, stage)


class _InterruptAt:
    """Raises at the given line of zero, counted from entry; without ``count`` it counts all lines."""

    def __init__(self, line: int | None) -> None:
        self.left, self.count = line, 0
        self._folder = str(Path(zero.__file__).parent)
        self._entered: set[tuple[int, int]] = set()  # no frames: they would keep what their locals refer to

    def __enter__(self) -> _InterruptAt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:  # noqa: ARG002
        if not frame.f_code.co_filename.startswith(self._folder):
            return None
        if event == "line":
            self.count += 1
            if self._leaves_block(frame):  # no signal comes between a block's end and its exit, which frees locks
                self.left = None if self.left is None else max(self.left, self.count + 1)
            elif self.count == self.left:
                sys.settrace(None)
                raise KeyboardInterrupt
        if event == "return":
            self._entered = {at for at in self._entered if at[0] != id(frame)}
        return self._trace

    def _leaves_block(self, frame: FrameType) -> bool:
        """Whether the line is that of a ``with`` whose block has ended: the second time that it comes."""
        at = id(frame), frame.f_lineno
        if not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            return False
        (self._entered.remove if (is_exit := at in self._entered) else self._entered.add)(at)
        return is_exit


def _refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except StateError:
        return True
    return False


def _try_at(stage: int, line: int | None) -> tuple[int, bool]:
    """Interrupt the second of three steps at ``line``; return its number of lines, and if the next step is refused."""
    model, plain = _new(), _new()
    reference = _sgd(plain)
    with zero_optimizer(model, _sgd(model), stage=stage) as optimizer:
        _step(_loss(plain), reference)
        _step(_loss(model), optimizer)
        before = _values(model)
        try:
            with _InterruptAt(line) as interrupt:
                _step(_loss(model, 2.0), optimizer)
            was_interrupted = False
        except KeyboardInterrupt:
            was_interrupted = True
        if _refused(optimizer.zero_grad) or _refused(lambda: _loss(model).backward()):
            return interrupt.count, True
        after = _values(model)
        is_unchanged = all(map(torch.equal, after, before))
        if not (was_interrupted and is_unchanged):
            _step(_loss(plain, 2.0), reference)
        if _refused(optimizer.step):
            return interrupt.count, True
        _step(_loss(plain), reference)
        _assert_same(model, plain)
        return interrupt.count, False


def _alone(call: Callable[..., tuple[int, bool]], *args: Any) -> tuple[int, bool]:
    """Run in a separate thread: a tracer, unlike a signal, can interrupt between a block's end and its exit.

    torch's thread-local state, such as whether subclasses are dispatched to, then ends with that thread.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result()


def _check_lines(rank: int, stage: int, stride: int) -> None:
    num_lines, _ = _try_at(stage, None)
    outcomes = [_alone(_try_at, stage, line)[1] for line in range(1 + rank, num_lines, stride)]
    assert torch._C._is_torch_function_enabled(), "the threads' own states have ended with them"
    assert outcomes.count(False) > len(outcomes) // 2, "most interrupts cost a step and no more"


@pytest.mark.parametrize("stage", [0, 3])
def test_wherever_an_interrupt_comes_the_next_step_is_right_or_refused(stage: int) -> None:
    """Every so many lines of the library that a step runs are interrupted, one per trial."""
    run_ranks(1, _check_lines, stage, 37)


def _check_threads(rank: int) -> None:
    model, plain = _new(), _new()
    reference = _sgd(plain)
    with zero_optimizer(model, _sgd(model), stage=3) as optimizer:
        errors: list[BaseException | None] = []

        def in_thread(call: Callable[[], Any]) -> None:
            def run() -> None:
                try:
                    call()
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()

        model.layers[1][0].then = lambda: in_thread(lambda: _loss(model))
        _step(_loss(model), optimizer)
        model.layers[1].register_full_backward_hook(lambda *_: in_thread(lambda: _loss(model)))
        _step(_loss(model), optimizer)
        model.layers[1]._backward_hooks.clear()
        assert len(errors) >= 2
        for error in errors:
            assert isinstance(error, StateError)
            assert "two threads use one model" in str(error)
        in_thread(lambda: _step(_loss(model), optimizer))  # one after the other is allowed
        model.layers[1][0].then = _raising(SystemExit)
        in_thread(lambda: _loss(model))  # a thread that ended during its forward does not count
        assert isinstance(errors.pop(), SystemExit)
        for _ in range(3):
            _step(_loss(plain), reference)
        _assert_same(model, plain)
        _step(_loss(plain), reference)
        _step(_loss(model), optimizer)
        _assert_same(model, plain)


@pytest.mark.parametrize("world_size", [1, 2])
def test_two_threads_at_a_time_are_a_named_error(world_size: int) -> None:
    run_ranks(world_size, _check_threads)


def _check_graph_that_is_freed_late(rank: int) -> None:
    """With a GPU the graph of a failed backward is freed a moment later, by a thread of the engine."""
    model, freed_after = _new(), 3
    with zero_optimizer(model, _sgd(model), stage=3) as optimizer:
        _step(_loss(model), optimizer)

        def backward() -> object | None:
            nonlocal freed_after
            freed_after -= 1
            return object() if freed_after > 0 else None

        optimizer.parts.runtime.hooks._backward = backward
        _step(_loss(model), optimizer)
        assert freed_after <= 0
        optimizer.parts.runtime.hooks._backward = object
        with pytest.raises(StateError, match="two threads use one model"):
            _loss(model)
        optimizer.parts.runtime.hooks._backward = None


def test_a_backward_that_failed_a_moment_ago_does_not_take_the_model() -> None:
    run_ranks(1, _check_graph_that_is_freed_late)


def _check_thread_while_a_backward_ends(rank: int) -> None:
    """The end of a backward may wait for exchanges: a forward of another thread must not start meanwhile."""
    model, errors = _new(), []
    with zero_optimizer(model, _sgd(model), stage=3) as optimizer:
        _step(_loss(model), optimizer)
        reducer = optimizer.parts.runtime.reducer
        end = reducer.end_backward

        def other() -> None:
            try:
                _loss(model)
            except StateError as error:
                errors.append(str(error))

        thread = threading.Thread(target=other)

        def slow_end() -> None:
            time.sleep(0.3)
            end()

        def started(*_: object) -> None:
            if not thread.ident:
                thread.start()
                time.sleep(0.02)  # it waits for a failed backward to be freed

        model.layers[1].register_full_backward_hook(started)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reducer, "end_backward", slow_end)
            _loss(model).backward()
        thread.join()
        assert errors
        assert "two threads use one model" in errors[0]


def test_a_thread_cannot_enter_while_a_backward_ends() -> None:
    run_ranks(1, _check_thread_while_a_backward_ends)
