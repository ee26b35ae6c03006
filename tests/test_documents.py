"""Checks of the documents: measured figures agree with files under bench/results, links resolve, one version.

A block of a document (a paragraph, an item of a list, a table) that links to a file under bench/results is about what
was measured: each of its numbers must be in that file, and those of a table's row in one line of it, in that order. A
table may be linked to by the paragraph before it. Without a link a block has no decimal figure and no number with a
unit of measurement. Inline code, fenced code, comments and the generated table of the configuration are no claims.
Files that a document names exist, and every document is reached from docs/index.md.
"""

# covers README.md docs/index.md CONTRIBUTING.md

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
CONFIG_TABLE = re.compile(r"<!-- config table: .*?-->.*?<!-- end of config table -->", re.DOTALL)
"""Another test compares this with the program."""
README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULT = re.compile(r"\]\((?:\.\./)*(bench/results/[\w./-]+\.md)\)")
NUMBER = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?:e\d+)?(?!\w)")
MEASURED = re.compile(
    r"\d\.\d|\d\s?(%|ms|us|s|min|hours?|[KMGT]i?B|[KMG]bit|tokens|times|TFLOP|x (as|faster|slower))(?![\w])"
)
NO_FIGURES = re.compile(
    r"<!--.*?-->|^```.*?^```|`[^`\n]*`|\]\([^)]*\)|Apache-2\.0|(?:Python|CUDA|NCCL|torch) \d[\d.]*(?: to \d[\d.]*)?",
    re.DOTALL | re.MULTILINE,
)


FILE = re.compile(
    r"(?<![\w/.<])((?:zero|zcomm|cpp|triton_kernels|bench|tests|tools|_\w+)/(?:[\w-]+/)*[\w-]+\.(?:py|h|cc|cuh|sh|json))\b"
)


class Claim(NamedTuple):
    """Numbers that must occur in one line of a file, or, for prose, anywhere in it."""

    text: str
    file: str
    numbers: tuple[str, ...]
    is_row: bool


def numbers_of(text: str) -> tuple[str, ...]:
    """The numbers of Markdown text outside of code, without thousands separators."""
    return tuple(number.replace(",", "") for number in NUMBER.findall(NO_FIGURES.sub("] ", text)))


def claims_of(text: str) -> Iterator[Claim]:
    """The claims of a document, each with its file; ValueError for a measured figure without a file."""
    before: list[str] = []
    text = CONFIG_TABLE.sub("\n", text)
    for block in re.split(r"\n\s*\n|\n(?=- )", re.sub(r"<!--.*?-->|^```.*?^```", "\n", text, flags=re.DOTALL | re.M)):
        is_table = block.lstrip().startswith("|")
        files = RESULT.findall(block) or (before if is_table else [])
        before = files if not is_table else []
        rows = block.strip().splitlines()[2:] if is_table else [block]
        for row in rows:
            if not files and (found := MEASURED.search(NO_FIGURES.sub("] ", row))):
                raise ValueError(f"{found[0]!r} comes from no file under bench/results: {row}")
            for file in (RESULT.findall(row) if is_table else []) or files:  # a row may name its own
                yield Claim(row, file, numbers_of(row), is_table)


def missing(claim: Claim) -> tuple[str, ...]:
    """The numbers of a claim that its file does not have."""
    path = ROOT / claim.file
    lines = [NUMBER.findall(line.replace(",", "")) for line in path.read_text().splitlines()]
    if claim.is_row:
        return min((_missing_in_order(claim.numbers, line) for line in lines), key=len)
    everywhere = {number for line in lines for number in line}
    return tuple(n for n in claim.numbers if n not in everywhere)


def _missing_in_order(numbers: tuple[str, ...], line: list[str]) -> tuple[str, ...]:
    left = iter(line)
    return tuple(n for n in numbers if n not in left)  # each search goes on where the one before has found its number


def test_every_measured_number_is_in_its_file() -> None:
    claims = {path.name: list(claims_of(path.read_text())) for path in DOCUMENTS}
    assert len(claims["README.md"]) > 10
    assert len(claims["results.md"]) > 30
    assert sum(map(len, claims.values())) > 60
    for claim in itertools.chain(*claims.values()):
        assert not missing(claim), f"{claim.file} has no {missing(claim)}: {claim.text}"


def test_an_altered_figure_is_noticed() -> None:
    """Change the last digit of each number. In prose, one- and two-digit numbers, such as 4 ranks, may recur."""
    unnoticed, tried = [], 0
    for claim in itertools.chain(*(claims_of(path.read_text()) for path in DOCUMENTS)):
        for index, number in enumerate(claim.numbers):
            altered = number[:-1] + str((int(number[-1]) + 1) % 10)
            numbers = (*claim.numbers[:index], altered, *claim.numbers[index + 1 :])
            if not claim.is_row and len(number) < 3:
                continue
            tried += 1
            if not missing(claim._replace(numbers=numbers)):
                unnoticed.append((number, altered, claim.text))
    assert tried > 100
    assert not unnoticed
    for line in ("It takes 12 ms.", "It is 3.5 as fast.", "| a | 12.5 |\n|---|---|\n| b | 1.5 |", "Takes 7 % more."):
        with pytest.raises(ValueError, match="comes from no file"):
            list(claims_of(f"A paragraph.\n\n{line}\n"))


def test_tables_are_those_of_the_results() -> None:
    """The tables of the README and docs/results.md, and the pages next to the JSON files of bench/compare.py."""
    spec = importlib.util.spec_from_file_location("results", ROOT / "tools" / "results.py")
    assert spec is not None
    assert spec.loader is not None
    results = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        spec.loader.exec_module(results)
        expected = results.expected()
    marked = {path: re.findall("<!-- table: (.*) -->", path.read_text()) for path in DOCUMENTS}
    assert {path for path, names in marked.items() if names} == set(results.PAGES)
    assert sorted(marked[ROOT / "docs" / "results.md"]) == sorted(results.TABLES)
    assert len(expected) > 5
    for path, text in expected.items():
        assert path.read_text() == text, f"run python tools/results.py: {path.name}"
    readme = README.read_text()
    broken = readme.replace("| `delta-hpz` | ", "| `delta-hpz` | 1", 1)
    assert broken != readme
    assert results.with_tables(broken) == readme


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links_of(path: Path) -> list[str]:
    """The links of a document to files of this repository."""
    text = re.sub(r"<!--.*?-->|^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.M)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in links_of(path):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(path: Path) -> None:
    """Documents name files with their folder; a name that begins with an underscore is in zero or zcomm."""
    missing_files = [
        name
        for name in FILE.findall(path.read_text())
        if not any((ROOT / package / name).exists() for package in ("", "zero", "zcomm"))
    ]
    assert not missing_files


def test_every_document_is_found_from_the_index() -> None:
    """Every document is reachable by links from the index, and the index from the README."""
    targets = {
        path: {(path.parent / link.partition("#")[0]).resolve() for link in links_of(path)} for path in DOCUMENTS
    }
    assert INDEX in targets[README]
    found, new = {README}, {INDEX}  # the README is where a reader comes from: what it links to is not enough
    while new:
        found |= new
        new = {target for path in new for target in targets[path] if target in targets} - found
    assert found == set(DOCUMENTS)


def test_the_version_has_one_place() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] == version
    sources = [p for folder in ("zcomm", "zero", "cpp", "cmake") for p in (ROOT / folder).rglob("*") if p.is_file()]
    problems = [
        p for p in sources if p.suffix in (".py", ".cc", ".h", ".cmake", ".txt") and f'"{version}"' in p.read_text()
    ]
    assert not problems
