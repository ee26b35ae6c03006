"""ZeroStrategy and InstallDDP: ZeRO, and quantized gradients of DDP, under Lightning's Trainer.

setup            the module's optimizer -> ZeroOptimizer over the LightningModule (frozen, to evaluate)
training_step    through the module's forward hooks, which gather what it uses
backward         gradients are reduced at once; is_boundary says which backward of an accumulation is the last
checkpoints      a folder of zero.save_checkpoint; Lightning's own state is its client_state
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed import default_pg_timeout
from torch.optim import Optimizer

from zcomm import ConfigError, Installation, Recipe, StateError, install_ddp
from zcomm._formats.recipes import DEFAULT_RECIPE
from zero._access.gathered_parameters import GatheredParameters
from zero._checkpoint.load import load_checkpoint
from zero._checkpoint.save import save_checkpoint
from zero._config.parse import Source
from zero._config.resolved import resolve_config
from zero._model.cast import move
from zero._model.init import Init
from zero.errors import CheckpointError
from zero.optimizer import ZeroOptimizer

__all__ = ["InstallDDP", "ZeroStrategy"]

TAG = "checkpoint"
"""The name of the checkpoint inside the folder that Lightning names."""
KEPT_BY_ZERO = ("state_dict", "optimizer_states")


class ThroughForward(nn.Module):
    """Calls ``module`` as ``trainer.model``: Lightning then runs each step inside the module's forward hooks.

    At stage 3 these gather the parameters that the LightningModule itself holds.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, in whose place Lightning has put one of its steps."""
        return self.module(*args, **kwargs)


class ZeroStrategy(DDPStrategy):
    """Trains a LightningModule under ZeRO: ``Trainer(strategy=ZeroStrategy(stage=3))``.

    The module has one optimizer, of a class that :class:`zero.ZeroOptimizer` accepts; its schedulers work unchanged.
    Gradient accumulation, ``gradient_clip_val`` (by norm), ``precision`` other than "16-mixed" and manual optimization
    are the Trainer's. ``configure_model()`` runs under :class:`zero.Init` at stage 3.

    Args:
        config: A DeepSpeed configuration, as for :class:`zero.ZeroOptimizer`. Its optimizer, scheduler, batch sizes and
            accumulation steps have no effect: the module and the Trainer have them.
        process_group_backend: Default: nccl on GPUs, else gloo.
        timeout: Of torch.distributed.
        options: ``stage`` and the other keywords of :class:`zero.ZeroOptimizer`, except the optimizer's own.

    Raises:
        ConfigError: The module has several optimizers or none, ``gradient_clip_algorithm="value"``, or a GradScaler
            (use ``precision="16-true"`` and ``ZeroStrategy(fp16={"enabled": True})``). When the Trainer starts.
        CheckpointError: ``ckpt_path`` was saved by another strategy, or see :func:`zero.load_checkpoint`; a value of
            the module's hyperparameters or of a callback cannot be stored without a pickle.
        Also what :class:`zero.ZeroOptimizer` raises.

    A checkpoint is a folder, which any stage and number of ranks can load, and ``zero export`` converts; every rank
    must call ``trainer.save_checkpoint``. After ``fit`` the model stays sharded, and ``trainer.test()`` uses it so:
    read full parameters inside ``zero.GatheredParameters(model.parameters())``. Another ``fit``, or another module,
    gathers it on every rank first.
    """

    def __init__(
        self,
        config: Source | None = None,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **options: Any,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._config, self._options = config, options
        self.zero_optimizer: ZeroOptimizer | None = None
        """The optimizer of the running or last fit or evaluation."""
        self._wrapped: LightningModule | None = None
        self._frozen: list[nn.Parameter] = []

    def setup(self, trainer: Trainer) -> None:
        """Shard the module; see :class:`ZeroStrategy`. Collective."""
        module, is_fitting = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        assert self.accelerator is not None, "the Trainer has set it"
        assert module is not None, "the Trainer has connected it"
        self.accelerator.setup(trainer)
        if is_fitting or self._wrapped is not module:
            self._release()
            self.precision_plugin.convert_module(module)
            move(module, self.root_device)
            if is_fitting:
                self.setup_optimizers(trainer)
            self._shard(module, self._given_optimizer() if is_fitting else self._freeze(module))
        self.model = ThroughForward(module)
        self.setup_precision_plugin()
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ConfigError('precision="16-mixed": use precision="16-true" and ZeroStrategy(fp16={"enabled": True})')
        self.precision_plugin.clip_gradients = self._clip_gradients  # type: ignore[assignment, method-assign]

    def _given_optimizer(self) -> Optimizer:
        if len(self.optimizers) != 1 or not self.optimizers[0].param_groups:
            raise ConfigError(
                f"ZeroStrategy needs one optimizer: configure_optimizers() has returned {len(self.optimizers)} "
                f"({', '.join(type(one).__name__ for one in self.optimizers)}); use parameter groups of one optimizer"
            )
        return self.optimizers[0]

    def _freeze(self, module: LightningModule) -> Optimizer:
        """To evaluate, nothing is trained: no master and no state is held."""
        self._frozen = [param for param in module.parameters() if param.requires_grad]
        module.requires_grad_(requires_grad=False)
        return torch.optim.SGD([{"params": []}], lr=0.0)

    def _shard(self, module: LightningModule, optimizer: Optimizer) -> None:
        self.zero_optimizer = ZeroOptimizer(module, optimizer, config=self._config, **self._options)
        self.zero_optimizer.is_boundary = True
        self._wrapped = module
        if not self._frozen:
            self.optimizers = [self.zero_optimizer]

    def _release(self) -> None:
        """Make what was sharded before an ordinary module again, with full parameters. Collective."""
        if self.zero_optimizer is None or self._wrapped is None:
            return
        with GatheredParameters(self._wrapped.parameters()):
            self.zero_optimizer.close()
        for param in self._frozen:
            param.requires_grad_()
        self.zero_optimizer, self._wrapped, self._frozen = None, None, []

    def _sharded(self) -> ZeroOptimizer:
        if self.zero_optimizer is None:
            raise StateError("ZeroStrategy saves and loads once fit() or an evaluation has started: nothing is set up")
        return self.zero_optimizer

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """At stage 3 ``configure_model()`` builds its modules under :class:`zero.Init`."""
        plan = resolve_config(self._config, {k: v for k, v in self._options.items() if k not in ("topology", "group")})
        with Init(enabled=plan.settings.stage == 3, config_dict_or_path=self._config):
            yield

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within, a backward is not the last one of its step."""
        optimizer = self._sharded()
        optimizer.is_boundary = False
        try:
            yield
        finally:
            optimizer.is_boundary = True

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward of the loss, times the loss scale of fp16."""
        return super().backward(self._sharded().scale(closure_loss), optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step, and drop the gradients: in manual optimization Lightning's wrapper of the optimizer cannot do that."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        optimizer.zero_grad()
        return output

    def _clip_gradients(self, _: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        if not clip_val or clip_val <= 0:
            return
        if gradient_clip_algorithm != "norm":
            raise ConfigError('gradient_clip_algorithm="value" is not available under ZeroStrategy: use "norm"')
        self._sharded().clip_grad_norm_(clip_val)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: what is loaded goes into shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: :meth:`load_checkpoint` does."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: :meth:`save_checkpoint` writes the shards."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:  # noqa: ARG002
        """Empty: :meth:`save_checkpoint` writes the shards."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:  # noqa: FBT001
        """Nothing: :meth:`load_checkpoint` has loaded the shards."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save everything to the folder ``filepath``. Collective.

        Raises:
            ConfigError: There are ``storage_options``.
            CheckpointError: See :func:`zero.save_checkpoint`.
        """
        if storage_options is not None:
            raise ConfigError("ZeroStrategy writes to a file system: it has no storage_options")
        own = {name: value for name, value in checkpoint.items() if name not in KEPT_BY_ZERO}
        save_checkpoint(self._sharded(), self.broadcast(str(filepath)), TAG, client_state=own)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: ARG002, FBT001
        """Load the folder ``checkpoint_path``, to evaluate only its weights, and return Lightning's state. Collective.

        Raises:
            CheckpointError: Another strategy has saved it, or see :func:`zero.load_checkpoint`.
        """
        path, module = Path(self.broadcast(str(checkpoint_path))), self.lightning_module
        assert module is not None, "the Trainer has connected it"
        if self.broadcast(path.is_file()):
            raise CheckpointError(
                f"{path} is a file, which another strategy has saved: build the module with its weights, "
                f"{type(module).__name__}.load_from_checkpoint(path), and train without ckpt_path"
            )
        only_weights = module.trainer.state.fn != TrainerFn.FITTING
        strict, optimizer = module.strict_loading, self._sharded()
        loaded = load_checkpoint(optimizer, path, TAG, load_module_strict=strict, load_module_only=only_weights)
        return loaded.client_state

    def teardown(self) -> None:
        """Leave the module sharded, as it is, for ``trainer.save_checkpoint`` and evaluations."""
        assert self.cluster_environment is not None, "the Trainer has set it"
        assert self.accelerator is not None, "the Trainer has set it"
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


class InstallDDP(Callback):
    """:func:`zcomm.install_ddp` under Lightning: ``Trainer(strategy="ddp", callbacks=[InstallDDP()])``.

    Args:
        recipe: As for :func:`zcomm.install_ddp`.
        options: Its keywords.

    Residuals (errors that the next exchange adds) are each rank's own. Lightning's checkpoints hold one rank's state,
    so a training that is resumed starts with none.
    """

    def __init__(self, recipe: str | Recipe = DEFAULT_RECIPE, **options: Any) -> None:
        self._recipe, self._options = recipe, options
        self.installation: Installation | None = None
        """Of the running or last fit: ``print(callback.installation.report())``."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Install it on what DDPStrategy has wrapped. Collective; raises what :func:`zcomm.install_ddp` does."""
        model = trainer.strategy.model
        assert model is not None, "the strategy has set it up"
        self.installation = install_ddp(model, self._recipe, **self._options)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Uninstall it. Collective."""
        if self.installation is not None:
            self.installation.uninstall()
