"""``state_dict()`` and ``load_state_dict()`` of a model, or of a part of it, while parameters are sharded.

    saving    whole values, bucket by bucket --> what torch's own code puts into the dict --> hooks of any module
    loading   hooks of any module --> what torch's own code copies into a parameter --bucket by bucket--> every rank

Names are torch's business. Parameters are told apart by identity on both ways, so hooks may rename, nest, cast or leave
out entries, in any order: activation checkpointing's wrapper, torch.compile's, a front end's.

At stage 3 saving is collective: rank 0 gets full CPU tensors, gathered bucket by bucket; the other ranks get an empty
dict. With quantized weights it is collective at stages 1 and 2, too: every rank gets copies, on the parameters' device.
What is saved are the masters, rounded once to the parameters' dtype: not what forward reads (that is what
``keep_vars=True`` gives at stages 1 and 2, without communication).

Loading is collective at every stage: rank 0's values are taken over by every rank and by the masters; what the other
ranks pass is not used, and may be the empty dict that they saved. ``assign=True`` copies, too: parameters stay.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zcomm import StateError, control
from zero._access.auto_tiling import rows_by_key
from zero._model.model_checks import has_memory
from zero._ranks.collective_calls import calling_over
from zero._runtime.runtime import Runtime
from zero._runtime.shard_state import TORCHS_HELPERS
from zero._sharding.bucket import Bucket, num_writes
from zero._sharding.buffer_pool import storage_of
from zero._sharding.released import is_released, not_picklable

logger = logging.getLogger("zero")
LOADING = "model.load_state_dict()"


class StateDictCall(NamedTuple):
    """One call of ``state_dict``."""

    module: nn.Module
    """On which it was called."""
    values: dict[nn.Parameter, Tensor]
    """What is saved: whole, or, on ranks that get nothing, on meta."""
    left_out: frozenset[nn.Parameter]


@dataclass(slots=True)
class Loading:
    """One call of ``load_state_dict``."""

    module: nn.Module
    errors: list[str]
    """torch's, which every hook of the call is given."""
    is_empty: bool
    before: dict[nn.Parameter, tuple[int, int]]
    """Writes to, and address of, the parameters that were whole when it began."""
    sources: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """What torch copied into those that were not."""


class StateDicts:
    """Hooks that make the methods of ``runtime.model`` and its modules work on sharded parameters.

    Copies of the model carry them, and are left alone.
    """

    def __init__(self, runtime: Runtime | None = None) -> None:
        self._runtime = runtime
        self._saving: StateDictCall | None = None
        self._loading: Loading | None = None
        self._replaces: dict[nn.Module, int] = {}
        self._ends_save: dict[nn.Module, int] = {}
        self._ends_load: dict[nn.Module, int] = {}
        """By module, the hook's key in torch's dict of such hooks."""

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDicts:
        """The hooks of a copy know none of its modules."""
        return self

    def __reduce__(self) -> tuple[type[StateDicts], tuple[()]]:
        """Below stage 3 a model is pickled with hooks that do nothing."""
        if self._runtime is not None and self._runtime.stage.shards_parameters:
            raise not_picklable(type(self._runtime.model).__name__)
        return StateDicts, ()

    def install(self) -> list[Any]:
        """Hook the model's modules; returns the handles."""
        handles: list[Any] = []
        for module in self._model.modules():
            replace = module.register_state_dict_post_hook(partial(self._replace))  # type: ignore[no-untyped-call]
            end_save = module.register_state_dict_post_hook(partial(self._end_save))  # type: ignore[no-untyped-call]
            end_load = module.register_load_state_dict_post_hook(self._end_load)  # type: ignore[no-untyped-call]
            self._replaces[module], self._ends_save[module] = replace.id, end_save.id
            self._ends_load[module] = end_load.id
            handles += [replace, end_save, end_load]
            handles.append(module.register_state_dict_pre_hook(self._before_save))  # type: ignore[no-untyped-call]
            handles.append(module.register_load_state_dict_pre_hook(self._before_load))  # type: ignore[no-untyped-call]
        if self._of.stage.shards_parameters:  # pickle meets it before hooks of forward, of which it would tell nothing
            handles.append(self._model.register_forward_hook(partial(self._refuse_pickle), prepend=True))
        return handles

    def _refuse_pickle(self, *_: Any) -> None:
        """Nothing, when it is called."""

    def answer(self, param: nn.Parameter, name: str, args: Any) -> Any:
        """What torch's own code gets for using a released ``param`` while a state dict is saved or loaded, or None."""
        saving, loading = self._saving, self._loading
        if name == "detach" and saving is not None and self._running(nn.Module.state_dict):
            return param if param in saving.left_out else saving.values.get(param)
        if name == "copy_" and loading is not None and args[0] is param and _running(nn.Module.load_state_dict):
            if args[1] is not param:
                loading.sources[param] = args[1]
            return param
        return None

    @property
    def _of(self) -> Runtime:
        assert self._runtime is not None, "hooks of no model"
        return self._runtime

    @property
    def _model(self) -> nn.Module:
        return self._of.model

    def _running(self, method: Any) -> list[nn.Module]:
        return [module for module in _running(method) if module in self._replaces]

    def _before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: ARG002, FBT001
        if module not in self._replaces:
            return
        hooks: Any = module._state_dict_hooks  # other hooks are to see the values, and rank 0's names on every rank
        hooks.move_to_end(self._replaces[module], last=False)
        hooks.move_to_end(self._ends_save[module])
        if len(self._running(nn.Module.state_dict)) > 1:
            return  # a part of another call
        runtime, self._saving = self._of, None
        is_exact = not (runtime.is_inexact or runtime.saves_masters)
        if runtime.stage.shards_parameters and runtime.topology.world_size > 1:
            _check_helpers()
        left_out = runtime.left_out
        if runtime.stage.shards_parameters or not (is_exact or keep_vars):
            with calling_over(runtime.topology, "model.state_dict()"):
                self._saving = StateDictCall(module, self._values_of(set(module.parameters()) - left_out), left_out)
        elif left_out:
            self._saving = StateDictCall(module, {}, left_out)
        elif runtime.is_behind:
            logger.warning(
                "model.state_dict() lacks the last update, which is delayed: call optimizer.finish_update() on every "
                "rank before, or save with engine.save_16bit_model()"
            )

    @torch.no_grad()
    def _values_of(self, params: set[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """What is to be saved of ``params``, one bucket after the other. Collective."""
        runtime, values = self._of, dict[nn.Parameter, Tensor]()
        is_sharded = runtime.stage.shards_parameters
        is_here = not is_sharded or runtime.topology.rank == 0
        device = None if not is_sharded else torch.device("cpu" if is_here else "meta")
        for rows in rows_by_key(self._model).values() if is_sharded else ():
            first, last = rows[0].tile, rows[-1]
            if params.issuperset(part.tile for part in rows):  # joined later, with no more memory than they have
                whole = torch.empty((last.stop, *first.shape[1:]), dtype=first.dtype, device=device)
                values.update({part.tile: whole[part.start : part.stop] for part in rows})
        for bucket in runtime.buckets:
            if params.isdisjoint(bucket.params):
                continue
            with runtime.exact(bucket) as exact:
                for slot, param in enumerate(bucket.params):
                    if param in params:
                        if param not in values:
                            values[param] = torch.empty_like(exact[slot], device=device)
                        if is_here:
                            values[param].copy_(exact[slot])
        return values

    def _replace(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:  # noqa: ARG002
        """Put in the values where torch has put parameters of ``module`` itself, or leave them out."""
        saving = self._saving
        if saving is None or module not in self._replaces:
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
        whole = {(p.data_ptr(), p.shape): p for p in params if not is_released(p) and p.numel()}
        for key, entry in list(state_dict.items()):
            if isinstance(entry, Tensor):  # perhaps put in by a module under a name of its own
                param = whole.get((entry.data_ptr(), entry.shape)) if has_memory(entry) else entry
                _put(state_dict, key, param, saving)
            self._check_filled(key, state_dict.get(key))
        if self._of.stage.shards_parameters and self._of.topology.rank != 0:
            saved = {id(value) for value in saving.values.values()}
            for key in [key for key, entry in state_dict.items() if key.startswith(prefix) or id(entry) in saved]:
                del state_dict[key]

    def _check_filled(self, key: str, entry: Any) -> None:
        """What is within an entry must outlive the call."""
        if self._of.stage.shards_parameters:
            for leaf in tree_leaves(entry):
                if isinstance(leaf, Tensor) and (is_released(leaf) or self._is_borrowed(leaf)):
                    raise StateError(
                        f"the state dict's entry {key!r} has a parameter in it that stage 3 releases: save parameters "
                        "as entries of their own, without keep_vars, or copies made inside zero.GatheredParameters"
                    )

    def _is_borrowed(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is memory that others use once its bucket is released."""
        if not has_memory(tensor):
            return False
        bucket = self._of.gatherer.by_storage.get(storage_of(tensor))
        return bucket is not None and not bucket.is_resident

    def _before_load(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *rest: Any,
    ) -> None:
        if module not in self._replaces:
            return
        errors: list[str] = rest[-1]
        if self._loading is None or self._loading.errors is not errors:
            with calling_over(self._of.topology, LOADING):
                self._of.finish_update(publishes=True)
            whole = {p: _version(p) for p in module.parameters() if not is_released(p)}
            self._loading = Loading(module, errors, not state_dict, whole)
            hooks: Any = module._load_state_dict_post_hooks
            hooks.move_to_end(self._ends_load[module])  # others may strike keys from the lists that ranks agree on
        if metadata.get("assign_to_params_buffers"):
            metadata["assign_to_params_buffers"] = False  # a parameter in place of a managed one would never be trained
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
        if loading is None or module is not loading.module or module not in self._replaces:
            return
        self._loading = None
        with calling_over(self._of.topology, LOADING):
            self._take_over(loading, incompatible)

    def _take_over(self, loading: Loading, incompatible: Any) -> None:
        """Take rank 0's values over. If a rank could not load, or lacks keys, so does every rank."""
        runtime, is_first = self._of, self._of.topology.rank == 0
        for bucket, slots in self._loaded(loading).items():
            with runtime.gathered([bucket]):
                if is_first:
                    self._copy([bucket.params[slot] for slot in slots], loading)
                    bucket.take_back()
                runtime.take_values({bucket: slots}, 0)
        lacks_all = not is_first and loading.is_empty
        num_wrong_keys = 0 if lacks_all else len(incompatible.missing_keys) + len(incompatible.unexpected_keys)
        agreed = control.agree_max(torch.tensor([len(loading.errors), num_wrong_keys]), runtime.topology).tolist()
        if agreed[0] and not loading.errors:
            loading.errors.append("another rank could not load what it was given: its own error says why")
        if lacks_all and not agreed[1]:
            incompatible.missing_keys.clear()

    def _loaded(self, loading: Loading) -> dict[Bucket, list[int]]:
        """Which parameters rank 0 has loaded, by bucket; with none of them, buckets that only others have changed."""
        runtime = self._of
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
                except Exception as error:  # as torch does: the other ranks wait
                    name = param.zero_shard.name  # type: ignore[attr-defined]
                    loading.errors.append(f"parameter {name!r} could not be copied: {error}")


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _running(method: Any) -> list[Any]:
    """Whose ``method`` runs here, innermost first. No hook is told that a call has raised; the stack shows it."""
    return [frame.f_locals.get("self") for frame in _stack() if frame.f_code is method.__code__]


def _check_helpers() -> None:
    """torch's get_model_state_dict raises on ranks that get nothing, unless its options say that they do."""
    for frame in _stack():
        options = frame.f_locals.get("info") if frame.f_globals.get("__name__") == TORCHS_HELPERS else None
        if options is not None and (
            not (options.full_state_dict and options.cpu_offload) or options.ignore_frozen_params
        ):
            raise StateError(
                "at stage 3 rank 0 gets the whole state dict, and the others none: give get_model_state_dict "
                "StateDictOptions(full_state_dict=True, cpu_offload=True), without ignore_frozen_params"
            )


def _put(state_dict: dict[str, Any], key: str, param: Any, saving: StateDictCall) -> None:
    """Let the entry of ``param`` have its value, or let there be none."""
    if param in saving.left_out:
        del state_dict[key]
    elif param in saving.values:
        state_dict[key] = saving.values[param]


def _is_view(entry: Tensor, param: nn.Parameter) -> bool:
    """Whether ``entry`` is ``param``, or all of it."""
    if entry is param or is_released(param) or entry.is_meta:
        return entry is param
    return entry.shape == param.shape and entry.data_ptr() == param.data_ptr()


def _version(param: nn.Parameter) -> tuple[int, int]:
    return num_writes(param), param.data_ptr()


def _is_changed(param: nn.Parameter, before: dict[nn.Parameter, tuple[int, int]]) -> bool:
    return param in before and not is_released(param) and _version(param) != before[param]
