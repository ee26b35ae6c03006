"""What a user says about adaptive precision: the one definition, from which keys of a JSON take text and defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from zcomm.errors import ConfigError

__all__ = ["OUTLIERS", "AdaptivePrecision"]

OUTLIERS = ("skip", "clip", "keep")


def _setting(default: Any, doc: str, *, minimum: float | None = None, above: float | None = None) -> Any:
    return field(default=default, metadata={"doc": doc, "minimum": minimum, "above": above})


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptivePrecision:
    """How wire formats follow the training. Every field's text is in its metadata, under ``doc``.

    Raises:
        ConfigError: A value that cannot be meant.
    """

    max_relative_error: float | None = _setting(
        None,
        "largest relative error of one gradient exchange: each tensor travels in the fewest bits that were measured to "
        "keep it, instead of in a format that is asked for; with one, in no fewer bits than that has",
        above=0,
    )
    bf16_steps: int = _setting(0, "steps at the start in the parameters' dtype", minimum=0)
    int8_steps: int = _setting(0, "steps after those in 8 bits", minimum=0)
    sample_interval: int = _setting(50, "steps from one measurement of the errors to the next", minimum=1)
    quiet_steps: int = _setting(
        100, "steps without a jump before exchanges come back from the parameters' dtype to 8 bits, and as many again "
        "to fewer", minimum=1,
    )  # fmt: skip
    outlier: str = _setting(
        "skip",
        "what a step does whose gradient norm jumps: skip leaves parameters and moments as they are, clip scales its "
        "gradients to the running mean of the norm, keep takes them",
    )

    def __post_init__(self) -> None:
        """Refuse what can never be meant."""
        for one in fields(self):
            value, facts = getattr(self, one.name), one.metadata
            if one.name == "outlier":
                if value not in OUTLIERS:
                    raise ConfigError(f"outlier must be one of {', '.join(OUTLIERS)}: outlier={value!r}")
                continue
            if value is None and one.default is None:
                continue
            kind = "an integer" if isinstance(one.default, int) else "a number"
            fits = isinstance(value, int if kind == "an integer" else (int, float)) and not isinstance(value, bool)
            if not fits or not math.isfinite(value):
                raise ConfigError(f"{one.name} must be {kind}: {one.name}={value!r}")
            if facts["minimum"] is not None and value < facts["minimum"]:
                raise ConfigError(f"{one.name} must be at least {facts['minimum']}: {one.name}={value!r}")
            if facts["above"] is not None and value <= facts["above"]:
                raise ConfigError(f"{one.name} must be greater than {facts['above']}: {one.name}={value!r}")

    @classmethod
    def of(cls, given: AdaptivePrecision | Mapping[str, Any] | bool | None) -> AdaptivePrecision | None:  # noqa: FBT001
        """What ``given`` means: an instance, its fields, True for all defaults, None or False for none.

        Raises:
            ConfigError: It means nothing.
        """
        if given is None or given is False:
            return None
        if given is True:
            return cls()
        if isinstance(given, AdaptivePrecision):
            return given
        names = [one.name for one in fields(cls)]
        if not isinstance(given, Mapping):
            raise ConfigError(f"adaptive must be True, a dict or a zcomm.AdaptivePrecision: adaptive={given!r}")
        if unknown := [name for name in given if name not in names]:
            raise ConfigError(f"adaptive takes {', '.join(names)}: got {', '.join(map(repr, unknown))}")
        return cls(**given)
