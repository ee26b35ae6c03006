"""``state_dict()`` and ``load_state_dict()`` with sharded parameters: hooks on a model and all its modules.

    saving    full values, bucket by bucket --> torch's own code puts them into the dict --> hooks of any module
    loading   hooks of any module --> torch's own code copies into a parameter --bucket by bucket--> every rank

torch's own code chooses the names. Parameters are identified by identity, not by name, in both directions. So other
hooks may rename, nest, cast or leave out entries, in any order: those of activation checkpointing, torch.compile, or a
trainer.

At stage 3 saving is collective: rank 0 gets full CPU tensors, gathered bucket by bucket; the other ranks get an empty
dict. Inside ``zero.GatheredParameters`` of all the module's parameters it is not, and rank 0 may save alone. With
quantized weights, and while a delayed update waits, saving is collective there, too, and at stages 1 and 2: every rank
gets copies, on the parameters' device, without what was edited or loaded in the block. The saved values are the
masters, rounded once to the parameters' dtype, not the values that forward reads. Those are what ``keep_vars=True``
returns at stages 1 and 2, without communication.

Loading is collective at every stage: every rank, and the masters, get rank 0's values. The other ranks' dicts are
ignored, and may be the empty ones that they saved. ``assign=True`` copies, too: parameters keep their identity. Inside
``zero.GatheredParameters(..., modifier_rank=R)`` of all the module's parameters it is not collective, and rank R may
load alone: the end of the block gives all ranks, and the masters, its values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zcomm import StateError, control
from zero._access.full_states import helper_call, refuse_sharded
from zero._model.model_checks import has_memory
from zero._ranks.collective_calls import calling_over
from zero._runtime.runtime import Runtime
from zero._sharding.bucket import Bucket, Hold, is_managed, num_writes
from zero._sharding.buffer_pool import storage_of
from zero._sharding.released import is_released, not_picklable, running

logger = logging.getLogger("zero")
LOADING = "model.load_state_dict()"


class StateDictCall(NamedTuple):
    """One call of ``state_dict``."""

    module: nn.Module
    """The module whose method was called."""
    values: dict[nn.Parameter, Tensor]
    """The full values to save; on meta for ranks that get none."""
    left_out: frozenset[nn.Parameter]


@dataclass(slots=True)
class Loading:
    """One call of ``load_state_dict``."""

    module: nn.Module
    errors: list[str]
    """torch's list of errors, which every hook of the call gets."""
    is_empty: bool
    is_alone: bool
    """Not collective: inside a block in which torch copies into parameters that a rank may edit alone."""
    before: dict[nn.Parameter, tuple[int, int]]
    """Number of writes to, and address of, each parameter that was full at the start of the call."""
    sources: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """What torch copied into the released parameters."""


class StateDicts:
    """The state dict hooks of ``runtime.model`` and its modules. In copies of the model they do nothing."""

    def __init__(self, runtime: Runtime | None = None) -> None:
        self._runtime = runtime
        self._saving: StateDictCall | None = None
        self._loading: Loading | None = None
        self._saves_masters, self._left_out = False, frozenset[nn.Parameter]()
        self._replace_ids: dict[nn.Module, int] = {}
        self._end_save_ids: dict[nn.Module, int] = {}
        self._end_load_ids: dict[nn.Module, int] = {}
        """By module, the hook's key in torch's dict of such hooks."""

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDicts:
        """Share the hooks with a copy of the model: they ignore modules that they were not installed on."""
        return self

    def __reduce__(self) -> tuple[type[StateDicts], tuple[()]]:
        """Pickle hooks that do nothing below stage 3; refuse at stage 3, where parameters have no values."""
        if self._runtime is not None and self._runtime.stage.shards_parameters:
            raise not_picklable(type(self._runtime.model).__name__)
        return StateDicts, ()

    def install(self) -> list[Any]:
        """Install the hooks on the model's modules, and return their handles."""
        handles: list[Any] = []
        for module in self._owner.model.modules():
            replace = module.register_state_dict_post_hook(partial(self._replace))  # type: ignore[no-untyped-call]
            end_save = module.register_state_dict_post_hook(partial(self._end_save))  # type: ignore[no-untyped-call]
            end_load = module.register_load_state_dict_post_hook(self._end_load)  # type: ignore[no-untyped-call]
            self._replace_ids[module], self._end_save_ids[module] = replace.id, end_save.id
            self._end_load_ids[module] = end_load.id
            handles += [replace, end_save, end_load]
            handles.append(module.register_state_dict_pre_hook(self._before_save))  # type: ignore[no-untyped-call]
            handles.append(module.register_load_state_dict_pre_hook(self._before_load))  # type: ignore[no-untyped-call]
        # pickle meets this hook before others of forward, of which it would tell nothing.
        if self._owner.stage.shards_parameters:
            handles.append(self._owner.model.register_forward_hook(partial(self._refuse_pickle), prepend=True))
        return handles

    def _refuse_pickle(self, *_: Any) -> None:
        """Do nothing in forward: see :meth:`__reduce__`."""

    def answer(self, param: nn.Parameter, name: str, args: Any) -> Any:
        """The result of method ``name`` of a released ``param`` when torch's state dict code calls it, else None."""
        saving, loading = self._saving, self._loading
        if name == "detach" and saving is not None and self._running(nn.Module.state_dict):
            return param if param in saving.left_out else saving.values.get(param)
        if name == "copy_" and loading is not None and args[0] is param and running(nn.Module.load_state_dict):
            if args[1] is not param:
                loading.sources[param] = args[1]
            return param
        return None

    @contextmanager
    def saving(self, left_out: Iterable[nn.Parameter]) -> Iterator[None]:
        self._saves_masters, self._left_out = self._owner.has_pending_update, frozenset(left_out)
        try:
            yield
        finally:
            self._saves_masters, self._left_out = False, frozenset()

    @property
    def _owner(self) -> Runtime:
        assert self._runtime is not None, "hooks of no model"
        return self._runtime

    def _running(self, method: Any) -> list[nn.Module]:
        return [module for module in running(method) if module in self._replace_ids]

    def _before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: ARG002, FBT001
        if module not in self._replace_ids:
            return
        # Hooks that others registered later must run between these two: after the values are in the dict, and before it
        # is emptied on the other ranks, where they would fail on missing names.
        hooks: Any = module._state_dict_hooks
        hooks.move_to_end(self._replace_ids[module], last=False)
        hooks.move_to_end(self._end_save_ids[module])
        if len(self._running(nn.Module.state_dict)) > 1:
            return  # called by the state_dict of a parent module, which has gathered the values
        runtime, self._saving = self._owner, None
        is_exact = not (runtime.is_inexact or self._saves_masters)
        is_sharded = runtime.stage.shards_parameters and runtime.topology.world_size > 1
        if is_sharded and (call := helper_call()) is not None:
            refuse_sharded(call)
        left_out = self._left_out
        params = set(module.parameters()) - left_out
        if is_sharded and is_exact and not runtime.has_pending_update and self._are_held(params):
            device = "cpu" if runtime.topology.rank == 0 else "meta"
            here = {param: param.detach().to(device, copy=True) for param in params if is_managed(param)}
            self._saving = StateDictCall(module, here, left_out)
        elif runtime.stage.shards_parameters or not (is_exact or keep_vars):
            with calling_over(runtime.topology, "model.state_dict()"):
                self._saving = StateDictCall(module, self._values_of(params), left_out)
        elif left_out:
            self._saving = StateDictCall(module, {}, left_out)
        elif runtime.has_pending_update:
            logger.warning(
                "model.state_dict() lacks the last update, which is delayed: call optimizer.finish_update() on every "
                "rank before, or save with engine.save_16bit_model()"
            )

    def _are_held(self, params: set[nn.Parameter]) -> bool:
        """Whether blocks of zero.GatheredParameters, which every rank enters, hold all of ``params``."""
        buckets = [bucket for bucket in self._owner.buckets if not params.isdisjoint(bucket.params)]
        return bool(buckets) and all(bucket.is_held(Hold.ACCESS) for bucket in buckets)

    @torch.no_grad()
    def _values_of(self, params: set[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Gather the values of ``params`` to save, bucket by bucket. Collective."""
        runtime, values = self._owner, dict[nn.Parameter, Tensor]()
        is_sharded = runtime.stage.shards_parameters
        is_here = not is_sharded or runtime.topology.rank == 0
        device = None if not is_sharded else torch.device("cpu" if is_here else "meta")
        for bucket in runtime.buckets:
            if params.isdisjoint(bucket.params):
                continue
            with runtime.exact(bucket) as exact:
                for slot, param in enumerate(bucket.params):
                    if param in params:
                        values[param] = torch.empty_like(exact[slot], device=device)
                        if is_here:
                            values[param].copy_(exact[slot])
        return values

    def _replace(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:  # noqa: ARG002
        """Replace the entries that torch has made for parameters of ``module`` itself by their values."""
        saving = self._saving
        if saving is None or module not in self._replace_ids:
            return
        for name, param in module._parameters.items():
            key, entry = prefix + name, state_dict.get(prefix + name)
            if param is not None and isinstance(entry, Tensor) and _is_view(entry, param):
                _put(state_dict, key, param, saving)

    def _end_save(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:  # noqa: ARG002
        saving = self._saving
        if saving is None or module is not saving.module or len(self._running(nn.Module.state_dict)) > 1:
            return
        self._saving = None
        params = [*saving.values, *saving.left_out]
        full = {(p.data_ptr(), p.shape): p for p in params if not is_released(p) and p.numel()}
        for key, entry in list(state_dict.items()):
            if isinstance(entry, Tensor):  # a module's own code may have added parameters under other names
                param = full.get((entry.data_ptr(), entry.shape)) if has_memory(entry) else entry
                _put(state_dict, key, param, saving)
            self._check_filled(key, state_dict.get(key))
        if self._owner.stage.shards_parameters and self._owner.topology.rank != 0:
            saved = {id(value) for value in saving.values.values()}
            for key in [key for key, entry in state_dict.items() if key.startswith(prefix) or id(entry) in saved]:
                del state_dict[key]

    def _check_filled(self, key: str, entry: Any) -> None:
        """Raise if ``entry`` holds a parameter, or memory of one, that stage 3 releases after the call."""
        if self._owner.stage.shards_parameters:
            for leaf in tree_leaves(entry):
                if isinstance(leaf, Tensor) and (is_released(leaf) or self._is_borrowed(leaf)):
                    raise StateError(
                        f"the state dict's entry {key!r} has a parameter in it that stage 3 releases: save parameters "
                        "as entries of their own, without keep_vars, or copies made inside zero.GatheredParameters"
                    )

    def _is_borrowed(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is memory of a bucket, which the pool reuses once the bucket is released."""
        if not has_memory(tensor):
            return False
        bucket = self._owner.gatherer.by_storage.get(storage_of(tensor))
        return bucket is not None and not bucket.is_persistent

    def _before_load(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any
    ) -> None:
        if module not in self._replace_ids:
            return
        errors: list[str] = args[-1]
        if self._loading is None or self._loading.errors is not errors:
            edits = self._owner.edits
            is_alone = edits.may_edit(param for param in module.parameters() if is_managed(param))
            if not is_alone:
                with calling_over(self._owner.topology, LOADING):
                    self._owner.finish_update(writes_back=True)
                    edits.adopt_so_far()
            full = {p: _version(p) for p in module.parameters() if not is_released(p)}
            self._loading = Loading(module, errors, not state_dict, is_alone, full)
            hooks: Any = module._load_state_dict_post_hooks
            # Last, because other hooks may remove keys from the lists of missing and unexpected ones, on which
            # _end_load decides.
            hooks.move_to_end(self._end_load_ids[module])
        if metadata.get("assign_to_params_buffers"):
            metadata["assign_to_params_buffers"] = False  # a new parameter would not be managed, so never trained
            for name, param in module._parameters.items():
                value = state_dict.get(prefix + name)
                if param is not None and isinstance(value, Tensor) and value.dtype != param.dtype:
                    errors.append(
                        f"assign=True would make {prefix + name!r} {value.dtype}: it is {param.dtype}, and managed by "
                        "a ZeroOptimizer; pass assign=False, which casts, or load before ZeroOptimizer is constructed"
                    )

    @torch.no_grad()
    def _end_load(self, module: nn.Module, incompatible: Any) -> None:
        loading = self._loading
        if loading is None or module is not loading.module or module not in self._replace_ids:
            return
        self._loading = None
        if not loading.is_alone:
            with calling_over(self._owner.topology, LOADING):
                self._adopt_values(loading, incompatible)
            return
        edits = self._owner.edits
        edits.note_loaded(p for p in loading.before if is_managed(p) and _is_changed(p, loading.before))
        if loading.is_empty and not edits.counts_here:  # what this rank has saved: at stage 3 the first one has it all
            incompatible.missing_keys.clear()

    def _adopt_values(self, loading: Loading, incompatible: Any) -> None:
        """Give every rank rank 0's values. If a rank has an error, or missing keys, every rank gets one."""
        runtime, is_first = self._owner, self._owner.topology.rank == 0
        for bucket, slots in self._loaded(loading).items():
            with runtime.gathered([bucket]):
                if is_first:
                    self._copy([bucket.params[slot] for slot in slots], loading)
                    bucket.copy_back_moved()
                runtime.adopt_values({bucket: slots}, 0)
                runtime.forget_writes(bucket.params)  # of other ranks: rank 0's values count
        lacks_all = not is_first and loading.is_empty
        num_wrong_keys = 0 if lacks_all else len(incompatible.missing_keys) + len(incompatible.unexpected_keys)
        agreed = control.agree_max(torch.tensor([len(loading.errors), num_wrong_keys]), runtime.topology).tolist()
        if agreed[0] and not loading.errors:
            loading.errors.append("another rank could not load what it was given: its own error says why")
        if lacks_all and not agreed[1]:
            incompatible.missing_keys.clear()

    def _loaded(self, loading: Loading) -> dict[Bucket, list[int]]:
        """The slots that rank 0 has loaded, by bucket. Buckets that only other ranks have changed have no slots.

        Those are included because the other ranks' changes must be overwritten.
        """
        runtime = self._owner
        slots = [(bucket, slot) for bucket in runtime.buckets for slot in range(len(bucket.params))]
        params = [bucket.params[slot] for bucket, slot in slots]
        mine = torch.tensor([p in loading.sources or _is_changed(p, loading.before) for p in params]).long()
        both = torch.stack([mine, mine if runtime.topology.rank == 0 else torch.zeros_like(mine)])
        of_any, of_first = control.agree_max(both, runtime.topology).tolist()
        loaded: dict[Bucket, list[int]] = {}
        for (bucket, slot), is_changed, is_loaded in zip(slots, of_any, of_first, strict=True):
            if is_changed:
                loaded.setdefault(bucket, []).extend([slot] if is_loaded else [])
        return loaded

    def _copy(self, params: list[nn.Parameter], loading: Loading) -> None:
        for param in params:
            source = loading.sources.get(param)
            if source is not None:
                try:
                    param.copy_(source)
                except Exception as error:  # reported like torch's own: the other ranks wait in a collective
                    name = param.zero_shard.name  # type: ignore[attr-defined]
                    loading.errors.append(f"parameter {name!r} could not be copied: {error}")


def _put(state_dict: dict[str, Any], key: str, param: Any, saving: StateDictCall) -> None:
    """Set the entry of ``param`` to its value, or delete it."""
    if param in saving.left_out:
        del state_dict[key]
    elif param in saving.values:
        state_dict[key] = saving.values[param]


def _is_view(entry: Tensor, param: nn.Parameter) -> bool:
    """Whether ``entry`` is ``param``, or a view of all its elements."""
    if entry is param or is_released(param) or entry.is_meta:
        return entry is param
    return entry.shape == param.shape and entry.data_ptr() == param.data_ptr()


def _version(param: nn.Parameter) -> tuple[int, int]:
    return num_writes(param), param.data_ptr()


def _is_changed(param: nn.Parameter, before: dict[nn.Parameter, tuple[int, int]]) -> bool:
    return param in before and not is_released(param) and _version(param) != before[param]
