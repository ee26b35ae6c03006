"""The section ``zcomm.adaptive``: the fields of :class:`zcomm.AdaptivePrecision`, their texts and defaults as keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from zcomm import AdaptivePrecision
from zcomm.adaptive.settings import OUTLIERS
from zero.config.keys import key

__all__ = ["Adaptive", "section_of"]

DEFINED = {field.name: field for field in fields(AdaptivePrecision)}


def _defined(name: str, **facts: Any) -> Any:
    field = DEFINED[name]
    minimum, above = field.metadata["minimum"], field.metadata["above"]
    return key(field.default, field.metadata["doc"], minimum=minimum, is_positive=above is not None, **facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """``zcomm.adaptive``: wire formats that follow the training."""

    enabled: bool = key(
        False,
        "formats of weights and gradients follow measured errors, a schedule, and jumps of norm and loss; on, too, "
        "where max_relative_error is given",
        false="formats stay as they are",
        active_if="stage 1+",
    )
    max_relative_error: float | None = _defined("max_relative_error", active_if="stage 1+")
    bf16_steps: int = _defined("bf16_steps", active_if="adaptive")
    int8_steps: int = _defined("int8_steps", active_if="adaptive")
    sample_interval: int = _defined("sample_interval", active_if="adaptive")
    quiet_steps: int = _defined("quiet_steps", active_if="adaptive")
    outlier: str = _defined("outlier", choices=OUTLIERS, active_if="adaptive")

    @property
    def is_on(self) -> bool:
        """Whether anything of it has an effect, from stage 1 on."""
        return self.enabled or self.max_relative_error is not None

    @property
    def settings(self) -> AdaptivePrecision | None:
        """What the section says; None: nothing.

        Raises:
            ConfigError: A value that cannot be meant.
        """
        return AdaptivePrecision(**{name: getattr(self, name) for name in DEFINED}) if self.is_on else None


def section_of(given: Any) -> dict[str, Any]:
    """The keys that the keyword ``adaptive=`` stands for: True or False, a dict, or an AdaptivePrecision."""
    if isinstance(given, AdaptivePrecision):
        given = asdict(given)
    if isinstance(given, Mapping):
        return {"enabled": True, **given}
    return {"enabled": given}
