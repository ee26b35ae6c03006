"""The layers of the project, checked: who may import whom, who may communicate, and how long things may get."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# package -> first-party packages it may import
ALLOWED = {
    "triton_kernels": set(),
    "zcomm": {"triton_kernels"},
    "zero": {"zcomm"},
    "bench": {"zero", "zcomm"},
}
LIBRARY = ("triton_kernels", "zcomm", "zero")
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 60, 8
# torch's five, and ours; DeepSpeed's
MORE_PARAMETERS = {
    "reduce_scatter_single": 10, "all_reduce": 9, "install_ddp": 9, "install_fsdp2": 10, "initialize": 12,
    "TiledLinear.__init__": 9,
    "CPUAdam.__init__": 11, "CPUAdagrad.__init__": 9, "quantize": 9,
}  # fmt: skip
# optional libraries
MAY_IMPORT_LATE = {
    "zcomm/install/fsdp2_units.py",
    "zcomm/_kernels/kernels.py",
    "zcomm/_kernels/native_calls.py",
    "zcomm/_transport/backend.py",
    "zcomm/cli.py",
    "zcomm/bench/plot.py",
    "zero/plan/report.py",
}
# the backend, its checksums, and what it is compared with
MAY_COMMUNICATE = {"zcomm/_transport/backend.py", "zcomm/_transport/checked.py", "zcomm/bench/torch_calls.py"}
COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "send",
}  # fmt: skip
FILES = sorted(p for package in ALLOWED for p in (ROOT / package).rglob("*.py"))
LIBRARY_FILES = [p for p in FILES if p.relative_to(ROOT).parts[0] in LIBRARY]
NAMES = {"ids": lambda p: str(p.relative_to(ROOT))}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", FILES, **NAMES)
def test_imports_point_downwards(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    used = {name.split(".")[0] for name in _imported_modules(path)} & ALLOWED.keys()
    assert used - {package} <= ALLOWED[package]


@pytest.mark.parametrize("package", LIBRARY)
def test_modules_import_no_cycle(package: str) -> None:
    modules = {_module_name(p): p for p in LIBRARY_FILES if p.relative_to(ROOT).parts[0] == package}
    graph = {name: {m for m in _imported_modules(path) if m in modules and m != name} for name, path in modules.items()}
    for name, path in modules.items():  # importing a module from its package is no import of the package's __init__
        if path.name != "__init__.py":
            graph[name].discard(package)
    order = list(TopologicalSorter(graph).static_order())
    assert set(order) == set(modules)


@pytest.mark.parametrize("path", [p for p in LIBRARY_FILES if p.parent.name != "bench"], **NAMES)
def test_only_the_command_line_imports_the_benchmarks(path: Path) -> None:
    uses_bench = any(name.startswith("zcomm.bench") for name in _imported_modules(path))
    assert not uses_bench or path == ROOT / "zcomm" / "cli.py"


@pytest.mark.parametrize("path", FILES, **NAMES)
def test_imports_stand_at_the_top(path: Path) -> None:
    functions = [n for n in ast.walk(_tree(path)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    late = [n.lineno for f in functions for n in ast.walk(f) if isinstance(n, (ast.Import, ast.ImportFrom))]
    assert not late or str(path.relative_to(ROOT)) in MAY_IMPORT_LATE


def _distributed_names(path: Path) -> Iterator[str]:
    """What is taken from torch.distributed: as ``dist.x``, or by ``from torch.distributed import x``."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("dist", "distributed", "torch.distributed"):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", [p for p in LIBRARY_FILES if str(p.relative_to(ROOT)) not in MAY_COMMUNICATE], **NAMES)
def test_only_the_backend_calls_collectives(path: Path) -> None:
    assert not set(_distributed_names(path)) & COLLECTIVES


@pytest.mark.parametrize("path", [p for p in LIBRARY_FILES if p.name != "cli.py"], **NAMES)
def test_the_libraries_print_nothing(path: Path) -> None:
    calls = (node.func for node in ast.walk(_tree(path)) if isinstance(node, ast.Call))
    assert "print" not in {func.id for func in calls if isinstance(func, ast.Name)}


@pytest.mark.parametrize("path", FILES, **NAMES)
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    tree = _tree(path)
    methods = {
        id(member): f"{owner.name}.{member.name}"
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for member in owner.body
        if isinstance(member, ast.FunctionDef)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name}: {length} lines"
            if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue  # a kernel has no structures: every pointer, stride and constant is a parameter
            limit = MORE_PARAMETERS.get(methods.get(id(node), node.name), MAX_PARAMETERS)
            parameters = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            assert len([p for p in parameters if p not in ("self", "cls")]) <= limit, node.name
