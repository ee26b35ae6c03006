"""Configurations through zero.compat: DeepSpeed's defaults, single sections, and what DeepSpeed takes and ignores."""

# covers zero/compat/sections.py zero/compat/engine.py zero/compat/parameters.py zero/compat/timers.py
# covers zero/initialize.py

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.ranks import run_ranks
from tests.zero.logs import logged
from tests.zero.models import batch, loss_of, new_model
from zcomm import ConfigError
from zero.compat import engine, sections, spellings

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
}


def test_deepspeeds_defaults_are_added_where_nothing_is_given(tmp_path: Path) -> None:
    added = sections.with_defaults({"zero_optimization": {"stage": 3}}).raw
    assert added == {
        "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100_000}
    }  # fmt: skip
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"param_persistence_threshold": 5}, "gradient_clipping": 0.5}))
    assert sections.with_defaults(path).raw == json.loads(path.read_text())
    automatic = {"stage": 3, "stage3_param_persistence_threshold": "auto"}
    assert sections.with_defaults({"zero_optimization": automatic, "gradient_clipping": "auto"}).raw == added
    switched = {"zero_optimization": True}
    assert sections.with_defaults(switched).raw == {**switched, "gradient_clipping": 1.0}
    config = sections.DeepSpeedConfig({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    assert (config.zero_optimization_stage, config.zero_enabled, config.bf16.enabled) == (2, True, True)
    with pytest.raises(ConfigError, match="config must be a dict or the path"):
        sections.with_defaults(3)  # type: ignore[arg-type]


def test_single_sections_are_read_by_their_keys() -> None:
    read = sections.DeepSpeedZeroConfig(stage3_prefetch_bucket_size=12345, stage=2)
    assert (read.prefetch_bucket_size, read.stage) == (12345, 2)
    assert sections.get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    assert (sections.get_gradient_clipping({}), sections.get_gradient_clipping({"gradient_clipping": 0.5})) == (
        1.0,
        0.5,
    )
    with pytest.raises(ConfigError, match="loss_scale"):
        sections.DeepSpeedFP16Config(loss_scale=-1)
    leaves = sections.DeepSpeedZeroConfig(leaf_module={"classes": "my.Block", "names": ["mlp"]}).leaf_module
    assert (leaves.classes, leaves.names, leaves.name_suffixes) == (["my.Block"], ["mlp"], [])
    assert sections.DeepSpeedZeroConfig().leaf_module.classes == spellings.DEFAULT_LEAF_MODULE_CLASSES
    old = sections.DeepSpeedZeroConfig(cpu_offload=True, cpu_offload_param=True)
    assert old.offload_optimizer is not None
    assert old.offload_param is not None
    assert (old.offload_optimizer.device, old.offload_param.device) == ("cpu", "cpu")
    assert sections.DeepSpeedZeroConfig().offload_param is None


def test_single_sections_have_deepspeeds_defaults() -> None:
    assert sections.DeepSpeedZeroConfig().param_persistence_threshold == 100_000
    for stage in range(4):
        assert sections.DeepSpeedZeroConfig(stage=stage).overlap_comm == (stage == 3)
        assert sections.DeepSpeedZeroConfig(stage=stage, overlap_comm="auto").overlap_comm == (stage == 3)
        for given in (False, True):
            assert sections.DeepSpeedZeroConfig(stage=stage, overlap_comm=given).overlap_comm == given


UNREAD: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": {"type": "Adam", "torch_adam": True}}, "optimizer.torch_adam=True has no effect"),
    ({"fp16": {"loss_scale_window": 0}}, "fp16.loss_scale_window=0 has no effect"),
    ({"fp16": {"enabled": False, "min_loss_scale": -1}}, "fp16.min_loss_scale=-1 has no effect"),
    ({"fp16": {"enabled": True, "loss_scale": 128, "min_loss_scale": 0.0}}, "fp16.min_loss_scale=0.0 has no effect"),
]


@pytest.mark.parametrize(("raw", "note"), UNREAD)
def test_what_deepspeed_ignores_is_left_out_and_said(raw: dict[str, Any], note: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):  # not through the door
        zero.Engine.read_config(raw)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(raw))
    for source in (raw, path):
        read = engine.DeepSpeedEngine.read_config(source)
        assert sum(note in one for one in read.notes) == 1
    assert sections.DeepSpeedConfig(raw).zero_optimization_stage == 0


@pytest.mark.parametrize("name", ["loss_scale_window", "min_loss_scale"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_dynamic_loss_scale_is_checked(name: str, value: int) -> None:
    given = {"enabled": True, name: value}
    with pytest.raises(ConfigError, match=name):
        engine.DeepSpeedEngine.read_config({"fp16": given})
    with pytest.raises(ConfigError, match=name):
        sections.DeepSpeedFP16Config(**given)
    for unused in ({**given, "enabled": False}, {**given, "loss_scale": 128}):
        assert getattr(sections.DeepSpeedFP16Config(**unused), name) == value
    with pytest.raises(ConfigError, match=name):
        engine.DeepSpeedEngine.read_config({"fp16": {name: False}})


def _check_notes(rank: int) -> None:
    given = {**CONFIG, "optimizer": {**CONFIG["optimizer"], "torch_adam": True}}
    with logged() as lines:
        built = engine.initialize(None, nn.Linear(4, 4), config=given).engine
    assert sum("torch_adam" in line for line in lines) == (rank == 0), lines
    assert isinstance(built, engine.DeepSpeedEngine)
    assert (built.tput_timer.batch_size, built.train_batch_size()) == (4, 4)
    built.set_train_batch_size(12)
    assert built.tput_timer.batch_size == 12
    built.destroy()


def test_one_rank_says_what_has_no_effect() -> None:
    run_ranks(2, _check_notes)


WRONG: list[dict[str, Any]] = [
    {"optimizer": {"type": "AdamW", "params": {"lrr": 1e-2}}},
    {"optimizer": {"type": "AdamV"}},
    {"optimizer": {"type": "Muon", "params": {"momentun": 1.0}}},
    {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}},
    {"scheduler": {"type": "WarmupDecayLR", "params": {}}},
    {"train_batch_size": 3},
    {"zero_optimization": {"stage": 7}},
    {"zero_optimization": {"stage": 2, "stge": 2}},
    {"data_types": {"param_dtype": "bf16"}},
    {"amp": {"enabled": True}},
]


def _check_wrong_configuration(rank: int, stage: int) -> None:
    """The engine that the model has trains on with the bits of one that was left alone."""
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    models = [new_model(torch.float32), new_model(torch.float32)]
    alone, tried = (engine.initialize(None, model, config=config).engine for model in models)
    lists = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1e-2, 1e-3]}}}
    for number, wrong in enumerate([*WRONG_ON_ONE_RANK, *WRONG]):
        is_mine = number >= len(WRONG_ON_ONE_RANK) or rank == 1
        state = torch.get_rng_state()
        with pytest.raises((ConfigError, zero.NotAvailableError)):
            engine.initialize(None, models[1], config={**config, **(wrong if is_mine else {})})
        assert torch.equal(torch.get_rng_state(), state)
        for one in (alone, tried):
            one.backward(loss_of(one, *batch(number, 0, rank)))
            one.step()
    with zero.GatheredParameters([*models[0].parameters(), *models[1].parameters()]):
        for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(left, right)
    groups = [{"params": [param]} for param in models[1].parameters()]
    second = engine.initialize(  # what a stand-in with one group cannot try is no mistake
        None, models[1], None, [{"params": [p for g in groups[:2] for p in g["params"]]},
        {"params": [p for g in groups[2:] for p in g["params"]]}], config={**config, **lists},
    ).engine  # fmt: skip
    assert len(second.get_lr()) == 2
    second.destroy()
    alone.destroy()


WRONG_ON_ONE_RANK: list[dict[str, Any]] = [{"optimizer": {"type": "AdamV"}}]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_wrong_configuration_leaves_the_engine_alone(stage: int) -> None:
    run_ranks(2, _check_wrong_configuration, stage)


def _check_given_gradients(rank: int, stage: int) -> None:
    """A gradient that a script sets has the dtype that gradients accumulate in, and replaces the one of backward."""
    bf16 = {**CONFIG, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, "scheduler": {}}
    bf16["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
    for accumulates_in in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        dtypes = {"data_types": {"grad_accum_dtype": "bf16"}} if accumulates_in is torch.bfloat16 else {}
        built = engine.initialize(None, model, config={**bf16, **dtypes}).engine
        with zero.GatheredParameters(model.parameters()):
            before = model.weight.detach().clone()
        built.backward(built(torch.ones(2, 64, dtype=torch.bfloat16)).sum())
        if accumulates_in is torch.float32:
            with pytest.raises(RuntimeError, match="grad_dtype"):
                model.weight.grad = torch.zeros(64, 64, dtype=torch.bfloat16)
        model.weight.grad = torch.zeros(64, 64, dtype=accumulates_in)
        built.step()
        with zero.GatheredParameters(model.parameters()):
            assert torch.equal(model.weight, before)
        built.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_given_gradients_have_the_dtype_that_gradients_accumulate_in(stage: int) -> None:
    run_ranks(2, _check_given_gradients, stage)


def _check_resumed_schedule(rank: int) -> None:
    model, given = nn.Linear(8, 4), {"type": "WarmupLR", "params": {"last_batch_iteration": 3}}
    for _ in range(2):
        own = torch.optim.SGD([{"params": list(model.parameters()), "initial_lr": 0.1}], lr=0.1)
        built = engine.initialize(None, model, own, config={"train_batch_size": 1, "scheduler": given}).engine
    built.destroy()


def test_a_model_with_a_resumed_schedule_can_be_initialized_again() -> None:
    run_ranks(1, _check_resumed_schedule)
