"""What an optimizer keeps from step to step and a checkpoint would lose: all but numbers and tensors in its state."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["attributes", "lost"]


def attributes(optimizer: Optimizer) -> dict[str, str]:
    """As texts, what an optimizer may keep beside its state and its groups."""
    kinds = (Tensor, dict, list, tuple, deque)
    return {
        name: repr(value)
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups") and (type(value) in (int, float) or isinstance(value, kinds))
    }


def lost(optimizer: Optimizer, leaves: list[Tensor], before: dict[str, str]) -> Iterator[str]:
    """What of ``optimizer`` over ``leaves`` a checkpoint would not hold; ``before``: its attributes before any step."""
    for name, text in attributes(optimizer).items():
        if text != before.get(name):
            yield f"keeps {name!r}, which steps change, outside of its state: a checkpoint would lose it"
    numel_of = {leaf: leaf.numel() for leaf in leaves}
    for leaf, state in optimizer.state.items():
        if leaf not in numel_of:
            yield f"keeps state for {leaf!r}, which is no parameter: a checkpoint would lose it"
            continue
        for name, value in state.items():
            is_tensor = type(value) in (Tensor, nn.Parameter)
            is_held = value.numel() == 1 or value.shape == leaf.shape if is_tensor else isinstance(value, (int, float))
            if value is not None and not is_held:
                kind = f"a {type(value).__name__}" + (f" of shape {tuple(value.shape)}" if is_tensor else "")
                yield (
                    f"keeps {name!r} of {leaf.numel()} elements as {kind}: a checkpoint holds numbers, and tensors "
                    "with one value for each element"
                )
