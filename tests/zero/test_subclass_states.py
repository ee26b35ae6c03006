"""Moments in 8 bits, as tensor subclasses and with tables beside them: trained, saved and loaded, moved, refused."""

# covers zero/_optim/subclass_states.py zero/_optim/elementwise_check.py zero/_checkpoint/json_tree.py

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import zero
from tests.ranks import run_ranks
from tests.zero.training import full_values, zero_optimizer
from zcomm import ConfigError, StateError
from zero._optim import subclass_states
from zero.errors import CheckpointError

BLOCK = 256


class Coded(Tensor):
    """Floats in 8 bits: rounded codes, and a scale for each block."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, levels: int) -> Coded:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Tensor, scales: Tensor, levels: int) -> None:
        self.codes, self.scales, self.levels = codes, scales, levels

    @classmethod
    def of(cls, values: Tensor) -> Coded:
        blocks = values.view(-1, BLOCK)
        scales = blocks.abs().amax(1).clamp(min=1e-12)
        return cls((blocks / scales[:, None] * 127).round().to(torch.int8).view(values.shape), scales, 127)

    def floats(self) -> Tensor:
        blocks = self.codes.view(-1, BLOCK).float() / self.levels
        return (blocks * self.scales[:, None]).view(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["codes", "scales"], self.levels

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], levels: int, shape: Any, stride: Any) -> Coded:
        assert tuple(shape) == parts["codes"].shape
        assert tuple(stride) == parts["codes"].stride()
        return cls(parts["codes"], parts["scales"], levels)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default):  # by load_state_dict
            return cls(args[0].codes, args[0].scales, args[0].levels)
        raise NotImplementedError(func)


class CodedMomentum(Optimizer):
    """SGD with momentum, in 8 bits for tensors that blocks fill."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    before = state.get("momentum", torch.zeros_like(param.grad))
                    after = (before.floats() if isinstance(before, Coded) else before) * 0.9 + param.grad
                    is_large = after.numel() >= 4096 and after.numel() % BLOCK == 0
                    state["momentum"] = Coded.of(after) if is_large else after
                    param.sub_(after, alpha=float(group["lr"]))


def _class(name: str) -> type[Optimizer]:
    library, _, own = name.rpartition(".")
    return getattr(importlib.import_module(library), own) if library else CodedMomentum


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 48, bias=False), nn.Tanh(), nn.Linear(48, 128))


def _loss(model: nn.Module, step: int, samples: slice) -> Tensor:
    inputs = torch.randn(12, 64, generator=torch.Generator().manual_seed(step))
    return (model(inputs)[samples] - inputs.tile(1, 2)[samples]).square().mean()


def _train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    share, losses = 12 // dist.get_world_size(), list[float]()
    mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in steps:
        loss = _loss(model, step, mine if isinstance(optimizer, zero.ZeroOptimizer) else slice(None))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


def test_parts_that_do_not_fit_are_no_state() -> None:
    subclass_states.allow(Coded.of(torch.ones(2 * BLOCK)))
    parts = subclass_states.apart(Coded.of(torch.ones(2 * BLOCK)))
    assert torch.equal(subclass_states.joined(parts).floats(), torch.ones(2 * BLOCK))
    tensors = parts["tensors"]
    for damage in (
        {"shape": [BLOCK]},
        {"tensors": {"codes": tensors["codes"]}},
        {"tensors": {**tensors, "more": tensors["codes"]}},
        {"context": None, "tensors": {**tensors, "scales": None}},
    ):
        with pytest.raises(CheckpointError, match=r"Coded (do not fit together|has other parts)"):
            subclass_states.joined({**parts, **damage})


NAMES = ["", "torchao.optim.AdamW8bit", "torchao.optim.Adam4bit", "bitsandbytes.optim.AdamW8bit"]


def _check_training(rank: int, name: str, device: str, folder: str) -> None:
    cls, steps = _class(name), range(4)
    with torch.compiler.set_stance("force_eager"):
        plain = _model()
        optimizer = cls(plain.parameters(), lr=0.01)
        start = torch.cat([param.detach().reshape(-1) for param in plain.parameters()]).clone()
        _train(plain, optimizer, steps)
        offload = {"offload_optimizer": {"device": device}}
        for stage in (1, 3):
            model = _model()
            with zero_optimizer(model, cls(model.parameters(), lr=0.01), stage=stage, **offload) as sharded:
                _train(model, sharded, steps)
                zero.save_checkpoint(sharded, folder, f"{stage}")
                got = torch.cat([value.reshape(-1) for value in full_values(model).values()])
                held = sum(of.states for of in sharded.bytes_by_parameter().values())
                expected = _train(model, sharded, steps)
            wanted = torch.cat([param.detach().reshape(-1) for param in plain.parameters()])
            # Sums of gradients differ in their last bits, which may move a code.
            assert (got - wanted).norm() < 0.01 * (wanted - start).norm()
            total = torch.tensor(held)
            dist.all_reduce(total)
            assert 0 < total < 0.6 * 4 * wanted.numel() * (1 if name == "" else 2)
            for other in (0, 2):
                model = _model()
                with zero_optimizer(model, cls(model.parameters(), lr=0.01), stage=other) as sharded:
                    zero.load_checkpoint(sharded, folder, f"{stage}")
                    assert _train(model, sharded, steps) == expected or other == 0


@pytest.mark.parametrize("device", ["none", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_training_saves_and_loads(name: str, device: str, tmp_path: Path) -> None:
    pytest.importorskip(name.partition(".")[0] or "torch")
    run_ranks(2, _check_training, name, device, str(tmp_path))


def _save(rank: int, folder: str) -> None:
    model = _model()
    with zero_optimizer(model, CodedMomentum(model.parameters()), stage=3) as optimizer:
        _train(model, optimizer, range(2))
        zero.save_checkpoint(optimizer, folder, "saved")


def _load(rank: int, folder: str) -> None:
    model = _model()
    with zero_optimizer(model, CodedMomentum(model.parameters()), stage=2) as optimizer:
        zero.load_checkpoint(optimizer, folder, "saved")
        for state in optimizer.parts.inner.state.values():
            numel = state["momentum"].numel()
            assert type(state["momentum"]) is (Coded if numel >= 4096 and numel % BLOCK == 0 else Tensor)
    subclass_states._known.clear()  # as in a process of its own
    model = _model()
    with (
        zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2) as optimizer,
        pytest.raises(CheckpointError, match="Coded"),
    ):
        zero.load_checkpoint(optimizer, folder, "saved")


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_numbers_of_ranks_and_optimizers_that_have_no_such_states(world_size: int, tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path))
    run_ranks(world_size, _load, str(tmp_path))


def _check_refusals(rank: int, name: str, folder: str) -> None:
    cls, model = _class(name), _model()
    files = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    with pytest.raises(ConfigError, match=r"of large tensors in fewer bits.*use offload_optimizer.device 'cpu'"):
        zero_optimizer(model, cls(model.parameters(), lr=0.01), stage=3, **files).__enter__()
    model = _model()
    with zero_optimizer(model, cls(model.parameters(), lr=0.01), stage=3) as optimizer:
        with torch.compiler.set_stance("force_eager"):
            _train(model, optimizer, range(1))
        with pytest.raises(StateError, match="torch's helpers cannot gather"):
            get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_hold_them_says_so(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name.partition(".")[0] or "torch")
    run_ranks(2, _check_refusals, name, str(tmp_path))
