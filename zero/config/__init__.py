"""Configuration: DeepSpeed's JSON, this library's own keys, and keywords, all from one definition."""

from zero.config.activity import check_available
from zero.config.batch import BatchSizes, solve_batch_sizes
from zero.config.document import markdown_table
from zero.config.errors import NotAvailableError
from zero.config.explain import explain
from zero.config.plan import Plan, make_plan
from zero.config.presets import precision_preset
from zero.config.read import Configuration, parse, read_source
from zero.config.schema import json_schema
from zero.config.sections import Config

__all__ = [
    "BatchSizes",
    "Config",
    "Configuration",
    "NotAvailableError",
    "Plan",
    "check_available",
    "explain",
    "json_schema",
    "make_plan",
    "markdown_table",
    "parse",
    "precision_preset",
    "read_source",
    "solve_batch_sizes",
]
