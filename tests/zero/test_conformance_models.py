"""Models of transformers, trained 5 steps on ranks, equal a single process at every stage and with ZeRO++.

Stages 1 to 3 sum the same numbers in another order: they must be within TOLERANCE of the update of the oracle, plain
float32 training in one process, and equal each other in every bit. With ZeRO++ every step is checked against the ranks'
current masters: the weights in a forward are within half a scale of INT8 of the masters, and the update is the single
process's gradient at those weights, within the documented bounds of INT4 on its hops.

By default three architectures on 2 ranks; ``-m long`` has all of them, on 2 nodes of 2 ranks.
"""

# covers zero/utils.py

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tests.ranks import run_ranks
from tests.zero.models import as_vector, relative_error
from tests.zero.public_models import PUBLIC, new_public, public_loss
from tests.zero.training import assert_same_bits, full_values, zero_optimizer
from zero import utils

STEPS, LEARNING_RATE = 5, 0.2
TOLERANCE = 5e-6
"""Relative to the update over all parameters as one vector, in float32; measured: 1e-7 to 5e-7."""
INT8_BLOCK, INT8_CODES, INT4_BLOCK, INT4_CODES = 256, 127, 128, 7
ROUNDED_UP = 1.02
"""Scales are bf16, rounded up by at most 1/128, so the second hop sees values larger by that factor."""
IN_CI = ("GPT-2", "Mixtral", "ViT")


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def _single_process(name: str, world_size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The parameters before and after the step, each as one vector."""
    plain = new_public(name)
    start = as_vector(_trainable(plain).values())
    optimizer = torch.optim.SGD(_trainable(plain).values(), lr=LEARNING_RATE, momentum=0.9)
    for step in range(STEPS):
        for rank in range(world_size):
            (public_loss(plain, name, step, rank) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return start, {key: param.detach() for key, param in _trainable(plain).items()}


def _train(rank: int, name: str, stage: int, ranks_per_node: int) -> dict[str, Tensor]:
    model = new_public(name)
    sgd = torch.optim.SGD(_trainable(model).values(), lr=LEARNING_RATE, momentum=0.9)
    with zero_optimizer(model, sgd, stage=stage, ranks_per_node=ranks_per_node) as optimizer:
        for step in range(STEPS):
            public_loss(model, name, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        values = full_values(model)
    return {key: values[key] for key in _trainable(model)}


def _check_stages(rank: int, names: list[str], world_size: int, ranks_per_node: int) -> None:
    for name in names:
        start, expected = _single_process(name, world_size)
        update = as_vector(expected.values()) - start
        of_stages = {stage: _train(rank, name, stage, ranks_per_node) for stage in (1, 2, 3)}
        assert_same_bits(of_stages[1], of_stages[2])
        assert_same_bits(of_stages[2], of_stages[3])
        assert of_stages[3].keys() == expected.keys()
        error = relative_error(as_vector(of_stages[3].values()) - start, update)
        assert error < TOLERANCE, f"{name}: {error}"


def _largest(values: Tensor, block: int) -> Tensor:
    """For each element the largest magnitude in its block; each parameter starts a new block."""
    flat = values.detach().flatten().abs()
    padded = F.pad(flat, (0, -flat.numel() % block)).view(-1, block)
    return padded.amax(1, keepdim=True).expand(-1, block).flatten()[: flat.numel()].view(values.shape)


def _gradients(plain: nn.Module, weights: dict[str, Tensor], name: str, step: int, rank: int) -> dict[str, Tensor]:
    params = _trainable(plain)
    with torch.no_grad():
        for key, param in plain.named_parameters():
            param.copy_(weights[key])
    found = torch.autograd.grad(public_loss(plain, name, step, rank), list(params.values()))
    return dict(zip(params, found, strict=True))


def _check_step(before: Tensor, after: Tensor, of_ranks: list[Tensor], num_hops: int) -> float:
    """Check that the masters moved along the mean gradient, within half a scale per hop; return the largest error."""
    largest = torch.stack([_largest(gradient, INT4_BLOCK) for gradient in of_ranks]).mean(0)
    mean = torch.stack(of_ranks).double().mean(0)
    error = ((before - after).double() / LEARNING_RATE - mean).abs()
    slack = 1e-5 * mean.abs().max() + 4 * torch.finfo(torch.float32).eps * before.abs() / LEARNING_RATE
    assert (error <= num_hops * ROUNDED_UP**num_hops * largest / INT4_CODES / 2 + slack).all()
    return (error - slack).max().item()


def _check_zeropp(rank: int, names: list[str], world_size: int, ranks_per_node: int) -> None:
    num_hops = 2 if 1 < ranks_per_node < world_size else 1
    switches: dict[str, Any] = {"quantized_weights": True, "quantized_gradients": True}
    if num_hops == 2:
        switches["hpz_partition_size"] = ranks_per_node
    for name in names:
        model, plain = new_public(name), new_public(name)
        sgd = torch.optim.SGD(_trainable(model).values(), lr=LEARNING_RATE)
        with zero_optimizer(model, sgd, stage=3, ranks_per_node=ranks_per_node, **switches) as optimizer:
            for step in range(STEPS):
                masters = {key: utils.safe_get_full_fp32_param(p) for key, p in _trainable(model).items()}
                weights, is_rounded = full_values(model), False
                for key, master in masters.items():
                    bound = ROUNDED_UP * _largest(master, INT8_BLOCK) / INT8_CODES / 2
                    assert ((weights[key] - master).abs() <= bound).all(), (name, key)
                    is_rounded |= not torch.equal(weights[key], master)
                assert is_rounded, "weights travel in INT8"
                public_loss(model, name, step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                of_ranks = [_gradients(plain, weights, name, step, each) for each in range(world_size)]
                errors = []
                for key, param in _trainable(model).items():
                    after = utils.safe_get_full_fp32_param(param)
                    errors.append(_check_step(masters[key], after, [each[key] for each in of_ranks], num_hops))
                assert max(errors) > 0, "gradients travel in INT4"


CHECKS = {"stages 1 to 3": _check_stages, "ZeRO++": _check_zeropp}


def _run(kind: str, names: list[str], world_size: int, ranks_per_node: int) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: it is in the bench extra")
    run_ranks(world_size, CHECKS[kind], names, world_size, ranks_per_node)


@pytest.mark.parametrize("kind", CHECKS)
def test_public_architectures_equal_the_single_process(kind: str) -> None:
    _run(kind, list(IN_CI), 2, 2)


@pytest.mark.long
@pytest.mark.parametrize("kind", CHECKS)
@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_architecture_on_two_nodes_equals_the_single_process(name: str, kind: str) -> None:
    _run(kind, [name], 4, 2)
