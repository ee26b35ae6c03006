"""What ZeroOptimizer puts on a model beside the hooks that move its parameters and gradients."""

from __future__ import annotations

from dataclasses import replace

from zero._access.state_dict import StateDicts
from zero._activations.activation_settings import ActivationSettings
from zero._activations.install import NO_TENSOR_RANKS, install
from zero._ranks.model_parallel import ModelParallel
from zero._runtime.runtime import Runtime

__all__ = ["install_on_model"]


def install_on_model(runtime: Runtime, activations: ActivationSettings, model_parallel: ModelParallel) -> None:
    """Saving and loading of its state, and where checkpointed functions keep their inputs. Collective.

    Raises:
        OSError: See :func:`zero._activations.install.install`.
    """
    runtime.state_dicts = StateDicts(runtime)
    runtime.hooks.keep(runtime.state_dicts.install())
    group = model_parallel.tensor_group
    inactive: tuple[str, ...] = ()
    if activations.partitions and group is None:
        activations, inactive = replace(activations, partitions=False), (f"partition_activations ({NO_TENSOR_RANKS})",)
    runtime.effective = runtime.effective.and_more(details=activations.described(), inactive=inactive)
    runtime.hooks.keep(install(runtime.model, activations, group, runtime.topology))
