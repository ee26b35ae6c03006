"""``deepspeed.initialize`` and its engine: DeepSpeed's defaults, and methods that only its scripts call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero
from zcomm import ConfigError, StateError
from zero._checkpoint.export import read_weights
from zero._config import read_source
from zero._config.parse import Configuration, Source
from zero._config.resolved import to_dtype
from zero._config.sections import Config
from zero._optim.loss_scale import DynamicLossScale
from zero._ranks.distributed import DataParallel, RankDataLoader
from zero.compat import comm
from zero.compat.monitors import EngineMonitor
from zero.compat.parameters import drop_engine, end_engines, hold_engine
from zero.compat.sections import ValuesByName, make_folders, with_defaults
from zero.compat.timers import ThroughputTimer
from zero.initialize import Initialized

DeepSpeedConfigError = ConfigError


class LossError(StateError, AssertionError):
    """Raised by ``engine.scale()``; an AssertionError, too, as in DeepSpeed."""


ZeRORuntimeException = zero.CheckpointError
"""What scripts catch around ``load_checkpoint``. That another number of ranks saved it is no error here."""


class LossScaler:
    """What scripts read of DeepSpeed's ``optimizer.loss_scaler`` and ``optimizer.loss_scale_config``."""

    raise_error_at_min_scale = True

    def __init__(self, optimizer: DeepSpeedOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the scale changes."""
        return self._optimizer.dynamic_loss_scale

    @property
    def cur_scale(self) -> float:
        """The scale."""
        return self._optimizer.cur_scale

    loss_scale = cur_scale

    @property
    def cur_iter(self) -> int:
        """Steps so far, skipped ones included."""
        return self._optimizer.num_boundaries

    @property
    def scale_window(self) -> int | None:
        """Steps without an overflow before the scale doubles; None: it is constant."""
        scale = self._optimizer.loss_scale
        return scale.window if isinstance(scale, DynamicLossScale) else None

    @property
    def min_scale(self) -> float | None:
        """The smallest scale; None: it is constant."""
        scale = self._optimizer.loss_scale
        return scale.min_scale if isinstance(scale, DynamicLossScale) else None

    min_loss_scale = min_scale

    @property
    def scale_factor(self) -> float | None:
        """The factor by which the scale grows and shrinks; None: it is constant."""
        return 2.0 if self.dynamic_loss_scale else None


class DeepSpeedOptimizer(zero.ZeroOptimizer):
    """A ZeroOptimizer with the attributes that scripts read from DeepSpeed's."""

    overflow = False
    """Whether the last step was skipped because gradients overflowed."""
    num_boundaries = 0
    """Calls of step() so far, skipped ones included."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See :meth:`zero.ZeroOptimizer.step`."""
        result = super().step(closure)
        self.overflow = not self.was_step_applied
        self.num_boundaries += 1
        return result

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Set :attr:`overflow` to whether a gradient has an infinity or a NaN on any rank. Collective."""
        self.overflow = self._gradients.has_overflow()

    @property
    def cur_scale(self) -> float:
        """The loss scale; 1 if there is none."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def needs_scaler(self) -> bool:
        """Whether a loss must be scaled before its ``backward()``."""
        return self.dynamic_loss_scale or self.cur_scale != 1

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes."""
        return isinstance(self.loss_scale, DynamicLossScale)

    @property
    def loss_scaler(self) -> LossScaler:
        """The loss scale, by DeepSpeed's names."""
        return LossScaler(self)

    loss_scale_config = loss_scaler

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that updates this rank's masters."""
        return self.parts.inner

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """This rank's masters."""
        return [piece.master for piece in self.parts.pieces]

    single_partition_of_fp32_groups = fp32_partitioned_groups_flat


ZeROOptimizer = DeepSpeedOptimizer


class _OfStages(type):
    """A class that is asked for by isinstance only: an optimizer's stage decides."""

    stages: frozenset[int]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, zero.ZeroOptimizer) and instance.effective.stage.number in cls.stages


class DeepSpeedZeroOptimizer(metaclass=_OfStages):
    """What optimizers of stages 1 and 2 are instances of."""

    stages = frozenset({1, 2})


class DeepSpeedZeroOptimizer_Stage3(metaclass=_OfStages):  # noqa: N801  (DeepSpeed's name)
    """What optimizers of stage 3 are instances of."""

    stages = frozenset({3})


class DeepSpeedEngine(zero.Engine):
    """An engine with DeepSpeed's methods."""

    optimizer_class = DeepSpeedOptimizer
    monitor: Any = EngineMonitor()

    @staticmethod
    def read_config(source: Source) -> Configuration:
        """Read ``source`` with DeepSpeed's defaults, and make the folders for its files."""
        raw, notes = with_defaults(source)
        configuration = read_source(raw)
        make_folders(configuration)
        return replace(configuration, notes=(*configuration.notes, *notes))

    @property
    def _config(self) -> Config:
        named: Any = self._values_by_name
        values: Config = named  # and DeepSpeed's attributes: scripts read this private name of DeepSpeed's
        return values

    @_config.setter
    def _config(self, values: Config) -> None:
        self._values_by_name = ValuesByName(values)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it was given, with DeepSpeed's defaults."""
        return dict(self._configuration.raw)

    end_others = staticmethod(end_engines)
    sparse_tensor_module_names: frozenset[str] = frozenset()
    """Parameters whose gradients are exchanged as sparse tensors: none."""

    def scale(self, loss: Tensor) -> Tensor:
        """See :meth:`zero.Engine.scale`.

        Raises:
            LossError: ``loss`` has more than one element, or no graph.
        """
        if loss.numel() != 1 or loss.grad_fn is None:
            raise LossError(f"loss must be a scalar tensor with a graph: shape={tuple(loss.shape)}")
        return super().scale(loss)

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return dist.get_rank()

    @property
    def local_rank(self) -> int:
        """This process's number on its node."""
        return comm.get_local_rank()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size()

    @property
    def dp_world_size(self) -> int:
        """The number of data-parallel ranks."""
        return self.optimizer.topology.world_size

    @property
    def mp_world_size(self) -> int:
        """The number of ranks that hold one model."""
        return self.optimizer.parts.model_parallel.world_size

    @property
    def data_parallel_group(self) -> Any:
        """The group of the data-parallel ranks; None: all ranks."""
        return self.optimizer.topology.process_group

    @cached_property
    def tput_timer(self) -> ThroughputTimer:
        """Counts of epochs and steps."""
        return ThroughputTimer(self)

    @property
    def flops_profiler(self) -> Any:
        """What the section of this name has counted, on the first rank: ``flops``, ``macs`` and ``params``."""
        return self._reports.profile

    @property
    def client_optimizer(self) -> Any:
        """The optimizer that was given or built."""
        return self.optimizer.parts.inner

    basic_optimizer = client_optimizer

    @property
    def communication_data_type(self) -> torch.dtype | None:
        """The dtype of exchanged gradients, if the configuration says."""
        name = self._config.communication_data_type
        return None if name is None else to_dtype(name)

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` was called."""
        return self.module._compiled_call_impl is not None

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the model in place by torch.compile.

        Raises:
            NotAvailableError: ``schedule`` or ``compiled_autograd_enabled``.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise zero.NotAvailableError("engine.compile: schedule= and compiled_autograd_enabled= are not available")
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """The stage."""
        return self._config.zero_optimization.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.zero_optimization_stage() >= 3

    def zero_allow_untested_optimizer(self) -> bool:
        """The key of this name; here every optimizer is tested."""
        return bool(self.config.get("zero_allow_untested_optimizer", False))

    def zero_offload_optimizer(self) -> Any:
        """The section ``offload_optimizer``; None: states are on the device."""
        section = self._config.zero_optimization.offload_optimizer
        return None if section.device == "none" else section

    def zero_offload_param(self) -> Any:
        """The section ``offload_param``; None: parameters are on the device."""
        section = self._config.zero_optimization.offload_param
        return None if section.device == "none" else section

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether stage 3 may gather weights to save them: always."""
        return True

    def fp16_enabled(self) -> bool:
        """Whether parameters are float16."""
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bfloat16."""
        return self._config.bf16.enabled

    def torch_autocast_enabled(self) -> bool:
        """Whether forward runs in torch's autocast."""
        return self._config.torch_autocast.enabled

    def amp_enabled(self) -> bool:
        """Whether Apex's amp is used: never."""
        return False

    def gradient_clipping(self) -> float:
        """The largest gradient norm; 0: not clipped."""
        return float(self._config.gradient_clipping or 0.0)

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes."""
        return self.fp16_enabled() and self._config.fp16.loss_scale == 0

    def loss_scale(self) -> float:
        """The configured loss scale; 0: it is dynamic."""
        return float(self._config.fp16.loss_scale)

    def steps_per_print(self) -> int | None:
        """Steps between two lines in the log; None: there are none."""
        return self._config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether times are logged."""
        return self._config.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        """Whether memory is logged."""
        return self._config.memory_breakdown

    def dump_state(self) -> bool:
        """Whether the configuration is logged."""
        return self._config.dump_state

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether ranks' tags of a checkpoint are compared."""
        return self._config.checkpoint.tag_validation != "ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether different tags are an error."""
        return self._config.checkpoint.tag_validation == "fail"

    def optimizer_name(self) -> str:
        """The optimizer's name in the configuration, or its class."""
        return self._config.optimizer.type or type(self.client_optimizer).__name__

    def optimizer_params(self) -> Any:
        """The optimizer's settings in the configuration."""
        return self._config.optimizer.params

    def scheduler_name(self) -> str | None:
        """The scheduler's name in the configuration."""
        return self._config.scheduler.type

    def scheduler_params(self) -> Any:
        """The scheduler's settings in the configuration."""
        return self._config.scheduler.params

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the model and of accumulated gradients."""
        trained = next((grads.dtype for grads in self.optimizer.parts.runtime.reducer.all), torch.float32)
        return next(self.module.parameters()).dtype, trained

    def get_data_parallel_rank(self) -> int:
        """This process's rank among the data-parallel ones."""
        return self.optimizer.topology.rank

    def get_model_parallel_rank(self) -> int:
        """This process's rank among those that hold one model."""
        return self.optimizer.parts.model_parallel.rank

    get_tensor_parallel_rank = get_model_parallel_rank

    def get_sequence_parallel_group(self) -> None:
        """None: ranks of a sequence are not known here."""
        return

    def get_type(self) -> list[Any]:
        """The ``type`` of every parameter group."""
        return [group.get("type") for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the accumulation steps so that a step has so many samples.

        Raises:
            ConfigError: They are no multiple of the micro-batches of all ranks.
        """
        micro = self.train_micro_batch_size_per_gpu() or 1
        each = micro * self.dp_world_size
        if train_batch_size < 1 or train_batch_size % each:
            raise ConfigError(f"train_batch_size must be a positive multiple of {each}: {train_batch_size}")
        self._change_batch_sizes(micro, train_batch_size // each)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size, and keep the accumulation steps."""
        self._change_batch_sizes(micro_batch_size, self.gradient_accumulation_steps())

    def _change_batch_sizes(self, micro: int, accumulation: int) -> None:
        train = micro * accumulation * self.dp_world_size
        self._batch_sizes = replace(self._batch_sizes, train=train, micro=micro, accumulation=accumulation)
        self._scale_gradients()
        self._mark_boundary()

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A dataloader of this rank's share of ``dataset``, or of what ``data_sampler`` gives."""
        given: dict[str, Any] = {
            "batch_size": batch_size or self.train_micro_batch_size_per_gpu() or 1,
            "collate_fn": collate_fn,
            "drop_last": self._config.dataloader_drop_last,
            "num_workers": num_local_io_workers or 0,
            "pin_memory": pin_memory and torch.cuda.is_available(),
        }
        if data_sampler is not None:
            return torch.utils.data.DataLoader(dataset, sampler=data_sampler, **given)
        return RankDataLoader(dataset, DataParallel(self.data_parallel_group), shuffle=route == "train", **given)

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Inside, backwards reduce nothing; their sum is reduced once at the end. Collective."""
        with self.no_sync():
            yield
        self.optimizer.parts.runtime.reducer.flush()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Do nothing: the backward at the boundary averages gradients."""

    def _backward_epilogue(self) -> None:
        """Do nothing. Scripts in which models share a loss call it after ``loss.backward()``, to reduce gradients."""

    def empty_partition_cache(self) -> None:
        """Do nothing: parameters are released when their module's forward or backward ends."""

    def destroy(self) -> None:
        """See :meth:`zero.Engine.destroy`."""
        try:
            super().destroy()
        finally:
            drop_engine(self)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:
        """The model's state dict. Collective at stage 3, where ranks other than the first get an empty one."""
        given = {} if destination is None else {"destination": destination}
        state: dict[str, Tensor] = self.module.state_dict(prefix=prefix, keep_vars=keep_vars, **given)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return state if self.get_data_parallel_rank() == 0 else None

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load ``checkpoint["module"]`` into the model. Collective."""
        weights = checkpoint["module"]
        if custom_load_fn is None:
            self.module.load_state_dict(weights, strict=strict)
        else:
            self._load_by(custom_load_fn, lambda: weights)

    def load_checkpoint(  # type: ignore[override]
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Load a checkpoint; see :meth:`zero.Engine.load_checkpoint`.

        Args:
            load_dir: The folder that checkpoints were saved to.
            tag: The name of the checkpoint.
            load_module_strict: See there, as of the other arguments.
            load_optimizer_states: See there.
            load_lr_scheduler_states: See there.
            load_module_only: See there.
            custom_load_fn: Called on every rank, after the rest is loaded, with ``src=`` the checkpoint's weights and
                ``dst=`` the model, with full parameters. All ranks get the first one's result.
        """
        loaded = super().load_checkpoint(
            load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        )
        if custom_load_fn is not None and loaded.path is not None:
            folder = loaded.path
            self._load_by(custom_load_fn, lambda: read_weights(folder))
        return loaded

    def _load_by(self, load: Callable[..., Any], weights: Callable[[], Mapping[str, Any]]) -> None:
        values = weights()
        with zero.GatheredParameters(self.module.parameters(), modifier_rank=0), torch.no_grad():
            load(src=values, dst=self.module)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = comm.TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Source | None = None,
    mesh_param: Sequence[int] | None = None,
    config_params: Source | None = None,
) -> Initialized:
    """:func:`zero.initialize` with DeepSpeed's defaults and methods. First it destroys an engine that ``model`` has.

    A configuration that is wrong whatever the model and the ranks are leaves that engine alone.
    """
    if config is None and getattr(args, "deepspeed_config", None) is None:
        config = getattr(args, "deepscale_config", None)
    built = zero.initialize(
        args, model, optimizer, model_parameters, training_data, lr_scheduler, distributed_port, mpu,
        dist_init_required, collate_fn, config, mesh_param, config_params, engine_class=DeepSpeedEngine,
    )  # fmt: skip
    hold_engine(built.engine)
    return built
