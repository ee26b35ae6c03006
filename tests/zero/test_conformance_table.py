"""docs/conformance.md: every test that it names exists, and nine tenths of its behaviours have one."""

# covers docs/conformance.md

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEAST_SHARE = 0.9


@cache
def _tests_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def _rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "conformance.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in cells if row[0] != "behaviour" and not row[0].startswith("---")]


def test_every_test_of_the_table_exists() -> None:
    named = [name for row in _rows() for name in re.findall(r"`(tests/[^`]+)`", row[1])]
    assert len(set(named)) > 60
    missing = [name for name in named if name.partition("::")[2] not in _tests_of(name.partition("::")[0])]
    assert not missing


def test_nine_tenths_of_the_behaviours_are_covered() -> None:
    rows = _rows()
    without = [row for row in rows if not re.search(r"`tests/", row[1])]
    assert all(len(row) == 3 for row in rows)
    assert all(row[1] == "none" and row[2] for row in without), "a reason"
    assert 1 - len(without) / len(rows) >= LEAST_SHARE
    assert len(rows) > 80
