"""Reads DeepSpeed's JSON, the section "zcomm" and keyword arguments, and decides which settings take effect.

In:  a dict, a JSON file, or keyword arguments of ZeroOptimizer.
Out: ZeroSettings, and the origin of every value; or one ConfigError that names the key and the remedy.
Called by: zero.optimizer, zero.initialize, zero._model.init, zero.plan, and the command line.
"""

from zero._config.batch import BatchSizes, solve_batch_sizes
from zero._config.explain import explain
from zero._config.json_schema import json_schema, markdown_table
from zero._config.key_support import check_available
from zero._config.legacy import precision_preset
from zero._config.parse import Configuration, parse, read_source
from zero._config.resolved import ResolvedConfig, resolve_config
from zero._config.sections import Config
from zero.errors import NotAvailableError

__all__ = [
    "BatchSizes",
    "Config",
    "Configuration",
    "NotAvailableError",
    "ResolvedConfig",
    "check_available",
    "explain",
    "json_schema",
    "markdown_table",
    "parse",
    "precision_preset",
    "read_source",
    "resolve_config",
    "solve_batch_sizes",
]
