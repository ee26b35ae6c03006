"""Render the docstrings of zcomm's and zero's public names as HTML: ``python tools/docs.py [FOLDER]``.

Needs the extra ``docs``; without lightning the names of ``zero.integrations`` are left out. Every warning is an error:
a name in ``__all__`` or in a signature that does not resolve, say.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import typing
import warnings
from pathlib import Path
from types import ModuleType

import pdoc

import zcomm
import zero

ROLE = re.compile(r":\w+:`~?([\w.]+)`")
"""A reStructuredText reference; pdoc makes a link of a plain name in backticks."""


def resolve(module: ModuleType) -> None:
    """Import what a module imports on first use: pdoc reads a module's own dictionary."""
    vars(module).update({name: getattr(module, name) for name in module.__all__})
    for thing in vars(module).values():
        if inspect.isclass(thing) and issubclass(thing, tuple) and hasattr(thing, "_fields"):
            # The constructor of a named tuple knows nothing of its module, so pdoc could not resolve the types.
            thing.__new__.__annotations__ = typing.get_type_hints(thing)


def main() -> int:
    """Render into the folder, default ``build/docs``, and print the number of pages."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs")
    lightning = importlib.import_module("zero.integrations")
    if has_lightning := importlib.util.find_spec("lightning") is not None:
        resolve(lightning)
    else:
        vars(lightning)["__all__"] = []
    warnings.simplefilter("error")
    for module in (zcomm, zero, sys.modules["zero.initialize"]):
        resolve(module)
    google = pdoc.docstrings.google
    pdoc.docstrings.google = lambda text: google(ROLE.sub(r"`\1`", text))
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc("zcomm", "zero", *([] if has_lightning else ["!zero.integrations.lightning"]), output_directory=folder)
    pages = list(folder.rglob("*.html"))
    left = [page.name for page in pages if re.search(r":(class|func|meth|mod):", page.read_text())]
    if left:
        sys.exit(f"references that did not render, on {', '.join(left)}")
    print(f"{len(pages)} pages, from {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
