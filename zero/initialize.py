"""``zero.initialize``: DeepSpeed's entry point, which builds an engine from a model and a JSON configuration."""

from __future__ import annotations

import argparse
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from zcomm import ConfigError, StateError
from zero._access.gathered_parameters import GatheredParameters
from zero._config import (
    BatchSizes,
    Configuration,
    NotAvailableError,
    check_available,
    explain,
    resolve_config,
    solve_batch_sizes,
)
from zero._config.offload_sections import tiers_of
from zero._config.parse import Source
from zero._model.cast import move
from zero._model.model_checks import check_is_plain
from zero._optim.from_config import build_optimizer
from zero._optim.lr_schedulers import build_scheduler
from zero._optim.muon import build_muon, split_by_role
from zero._optim.several import as_one
from zero._ranks.distributed import DataParallel, RankDataLoader, data_parallel, init_distributed, local_device
from zero._ranks.rank_errors import on_every_rank
from zero._storage.tier_settings import Tier
from zero.engine import Engine
from zero.optimizer import ZeroOptimizer

__all__ = ["Initialized", "add_config_arguments", "initialize"]

logger = logging.getLogger("zero")
Collate = Callable[[list[Any]], Any]


class Initialized(NamedTuple):
    """What :func:`initialize` returns, in DeepSpeed's order."""

    engine: Engine
    optimizer: ZeroOptimizer
    training_dataloader: RankDataLoader | None
    lr_scheduler: Any


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,  # noqa: FBT001  (DeepSpeed's signature)
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Source | None = None,
    mesh_param: Sequence[int] | None = None,
    config_params: Source | None = None,
    *,
    engine_class: type[Engine] = Engine,
) -> Initialized:
    """Prepare a model for training under a DeepSpeed configuration. Collective.

    Without an optimizer, here and in the configuration, the model is prepared for evaluation: all its parameters are
    frozen until ``engine.destroy()``, and no master, gradient or optimizer state is held.

    Args:
        args: Parsed arguments; ``args.deepspeed_config`` is the configuration if ``config`` is not given.
        model: Moved to this rank's device and cast to the configured dtype, in place.
        optimizer: An instance without state, a class, or a function of the parameters. Default: the configuration's.
        model_parameters: Parameters or groups for an optimizer that is built here. Default: all trainable ones.
        training_data: A dataset; the returned dataloader has this rank's share of it.
        lr_scheduler: A scheduler, or a function of the optimizer. Default: the configuration's, if it has one.
        distributed_port: The port for initializing torch.distributed if MASTER_PORT is not set.
        mpu: An object with Megatron's ``get_data_parallel_group()``, or a DeviceMesh with an axis for data; see
            :mod:`zero._ranks.model_parallel`. Default: all ranks are data-parallel.
        dist_init_required: False: torch.distributed must be initialized already. Default: initialize it if needed.
        collate_fn: The dataloader's.
        config: A dict, or the path of a JSON file.
        mesh_param: The numbers of data-parallel and of sequence-parallel ranks; the second must be 1.
        config_params: The old name of ``config``.
        engine_class: The class of the engine.

    Raises:
        NotAvailableError: The configuration asks for something that this version does not support; names the keys.
        ConfigError: No model or configuration, or an invalid one. Also what :class:`zero.ZeroOptimizer` raises.
    """
    ranks = _start(distributed_port, dist_init_required, mpu)
    read = partial(_read, engine_class, (args, config, config_params), mesh_param, ranks)
    engine_class.end_others(model, lambda: _try_settings(read()[0], optimizer, lr_scheduler))

    def prepare() -> _Prepared:
        configuration, sizes = read()
        data = _new_dataloader(training_data, ranks, sizes, configuration, collate_fn)
        placed = _placed(model, local_device(args))
        built = _choose_optimizer(optimizer, placed, model_parameters, configuration)
        return _Prepared(placed, configuration, sizes, data, built)

    with _unfrozen_on_error(model) as trainable:
        engine = _build(engine_class, on_every_rank(prepare, ranks.group), ranks, lr_scheduler, trainable)
    return Initialized(engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler)


def _start(port: int, dist_init_required: Any, mpu: Any) -> DataParallel:
    if dist_init_required is False and not torch.distributed.is_initialized():
        raise StateError("torch.distributed is not initialized: dist_init_required=False; call init_process_group()")
    init_distributed(distributed_port=port)
    return data_parallel(mpu)


class _Prepared(NamedTuple):
    """What every rank has checked before any process group is made."""

    model: nn.Module
    configuration: Configuration
    batch_sizes: BatchSizes
    loader: RankDataLoader | None
    optimizer: Optimizer


def _build(
    engine_class: type[Engine], ready: _Prepared, ranks: DataParallel, scheduler: Any, trainable: list[nn.Parameter]
) -> Engine:
    model, configuration = ready.model, ready.configuration
    optimizer = engine_class.optimizer_class(model, ready.optimizer, config=configuration, group=ranks)
    scheduler = _choose_scheduler(scheduler, model, optimizer, configuration)
    sizes = ready.batch_sizes
    frozen = [param for param in trainable if not param.requires_grad]
    engine = engine_class(
        model, optimizer, lr_scheduler=scheduler, configuration=configuration, batch_sizes=sizes, frozen=frozen
    )
    engine.training_dataloader = ready.loader
    if ranks.rank == ranks.model_parallel.rank == 0:
        _announce(configuration, sizes, ranks)
    return engine


@contextmanager
def _unfrozen_on_error(model: Any) -> Iterator[list[nn.Parameter]]:
    """The parameters that are trainable, and are so again after an error."""
    params = model.parameters() if isinstance(model, nn.Module) else ()
    trainable = [param for param in params if param.requires_grad]
    try:
        yield trainable
    except BaseException:
        for param in trainable:
            param.requires_grad_()
        raise


def _placed(model: Any, device: torch.device) -> nn.Module:
    """``model`` on ``device``."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module: got {model!r}")
    check_is_plain(model)  # moving the model would untie parameters that share memory
    move(model, device)
    return model


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to ``parser``, and return it."""
    group = parser.add_argument_group("DeepSpeed", "configuration of zero.initialize")
    group.add_argument("--deepspeed", action="store_true", help="for scripts that ask for it; nothing here does")
    group.add_argument("--deepspeed_config", type=str, default=None, metavar="FILE", help="JSON configuration")
    return parser


def _find_source(args: Any, config: Source | None, config_params: Source | None) -> Source:
    from_args = getattr(args, "deepspeed_config", None)
    given = [source for source in (config, config_params, from_args) if source is not None]
    if not given:
        raise ConfigError("a configuration must be given: config=, or --deepspeed_config in args")
    if len(given) > 1 and any(source != given[0] for source in given):
        raise ConfigError("only one configuration may be given: config=, config_params= or --deepspeed_config in args")
    return given[0]


def _read(
    engine_class: type[Engine],
    given: tuple[Any, Source | None, Source | None],
    mesh_param: Sequence[int] | None,
    ranks: DataParallel,
) -> tuple[Configuration, BatchSizes]:
    configuration = engine_class.read_config(_find_source(*given))
    check_available(configuration)
    _check_mesh(mesh_param, ranks.world_size)
    if configuration.values.log_level is not None:
        logger.setLevel(configuration.values.log_level.upper())
    return configuration, solve_batch_sizes(configuration.values, ranks.world_size)


def _try_settings(configuration: Configuration, optimizer: Any, scheduler: Any) -> None:
    """Raise what :func:`initialize` would raise for the configuration alone, before the model is touched."""
    resolve_config(configuration, {})
    stand_in = nn.ParameterList([nn.Parameter(torch.zeros(1, device="cpu"))])
    built = _choose_optimizer(None, stand_in, None, configuration) if optimizer is None else None
    choice = configuration.values.scheduler
    if scheduler is None and choice.type is not None and not any(map(_is_list, choice.params.values())):
        params = {name: value for name, value in choice.params.items() if name != "last_batch_iteration"}
        build_scheduler(choice.type, params, built or torch.optim.SGD(stand_in))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))  # one value for each parameter group, of which a stand-in has one


def _check_mesh(mesh_param: Sequence[int] | None, world_size: int) -> None:
    if mesh_param is None:
        return
    data, *others = mesh_param
    if any(size != 1 for size in others):
        raise NotAvailableError(f"sequence parallelism is not available: mesh_param={tuple(mesh_param)}; pass mpu=")
    if data != world_size:
        raise ConfigError(f"mesh_param[0] must be the number of ranks: {data}, not {world_size}")


def _announce(configuration: Configuration, batch_sizes: BatchSizes, ranks: DataParallel) -> None:
    if configuration.values.dump_state:
        logger.info("%s", explain(configuration, world_size=ranks.world_size))
    if batch_sizes.note:
        logger.info("%s", batch_sizes.note)


def _choose_optimizer(given: Any, model: nn.Module, parameters: Any, configuration: Configuration) -> Optimizer:
    choice, given = configuration.values.optimizer, as_one(given)
    if isinstance(given, Optimizer):
        return given
    if parameters is None:
        parameters = [param for param in model.parameters() if param.requires_grad]
    elif inspect.isgenerator(parameters):
        parameters = list(parameters)
    if given is None:
        if choice.type is None:
            model.requires_grad_(requires_grad=False)
            return torch.optim.SGD([{"params": []}], lr=0.0)
        values = configuration.values
        states = tiers_of(values, stage=values.zero_optimization.stage).states
        on_host = states.tier is not Tier.DEVICE and (states.ratio == 1 or not torch.cuda.is_available())
        if choice.type.lower() == "muon":
            return build_muon(choice.params, parameters, split_by_role(model).matrices)
        return build_optimizer(choice.type, choice.params, parameters, on_host=on_host)
    if not callable(given):
        raise ConfigError(f"optimizer must be an instance, a class or a function of the parameters: got {given!r}")
    built = given(parameters)
    if not isinstance(built, Optimizer):
        raise ConfigError(f"optimizer(parameters) must return a torch.optim.Optimizer: got {type(built).__name__}")
    return built


def _choose_scheduler(given: Any, model: nn.Module, optimizer: ZeroOptimizer, configuration: Configuration) -> Any:
    choice = configuration.values.scheduler

    def choose() -> Any:
        if given is not None:
            return given if hasattr(given, "step") else given(optimizer)
        return None if choice.type is None else build_scheduler(choice.type, choice.params, optimizer)

    try:
        return on_every_rank(choose, optimizer.topology)
    except Exception:
        with GatheredParameters(model.parameters()):  # the model stays full
            optimizer.close()
        raise


def _new_dataloader(
    dataset: Any, ranks: DataParallel, sizes: BatchSizes, configuration: Configuration, collate_fn: Collate | None
) -> RankDataLoader | None:
    if dataset is None:
        return None
    if sizes.micro is None:
        raise ConfigError("training_data needs train_batch_size or train_micro_batch_size_per_gpu")
    drop_last = configuration.values.dataloader_drop_last
    return RankDataLoader(dataset, ranks, batch_size=sizes.micro, collate_fn=collate_fn, drop_last=drop_last)
