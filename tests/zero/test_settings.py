"""Invalid values of ZeroSettings: the error names the setting and the value."""

# covers zero/_config/setting_keys.py zero/reports.py

from __future__ import annotations

from typing import Any

import pytest
import torch

from zcomm import ConfigError
from zero import ZeroSettings
from zero._config.keys import definitions, own_keys
from zero._config.resolved import resolve_config
from zero._config.sections import Config
from zero._config.settings import setting_name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stage3_max_live_parameters", -1),
        ("stage3_prefetch_bucket_size", True),
        ("stage3_max_reuse_distance", "1"),
        ("overlap_comm", 2),
        ("hpz_secondary_device", "disk"),
        ("residual_beta", True),
        ("residual_beta", "1"),
        ("residual_beta", 1.5),
        ("gradient_dtype", torch.int8),
        ("gradient_format", ("int8", "int4", "int4")),
        ("mode", "delta-hpz"),
        ("backend", "gloo"),
        ("stage", 4),
    ],
)
def test_a_value_that_cannot_be_meant_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as raised:
        ZeroSettings(**{name: value})
    assert repr(value) in str(raised.value)


def test_a_value_is_converted_as_in_a_configuration() -> None:
    settings = ZeroSettings(reduce_bucket_size=5e8, gradient_format=["int8", "int4"])  # type: ignore[arg-type]
    assert (settings.reduce_bucket_size, settings.gradient_format) == (500_000_000, ("int8", "int4"))
    assert isinstance(settings.reduce_bucket_size, int)


def test_a_setting_and_its_key_are_alike() -> None:
    """But for the stage: without a configuration it is 1, and 0 in a configuration that does not name it."""
    settings, compared = own_keys(ZeroSettings), 0
    for definition in definitions(Config):
        if (name := setting_name(definition.path)) and name not in ("stage", "gradient_accumulation_steps"):
            setting = settings[name]
            assert (setting.kind, setting.default) == (definition.kind, definition.default), name
            assert setting.key.minimum == definition.key.minimum, name
            compared += 1
    assert compared == len(settings) - 2
    assert resolve_config({"comet": {"mode": "create"}}, {}).settings.mode is None  # a section's own key
