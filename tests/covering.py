"""Covering sets: few cases in which every combination of values of any few factors occurs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["covering_set", "full_product"]


def full_product(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def covering_set(factors: Mapping[str, Sequence[Any]], strength: int) -> list[dict[str, Any]]:
    """Cases in which any ``strength`` factors take every combination of their values; the same on every run.

    Greedy: a case begins with the first combination that is missing; each other factor takes the value that adds most.
    """
    choices = list(itertools.combinations(factors, strength))
    missing = {
        tuple(zip(names, values, strict=True)): None  # a dict, for its order
        for names in choices
        for values in itertools.product(*(factors[name] for name in names))
    }
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for name in factors:
            if name not in case:
                others = [pair for pair in itertools.combinations(factors, strength - 1) if set(pair) <= case.keys()]
                gains = [
                    _num_new(case | {name: v}, [(*o, name) for o in others], missing, factors) for v in factors[name]
                ]
                start = len(cases) % len(gains)  # ties go to each value in turn
                order = [*range(start, len(gains)), *range(start)]
                case[name] = factors[name][max(order, key=gains.__getitem__)]
        for names in choices:
            missing.pop(tuple((name, case[name]) for name in names), None)
        cases.append({name: case[name] for name in factors})
    return cases


def _num_new(
    case: Mapping[str, Any], choices: list[tuple[str, ...]], missing: Mapping[Any, None], factors: Mapping[str, Any]
) -> int:
    """The number of combinations of these factors in ``case`` that are still missing."""
    return sum(tuple((name, case[name]) for name in factors if name in chosen) in missing for chosen in choices)
