"""The model of a random program and its data, in plain torch: no zero, no zcomm, no communication."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.differential.programs import Block, Program

__all__ = ["External", "Model", "loss_by_rank", "new_model", "optimizer_of", "register_hooks"]

BATCH, VOCAB, CLASSES = 2, 11, 3
EVALUATION = 10_000
"""Forwards from this number on are evaluations: their batches are never trained on."""


class Scaled(nn.Module):
    """Has a 0-dimensional parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class WithEmpty(nn.Module):
    """Has a parameter without elements beside a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.nothing.sum()


class Lists(nn.Module):
    """Parameters in a list and in a dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shifts = nn.ParameterList([nn.Parameter(0.1 * torch.randn(width)) for _ in range(2)])
        self.by_name = nn.ParameterDict({"matrix": nn.Parameter(0.5 * torch.randn(width, width))})

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shifts[0]) @ self.by_name["matrix"] + self.shifts[1]


class Half(nn.Module):
    """Has two layers, one of which is never used, and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.idle = nn.Linear(width, 2)
        self.layer = nn.Linear(width, width)
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift


class External(nn.Module):
    """Uses the transposed weight of a layer that it does not own."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self._owner = (owner,)  # in a tuple, so that nn.Module does not register it as a submodule

    @property
    def owner(self) -> nn.Linear:
        return self._owner[0]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.owner.weight.t())


class Residual(nn.Module):
    """A norm and an MLP beside the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = _mlp(width, has_bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def _mlp(width: int, *, has_bias: bool) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width + 1), nn.Tanh(), nn.Linear(2 * width + 1, width, bias=has_bias))


def _tied(owner: nn.Linear, width: int, *, has_bias: bool) -> nn.Linear:
    layer = nn.Linear(width, width, bias=has_bias)
    layer.weight = owner.weight
    return layer


def _new_layer(block: Block, width: int, layers: list[Any]) -> nn.Module:
    has_bias = block.has_bias
    make: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(width, width, bias=has_bias),
        "mlp": lambda: _mlp(width, has_bias=has_bias),
        "norm": lambda: nn.LayerNorm(width),
        "residual": lambda: Residual(width),
        "scalar": Scaled,
        "empty": lambda: WithEmpty(width),
        "lists": lambda: Lists(width),
        "half": lambda: Half(width),
        "tied": lambda: _tied(layers[block.like], width, has_bias=has_bias),
        "external": lambda: External(layers[block.like]),
        "deep": lambda: nn.Sequential(Residual(width), nn.Sequential(nn.Linear(width, width), nn.Tanh())),
    }
    layer = make[block.kind]()
    for param in layer.parameters():
        if block.frozen == "all" or (block.frozen == "biases" and param.ndim < 2):
            param.requires_grad_(False)
    return layer


class Model(nn.Module):
    """``model(inputs, path)`` returns outputs, float64 [rows, CLASSES], and the input of the first block."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, width = program, program.width
        self.embedding = None if program.start == "features" else nn.Embedding(VOCAB, width)
        roots = {"vector": torch.randn(width), "scalar": torch.tensor(0.3), "empty": torch.empty(0)}
        self.shift = nn.Parameter(roots[program.root]) if program.root else None
        layers: list[nn.Module] = []
        for block in program.blocks:
            layers.append(_new_layer(block, width, layers))
        if program.container == "attributes":
            for number, layer in enumerate(layers):
                self.add_module(f"block{number}", layer)
        else:
            nested = program.container == "nested"
            self.blocks = nn.ModuleList(nn.ModuleList([layer]) if nested else layer for layer in layers)
        self._layers = tuple(layers)  # in a tuple, so that nn.Module does not register the layers a second time
        is_tied = program.start == "tied tokens"
        self.head = nn.Linear(width, VOCAB if is_tied else CLASSES)
        if is_tied and self.embedding is not None:
            self.head.weight = self.embedding.weight

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """The layers in the order of the blocks that describe them."""
        return self._layers

    def forward(self, inputs: Tensor, path: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        x = inputs if self.embedding is None else self.embedding(inputs).tanh()
        if self.program.needs_leaf and not x.requires_grad:
            x = x.detach().requires_grad_(torch.is_grad_enabled())
        first = x
        if self.shift is not None:
            x = x + (self.shift.sum() if self.program.root == "empty" else self.shift)
        if self.program.segment and path and torch.is_grad_enabled():
            x = checkpoint(self._run, x, path, use_reentrant=self.program.segment == "reentrant")
        else:
            x = self._run(x, path)
        return self.head(x), first

    def _run(self, x: Tensor, path: tuple[int, ...]) -> Tensor:
        for number in path:
            block, layer = self.program.blocks[number], self._layers[number]
            if block.checkpoint and torch.is_grad_enabled():
                y = checkpoint(layer.__call__, x, use_reentrant=block.checkpoint == "reentrant")
            else:
                y = layer(x)
            if "tensor" in block.hooks and y.requires_grad:
                y.register_hook(lambda grad: 0.7 * grad)
            x = y.tanh()
        return x


def new_model(program: Program) -> Model:
    """Builds the model with the same values in every process."""
    torch.manual_seed(program.seed % 2**31 + program.number)
    return Model(program).double()


def register_hooks(model: Model) -> None:
    """Register the hooks of a user. All are linear, so that they commute with the sum over ranks."""
    for block, layer in zip(model.program.blocks, model.layers, strict=True):
        if "forward" in block.hooks:
            layer.register_forward_hook(lambda _module, _args, output: 0.9 * output)
        if "forward pre" in block.hooks:
            layer.register_forward_pre_hook(lambda _module, args: (1.1 * args[0],))
        if "backward" in block.hooks:
            layer.register_full_backward_hook(lambda _module, into, _out: _times(0.8, into))
        if "backward pre" in block.hooks:
            layer.register_full_backward_pre_hook(lambda _module, out: _times(1.2, out))
        if "parameter" in block.hooks:
            for param in layer.parameters():
                if param.requires_grad:
                    param.register_hook(lambda grad: 0.5 * grad)


def _times(factor: float, grads: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else factor * grad for grad in grads)


def optimizer_of(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    """Groups contain frozen parameters, too. ``eps`` is large: or Adam takes a full step for a gradient of 1e-17."""
    params = list(model.parameters())
    groups = [
        {"params": params[group :: program.num_groups], "lr": 0.05 / (group + 1), "weight_decay": 0.02 * group}
        for group in range(program.num_groups)
    ]
    groups = [group for group in groups if group["params"]]
    make: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "SGD": lambda: torch.optim.SGD(groups),
        "momentum": lambda: torch.optim.SGD(groups, momentum=0.9, nesterov=program.number % 2 == 0),
        "Adam": lambda: torch.optim.Adam(groups, eps=1e-3, amsgrad=program.number % 2 == 0),
        "AdamW": lambda: torch.optim.AdamW(groups, eps=1e-3),
        "RMSprop": lambda: torch.optim.RMSprop(groups, eps=1e-2, momentum=0.5),
    }
    return make[program.optimizer]()


def batch(program: Program, number: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * program.number + 101 * number + rank)
    tokens = torch.randint(VOCAB, (BATCH,), generator=generator)
    values = torch.randn(BATCH, program.width, generator=generator, dtype=torch.float64)
    num_outputs = VOCAB if program.start == "tied tokens" else CLASSES
    targets = torch.randn(BATCH, num_outputs, generator=generator, dtype=torch.float64)
    return (values if program.start == "features" else tokens), targets


def loss_by_rank(model: Model, step: int, number: int, ranks: Iterable[int]) -> list[Tensor]:
    """The losses of ``ranks`` in forward number ``number``; ranks that take the same path share a batch."""
    program, of_path = model.program, dict[tuple[int, ...], list[int]]()
    for rank in ranks:
        of_path.setdefault(program.path(step, number % EVALUATION, rank), []).append(rank)
    losses: dict[int, Tensor] = {}
    for path, together in of_path.items():
        data = [batch(program, number, rank) for rank in together]
        outputs, first = model(torch.cat([inputs for inputs, _ in data]), path)
        errors = [(part - target).square().mean() for part, (_, target) in zip(outputs.split(BATCH), data, strict=True)]
        if program.penalty and torch.is_grad_enabled():
            (grad,) = torch.autograd.grad(outputs.sum(), first, create_graph=True)
            errors = [a + part.square().mean() for a, part in zip(errors, grad.split(BATCH), strict=True)]
        losses.update(zip(together, errors, strict=True))
    return [losses[rank] for rank in sorted(losses)]
