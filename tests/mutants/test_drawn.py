"""Random mutants: where the rules apply; and, in the set that takes minutes, the outcomes of twenty a day."""

# covers tests/mutants/drawn.py tests/mutants/rules.py

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone

import pytest

from tests.conftest import SUMMARY_LINE
from tests.mutants.drawn import A_DAY, draw, load, nearest, run, sources, survivors_without_verdict
from tests.mutants.rules import places
from tests.mutants.run import ROOT, key_of

TODAY = int(datetime.now(timezone.utc).strftime("%Y%m%d"))
SOURCE = '''
"""Doc: 1 < 2."""
__all__ = ["a", "b"][0:1]


@cache
def sizes(values: list[int], limit: int = 3, *, is_wide: bool = False) -> int | None:
    """Not 5 < 6."""
    logger.info("%d", limit + 1)
    assert limit > 0, f"{limit + 1}"
    if not values:
        raise ValueError(f"{limit - 1} or {limit + 2}")
    with no_grad():
        values.sort(limit, values)
    self.limit = values[0]
    return max(values) if is_wide and limit < 2 else measure(values, 7)


def __repr__() -> str:
    return str(1 + 2)
'''
CPP = """
#include "a 1 < 2.h"
static_assert(sizeof(int) == 4);
// a < b && c
std::vector<int> Take(const Row* row) {
  ZCOMM_CHECK(row->size < 8, "less than ", 1 + 2, " < 3");
  Start(row, stream);
  return {std::min(row->size, kWidth) + 1, true};
}
"""


def _changes(file: str, text: str) -> list[tuple[str, str, str]]:
    return sorted((place.rule, text[place.start : place.stop], place.new) for place in places(file, text))


def test_places_of_python() -> None:
    """Every place is found, and none in docstrings, annotations, ``__all__``, logs, assertions, errors, repr."""
    choice = "max(values) if is_wide and limit < 2 else measure(values, 7)"
    assert _changes("a.py", SOURCE) == sorted([
        ("dropped decorator", "@cache", ""),
        ("off by one", "3", "4"),
        ("other flag", "False", "True"),
        ("dropped guard", "not values", "False"),
        ("dropped not", "not values", "values"),
        ("dropped context", "with no_grad()", "if True"),
        ("dropped call", "values.sort(limit, values)", "pass"),
        ("swapped arguments", "values.sort(limit, values)", "values.sort(values, limit)"),
        ("dropped assignment", "self.limit = values[0]", "pass"),
        ("first/last", "0", "-1"),
        ("swapped alternatives", choice, "(measure(values, 7) if is_wide and limit < 2 else max(values))"),
        ("other function", "max", "min"),
        ("and/or", "is_wide and limit < 2", "(is_wide or limit < 2)"),
        ("other comparison", "limit < 2", "(limit <= 2)"),
        ("off by one", "2", "3"),
        ("off by one", "7", "8"),
    ])  # fmt: skip


def test_places_of_cpp() -> None:
    assert _changes("a.cc", CPP) == sorted([
        ("other comparison", " < ", " <= "),
        ("off by one", "8", "9"),
        ("dropped call", "Start(row, stream);", ";"),
        ("other function", "std::min", "std::max"),
        ("other operator", " + ", " - "),
        ("off by one", "1", "2"),
        ("other flag", "true", "false"),
    ])  # fmt: skip


def test_all_of_the_source_is_drawn_from() -> None:
    """Each package gets mutants in proportion to its lines; each can be made once, and is valid Python."""
    mutants = draw(1, 300)
    assert len({key_of(mutant) for mutant in mutants}) == 300
    assert [key_of(mutant) for mutant in draw(1, 20)] == [key_of(mutant) for mutant in mutants[:20]]
    drawn, lines = (Counter[str](), Counter[str]())
    for mutant in mutants:
        drawn[mutant.file.split("/")[0]] += 1
        text = (ROOT / mutant.file).read_text()
        assert text.count(mutant.old) == 1
        if mutant.file.endswith(".py"):
            ast.parse(text.replace(mutant.old, mutant.new))
    for file, number in sources().items():
        lines[file.split("/")[0]] += number
    for package, number in lines.items():
        share = number / lines.total()
        assert abs(drawn[package] / 300 - share) < 4 * (share * (1 - share) / 300) ** 0.5, package


def test_every_file_has_tests_that_are_near() -> None:
    assert nearest("zero/_step/clip.py")
    assert nearest("zcomm/_formats/reference.py")[0].startswith("tests/zcomm/")
    assert any(test.startswith("tests/zero/test_checkpoint") for test in nearest("zero/_checkpoint/dcp.py")[:4])
    assert nearest("cpp/src/quantize.cc")[0] == "cpp/tests/quantize_test.cc::"
    assert "cpp/tests/nccl_communicator_test.cc::" in nearest("cpp/nccl/plans.cc")[:3]


def test_no_known_survivor_is_without_a_verdict() -> None:
    outcomes = load()
    survived = [key for key, one in outcomes.items() if one["outcome"] == "survived"]
    readme = (ROOT / "tests/mutants/README.md").read_text()
    assert [key for key in survived if f"`{key}`" not in readme] == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_twenty_of_today(record_property: Callable[[str, object], None]) -> None:
    """About three minutes each on an idle machine."""
    mutants = draw(TODAY, A_DAY)
    outcomes = run(mutants)
    counted = Counter(outcomes[key]["outcome"] for mutant in mutants if (key := key_of(mutant)) in outcomes)
    record_property(SUMMARY_LINE, f"mutants drawn by rule (--seed {TODAY} --number {A_DAY}): {dict(counted)}")
    assert survivors_without_verdict(outcomes, mutants) == []
