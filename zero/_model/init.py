"""``zero.Init``: partition a model over the ranks while it is built, module by module.

Inside the block the constructors of all nn.Module classes are replaced by wrappers, as in DeepSpeed: when the outermost
constructor of a module returns, the module's parameters are partitioned.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zcomm import ConfigError, LayoutError
from zero._config.offload_sections import tiers_of
from zero._config.parse import Configuration, Source, read_source
from zero._config.resolved import choose_topology, resolve_config
from zero._model.init_shards import BuiltParameters
from zero._ranks.distributed import data_parallel, init_distributed, is_first_of_job, local_device
from zero._ranks.rank_errors import descendants, is_agreed, on_every_rank, raise_on_every_rank
from zero._storage.parameter_storage import InitFiles


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of ``module`` itself."""
    return dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])


def give_values(
    name: str, module: nn.Module, materialize: Callable[[nn.Module], None] | None, device: torch.device
) -> None:
    """Allocate the parameters and buffers of ``module`` that are on meta, and initialize them.

    Args:
        name: The module's name, for errors.
        module: Changed in place; its parameters stay the same objects, so tied ones stay tied.
        materialize: A function of a module. Default: the module's ``reset_parameters``.
        device: The device of the values.

    Raises:
        LayoutError: There is no such function, or it leaves a tensor without values.
    """
    given = {key: tensor for key, tensor in own_tensors(module).items() if tensor.is_meta}
    initialize = getattr(module, "reset_parameters", None)
    if materialize is not None:
        initialize = functools.partial(materialize, module)
    if initialize is None:
        raise LayoutError(
            f"module {name!r} ({type(module).__name__}) is on meta and has no reset_parameters(): pass "
            "zero.Init(module=..., materialize=a function of a module), for example materialize=model._init_weights"
        )
    versions = {}
    for key, tensor in given.items():
        empty = torch.empty_like(tensor, device=device)
        if empty.is_floating_point():
            empty.fill_(float("nan"))  # a tensor that stays NaN was not initialized: see below
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(empty, tensor.requires_grad)
            new.__dict__.update(tensor.__dict__)
            # Changes the tensor in place: modules and optimizers that refer to it keep their parameter.
            torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]
        else:
            module._buffers[key] = empty
        versions[key] = empty._version
    initialize()
    for key in given:
        value = getattr(module, key)
        if value.isnan().any() if value.is_floating_point() else value._version == versions[key]:
            raise LayoutError(
                f"{f'{name}.{key}'.lstrip('.')!r} was on meta and was given no value: materialize= must do that for "
                f"each {type(module).__name__}, or build that part outside of torch.device('meta')"
            )


logger = logging.getLogger("zero")

_ACTIVE: list[BuiltParameters] = []
"""What is built in the enabled zero.Init blocks that are entered, the innermost last."""
_BUILDING: set[int] = set()
"""The ids of modules whose constructor is running."""
_WRAPPED: list[tuple[type[nn.Module], Callable[..., None]]] = []
"""The classes whose constructors are replaced, with their original constructors."""
IGNORED = {
    "mem_efficient_linear",
    "pin_memory",
    "param_swapper",
    "override_module_apply",
    "sequence_data_parallel_group",
}
IGNORED_SWITCHES = {"zero_quantized_weights", "zero_param_parallel_group", "zero_quantized_nontrainable_weights"}


class Init:
    """In a ``with zero.Init():`` block, partition each module's parameters over the ranks as soon as it is built.

    Args:
        module: An existing module, which is partitioned at once. ``materialize`` first gives memory and values to what
            is on ``meta``. Such an ``Init`` need not be entered.
        data_parallel_group: The ranks. Default: all.
        remote_device: Where shards are stored until a ZeroOptimizer adopts them: "cpu", a torch device, or "nvme", the
            configuration's ``offload_param.nvme_path``. Default: this rank's GPU, or the CPU if there is none.
        config_dict_or_path: A DeepSpeed configuration: its dtype and ``zcomm.ranks_per_node`` are used.
        enabled: False: do nothing.
        dtype: The dtype of floating-point parameters. Default: the configuration's, or the one they are built with.
        mpu: An object with ``get_data_parallel_group()``, or a DeviceMesh, in place of ``data_parallel_group``.
        options: ``config``, the old name of ``config_dict_or_path``; ``ranks_per_node``; ``materialize``, a function of
            a module, such as transformers' ``model._init_weights`` (default: the module's ``reset_parameters``); and
            DeepSpeed's other arguments, such as ``mem_efficient_linear``, which have no effect.

    Raises:
        LayoutError: The ranks build different modules, or nothing gives values to a module on meta.
        StateError: Another rank's constructor failed; the message has the rank and its error.
        ConfigError: Unknown argument.

    All ranks get rank 0's values. Parameters keep their identity and shape. Until a ZeroOptimizer on the same ranks
    adopts them, read and change them inside :class:`zero.GatheredParameters`; constructors may simply use them.
    Modules built on ``meta`` stay there; pass the finished model to ``Init(module=model)``.

    Cost for each rank: one broadcast of every parameter, and memory for its shards and the parameters of the largest
    module, without its children.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        *,
        remote_device: str | torch.device | None = None,
        config_dict_or_path: Source | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **options: Any,
    ) -> None:
        self._construction: BuiltParameters | None = None
        if not enabled:
            return
        init_distributed()
        group = data_parallel_group if mpu is None else data_parallel(mpu).group
        source = config_dict_or_path if config_dict_or_path is not None else options.pop("config", None)
        ranks_per_node, materialize = options.pop("ranks_per_node", None), options.pop("materialize", None)

        def prepare() -> tuple[torch.device, torch.dtype | None, Configuration | None]:
            _check_options(options)
            configuration = None if source is None else read_source(source)
            chosen = dtype if configuration is None or dtype is not None else resolve_config(configuration, {}).dtype
            return _shard_device(remote_device, configuration), chosen, configuration

        device, chosen, configuration = on_every_rank(prepare, group)
        if ranks_per_node is None and configuration is not None:
            ranks_per_node = configuration.values.zcomm.ranks_per_node
        topology = choose_topology(None, ranks_per_node, group)
        files = None
        if remote_device == "nvme" and configuration is not None:
            tiers = tiers_of(configuration.values, stage=3)
            files = InitFiles(str(tiers.parameters.path), tiers.files, topology)
        self._construction = BuiltParameters(topology, device=device, dtype=chosen, files=files)
        if module is not None:
            self._partition_existing(module, materialize)

    def _partition_existing(self, module: nn.Module, materialize: Callable[[nn.Module], None] | None) -> None:
        construction = self._construction
        assert construction is not None, "of an enabled Init"
        construction.is_building = True  # materialize may use parameters that are partitioned already
        try:
            for name, part in module.named_modules():
                if any(tensor.is_meta for tensor in own_tensors(part).values()):
                    give = functools.partial(give_values, name, part, materialize, local_device())
                    on_every_rank(give, construction.topology)
                    construction.partition(part)
            construction.partition(module)
            construction.close_unused(even_used=True)
        finally:
            construction.is_building = False

    def __enter__(self) -> Init:
        if self._construction is not None:
            if not _ACTIVE:
                _wrap_constructors()
            _ACTIVE.append(self._construction)
            self._construction.is_building = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        construction = self._construction
        if construction is None:
            return
        _ACTIVE.remove(construction)
        construction.is_building = False
        if not _ACTIVE:
            _unwrap_constructors()
            _BUILDING.clear()  # ids are reused: one left behind would keep another module from being partitioned
        # Without it the other ranks deadlock in their next exchange.
        if isinstance(error, Exception) and not is_agreed(error):
            raise_on_every_rank(error, construction.topology)
        if error is None:
            construction.close_unused(even_used=True)
            on_every_rank(lambda: None, construction.topology, fact="the end of zero.Init")


def _check_options(options: dict[str, Any]) -> None:
    unknown = sorted(options.keys() - IGNORED - IGNORED_SWITCHES)
    if unknown:
        raise ConfigError(f"zero.Init has no arguments {unknown}")
    asked = sorted(name for name in IGNORED_SWITCHES if options.get(name))
    if asked and is_first_of_job():
        logger.info("zero.Init: %s take effect from the configuration of ZeroOptimizer", ", ".join(asked))


def _shard_device(remote_device: str | torch.device | None, configuration: Configuration | None) -> torch.device:
    if remote_device in (None, "none"):
        return local_device()
    if remote_device == "nvme":
        if configuration is None or not tiers_of(configuration.values, stage=3).parameters.path:
            raise ConfigError(
                "zero.Init(remote_device='nvme') needs config_dict_or_path= with offload_param.nvme_path, the folder"
            )
        return torch.device("cpu")
    return torch.device(remote_device)


def _wrap_constructors() -> None:
    for cls in dict.fromkeys(descendants(nn.Module)):
        _wrap(cls)
    nn.Module.__init_subclass__ = classmethod(_wrap_new_class)  # type: ignore[assignment]


def _wrap_new_class(cls: type[nn.Module], /, **options: Any) -> None:
    super(nn.Module, cls).__init_subclass__(**options)
    _wrap(cls)


def _wrap(cls: type[nn.Module]) -> None:
    """Replace the constructor of ``cls`` by one that also partitions the module, unless a subclass's does."""
    original = cls.__dict__.get("__init__")
    if original is None or cls.__module__.startswith("torch.jit"):
        return

    @functools.wraps(original)
    def build(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        # A subclass's constructor calls its base class's, which is wrapped, too. Only the outermost may partition: the
        # others' parameters are not complete before it returns.
        if id(self) in _BUILDING or not _ACTIVE:
            original(self, *args, **kwargs)
            return
        _BUILDING.add(id(self))
        try:
            original(self, *args, **kwargs)
        finally:
            _BUILDING.discard(id(self))
        _ACTIVE[-1].partition(self)

    cls.__init__ = build  # type: ignore[method-assign]
    _WRAPPED.append((cls, original))


def _unwrap_constructors() -> None:
    del nn.Module.__init_subclass__
    for cls, original in reversed(_WRAPPED):
        cls.__init__ = original
    _WRAPPED.clear()
