"""Linear layers above a size, cut into tiles in place (``tile_linears_above``), and put together again.

    nn.Linear [out, in] --cut into rows--> TiledLinear, out_splits = ceil(out * in / max_numel)

Rows only: they are contiguous in the weight, and each element of the output is the sum it was. Such a layer keeps its
keys: ``state_dict()`` has ``weight`` and ``bias``, ``load_state_dict()`` takes them, and so do
:func:`zero.load_pretrained` and the export of checkpoints. The checkpoints themselves hold tiles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero._access.gathered_parameters import GatheredParameters
from zero._access.tiled_linear import TiledLinear
from zero._config.settings import ZeroSettings
from zero._model.init_shards import construction_of
from zero._sharding.units import USING_THEIR_CHILDREN, is_compiled, is_leaf


class Rows(NamedTuple):
    """Rows ``[start, stop)`` of an untiled parameter, and the parameter that holds them."""

    key: str
    """Of the tile, dotted."""
    tile: nn.Parameter
    start: int
    stop: int


class Tiled(NamedTuple):
    """What :func:`tile_large_linears` has done."""

    names: list[str]
    """Layers that are tiled now."""
    num_tiles: int
    left: list[str]
    """Larger layers that are not, each with the reason."""

    def __str__(self) -> str:
        text = f"{len(self.names)} linear layers in {self.num_tiles} tiles"
        return f"{text}, left whole: {', '.join(self.left)}" if self.left else text


def tile_configured(model: nn.Module, settings: ZeroSettings, optimizer: object) -> tuple[str, ...]:
    """:func:`tile_large_linears` if the settings ask for it; what is to be said of it."""
    if settings.tile_linears_above is None or settings.stage != 3:
        return ()
    tiled = tile_large_linears(model, settings.tile_linears_above, optimizer)
    return (f"tile_linears_above={settings.tile_linears_above}: {tiled}",)


@torch.no_grad()
def tile_large_linears(model: nn.Module, max_numel: int, optimizer: object = None) -> Tiled:
    """Replace the linear layers of ``model`` whose weight has more than ``max_numel`` elements by tiles of their rows.

    Args:
        model: Changed in place, before a ZeroOptimizer has it. Divided by zero.Init or not.
        max_numel: Elements of a tile's weight; at least one row is one tile.
        optimizer: A torch optimizer without state: its groups get the tiles instead of the layers' parameters.

    Left whole: layers of classes with a forward of their own, those whose parameters others use, too, those with hooks
    or parametrizations, and those within leaf modules, compiled ones, and modules of torch.nn that use their weights
    without calling them. Collective where zero.Init has divided a layer. Memory: one layer and one tile.
    """
    uses = Counter(param for _, param in model.named_parameters(remove_duplicate=False))
    replaced: dict[nn.Parameter, list[nn.Parameter]] = {}
    names, left, num_tiles = [], [], 0
    for name, parent, child_name, linear in list(_large_linears(model, max_numel)):
        reason = _why_not(model, name, linear, uses)
        if reason:
            left.append(f"{name} ({reason})")
            continue
        before = dict(linear.named_parameters(recurse=False))
        num_splits = min(-(-linear.weight.numel() // max_numel), linear.out_features)
        tiled = _tile(linear, num_splits)
        for key, param in before.items():
            replaced[param] = [rows.tile for rows in _rows_of(tiled, "")[key]]
        parent._modules[child_name] = tiled
        names.append(name)
        num_tiles += num_splits
    if isinstance(optimizer, Optimizer):
        for group in optimizer.param_groups:
            group["params"] = [tile for param in group["params"] for tile in replaced.get(param, [param])]
    return Tiled(names, num_tiles, left)


@torch.no_grad()
def untile_linears(model: nn.Module) -> list[str]:
    """Put the layers that ``tile_linears_above`` has cut together again; returns their names.

    ``model`` is whole: close its ZeroOptimizer inside ``zero.GatheredParameters(model.parameters())`` before. Memory:
    one layer more.
    """
    names = []
    for name, module in list(model.named_modules()):
        if not (isinstance(module, TiledLinear) and module.keeps_keys):
            continue
        linear = nn.Linear(module.in_features, module.out_features, bias=module.use_bias, device="meta")
        for key, rows in _rows_of(module, "").items():
            whole = torch.cat([part.tile.detach() for part in rows])
            setattr(linear, key, nn.Parameter(whole, requires_grad=rows[0].tile.requires_grad))
        parent, _, child = name.rpartition(".")
        model.get_submodule(parent)._modules[child] = linear.train(module.training)
        names.append(name)
    return names


def _large_linears(model: nn.Module, max_numel: int) -> Iterator[tuple[str, nn.Module, str, nn.Linear]]:
    for name, parent in model.named_modules():
        if isinstance(parent, nn.ModuleList) and any(isinstance(m, TiledLinear) for m in _above(model, name)):
            continue  # a tile
        for child_name, child in parent.named_children():
            if isinstance(child, nn.Linear) and child.weight.numel() > max_numel:
                yield f"{name}.{child_name}".lstrip("."), parent, child_name, child


def _above(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules that hold the one of that name, outermost first."""
    parts = name.split(".") if name else []
    for end in range(len(parts)):
        yield model.get_submodule(".".join(parts[:end]))


def _why_not(model: nn.Module, name: str, linear: nn.Linear, uses: Counter[nn.Parameter]) -> str:
    """Why ``linear`` cannot be tiled; empty if it can."""
    if type(linear).forward is not nn.Linear.forward or hasattr(linear, "parametrizations"):
        return f"{type(linear).__name__} computes something else"
    if any(uses[param] > 1 for param in linear.parameters(recurse=False)):
        return "its parameters are shared"
    if any(value for key, value in vars(linear).items() if key.endswith("_hooks")):
        return "it has hooks"
    if is_compiled(linear) or any(
        is_leaf(above) or is_compiled(above) or isinstance(above, USING_THEIR_CHILDREN) for above in _above(model, name)
    ):
        return "it is used as a part of a larger module"
    return ""


def _tile(linear: nn.Linear, num_splits: int) -> TiledLinear:
    params = dict(linear.named_parameters(recurse=False))
    construction = construction_of(params["weight"])
    at = 0

    def next_rows(in_features: int, out_features: int, *, bias: bool) -> nn.Linear:
        nonlocal at
        tile = nn.Linear(in_features, out_features, bias=bias, device="meta")
        for key, param in params.items():
            rows = param.detach()[at : at + out_features].clone()
            setattr(tile, key, nn.Parameter(rows, requires_grad=param.requires_grad))
        at += out_features
        if construction is not None:
            construction.divide(tile)
        return tile

    with GatheredParameters(params.values()):
        tiled = TiledLinear(
            linear.in_features, linear.out_features, linear.bias is not None, out_splits=num_splits,
            linear_cls=next_rows,
        )  # fmt: skip
    if construction is not None:
        for param in params.values():
            construction.forget(param)
    _keep_keys(tiled)
    return tiled.train(linear.training)


def _keep_keys(tiled: TiledLinear) -> None:
    tiled.keeps_keys = True
    tiled.register_state_dict_post_hook(_join_keys)  # type: ignore[no-untyped-call]
    tiled.register_load_state_dict_pre_hook(_split_own_keys)  # type: ignore[no-untyped-call]


def _join_keys(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace the tiles by what they are rows of."""
    for key, rows in _rows_of(cast("TiledLinear", module), prefix).items():
        if all(part.key in state_dict for part in rows):
            state_dict[key] = _joined([state_dict.pop(part.key) for part in rows], rows)


def _joined(tiles: list[Tensor], rows: list[Rows]) -> Tensor:
    """All of it; without a copy where the tiles are rows of it already, as zero.state_dict gives them."""
    whole = tiles[0]._base
    if whole is not None and _fits(whole, rows) and all(tile._base is whole for tile in tiles):
        return whole
    return torch.cat(tiles)


def _split_own_keys(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for key, rows in _rows_of(cast("TiledLinear", module), prefix).items():
        _split(state_dict, key, rows)


def _rows_of(tiled: TiledLinear, prefix: str) -> dict[str, list[Rows]]:
    """By the key of an untiled parameter: its rows, in order."""
    found: dict[str, list[Rows]] = {f"{prefix}{name}": [] for name in ("weight", *(["bias"] if tiled.use_bias else []))}
    for row, (start, stop) in enumerate(pairwise(tiled.out_parts)):
        tile = cast("nn.ModuleList", tiled.linears[row])[0]
        for name, param in tile.named_parameters(recurse=False):
            found[f"{prefix}{name}"].append(Rows(f"{prefix}linears.{row}.0.{name}", param, start, stop))
    return found


def rows_by_key(model: nn.Module) -> dict[str, list[Rows]]:
    """Of every layer that keeps its keys: the untiled parameters, each with its rows in order."""
    found: dict[str, list[Rows]] = {}
    for name, module in model.named_modules():
        if isinstance(module, TiledLinear) and module.keeps_keys:
            found.update(_rows_of(module, f"{name}." if name else ""))
    return found


def split_readers(
    model: nn.Module, readers: Mapping[str | None, Callable[[], Tensor]]
) -> dict[str | None, Callable[[], Tensor]]:
    """Functions that read tensors by key, untiled parameters of ``model`` replaced by their rows where these fit."""
    split = dict(readers)
    for key, rows in rows_by_key(model).items():
        if key in split and _fits(split[key](), rows):
            read = split.pop(key)
            for part in rows:
                split[part.key] = lambda read=read, part=part: read()[part.start : part.stop]  # type: ignore[misc]
    return split


def _split(values: dict[Any, Any], key: str, rows: list[Rows]) -> None:
    if _fits(values.get(key), rows):
        whole = values.pop(key)
        values.update({part.key: whole[part.start : part.stop] for part in rows})


def _fits(whole: object, rows: list[Rows]) -> bool:
    """Whether ``whole`` is what ``rows`` are of; if it is not, its key stays, and is reported."""
    return isinstance(whole, Tensor) and whole.shape == (rows[-1].stop, *rows[0].tile.shape[1:])
