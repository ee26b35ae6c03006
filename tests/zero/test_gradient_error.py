"""``gradient_error``: gradients that are sent between nodes entropy-coded, with the error that is asked for."""

# covers zero/_modes/delta_hpz.py zcomm/_stateful/coded_sums.py

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon

import zcomm
import zero
from tests.ranks import run_ranks, topology
from tests.rotation import DAY
from tests.zero.deltas import residuals_of
from tests.zero.models import new_model
from tests.zero.test_exact_replicas import _check, check_an_overflow
from tests.zero.training import assert_same_bits, full_values, train, zero_optimizer
from tests.zero.whole_optimizers import matrices_and_others
from zcomm import ConfigError, ZcommError
from zero import ZeroOptimizer
from zero.utils import safe_get_full_grad

HPZ: dict[str, Any] = {"stage": 3, "mode": "delta_hpz", "changes": "exact"}
CODED = HPZ | {"gradient_error": 0.15}


class Wide(nn.Module):
    """Large matrices, and small parameters whose gradients are far smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
        self.norm = nn.LayerNorm(128)
        self.scale = 0.01

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x + self.scale * self.norm(x))
        return y


def _gradients(rank: int, **options: Any) -> tuple[dict[str, torch.Tensor], int, int]:
    """The means of the first step by name, bytes that reductions sent between nodes, and what the plan says."""
    torch.manual_seed(0)
    model = Wide().bfloat16()
    with zero_optimizer(model, ranks_per_node=2, gradient_accumulation_steps=2, **options) as optimizer:
        with zcomm.traffic() as sent:
            for micro in range(2):
                x = torch.randn(8, 128, generator=torch.Generator().manual_seed(1000 * DAY + 10 * micro + rank))
                model(x.bfloat16()).float().square().mean().backward()
        grads = {name: safe_get_full_grad(param) for name, param in model.named_parameters()}
        optimizer.zero_grad()
        planned = sum(of.reductions.inter for of in optimizer.bytes_by_parameter().values())
    found = {name: grad.double() for name, grad in grads.items() if grad is not None}
    return found, sent.bytes(link="inter", operation="reduce_scatter"), planned


def _check_error(rank: int) -> None:
    exact, _, _ = _gradients(rank, **HPZ, gradient_format=("none", "none"))
    _, nbytes, _ = _gradients(rank, **HPZ)
    for error in (0.05, 0.15, 0.3):
        options = {"gradient_error": error, "gradient_format": ("none", "none")}
        found, coded, planned = _gradients(rank, **HPZ, **options)
        for name, grad in found.items():
            relative = ((grad - exact[name]).norm() / exact[name].norm()).item()
            assert 0.3 * error < relative < 1.2 * error, (name, error, relative)
        assert coded < {0.05: 1.2, 0.15: 0.8, 0.3: 0.6}[error] * nbytes, (error, coded, nbytes)
        assert 0.85 < coded / planned < 1.05, (coded, planned)


def test_each_parameter_has_the_error_and_takes_the_bytes_of_the_plan() -> None:
    run_ranks(4, _check_error)


def _check_training(rank: int, per_node: int) -> None:
    """It follows training on unquantized gradients like nf4 does, also of whole tensors, and replicas are exact."""
    unquantized = HPZ | {"gradient_format": ("none", "none")}
    for build in (lambda model: AdamW(model.parameters(), lr=1e-2), _muon):
        found = []
        for options in (unquantized, HPZ, HPZ | {"gradient_error": 0.1}):
            model = new_model(torch.bfloat16, has_frozen=True, has_unused=True)
            with zero_optimizer(
                model, build(model), ranks_per_node=per_node, gradient_accumulation_steps=2, **options
            ) as optimizer:
                train(model, optimizer, rank, steps=4, num_micro=2, max_norm=0.5, uses_no_sync=True)
                _check(model, optimizer)
                values = full_values(model).values()
                found.append(torch.cat([value.flatten().double() for value in values]))
                if "gradient_error" in options:
                    assert "gradients as int8 -> entropy-coded, error 0.1" in str(optimizer.effective)
                    assert residuals_of(optimizer).any()
        plain, nf4, coded = found
        assert (coded - plain).norm() < 1.3 * (nf4 - plain).norm(), ((coded - plain).norm(), (nf4 - plain).norm())


def _muon(model: nn.Module) -> Any:
    matrices, others = matrices_and_others(model)
    return [Muon(matrices, lr=2e-3), AdamW(others, lr=1e-3)]


@pytest.mark.parametrize(("world_size", "per_node"), [(2, 1), (3, 1), (4, 2)])
def test_training(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_training, per_node)


def _everything(model: nn.Module, optimizer: ZeroOptimizer) -> dict[str, torch.Tensor]:
    return full_values(model) | {"residuals": residuals_of(optimizer)}


def _check_skipped(rank: int) -> None:
    check_an_overflow(rank, _everything, stage=3, mode="delta_hpz", gradient_error=0.15)


def test_a_step_with_an_overflow_changes_nothing() -> None:
    run_ranks(4, _check_skipped)


def _over_nodes(optimizer: ZeroOptimizer) -> torch.Tensor:
    """The sum of the residuals of the ranks with this local rank: moving them between layouts keeps it."""
    t = optimizer.topology
    of_ranks = zcomm.control.gather_float64(residuals_of(optimizer).flatten().double(), t)
    return of_ranks.view(t.num_nodes, t.ranks_per_node, -1)[:, t.local_rank].sum(0)


def _check_resumed(rank: int, folder: str) -> None:
    """Checkpoints with residuals: bit for bit where they were written, and between coded gradients and formats."""
    saved: list[tuple[str, dict[str, Any]]] = [("coded", CODED), ("nf4", HPZ)]
    for tag, saves in saved:
        model = new_model(torch.bfloat16)
        with zero_optimizer(model, ranks_per_node=2, **saves) as optimizer:
            train(model, optimizer, rank, steps=3)
            zero.save_checkpoint(optimizer, folder, tag)
            kept, lost, state = residuals_of(optimizer), _over_nodes(optimizer), copy.deepcopy(optimizer.state_dict())
            train(model, optimizer, rank, steps=2)
            expected = full_values(model)
            optimizer.load_state_dict(state)
            train(model, optimizer, rank, steps=2)
            assert_same_bits(full_values(model), expected)
        for loads in (CODED, HPZ):
            again = new_model(torch.bfloat16, seed=5)
            with zero_optimizer(again, ranks_per_node=2, **loads) as optimizer:
                zero.load_checkpoint(optimizer, folder, tag)
                if loads is saves:
                    assert torch.equal(residuals_of(optimizer), kept)
                torch.testing.assert_close(_over_nodes(optimizer), lost, rtol=0, atol=kept.abs().max().item() / 60)
                train(again, optimizer, rank, steps=2)
                if loads is saves:
                    assert_same_bits(full_values(again), expected)


def test_checkpoints(tmp_path: Any) -> None:
    run_ranks(4, _check_resumed, str(tmp_path))


def _check_refused(rank: int) -> None:
    del rank

    def built(**options: Any) -> None:
        with pytest.raises(ZcommError) as error:
            ZeroOptimizer(new_model(torch.bfloat16), AdamW, topology=topology(1), **options)
        assert isinstance(error.value, ConfigError)
        raise error.value

    with pytest.raises(ConfigError, match=r"gradient_error=0\.15 chooses .* leave out gradient_format='nf4'"):
        built(**CODED, gradient_format="nf4")
    with pytest.raises(ConfigError, match=r"gradient_error=0\.15 chooses .* gradient_format=\('int8', 'int4'\)"):
        built(**CODED, gradient_format=("int8", "int4"))
    for value in (1e-5, 0.7, -1, float("nan"), "small"):
        with pytest.raises(ConfigError, match="gradient_error"):
            built(**HPZ, gradient_error=value)
    model = new_model(torch.bfloat16)
    with zero_optimizer(model, stage=3, ranks_per_node=1, gradient_error=0.1) as optimizer:
        assert "inactive: gradient_error=0.1 (set mode='delta_hpz')" in str(optimizer.effective)
    with zero_optimizer(new_model(torch.bfloat16), ranks_per_node=2, **CODED) as optimizer:
        assert "inactive: mode='delta_hpz' (one node" in str(optimizer.effective)
        assert "gradient_error" not in str(optimizer.effective)
    refused = pytest.raises(ConfigError, match=r"gradient_error=0\.15 chooses .* leave out gradient_format='nf4'")
    with refused, zero_optimizer(new_model(torch.bfloat16), ranks_per_node=2, **CODED, gradient_format="nf4"):
        pass


def test_what_is_refused() -> None:
    run_ranks(2, _check_refused)
