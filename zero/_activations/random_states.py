"""Named random states: tensor-parallel ranks draw different dropout masks from a state of their own.

Names are those of Megatron-LM and DeepSpeed. The generator is CUDA's where there is one, else the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zcomm import ConfigError

MODEL_PARALLEL = "model-parallel-rng"


class RandomStates:
    """Named states of the random generator, restored when a checkpointed function is recomputed."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}

    def add(self, name: str, seed: int) -> None:
        """Start a state from ``seed``.

        Raises:
            ConfigError: The name is taken.
        """
        if name in self._states:
            raise ConfigError(f"a random state of this name exists: name={name!r}; call reset() first")
        generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu")
        self._states[name] = generator.manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw random numbers from the state ``name`` inside.

        Raises:
            ConfigError: There is no state of this name.
        """
        if name not in self._states:
            raise ConfigError(
                f"there is no random state {name!r}: call model_parallel_cuda_manual_seed(seed), or add(name, seed)"
            )
        before = _random().get_rng_state()
        _random().set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _random().get_rng_state()
            _random().set_rng_state(before)

    def get_states(self) -> dict[str, Tensor]:
        """All states, by name."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Continue from what :meth:`get_states` returned."""
        self._states = dict(states)

    def reset(self) -> None:
        """Forget all states."""
        self._states = {}

    @contextmanager
    def restored(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """Use ``states`` inside; afterwards the states are what they were before."""
        before = self.get_states()
        self.set_states(states)
        try:
            yield
        finally:
            self.set_states(before)


TRACKER = RandomStates()
"""One for the process."""


def _random() -> Any:
    """The module with the default generator's ``get_rng_state`` and ``set_rng_state``."""
    return torch.cuda if torch.cuda.is_available() else torch
