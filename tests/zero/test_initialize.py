"""zero.initialize and its engine: a DeepSpeed user's loop gives the results of a single process."""

# covers zero/_access/gathered_parameters.py zero/_config/offload_sections.py zero/_optim/from_config.py
# covers zero/_sharding/phases.py

from __future__ import annotations

import argparse
import copy
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import zcomm
import zero as deepspeed
from tests.ranks import device_mesh, run_ranks
from tests.zero.logs import logged
from tests.zero.models import as_vector, batch, groups_of, loss_of, new_model, relative_error, train_plain
from tests.zero.training import full_values
from zcomm import ConfigError, StateError
from zero import NotAvailableError


class WithLoss(nn.Module):
    """Its forward returns its loss; the oracle trains its inner model."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.inner = new_model(dtype)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return loss_of(self.inner, tokens, targets)


def _config(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, **more}


def _run(engine: Any, rank: int, *, steps: int, num_micro: int, plain_backward: bool = False) -> None:
    for step in range(steps):
        for micro in range(num_micro):
            assert engine.is_gradient_accumulation_boundary() == (micro == num_micro - 1)
            assert engine.was_step_applied() == (step > 0 and micro == 0)
            loss = engine(*batch(step, micro, rank))
            if plain_backward:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
            assert engine.global_steps == step + (micro == num_micro - 1)


def _check_equals_plain(rank: int, stage: int, num_micro: int, plain_backward: bool) -> None:  # noqa: FBT001
    plain, model = new_model(torch.float64), WithLoss()
    reference = torch.optim.AdamW(groups_of(plain), lr=1e-2)
    norms = train_plain(plain, reference, world_size=2, steps=3, num_micro=num_micro, max_norm=0.5)
    optimizer = torch.optim.AdamW(groups_of(model.inner), lr=1e-2)
    config = _config(stage, gradient_accumulation_steps=num_micro, gradient_clipping=0.5)
    engine, wrapped, dataloader, scheduler = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    assert (engine.module, dataloader, scheduler) == (model, None, None)
    assert isinstance(wrapped, torch.optim.Optimizer)
    _run(engine, rank, steps=3, num_micro=num_micro, plain_backward=plain_backward)
    assert engine.get_global_grad_norm() == pytest.approx(norms[-1])
    assert (engine.micro_steps, engine.skipped_steps, engine.was_step_applied()) == (3 * num_micro, 0, True)
    assert engine.get_lr() == [1e-2, 3e-3]
    got = as_vector(full_values(model).values())
    engine.destroy()
    assert relative_error(got, as_vector(plain.parameters())) < 1e-9


@pytest.mark.parametrize("plain_backward", [False, True])
@pytest.mark.parametrize(("stage", "num_micro"), [(0, 1), (0, 3), (1, 3), (2, 1), (2, 3), (3, 1), (3, 3)])
def test_engine_equals_single_process(stage: int, num_micro: int, plain_backward: bool) -> None:  # noqa: FBT001
    run_ranks(2, _check_equals_plain, stage, num_micro, plain_backward)


BACKWARDS: dict[str, tuple[Callable[[Any, Tensor], object], float]] = {
    "engine": (lambda engine, loss: engine.backward(loss), 1.0),
    "engine, undivided": (lambda engine, loss: engine.backward(loss, scale_wrt_gas=False), 4.0),
    "plain": (lambda _, loss: loss.backward(), 1.0),
    "scaled": (lambda engine, loss: engine.scale(loss).backward(), 1.0),
    "plain, divided": (lambda engine, loss: (loss / engine.gradient_accumulation_steps()).backward(), 0.25),
}


def _check_who_divides(rank: int, stage: int) -> None:
    """The loss sums 8 weights, so a step of SGD shows how often a gradient is divided by the accumulation."""
    for fp16 in (False, True):
        for name, (backward, expected) in BACKWARDS.items():
            if fp16 and name.startswith("plain"):
                continue  # a named error: tests/zero/test_loss_scale.py
            model = nn.Linear(8, 1, bias=False)
            nn.init.zeros_(model.weight)
            config = _config(stage, gradient_accumulation_steps=4, optimizer={"type": "SGD", "params": {"lr": 1.0}})
            config["fp16"] = {"enabled": fp16, "initial_scale_power": 4}
            engine, *_ = deepspeed.initialize(model=model, config=config)
            for _ in range(4):
                backward(engine, engine(torch.ones(1, 8, dtype=model.weight.dtype)).sum())
                engine.step()
            values = full_values(engine.module)["weight"].tolist()
            engine.destroy()
            assert values == [[-expected] * 8]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_each_backward_is_divided_by_the_accumulation_steps_once(stage: int) -> None:
    run_ranks(2, _check_who_divides, stage)


def _check_from_json(rank: int, path: str) -> None:
    """The JSON describes optimizer, schedule, dtype and batch sizes."""
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.5, "betas": [0.8, 0.9], "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "data_types": {"keep_in_fp32_modules": ["norm"]},
    }
    if rank == 0:
        Path(path).write_text(json.dumps(config))
    torch.distributed.barrier()
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", path])
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
    engine, optimizer, _, scheduler = deepspeed.initialize(args, model)
    assert engine.get_batch_info() == (8, 2, 2)
    assert engine.first.weight.dtype == torch.bfloat16
    assert engine.norm.weight.dtype == torch.float32
    group = optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"], group["decoupled_weight_decay"]) == ((0.8, 0.9), 0.0, True)
    assert scheduler.get_last_lr() == [0.0]
    rates = []
    for _ in range(10):
        out = engine.norm(engine.first(torch.ones(2, 4, dtype=torch.bfloat16)).float())
        engine.backward(out.square().sum())
        engine.step()
        rates += engine.get_lr()
    assert rates[0] == rates[2] == 0  # the schedule moves at boundaries only
    assert rates[-2:] == [pytest.approx(1e-2 * torch.log(torch.tensor(4.0)).item() / 1.386294361), rates[-1]]
    assert engine.global_steps == 5
    engine.destroy()


def test_everything_from_the_json(tmp_path: Path) -> None:
    run_ranks(2, _check_from_json, str(tmp_path / "config.json"))


def _check_overflow(rank: int) -> None:
    """A step that all ranks skip does not advance the schedule."""
    params = {"warmup_max_lr": 1e-2, "warmup_num_steps": 100, "warmup_type": "linear"}
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    config = _config(3, fp16=fp16, scheduler={"type": "WarmupLR", "params": params}, gradient_clipping=1.0)
    model = WithLoss(torch.float32)
    engine, _, _, scheduler = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW, config=config)
    for step, factor in enumerate((1.0, float("inf"), 1.0, float("nan"), 1.0)):
        loss = engine(*batch(step, 0, rank))
        engine.backward(loss * (factor if rank == 1 else 1.0))
        engine.step()
        assert engine.was_step_applied() == (factor == 1.0)
        assert (engine.get_global_grad_norm() is None) == (factor != 1.0)
    assert (engine.global_steps, engine.skipped_steps, engine.cur_scale) == (5, 2, 64.0)
    assert scheduler.last_epoch == 3
    assert engine.get_lr() == [pytest.approx(2e-4)]
    engine.destroy()


def test_skipped_steps_do_not_advance_the_schedule() -> None:
    run_ranks(2, _check_overflow)


def _check_unmanaged(rank: int, stage: int) -> None:
    """The caller marks the boundary; several losses per step; no_sync at any stage."""
    plain, model = new_model(torch.float64), WithLoss()
    train_plain(plain, torch.optim.SGD(plain.parameters(), lr=0.1), world_size=2, steps=2, num_micro=3)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        config=_config(stage, managed_gradient_accumulation=False),
    )
    for step in range(2):
        for micro in range(3):
            engine.set_gradient_accumulation_boundary(micro == 2)
            if micro == 1:
                with engine.no_sync():
                    engine.backward(engine(*batch(step, micro, rank)) / 3)
            else:
                engine.backward(engine(*batch(step, micro, rank)) / 3)
            engine.step()
    assert engine.global_steps == 2
    got = as_vector(full_values(model).values())
    engine.destroy()
    assert relative_error(got, as_vector(plain.parameters())) < 1e-9


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_caller_may_own_the_boundary(stage: int) -> None:
    run_ranks(2, _check_unmanaged, stage)


class Squares(Dataset[Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)] * 3)


def _check_dataloader(rank: int) -> None:
    engine, _, loader, _ = deepspeed.initialize(
        model=nn.Linear(3, 2), optimizer=torch.optim.SGD, training_data=Squares(), config=_config(1, train_batch_size=8)
    )
    assert loader is engine.training_dataloader
    assert len(loader) == 3
    orders = []
    for _ in range(2):
        batches = [b for b in loader]  # noqa: C416  (one pass)
        assert [len(b) for b in batches] == [4, 4, 4]
        mine = torch.cat(batches)[:, 0].long()
        of_ranks = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(of_ranks, mine)
        assert sorted(torch.cat(of_ranks).tolist()) == list(range(24))
        orders.append(mine.tolist())
    assert orders[0] != orders[1]
    engine.destroy()


def test_dataloader_gives_each_rank_its_share() -> None:
    run_ranks(2, _check_dataloader)


def _check_passes(rank: int, folder: str) -> None:
    """A resumed run sees the data that it would have seen without the stop."""

    def new_engine() -> Any:
        config = _config(1, train_batch_size=8)
        return deepspeed.initialize(
            model=nn.Linear(3, 2), optimizer=torch.optim.SGD, training_data=Squares(), config=config
        )[0]

    def passes(engine: Any, number: int) -> list[list[float]]:
        return [torch.cat(list(engine.training_dataloader))[:, 0].tolist() for _ in range(number)]

    straight = new_engine()
    before = passes(straight, 2)
    straight.save_checkpoint(folder, "two passes")
    expected = passes(straight, 2)
    resumed = new_engine()
    resumed.load_checkpoint(folder, "two passes")
    assert passes(resumed, 2) == expected
    assert before[0] not in expected
    counters = json.loads((Path(folder) / "two passes" / "metadata.json").read_text())["content"]["stateful"]["engine"]
    del counters["num_passes"]  # as an older release saved it
    resumed._stateful()["engine"].load_state_dict(counters)
    for engine in (straight, resumed):
        engine.destroy()


def test_passes_over_the_data_go_on_after_a_load(tmp_path: Path) -> None:
    run_ranks(2, _check_passes, str(tmp_path))


def _check_mesh(rank: int) -> None:
    mesh = device_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(rank % 2)  # ranks of one data-parallel group start with equal values anyway
    model = nn.Linear(3, 2)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), mpu=mesh, config=_config(2, train_batch_size=4)
    )
    assert optimizer.topology.world_size == 2
    assert engine.train_micro_batch_size_per_gpu() == 2
    engine.backward(engine(torch.full((1, 3), float(rank))).sum())
    engine.step()
    before = torch.manual_seed(rank % 2) and nn.Linear(3, 2).weight
    mean = sum(r for r in range(4) if r % 2 == rank % 2) / 2  # over the data-parallel ranks only
    torch.testing.assert_close(model.weight, before - 0.1 * mean)
    engine.destroy()


def test_data_parallel_axis_of_a_mesh() -> None:
    run_ranks(4, _check_mesh)


class MovesItself(nn.Linear):
    """A model with a ``to`` of its own, which takes one target, by position."""

    def to(self, target: Any) -> MovesItself:  # type: ignore[override]
        self.target = target
        return super().to(target)


def _check_moves_itself(rank: int) -> None:
    model = MovesItself(8, 8)
    engine, *_ = deepspeed.initialize(
        model=model, config=_config(1, bf16={"enabled": True}, optimizer={"type": "AdamW"})
    )
    assert (model.target, model.weight.dtype) == (torch.bfloat16, torch.bfloat16)
    engine.destroy()


def test_a_model_may_have_a_to_of_its_own() -> None:
    run_ranks(2, _check_moves_itself)


def _check_destroyed(rank: int) -> None:
    """A plain model with the trained values remains, whose gradients are this rank's alone."""
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    config = _config(2, zcomm={"ranks_per_node": 1})
    engine = deepspeed.initialize(model=model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), config=config).engine
    assert (engine.optimizer.topology.num_nodes, engine.optimizer.topology.ranks_per_node) == (2, 1)
    engine.backward(engine(torch.full((1, 3), float(rank))).sum())
    engine.step()
    plain.load_state_dict(model.state_dict())
    engine.destroy()
    assert not hasattr(model.weight, "zero_shard")
    for net in (model, plain):
        net(torch.full((1, 3), rank + 1.0)).square().sum().backward()
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, expected)
        assert type(mine.grad) is Tensor
        assert torch.equal(mine.grad, expected.grad)


def test_a_destroyed_engine_leaves_a_plain_model() -> None:
    run_ranks(2, _check_destroyed)


def _check_reports(rank: int) -> None:
    with logged() as lines:
        raw = {"steps_per_print": 2, "wall_clock_breakdown": True, "aio": {"thread_count": 2}}
        watched = {"memory_breakdown": True, "comms_logger": {"enabled": True}, "dump_state": True, "log_level": "info"}
        engine, *_ = deepspeed.initialize(
            model=WithLoss(), optimizer=torch.optim.SGD, config=_config(1, **raw, **watched)
        )
        with zcomm.traffic() as sent:
            _run(engine, rank, steps=4, num_micro=1)
        engine.destroy()
    state = [line for line in lines if line.startswith("dict: ")]
    assert ["memory_breakdown" in text for text in state] == ([True] if rank == 0 else [])
    lines = [line for line in lines if line not in state]
    warnings = [line for line in lines if "intra_op_parallelism" in line or "no batch size is given" in line]
    assert len(warnings) == (3 if rank == 0 else 0)  # another name; without effect; no batch size: each once
    assert sum("loss scale=1" in line for line in lines) == (2 if rank == 0 else 0)
    memory = [re.match(r"memory after (\w+): parameters [\d.]+ MiB.*; resident ([\d.]+) MiB", line) for line in lines]
    phases = [found[1] for found in memory if found is not None and float(found[2]) > 1]
    assert phases == (["forward", "backward", "step"] * 4 if rank == 0 else [])
    tables = [line for line in lines if line.startswith("sent ")]
    assert [table.partition(" by rank")[0] for table in tables] == (
        ["sent in 2 steps", "sent in 4 steps", "sent by this engine"] if rank == 0 else []
    )
    if rank == 0:
        nbytes = [int(table.rsplit(maxsplit=1)[1]) for table in tables]
        assert 0 < nbytes[0] < nbytes[1] <= nbytes[2]
        assert nbytes[1] >= sent.bytes() > 0
    timed = [line for line in lines if line.startswith("step=") and "forward" in line]
    assert len(timed) == (4 if rank == 0 else 0)
    for line in timed:
        times = dict(re.findall(r"(\w+) ([\d.]+) ms", line))
        assert list(times) == ["forward", "backward", "gather", "reduce", "step"]
        assert all(float(value) > 0 for value in times.values()), line
        assert float(times["reduce"]) <= float(times["backward"]) + 0.1


def test_reports_are_printed_by_rank_0() -> None:
    run_ranks(2, _check_reports)


def _check_chosen_operations(rank: int, is_on: bool) -> None:  # noqa: FBT001
    raw = {"comms_logger": {"enabled": is_on, "verbose": True, "prof_all": False, "prof_ops": ["all_gather"]}}
    with logged() as lines:
        engine, *_ = deepspeed.initialize(model=WithLoss(), optimizer=torch.optim.SGD, config=_config(1, **raw))
        _run(engine, rank, steps=2, num_micro=1)
        engine.destroy()
    tables = [line.splitlines() for line in lines if line.startswith("sent ")]
    if rank or not is_on:
        assert not tables
        return
    assert [table[0] for table in tables[:2]] == ["sent in step 1 by rank 0:", "sent in step 2 by rank 0:"]
    for table in tables[:2]:
        assert [row.split()[0] for row in table[2:-1]] == ["all_gather"]
        assert table[2].split()[-1] == table[-1].split()[-1] != "0"


@pytest.mark.parametrize("is_on", [True, False])
def test_chosen_operations_are_printed_step_by_step(*, is_on: bool) -> None:
    run_ranks(2, _check_chosen_operations, is_on)


def _check_mistakes(rank: int) -> None:
    model = nn.Linear(3, 2)
    adam = torch.optim.Adam(model.parameters())

    def refused(error: type[Exception], message: str, **arguments: Any) -> None:
        with pytest.raises(error, match=message):
            deepspeed.initialize(**{"model": model, "optimizer": adam, "config": _config(1), **arguments})

    refused(ConfigError, "model must be", model=None)
    refused(ConfigError, "a configuration must be given", config=None)
    refused(ConfigError, "only one configuration", config_params=_config(2))
    refused(ConfigError, r"must return a torch\.optim\.Optimizer", optimizer=lambda _: 3)
    refused(ConfigError, "train_batch_size=7.*world size=2", config=_config(1, train_batch_size=7))
    refused(ConfigError, "training_data needs", training_data=Squares())
    refused(ConfigError, "mpu must be", mpu=3)
    refused(NotAvailableError, r"sequence parallelism .*mesh_param=\(1, 2\)", mesh_param=(1, 2))
    refused(ConfigError, r"mesh_param\[0\] must be the number of ranks: 3, not 2", mesh_param=(3, 1))
    refused(
        NotAvailableError,
        "bf16_optimizer_states=True",
        config={"bf16": {"enabled": True, "bf16_optimizer_states": True}},
    )
    refused(ConfigError, "activations_nvme_path", config=_config(1, zcomm={"activations": "nvme"}))
    choice = {"optimizer": {"type": "Adm"}}
    refused(ConfigError, r"did you mean 'Adam'\?", optimizer=None, config=_config(1, **choice))
    choice = {"optimizer": {"type": "SGD", "params": {"momentun": 1}}}
    refused(ConfigError, r"did you mean 'momentum'\?", optimizer=None, config=_config(1, **choice))
    choice = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_steps": 3}}}
    refused(ConfigError, r"did you mean 'total_num_steps'\?", optimizer=torch.optim.Adam, config=_config(1, **choice))
    keep = {"data_types": {"keep_in_fp32_modules": ["nrm"]}, "fp16": {"enabled": True}}
    refused(ConfigError, "there is no 'nrm' in Linear", config=_config(1, **keep))
    assert not hasattr(model.weight, "zero_shard")
    assert model.weight.dtype == torch.float32


def test_mistakes_are_named_and_leave_the_model_alone() -> None:
    run_ranks(2, _check_mistakes)


def _check_evaluation(rank: int, stage: int) -> None:
    """Without an optimizer, by position as DeepSpeed's: outputs of the plain model, nothing to train, all undone."""
    plain, model, tokens = new_model(torch.float32), new_model(torch.float32), batch(0, 0, rank)[0]
    model.wte.weight.requires_grad_(requires_grad=False)
    engine, optimizer, *_ = deepspeed.initialize(None, model, None, [], config=_config(stage), mesh_param=(2, 1))
    held = optimizer.memory().by_kind
    assert held["states"] == held["gradients"] == 0
    with torch.no_grad():
        assert torch.equal(engine(tokens), plain(tokens))
    assert isinstance(engine, nn.Module)
    assert [name for name, _ in engine.named_parameters()] == [f"module.{name}" for name, _ in plain.named_parameters()]
    with pytest.raises(StateError, match=r"initialize.. without an optimizer freezes them all"):
        engine.backward(engine(tokens).sum())
    with deepspeed.GatheredParameters(model.parameters()):
        engine.destroy()
    trainable = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trainable == {name for name, _ in plain.named_parameters()} - {"wte.weight"}
    again, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD, config=_config(stage))
    again.backward(loss_of(again, *batch(0, 0, rank)))
    again.step()
    assert again.was_step_applied()
    again.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_an_optimizer_a_model_is_evaluated(stage: int) -> None:
    run_ranks(2, _check_evaluation, stage)


def test_a_name_that_neither_engine_nor_model_has_is_the_engines() -> None:
    run_ranks(1, _check_names)


def _check_names(rank: int) -> None:
    model = nn.Linear(2, 2)
    model.own = 3  # type: ignore[assignment]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD, config=_config(1))
    assert (engine.own, engine.in_features, engine.training) == (3, 2, True)
    assert not hasattr(engine, "local_rank")
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'local_rank', nor has its model"):
        _ = engine.local_rank
    assert engine.eval() is engine
    assert not model.training
    assert list(engine.state_dict()) == ["weight", "bias"]
    engine.destroy()


def _check_several_engines(rank: int, backward: str) -> None:
    """Two models and one loss, accumulated over 2 and 4 backwards: each gradient is divided once."""
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    engines = []
    for accumulation in (2, 4):
        model = nn.Linear(3, 3, bias=False)
        nn.init.eye_(model.weight)
        config = _config(1, gradient_accumulation_steps=accumulation, optimizer=sgd)
        engines.append(deepspeed.initialize(model=model, config=config)[0])
    first, second = engines
    for _ in range(2):
        loss = second(first(torch.ones(1, 3))).sum()
        if backward == "plain":
            loss.backward()
        else:
            first.backward(loss)
        for engine in engines:
            engine.step()
    values = [full_values(engine.module)["weight"] for engine in engines]
    for engine in engines:
        engine.destroy()
    assert torch.equal(values[0], torch.eye(3) - 1)  # the gradient is 1 in each of 2 backwards, divided by 2
    assert torch.equal(values[1], torch.eye(3))  # its boundary is the 4th


@pytest.mark.parametrize("backward", ["plain", "engine"])
def test_engines_that_share_a_loss_divide_their_own_gradients_once(backward: str) -> None:
    run_ranks(2, _check_several_engines, backward)


def _check_sharing_window(rank: int) -> None:
    """Engines of the same window: both gradients are divided by the loss that one of them scales."""
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    engines = []
    for _ in range(2):
        model = nn.Linear(3, 3, bias=False)
        nn.init.eye_(model.weight)
        config = _config(2, gradient_accumulation_steps=2, optimizer=sgd)
        engines.append(deepspeed.initialize(model=model, config=config)[0])
    for _ in range(2):
        engines[0].backward(sum(engine(torch.ones(1, 3)).sum() for engine in engines))
        for engine in engines:
            engine.step()
    for engine in engines:
        assert torch.equal(full_values(engine.module)["weight"], torch.eye(3) - 1)
        engine.destroy()


def test_one_engines_backward_scales_the_gradients_of_all_in_its_loss() -> None:
    run_ranks(2, _check_sharing_window)


def _check_failed_evaluation(rank: int) -> None:
    """What cannot be prepared is left as it was: trainable."""
    model = nn.Linear(2, 2)
    with pytest.raises(ZeroDivisionError):
        deepspeed.initialize(model=model, config=_config(1), lr_scheduler=lambda _: 1 / 0)
    assert all(param.requires_grad for param in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD, config=_config(1))
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(StateError, match="an engine cannot be copied or pickled"):
            copying(engine)
    held = nn.ModuleDict({"inner": engine})
    saved = {name: value.clone() for name, value in held.state_dict().items()}
    assert set(saved) == {"inner.module.weight", "inner.module.bias"}
    with torch.no_grad():
        held.load_state_dict({name: value + 1 for name, value in saved.items()})
    assert torch.equal(model.weight, saved["inner.module.weight"] + 1)
    engine.load_state_dict(engine.state_dict())
    engine.destroy()


def test_a_failed_call_leaves_the_model_trainable_and_engines_are_modules() -> None:
    run_ranks(2, _check_failed_evaluation)


def test_namespace() -> None:
    assert deepspeed.zero.register_external_parameter is deepspeed.register_external_parameter
    assert deepspeed.zero.GatheredParameters is deepspeed.GatheredParameters
    if torch.distributed.is_initialized():  # by another test in this process
        torch.distributed.destroy_process_group()
    with pytest.raises(StateError, match="dist_init_required=False"):
        deepspeed.initialize(model=nn.Linear(2, 2), config={}, dist_init_required=False)
