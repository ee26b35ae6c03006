"""What a Runtime is made of: parts that report what they hold, and that end with a step and with the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RuntimePart:
    """A part that holds, describes and saves nothing; each overrides what it does."""

    state_key: str | None = None
    """Under which ``ZeroOptimizer.state_dict()`` has its state; None: it has none."""

    def held(self) -> Mapping[str, int]:
        """Bytes of memory beyond the formula's, by the name that the memory report gives them."""
        return {}

    def described(self) -> tuple[str, ...]:
        """What ``optimizer.effective`` says of it."""
        return ()

    def state_dict(self) -> Any:
        """This rank's state; None if there is none. Collective if parameters are in files."""

    def load_state_dict(self, state: Any) -> list[Any]:  # noqa: ARG002
        """Restore what :meth:`state_dict` returned; the buckets that must then be written back. Collective."""
        return []

    def step_ended(self) -> None:
        """A step was taken, or skipped on every rank."""

    def close(self) -> None:
        """Free what it holds; a second call does nothing."""
