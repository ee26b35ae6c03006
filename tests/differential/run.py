"""Runs one random program on its ranks and compares it with one process; reduces programs that fail."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from tests.differential.model import External, new_model, optimizer_of, register_hooks
from tests.differential.programs import Program, simpler
from tests.differential.training import Sharded, Trained, options, plain, train
from tests.ranks import run_ranks
from tests.zero.training import full_values, zero_optimizer
from zero import register_external_parameter
from zero._gradients import reducer

__all__ = ["Result", "largest_difference", "run", "shrink"]


class Limit(NamedTuple):
    """A documented limit: programs that it concerns must raise this error."""

    pattern: str
    """Regular expression that the error of every rank must match."""
    place: str
    """The page that documents the limit."""
    holds: Callable[[Program], bool]
    """Whether the limit concerns a program."""


TOLERANCE = 1e-10
"""Largest absolute difference of losses, norms and parameters, all of which are of the order of 1."""
LIMITS: tuple[Limit, ...] = (
    Limit(
        r"StateError: '[\w.]+' is released \(.* and was used by \w+ outside the forward of its own module",
        "docs/optimizer.md, Construction and access",
        lambda program: program.stage == 3 and program.has_hidden_use,
    ),
)
"""The only errors with which a program may be refused."""


class Result(NamedTuple):
    outcome: str
    """"equal", "refused" or "failed"."""
    text: str = ""


def largest_difference(got: Trained, expected: Trained, rank: int | None = None) -> tuple[float, str]:
    """The largest absolute difference and its place. With ``rank``, ``got`` has the losses of that rank only."""
    pairs = {"norms": (got.norms, expected.norms)}
    for number, (mine, all_) in enumerate(zip(got.losses, expected.losses, strict=True)):
        pairs[f"loss {number}"] = (mine, all_ if rank is None else all_[rank : rank + 1])
    if got.values.keys() != expected.values.keys():
        return float("inf"), f"names of parameters: {sorted(got.values)}, expected {sorted(expected.values)}"
    pairs |= {name: (got.values[name], expected.values[name]) for name in expected.values}
    worst, of = 0.0, "nothing"
    for name, (a, b) in pairs.items():
        if len(a) != len(b):
            return float("inf"), f"{name}: {len(a)} numbers, expected {len(b)}"
        for x, y in zip(a, b, strict=True):
            if not abs(x - y) <= worst:  # a NaN is the worst
                worst, of = abs(x - y), name
                if worst != worst:
                    return float("inf"), f"{name}: a NaN"
    return worst, of


@contextmanager
def _quick_and_quiet() -> Iterator[None]:
    """Wait less for ranks that skip a layer, without warnings. Other tests use the same processes: restore both."""
    logger = logging.getLogger("zero")
    before = reducer.MIN_WAIT_S, logger.level
    reducer.MIN_WAIT_S = 1.0
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        reducer.MIN_WAIT_S = before[0]
        logger.setLevel(before[1])


def _check(rank: int, program: Program, expected: Trained) -> None:
    model = new_model(program)
    if program.declares_external:
        for layer in model.layers:
            if isinstance(layer, External):
                register_external_parameter(layer, layer.owner.weight)
    if not program.has_late_hooks:
        register_hooks(model)
    per_node = program.world_size if program.is_on_one_node else 1
    with ExitStack() as stack:
        stack.enter_context(_quick_and_quiet())
        wrapped = zero_optimizer(model, optimizer_of(program, model), ranks_per_node=per_node, **options(program))
        optimizer = stack.enter_context(wrapped)
        if program.has_late_hooks:
            register_hooks(model)
        losses, norms = train(Sharded(program, model, rank, optimizer))
        values = {name: value.flatten().tolist() for name, value in full_values(model).items()}
    worst, of = largest_difference(Trained(losses, norms, values), expected, rank)
    assert worst <= TOLERANCE, f"differs by {worst:.3g}: {of}"


def run(program: Program) -> Result:
    """Run ``program`` on ``program.world_size`` ranks and in this process, and compare."""
    try:
        expected = plain(program)
    except Exception as error:  # plain torch fails, so the program itself is wrong
        return Result("failed", f"plain torch: {type(error).__name__}: {error}")
    try:
        run_ranks(program.world_size, _check, program, expected)
    except AssertionError as error:
        text = str(error)
        for limit in LIMITS:
            if limit.holds(program) and len(re.findall(limit.pattern, text)) == program.world_size:
                return Result("refused", f"{limit.pattern} ({limit.place})")
        return Result("failed", text)
    return Result("equal")


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The simplest program near ``program`` that still fails: features are dropped one by one."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in simpler(program):
            if fails(candidate):
                program, is_smaller = candidate, True
                break
    return program
