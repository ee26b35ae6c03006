"""Opens the door: makes ``import deepspeed`` in this process give the names of :mod:`zero.compat.names`."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from zcomm import StateError
from zero._config import NotAvailableError
from zero.compat import front_ends, parameters
from zero.compat.names import ABSENT_NAMES, ABSENT_PACKAGES, FALLBACKS, INTERFACE, MODULES, NAMES

logger = logging.getLogger("zero")
PACKAGE = "deepspeed"
VERSION = f"{INTERFACE}+zcomm.zero"
"""What ``deepspeed.__version__`` is: the version whose interface this follows, marked as not DeepSpeed's."""
SPAWNED = Path(__file__).parent / "spawned"
"""On ``sys.path``, which spawned processes inherit: what they find before anything opens the door."""
METADATA = (SPAWNED / f"{PACKAGE}-{VERSION}.dist-info" / "METADATA").read_text()


DECIDED_AT_IMPORT = ("transformers.integrations.deepspeed", "accelerate.accelerator")
"""Modules that define other classes if there is no DeepSpeed when they are imported."""


def as_deepspeed() -> None:
    """Make ``deepspeed`` mean this library, in this process and those that multiprocessing starts from it.

    A second call does nothing.

    Raises:
        StateError: A real DeepSpeed has been imported already, or a front end that has looked for one and found none.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if PACKAGE in sys.modules:
        raise StateError(
            f"{PACKAGE} has been imported already, from {getattr(sys.modules[PACKAGE], '__file__', None)}: call "
            "zero.compat.as_deepspeed() before, or run the script by python -m zero.compat"
        )
    if late := [name for name in DECIDED_AT_IMPORT if name in sys.modules]:
        raise StateError(
            f"{' and '.join(late)} looked for {PACKAGE} when it was imported, and found none: call "
            "zero.compat.as_deepspeed() before, or run the script by python -m zero.compat"
        )
    sys.meta_path.insert(0, _Finder())
    if str(SPAWNED) not in sys.path:
        sys.path.insert(1, str(SPAWNED))
    parameters.add_attributes()
    if os.environ.get("RANK", "0") == "0" and multiprocessing.parent_process() is None:
        logger.warning(
            "zero.compat: in this process `import deepspeed` gives zcomm-zero's names, and no code of DeepSpeed"
        )


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``deepspeed``, its submodules, and its version."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in front_ends.TESTED:
            front_ends.check_version(name)
        if name != PACKAGE and not name.startswith(PACKAGE + "."):
            return None
        own = name[len(PACKAGE) + 1 :]
        if own not in MODULES:
            if not _is_import():
                return None
            # Without a name in the error Python passes it on from `from deepspeed import X`, with its text.
            raise ModuleNotFoundError(_absent(own))
        spec = importlib.machinery.ModuleSpec(name, _Loader(own), origin=__file__, is_package=True)
        spec.has_location = True
        return spec

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        """Answer ``importlib.metadata``: front ends look for a distribution before they import it."""
        if context is None or context.name is None or context.name.lower() == PACKAGE:
            yield _Distribution()


def _is_import() -> bool:
    """Whether the finder that calls this serves an import, and not a question: ``importlib.util.find_spec()``."""
    frame = sys._getframe(3)  # this, the finder and importlib's own _find_spec() lie between
    return frame.f_code.co_name == "_find_and_load_unlocked"


class _Loader(importlib.abc.Loader):
    def __init__(self, own: str) -> None:
        self._own = own

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return CompatModule(spec.name, self._own)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is to be executed: names are looked up when they are used."""


_DUNDERS = {"__version__"} | {
    name for parts in NAMES.values() for names in parts.values() for name in names.split() if name.startswith("__")
}
"""Names with two underscores in front that DeepSpeed has; Python asks for others."""


class CompatModule(ModuleType):
    """A module ``deepspeed.X``. Its names are imported when they are first used."""

    def __init__(self, name: str, own: str) -> None:
        super().__init__(name, f"Names of DeepSpeed's module {name}, provided by zcomm-zero.")
        self._own = own

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep a listed name that a submodule has as well: importing the submodule sets it on its parent."""
        listed = (names.split() for names in NAMES.get(self.__dict__.get("_own", ""), {}).values())
        if not (isinstance(value, ModuleType) and any(name in some for some in listed)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("_own", "")
        path = f"{own}.{name}" if own else name
        if name == "__all__":
            return [known for known in dir(self) if not known.startswith("_")]
        if name.startswith("__") and name not in _DUNDERS:
            raise AttributeError(name)
        value = self._find(path, name, own)
        setattr(self, name, value)
        return value

    def _find(self, path: str, name: str, own: str) -> Any:
        if path == "__version__":
            return VERSION
        for target, names in NAMES.get(own, {}).items():
            if name in names.split():
                return getattr(importlib.import_module(target), name)
        if path in MODULES:
            return importlib.import_module(f"{PACKAGE}.{path}")
        for target in FALLBACKS.get(own, ()):
            module = importlib.import_module(target)
            if hasattr(module, name):
                return getattr(module, name)
        if path in ABSENT_NAMES:
            return _placeholder(path)
        raise AttributeError(_absent(path))

    def __dir__(self) -> list[str]:
        listed = [name for names in NAMES.get(self._own, {}).values() for name in names.split()]
        return sorted({*super().__dir__(), *listed})


def _absent(path: str) -> str:
    """The text about a name that does not exist here."""
    parts, remedies = path.split("."), ABSENT_PACKAGES | ABSENT_NAMES
    for count in range(len(parts), 0, -1):
        if remedy := remedies.get(".".join(parts[:count])):
            return f"{PACKAGE}.{path} is not available in zcomm-zero, which answers for {PACKAGE} here: {remedy}"
    listed = ((module, names.split()) for module, sources in NAMES.items() for names in sources.values())
    homes = (module for module, names in listed if module and parts[-1] in names)
    if home := next(homes, None):
        return f"{PACKAGE}.{path} is not a name that zcomm-zero provides: use {PACKAGE}.{home}.{parts[-1]}"
    return (
        f"{PACKAGE}.{path} is not a name that zcomm-zero provides (zero.compat answers for {PACKAGE} in this process): "
        "zero/compat/names.py lists them; run the script without zero.compat to use an installed DeepSpeed"
    )


def _placeholder(path: str) -> type:
    """A class in place of one that does not exist here: it may be imported and be a base; an object of it raises."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotAvailableError(_absent(path))

    return type(path.rpartition(".")[2], (), {"__new__": refuse})


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        return {"METADATA": METADATA, "top_level.txt": PACKAGE}.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / str(path)
