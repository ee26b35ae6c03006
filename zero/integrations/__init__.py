"""Front ends of other libraries: Lightning's Trainer with one line.

    Trainer(strategy=zero.integrations.ZeroStrategy(stage=3))                        ZeRO under Lightning
    Trainer(strategy="ddp", callbacks=[zero.integrations.InstallDDP()])              quantized gradients under DDP

In:  a Trainer of ``lightning`` (``pip install lightning``), which is imported when one of these names is first used.
Out: a strategy, a callback.
Called by: users.

transformers' Trainer and accelerate have no place for another library's strategy: their one line is the door,
:func:`zero.compat.as_deepspeed`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero.integrations.lightning import InstallDDP, ZeroStrategy

__all__ = ["InstallDDP", "ZeroStrategy"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("zero.integrations.lightning"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
