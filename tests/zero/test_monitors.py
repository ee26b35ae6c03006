"""Monitors write what DeepSpeed's do: names, samples and files, by the first rank alone, and cost nothing if off."""

# covers zero/_config/monitor_sections.py zero/_runtime/monitors.py zero/reports.py

from __future__ import annotations

import csv
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import run_ranks
from zcomm import BackendUnavailableError
from zero import initialize
from zero._config import parse
from zero._runtime.monitors import Monitor

MICRO, STEPS, BACKWARDS, RANKS = 3, 4, 2, 2
SAMPLES = [MICRO * BACKWARDS * RANKS * (step + 1) for step in range(STEPS)]
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"}}
RATES = [0.0, 0.01, 0.02, 0.03]  # after each step: the schedule has moved on


def _engine(**sections: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": BACKWARDS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "scheduler": WARMUP,
        "zero_optimization": {"stage": 3},
    }
    return initialize(model=nn.Linear(4, 1), config=config | sections).engine


def _train(engine: Any, rank: int) -> list[float]:
    """Mean losses of the steps, in float64."""
    means = []
    dtype = next(engine.parameters()).dtype
    for step in range(STEPS):
        losses = []
        for micro in range(BACKWARDS):
            x = torch.full((MICRO, 4), step + micro + 10.0 * rank, dtype=dtype)
            loss = engine(x).square().mean()
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        means.append(sum(losses) / BACKWARDS)
    return means


def _rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def _check_csv(rank: int, folder: str) -> None:
    root = Path(folder) / f"rank {rank}"
    section = {"enabled": True, "output_path": str(root), "job_name": "job"}
    fp16 = {"enabled": True, "loss_scale": 8.0}
    engine = _engine(csv_monitor=section, fp16=fp16)
    means = _train(engine, rank)
    assert engine.monitor.enabled
    engine.monitor.write_events([("Eval/my loss", torch.tensor(0.5), 7), ("plain", 2, 8)])
    engine.destroy()
    engine.monitor.write_events([("plain", 3, 9)])  # closed: ignored
    if rank:
        assert not root.exists()
        return
    assert sorted(path.name for path in (root / "job").iterdir()) == [
        "Eval_my_loss.csv", "Train_Samples_loss_scale.csv", "Train_Samples_lr.csv", "Train_Samples_train_loss.csv",
        "plain.csv",
    ]  # fmt: skip
    assert (root / "job" / "plain.csv").read_bytes() == b"step,plain\r\n8,2\r\n"
    assert _rows(root / "job" / "Eval_my_loss.csv") == [["step", "my loss"], ["7", "0.5"]]
    assert _rows(root / "job" / "Train_Samples_loss_scale.csv") == [["step", "loss_scale"]] + [
        [str(samples), "8.0"] for samples in SAMPLES
    ]
    for name, expected in (("lr", RATES), ("train_loss", means)):
        header, *rows = _rows(root / "job" / f"Train_Samples_{name}.csv")
        assert header == ["step", name]
        assert [int(samples) for samples, _ in rows] == SAMPLES
        assert [float(value) for _, value in rows] == pytest.approx(expected, rel=2e-3)  # losses are float16


def test_csv_files_are_deepspeeds_and_the_first_ranks(tmp_path: Path) -> None:
    run_ranks(RANKS, _check_csv, str(tmp_path))


def test_a_resumed_job_goes_on_in_its_csv_files(tmp_path: Path) -> None:
    config = parse({"csv_monitor": {"enabled": True, "output_path": str(tmp_path)}}, "dict").values
    for step in (1, 2):
        Monitor(config, is_first_rank=True).write_events([("a/b", step / 2, step)])
    assert _rows(tmp_path / "DeepSpeedJobName" / "a_b.csv") == [["step", "b"], ["1", "0.5"], ["2", "1.0"]]


class Recorder:
    """In place of tensorboard, wandb and comet_ml: calls by name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append((name, args, kwargs))
            return self

        return call

    def of(self, *names: str) -> list[tuple[Any, ...]]:
        return [(*args, *kwargs.values()) for name, args, kwargs in self.calls if name in names]


LIBRARIES = "torch.utils.tensorboard", "wandb", "comet_ml"


def _check_libraries(rank: int) -> None:
    board, wandb, comet = libraries = [Recorder() for _ in LIBRARIES]
    sections = {
        "tensorboard": {"enabled": True, "output_path": "out", "job_name": "job"},
        "wandb": {"enabled": True, "team": "t", "group": "g", "project": "p"},
        "comet": {"enabled": True, "samples_log_interval": SAMPLES[1], "experiment_name": "e", "project": "p"},
    }
    with mock.patch.dict(sys.modules, dict(zip(LIBRARIES, libraries, strict=True))):
        engine = _engine(wall_clock_breakdown=True, flops_profiler={"enabled": True}, **sections)
        means = _train(engine, rank)
        engine.destroy()
    if rank:
        assert [library.calls for library in libraries] == [[], [], []]
        return
    assert board.of("SummaryWriter") == [("out/job",)]
    assert board.calls[-1][0] == "close"
    assert [args[0] for args in board.of("add_scalar")[:6]] == [
        "Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/elapsed_time_ms_forward",
        "Train/Samples/elapsed_time_ms_backward", "Train/Samples/elapsed_time_ms_backward_allreduce",
        "Train/Samples/elapsed_time_ms_step",
    ]  # fmt: skip
    assert all(value > 0 for name, value, _ in board.of("add_scalar") if "elapsed" in name)
    losses = [args[1:] for args in board.of("add_scalar") if args[0] == "Train/Samples/train_loss"]
    assert losses == [(pytest.approx(mean), samples) for mean, samples in zip(means, SAMPLES, strict=True)]
    assert wandb.calls[0] == ("init", (), {"project": "p", "group": "g", "entity": "t"})
    sent = [(data["Train/Samples/lr"], step) for data, step in wandb.of("log") if "Train/Samples/lr" in data]
    assert sent == [(pytest.approx(lr), samples) for lr, samples in zip(RATES, SAMPLES, strict=True)]
    (start,) = (kwargs for name, _, kwargs in comet.calls if name == "start")
    assert {name: value for name, value in start.items() if value is not None} == {"project": "p"}
    assert comet.of("set_name") == [("e",)]
    sent = [args[1:] for args in comet.of("log_metric") if args[0] == "Train/Samples/lr"]
    assert sent == [(RATES[0], SAMPLES[0]), (pytest.approx(RATES[2]), SAMPLES[2])]  # not more often than the interval


def test_tensorboard_wandb_and_comet_get_each_step() -> None:
    run_ranks(RANKS, _check_libraries)


def _check_missing(rank: int) -> None:
    model = nn.Linear(4, 1)
    config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    hidden = mock.patch.dict(sys.modules, {"torch.utils.tensorboard": None} if rank == 0 else {})
    with hidden, pytest.raises(BackendUnavailableError, match=r"tensorboard.enabled needs .*install 'tensorboard'"):
        initialize(model=model, config=config | {"tensorboard": {"enabled": True}})
    assert model.weight.numel() == 4  # full, and free for another optimizer
    initialize(model=model, config=config | {"tensorboard": {"enabled": False}}).engine.destroy()


def test_a_missing_library_is_an_error_of_every_rank() -> None:
    run_ranks(RANKS, _check_missing)


def test_a_monitor_that_fails_is_logged_once_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    config = parse({"wandb": {"enabled": True}}, "dict").values
    broken = SimpleNamespace(init=mock.Mock(), log=mock.Mock(side_effect=OSError("disk full")))
    with mock.patch.dict(sys.modules, {"wandb": broken}), caplog.at_level(logging.WARNING, "zero"):
        monitor = Monitor(config, is_first_rank=True)
        for step in range(3):
            monitor.write_events([("a", 1.0, step)])
    assert broken.log.call_count == len(caplog.records) == 1
    assert not monitor.is_writing


class CountedReads(TorchDispatchMode):
    """Counts the tensors whose value the host reads, each a wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _reads(engine: Any) -> int:
    loss = engine(torch.ones(MICRO, 4)).square().mean()
    with CountedReads() as reads:
        engine.backward(loss)
        engine.step()
        engine.backward(engine(torch.ones(MICRO, 4)).square().mean())
        engine.step()
    engine.destroy()
    return reads.count


def _check_reads(rank: int, folder: str) -> None:
    section = {"enabled": True, "output_path": folder}
    detached: list[Tensor] = []
    plain = _engine()
    with mock.patch.object(plain._reports, "add_loss", detached.append):
        without = _reads(plain)
    assert len(detached) == BACKWARDS
    assert _reads(_engine()) == without
    assert _reads(_engine(csv_monitor=section)) == without + (rank == 0)  # one for each step


def test_losses_are_read_only_for_a_monitor(tmp_path: Path) -> None:
    run_ranks(RANKS, _check_reads, str(tmp_path))
