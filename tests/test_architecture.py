"""Checks the rules of the source: imports, communication, names, lengths, and which tests cover what.

CONTRIBUTING.md says why each rule is there.
"""

# covers zcomm/__init__.py zero/__init__.py

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
# top-level package -> first-party packages that it may import
ALLOWED = {"triton_kernels": set(), "zcomm": {"triton_kernels"}, "zero": {"zcomm"}, "bench": {"zero", "zcomm"}}
LIBRARY = ("triton_kernels", "zcomm", "zero")
# Bottom up: each imports only what stands before it. Packages, and the modules at the top of zcomm/ and zero/.
ORDER = {
    "zcomm": (
        "errors", "_base", "_formats", "_kernels", "_transport", "_residuals", "control", "_collectives", "_stateful",
        "volume", "functional", "install", "testing", "", "_bench", "report", "cli", "__main__",
    ),
    "zero": (
        "errors", "_ranks", "_storage", "_sharding", "_activations", "_config", "_optim", "_gradients", "_gather",
        "_modes", "_model", "_runtime", "_access", "_step", "optimizer", "_checkpoint", "_publish", "plan",
        "checkpointing", "offload", "reports", "engine", "initialize", "utils", "zero", "integrations", "", "compat",
        "cli",
    ),
}  # fmt: skip
# What a bucket is made of is chosen once: each kind does its own, and nobody asks which it is.
KINDS = (
    "zcomm/_stateful/*.py", "zero/_modes/*.py", "zero/_gather/gather_sources.py", "zero/_storage/*_storage.py",
    "zero/_storage/gradient_store.py", "zero/_storage/host_gradient.py", "zero/_optim/cpu_optimizer*.py",
    "zero/_optim/updaters.py", "zero/_optim/*_files.py", "zero/_step/*update.py",
)  # fmt: skip
MAX_TOP_FILES = 12
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 600, 60, 8
# torch's five, and ours; DeepSpeed's
MORE_PARAMETERS = {
    "all_gather_single": 9, "reduce_scatter_single": 11, "all_reduce": 9, "all_to_all_single": 9,
    "install_ddp": 9, "install_fsdp2": 10,
    "initialize": 14, "save_checkpoint": 9, "TiledLinear.__init__": 9,
    "CPUAdam.__init__": 11, "CPUAdagrad.__init__": 9, "quantize": 9,
}  # fmt: skip
# optional libraries
MAY_IMPORT_LATE = {
    "bench/contenders/diloco.py",
    "zcomm/install/fsdp2_units.py",
    "zcomm/_kernels/kernels.py",
    "zcomm/_kernels/native_calls.py",
    "zcomm/_transport/backend.py",
    "zcomm/cli.py",
    "zcomm/_bench/collectives.py",
    "zero/_config/parse.py",
    "zero/plan/model.py",
    "zero/plan/report.py",
}
# the backend, its checksums, what it is compared with, and scripts' own exchanges by DeepSpeed's names
MAY_COMMUNICATE = {
    "zcomm/_transport/backend.py", "zcomm/_transport/checked.py", "zcomm/_bench/torch_calls.py",
    "zero/compat/comm.py",
}  # fmt: skip
COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "send",
}  # fmt: skip
PUBLIC_NAMES = Path(__file__).parent / "public_names.json"


@cache
def _files() -> dict[str, ast.Module]:
    """The tracked Python files of the library and of bench/, parsed."""
    listed = subprocess.run(["git", "ls-files", *ALLOWED], cwd=ROOT, check=True, capture_output=True, text=True)
    names = sorted(name for name in listed.stdout.splitlines() if name.endswith(".py") and (ROOT / name).exists())
    return {name: ast.parse((ROOT / name).read_text()) for name in names}


def _library() -> dict[str, ast.Module]:
    return {name: tree for name, tree in _files().items() if name.split("/")[0] in LIBRARY}


def _imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module_name(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _modules(package: str) -> dict[str, ast.Module]:
    return {_module_name(name): tree for name, tree in _library().items() if name.split("/")[0] == package}


def _room(module: str) -> str:
    """The package directly below zcomm or zero, or the module itself; "" for zcomm and zero."""
    return [*module.split("."), ""][1]


def test_imports_point_downwards() -> None:
    for name, tree in _files().items():
        package = name.split("/")[0]
        used = {module.split(".")[0] for module in _imported_modules(tree)} & ALLOWED.keys()
        assert used - {package} <= ALLOWED[package], name


def test_packages_are_stacked() -> None:
    """No package imports one above it, hence there are no cycles. ``import zcomm`` inside zero imports all of zcomm."""
    for package, order in ORDER.items():
        modules = _modules(package)
        assert {_room(module) for module in modules} == set(order)
        upwards = [
            f"{module} imports {used}"
            for module, tree in modules.items()
            for used in set(_imported_modules(tree))
            if used in modules and used != package and order.index(_room(used)) > order.index(_room(module))
        ]
        assert not upwards, "\n".join(upwards)


def test_modules_import_no_cycle() -> None:
    for package in LIBRARY:
        modules = _modules(package)
        graph = {
            name: {used for used in _imported_modules(tree) if used in modules and used != name}
            for name, tree in modules.items()
        }
        for name in modules:  # importing a module from its package is no import of the package's __init__
            graph[name] -= {name.rpartition(".")[0], package}
        assert set(TopologicalSorter(graph).static_order()) == set(modules)


def test_few_files_stand_at_the_top() -> None:
    for package in ORDER:
        top = [name for name in _library() if name.startswith(f"{package}/") and name.count("/") == 1]
        assert len(top) <= MAX_TOP_FILES, top


def test_each_package_says_what_it_is_for() -> None:
    for name, tree in _library().items():
        if name.endswith("/__init__.py") and name.count("/") == 2 and "/_" in name:
            said = ast.get_docstring(tree) or ""
            assert all(f"\n{word}" in said for word in ("In:", "Out:", "Called by:")), name


def test_public_names_are_the_listed_ones() -> None:
    """A public name is added or removed on purpose: tests/public_names.json lists it, and CHANGELOG.md says so."""
    listed = json.loads(PUBLIC_NAMES.read_text())
    for module, names in listed.items():
        assert sorted(importlib.import_module(module).__all__) == names, module


def test_what_is_no_api_is_private() -> None:
    """Names of internal packages begin with an underscore."""
    public = set(json.loads(PUBLIC_NAMES.read_text()))
    for package in ORDER:
        for module in _modules(package):
            room = f"{package}.{_room(module)}"
            assert room in public or room.split(".")[1].startswith("_") or module.count(".") < 2, module


def test_no_class_has_the_name_of_another() -> None:
    places = defaultdict[str, list[str]](list)
    for name, tree in _library().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{name}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_nobody_asks_for_the_kind_of_a_part() -> None:
    trees = (ast.parse(path.read_text()) for pattern in KINDS for path in ROOT.glob(pattern))
    kinds = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert {"Replica", "Primary", "HostStates", "CPUOptimizer", "FusedUpdater", "ExactReplica", "StateFiles"} <= kinds
    for name, tree in _library().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                asked = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
                assert not kinds & asked, f"{name}:{node.lineno}: {ast.unparse(node)}"


def test_only_the_command_line_imports_the_benchmarks() -> None:
    for name, tree in _library().items():
        if not name.startswith("zcomm/_bench/") and name != "zcomm/cli.py":
            assert not any(module.startswith("zcomm._bench") for module in _imported_modules(tree)), name


def test_imports_stand_at_the_top() -> None:
    for name, tree in _files().items():
        functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        late = [n.lineno for f in functions for n in ast.walk(f) if isinstance(n, (ast.Import, ast.ImportFrom))]
        assert not late or name in MAY_IMPORT_LATE, (name, late)


def _distributed_names(tree: ast.Module) -> Iterator[str]:
    """Names used from torch.distributed, as ``dist.x`` or by ``from torch.distributed import x``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("dist", "distributed", "torch.distributed"):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            yield from (alias.name for alias in node.names)


def test_only_the_backend_calls_collectives() -> None:
    for name, tree in _library().items():
        assert name in MAY_COMMUNICATE or not set(_distributed_names(tree)) & COLLECTIVES, name


def test_the_libraries_print_nothing() -> None:
    for name, tree in _library().items():
        calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        assert name.endswith("/cli.py") or "print" not in {f.id for f in calls if isinstance(f, ast.Name)}, name


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Each function, a method with the name of its class before its own."""
    methods = {
        id(member): f"{owner.name}.{member.name}"
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for member in owner.body
        if isinstance(member, ast.FunctionDef)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield methods.get(id(node), node.name), node


def test_files_and_functions_are_short() -> None:
    for name, tree in _files().items():
        assert len((ROOT / name).read_text().splitlines()) <= MAX_FILE_LINES, name
        for function, node in _functions(tree):
            where = f"{name}: {function}"
            assert (node.end_lineno or node.lineno) - node.lineno < MAX_FUNCTION_LINES, where
            if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue  # a kernel has no structures: every pointer, stride and constant is a parameter
            if name.startswith("zero/compat/"):
                continue  # signatures are DeepSpeed's
            parameters = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([p for p in parameters if p not in ("self", "cls")])
            assert count <= MORE_PARAMETERS.get(function, MAX_PARAMETERS), where


INVARIANT = re.compile(r"^ *([A-Z])1 +\S", re.MULTILINE)


def test_finalizers_only_hand_over() -> None:
    """A garbage collection runs them at any place, in any thread, under any lock: ``__del__`` appends to a deque."""
    for name, tree in _library().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "__del__":
                calls = [ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)]
                assert len(calls) == 1, f"{name}:{node.lineno} calls {calls}"
                assert re.search(r"dropped\.append$", calls[0], re.IGNORECASE), f"{name}:{node.lineno} calls {calls}"


def test_a_letter_of_invariants_belongs_to_one_module() -> None:
    """``(G3)`` in a comment is found by searching for its definition."""
    owners: dict[str, str] = {}
    for name, tree in _files().items():
        for letter in INVARIANT.findall(ast.get_docstring(tree) or ""):
            assert letter not in owners, f"{letter}1 stands in {owners[letter]} and in {name}"
            owners[letter] = name
    assert len(owners) > 15


COVERS = re.compile(r"^# covers (.+)$", re.MULTILINE)


def test_each_test_file_names_what_it_covers() -> None:
    """And every module of the library with a function or a class is covered by some test file."""
    listed = subprocess.run(["git", "ls-files", "tests"], cwd=ROOT, check=True, capture_output=True, text=True)
    covered = set[str]()
    for name in listed.stdout.splitlines():
        if not re.search(r"(^|/)test_\w+\.py$", name) or not (ROOT / name).exists():
            continue
        lines = COVERS.findall((ROOT / name).read_text())
        assert lines, f"{name} must have a line '# covers zero/a.py zcomm/_b/c.py'"
        for path in " ".join(lines).split():
            assert (ROOT / path).exists(), f"{name} covers {path}, which is not there"
            covered.add(path)
    defining = {
        name
        for name, tree in _library().items()
        if any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in tree.body)
    }
    assert sorted(defining - covered) == []
