"""Small names of zero.compat that public scripts of DeepSpeed use: see tests/ecosystem."""

# covers zero/compat/op_builders.py zero/compat/sections.py
# covers zero/compat/accelerator.py zero/compat/resident_memory.py zero/compat/timers.py zero/compat/monitors.py

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from tests.zero.training import zero_optimizer
from zcomm import ConfigError, StateError
from zero import GatheredParameters, NotAvailableError
from zero.compat import helpers, monitors, op_builders, sections
from zero.compat.accelerator import DeepSpeedAccelerator
from zero.compat.timers import ThroughputTimer


def test_memory_of_a_cpu_is_that_of_the_process() -> None:
    device = DeepSpeedAccelerator("cpu")
    before = device.memory_allocated()
    held = torch.ones(2**25)  # more than malloc takes from what it has freed
    assert before + held.nbytes / 2 < device.memory_allocated() < device.total_memory()
    assert device.memory_stats()["allocated_bytes.all.peak"] == device.max_memory_reserved() >= before + held.nbytes / 2
    del held
    device.reset_peak_memory_stats()
    assert 0 < device.max_memory_allocated() <= device.total_memory()
    assert 0 < device.available_memory() < device.total_memory()


def test_a_cpu_has_torchs_generator_and_tensor_types():
    device = DeepSpeedAccelerator("cpu")
    assert device.initial_seed() == torch.initial_seed()
    assert device.default_generator(0) is torch.default_generator
    assert device.FloatTensor is torch.FloatTensor
    assert not device.is_pinned(torch.ones(1))


def test_the_timer_counts_epochs_and_their_steps():
    counts = SimpleNamespace(global_steps=0, micro_steps=0)
    timer = ThroughputTimer(counts)
    counts.global_steps, counts.micro_steps = 3, 6
    assert (timer.epoch_count, timer.global_step_count, timer.micro_step_count) == (0, 3, 6)
    timer.update_epoch_count()
    counts.micro_steps = 8
    assert (timer.epoch_count, timer.global_step_count, timer.micro_step_count) == (1, 3, 2)


def test_attributes_by_their_path():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    assert helpers.recursive_getattr(model, "0.0.weight") is model[0][0].weight
    other = nn.Identity()
    helpers.recursive_setattr(model, "0.0", other)
    assert model[0][0] is other


def test_tensors_are_moved_in_their_containers():
    given = {"a": [torch.ones(2)], "b": (torch.zeros(1),)}
    moved = helpers.move_to_device(given, "meta")
    assert moved["a"][0].is_meta
    assert moved["b"][0].is_meta
    kept = torch.ones(2)
    assert helpers.move_to_device(kept, "cpu", torch.is_tensor) is kept


def _check_to(rank: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for param in model.parameters():
        torch.distributed.broadcast(param.data, 0)
    before = [param.detach().clone() for param in model.parameters()]
    with zero_optimizer(model, stage=3):
        model.to("cpu").to(torch.float32).to(torch.device("cpu"), torch.float32)
        for change in (torch.bfloat16, "meta"):
            with pytest.raises(StateError, match="is released"):
                model.to(change)
        for param, values in zip(model.parameters(), before, strict=True):
            with GatheredParameters([param]):
                torch.testing.assert_close(param.detach(), values)


def test_a_module_with_released_parameters_may_be_asked_to_be_where_it_is():
    run_ranks(2, _check_to)


def test_sections_have_the_values_of_a_configuration() -> None:
    section = sections.DeepSpeedZeroConfig(stage=3, param_persistence_threshold=7, offload_param={"device": "cpu"})
    assert (section.stage, section.stage3_param_persistence_threshold, section.param_persistence_threshold) == (3, 7, 7)
    assert section.offload_param.device == "cpu"
    with pytest.raises(AttributeError, match="the section zero_optimization has no key nonsense"):
        _ = section.nonsense
    with pytest.raises(ConfigError, match="stag"):
        sections.DeepSpeedZeroConfig(stag=3)
    assert sections.DeepSpeedZeroOffloadOptimizerConfig(device="nvme", nvme_path="/x", pipeline_read=True).pipeline
    assert sections.get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    with pytest.raises(ConfigError, match="bf16 must be given once"):
        sections.get_bfloat16_config({"bf16": {}, "bfloat16": {}})
    assert [sections.get_gradient_clipping(one) for one in ({}, {"gradient_clipping": 0.5})] == [1.0, 0.5]
    assert (section.offload_optimizer, sections.DeepSpeedZeroConfig().offload_param) == (None, None)
    assert sections.ZeroStageEnum(section.stage) is sections.ZeroStageEnum.weights


def test_monitors_of_single_sections_write_on_the_first_rank(tmp_path: Path) -> None:
    given = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = monitors.DeepSpeedMonitorConfig(csv_monitor=given, train_batch_size=2)
    assert config.enabled
    assert not monitors.DeepSpeedMonitorConfig().enabled
    single, none = monitors.csvMonitor(config.csv_monitor), monitors.WandbMonitor(config.wandb)
    assert (single.enabled, single.output_path, single.job_name) == (True, str(tmp_path), "job")
    assert (none.enabled, none.project) == (False, "deepspeed")
    master = monitors.MonitorMaster(config)
    assert (master.csv_monitor.enabled, master.csv_monitor.job_name) == (True, "job")
    assert (master.tb_monitor, master.wandb_monitor, master.comet_monitor) == (None, None, None)
    for monitor in (single, none, master, master.csv_monitor):
        monitor.write_events([("Train/loss", torch.tensor(0.5), 7)])
    assert (tmp_path / "job" / "Train_loss.csv").read_text().split() == ["step,loss", "7,0.5", "7,0.5", "7,0.5"]
    with pytest.raises(AttributeError, match="nonsense"):
        _ = master.nonsense
    other = monitors.MonitorMaster.over(master)
    master.close()
    assert (other.csv_monitor, other.enabled) == (None, True)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = config.nonsense


def test_builders_say_what_there_is_and_build_nothing() -> None:
    assert op_builders.CPUAdamBuilder().is_compatible()
    assert not op_builders.QuantizerBuilder().is_compatible()
    assert op_builders.ALL_OPS["cpu_adam"] is op_builders.CPUAdamBuilder
    assert op_builders.__compatible_ops__["async_io"]
    with pytest.raises(NotAvailableError, match=r"CPUAdamBuilder.load.*: nothing has to be built here"):
        op_builders.CPUAdamBuilder().load()
