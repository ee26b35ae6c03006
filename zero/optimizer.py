"""ZeroOptimizer: ZeRO stages 0 to 3 and ZeRO++ behind the interface of a torch optimizer.

optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=3, lr=3e-4)
loss = model(x)            hooks gather and release parameters (stage 3)
loss.backward()            hooks average gradients over the ranks (all stages)
optimizer.step()           updates this rank's shard; stages 1 and 2 gather the new parameters
optimizer.zero_grad()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zcomm import StateError, Topology
from zcomm._transport.call_context import outside_public_call
from zero._access.full_states import (
    ByParameter,
    full_state_dict,
    helper_call,
    load_full_states,
    shown_groups,
    shown_state,
)
from zero._access.state_dict import StateDicts
from zero._activations.activation_settings import ActivationSettings
from zero._activations.forward_hooks import NO_TENSOR_RANKS, install
from zero._config.parse import Configuration, Source
from zero._config.resolved import ResolvedConfig, choose_topology
from zero._config.settings import Effective
from zero._model.cast import cast
from zero._model.leaf_modules import set_configured
from zero._optim.host_adam import build_updater
from zero._optim.loss_scale import LossScale, loss_scale_of, not_scaled
from zero._optim.masters import GivenOptimizer, as_groups, build_pieces
from zero._optim.several import optimizers_of
from zero._optim.updaters import updater_of
from zero._ranks.collective_calls import calling_over, collective_methods
from zero._ranks.distributed import DataParallel, data_parallel
from zero._ranks.model_parallel import ModelParallel
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.bytes_by_parameter import BytesByParameter, bytes_by_parameter
from zero._runtime.memory_report import MemoryReport, measure
from zero._runtime.optimizer_parts import OptimizerParts, values_of
from zero._runtime.runtime import Runtime
from zero._runtime.shard_state import check_fits, load_masters, restore_parts, shard_state
from zero._runtime.validate import (
    announce,
    check_inputs,
    choose_changes,
    choose_formats,
    described_placement,
    whole_parameters,
)
from zero._step.clip import clip_grad_norm_, fold_clipping
from zero._step.final_gradients import FinalGradients, GradFactor, GradScalerHook
from zero._step.update import Update

__all__ = ["ZeroOptimizer"]


@collective_methods("close", "eval", "finish_update", "load_state_dict", "state_dict", "step", "train", "unscale_")
class ZeroOptimizer(Optimizer):
    """A torch optimizer, or several, whose states, gradients and parameters are sharded over the ranks.

    Args:
        model: On its device. Its parameters keep their dtype (with float32 masters of 16-bit ones) unless the
            configuration enables fp16 or bf16. Every rank starts with rank 0's values.
        optimizer: A class, built here over the model's trainable parameters with ``options``; or an instance before its
            first step, whose parameter groups and settings are kept; or a list of instances, each for its parameters.
            Those that update whole tensors (Muon, LAMB, Adafactor) get each tensor on one rank.
        config: A DeepSpeed configuration, as a dict or the path of a JSON file. Its ``optimizer``, ``scheduler`` and
            batch sizes are for :func:`zero.initialize`.
        topology: Which ranks share a node, and the backend of the exchanges. Default: torchrun's environment.
        ranks_per_node: Instead of ``topology``: every so many consecutive ranks are one node.
        group: The data-parallel ranks; default: all. With tensor or pipeline parallelism a DeviceMesh or an mpu: the
            model-parallel ranks agree on norms and overflows; see :mod:`zero._ranks.model_parallel`.
        options: Any key of the configuration (``stage``, ``zero_quantized_weights``, ``fp16={"enabled": True}``, ...)
            and the fields of :class:`zero.ZeroSettings`; they override ``config``. Other options go to the optimizer
            class (``lr``, ``weight_decay``, ...).

    Raises:
        NotAvailableError: A key asks for something that this version does not support.
        ConfigError: An invalid setting, an optimizer that couples tensors, or parameters in no group or in two.
        LayoutError: Parameters are on several devices or on meta, or are not floating point; or models differ between
            ranks.
        BackendUnavailableError: ``backend`` or ``kernels`` is not available, or does not support the device.
        TopologyError: The ranks do not divide into nodes, or ``hpz_partition_size`` does not fit them.
        An error on one rank is raised on all. The model is full then, and no process group is left.

    ``param_groups`` hold this rank's float32 master weights, so schedulers and manual changes of ``lr`` work.
    Cost for each rank and step, P elements over N ranks: 2P(N-1)/N elements sent at stages 0, 1, 2; at most
    3P(N-1)/N at stage 3; one small agreement per reduced backward. Source: arXiv:1910.02054, arXiv:2306.10209.
    """

    state: Any = ByParameter(shown_state)
    param_groups: Any = ByParameter(shown_groups)
    _step_supports_amp_scaling = GradScalerHook()

    def __init__(
        self,
        model: nn.Module,
        optimizer: type[Optimizer] | Optimizer | Sequence[Optimizer],
        *,
        config: Source | Configuration | None = None,
        topology: Topology | None = None,
        ranks_per_node: int | None = None,
        group: dist.ProcessGroup | DeviceMesh | DataParallel | Any = None,
        **options: Any,
    ) -> None:
        if group is not None and not isinstance(group, DataParallel):
            group = data_parallel(group)
        self._model_parallel, group = (ModelParallel(), None) if group is None else (group.model_parallel, group.group)
        # On every rank, before the model is changed and before process groups are made: a rank that raises alone would
        # leave the others in a collective (a deadlock).
        plan, inner = check_inputs(model, optimizer, config, options, topology or group)
        self._owns_topology = topology is None
        topology = choose_topology(topology, ranks_per_node, group, plan)
        try:
            self._build(model, inner, topology, plan)
        except BaseException:
            if self._owns_topology:
                topology.close()
            raise
        announce(plan, self._runtime)

    def _build(self, model: nn.Module, optimizer: GivenOptimizer, topology: Topology, plan: ResolvedConfig) -> None:
        values = plan.configuration.values
        on_every_rank(
            lambda: set_configured(model, values.zero_optimization.leaf_module, stage=plan.settings.stage), topology
        )
        kept = values.data_types.keep_in_fp32_modules
        on_every_rank(lambda: cast(model, plan.dtype, kept, plan.buffer_dtype), topology)
        groups = as_groups(model, optimizer)
        self._group_of = {param: index for index, group in enumerate(groups) for param in group["params"]}
        whole = whole_parameters(groups, plan, optimizer)
        settings, of_changes = choose_changes(model, plan.settings, topology)
        settings, chosen = choose_formats(model, settings, topology, whole)
        is_log_rank = topology.rank == self._model_parallel.rank == 0
        self._runtime = Runtime(model, settings, topology, whole, is_log_rank=is_log_rank)
        details = (*of_changes, *chosen, *described_placement(self._runtime.buckets))
        self._runtime.effective = self._runtime.effective.with_notes(details=details)
        self._pieces = build_pieces(self._runtime.buckets, self._runtime.stage)
        try:
            build = partial(build_updater, optimizer, groups, self._pieces, plan, self._runtime.buckets)
            self._inner = on_every_rank(build, topology)
            self._runtime.open_states(self._inner, self._pieces, plan.whole_groups)
            _install_on_model(self._runtime, plan.activations, self._model_parallel)
        except Exception:
            with self._runtime.gathered(self._runtime.buckets):  # the model stays full
                self._runtime.close()
            raise
        is_fused = updater_of(self._inner).is_fused
        self._gradients = FinalGradients(self._runtime, self._pieces, self._model_parallel, rounds_means=is_fused)
        self._update = Update(self._runtime, self._inner, self._pieces, self._gradients)
        # GradScaler looks for infinities in the gradients of all parameters, so it finds those of other ranks here.
        self._inner.param_groups[0]["params"].append(self._gradients.flag)
        self.loss_scale: LossScale | None = loss_scale_of(plan.configuration.values)
        """The loss scale of fp16, or of bf16 with overflow checks; None if the configuration has neither."""
        self.was_step_applied = False
        """Whether the last step() updated the parameters; False if gradients overflowed."""
        self._last_norm: Tensor | None = None
        self.computes_grad_norm = False
        """Whether step() computes the norm even if gradients are not clipped. Cost: a pass and a small exchange."""
        self._max_norm = plan.configuration.values.gradient_clipping or math.inf
        self._is_scaled = self._is_unscaled = False
        self._runtime.reducer.reduction.loss_scale = self.loss_scale
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self._is_built = True
        self._share_state()

    def _share_state(self) -> None:
        # Schedulers change the groups of this optimizer and the inner one reads them: both must hold the same objects,
        # also after load_state_dict, which replaces the inner one's.
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        for one in optimizers_of(self._inner):
            updater_of(one).share()

    @property
    def effective(self) -> Effective:
        """The effective settings on this model and topology, and those that are inactive."""
        return self._runtime.effective

    @property
    def topology(self) -> Topology:
        """The ranks and nodes that the model is sharded over."""
        return self._runtime.topology

    @property
    def last_grad_norm(self) -> float | None:
        """The global gradient norm of the last step, before clipping; None if it was not computed. GPU: a host sync."""
        return None if self._last_norm is None else self._last_norm.item()

    @property
    def is_boundary(self) -> bool:
        """Whether the running or last backward is the boundary of a step: counted, unless it is set."""
        return self._runtime.reducer.accumulation.is_boundary

    @is_boundary.setter
    def is_boundary(self, value: bool) -> None:
        self._runtime.reducer.accumulation.boundary = value

    def time_exchanges(self, timed: Callable[[str], AbstractContextManager[None]]) -> None:
        """Run each gather within ``timed("gather")`` and each reduction within ``timed("reduce")``, on the host."""
        self._runtime.phases.timer = timed

    def memory(self) -> MemoryReport:
        """Allocated bytes of model states on this rank, by kind."""
        return measure(self._runtime, self._inner)

    def bytes_by_parameter(self) -> BytesByParameter:
        """What each parameter costs: bytes that this rank sends for it in a step, and of states that it holds.

        ``print`` shows a table, largest first: what to leave uncompressed, or frozen. Computed for a step that uses
        every parameter, with ``gradient_accumulation_steps`` backwards. At stage 3 the gathers are those of the order
        in which the last step used parameters; before the first step, at most two a backward. No communication.
        """
        return bytes_by_parameter(self._runtime, self._inner, self._pieces)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, ``backward()`` does not reduce gradients; the next one outside, or ``step()``, averages the sum.

        At stages 2 and 3 this keeps full gradients: ``memory().unreduced_gradients`` is their size in bytes.
        """
        return self._runtime.reducer.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their norm over all ranks, groups and parameters is at most ``max_norm``.

        Args:
            max_norm: The maximum norm.
            norm_type: 2 or infinity.
            error_if_nonfinite: Raise StateError, on every rank, if the norm is NaN or infinite.

        Returns:
            The norm before clipping, a float32 scalar; the same bits on every rank and at stages 1, 2 and 3.

        Cost for each rank: two passes over its shards, 8 bytes to every other rank. On a GPU the host does not wait,
        except with ``error_if_nonfinite`` and where gradients are offloaded.
        """
        # Outside calling_over: this reduces what no_sync left, while other ranks may still be in their backward, whose
        # calls have another name. Inside, the ranks would be reported as diverged.
        self.unscale_()
        with calling_over(self.topology, f"ZeroOptimizer.clip_grad_norm_({max_norm=}, {norm_type=})"):
            return clip_grad_norm_(
                self._gradients, self._model_parallel, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
            )

    def scale(self, loss: Tensor) -> Tensor:
        """``loss``, in at least float32, times the loss scale: call ``backward()`` of what is returned.

        Raises StateError if gradients are unscaled already: scaled ones cannot be added to them.
        """
        if self.loss_scale is None:
            return loss
        if self._is_unscaled:
            raise StateError("gradients are unscaled already: call zero_grad() before the next backward")
        self._is_scaled = True
        return (loss if loss.dtype == torch.float64 else loss.float()) * self.loss_scale.scale

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """:meth:`scale` as a context manager, as in Apex. Several losses share the scale, and the skipped step."""
        yield self.scale(loss)

    def unscale_(self) -> None:
        """Divide all gradients by the loss scale, once; ``clip_grad_norm_`` and ``step()`` do it otherwise.

        Raises StateError if there are gradients of a loss that was not scaled.
        """
        self._runtime.check_not_suspended()
        self._runtime.reducer.flush()
        self._fold_unscaling()
        self._gradients.apply()

    def _fold_unscaling(self) -> None:
        if self.loss_scale is None or self.loss_scale.scale == 1 or self._is_unscaled:
            return
        if not self._is_scaled and any(any(grads.used) for grads in self._runtime.reducer.all):
            raise not_scaled(self.loss_scale.scale)
        self._is_unscaled = self._runtime.reducer.reduction.is_unscaled = True
        self._gradients.factor = self._gradients.factor.times(1 / self.loss_scale.scale)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shard with the averaged gradients, and write back the new parameters. Collective.

        With a loss scale, a step whose gradients overflow on any rank is skipped on all; ``was_step_applied`` is False.
        With ``delayed_update`` it finishes and writes back the update of the previous step, and raises its errors. Its
        own update is running when it returns, and the gradients are dropped, as by ``zero_grad()``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad(), outside_public_call():
                loss = closure()
        (runtime := self._runtime).hooks.recover()
        runtime.check_model_unchanged()
        before: tuple[GradFactor, bool] | None = None
        scale = None if self.loss_scale is None else self.loss_scale.state_dict()
        try:
            runtime.reducer.flush()
            before = self._gradients.factor, self._is_unscaled
            self.was_step_applied = self._prepare_gradients()
            runtime.step_ended()
            if not self.was_step_applied:
                runtime.finish_update(writes_back=True)
            elif self._update.run():
                self.zero_grad()
        except BaseException as error:  # restore factor and scale, so that the step can be retried
            self.was_step_applied = False
            runtime.reducer.facts.has_failed = before is not None  # else no rank has applied anything
            if not isinstance(error, Exception):  # an interrupt: some gradients may be applied already
                runtime.hooks.abort_step()
            if self._update.folds and before is not None:
                self._gradients.factor, self._is_unscaled = before
            if self.loss_scale is not None and scale is not None:
                self.loss_scale.load_state_dict(scale)
            raise
        self._gradients.step_ended()
        return loss

    def train(self) -> None:
        """Give parameters the values of training, if the optimizer has other ones for evaluation. Collective."""
        self._set_mode("train")

    def eval(self) -> None:
        """Give parameters the values that a schedule-free optimizer evaluates and saves; others have none. Collective.

        Call :meth:`train` before the next step. Cost: that of writing back all parameters.
        """
        self._set_mode("eval")

    def _set_mode(self, mode: str) -> None:
        change, buckets = getattr(self._inner, mode, None), [b for b in self._runtime.buckets if b.is_trainable]
        # A trainer calls train() before each backward.
        is_there = all(group.get("train_mode") is (mode == "train") for group in self.param_groups)
        if callable(change) and not is_there:
            with self._runtime.in_memory(buckets, is_changed=True):
                on_every_rank(change, self.topology)
            self._runtime.write_back(buckets)

    def finish_update(self) -> None:
        """Finish a delayed update, so that masters, states and parameters can be read. Collective."""
        self._runtime.finish_update(writes_back=True)

    def _prepare_gradients(self) -> bool:
        """Check, unscale and clip, or leave that to the update; False: all ranks skip the step."""
        self._last_norm = None
        if self.loss_scale is not None:
            overflowed = self._model_parallel.any(self._gradients.has_overflow())
            self._fold_unscaling()
            self.loss_scale.update(overflowed=overflowed)
            if overflowed:
                return False
        if not self._update.folds:
            self._gradients.apply()
        if self._max_norm != math.inf or self.computes_grad_norm:
            self._last_norm = fold_clipping(self._gradients, self._model_parallel, self._max_norm)
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002, FBT001  (torch's signature)
        """Drop all gradients; ``param.grad`` becomes None, whatever ``set_to_none`` is."""
        self._runtime.hooks.recover()
        self._runtime.reducer.discard_step()
        self._gradients.discard()
        self._is_scaled = self._is_unscaled = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise StateError: the layout of shards is fixed at construction."""
        if getattr(self, "_is_built", False):
            raise StateError("parameters cannot be added after construction: pass an optimizer that has them all")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard: masters, optimizer states, and their layout."""
        self._runtime.check_not_suspended()
        if (call := helper_call()) is not None:
            return full_state_dict(self.parts, call, shown_groups(self))
        return shard_state(self._runtime, self._inner, self._pieces, self.loss_scale)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank of the same layout, and write back. Collective.

        Raises:
            LayoutError: The shards are of another number of nodes or ranks, another rank, model or bucket size. Raised
                on every rank, before anything is changed.
        """
        if (call := helper_call()) is not None:
            load_full_states(self, call)
            return
        check_fits(self._runtime, state_dict["layout"])
        self._runtime.hooks.recover()
        self._runtime.delayed.drop()
        self._runtime.gatherer.release_all()  # what is gathered, or in flight, has the old values
        buckets = [bucket for bucket in self._runtime.buckets if bucket.is_trainable]
        load_masters(self._runtime, buckets, state_dict["masters"])
        self.load_inner_state(state_dict["optimizer"])
        if self.loss_scale is not None and state_dict.get("loss_scale") is not None:
            self.loss_scale.load_state_dict(state_dict["loss_scale"])
        self._runtime.write_back(buckets)
        restore_parts(self._runtime, state_dict)
        self._runtime.reducer.facts.forget_step()

    def load_inner_state(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the inner optimizer, which updates this rank's masters."""
        on_every_rank(lambda: self._inner.load_state_dict(state_dict), self.topology)
        self._share_state()
        self._runtime.state_files.store_states()
        self._runtime.reducer.facts.has_failed = False

    @property
    def parts(self) -> OptimizerParts:
        """The internals of this optimizer, for :mod:`zero._checkpoint`."""
        parts = self._runtime, self._inner, self._pieces, self._group_of, self._model_parallel
        return OptimizerParts(*parts, self._update.fail)

    def master_pieces(self) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        """``(parameter, first element, master values)`` for all that this rank updates; copies if they are in files."""
        return values_of(self._pieces, self._runtime)

    def close(self) -> None:
        """Remove the hooks from the model, drop the gradients, and free the process groups made for it.

        The model is an ordinary one again. At stage 3 a rank holds only a shard of its parameters: to keep full ones,
        close inside ``zero.GatheredParameters(model.parameters())``, or save before. Collective with delayed updates.
        """
        try:
            self._runtime.finish_update(writes_back=True)
        finally:
            self._runtime.close()
            self._model_parallel.close()
            if self._owns_topology:
                self._runtime.topology.close()


def _install_on_model(runtime: Runtime, activations: ActivationSettings, model_parallel: ModelParallel) -> None:
    """Install state-dict hooks and activation checkpointing on the model. Collective.

    Raises:
        OSError: See :func:`zero._activations.forward_hooks.install`.
    """
    runtime.state_dicts = StateDicts(runtime)
    runtime.hooks.keep(runtime.state_dicts.install())
    group = model_parallel.tensor_group
    inactive: tuple[str, ...] = ()
    if activations.partitions and group is None:
        activations, inactive = replace(activations, partitions=False), (f"partition_activations ({NO_TENSOR_RANKS})",)
    runtime.effective = runtime.effective.with_notes(details=activations.described(), inactive=inactive)
    runtime.hooks.keep(install(runtime.model, activations, group, runtime.topology))
