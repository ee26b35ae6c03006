"""The bytes of each parameter add up to what ranks send in a step, and to what the memory report has."""

# covers zero/_runtime/bytes_by_parameter.py zero/_runtime/exchanges.py

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zcomm
import zero
from tests.ranks import run_ranks
from zcomm import Topology

WIDTH, NUM_MICRO = 128, 2
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "small exchanges": {"stage": 3, "allgather_bucket_size": 10_000, "reduce_bucket_size": 10_000},
    "nothing is reused": {"stage": 3, "stage3_max_reuse_distance": 0},
    "persistent": {"stage": 3, "stage3_param_persistence_threshold": 200},
    "ZeRO++ at stage 1": {"stage": 1, "quantized_weights": True, "quantized_gradients": True},
    "ZeRO++": {"stage": 3, "quantized_weights": True, "quantized_gradients": True, "hpz_partition_size": 2},
    "frozen as INT8": {"stage": 3, "quantized_nontrainable_weights": True},
    "delta-hpZ": {"stage": 3, "mode": "delta_hpz", "changes": "quantized"},
    "delta": {"stage": 2, "mode": "delta", "changes": "quantized"},
    "offload": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


class Words(nn.Module):
    """An embedding and a head, which backward does not gather; a checkpointed layer, which it does; a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(32, WIDTH)
        self.first, self.second, self.frozen = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.first(self.words(tokens))
        hidden = checkpoint(self.second, hidden, use_reentrant=False)
        return self.head(self.frozen(hidden))


MUON = [case for case in CASES if case not in ("stage 0", "nothing is reused", "frozen as INT8")]


def _adam(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=lr)]


def _muon(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Three matrices, so a rank of four has none."""
    matrices = [model.first.weight, model.second.weight, model.head.weight]
    others = [model.words.weight, model.head.bias]
    return [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(others, lr=lr)]


def _step(model: nn.Module, optimizer: Any, rank: int) -> None:
    for _ in range(NUM_MICRO):
        model(torch.tensor([[rank, 2, 3]])).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _check_sent(rank: int, names: Iterable[str], build: Callable[..., Any]) -> None:
    topology = Topology(ranks_per_node=2)
    for case in names:
        model, options = Words().bfloat16(), CASES[case]
        optimizer = zero.ZeroOptimizer(
            model, build(model, lr=0.1), topology=topology, gradient_accumulation_steps=NUM_MICRO, **options
        )
        before = optimizer.bytes_by_parameter()
        for _ in range(2):  # the first step records the order
            _step(model, optimizer, rank)
        found = optimizer.bytes_by_parameter()
        assert set(found) == set(before) == dict(Words().named_parameters()).keys()
        with zcomm.traffic() as traffic:
            _step(model, optimizer, rank)
        for link in ("intra", "inter"):
            counted = traffic.bytes(link=link) - traffic.bytes(operation="control", link=link)
            computed = sum(getattr(of.gathers, link) + getattr(of.reductions, link) for of in found.values())
            assert computed == counted, (case, link)
        gradients = sum(sum(of.reductions) for of in found.values())
        if "hpZ" not in case:  # a hop of its own, which counts as another operation
            gathered = traffic.bytes(operation="all_gather") if options["stage"] == 0 else 0
            assert gradients == traffic.bytes(operation="reduce_scatter") + gathered, case
        assert sum(found["frozen.weight"].reductions) == found["frozen.weight"].held == 0, case
        assert sum(of.states for of in before.values()) == 0, case
        _check_held(optimizer, found, case)
        optimizer.close()
    topology.close()


def _check_held(optimizer: Any, found: Any, case: str) -> None:
    """The memory report measures storages: of the head's bias they are padded to 256 elements for each of 4 ranks."""
    memory, padding = optimizer.memory(), 4 * 256
    held = sum(of.masters + of.states for of in found.values())
    assert 0 <= memory.states - held <= 12 * padding, (case, memory.states, held)
    gradients = sum(of.gradients for of in found.values())
    assert case == "offload" or 0 <= memory.gradients - gradients <= 4 * padding, case  # not held between steps


@pytest.mark.parametrize(("build", "names"), [(_adam, CASES), (_muon, MUON)], ids=["AdamW", "Muon"])
def test_bytes_add_up_to_those_of_a_step_on_every_link(build: Callable[..., Any], names: Iterable[str]) -> None:
    run_ranks(4, _check_sent, tuple(names), build)


def _check_each(rank: int, folder: str) -> None:
    """A parameter that fills whole blocks: its bytes by hand; the same in files."""
    for options in ({}, {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)).bfloat16()
        config = {"zero_optimization": {"stage": 2, **options}, "train_batch_size": 2}
        optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
        engine = zero.initialize(model=model, config={**config, "optimizer": optimizer}).engine
        engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().sum())
        engine.step()
        found, numel = engine.bytes_by_parameter(), WIDTH * WIDTH
        small, large = found["0.weight"], found["1.weight"]
        assert (sum(small.gathers), sum(small.reductions)) == (2 * numel // 2, 2 * numel // 2)
        assert (sum(large.gathers), sum(large.reductions)) == (2 * 2 * numel // 2, 2 * 2 * numel // 2)
        assert small.masters + large.masters == 4 * 3 * numel // 2
        assert 8 * 3 * numel // 2 <= small.states + large.states <= 8 * 3 * numel // 2 + 8
        table = str(found).splitlines()
        assert [line.split()[0] for line in table] == ["parameter", "1.weight", "0.weight"]
        assert f"{2 * numel:,}" in table[1]
        engine.destroy()


def test_bytes_of_each_parameter_are_those_by_hand(tmp_path: Path) -> None:
    run_ranks(2, _check_each, str(tmp_path))
