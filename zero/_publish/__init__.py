"""Publish the weights of a training to a folder, losslessly, and read them in other processes.

In:  a ZeroOptimizer or a model, and a folder; to read, a folder and a model or state dict.
Out: patches between versions and snapshots in safetensors, made durable before their manifest has its name; or the
    weights of the newest version, whose digests were verified.
Called by: users, through zero.Publisher and zero.Subscriber, and by the command ``zero publish``.

Names are imported on first use: a training that publishes nothing need not load them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zero.errors import PublicationError

if TYPE_CHECKING:
    from zero._publish.publisher import Publisher
    from zero._publish.subscriber import Subscriber

__all__ = ["PublicationError", "Publisher", "Subscriber"]

MODULES = {"Publisher": "publisher", "Subscriber": "subscriber"}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})
