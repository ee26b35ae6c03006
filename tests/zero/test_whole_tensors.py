"""Optimizers of whole tensors (Muon, LAMB, Adafactor) under every stage, beside one process: float64, 1e-10."""

# covers zero/_optim/several.py zero/_optim/muon.py zero/_optim/lamb.py

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import SGD, AdamW, Muon

import zcomm
import zero
from tests.covering import covering_set
from tests.ranks import run_ranks, topology
from tests.zero.models import as_vector, batch, loss_of, new_model
from tests.zero.test_delta_hpz import EXACT
from tests.zero.training import full_values, train, zero_optimizer
from tests.zero.whole_optimizers import (
    BUILDERS,
    WideMuon,
    check_moves,
    check_sends_what_adamw_sends,
    matrices_and_others,
    train_plainly,
)
from zcomm import ConfigError, StateError
from zero import Init, load_checkpoint, save_checkpoint

STEPS = 3
FACTORS: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3],
    "optimizer": list(BUILDERS),
    "num_micro": [1, 3],
    "is_built": [False, True],
    "offload": ["none", "cpu", "params", "nvme", "all nvme"],
    "small_buckets": [False, True],
    "has_frozen": [False, True],
}
"""``is_built``: by zero.Init. ``offload``: states, or states and parameters, in host memory or files."""


def _options(case: dict[str, Any], folder: str) -> dict[str, Any]:
    options: dict[str, Any] = {"stage": case["stage"], "gradient_accumulation_steps": case["num_micro"]}
    if case["stage"] and case["offload"] != "none":
        in_files = "nvme" in case["offload"]
        options["offload_optimizer"] = {"device": "nvme", "nvme_path": folder} if in_files else {"device": "cpu"}
        options |= {"sub_group_size": 2000} if in_files and case["small_buckets"] else {}
    if case["stage"] == 3:
        options["stage3_param_persistence_threshold"] = 100 if case["small_buckets"] else 0
        if case["offload"] == "params":
            options["offload_param"] = {"device": "cpu"}
        if case["offload"] == "all nvme":
            options["offload_param"] = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    elif case["small_buckets"]:
        options |= {"reduce_bucket_size": 2000, "allgather_bucket_size": 2000}
    return options


@cache
def _expected(optimizer: str, num_micro: int, has_frozen: bool) -> Tensor:  # noqa: FBT001
    model, world_size = new_model(torch.float64, has_frozen=has_frozen), torch.distributed.get_world_size()
    train_plainly(model, BUILDERS[optimizer](model), world_size=world_size, steps=range(STEPS), num_micro=num_micro)
    return as_vector(model.parameters())


def _check_cases(rank: int, cases: list[dict[str, Any]], per_node: int, folder: str) -> None:
    for case in cases:
        build, expected = (
            BUILDERS[case["optimizer"]],
            _expected(case["optimizer"], case["num_micro"], case["has_frozen"]),
        )
        with Init() if case["is_built"] else nullcontext():
            model = new_model(torch.float64, has_frozen=case["has_frozen"])
        with zero_optimizer(model, build(model), ranks_per_node=per_node, **_options(case, folder)) as optimizer:
            train(model, optimizer, rank, steps=STEPS, num_micro=case["num_micro"])
            got = as_vector(full_values(model).values())
        error = (got - expected).abs().max().item()
        assert error < 1e-10, f"{case}: {error}"
        digests = zcomm.control.gather_float64(got, topology(per_node))
        assert (digests == digests[0]).all(), f"{case}: ranks differ"


@pytest.mark.parametrize(("world_size", "per_node"), [(1, 1), (2, 1), (3, 3), (4, 2)])
def test_as_one_process(world_size: int, per_node: int, tmp_path: Path) -> None:
    cases = covering_set(FACTORS, 2)
    own = cases if world_size == 4 else cases[world_size - 1 :: 3]
    run_ranks(world_size, _check_cases, own, per_node, str(tmp_path))


def _check_moves(rank: int, name: str, folder: str) -> None:
    check_moves(rank, BUILDERS[name], folder)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_checkpoints_move_between_stages(name: str, tmp_path: Path) -> None:
    run_ranks(4, _check_moves, name, str(tmp_path))


def _torchs(of: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = matrices_and_others(of)
    return [Muon(matrices, lr=0.02), AdamW(others, lr=3e-3)]


def _check_torchs_muon(rank: int) -> None:
    """torch's Muon, in bf16: fed the gradients that the ranks reduced, one process gives the same parameters."""
    world_size = torch.distributed.get_world_size()
    plain, model = new_model(), new_model()
    optimizers = _torchs(plain)
    with zero_optimizer(model, _torchs(model), ranks_per_node=2, stage=2) as optimizer:
        for step in range(20):
            loss_of(model, *batch(step, 0, rank)).backward()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                theirs.grad = zero.utils.safe_get_full_grad(ours)
            optimizer.step()
            optimizer.zero_grad()
            for one in optimizers:
                one.step()
            off = (as_vector(full_values(model).values()) - as_vector(plain.parameters())).abs().max().item()
            assert off < 1e-6, (step, off)
    assert world_size == 4


def test_torchs_muon_on_the_gradients_of_the_ranks() -> None:
    run_ranks(4, _check_torchs_muon)


ORDERS = [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1)]


def _trained_in(order: tuple[int, ...]) -> Tensor:
    """One process after 20 steps, which adds the gradients of the ranks' batches in this order."""
    model = new_model()
    optimizers = _torchs(model)
    for step in range(20):
        for rank in order:
            (loss_of(model, *batch(step, 0, rank)) / len(order)).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    return as_vector(model.parameters())


def _check_rounding(rank: int, expected: Tensor, bound: float) -> None:
    for options in ({"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "mode": "delta_hpz", **EXACT}):
        model = new_model()
        with zero_optimizer(model, _torchs(model), ranks_per_node=2, **options) as optimizer:
            train(model, optimizer, rank, steps=20)
            off = (as_vector(full_values(model).values()) - expected).norm().item()
        assert 0 < off <= 2 * bound, (options, off, bound)


def test_torchs_muon_is_as_near_to_one_process_as_another_order_of_the_batch() -> None:
    """Its iteration in bfloat16 magnifies the rounding of sums, which is what an order of the batch changes."""
    expected, *others = map(_trained_in, ORDERS)
    bound = sum((other - expected).norm().item() for other in others) / len(others)
    run_ranks(4, _check_rounding, expected, bound)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_between_nodes_it_sends_what_adamw_sends(stage: int) -> None:
    run_ranks(4, check_sends_what_adamw_sends, WideMuon, {"stage": stage}, 1)


def _rows_and_columns() -> nn.Sequential:
    """Matrices of one row and of one column, whose factored states have as many elements as they."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 1), nn.Linear(1, 24), nn.Linear(24, 1)).double()


def _check_rows(rank: int, folder: str, options: dict[str, Any]) -> None:
    models = []
    for is_plain in (True, False):
        model = _rows_and_columns()
        optimizer: Any = torch.optim.Adafactor(model.parameters(), lr=0.1, foreach=False)
        if not is_plain:
            optimizer = zero.ZeroOptimizer(model, optimizer, topology=topology(2), **options)
        for step in range(4):
            if step == 2 and not is_plain:
                save_checkpoint(optimizer, folder, "rows")
                optimizer.close()
                model = _rows_and_columns()
                optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1, foreach=False)
                optimizer = zero.ZeroOptimizer(model, optimizer, topology=topology(4), **options)
                load_checkpoint(optimizer, folder, "rows")
            for peer in range(4) if is_plain else (rank,):
                x = torch.randn(5, 24, generator=torch.Generator().manual_seed(10 * step + peer), dtype=torch.float64)
                (model(x).square().mean() / (4 if is_plain else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(as_vector(model.parameters() if is_plain else full_values(model).values()))
        if not is_plain:
            optimizer.close()
    assert (models[0] - models[1]).abs().max() < 1e-10


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("device", ["none", "nvme"])
def test_states_of_rows_and_columns(device: str, stage: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"stage": stage}
    if device == "nvme":
        place = {"device": "nvme", "nvme_path": str(tmp_path)}
        options |= {"offload_optimizer": place} | ({"offload_param": {**place, "max_in_cpu": 0}} if stage == 3 else {})
    run_ranks(4, _check_rows, str(tmp_path / "checkpoints"), options)


def _check_factors(rank: int) -> None:
    model = new_model()
    with zero_optimizer(model, BUILDERS["adafactor"](model)[0], stage=3) as optimizer:
        train(model, optimizer, rank, steps=1)
        with pytest.raises(StateError, match=r"keeps 'row_var' of 'shared.weight' in another shape"):
            zero.utils.safe_get_full_optimizer_state(model.shared.weight, "row_var")
        with pytest.raises(StateError, match=r"in another shape than the parameter.*use zero.save_checkpoint"):
            get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def test_factors_of_moments_are_refused_where_they_cannot_be_shown() -> None:
    run_ranks(2, _check_factors)


def _check_wrong_on_one(rank: int) -> None:
    model = new_model()
    matrices, others = matrices_and_others(model)
    wrong = [Muon(matrices), AdamW([*others, *matrices[: rank == 0]])]
    with pytest.raises(ConfigError, match="is in two optimizers"):
        zero.ZeroOptimizer(model, wrong, stage=1)


def test_a_list_that_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    run_ranks(2, _check_wrong_on_one)


def test_each_optimizer_loads_its_own_states() -> None:
    """zero.CPUAdam keeps bfloat16 moments, which torch's loading would widen."""
    model = new_model(torch.bfloat16)
    matrices, others = matrices_and_others(model)
    narrow = zero.CPUAdam(others, fp32_optimizer_states=False)
    optimizer = zero.ZeroOptimizer(model, [Muon(matrices), narrow], stage=2, offload_optimizer={"device": "cpu"})
    loss_of(model, *batch(0, 0, 0)).backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    dtypes = {value.dtype for state in narrow.state.values() for value in state.values() if isinstance(value, Tensor)}
    assert torch.bfloat16 in dtypes
    loss_of(model, *batch(1, 0, 0)).backward()
    optimizer.step()
    optimizer.close()


class Liar(AdamW):
    """Says that it updates elements, and scales by the norm of the tensor."""

    zero_updates = "elements"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / (1 + param.norm()), alpha=0.1)


def _check_refused(rank: int) -> None:
    model = new_model()
    matrices, others = matrices_and_others(model)
    with pytest.raises(ConfigError, match=r"is in two optimizers, Muon and AdamW"):
        zero.ZeroOptimizer(model, [Muon(matrices), AdamW([*others, matrices[0]])], stage=1)
    with pytest.raises(ConfigError, match=r"must be in a parameter group: \d+ are in none"):
        zero.ZeroOptimizer(model, [Muon(matrices), AdamW(others[1:])], stage=1)
    with pytest.raises(
        ConfigError, match=r"Muon refuses parameter 'blocks.0.norm.weight' of shape .* a list of two optimizers"
    ):
        zero.ZeroOptimizer(model, Muon, stage=1, lr=0.1)
    for extra in (model.blocks[0].norm.weight, nn.Parameter(torch.zeros(2, 3, 4))):
        late = Muon(matrices)  # torch checks shapes in the constructor alone
        late.add_param_group({"params": [extra]})
        model.register_parameter("late", extra)
        rest = AdamW([param for param in others if param is not extra])
        with pytest.raises(ConfigError, match=r"Muon updates matrices: got '.*' of shape \((24,|2, 3, 4)\)"):
            zero.ZeroOptimizer(model, [late, rest], stage=1)
        del model.late
    with pytest.raises(ConfigError, match=r"^Liar is not elementwise"):
        zero.ZeroOptimizer(model, Liar(model.parameters()), stage=1)
    with pytest.raises(ConfigError, match=r"given as a list of instances"):
        zero.ZeroOptimizer(model, [Muon, AdamW], stage=1)
    with pytest.raises(ConfigError, match=r"zero_updates must be 'elements' or 'tensors'"):
        zero.ZeroOptimizer(model, type("Odd", (SGD,), {"zero_updates": "rows"})(model.parameters(), lr=0.1), stage=1)


def test_wrong_arguments() -> None:
    run_ranks(2, _check_refused)


class Everything(SGD):
    """A step of all tensors by their common norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in params) ** 0.5
        for param in params:
            param.sub_(param.grad / (1 + norm), alpha=0.1)


def test_what_couples_tensors_is_refused() -> None:
    model = nn.Linear(3, 4)
    with pytest.raises(ConfigError, match=r"Everything .*As an optimizer of whole tensors it couples tensors"):
        zero.ZeroOptimizer(model, Everything(model.parameters(), lr=0.1), stage=1)


@pytest.mark.parametrize("cls", [WideMuon, torch.optim.Adafactor, Muon, zero.Lamb, zero.Muon])
def test_known_classes_pass_their_trial(cls: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    from zero._optim import elementwise_check

    monkeypatch.setattr(elementwise_check, "OF_TENSORS", frozenset())
    assert elementwise_check.updates_tensors(cls, {"lr": 0.1}, torch.device("cpu"))


def test_groups_and_schedules_of_several() -> None:
    model = new_model()
    matrices, others = matrices_and_others(model)
    muon, adam = Muon(matrices, lr=0.02), AdamW(others, lr=3e-3)
    optimizer = zero.ZeroOptimizer(model, [muon, adam], stage=3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.5**n, lambda n: 1 + n])
    loss_of(model, *batch(0, 0, 0)).backward()
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.006]
    assert muon.param_groups[0]["lr"] == 0.01
    assert adam.param_groups[0]["lr"] == 0.006
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.5
    assert muon.param_groups[0]["lr"] == 0.5
    optimizer.close()


def test_split_for_muon(caplog: pytest.LogCaptureFixture) -> None:
    model = new_model(is_tied=False, has_frozen=True)
    model.blocks[0].mlp[0].weight.use_muon = False
    caplog.set_level("INFO", logger="zero")
    split = zero.split_for_muon(model)
    names = {param: name for name, param in model.named_parameters()}
    assert [names[p] for p in split.matrices] == [
        *("blocks.0.mlp.2.weight", "blocks.2.mlp.0.weight", "blocks.2.mlp.2.weight", "shared.weight")
    ]
    assert {names[p] for p in split.others} | {names[p] for p in split.matrices} == {
        name for name, param in model.named_parameters() if param.requires_grad
    }
    assert split.roles["wte.weight"] == split.roles["position"] == "embedding"
    assert split.roles["head.weight"] == "output layer"
    assert split.roles["blocks.0.mlp.0.weight"] == "use_muon is False"
    assert "Muon  hidden matrix" in caplog.text
    square = nn.Sequential(nn.Embedding(24, 24), nn.ModuleList([nn.Linear(24, 24)]), nn.Embedding(50, 24))
    assert zero.split_for_muon(square).roles["1.0.weight"] == "hidden matrix", "as wide as a position table is long"
    model.norm.weight.use_muon = True
    with pytest.raises(ConfigError, match=r"use_muon is true for 'norm.weight' of shape \(24,\)"):
        zero.split_for_muon(model)


def test_json() -> None:
    config = {
        "train_batch_size": 2,
        "optimizer": {
            "type": "Muon",
            "params": {"lr": 0.01, "muon_lr": 0.02, "momentum": 0.9, "ns_method": "gram", "betas": [0.8, 0.9]},
        },
        "zero_optimization": {"stage": 2},
    }
    model = new_model()
    groups = [{"params": list(model.named_parameters()), "name": "own"}]
    engine, optimizer, _, _ = zero.initialize(model=model, model_parameters=groups, config=config)
    muon, adam = optimizer.param_groups
    assert (muon["lr"], muon["momentum"], muon["weight_decay"]) == (0.02, 0.9, 0.0)
    assert (adam["lr"], tuple(adam["betas"]), adam["eps"]) == (0.01, (0.8, 0.9), 1e-10)
    assert muon["name"] == adam["name"] == "own"
    loss = loss_of(engine, *batch(0, 0, 0))
    engine.backward(loss)
    engine.step()
    engine.destroy()
    config["optimizer"]["params"] = {"ns_method": "cubic"}
    with pytest.raises(ConfigError, match="ns_method must be one of"):
        zero.initialize(model=new_model(), config=config)
    config["optimizer"]["params"] = {"beta": 1}
    with pytest.raises(ConfigError, match=r"Muon has no \['beta'\]"):
        zero.initialize(model=new_model(), config=config)
