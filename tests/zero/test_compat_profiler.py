"""DeepSpeed's profiler of operations, counted by hand, and the base class of its configurations."""

# covers zero/compat/flops_profiler.py zero/compat/config_model.py zero/_runtime/forward_profile.py zero/reports.py

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero
from tests.ranks import run_ranks
from tests.zero.training import zero_optimizer
from zcomm import ConfigError, StateError
from zero.compat import config_model
from zero.compat import engine as compat_engine
from zero.compat.flops_profiler import FlopsProfiler, get_model_profile, macs_to_string, number_to_string

MACS = {"0": 5 * 8 * 16, "2": 5 * 16 * 4}


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def test_forward_alone_is_counted_and_each_profile_starts_from_zero() -> None:
    model = _model()
    profiler = FlopsProfiler(model)
    profiler.start_profile()  # begun again below, which counts once
    for _ in range(2):
        profiler.start_profile()
        model(torch.ones(5, 8)).sum().backward()
        assert profiler.get_total_macs() == sum(MACS.values())
        model(torch.ones(5, 8))
        profiler.stop_profile()
        model(torch.ones(5, 8))
        assert profiler.get_total_flops() == 4 * sum(MACS.values())
        assert profiler.get_total_params() == 8 * 16 + 16 + 16 * 4 + 4
        assert 0 < profiler.get_total_duration() < 60
        profiler.end_profile()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    with pytest.raises(StateError, match="start_profile"):
        profiler.get_total_flops()


def test_a_forward_that_raises_ends_its_count() -> None:
    model = _model()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with pytest.raises(RuntimeError):
        model(torch.ones(5, 9))
    torch.ones(8, 8) @ torch.ones(8, 8)
    model(torch.ones(5, 8))
    assert profiler.get_total_macs() == sum(MACS.values())
    profiler.stop_profile()  # else compiled code of other tests would not be compiled


def test_a_model_that_calls_itself_is_counted_once() -> None:
    class Recursive(nn.Linear):
        def forward(self, x: Tensor, *, again: bool = True) -> Tensor:
            return super().forward(self(x, again=False) if again else x)

    assert get_model_profile(Recursive(6, 6), (1, 6), print_profile=False, as_string=False)[1] == 2 * 36


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = get_model_profile(_model(), args=[torch.ones(5, 8)])
    assert found == ("1.92 K", "960 MACs", "212 ")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Flops profiler, step 1: 212  parameters, forward: 960 MACs, 1.92 KFLOPs, ")
    assert lines[1:3] == ["depth 0, top 1: Sequential 960 MACs", "depth 1, top 1: Linear 960 MACs"]
    assert lines[4] == "  0 (Linear): 144 , 640 MACs, 66.67%"
    assert len(lines) == 7
    get_model_profile(_model(), (5, 8), module_depth=0, output_file=str(tmp_path / "a" / "b"))
    assert len((tmp_path / "a" / "b").read_text().splitlines()) == 3
    get_model_profile(_model(), (5, 8), top_modules=2, detailed=False)
    assert capsys.readouterr().out.splitlines()[2:] == ["depth 1, top 2: Linear 960 MACs, ReLU 0 MACs"]
    assert [number_to_string(number) for number in (0, 2e9, 0.0025)] == ["0 ", "2 G", "2.5 m"]
    assert macs_to_string(3e12) == "3 TMACs"


def test_arguments_that_cannot_be_served() -> None:
    with pytest.raises(ConfigError, match="needs input_shape"):
        get_model_profile(_model())
    with pytest.raises(ConfigError, match="got 'generate'"):
        get_model_profile(_model(), (5, 8), mode="generate")
    with pytest.raises(ConfigError, match="ignore_list"):
        get_model_profile(_model(), (5, 8), ignore_modules=[nn.ReLU])


def _check_stage_3(rank: int) -> None:
    model = _model()
    with zero_optimizer(model, stage=3):
        profiler = FlopsProfiler(model)
        profiler.start_profile()
        model(torch.ones(5, 8)).sum().backward()
        assert (profiler.get_total_macs(), profiler.get_total_params()) == (sum(MACS.values()), 212)
        profiler.stop_profile()


def test_a_sharded_model_is_counted_as_a_full_one() -> None:
    run_ranks(2, _check_stage_3)


class _Products(nn.Module):
    """Not torch's own module, which torch.compile would leave as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _model()

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.inner(values)
        return result


def test_compiled_code_is_counted_and_is_compiled_after_it() -> None:
    num_graphs = 0

    def compiler(graph: Any, inputs: Any) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    model = _Products()
    model.compile(backend=compiler)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(5, 8))
    profiler.stop_profile()
    assert (profiler.get_total_macs(), num_graphs) == (sum(MACS.values()), 0)
    model(torch.ones(5, 8))
    assert num_graphs == 1


def test_profiles_that_end_in_the_order_they_began_leave_the_compiler_on() -> None:
    first, second = FlopsProfiler(_model()), FlopsProfiler(_model())
    compiled: list[int] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        compiled.append(len(compiled))
        return graph.forward

    model = _Products()
    model.compile(backend=compiler)
    first.start_profile()
    second.start_profile()
    first.stop_profile()
    model(torch.ones(5, 8))
    assert not compiled, "the second is still counting"
    second.stop_profile()
    model(torch.ones(5, 8))
    assert len(compiled) == 1


def test_a_profile_that_stops_within_a_forward_counts_nothing_after_it() -> None:
    """Ctrl-C ends a forward without its hooks, too."""
    model = _model()
    profiler = FlopsProfiler(model)
    model[1].register_forward_hook(lambda *_: profiler.stop_profile())
    profiler.start_profile()
    model(torch.ones(5, 8))
    assert profiler.get_total_macs() == MACS["0"]
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def _check_section(rank: int, door: str, path: str) -> None:
    through_door = door == "door"
    initialize = compat_engine.initialize if through_door else zero.initialize
    section = {"enabled": True, "profile_step": 1, "module_depth": 0, "detailed": False, "output_file": path}
    config = {
        "train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW"}, "flops_profiler": section,
    }  # fmt: skip
    engine = initialize(model=_model(), config=config)[0]
    file = Path(path)
    for micro in range(6):  # three steps
        assert file.exists() == (micro >= 4 and not through_door), micro
        engine.backward(engine(torch.ones(5, 8)).sum())
        engine.step()
        dist.barrier()
        if through_door and rank == 0:
            assert engine.flops_profiler.macs == (960 if micro >= 2 else 0)
            assert engine.flops_profiler.params == 212
    engine.destroy()


@pytest.mark.parametrize("door", ["door", "native"])
def test_the_section_writes_the_last_forward_of_a_step(door: str, tmp_path: Path) -> None:
    """A path that cannot be written is a warning: other ranks train on."""
    path = tmp_path / "made" / "profile"
    if door == "door":
        (tmp_path / "made").write_text("no folder")
    run_ranks(2, _check_section, door, str(path))
    if door == "native":
        first, second = path.read_text().splitlines()
        assert first.startswith("Flops profiler, step 1: 212  parameters, forward: 960 MACs, ")
        assert second == "depth 0, top 1: Sequential 960 MACs"


def _check_no_forward(rank: int, path: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 5, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW"}, "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": path},
    }  # fmt: skip
    engine = zero.initialize(model=_model(), config=config)[0]
    with patch.object(logging.getLogger("zero"), "warning") as warned:
        for _ in range(3):
            engine.backward(engine.module(torch.ones(5, 8)).sum())
            engine.step()
    assert [call.args[1] for call in warned.call_args_list if "no forward" in call.args[0]] == [1] * (rank == 0)
    engine.destroy()


def test_a_step_without_a_forward_of_the_engine_is_no_profile_of_zeros(tmp_path: Path) -> None:
    run_ranks(2, _check_no_forward, str(tmp_path / "profile"))
    assert not (tmp_path / "profile").exists()


def test_configurations_derive_from_the_base_class() -> None:
    pydantic = pytest.importorskip("pydantic")
    moved = {"deprecated": True, "new_param": "inner.size", "new_param_fn": int}

    class Inner(config_model.DeepSpeedConfigModel):
        size: int = 0

    class Outer(config_model.DeepSpeedConfigModel):
        inner: Inner = Inner()
        old_size: str = pydantic.Field("0", json_schema_extra=moved)
        dtype: torch.dtype = torch.float32

    assert (Outer().inner.size, Outer(dtype="auto").dtype) == (0, torch.float32)
    assert Outer(inner={"size": 3}).inner.size == 3
    with patch.object(config_model.logger, "warning") as warned:
        assert Outer(inner={}, old_size="4").inner.size == 4
    text, *values = warned.call_args.args
    assert "old_size is deprecated: use inner.size" in text % tuple(values)
    with pytest.raises(ConfigError, match="give one of them"):
        Outer(inner={"size": 3}, old_size="4")
    for given in ({"nonsense": 1}, {"inner": {"size": "x"}}, {"strict": True, "dtype": "auto"}):
        with pytest.raises(pydantic.ValidationError):
            Outer(**given)
    assert config_model.get_scalar_param({"a": 1}, "b", 2) == 2
