"""The adapters of zero.compat over ranks: DeepSpeed's defaults, engine, optimizers and attributes of parameters."""

# covers zero/compat/engine.py zero/compat/parameters.py zero/compat/optimizers.py zero/compat/checkpoint_files.py
# covers zero/compat/sections.py zero/compat/op_builders.py zero/compat/spellings.py

from __future__ import annotations

import argparse
import copy
import gc
import json
from pathlib import Path
from typing import Any, cast
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.ranks import run_ranks
from tests.zero.models import batch, loss_of, new_model
from zcomm import ConfigError, StateError
from zero._optim import lr_schedulers
from zero.compat import (
    checkpoint_files,
    door,
    engine,
    monitors,
    op_builders,
    optimizers,
    parameters,
    sections,
    spellings,
)

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
}


def _engine(stage: int, model: nn.Module | None = None, **config: Any) -> engine.DeepSpeedEngine:
    given = {**CONFIG, "zero_optimization": {"stage": stage}, **config}
    built, optimizer, _, _ = engine.initialize(None, model or new_model(torch.float32), None, None, config=given)
    assert isinstance(built, engine.DeepSpeedEngine)
    assert isinstance(optimizer, engine.DeepSpeedOptimizer)
    return built


def _train(built: engine.DeepSpeedEngine, rank: int, steps: int) -> None:
    for step in range(steps):
        for micro in range(built.gradient_accumulation_steps()):
            built.backward(loss_of(built, *batch(step, micro, rank)))
            built.step()


def _check_methods(rank: int, stage: int) -> None:
    built = _engine(stage)
    assert (built.zero_optimization(), built.zero_optimization_stage()) == (stage > 0, stage)
    shards = built.zero_optimization_partition_gradients(), built.zero_optimization_partition_weights()
    assert shards == (stage >= 2, stage >= 3)
    assert (built.global_rank, built.world_size, built.dp_world_size, built.mp_world_size) == (rank, 2, 2, 1)
    assert (built.fp16_enabled(), built.bfloat16_enabled(), built.torch_autocast_enabled()) == (False, False, False)
    assert (built.gradient_clipping(), built.get_batch_info()) == (1.0, (12, 2, 3))
    assert (built.optimizer_name(), built.optimizer_params(), built.scheduler_name()) == (
        "AdamW", {"lr": 1e-2}, "WarmupLR"
    )  # fmt: skip
    assert built.config["zero_optimization"]["stage"] == stage
    assert built.get_data_types() == (torch.float32, torch.float32)
    _train(built, rank, 2)
    assert (built.global_steps, built.global_samples, built.optimizer.overflow) == (2, 24, False)
    assert (built.get_data_parallel_rank(), built.get_model_parallel_rank(), built.dynamic_loss_scale()) == (
        rank,
        0,
        False,
    )
    assert (built.zero_offload_optimizer(), built.zero_offload_param()) == (None, None)
    built.set_lr(0.25)
    assert built.get_lr() == [0.25]
    assert isinstance(built.client_optimizer, torch.optim.AdamW)
    built.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_answers_what_scripts_ask(stage: int) -> None:
    run_ranks(2, _check_methods, stage)


def _check_batch_sizes(rank: int) -> None:
    """The weights get a gradient of one for each sample: a step of SGD shows by what it was divided."""
    model = nn.Linear(8, 1, bias=False)
    nn.init.zeros_(model.weight)
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    built = _engine(2, model, optimizer=sgd, gradient_clipping=0, scheduler={}, train_micro_batch_size_per_gpu=1)
    built.set_train_batch_size(8)
    assert built.get_batch_info() == (8, 1, 4)
    assert built.global_samples == 0
    for micro in range(4):
        assert built.is_gradient_accumulation_boundary() == (micro == 3)
        built(torch.full((1, 8), float(micro))).sum().backward()
        built.step()
    assert torch.equal(built.module_state_dict()["weight"], torch.full((1, 8), -1.5))
    built.set_train_micro_batch_size(2)
    assert built.global_samples == 8, "those of the steps so far"
    assert built.get_batch_info() == (16, 2, 4)
    with pytest.raises(ConfigError, match="train_batch_size must be a positive multiple of 4: 6"):
        built.set_train_batch_size(6)
    built.destroy()


def test_batch_sizes_can_be_changed() -> None:
    run_ranks(2, _check_batch_sizes)


def _check_attributes(rank: int) -> None:
    before = set(vars(nn.Parameter))
    parameters.add_attributes()
    try:
        model = new_model(torch.float32)
        values = {name: param.detach().clone() for name, param in model.named_parameters()}
        assert not hasattr(model.wte.weight, "ds_id")
        built = _engine(3, model, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 100})
        numbers = set()
        for name, param in model.named_parameters():
            is_small = values[name].numel() < 100
            expected = parameters.ZeroParamStatus.AVAILABLE if is_small else parameters.ZeroParamStatus.NOT_AVAILABLE
            assert param.ds_status == expected, name
            assert (param.ds_shape, param.ds_numel) == (values[name].shape, values[name].numel())
            assert parameters.is_zero_param(param)
            numbers.add(param.ds_id)
            assert param.ds_id == param.ds_id
            with zero.GatheredParameters(param):
                assert param.ds_status == parameters.ZeroParamStatus.AVAILABLE
            if not is_small:  # the ranks' parts, one after the other, are the parameter
                assert param.ds_tensor.ds_numel == param.ds_tensor.numel()
                sizes = torch.tensor([param.ds_tensor.numel()])
                torch.distributed.all_reduce(sizes)
                assert sizes.item() == values[name].numel()
                flat = values[name].flatten()
                own = param.ds_tensor
                first = 0 if rank == 0 else flat.numel() - own.numel()
                assert torch.equal(own, flat[first : first + own.numel()])
        assert len(numbers) == len(values)
        built.destroy()
    finally:
        for name in set(vars(nn.Parameter)) - before:
            delattr(nn.Parameter, name)


def test_parameters_have_deepspeeds_attributes_at_stage_3() -> None:
    run_ranks(2, _check_attributes)


def _check_custom_load(rank: int, stage: int, folder: str) -> None:
    built = _engine(stage)
    _train(built, rank, 2)
    built.save_checkpoint(folder, tag="a")
    saved = {name: value.clone() for name, value in built.module_state_dict().items()}
    _train(built, rank, 1)
    seen = []

    def load(src: dict[str, Tensor], dst: nn.Module) -> None:
        seen.extend(src)
        dst.load_state_dict({name: 2 * value for name, value in src.items()})

    path, _ = built.load_checkpoint(folder, "a", custom_load_fn=load)
    assert path is not None
    assert seen
    now = built.module_state_dict()
    assert set(now) == set(saved)
    for name, value in saved.items():
        assert torch.equal(now[name], 2 * value), name
    assert built.global_steps == 2
    built.load_module_state_dict({"module": saved if rank == 0 else {}})
    for name, value in built.module_state_dict().items():
        assert torch.equal(value, saved[name])
    built.destroy()
    if rank == 0:  # the same weights from the files, tied ones under both names
        read = checkpoint_files.get_fp32_state_dict_from_zero_checkpoint(folder, "a")
        assert set(read) == set(saved)
        assert all(torch.equal(read[name], value) for name, value in saved.items())
        plain = checkpoint_files.load_state_dict_from_zero_checkpoint(new_model(torch.float32), folder, "a")
        assert all(torch.equal(value, saved[name]) for name, value in plain.state_dict().items())
        checkpoint_files.convert_zero_checkpoint_to_fp32_state_dict(folder, f"{folder}/out", tag="a")
        written = torch.load(f"{folder}/out/pytorch_model.bin")
        assert all(torch.equal(written[name], value) for name, value in saved.items())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_is_loaded_by_a_function_of_the_user(stage: int, tmp_path: Path) -> None:
    run_ranks(2, _check_custom_load, stage, str(tmp_path))


def _check_frozen_left_out(rank: int, folder: str) -> None:
    model = new_model(torch.float32)
    model.position.requires_grad_(requires_grad=False)
    built = _engine(2, model)
    assert "position" not in built.module_state_dict(exclude_frozen_parameters=True)
    assert "position" in built.module_state_dict()
    built.save_checkpoint(folder, tag="a")
    built.destroy()
    read = checkpoint_files.get_fp32_state_dict_from_zero_checkpoint(folder, "a", exclude_frozen_parameters=True)
    assert set(model.state_dict()) - set(read) == {"position"}


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    run_ranks(2, _check_frozen_left_out, str(tmp_path))


def _check_config_of_args(rank: int, path: str) -> None:
    args = argparse.Namespace(deepspeed_config=path, local_rank=0)
    built, *_ = engine.initialize(args, new_model(torch.float32))
    assert isinstance(built, engine.DeepSpeedEngine)
    assert built.gradient_clipping() == 1.0
    built.destroy()


def test_a_configuration_file_of_the_arguments(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**CONFIG, "zero_optimization": {"stage": 1}}))
    run_ranks(2, _check_config_of_args, str(path))


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "FusedAdam": (lambda p: optimizers.FusedAdam(p, 1e-2, True, (0.8, 0.9), 1e-6, True, 0.1), torch.optim.AdamW),
    "FusedAdam, L2": (lambda p: optimizers.FusedAdam(p, 1e-2, True, (0.8, 0.9), 1e-6, False, 0.1), torch.optim.Adam),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_adam_is_torchs(name: str) -> None:
    build, torchs = OPTIMIZERS[name]
    first = [torch.nn.Parameter(torch.arange(5.0))]
    second = copy.deepcopy(first)
    ours, theirs = build(first), torchs(second, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for step in range(5):
        for one, params in ((ours, first), (theirs, second)):
            params[0].grad = torch.full((5,), step - 1.5)
            one.step()
    assert torch.equal(first[0], second[0])


def _check_positional_host_optimizers(rank: int) -> None:
    for build in (
        lambda p: optimizers.DeepSpeedCPUAdam(p, 1e-2, True, (0.8, 0.9), 1e-6, 0.1, False, False),
        lambda p: optimizers.DeepSpeedCPUAdagrad(p, 1e-2, 1e-6, 0.1),
        lambda p: optimizers.DeepSpeedCPULion(p, 1e-2, (0.8, 0.9), 0.1),
    ):
        model = new_model(torch.float32)
        before = model.wte.weight.detach().clone()
        config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
        built, *_ = engine.initialize(model=model, optimizer=build(model.parameters()), config=config)
        built.backward(loss_of(built, *batch(0, 0, rank)))
        built.step()
        assert not torch.equal(model.wte.weight, before)
        built.destroy()


def test_host_optimizers_take_deepspeeds_arguments_by_position() -> None:
    run_ranks(2, _check_positional_host_optimizers)
    with pytest.raises(ConfigError, match="FusedAdam here is torch's, with bias correction"):
        optimizers.FusedAdam([nn.Parameter(torch.ones(1))], bias_correction=False)
    group = optimizers.DeepSpeedCPUAdam([nn.Parameter(torch.ones(1))], 1e-2, True, (0.8, 0.9), 1e-6, 0.1).param_groups[
        0
    ]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-2, (0.8, 0.9), 1e-6, 0.1)


def _check_what_deepspeeds_tests_read(rank: int, stage: int) -> None:
    model = new_model(torch.float32)
    frozen, *trained = model.parameters()
    frozen.requires_grad = False
    built = _engine(stage, model)
    optimizer = cast("engine.DeepSpeedOptimizer", built.optimizer)
    assert not optimizer.needs_scaler()
    assert isinstance(built.optimizer, engine.DeepSpeedZeroOptimizer) == (stage in (1, 2))
    assert isinstance(built.optimizer, engine.DeepSpeedZeroOptimizer_Stage3) == (stage == 3)
    for _ in range(built.gradient_accumulation_steps()):
        built.backward(loss_of(built, *batch(0, 0, rank)))
        built._backward_epilogue()
        if not built.is_gradient_accumulation_boundary():
            built.step()
    before = [zero.utils.safe_get_full_grad(param) for param in trained]
    parameters.safe_update_full_grad_vectorized(model.parameters(), lambda grad, _: grad * 2)
    for param, grad in zip(trained, before, strict=True):
        assert grad is not None
        assert torch.equal(zero.utils.safe_get_full_grad(param), grad * 2)  # type: ignore[arg-type]
        assert parameters.safe_get_full_fp32_param(param) is not None
    assert parameters.safe_get_full_fp32_param(frozen) is None
    assert parameters.safe_get_local_fp32_param(frozen) is None
    built.step()
    assert optimizer.num_boundaries == optimizer.loss_scaler.cur_iter == 1
    assert sum(part.numel() for part in optimizer.fp32_partitioned_groups_flat) > 0
    built.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_what_deepspeeds_own_tests_read(stage: int) -> None:
    run_ranks(2, _check_what_deepspeeds_tests_read, stage)


def test_what_a_configuration_builds_is_of_deepspeeds_class() -> None:
    params = [nn.Parameter(torch.ones(2))]
    assert isinstance(torch.optim.AdamW(params), optimizers.FusedAdam)
    assert isinstance(zero.Lion(params), optimizers.FusedLion)
    assert isinstance(zero.CPUAdam(params), optimizers.DeepSpeedCPUAdam)
    assert not isinstance(torch.optim.SGD(params), optimizers.FusedAdam)
    own = type("Own", (optimizers.DeepSpeedCPUAdam,), {})
    assert isinstance(own(params), own)
    assert not isinstance(zero.CPUAdam(params), own)


def test_lamb_takes_deepspeeds_arguments() -> None:
    values = []
    for build in (
        lambda params: optimizers.FusedLamb(params, 0.1, False, (0.8, 0.9), 1e-6, False, 0.1, 0.0, 5.0, 0.02),
        lambda params: zero.Lamb(
            params, 0.1, (0.8, 0.9), 1e-6, 0.1, bias_correction=False, max_coeff=5.0, min_coeff=0.02
        ),
    ):
        param = nn.Parameter(torch.arange(1.0, 5.0))
        optimizer = build([param])
        for step in range(3):
            param.grad = torch.sin(torch.arange(4.0) + step)
            optimizer.step()
        values.append(param.detach())
    assert torch.equal(*values)
    assert not torch.equal(values[0], torch.arange(1.0, 5.0))
    with pytest.raises(ConfigError, match="clip by gradient_clipping"):
        optimizers.FusedLamb([param], max_grad_norm=1.0)


def _check_monitor(rank: int, folder: Path) -> None:
    built = _engine(2, csv_monitor={"enabled": True, "output_path": str(folder), "job_name": "job"})
    monitor = built.monitor
    assert isinstance(monitor, monitors.MonitorMaster)
    assert (monitor.enabled, monitor.tb_monitor) == (True, None)
    assert (monitor.csv_monitor is None) == (rank > 0)
    if rank == 0:
        monitor.csv_monitor.write_events([("own", 2.5, 1)])
    _train(built, rank, 1)
    built.destroy()
    assert monitor.csv_monitor is None


def test_the_monitor_of_an_engine_has_those_of_its_sections(tmp_path: Path) -> None:
    run_ranks(2, _check_monitor, tmp_path)
    assert (tmp_path / "job" / "own.csv").read_text().split() == ["step,own", "1,2.5"]
    assert (tmp_path / "job" / "Train_Samples_train_loss.csv").exists()


def _check_private_names(rank: int) -> None:
    built = _engine(2, nn.Linear(8, 4), gradient_clipping=0.5)
    private: Any = built._config
    assert private.compile_config.deepcompile is False
    assert (private.zero_config.stage, private.zero_enabled, private.gradient_clipping) == (2, True, 0.5)
    with pytest.raises(AttributeError):
        _ = private.compile_confg
    with pytest.raises(AttributeError, match="gradient_clipping=1e-09: a configuration cannot be changed"):
        private.gradient_clipping = 1e-9
    built.destroy()


def test_the_private_configuration_of_an_engine_has_what_scripts_read() -> None:
    run_ranks(1, _check_private_names)


def test_a_configuration_has_solved_batch_sizes_and_monitors() -> None:
    config = sections.DeepSpeedConfig({"train_batch_size": 64, "csv_monitor": {"enabled": True}})
    sizes = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    assert sizes == (64, 64, 1)
    assert config.monitor_config.csv_monitor.enabled
    assert not config.monitor_config.wandb.enabled


def _check_scaling(rank: int) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 7, "min_loss_scale": 2.0}
    built = _engine(1, nn.Linear(8, 4), fp16=fp16)
    optimizer = cast("engine.DeepSpeedOptimizer", built.optimizer)
    scaler = optimizer.loss_scaler
    assert (scaler.cur_scale, scaler.scale_window, scaler.scale_factor, scaler.min_scale) == (16.0, 7, 2.0, 2.0)
    x = torch.ones(2, 8, dtype=torch.float16)
    with pytest.raises(AssertionError, match=r"loss must be a scalar tensor with a graph: shape=\(2, 4\)"):
        built.scale(built(x))
    with pytest.raises(engine.LossError):
        built.scale(torch.ones(()))
    for _ in range(2):
        built.scale(built(x).sum()).backward()
        built.step()
    built.scale(built(x).sum() * float("inf" if rank else 1.0)).backward()
    optimizer.check_overflow()
    assert optimizer.overflow
    built.step()
    assert (built.skipped_steps, optimizer.overflow) == (1, True)
    built.destroy()


def test_the_loss_scale_by_deepspeeds_names() -> None:
    run_ranks(2, _check_scaling)


def _check_coalesced(rank: int, stage: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(1, 8)
    found = []
    for is_coalesced in (False, True):
        model = nn.Linear(8, 1, bias=False)
        model.weight.data.copy_(values)
        built = _engine(stage, model, gradient_accumulation_steps=1, optimizer={"type": "SGD", "params": {"lr": 1.0}})
        x = torch.arange(8.0).view(1, 8) * (rank + 1)
        if is_coalesced:
            with built.coalesce_grad_reduction():
                for factor in (1, 2):
                    built.backward(built(x * factor).square().sum())
        else:
            built.backward(built(x).square().sum() + built(x * 2).square().sum())
        grad = zero.utils.safe_get_full_grad(model.weight)
        assert grad is not None
        built.step()
        with zero.GatheredParameters(model.weight):
            found.append((grad.clone(), model.weight.detach().clone()))
        built.destroy()
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_gradients_of_several_backwards_are_reduced_once(stage: int) -> None:
    run_ranks(2, _check_coalesced, stage)


def _check_samples(rank: int) -> None:
    built = _engine(2, nn.Linear(8, 1), managed_gradient_accumulation=False)
    for count in (1, 4):
        for _ in range(count):
            built.backward(built(torch.ones(2, 8)).sum())
        built.step()
    assert (built.global_steps, built.global_samples) == (2, 5 * 2 * 2)
    built.destroy()


def test_samples_are_those_of_the_backwards_where_the_user_decides_when_to_step() -> None:
    run_ranks(2, _check_samples)


def _check_loaders(rank: int) -> None:
    built = _engine(1, nn.Linear(1, 1))
    data = torch.arange(12.0).unsqueeze(1)
    ordered = built.deepspeed_io(data, route="eval")
    assert torch.cat(list(ordered)).flatten().tolist() == [float(n) for n in range(rank, 12, 2)]
    train = built.deepspeed_io(data, batch_size=3, num_local_io_workers=1)
    assert (train.loader.num_workers, train.loader.pin_memory, len(train)) == (1, torch.cuda.is_available(), 2)
    sampled = built.deepspeed_io(data, data_sampler=[3, 1], pin_memory=False)
    assert torch.cat(list(sampled)).flatten().tolist() == [3.0, 1.0]
    built.destroy()


def test_a_dataloader_is_made_as_asked() -> None:
    run_ranks(2, _check_loaders)


def test_a_universal_checkpoint_is_a_copy(tmp_path: Path) -> None:
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / "shard").write_bytes(b"weights")
    given = argparse.Namespace(input_folder=str(tmp_path / "tag"), output_folder=str(tmp_path / "tag_universal"))
    checkpoint_files.convert_to_universal(given)
    assert (tmp_path / "tag_universal" / "shard").read_bytes() == b"weights"


def _check_folder_of_files(rank: int, folder: str) -> None:
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    built = engine.initialize(
        None, new_model(torch.float32), config={**CONFIG, "zero_optimization": {"stage": 2, **offload}}
    ).engine
    assert Path(folder).is_dir()
    built.destroy()


def test_the_folder_for_files_is_made(tmp_path: Path) -> None:
    run_ranks(2, _check_folder_of_files, str(tmp_path / "not" / "there"))
    kept = tmp_path / "unused"
    sections.make_folders(
        engine.DeepSpeedEngine.read_config(
            {"zero_optimization": {"offload_param": {"device": "cpu", "nvme_path": str(kept)}}}
        )
    )
    assert not kept.exists()


def _values(model: nn.Module) -> list[Tensor]:
    with zero.GatheredParameters(model.parameters()):
        return [param.detach().clone() for param in model.parameters()]


def _check_initialized_again(rank: int, stage: int) -> None:
    model, other = new_model(torch.float32), new_model(torch.float32)
    first = _engine(stage, model)
    _train(first, rank, 2)
    trained = _values(model)
    second = _engine(stage, model)
    for got, expected, param in zip(_values(model), trained, other.parameters(), strict=True):
        assert torch.equal(got, expected)
        param.data.copy_(expected)
    with pytest.raises(StateError):
        _train(first, rank, 1)
    fresh = _engine(stage, other)
    for built in (second, fresh):
        _train(built, rank, 2)
    for got, expected in zip(_values(model), _values(other), strict=True):
        assert torch.equal(got, expected)
    second.destroy()
    fresh.destroy()
    evaluated = new_model(torch.float32)
    for _ in range(2):  # without an optimizer: what was frozen trains after it
        built = engine.initialize(None, evaluated, config={"train_batch_size": 2}).engine
        assert not any(param.requires_grad for param in evaluated.parameters())
    built.destroy()
    assert all(param.requires_grad for param in evaluated.parameters())


def _check_initialized_after_dropping(rank: int, stage: int) -> None:
    """Scripts drop an engine instead of destroying it; what still refers to it differs between ranks."""
    model = new_model(torch.float32)
    first = _engine(stage, model)
    _train(first, rank, 1)
    kept = [first] if rank == 0 else []
    del first
    second = _engine(stage, model)
    _train(second, rank, 1)
    second.destroy()
    last = ref(second)
    del second, kept
    gc.collect()
    assert last() is None


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_can_be_initialized_after_its_engine_was_dropped(stage: int) -> None:
    run_ranks(2, _check_initialized_after_dropping, stage)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_can_be_initialized_again(stage: int) -> None:
    run_ranks(2, _check_initialized_again, stage)


def test_operators_are_named_and_none_is_built() -> None:
    assert op_builders.__compatible_ops__[op_builders.CPUAdamBuilder.NAME]
    assert not op_builders.QuantizerBuilder().is_compatible()
    with pytest.raises(zero.NotAvailableError, match="nothing has to be built"):
        op_builders.CPUAdamBuilder().load()


def test_schedules_are_those_of_the_configuration() -> None:
    assert set(spellings.VALID_LR_SCHEDULES) == set(lr_schedulers.SCHEDULERS)


def test_a_function_wins_over_a_module_of_its_name() -> None:
    parent = door.CompatModule("deepspeed.utils", "utils")
    parent.z3_leaf_module = door.CompatModule("deepspeed.utils.z3_leaf_module", "utils.z3_leaf_module")
    assert parent.z3_leaf_module is zero.utils.z3_leaf_module
