"""``deepspeed.runtime.config_utils``: the base class of configurations, over pydantic, which is optional."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache, reduce
from importlib import import_module
from typing import Any

from zcomm import BackendUnavailableError, ConfigError

logger = logging.getLogger("zero")


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """The value of a key, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def __getattr__(name: str) -> Any:
    """Make the class when it is first used."""
    if name != "DeepSpeedConfigModel":
        raise AttributeError(name)
    return _config_model()


@cache
def _config_model() -> type:
    try:
        pydantic = import_module("pydantic")
    except ImportError as error:
        raise BackendUnavailableError(
            f"DeepSpeedConfigModel derives from pydantic.BaseModel: {error}; pip install 'pydantic>=2'"
        ) from error

    class DeepSpeedConfigModel(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        """Refuses unknown fields, and leaves out those that are ``"auto"`` unless ``strict``.

        A field with ``json_schema_extra={"deprecated": True, "new_param": "a.b"}`` that is given is moved to the field
        that it names, through ``new_param_fn`` if there is one, unless ``set_new_param`` is false.

        Raises:
            pydantic.ValidationError: A value does not fit its field.
            ConfigError: A deprecated field and the one that replaces it are both given.
        """

        model_config = pydantic.ConfigDict(
            validate_default=True, validate_assignment=True, use_enum_values=True, populate_by_name=True,
            extra="forbid", arbitrary_types_allowed=True, protected_namespaces=(),
        )  # fmt: skip

        def __init__(self, strict: bool = False, **data: Any) -> None:
            kept = {key: value for key, value in data.items() if strict or value != "auto" or key == "replace_method"}
            super().__init__(**kept)
            for name, field in type(self).model_fields.items():
                extra = field.json_schema_extra
                if extra and extra.get("deprecated") and name in self.model_fields_set:
                    _replace(self, name, extra)

    return DeepSpeedConfigModel


def _replace(model: Any, name: str, extra: Mapping[str, Any]) -> None:
    """Move the value of a deprecated field to the field that replaces it."""
    path = extra.get("new_param", "")
    logger.warning("%s is deprecated%s %s", name, f": use {path}" if path else "", extra.get("deprecated_msg", ""))
    if not path or not extra.get("set_new_param", True):
        return
    value = extra.get("new_param_fn", lambda given: given)(getattr(model, name))
    delattr(model, name)
    *held, last = path.split(".")
    owner = reduce(getattr, held, model)
    if last in owner.model_fields_set:
        raise ConfigError(f"{name} is deprecated, and {path} replaces it: give one of them")
    setattr(owner, last, value)
