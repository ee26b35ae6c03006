"""Random numbers beside the default ones: of tensor-parallel ranks, each of which drops out on its own.

Named as in Megatron-LM and DeepSpeed. The generator is CUDA's where there is one, else the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from zcomm import ConfigError

MODEL_PARALLEL = "model-parallel-rng"


class RandomStates:
    """Named states of the random generator. Checkpointed functions find them in backward as they were in forward."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}

    def add(self, name: str, seed: int) -> None:
        """Start a state from ``seed``.

        Raises:
            ConfigError: There is one of this name.
        """
        if name in self._states:
            raise ConfigError(f"a random state of this name exists: name={name!r}; call reset() before")
        before = _get_state()
        _seed(seed)
        self._states[name] = _get_state()
        _set_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Inside, random numbers come from the state ``name``.

        Raises:
            ConfigError: There is none of this name.
        """
        if name not in self._states:
            raise ConfigError(
                f"there is no random state {name!r}: call model_parallel_cuda_manual_seed(seed), or add(name, seed)"
            )
        before = _get_state()
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _get_state()
            _set_state(before)

    def get_states(self) -> dict[str, Tensor]:
        """All states, by name."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`get_states` gave."""
        self._states = dict(states)

    def reset(self) -> None:
        """Forget all."""
        self._states = {}

    @contextmanager
    def at(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the states are ``states``; afterwards what they were."""
        before = self.get_states()
        self.set_states(states)
        try:
            yield
        finally:
            self.set_states(before)


TRACKER = RandomStates()
"""The process's."""


def _get_state() -> Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def _seed(seed: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
