"""Deltas of models that change in part: adapters beside a frozen base (LoRA), and experts."""

# covers zcomm/control.py zero/utils.py

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zcomm
from tests.ranks import run_ranks
from tests.zero import test_encoded_frozen as lora
from tests.zero import test_leaf_modules as moe
from tests.zero.deltas import check_nodes_agree
from tests.zero.models import as_vector, relative_error
from tests.zero.test_delta_hpz import EXACT
from tests.zero.training import assert_same_bits, full_values, zero_optimizer
from zcomm import control
from zero import utils

HPZ: dict[str, Any] = {"stage": 3, "mode": "delta_hpz"}
CHANGES: tuple[dict[str, Any], ...] = (HPZ, {"stage": 2, "mode": "delta"})


def _adapt(rank: int, model: nn.Module, steps: int, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Train the adapters; return the inter-node bytes of each step per trained element, and the final parameters."""
    trained, units = sum(p.numel() for p in model.parameters() if p.requires_grad), []
    base = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    with zero_optimizer(model, lora._sgd(model), ranks_per_node=2, **options) as optimizer:
        for step in range(steps):
            with zcomm.traffic() as sent:
                lora._loss(model, step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                assert_same_bits({n: v for n, v in full_values(model).items() if n in base}, base)
            agreed = sent.bytes(link="inter", operation="control")
            mine = torch.tensor([float(sent.bytes(link="inter") - agreed)])
            units.append(float(control.gather_float64(mine, optimizer.topology).sum()) / (2 * trained))
        return units, full_values(model)


def _check_lora(rank: int) -> None:
    plain = lora._model(torch.float32)
    reference = lora._sgd(plain)
    for step in range(3):
        for of_rank in range(4):
            (lora._loss(plain, step, of_rank) / 4).backward()
        reference.step()
        reference.zero_grad()
    for options in CHANGES:
        exact = EXACT if options is HPZ else {"weight_format": "none"}
        model = lora._model(torch.float32)
        _, got = _adapt(rank, model, 3, **options, **exact)
        assert relative_error(as_vector(got.values()), as_vector(plain.parameters())) < 1e-6
    units, _ = _adapt(rank, lora._model(torch.bfloat16), 3, gradient_accumulation_steps=1, changes="quantized", **HPZ)
    assert max(units) < 0.6, f"the base is sent: {units}"


def test_a_frozen_base_is_never_sent() -> None:
    run_ranks(4, _check_lora)


def _check_experts(rank: int) -> None:
    """Each node uses different experts, and no rank uses the last one."""
    plain = moe._new().float()
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(4):
        x, choice = (torch.cat(both) for both in zip(moe._data(step, 0), moe._data(step, 1), strict=True))
        plain(x.float(), choice).square().mean().backward()
        reference.step()
        reference.zero_grad()
    for options in CHANGES:
        model = moe._new().float()
        utils.set_z3_leaf_modules(model, [moe.Experts])
        exact = EXACT if options is HPZ else {"weight_format": "none"}
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
        with zero_optimizer(model, inner, ranks_per_node=1, **options, **exact) as optimizer:
            for step in range(4):
                x, choice = moe._data(step, rank)
                model(x.float(), choice).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            got = full_values(model)
        assert relative_error(as_vector(got.values()), as_vector(plain.parameters())) < 1e-5


def _check_idle_experts(rank: int) -> None:
    """An expert that no rank used in a step stays unchanged on every node, and its delta is not sent."""
    model = moe._new().bfloat16()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with zero_optimizer(model, inner, ranks_per_node=1, changes="quantized", **HPZ) as optimizer:
        for step in range(4):
            before, asked = full_values(model), step % 3
            x = torch.randn(4, moe.WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()
            model(x, torch.full((4,), asked)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            check_nodes_agree(optimizer)
            _check_changed(before, full_values(model), asked)


def _check_changed(before: dict[str, Tensor], after: dict[str, Tensor], asked: int) -> None:
    idle = {name for name in before if ".experts." in name and f".experts.{asked}." not in name}
    assert_same_bits({n: before[n] for n in idle}, {n: after[n] for n in idle})
    assert any(not torch.equal(before[n], after[n]) for n in before if f".experts.{asked}." in n)


def test_experts() -> None:
    run_ranks(2, _check_experts)
    run_ranks(2, _check_idle_experts)
