"""Muon for the hidden matrices of a model, and AdamW for its other parameters.

Muon replaces the momentum of a matrix by the nearest orthogonal one, so it is for matrices that map hidden states to
hidden states. Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from zcomm import ConfigError
from zero._config.optimizer_options import OPTIMIZER_OPTIONS
from zero._config.parse import read_options
from zero._config.settings import nearest_setting
from zero._optim.several import as_one
from zero._sharding.stacked import parts_of

logger = logging.getLogger("zero")

SMALL_NUMEL, BATCH_NUMEL = 2**18, 2**22
"""Elements of matrices that are updated together, and of all of them: larger ones keep the cores busy by themselves."""
HEADS = ("lm_head", "head", "score", "classifier", "embed_out", "output_projection")
"""The last parts of names that output layers have."""
OF_MUON: dict[str, Any] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "nesterov": True, "ns_steps": 5}
OF_ADAM: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
"""The options of the two in ``optimizer.params``, with DeepSpeed's defaults."""
OF_BOTH = OF_MUON.keys() | OF_ADAM.keys() | {"params"}
NS_METHODS = ("gram", "standard")
"""DeepSpeed's names of two ways to compute the same polynomial; here it is computed as torch.optim.Muon does."""


class Muon(torch.optim.Muon):
    """``torch.optim.Muon``, but it takes stacks of matrices, and updates small matrices of one shape together.

    Parameters with ``stacked_parts`` may have two or three dimensions, and each part is updated by itself. Under a
    :class:`zero.ZeroOptimizer` torch's does so, too, but its constructor refuses three dimensions. On CPUs the bits are
    those of torch's.

    Memory of a step: the momenta of a batch in bfloat16, 8 MiB, three times.

    Args:
        params: Matrices, and stacks of matrices; or groups of them.
        options: Those of ``torch.optim.Muon``.

    Raises:
        ConfigError: A parameter is neither a matrix nor declared as a stack.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__([torch.empty(0, 0)], **options)  # torch checks parameters in the constructor alone
        self.param_groups.clear()
        for group in _groups(params):
            self.add_param_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices, and stacks of them."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if any(len(shape) != 2 for shape in parts_of(param)):
                raise ConfigError(
                    f"Muon updates matrices: got a parameter of shape {tuple(param.shape)}; give it to another "
                    "optimizer, or set stacked_parts if it is a stack of matrices"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients; returns what ``closure`` returns."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            params, grads, momenta = list[Tensor](), list[Tensor](), list[Tensor]()
            self._init_group(group, params, grads, momenta)
            for batch in _batches(params):
                updates = [momentum_of(grads[i], momenta[i], group).bfloat16() for i in batch]
                is_single = len(batch) == 1
                changes = _orthogonal(updates[0] if is_single else torch.stack(updates), group)
                rate = float(group["lr"])
                for i, change in zip(batch, [changes] if is_single else changes, strict=True):
                    params[i].mul_(1 - rate * group["weight_decay"])
                    params[i].add_(change, alpha=-rate * scale_of(params[i].shape, group["adjust_lr_fn"]))
        return loss

    def _init_group(self, group: Any, *lists: list[Tensor]) -> bool:
        """Have torch's step see the parts: of parameters, gradients, momenta."""
        full: tuple[list[Tensor], ...] = tuple([] for _ in lists)
        has_complex: bool = super()._init_group(group, *full)
        for tensors in zip(*full, strict=True):
            shapes = parts_of(tensors[0])
            for of_kind, values in zip(lists, tensors, strict=True):
                if shapes == (values.shape,):
                    of_kind.append(values)
                    continue
                rows = (values.contiguous() if values is tensors[1] else values).view(-1, shapes[0][-1])
                of_kind.extend(rows.split([shape[0] for shape in shapes]))
        return has_complex


def _batches(matrices: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of matrices that are updated together: of one shape, small ones, in order."""
    found: list[list[int]] = []
    open_ones: dict[Any, list[int]] = {}
    for number, matrix in enumerate(matrices):
        of = (matrix.shape, matrix.dtype, matrix.device)
        batch = open_ones.get(of)
        if batch is None or matrix.numel() > SMALL_NUMEL or (len(batch) + 1) * matrix.numel() > BATCH_NUMEL:
            batch = open_ones[of] = []
            found.append(batch)
        batch.append(number)
    return found


def momentum_of(grad: Tensor, buffer: Tensor, group: Mapping[str, Any], *, out: Tensor | None = None) -> Tensor:
    """What is orthogonalized, in the dtype of ``grad``; ``buffer`` is updated. ``out``: memory for it."""
    buffer.lerp_(grad, 1 - group["momentum"])
    return torch.lerp(grad, buffer, group["momentum"], out=out) if group["nesterov"] else buffer


def norm_of(x: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The norm of ``x`` [m, n], or of each matrix of [k, m, n], which it is divided by."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return norm.clamp_(min=group["eps"])


def _orthogonal(update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Newton and Schulz's iteration of a matrix, or of each of a stack [k, m, n]."""
    (a, b, c), is_tall = group["ns_coefficients"], update.shape[-2] > update.shape[-1]
    x = update.mT if is_tall else update
    x = x / norm_of(x, group)
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def scale_of(shape: Sequence[int], rule: str | None) -> float:
    """The factor of the learning rate that torch's option ``adjust_lr_fn`` names."""
    return 0.2 * math.sqrt(max(shape)) if rule == "match_rms_adamw" else math.sqrt(max(1, shape[0] / shape[1]))


def is_divisible(optimizer: Optimizer | type[Optimizer], param: nn.Parameter) -> bool:
    """Whether ``optimizer`` updates ``param`` as :class:`Muon` does, so that several ranks can do it together."""
    return is_muon(optimizer) and param.ndim == 2 and len(parts_of(param)) == 1


def is_muon(optimizer: Optimizer | type[Optimizer]) -> bool:
    """Whether ``optimizer`` is :class:`Muon` or torch's, not a class derived from them."""
    return (optimizer if isinstance(optimizer, type) else type(optimizer)) in (Muon, Muon.__base__)


class MuonSplit(NamedTuple):
    """The trainable parameters of a model, by the optimizer that they are for. ``print`` shows them by role."""

    matrices: list[nn.Parameter]
    """Hidden matrices, for Muon."""
    others: list[nn.Parameter]
    """Embeddings, output layers, norms, biases, and tensors of other than two dimensions, for AdamW."""
    roles: dict[str, str]
    """The role of each, by its name."""

    def __str__(self) -> str:
        lines = []
        for role in dict.fromkeys(self.roles.values()):
            names = [name for name, own in self.roles.items() if own == role]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"{'Muon' if role in (MATRIX, STACK) else 'AdamW':<6}{role:<22}{', '.join(names[:3])}{more}")
        return "\n".join(lines)


MATRIX, STACK = "hidden matrix", "stacked matrices"
FUSED = ("qkv", "query_key_value", "c_attn", "in_proj_weight", "gate_up", "kv_proj")
"""In names of parameters that are several matrices."""


def split_for_muon(model: nn.Module, fused: Mapping[str, int | Sequence[int]] | None = None) -> MuonSplit:
    """Divide the trainable parameters of ``model`` into those for Muon and the others, and log what was done.

    By role: weights of embeddings and what is named so, output layers (by their name; or outside of lists of layers
    with as many rows as the largest embedding; or its weight), vectors, and tensors of more than two dimensions that
    are not declared as stacks of matrices are others. ``param.use_muon``, if it is set, decides instead.

    Args:
        model: Its parameters get the attribute ``stacked_parts`` where ``fused`` says so.
        fused: By the name of a parameter, or its last parts: how many matrices of as many rows it is, one below the
            other, or the rows of each; each is updated by itself. A parameter [E, m, n] is E * m rows. 1: it is one
            matrix. ``{"attn.qkv.weight": 3, "attn.kv.weight": (512, 512), "experts.w1": 8}``

    Raises:
        ConfigError: ``use_muon`` is true for a parameter that is no matrix; a name says that it is fused (``qkv``,
            ``gate_up``, ...), and nothing is declared; or ``fused`` does not fit the model.

    ::

        matrices, others, _ = zero.split_for_muon(model)
        optimizer = zero.ZeroOptimizer(model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4)])
    """
    _declare(model, fused or {})
    found = split_by_role(model)
    for name, param in model.named_parameters():
        if found.roles.get(name) == MATRIX:
            _check_is_declared(name, param)
    return found


def _check_is_declared(name: str, param: nn.Parameter) -> None:
    """Raise ConfigError if ``name`` says that ``param`` is several matrices, and nothing else says what it is."""
    is_open = not hasattr(param, "stacked_parts") and getattr(param, "use_muon", None) is None
    if is_open and (word := _fused_word(name)):
        raise ConfigError(
            f"a fused matrix must be declared, so that its parts are updated by themselves: {name!r} of shape "
            f"{tuple(param.shape)} is called {word!r}; split_for_muon(model, fused={{{_last(name)!r}: 3}}) says "
            "that it is three matrices, one below the other, and 1 that it is one"
        )


def check_matrices(optimizer: Optimizer | type[Optimizer], model: nn.Module) -> None:
    """Raise ConfigError if a Muon has other than matrices and declared stacks of them; a class has all parameters.

    torch's looks at shapes in its constructor alone: groups that are added later may have any. Of one that a
    configuration has made, names that say that a matrix is fused are not refused.
    """
    if not is_muon(optimizer):
        return
    names = {param: name for name, param in model.named_parameters()}
    groups = [{"params": list(names)}] if isinstance(optimizer, type) else optimizer.param_groups
    for param in (param for group in groups for param in group["params"] if param.requires_grad):
        if any(len(shape) != 2 for shape in parts_of(param, names[param])):
            raise ConfigError(
                f"Muon updates matrices: got {names[param]!r} of shape {tuple(param.shape)}; give it to another "
                "optimizer, or set stacked_parts if it is a stack of matrices"
            )
        if not getattr(optimizer, "is_configured", False):
            _check_is_declared(names[param], param)


def _declare(model: nn.Module, fused: Mapping[str, int | Sequence[int]]) -> None:
    named = dict(model.named_parameters(remove_duplicate=False))
    for key, parts in fused.items():
        own = [name for name in named if f".{name}".endswith(f".{key}")]
        if not own:
            raise ConfigError(f"fused must name parameters of the model: {key!r}{nearest_setting(key, named)} is none")
        for name in own:
            named[name].stacked_parts = parts  # type: ignore[attr-defined]
            parts_of(named[name], name)


def _fused_word(name: str) -> str:
    return next((part for part in name.lower().split(".") if any(word in part for word in FUSED)), "")


def _last(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def split_by_role(model: nn.Module) -> MuonSplit:
    """:func:`split_for_muon` of what is declared; matrices whose names say that they are fused are not refused."""
    found = divide_by_role(model)
    logger.info("%s", found)
    return found


def divide_by_role(model: nn.Module) -> MuonSplit:
    """The same without a log."""
    modules = dict(model.named_modules())
    embeddings = [m.weight for m in modules.values() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    num_rows = max((weight.shape[0] for weight in embeddings), default=0)
    lists = [f"{name}." for name, module in modules.items() if isinstance(module, nn.ModuleList)]
    roles: dict[str, str] = {}
    found = MuonSplit([], [], roles)
    for name, param in model.named_parameters():
        if param.requires_grad:
            module, is_listed = modules.get(name.rpartition(".")[0]), any(name.startswith(each) for each in lists)
            rows = 0 if is_listed else num_rows
            roles[name] = "embedding" if param in set(embeddings) else _role(name, module, param, rows)
            (found.matrices if roles[name] in (MATRIX, STACK) else found.others).append(param)
    return found


def _role(name: str, module: nn.Module | None, param: nn.Parameter, num_rows: int) -> str:
    """``num_rows``: of the largest embedding; 0 within a list of layers."""
    shape, path = param.shape, name.lower().split(".")
    is_stack = hasattr(param, "stacked_parts") and parts_of(param, name) != (shape,)
    if (chosen := getattr(param, "use_muon", None)) is not None:
        if chosen and len(shape) != 2 and not is_stack:
            raise ConfigError(f"use_muon is true for {name!r} of shape {tuple(shape)}: Muon updates matrices")
        return "use_muon is False" if not chosen else STACK if is_stack else MATRIX
    if is_stack:
        return STACK
    if len(shape) != 2:
        return "vector" if len(shape) < 2 else f"{len(shape)} dimensions"
    if any("embed" in part for part in path) or path[-1].startswith("pos"):
        return "embedding"
    if path[-2:][0] in HEADS or (isinstance(module, nn.Linear) and shape[0] == num_rows):
        return "output layer"
    return MATRIX


def build_muon(params: Mapping[str, Any], parameters: Any, matrices: Iterable[nn.Parameter]) -> Optimizer:
    """Muon over those of ``parameters`` that are ``matrices``, and AdamW over the others, as DeepSpeed's ``"Muon"``.

    Args:
        params: ``lr``, ``muon_lr``, ``adam_lr``, ``momentum``, ``weight_decay``, ``ns_method``, ``betas``, ``eps``, ...
        parameters: Parameters, or groups, whose own options win.
        matrices: What Muon gets.

    Raises:
        ConfigError: An unknown option or value.
    """
    given, for_muon = read_options(OPTIMIZER_OPTIONS, dict(params)), set(matrices)
    if (method := given.pop("ns_method", "standard")) not in NS_METHODS:
        raise ConfigError(f"optimizer.params.ns_method must be one of {NS_METHODS}: got {method!r}")
    own_lr = {"muon": given.pop("muon_lr", None), "adam": given.pop("adam_lr", None)}
    if unknown := sorted(given.keys() - OF_MUON.keys() - OF_ADAM.keys()):
        known = sorted({*OF_MUON, *OF_ADAM, "muon_lr", "adam_lr", "ns_method"})
        raise ConfigError(f"optimizer.params of Muon has no {unknown}: it has {known}")
    halves: dict[str, list[dict[str, Any]]] = {"muon": [], "adam": []}
    for group in _groups(parameters):
        for kind, defaults in (("muon", OF_MUON), ("adam", OF_ADAM)):
            own = [p for p in group["params"] if p.requires_grad and (p in for_muon) is (kind == "muon")]
            options = {**defaults, **{key: given[key] for key in defaults if key in given}}
            options |= {"lr": own_lr[kind]} if own_lr[kind] is not None else {}
            options |= {key: value for key, value in group.items() if key in defaults or key not in OF_BOTH}
            if own:
                halves[kind].append({**options, "params": own})
    made = [make(halves[kind]) for kind, make in (("muon", Muon), ("adam", AdamW)) if halves[kind]]
    for one in made:
        one.is_configured = True  # type: ignore[union-attr]  # read by check_matrices
    optimizer: Optimizer = as_one(made)
    return optimizer


def _groups(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameters or groups as groups, without names."""
    items = list(parameters)
    loose = [item for item in items if not isinstance(item, dict)]
    groups = [{**item, "params": list(item["params"])} for item in items if isinstance(item, dict)]
    groups += [{"params": loose}] if loose else []
    for group in groups:  # they may be named, as by model.named_parameters()
        group["params"] = [one[1] if isinstance(one, tuple) else one for one in group["params"]]
    return groups
