"""``model.state_dict()`` and ``model.load_state_dict()`` while parameters are sharded.

At stage 3 saving is collective: rank 0 gets full CPU tensors, gathered bucket by bucket; the other ranks get an empty
dict. With quantized weights or a compressed link it is collective at stages 1 and 2, too: every rank gets copies, on
the parameters' device. What is saved are the masters, rounded once to the parameters' dtype: not what forward reads
(that is what ``keep_vars=True`` gives at stages 1 and 2, without communication).

Loading is collective at every stage: rank 0's values are taken over by every rank and by the masters; what the other
ranks pass is not used, and may be the empty dict that they saved.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from zcomm import control
from zero.bucket import Bucket
from zero.collective import calling_over
from zero.large_linears import Rows, rows_by_key, split_keys
from zero.runtime import Runtime

__all__ = ["install_state_dict_hooks"]

logger = logging.getLogger("zero")


def install_state_dict_hooks(runtime: Runtime) -> list[Any]:
    """Make the model's own methods work on sharded parameters; returns the handles of the hooks."""
    model, load = runtime.model, _Load(runtime)

    def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: ARG001, FBT001
        sharded = runtime.stage.shards_parameters
        is_exact = not (runtime.is_inexact or runtime.saves_masters)
        runtime.is_saving = module is model and (sharded or not (is_exact or keep_vars))
        if module is model and runtime.is_behind and not runtime.is_saving:
            logger.warning(
                "model.state_dict() lacks the last update, which is delayed: call optimizer.finish_update() on every "
                "rank before, or save with engine.save_16bit_model()"
            )

    def after_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:  # noqa: ARG001
        if runtime.is_saving and module is model:
            runtime.is_saving = False
            with calling_over(runtime.topology, "model.state_dict()"):
                _fill(runtime, state_dict, prefix)

    def before_load(
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        *rest: Any,
    ) -> None:
        if module is model:  # a deep copy of the model has these hooks too
            with calling_over(runtime.topology, "model.load_state_dict()"):
                load.begin(state_dict, prefix, errors=rest[-1])

    def after_load(module: nn.Module, incompatible: Any) -> None:
        if module is model:
            with calling_over(runtime.topology, "model.load_state_dict()"):
                load.end(incompatible)

    return [
        model.register_state_dict_pre_hook(before_save),  # type: ignore[no-untyped-call]
        model.register_state_dict_post_hook(after_save),  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(before_load),  # type: ignore[no-untyped-call]
        model.register_load_state_dict_post_hook(after_load),  # type: ignore[no-untyped-call]
    ]


def _names(runtime: Runtime, prefix: str) -> dict[nn.Parameter, list[str]]:
    """Under which keys of a state dict each parameter stands; several for a tied one."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in runtime.model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(prefix + name)
    return names


def _fill(runtime: Runtime, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace what stands in ``state_dict`` for the parameters: meta tensors of released ones, or quantized values."""
    names, is_sharded = _names(runtime, prefix), runtime.stage.shards_parameters
    tiles = {part.tile: (key, part) for key, rows in rows_by_key(runtime.model, prefix).items() for part in rows}
    for bucket in runtime.buckets:
        with runtime.exact(bucket) as values:
            if is_sharded and runtime.topology.rank != 0:
                continue
            for param, value in zip(bucket.params, values, strict=True):
                if param in tiles:
                    _fill_rows(state_dict, *tiles[param], value)
                    continue
                copied = value.to("cpu", copy=True) if is_sharded else value.clone()
                for name in names[param]:
                    if isinstance(state_dict.get(name), Tensor):
                        state_dict[name] = copied
    if is_sharded and runtime.topology.rank != 0:
        state_dict.clear()


def _fill_rows(state_dict: dict[str, Any], key: str, rows: Rows, value: Tensor) -> None:
    whole = state_dict.get(key)
    if not isinstance(whole, Tensor):
        return
    if whole.is_meta:
        whole = state_dict[key] = torch.empty(whole.shape, dtype=value.dtype)
    whole[rows.start : rows.stop].copy_(value)


class _Load:
    """One call of ``load_state_dict`` after the other.

    Below stage 3 torch's own code copies into the full parameters. At stage 3 the values are taken out of the state
    dict before it comes to that, bucket by bucket: only one is held full at a time.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._slots: dict[Bucket, list[int]] = {}
        self._taken: set[str] = set()
        self._errors: list[str] = []
        self._is_empty = False

    def begin(self, state_dict: dict[str, Any], prefix: str, errors: list[str]) -> None:
        """Agree with rank 0 on which parameters it loads; at stage 3, load them. ``state_dict`` is torch's copy."""
        runtime = self._runtime
        runtime.finish_update(publishes=True)
        self._errors, self._is_empty = errors, not state_dict
        self._taken, self._slots = set(), {}
        tiles = split_keys(runtime.model, state_dict, prefix)
        state_dict.clear()
        state_dict.update(tiles)
        fitting = _fitting(runtime, state_dict, prefix)
        params = [(bucket, slot, param) for bucket in runtime.buckets for slot, param in enumerate(bucket.params)]
        is_loaded = torch.tensor([param in fitting for _, _, param in params])
        control.broadcast_(is_loaded, 0, runtime.topology)
        for (bucket, slot, _), chosen in zip(params, is_loaded.tolist(), strict=True):
            if chosen:
                self._slots.setdefault(bucket, []).append(slot)
        if runtime.stage.shards_parameters:
            for bucket, slots in self._slots.items():
                with runtime.gathered([bucket]):
                    self._copy_on_rank_0([bucket.params[slot] for slot in slots], fitting, state_dict)
                    runtime.take_values({bucket: slots}, 0)
            self._taken = {name for names in fitting.values() for name in names}
            for name in self._taken:
                del state_dict[name]

    def _copy_on_rank_0(
        self, params: list[nn.Parameter], fitting: dict[nn.Parameter, list[str]], state_dict: dict[str, Any]
    ) -> None:
        if self._runtime.topology.rank == 0:
            for param in params:
                param.detach().copy_(state_dict[fitting[param][-1]])  # of a tied one's names, the last wins

    def end(self, incompatible: Any) -> None:
        """Below stage 3, take rank 0's values over. If a rank could not load, or lacks keys, so does every rank."""
        runtime = self._runtime
        if not runtime.stage.shards_parameters:
            runtime.take_values(self._slots, 0)
        incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name not in self._taken]
        lacks_all = runtime.topology.rank != 0 and self._is_empty
        num_wrong_keys = 0 if lacks_all else len(incompatible.missing_keys) + len(incompatible.unexpected_keys)
        agreed = control.agree_max(torch.tensor([len(self._errors), num_wrong_keys]), runtime.topology).tolist()
        if agreed[0] and not self._errors:
            self._errors.append("another rank could not load what it was given: its own error says why")
        if lacks_all and not agreed[1]:
            incompatible.missing_keys.clear()


def _fitting(runtime: Runtime, state_dict: dict[str, Any], prefix: str) -> dict[nn.Parameter, list[str]]:
    """The keys of ``state_dict`` under which parameters stand, in their shape. torch reports the others."""
    fitting: dict[nn.Parameter, list[str]] = {}
    for param, names in _names(runtime, prefix).items():
        values = [(name, state_dict.get(name)) for name in names]
        known = [name for name, value in values if isinstance(value, Tensor) and value.shape == param.shape]
        if known:
            fitting[param] = known
    return fitting
