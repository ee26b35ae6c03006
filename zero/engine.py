"""The engine that :func:`zero.initialize` returns: a model, its ZeroOptimizer and its schedule, stepped together.

loss = engine(batch)      forward
engine.backward(loss)     scaled by the loss scale and 1 / accumulation steps; gradients are averaged over the ranks
engine.step()             at the accumulation boundary: clip, update, zero_grad, schedule
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zcomm import StateError
from zero import _checkpoint as checkpoints
from zero._config import BatchSizes, Configuration, read_source
from zero._config.parse import Source
from zero._config.resolved import to_dtype
from zero._gradients.accumulation import SCALED_BACKWARDS
from zero._ranks.distributed import RankDataLoader
from zero._runtime.bytes_by_parameter import BytesByParameter
from zero.offload import offload_states, reload_states
from zero.optimizer import ZeroOptimizer
from zero.reports import Reports

__all__ = ["Engine"]

COUNTERS = ("micro_steps", "global_steps", "skipped_steps", "global_samples")


class BatchInfo(NamedTuple):
    """The three numbers of :meth:`Engine.get_batch_info`."""

    train_batch_size: int | None
    train_micro_batch_size_per_gpu: int | None
    gradient_accumulation_steps: int


class Engine(nn.Module):
    """Created by :func:`zero.initialize`. Attributes that it lacks are the model's (``engine.generate()``).

    ``state_dict()`` and ``load_state_dict()`` are the model's. Like those of DistributedDataParallel,
    ``named_parameters()`` has ``module.`` in front of each name.

    With plain ``loss.backward()`` (under fp16: ``engine.scale(loss).backward()``) instead of ``engine.backward(loss)``
    the gradients, and not the loss, are divided by the accumulation steps.
    """

    optimizer_class: ClassVar[type[ZeroOptimizer]] = ZeroOptimizer
    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZeroOptimizer,
        *,
        lr_scheduler: Any,
        configuration: Configuration,
        batch_sizes: BatchSizes,
        frozen: Sequence[nn.Parameter] = (),
    ) -> None:
        super().__init__()
        config = configuration.values
        self._configuration = configuration
        self.training = module.training
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader: Any = None
        self.micro_steps = 0
        """Calls of step() so far."""
        self._steps_in_window = 0
        """Those since the last boundary, or since a load or an exception in a backward has dropped the gradients."""
        self._num_aborted = 0
        """``accumulation.num_aborted`` when the window was last checked against it."""
        self.global_steps = 0
        """Boundaries so far, skipped steps included."""
        self.skipped_steps = 0
        """Boundaries at which gradients overflowed."""
        self.global_samples = 0
        """Samples of all boundaries so far, over all ranks; boundaries, if the configuration has no batch size."""
        self._config, self._batch_sizes = config, batch_sizes
        self._frozen = frozen
        self._boundary: bool | None = None if config.managed_gradient_accumulation else True
        self._reports = Reports(optimizer, config, next(module.parameters()).device)
        self.monitor = self._reports.monitor
        """Has ``write_events([(name, value, step), ...])``, for the configured monitors; the first rank writes."""
        optimizer.computes_grad_norm = config.zero_optimization.compute_grad_norm
        self._was_step_applied = False
        self._scale_gradients()
        self._mark_boundary()

    @staticmethod
    def read_config(source: Source) -> Configuration:
        """Read the configuration that :func:`zero.initialize` got, a dict or the path of a file."""
        return read_source(source)

    @staticmethod
    def end_others(model: Any, check: Callable[[], None]) -> None:
        """Called before ``model`` is prepared: a subclass may end its engines, if ``check()`` raises nothing."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        with self._reports.around("forward", self.global_steps), self._autocast():
            if self._config.fp16.enabled and self._config.fp16.auto_cast:
                args, kwargs = tree_map_only(Tensor, lambda t: t.half() if t.is_floating_point() else t, (args, kwargs))
            return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("_modules", {})
        if name in own:
            return own[name]
        if "module" in own and hasattr(own["module"], name):
            return getattr(own["module"], name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}, nor has its model")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, without ``module.`` in front of its names; with it within a module that holds the engine."""
        is_part = bool(args) or kwargs.get("destination") is not None
        return super().state_dict(*args, **kwargs) if is_part else self.module.state_dict(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles, which would not be managed."""
        raise StateError(
            "an engine cannot be copied or pickled: call engine.save_checkpoint(), or zero.MovingAverage for an average"
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a :meth:`state_dict`."""
        return self.module.load_state_dict(*args, **kwargs)

    def _autocast(self) -> AbstractContextManager[Any]:
        chosen = self._config.torch_autocast
        if not chosen.enabled:
            return nullcontext()
        # At stage 3 autocast's weight cache would keep a cast copy of every gathered weight until the forward ends.
        caches = not self.optimizer.effective.stage.shards_parameters
        return torch.autocast(self.device.type, dtype=to_dtype(chosen.dtype), cache_enabled=caches)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.module.parameters()).device

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` times the loss scale, for ``engine.scale(loss).backward()``."""
        return self.optimizer.scale(loss)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:  # noqa: FBT001
        """Backward of ``loss``, scaled by the loss scale and, if ``scale_wrt_gas``, by 1 / accumulation steps.

        Returns:
            ``loss``, divided by the accumulation steps in the same way.
        """
        self._restart_if_aborted()
        with self._reports.around("backward", self.global_steps):
            if not loss.requires_grad:
                raise StateError(
                    "the loss must depend on trainable parameters: initialize() without an optimizer freezes them all"
                )
            if scale_wrt_gas and self._config.managed_gradient_accumulation:
                loss = loss / self.gradient_accumulation_steps()
            with SCALED_BACKWARDS().running():
                self.optimizer.scale(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            self._reports.add_loss(loss)
            return loss

    def _scale_gradients(self) -> None:
        """Divide the gradients of backwards that a user calls by the accumulation steps."""
        is_managed = self._config.managed_gradient_accumulation
        self.optimizer.parts.runtime.reducer.factor = 1 / self.gradient_accumulation_steps() if is_managed else 1.0

    def _num_samples(self) -> int:
        """Samples of the step that is about to end, over all ranks; 1 if the configuration has no batch size."""
        train = self.train_batch_size()
        if train is None or self._config.managed_gradient_accumulation:
            return train or 1
        return (
            train // self.gradient_accumulation_steps() * self.optimizer.parts.runtime.reducer.accumulation.num_started
        )

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At the accumulation boundary: clip, update, clear the gradients, advance the schedule. Otherwise only count.

        If gradients overflowed on any rank, nothing is updated and the schedule does not advance. A step that raises is
        not counted.
        """
        self._was_step_applied = False
        self._restart_if_aborted()
        if is_boundary := self.is_gradient_accumulation_boundary():
            num_samples = self._num_samples()
            with self._reports.around("step", self.global_steps):
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.global_steps += 1
            self.global_samples += num_samples
            self._was_step_applied = self.optimizer.was_step_applied
            if not self._was_step_applied:
                self.skipped_steps += 1
            elif self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
            numbers = self.skipped_steps, self.get_lr(), self.get_mom(), self.cur_scale
            self._reports.end_step(
                self.global_steps, self.global_samples, "skipped={}, lr={}, mom={}, loss scale={:g}".format(*numbers)
            )
        self.micro_steps += 1
        self._steps_in_window = 0 if is_boundary else self._steps_in_window + 1
        self._mark_boundary()

    def was_step_applied(self) -> bool:
        """Whether the last call of :meth:`step` updated the parameters: it was at a boundary, and was not skipped."""
        return self._was_step_applied

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002, FBT001  (torch's signature)
        """Drop the gradients."""
        self.optimizer.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """See :meth:`zero.ZeroOptimizer.no_sync`; at every stage."""
        return self.optimizer.no_sync()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next step() updates."""
        if self._boundary is not None:
            return self._boundary
        return self._steps_in_window + 1 >= self.gradient_accumulation_steps()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:  # noqa: FBT001  (DeepSpeed's signature)
        """Set whether the next step() updates, instead of counting; call it before the backward."""
        self._boundary = is_boundary
        self._mark_boundary()

    def _restart_if_aborted(self) -> None:
        """Restart the window if an exception has dropped its micro-batches, so that no step lacks some."""
        num_aborted = self.optimizer.parts.runtime.reducer.accumulation.num_aborted
        if num_aborted != self._num_aborted:
            self._num_aborted, self._steps_in_window = num_aborted, 0
            self._mark_boundary()

    def _mark_boundary(self) -> None:
        self.optimizer.is_boundary = self.is_gradient_accumulation_boundary()

    def get_global_grad_norm(self) -> float | None:
        """The gradient norm of the last step over all ranks, before clipping; None after an overflow, or if off."""
        return self.optimizer.last_grad_norm

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """``betas`` or ``momentum`` of every parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    @property
    def cur_scale(self) -> float:
        """The loss scale; 1 if there is none."""
        return 1.0 if self.optimizer.loss_scale is None else self.optimizer.loss_scale.scale

    def train_batch_size(self) -> int | None:
        """Samples in a step over all ranks; None: the configuration does not say."""
        return self._batch_sizes.train

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples in a backward of one rank; None: the configuration does not say."""
        return self._batch_sizes.micro

    def gradient_accumulation_steps(self) -> int:
        """Backward passes in a step."""
        return self._batch_sizes.accumulation

    def get_batch_info(self) -> BatchInfo:
        """The train batch size, micro-batch size and accumulation steps."""
        return BatchInfo(self._batch_sizes.train, self._batch_sizes.micro, self._batch_sizes.accumulation)

    def bytes_by_parameter(self) -> BytesByParameter:
        """See :meth:`zero.ZeroOptimizer.bytes_by_parameter`."""
        return self.optimizer.bytes_by_parameter()

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,  # noqa: FBT001  (DeepSpeed's signature)
        exclude_frozen_parameters: bool = False,  # noqa: FBT001
        *,
        async_op: bool = False,
    ) -> checkpoints.Saving:
        """Save the complete training state, as ``global_stepN`` if no ``tag`` is given. Collective.

        See :func:`zero.save_checkpoint`; its ``tag_validation`` is the configuration's ``checkpoint.tag_validation``.
        """
        return checkpoints.save_checkpoint(
            self.optimizer,
            save_dir,
            f"global_step{self.global_steps}" if tag is None else tag,
            stateful=self._stateful(),
            client_state=client_state,
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
            async_op=async_op,
            tag_validation=self._config.checkpoint.tag_validation,
        )

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,  # noqa: FBT001  (DeepSpeed's signature)
        load_optimizer_states: bool = True,  # noqa: FBT001
        load_lr_scheduler_states: bool = True,  # noqa: FBT001
        load_module_only: bool = False,  # noqa: FBT001
    ) -> checkpoints.LoadedCheckpoint:
        """Load a checkpoint of any stage and world size; returns ``(path, client_state)``. Collective.

        See :func:`zero.load_checkpoint`.
        """
        stateful = self._stateful()
        if not load_lr_scheduler_states:
            stateful.pop("lr_scheduler", None)
        loaded = checkpoints.load_checkpoint(
            self.optimizer,
            load_dir,
            tag,
            stateful=stateful,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_module_only=load_module_only,
        )
        if loaded.path is not None:  # it has dropped the gradients
            self._steps_in_window = 0
            self._mark_boundary()
        return loaded

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,  # noqa: FBT001  (DeepSpeed's signature)
    ) -> bool:
        """Write the model's weights, in their dtypes, at any stage. Collective.

        See :func:`zero.checkpoints.save_model_file`.

        A ``save_filename`` that ends with ``.safetensors`` is written bucket by bucket.
        """
        path = Path(save_dir) / save_filename
        checkpoints.save_model_file(self.optimizer, path, exclude_frozen_parameters=exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    def _stateful(self) -> dict[str, Any]:
        scheduler = {"lr_scheduler": self.lr_scheduler} if hasattr(self.lr_scheduler, "state_dict") else {}
        return {"engine": _Counters(self), **scheduler}

    def offload_states(
        self,
        include: Collection[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,  # noqa: FBT001  (DeepSpeed's signature)
        non_blocking: bool = False,  # noqa: FBT001
    ) -> None:
        """Free device memory until :meth:`reload_states`. See :func:`zero.offload_states`."""
        offload_states(self.optimizer, include, device, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:  # noqa: FBT001  (DeepSpeed's signature)
        """Move offloaded states back to the device. See :func:`zero.reload_states`."""
        reload_states(self.optimizer, non_blocking=non_blocking)

    def destroy(self) -> None:
        """Remove the hooks from the model and free process groups and files; see :meth:`zero.ZeroOptimizer.close`."""
        try:
            self._reports.close()
        finally:
            self.optimizer.close()
        for param in self._frozen:
            param.requires_grad_()


class _Counters:
    """The state dict of an engine's counters and dataloader; ``engine.state_dict()`` itself is the model's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, int]:
        loader = self._engine.training_dataloader
        passes = loader.state_dict() if isinstance(loader, RankDataLoader) else {}
        counts = {name: getattr(self._engine, name) for name in COUNTERS}
        # A save leaves out the gradients of an unfinished step, so whoever loads it runs all of its backwards.
        counts["micro_steps"] -= self._engine._steps_in_window
        return counts | passes

    def load_state_dict(self, state: dict[str, int]) -> None:
        state = {"global_samples": int(state["global_steps"]) * (self._engine.train_batch_size() or 1), **state}
        for name in COUNTERS:
            setattr(self._engine, name, int(state[name]))
        if isinstance(self._engine.training_dataloader, RankDataLoader) and "num_passes" in state:
            self._engine.training_dataloader.load_state_dict(state)
