"""``deepspeed.utils``, ``.runtime.utils``, ``.runtime.dataloader`` and ``.moe.utils``: small helpers of scripts."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import cache, reduce
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.torch_version import TorchVersion as Version
from torch.utils.data import DataLoader

import zero
from zero._access.gathered_parameters import gathered_for_generation
from zero.compat.names import INTERFACE

Result = TypeVar("Result")
logger = logging.getLogger("zero")
version, git_hash, git_branch = INTERFACE, None, None
__git_hash__, __git_branch__ = git_hash, git_branch
__version_major__, __version_minor__, __version_patch__ = (int(number) for number in INTERFACE.split("."))
torch_info = dict.fromkeys(("version", "cuda_version", "nccl_version", "hip_version"), "0.0")
"""Of the build: there is none, so those who read this ask torch."""
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
"""The file that DeepSpeed's launcher reads; accelerate names it."""
DeepSpeedDataLoader = DataLoader
non_reentrant_checkpoint = zero.checkpoint
LinearModuleForZeroStage3, zero3_linear_wrap = nn.Linear, nn.functional.linear
"""Torch's: here a saved weight is released and gathered again whatever computes with it."""


class OffloadDeviceEnum(str, Enum):
    """Where states or parameters rest."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """What ``engine.offload_states(include=...)`` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def log_dist(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on ``ranks``; -1 means all. Without ranks only a process that is not distributed logs."""
    given = list(ranks or ())
    if not dist.is_initialized() or given[:1] == [-1] or _rank() in given:
        logger.log(level, "[Rank %d] %s", _rank(), message)


@cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """:func:`log_dist`, the first time that this process has this message."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


def warning_once(message: str) -> None:
    """Log a warning, the first time that this process has it."""
    _log_once(message, None, logging.WARNING)


def print_rank_0(message: object, debug: bool = False, force: bool = False) -> None:
    """Print on rank 0, if asked to."""
    if _rank() == 0 and (debug or force):
        sys.stdout.write(f"{message}\n")


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of ``custom_logger``, or of this library's."""
    (custom_logger or logger).setLevel(log_level_str.upper())


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log allocated GPU memory on rank 0, if ``force``."""
    if force and _rank() == 0:
        now, most = (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) if _has_gpu() else (0, 0)
        logger.info("%s: allocated %.2f GiB, at most %.2f GiB", message, now / 2**30, most / 2**30)


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def empty_cache() -> None:
    """Return cached GPU memory."""
    if _has_gpu():
        torch.cuda.empty_cache()


def set_random_seed(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str) -> None:
    """Make the folder that ``filename`` is in."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def noop_decorator(func: Callable[..., Result]) -> Callable[..., Result]:
    """``func`` itself."""
    return func


instrument_w_nvtx = noop_decorator


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """``item`` with its tensors on ``device``; those that ``criterion_func`` chooses are moved in place."""
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    if isinstance(item, (list, tuple)):
        return type(item)([move_to_device(one, device, criterion_func) for one in item])
    if isinstance(item, dict):
        return {key: move_to_device(one, device, criterion_func) for key, one in item.items()}
    return item.to(device)


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """The attribute ``"a.b.c"`` of ``model``."""
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Set the attribute ``"a.b.c"`` of ``model``."""
    *held, name = module_name.split(".")
    setattr(reduce(getattr, held, model), name, module)


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch's version is within bounds, both included."""
    installed = Version(torch.__version__)
    is_old = min_version is not None and Version(str(min_version)) > installed
    return not is_old and (max_version is None or Version(str(max_version)) >= installed)


class RepeatingLoader:
    """Iterates over ``loader`` again and again."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class OnDevice:
    """Inside, new tensors and modules are made on ``device``, and floating-point ones in ``dtype``."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if self._enabled:
            self._stack.enter_context(self._device)
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """The model of an engine, with full parameters for the block. Collective."""
    module = model.module if isinstance(model, zero.Engine) else model
    with gathered_for_generation(module):
        yield module


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether ``param`` is an expert's, in DeepSpeed's marking."""
    return not getattr(param, "allreduce", True)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """No module here is DeepSpeed's MoE layer: ``(False, 0)``."""
    return False, 0


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a parameter group is of experts."""
    return bool(param_group.get("moe"))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Any, max_group_size: int | float | None = None
) -> list[dict[str, Any]]:
    """The groups as they are: there are no parameters of DeepSpeed's MoE layers."""
    if isinstance(param_groups, Iterator):
        param_groups = list(param_groups)
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


def _print_estimate(model: nn.Module | zero.Counts, stage: int, ranks: int, nodes: int) -> None:
    zero.estimate(model, {"zero_optimization": {"stage": stage}}, nodes, ranks)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print :func:`zero.estimate`, which has a table of all stages and tiers, without the factor."""
    _print_estimate(model, 2, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print :func:`zero.estimate`, which has a table of all stages and tiers, without the factor."""
    _print_estimate(model, 3, num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print :func:`zero.estimate` for a model of so many parameters."""
    _print_estimate(zero.Counts(numel=total_params), 2, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print :func:`zero.estimate` for a model of so many parameters, the largest layer with so many."""
    _print_estimate(zero.Counts(numel=total_params, largest_unit=largest_layer_params), 3, num_gpus_per_node, num_nodes)
