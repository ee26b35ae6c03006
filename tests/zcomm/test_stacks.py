"""Stacks of running threads can be read, even while Python's garbage collector runs in between."""

# covers zcomm/_transport/call_context.py zcomm/_transport/stacks.py

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.ranks import run_ranks
from zcomm._transport.stacks import (
    _WAITING,
    LIBRARY_DIRS,
    StackFrame,
    _no_collection,
    is_blocked_in,
    line_of,
    stack,
    stacks_of,
)

NUM_TIMES = 20
DEPTH = 40


def _calling(num_arguments: int) -> Callable[..., int]:
    """A function with a frame of its own size that calls the next one, ``depth`` deep, and computes a little."""
    names = ", ".join(f"a{index}" for index in range(num_arguments))
    body = "    kept = [depth]\n    return below(step, depth, bottom) + kept[0]\n"
    text = f"def deeper(step, depth, bottom, {names}):\n{body}"
    scope: dict[str, Any] = {"below": _below}
    exec(text, scope)
    return scope["deeper"]  # type: ignore[no-any-return]


def _below(step: int, depth: int, bottom: Callable[[], object]) -> int:
    if depth == 0:
        bottom()
        return 0
    index = step * depth % len(_FUNCTIONS)
    return _FUNCTIONS[index](step, depth - 1, bottom, *range(index + 1)) + 1


_FUNCTIONS = [_calling(num_arguments) for num_arguments in range(1, 13)]


def _read_while_collecting(_rank: int) -> None:
    """Read the stack of a thread deep in calls; a garbage collection lets it continue and call other functions."""
    reader, is_deep, may_go_on = threading.get_ident(), SimpleQueue[int](), SimpleQueue[int]()

    is_reading, is_over = threading.Event(), threading.Event()

    def stand() -> None:
        is_deep.put(1)
        may_go_on.get()

    def work() -> None:
        step = 0
        while not is_over.is_set():
            step += 1
            _below(step, DEPTH, stand)

    def let_it_go_on(phase: str, _info: object) -> None:
        if phase == "start" and threading.get_ident() == reader and is_reading.is_set():
            is_reading.clear()
            may_go_on.put(1)
            is_deep.get(timeout=30)

    worker = threading.Thread(target=work)
    worker.start()
    is_deep.get(timeout=30)
    thresholds = gc.get_threshold()
    gc.callbacks.append(let_it_go_on)
    try:
        for time in range(NUM_TIMES):
            gc.collect()
            gc.set_threshold(10 + time)  # in a frame's allocation, in another one
            is_reading.set()
            places = stacks_of((worker.ident or 0,))[worker.ident or 0]
            is_reading.clear()
            functions = Counter(place.function for place in places)
            assert all(place.line > 0 for place in places)
            assert set(functions) <= {"deeper", "_below", "stand", "work", *STARTING}, functions
            assert functions["deeper"] >= DEPTH - 1, functions
    finally:
        gc.callbacks.remove(let_it_go_on)
        gc.set_threshold(*thresholds)
        is_over.set()
        may_go_on.put(1)
        worker.join()


STARTING = ("run", "_bootstrap_inner", "_bootstrap")


def test_stacks_are_read_while_garbage_is_collected() -> None:
    run_ranks(1, _read_while_collecting)


@pytest.mark.parametrize("is_on", [True, False])
def test_collecting_is_left_as_it_was(*, is_on: bool) -> None:
    was = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        stacks_of((threading.main_thread().ident or 0,))
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was else gc.disable)()


def _held(inside: threading.Event, end: threading.Event) -> None:
    with _no_collection():
        inside.set()
        end.wait(10)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of Python collect nothing there")
def test_readers_take_turns_so_that_none_switches_collecting_on_for_another() -> None:
    first, second = [(threading.Event(), threading.Event()) for _ in range(2)]
    threads = [threading.Thread(target=_held, args=events) for events in (first, second)]
    threads[0].start()
    assert first[0].wait(10)
    threads[1].start()
    assert not second[0].wait(0.2)
    first[1].set()
    assert second[0].wait(10)
    assert not gc.isenabled()
    second[1].set()
    for thread in threads:
        thread.join()
    assert gc.isenabled()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of Python collect nothing there")
def test_a_child_that_is_forked_meanwhile_collects_and_reads() -> None:
    inside, end = threading.Event(), threading.Event()
    reader = threading.Thread(target=_held, args=(inside, end))
    reader.start()
    assert inside.wait(10)
    threading.Timer(0.2, end.set).start()
    if (child := os.fork()) == 0:
        found = gc.isenabled()
        with _no_collection():
            found = found and not gc.isenabled()
        os._exit(0 if found else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    reader.join()


def test_a_stack_is_innermost_first() -> None:
    def inner(depth: int) -> list[str]:
        return [place.function for place in stack(depth)]

    assert inner(0)[:2] == ["inner", "test_a_stack_is_innermost_first"]
    assert inner(1)[0] == "test_a_stack_is_innermost_first"


def test_of_threads_only_others_are_read() -> None:
    started, end = threading.Event(), threading.Event()

    def wait_here() -> None:
        started.set()
        end.wait()

    worker = threading.Thread(target=wait_here)
    worker.start()
    started.wait()
    try:
        here, there, nowhere = threading.get_ident(), worker.ident or 0, -1
        found = stacks_of((here, there, nowhere))
        assert list(found) == [there]
        assert "wait_here" in [place.function for place in found[there]]
        assert found[there][-1].function == "_bootstrap"
    finally:
        end.set()
        worker.join()


def test_the_library_is_told_from_the_users_program() -> None:
    assert [Path(folder).is_dir() for folder in LIBRARY_DIRS] == [True, True]
    assert [(Path(LIBRARY_DIRS[0]) / part).is_file() for part in _WAITING] == [True] * len(_WAITING)
    frames = [
        StackFrame(file, "f", 7, 0, 0) for file in (LIBRARY_DIRS[0] + _WAITING[0], LIBRARY_DIRS[1] + "a.py", "b.py")
    ]
    assert line_of(frames) == "b.py:7"
    assert is_blocked_in(frames) == "waits in a store exchange at b.py:7"
    assert is_blocked_in(frames[1:]) == ""
