"""Optimizers that update whole tensors, in float64 throughout: Muon by Newton-Schulz, and torch's Adafactor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import zcomm
from tests.ranks import by_first_rank
from tests.zero.models import as_vector, batch, loss_of, new_model, set_values
from tests.zero.training import full_values, train, zero_optimizer
from zero import Lamb, load_checkpoint, save_checkpoint
from zero._step.bucketwise_update import BucketwiseUpdate

__all__ = [
    "BUILDERS",
    "WideMuon",
    "check_moves",
    "check_sends_what_adamw_sends",
    "matrices_and_others",
    "steps_in_turn",
    "train_plainly",
]


class WideMuon(torch.optim.Muon):
    """torch's Muon, with the iteration in the dtype of the matrix instead of bfloat16, written out."""

    zero_updates = "tensors"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    buffer = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param.grad))
                    buffer.lerp_(param.grad, 1 - group["momentum"])
                    update = orthogonal(torch.lerp(param.grad, buffer, group["momentum"]))
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    rows, columns = param.shape
                    param.add_(update, alpha=-group["lr"] * max(1, rows / columns) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Five steps of the quintic iteration of Newton and Schulz, the formula of the paper."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Centralizing(torch.optim.SGD):
    """Subtracts the mean of each column of a matrix from its gradient first; declares nothing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.ndim > 1 and param.grad is not None:
                param.grad -= param.grad.mean(0)
        super().step(closure)


def matrices_and_others(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices within blocks, and everything else that is trained, found by name."""
    matrices, others = [], []
    for name, param in model.named_parameters():
        if param.requires_grad:
            is_hidden = param.ndim == 2 and ("block" in name or "shared" in name)
            (matrices if is_hidden else others).append(param)
    return matrices, others


def _muon(model: nn.Module) -> list[Optimizer]:
    matrices, others = matrices_and_others(model)
    return [WideMuon(matrices, lr=0.02, weight_decay=0.1), AdamW(others, lr=3e-3)]


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


Build = Callable[[nn.Module], list[Optimizer]]
BUILDERS: dict[str, Build] = {
    "muon": _muon,
    "lamb": lambda model: [Lamb(_trained(model), lr=0.01, weight_decay=0.1)],
    "found by its trial": lambda model: [Centralizing(_trained(model), lr=0.1, momentum=0.9)],
    "adafactor": lambda model: [torch.optim.Adafactor(_trained(model), lr=0.01, foreach=False)],
}


def train_plainly(
    model: nn.Module, optimizers: Sequence[Optimizer], *, world_size: int, steps: range, num_micro: int = 1
) -> None:
    """The oracle: one process, with the batches of all ranks. Only the first rank has the optimizers' states."""

    def train() -> list[Tensor]:
        for step in steps:
            for micro in range(num_micro):
                for rank in range(world_size):
                    (loss_of(model, *batch(step, micro, rank)) / num_micro / world_size).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [param.detach() for param in model.parameters()]

    set_values(model, by_first_rank(train))


def check_moves(rank: int, build: Build, folder: str, device: str = "none") -> None:
    """On four ranks: after a checkpoint moves to another stage and other nodes, parameters are those of one process."""
    expected = new_model(torch.float64)
    train_plainly(expected, build(expected), world_size=4, steps=range(6))
    place = {"device": device, "nvme_path": folder} if device == "nvme" else {"device": device}
    offload = {} if device == "none" else {"offload_optimizer": place}
    for before, after in ((0, 3), (3, 1), (1, 2), (2, 0), (3, 3)):
        saving, loading = ({"stage": stage, **(offload if stage else {})} for stage in (before, after))
        model = new_model(torch.float64)
        with zero_optimizer(model, build(model), ranks_per_node=2, **saving) as optimizer:
            train(model, optimizer, rank, steps=3)
            save_checkpoint(optimizer, f"{folder}/saved", f"{before}{after}")
        model = new_model(torch.float64, seed=1)
        with zero_optimizer(model, build(model), ranks_per_node=1 if after == 2 else 4, **loading) as optimizer:
            load_checkpoint(optimizer, f"{folder}/saved", f"{before}{after}")
            for step in range(3, 6):
                loss_of(model, *batch(step, 0, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
            got = as_vector(full_values(model).values())
        assert (got - as_vector(expected.parameters())).abs().max() < 1e-10, (before, after)


def check_sends_what_adamw_sends(rank: int, muon: type[Optimizer], options: dict[str, Any], num_micro: int) -> None:
    """Between two nodes of two ranks ``muon`` sends what AdamW sends, but for padding."""

    def with_muon(params: list[nn.Parameter]) -> list[Optimizer]:
        return [muon([p for p in params if p.ndim == 2]), AdamW([p for p in params if p.ndim != 2])]

    sent = []
    for build in (with_muon, lambda params: [AdamW(params, lr=1e-3)]):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96)) for _ in range(4)])
        inner = build(list(model.parameters()))
        with zero_optimizer(
            model, inner, ranks_per_node=2, gradient_accumulation_steps=num_micro, **options
        ) as optimizer:
            with zcomm.traffic() as counts:
                for step in range(2 * num_micro):
                    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(step + 10 * rank))
                    model(x).square().mean().backward()
                    if (step + 1) % num_micro == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                if "mode" in options:
                    full_values(model)  # waits until all changes are sent
            own = torch.tensor([float(counts.bytes(link="inter"))], dtype=torch.float64)
            sent.append(float(zcomm.control.gather_float64(own, optimizer.topology).sum()))
    assert sent[0] <= 1.02 * sent[1], sent


def steps_in_turn(rank: int, folder: str, slow: int) -> tuple[list[Any], Callable[..., None]]:
    """Calls of ``BucketwiseUpdate._step``, and a replacement: rank ``slow`` of 4 begins after the others have ended."""
    calls, step = list[Any](), BucketwiseUpdate._step
    others = [Path(folder) / str(other) for other in range(4) if other != slow]

    def step_in_turn(self: BucketwiseUpdate, *arguments: Any) -> None:
        stop = time.monotonic() + 60
        while rank == slow and not calls and not all(path.exists() for path in others):
            assert time.monotonic() < stop, "other ranks wait for this one's update"
            time.sleep(0.01)
        step(self, *arguments)
        calls.append(arguments)
        if len(calls) == len(self._runs):
            (Path(folder) / str(rank)).touch()

    return calls, step_in_turn
