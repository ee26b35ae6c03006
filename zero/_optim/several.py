"""Several optimizers as one: Muon for the matrices, AdamW for the rest.

Their parameter groups are those of the one, in order, and all of them keep their states in one dict. So a checkpoint, a
learning rate schedule and a change of ``param_groups`` see one optimizer; a step calls each optimizer's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from zcomm import ConfigError

__all__ = ["Several", "as_one", "name_of", "optimizers_of"]


class Several(Optimizer):
    """Steps ``optimizers``, each on its own parameter groups.

    Raises:
        ConfigError: A parameter is in two of them.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        held: dict[Any, str] = {}
        for one in optimizers:
            for param in (param for group in one.param_groups for param in group["params"]):
                if param in held:
                    raise ConfigError(
                        f"a parameter of shape {tuple(param.shape)} is in two optimizers, {held[param]} and "
                        f"{type(one).__name__}: give each parameter to one"
                    )
            held |= {p: type(one).__name__ for group in one.param_groups for p in group["params"]}
        try:
            super().__init__([group for one in optimizers for group in one.param_groups], {})
        except ValueError as error:
            raise ConfigError(f"the parameter groups of several optimizers do not go together: {error}") from error
        for one in optimizers:
            self.state.update(one.state)
        self.share()

    def share(self) -> None:
        """Give each optimizer its groups of this one, and the states."""
        first = 0
        for one in self.optimizers:
            last = first + len(one.param_groups)
            one.param_groups, one.state = self.param_groups[first:last], self.state
            first = last

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have every optimizer load its own groups and states: some keep them in dtypes of their own."""
        groups, states, first = state_dict["param_groups"], state_dict["state"], 0
        if len(groups) != len(self.param_groups):
            raise ValueError(f"{len(groups)} parameter groups were saved, and there are {len(self.param_groups)}")
        loaded: dict[Any, Any] = {}
        for one in self.optimizers:
            own = groups[first : first + len(one.param_groups)]
            numbers = {number for group in own for number in group["params"]}
            numbered = {number: place for place, number in enumerate(sorted(numbers))}
            one.load_state_dict({
                "state": {numbered[number]: state for number, state in states.items() if number in numbers},
                "param_groups": [{**group, "params": [numbered[n] for n in group["params"]]} for group in own],
            })  # fmt: skip
            loaded |= one.state
            first += len(own)
        self.param_groups = [group for one in self.optimizers for group in one.param_groups]
        self.state = defaultdict(dict, loaded)
        self.share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every optimizer; it takes no closure."""
        if closure is not None:
            raise ConfigError("several optimizers have no step with a closure: compute the loss before")
        for one in self.optimizers:
            one.step()


def as_one(optimizer: Any) -> Any:
    """A list of optimizers as one; anything else as it is.

    Raises:
        ConfigError: The list holds something else, or a parameter is in two of them.
    """
    if not isinstance(optimizer, (list, tuple)):
        return optimizer
    if not optimizer or not all(isinstance(one, Optimizer) for one in optimizer):
        kinds = ", ".join(one.__name__ if isinstance(one, type) else type(one).__name__ for one in optimizer)
        raise ConfigError(f"several optimizers are given as a list of instances: got a list of {kinds or 'nothing'}")
    return optimizer[0] if len(optimizer) == 1 else Several(optimizer)


def optimizers_of(optimizer: Optimizer) -> list[Optimizer]:
    """Those that ``optimizer`` steps: it, if it is not several."""
    return optimizer.optimizers if isinstance(optimizer, Several) else [optimizer]


def name_of(optimizer: Optimizer | type[Optimizer]) -> str:
    """The class of ``optimizer``, or the classes of several."""
    if isinstance(optimizer, type):
        return optimizer.__name__
    return " + ".join(type(one).__name__ for one in optimizers_of(optimizer))
