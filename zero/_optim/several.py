"""Several optimizers as one: Muon for the matrices, AdamW for the rest.

Their parameter groups are those of the one, in order, and all of them keep their states in one dict. So a checkpoint, a
learning rate schedule and a change of ``param_groups`` see one optimizer; a step calls each optimizer's own.
"""

from __future__ import annotations

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
        super().__init__([group for one in optimizers for group in one.param_groups], {})
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by ``load_state_dict`` with new groups and states."""
        super().__setstate__(state)
        self.share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every optimizer."""
        loss = None if closure is None else closure()
        for one in self.optimizers:
            one.step()
        return loss


def as_one(optimizer: Any) -> Any:
    """A list of optimizers as one; anything else as it is.

    Raises:
        ConfigError: The list holds something else, or a parameter is in two of them.
    """
    if not isinstance(optimizer, (list, tuple)):
        return optimizer
    if not optimizer or not all(isinstance(one, Optimizer) for one in optimizer):
        raise ConfigError(f"several optimizers are given as a list of instances: got {optimizer!r:.200}")
    return optimizer[0] if len(optimizer) == 1 else Several(optimizer)


def optimizers_of(optimizer: Optimizer) -> list[Optimizer]:
    """Those that ``optimizer`` steps: it, if it is not several."""
    return optimizer.optimizers if isinstance(optimizer, Several) else [optimizer]


def name_of(optimizer: Optimizer | type[Optimizer]) -> str:
    """The class of ``optimizer``, or the classes of several."""
    if isinstance(optimizer, type):
        return optimizer.__name__
    return " + ".join(type(one).__name__ for one in optimizers_of(optimizer))
