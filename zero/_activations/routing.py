"""Redirects calls of torch.utils.checkpoint inside a model's forward to the model's checkpointer.

``torch.utils.checkpoint.checkpoint`` looks up two names in its module when it is called, one for each value of
use_reentrant. We replace these two, so calls are redirected however ``checkpoint`` was imported. Calls outside of the
forward of such a model go to torch's own functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointFunction

from zcomm import BackendUnavailableError
from zero._activations.checkpointed_call import CheckpointedCall
from zero._activations.scope import current

REENTRANT, NON_REENTRANT = "CheckpointFunction", "_checkpoint_without_reentrant_generator"


class _RoutedFunction(CheckpointFunction):
    """Replaces the function of ``use_reentrant=True``."""

    @classmethod
    def apply(cls, function: Any, preserve_rng_state: bool, *args: Any) -> Any:  # noqa: FBT001  (torch's signature)
        checkpointer = current()
        if checkpointer is None or not torch.is_grad_enabled():
            return CheckpointFunction.apply(function, preserve_rng_state, *args)  # type: ignore[no-untyped-call]
        call = CheckpointedCall(checkpointer, function, args, {}, is_reentrant=True)
        call.take_leaves()
        with call.saving():
            return CheckpointFunction.apply(call, preserve_rng_state, *args)  # type: ignore[no-untyped-call]


class Routing:
    """Replaces the two names while at least one model needs it."""

    def __init__(self) -> None:
        self._num_models = 0
        self._original: Any = None

    def add(self) -> None:
        if self._num_models == 0:
            check_routable()
            self._original = getattr(torch_checkpoint, NON_REENTRANT)
            kinds = [parameter.kind for parameter in inspect.signature(self._original).parameters.values()]
            # Positional parameters between the function and its arguments.
            self._num_options = kinds.index(inspect.Parameter.VAR_POSITIONAL) - 1
            setattr(torch_checkpoint, REENTRANT, _RoutedFunction)
            setattr(torch_checkpoint, NON_REENTRANT, self._routed)
        self._num_models += 1

    def remove(self) -> None:
        self._num_models -= 1
        if self._num_models == 0:
            setattr(torch_checkpoint, REENTRANT, CheckpointFunction)
            setattr(torch_checkpoint, NON_REENTRANT, self._original)

    def _routed(self, function: Any, *args: Any, **kwargs: Any) -> Generator[None, None, None]:
        """Replaces the generator of ``use_reentrant=False``; torch runs the forward at its ``yield``."""
        checkpointer = current()
        if checkpointer is None or not torch.is_grad_enabled():
            yield from self._original(function, *args, **kwargs)
            return
        options, inputs = args[: self._num_options], args[self._num_options :]
        call = CheckpointedCall(checkpointer, function, inputs, kwargs, only_recomputes=True)
        # The frame of a generator lives on during the forward, and would keep the inputs alive.
        del args, inputs, kwargs
        with call.saving(), call.entered("forward"):
            yield from self._original(call, *options, *call.take_leaves())


ROUTING = Routing()
"""One for the process."""


def check_routable() -> None:
    """Raise BackendUnavailableError if this version of torch has no such names."""
    missing = [name for name in (REENTRANT, NON_REENTRANT) if not hasattr(torch_checkpoint, name)]
    if missing:
        raise BackendUnavailableError(
            f"torch {torch.__version__} has no torch.utils.checkpoint.{missing[0]}: activation_checkpointing of the "
            "configuration does not apply to its calls; call zero.checkpoint(function, *args) instead"
        )
