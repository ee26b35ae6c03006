"""Models and data for the tests of ``zero``, and the oracle: plain single-process training on the concatenated batch.

No zero, no zcomm, no communication: every rank can compute every rank's data from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tests.ranks import by_first_rank

VOCAB, HIDDEN, LENGTH, MICRO_BATCH = 37, 24, 6, 2


class Block(nn.Module):
    """A residual MLP with a norm; its sizes are not multiples of any block or number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 53), nn.GELU(), nn.Linear(53, HIDDEN, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class TinyGPT(nn.Module):
    """An embedding, a parameter of the root itself, a layer used twice, blocks, and a head that may be tied."""

    def __init__(self, *, is_tied: bool = True, has_unused: bool = False, has_frozen: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, HIDDEN)
        self.position = nn.Parameter(torch.randn(LENGTH, HIDDEN) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.shared = nn.Linear(HIDDEN, HIDDEN)
        self.unused = nn.Linear(3, 5) if has_unused else None
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if is_tied:
            self.head.weight = self.wte.weight
        if has_frozen:
            self.blocks[1].requires_grad_(False)
            self.norm.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.position
        for block in self.blocks:
            x = self.shared(block(x)).tanh() + x
        return self.head(self.norm(x))


def new_model(dtype: torch.dtype = torch.float32, seed: int = 0, **options: bool) -> TinyGPT:
    torch.manual_seed(seed)
    return TinyGPT(**options).to(dtype)


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one rank's micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    tokens = torch.randint(VOCAB, (MICRO_BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


def groups_of(model: nn.Module) -> list[dict[str, object]]:
    """Two parameter groups: matrices with weight decay, and everything else with another learning rate."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def train_plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    world_size: int,
    steps: int,
    num_micro: int = 1,
    max_norm: float | None = None,
    after_step: Callable[[], None] | None = None,
) -> list[float]:
    """The oracle: one process with all ranks' micro-batches as one batch. Returns gradient norms before clipping.

    Without ``after_step`` only the first rank has the state of ``optimizer`` afterwards.
    """

    def train() -> tuple[list[float], list[Tensor]]:
        norms = []
        for step in range(steps):
            for micro in range(num_micro):
                parts = [batch(step, micro, rank) for rank in range(world_size)]
                tokens, targets = (torch.cat(column) for column in zip(*parts, strict=True))
                (loss_of(model, tokens, targets) / num_micro).backward()
            if max_norm is not None:
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
            optimizer.step()
            optimizer.zero_grad()
            if after_step is not None:
                after_step()
        return norms, [param.detach() for param in model.parameters()]

    norms, values = by_first_rank(train) if after_step is None else train()
    set_values(model, values)
    return norms


@torch.no_grad()
def set_values(model: nn.Module, values: Sequence[Tensor]) -> None:
    """Give every parameter of ``model`` its value."""
    for param, value in zip(model.parameters(), values, strict=True):
        param.copy_(value)


def as_vector(params: Iterable[Tensor]) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in params])


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()
