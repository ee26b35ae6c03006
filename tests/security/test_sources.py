"""The sources contain no call that unpickles or executes data from outside."""

# covers zcomm/__init__.py

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(p for package in ("zcomm", "zero", "triton_kernels") for p in (ROOT / package).rglob("*.py"))
UNPICKLING = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}
HARMLESS = {"UnpicklingError"}
OBJECTS = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
BUILTINS = {"eval", "exec", "compile", "__import__"}
"""Dangerous only as plain names: model.eval() is another function."""
# DCP's driver exchanges plans by object collectives; its planners and storage do not.
DCP_DRIVERS = {"state_dict_saver", "state_dict_loader", "FileSystemReader", "FileSystemWriter", "DefaultStager"}


def offences(source: str) -> list[str]:
    """List the calls in a module that could execute data written by others."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLING]
        elif isinstance(node, ast.ImportFrom):
            is_bad = (node.module or "").split(".")[0] in UNPICKLING
            names = [alias.name for alias in node.names]
            found += [name for name in names if (is_bad and name not in HARMLESS) or name in OBJECTS | DCP_DRIVERS]
        elif isinstance(node, ast.Attribute) and node.attr in OBJECTS:
            found.append(node.attr)
        elif isinstance(node, ast.Call):
            found += _of_call(node)
    return found


def _of_call(node: ast.Call) -> list[str]:
    name = ast.unparse(node.func)
    options = {option.arg: ast.unparse(option.value) for option in node.keywords}
    if name in BUILTINS:
        return [name]
    if name == "torch.load" and options.get("weights_only") != "True":
        return ["torch.load without weights_only=True"]
    if name in ("np.load", "numpy.load") and options.get("allow_pickle", "False") != "False":
        return ["numpy.load with allow_pickle"]
    if name.startswith("torch.") and name.rpartition(".")[2] in ("import_ir_module", "package", "PackageImporter"):
        return [name]
    return []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_unpickles(path: Path) -> None:
    assert offences(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "torch.load(path)",
        "torch.load(path, weights_only=flag)",
        "np.load(path, allow_pickle=True)",
        "dist.broadcast_object_list(values)",
        "from torch.distributed import all_gather_object",
        "from torch.distributed.checkpoint import state_dict_loader as dcp",
        "value = eval(text)",
    ],
)
def test_the_check_finds(source: str) -> None:
    assert len(offences(source)) == 1


def test_the_check_passes_what_runs_nothing() -> None:
    assert offences("from pickle import UnpicklingError\nmodel.eval()\ntorch.load(p, weights_only=True)") == []
