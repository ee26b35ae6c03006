"""Every combination of the options that affect gradients, in both APIs, compared with single-process training.

By default the cases cover all combinations of any three options; ZERO_DIFFERENTIAL=full runs all cases (an hour), and
ZERO_DIFFERENTIAL=2000:7 so many of them, drawn with the seed after the colon. The oracle is mixed-precision training as
one would write it without ZeRO: float32 masters, cast by autograd, and the whole batch in one process. SGD is linear in
the gradient: a gradient with a wrong factor, or without a micro-batch, shows in full.
"""

# covers zero/optimizer.py

from __future__ import annotations

import functools
import itertools
import math
import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import zero
from tests.conftest import SUMMARY_LINE
from tests.covering import covering_set, full_product
from tests.ranks import run_ranks
from tests.zero.models import as_vector, batch, loss_of, new_model
from tests.zero.training import full_values, train, zero_optimizer

MODELS = {
    "untied": {"is_tied": False},
    "tied": {},
    "frozen": {"is_tied": False, "has_frozen": True},
    "unused": {"is_tied": False, "has_unused": True},
    "tied, frozen, unused": {"has_frozen": True, "has_unused": True},
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "world_size": (1, 2, 3, 4),
    "precision": ("fp32", "bf16", "fp16"),
    "model": tuple(MODELS),
    "num_micro": (1, 3),
    "max_norm": (None, 0.2),
    "overlap": (True, False),
    "bucket": (1, 3001, 500_000_000),
    "front_end": ("ZeroOptimizer", "initialize"),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCES = {"fp32": 1e-5, "bf16": 0.02, "fp16": 0.005}
"""Relative to the update over all parameters as one vector; one rounding to 16 bits is 0.004 or 0.0005."""
LOSS_SCALE_POWER, STEPS = 10, 2
ASKED = os.environ.get("ZERO_DIFFERENTIAL", "covering")
NUM_POSSIBLE = len(full_product(FACTORS))


def _cases() -> list[dict[str, Any]]:
    if ASKED == "covering":
        return covering_set(FACTORS, 3)
    if ASKED == "full":
        return full_product(FACTORS)
    count, _, seed = ASKED.partition(":")
    return random.Random(int(seed or 0)).sample(full_product(FACTORS), int(count))


CASES = _cases()
RAN: list[str] = []


def _name(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim <= 1], "lr": 0.5}]
    return torch.optim.SGD(groups, lr=1.0, momentum=0.9, weight_decay=1e-3)


class Masters(nn.Module):
    """Computes the model in another dtype than that of its parameters."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, tokens: Tensor) -> Tensor:
        values = {name: param.to(self.dtype) for name, param in self.model.named_parameters()}
        logits: Tensor = functional_call(self.model, values, (tokens,))
        return logits


class Trained(NamedTuple):
    """The parameters as one float64 vector."""

    start: Tensor
    end: Tensor


def _error(got: Tensor, expected: Trained, dtype: torch.dtype) -> float:
    """The error of ``got`` beyond its rounding to ``dtype``, relative to the whole update."""
    rounding = got.abs() * (torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0)
    excess = torch.relu((got - expected.end).abs() - rounding)
    return (excess.norm() / (expected.end - expected.start).norm()).item()


@functools.lru_cache(maxsize=256)
def _oracle(
    precision: str, model: str, num_micro: int, max_norm: float | None, world_size: int, defect: str = ""
) -> tuple[Trained, list[float]]:
    """The parameters before and after training, and the norms before clipping. ``defect`` names an error to make."""
    plain = new_model(torch.float32, **MODELS[model])
    for param in plain.parameters():  # start where a 16-bit model starts
        param.data = param.data.to(DTYPES[precision]).float()
    start, norms = as_vector(plain.parameters()), []
    masters, optimizer = Masters(plain, DTYPES[precision]), _sgd(plain)
    loss_scale = 2.0**LOSS_SCALE_POWER if precision == "fp16" else 1.0
    for step in range(STEPS):
        for micro in range(num_micro - (defect == "a micro-batch is lost")):
            parts = [batch(step, micro, rank) for rank in range(world_size - (defect == "a rank is lost"))]
            tokens, targets = (torch.cat(column) for column in zip(*parts, strict=True))
            (loss_of(masters, tokens, targets) * (loss_scale / num_micro)).backward()
        for param in plain.parameters():
            if param.grad is not None:
                param.grad /= loss_scale
        limit = max_norm if max_norm is not None and defect != "no clipping" else 1e9
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(start, as_vector(plain.parameters())), norms


def _options(case: dict[str, Any]) -> dict[str, Any]:
    """The keys of the configuration, which are also keyword arguments of ZeroOptimizer."""
    options: dict[str, Any] = {"gradient_accumulation_steps": case["num_micro"]}
    if case["precision"] == "fp16":
        options["fp16"] = {"enabled": True, "initial_scale_power": LOSS_SCALE_POWER}
    elif case["precision"] == "bf16":
        options["bf16"] = {"enabled": True}
    return options


def _sharding(case: dict[str, Any]) -> dict[str, Any]:
    sizes = {f"{kind}_bucket_size": case["bucket"] for kind in ("reduce", "allgather")}
    return {"stage": case["stage"], "overlap_comm": case["overlap"], **sizes}


def _train_with_optimizer(model: nn.Module, rank: int, case: dict[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    per_node = 2 if case["world_size"] == 4 else case["world_size"]
    options = {**_options(case), **_sharding(case), "ranks_per_node": per_node}
    with zero_optimizer(model, _sgd(model), **options) as optimizer:
        norms = train(model, optimizer, rank, steps=STEPS, num_micro=case["num_micro"], max_norm=case["max_norm"])
        return full_values(model), norms


def _train_with_engine(model: nn.Module, rank: int, case: dict[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    config = {**_options(case), "zero_optimization": _sharding(case)}
    if case["max_norm"] is not None:
        config["gradient_clipping"] = case["max_norm"]
    engine, *_ = zero.initialize(model=model, optimizer=_sgd(model), config=config)
    norms = []
    for step in range(STEPS):
        for micro in range(case["num_micro"]):
            engine.backward(loss_of(engine, *batch(step, micro, rank)))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    values = full_values(model)
    engine.destroy()
    return values, norms


def _check(rank: int, case: dict[str, Any]) -> None:
    precision = case["precision"]
    of_oracle = {name: case[name] for name in ("precision", "model", "num_micro", "max_norm", "world_size")}
    expected, expected_norms = _oracle(**of_oracle)
    model = new_model(torch.float32, **MODELS[case["model"]])
    run = _train_with_optimizer if case["front_end"] == "ZeroOptimizer" else _train_with_engine
    values, norms = run(model, rank, case)
    assert {value.dtype for value in values.values()} == {DTYPES[precision]}
    assert _error(as_vector(values.values()), expected, DTYPES[precision]) < TOLERANCES[precision]
    if case["max_norm"] is not None or case["front_end"] == "initialize":
        assert norms == pytest.approx(expected_norms, rel=TOLERANCES[precision])


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_equals_single_process(case: dict[str, Any]) -> None:
    RAN.append(_name(case))
    run_ranks(case["world_size"], _check, case)


@pytest.mark.parametrize("defect", ["a micro-batch is lost", "a rank is lost", "no clipping"])
@pytest.mark.parametrize("precision", list(TOLERANCES))
def test_the_comparison_finds(precision: str, defect: str) -> None:
    """A lost micro-batch (of 3), a lost rank (of 4) or wrong clipping exceeds the tolerance fourfold or more."""
    for model in MODELS:
        right, _ = _oracle(precision, model, 3, 0.2, 4)
        wrong, _ = _oracle(precision, model, 3, 0.2, 4, defect)
        rounded = wrong.end.to(DTYPES[precision]).double()
        assert _error(rounded, right, DTYPES[precision]) > 4 * TOLERANCES[precision]


@pytest.mark.skipif(ASKED != "covering", reason=f"ZERO_DIFFERENTIAL={ASKED}: not the covering set")
def test_every_three_options_meet_in_every_way() -> None:
    for names in itertools.combinations(FACTORS, 3):
        tried = {tuple(case[name] for name in names) for case in CASES}
        assert len(tried) == math.prod(len(FACTORS[name]) for name in names), names


def test_no_case_was_left_out(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    of_this_file = [item.name for item in request.session.items if item.path == request.path]
    assert len(RAN) == sum(name.startswith("test_equals_single_process") for name in of_this_file)
    record_property(SUMMARY_LINE, f"differential suite: {len(RAN)} cases run of {len(CASES)}; there are {NUM_POSSIBLE}")
