"""``model.state_dict()`` and ``model.load_state_dict()`` while parameters are sharded.

At stage 3 saving is collective: rank 0 gets full CPU tensors, gathered bucket by bucket; the other ranks get an empty
dict. Loading is collective at every stage: rank 0's values are taken over by every rank and by the masters.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from zero.runtime import Runtime

__all__ = ["install_state_dict_hooks"]


def install_state_dict_hooks(runtime: Runtime) -> None:
    """Make the model's own methods work on sharded parameters."""
    model, loading = runtime.model, ExitStack()

    def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: ARG001, FBT001
        runtime.is_saving = runtime.stage.shards_parameters

    def after_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:  # noqa: ARG001
        if runtime.is_saving:
            runtime.is_saving = False
            _fill(runtime, state_dict, prefix)

    def before_load(*_: Any) -> None:
        loading.enter_context(runtime.gathered(runtime.buckets, modifier_rank=0))

    def after_load(*_: Any) -> None:
        loading.close()

    model.register_state_dict_pre_hook(before_save)  # type: ignore[no-untyped-call]
    model.register_state_dict_post_hook(after_save)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(before_load)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_post_hook(after_load)  # type: ignore[no-untyped-call]


def _fill(runtime: Runtime, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace the meta tensors that released parameters left in ``state_dict``."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in runtime.model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(prefix + name)
    for bucket in runtime.buckets:
        with runtime.gathered([bucket]):
            if runtime.topology.rank != 0:
                continue
            for param in bucket.params:
                value = param.detach().cpu().clone()
                for name in names[param]:
                    if isinstance(state_dict.get(name), Tensor):
                        state_dict[name] = value
    if runtime.topology.rank != 0:
        state_dict.clear()
