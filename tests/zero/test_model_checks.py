"""Models that would train wrongly are refused by name on every rank; similar ones that train correctly are accepted."""

# covers zero/_model/model_checks.py zero/_sharding/released.py

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.ranks import run_ranks, topology
from tests.zero.training import full_values, zero_optimizer
from zcomm import ConfigError, StateError
from zero import Init, ZeroOptimizer

WIDTH = 6


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _pair() -> Any:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _tied_by_data() -> nn.Module:
    model = _pair()
    model[2].weight.data = model[0].weight.data
    return model


def _overlapping() -> nn.Module:
    model, memory = _pair(), torch.randn(2 * WIDTH * WIDTH)
    model[0].weight.data = memory[: WIDTH * WIDTH].view(WIDTH, WIDTH)
    model[2].weight.data = memory[WIDTH : WIDTH + WIDTH * WIDTH].view(WIDTH, WIDTH)
    return model


def _transposed() -> nn.Module:
    model = _pair()
    model[2].weight.data = model[0].weight.data.t()
    return model


def _one_is_frozen() -> nn.Module:
    model = _tied_by_data()
    model[2].weight.requires_grad_(False)
    return model


def _buffer() -> nn.Module:
    model = _pair()
    model.register_buffer("view", model[0].bias.detach()[2:4])
    return model


def _expanded() -> nn.Module:
    model = _pair()
    model[0].bias = nn.Parameter(torch.ones(1).expand(WIDTH))
    return model


def _scripted() -> nn.Module:
    with _without_warnings():  # deprecated
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(nn.Linear(WIDTH, WIDTH)))


def _lazy() -> nn.Module:
    with _without_warnings():  # torch warns about "a new feature"
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(3))


def _lazy_buffer() -> nn.Module:
    with _without_warnings():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyBatchNorm1d(affine=False))


def _both(a: str, b: str) -> str:
    return rf"parameter '{a}' and (parameter|buffer) '{b}' share memory.*b\.weight = a\.weight.*param\.data\.clone\(\)"


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tied by data": (_tied_by_data, _both(r"0\.weight", r"2\.weight")),
    "overlapping": (_overlapping, _both(r"0\.weight", r"2\.weight")),
    "transposed": (_transposed, _both(r"0\.weight", r"2\.weight")),
    "one is frozen": (_one_is_frozen, _both(r"0\.weight", r"2\.weight")),
    "a buffer": (_buffer, _both(r"0\.bias", "view")),
    "expanded": (_expanded, r"the elements of parameter '0\.bias' share memory"),
    "scripted": (_scripted, "its module '1' is compiled by TorchScript"),
    "lazy": (_lazy, r"parameter '1\.weight' of a lazy module has no shape yet: call the model once"),
    "lazy buffer": (_lazy_buffer, r"buffer '1\.running_mean' of a lazy module"),
}


def _check_refused(rank: int, stage: int) -> None:
    for build, text in REFUSED.values():
        model = build()
        start = {name: param.data_ptr() for name, param in model.named_parameters() if not nn.parameter.is_lazy(param)}
        with pytest.raises(ConfigError, match=text):
            ZeroOptimizer(
                model, torch.optim.SGD, lr=0.1, stage=stage, topology=topology(torch.distributed.get_world_size())
            )
        assert start == {n: p.data_ptr() for n, p in model.named_parameters() if not nn.parameter.is_lazy(p)}
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "bf16": {"enabled": True},
              "zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 1}  # fmt: skip
    with pytest.raises(ConfigError, match="share memory"):
        zero.initialize(model=_tied_by_data(), config=config)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_refused_by_name(world_size: int, stage: int) -> None:
    run_ranks(world_size, _check_refused, stage)


class TiedInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight.data = self.a.weight.data


class TiedBefore(TiedInside):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(WIDTH, WIDTH)  # the others, which are not in use, are divided


class TiedItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(WIDTH))
        self.b = nn.Parameter(self.a.data)


def _check_refused_within_init(rank: int) -> None:
    inside = r"TiedInside\.a\.weight' and parameter 'TiedInside\.b\.weight' share memory"
    given = r"parameter 'Linear\.weight' was given memory of 'Linear'"
    cases = {TiedInside: inside, TiedBefore: given, TiedItself: _both(r"TiedItself\.a", r"TiedItself\.b")}
    for cls, text in cases.items():
        with pytest.raises(ConfigError, match=text), Init(ranks_per_node=2):
            nn.Sequential(cls(), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ConfigError, match=given), Init(ranks_per_node=2):
        _tied_by_data()
    whole = _tied_by_data()
    with pytest.raises(
        ConfigError, match=r"'Sequential\.0\.weight' and parameter 'Sequential\.2\.weight' share memory"
    ):
        Init(module=whole, ranks_per_node=2)


def test_tied_by_data_within_init() -> None:
    run_ranks(2, _check_refused_within_init)


def _columns() -> nn.Module:
    """Columns of one matrix: their extents overlap, their elements do not."""
    model, memory = _pair(), torch.randn(WIDTH, 2 * WIDTH, dtype=torch.float64)
    model[0].weight.data, model[2].weight.data = memory[:, :WIDTH], memory[:, WIDTH:]
    assert not model[0].weight.is_contiguous()
    return model


def _tied() -> nn.Module:
    model = _pair()
    model[2].weight = model[0].weight
    return model


def _frozen() -> nn.Module:
    model = _tied_by_data()
    model[0].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    return model


def _rows() -> nn.Module:
    model, memory = _pair(), torch.randn(2 * WIDTH, WIDTH)
    model[0].weight.data, model[2].weight.data = memory[:WIDTH], memory[WIDTH:]
    model.register_parameter("empty", nn.Parameter(memory[:0]))
    return model


def _check_accepted(rank: int, stage: int) -> None:
    for build in (_columns, _tied, _frozen, _rows):
        torch.manual_seed(0)
        model, x = build().double(), torch.randn(4, WIDTH, dtype=torch.float64)
        plain = copy.deepcopy(model)
        theirs = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        own = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        with zero_optimizer(model, own, stage=stage) as optimizer:
            for _ in range(3):
                for each, of in ((model, optimizer), (plain, theirs)):
                    each(x).square().mean().backward()
                    of.step()
                    of.zero_grad()
            for name, value in full_values(model).items():
                torch.testing.assert_close(value, dict(plain.named_parameters())[name].detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_shares_no_element_is_trained(stage: int) -> None:
    run_ranks(2, _check_accepted, stage)


class Renormalized(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH, max_norm=1.0, padding_idx=0)
        self.out = nn.Linear(WIDTH, 3)
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids))


def _check_max_norm(rank: int, world_size: int, stage: int) -> None:
    torch.manual_seed(0)
    model = Renormalized()
    plain, ids = copy.deepcopy(model), torch.arange(12)
    refused = [Renormalized(torch.bfloat16), *([Renormalized()] if stage == 3 or world_size > 1 else [])]
    options: list[dict[str, Any]] = [{}] * len(refused)
    if stage:
        refused.append(Renormalized())
        options.append({"offload_optimizer": {"device": "cpu"}})
    for other, more in zip(refused, options, strict=True):
        with pytest.raises(ConfigError, match=r"'table' was built with max_norm=1\.0.*modifier_rank=0"):
            ZeroOptimizer(other, torch.optim.SGD, lr=0.5, stage=stage, topology=topology(world_size), **more)
    if stage < 3 and world_size == 1:
        theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
        with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=stage) as optimizer:
            for _ in range(3):
                for each, of in ((model, optimizer), (plain, theirs)):
                    each(ids).square().mean().backward()
                    of.step()
                    of.zero_grad()
            for name, value in full_values(model).items():
                torch.testing.assert_close(value, dict(plain.named_parameters())[name].detach())
    frozen = Renormalized()
    frozen.table.weight.requires_grad_(False)
    expected = copy.deepcopy(frozen)(ids)
    with zero_optimizer(frozen, torch.optim.SGD(frozen.out.parameters(), lr=0.5), stage=stage):
        for _ in range(2):
            torch.testing.assert_close(frozen(ids), expected)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_embedding_that_renormalizes_is_right_or_refused(world_size: int, stage: int) -> None:
    run_ranks(world_size, _check_max_norm, world_size, stage)


def _check_frozen_dtypes(rank: int, stage: int, folder: str) -> None:
    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        for name, dtype in (("c", torch.complex64), ("i", torch.int64), ("b", torch.bool), ("s", torch.int8)):
            values = torch.randn(700, dtype=dtype) if dtype.is_complex else torch.randint(0, 2, (700,)).to(dtype)
            model.register_parameter(name, nn.Parameter(values, requires_grad=False))
        return model

    model = build(0)
    with zero_optimizer(model, torch.optim.SGD(model[0].parameters(), lr=0.1), stage=stage) as optimizer:
        other = build(1).state_dict()
        model.load_state_dict(other if rank == 0 else {})
        zero.save_checkpoint(optimizer, folder, f"stage{stage}")
        model.load_state_dict(build(2).state_dict())
        zero.load_checkpoint(optimizer, folder, f"stage{stage}")
        for name, value in model.state_dict().items():
            assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_frozen_parameters_of_any_dtype_are_loaded(stage: int, tmp_path: Any) -> None:
    run_ranks(2, _check_frozen_dtypes, stage, str(tmp_path))


def _pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def _through_a_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _check_pickles(rank: int, stage: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    x = torch.randn(4, 64)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage) as optimizer:
        for copied in (_pickled, _through_a_file):
            if stage == 3:
                with pytest.raises(StateError, match=r"cannot be pickled at stage 3.*model\.state_dict\(\)"):
                    copied(model)
                with (
                    zero.GatheredParameters(model.parameters()),
                    pytest.raises(StateError, match=r"'0\.weight' cannot be pickled at stage 3"),
                ):
                    copied(model[0])
                with (
                    zero.GatheredParameters(model.parameters()),
                    pytest.raises(StateError, match=r"Sequential cannot be pickled at stage 3"),
                ):
                    copied(model)
                continue
            other = copied(model)
            values = {name: value.clone() for name, value in model.state_dict().items()}
            other.load_state_dict({name: value + 1 for name, value in other.state_dict().items()})
            assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
            own = torch.optim.SGD(other.parameters(), lr=0.1)
            other(x).sum().backward()
            with zero_optimizer(other, own, stage=3) as again:  # it has no owner
                other(x).sum().backward()
                again.step()
        model(x).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_models_are_pickled_below_stage_3(stage: int) -> None:
    run_ranks(2, _check_pickles, stage)


def _check_offload_after_init(rank: int, folder: str) -> None:
    def train(model: nn.Module, step: Callable[[Tensor], None]) -> dict[str, Tensor]:
        for _ in range(3):
            step(model(torch.ones(2, WIDTH)).square().mean())
        return full_values(model)

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    torch.manual_seed(0)
    plain = _pair()
    adam = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.0)

    def step_plain(loss: Tensor) -> None:
        loss.backward()
        adam.step()
        adam.zero_grad()

    expected = train(plain, step_plain)
    for device in ("cpu", "nvme"):
        config["zero_optimization"]["offload_optimizer"] = {"device": device, "nvme_path": folder}
        torch.manual_seed(0)
        with Init(config_dict_or_path=config):
            model = _pair()
        engine, *_ = zero.initialize(model=model, model_parameters=model.parameters(), config=config)

        def step(loss: Tensor, engine: Any = engine) -> None:
            engine.backward(loss)
            engine.step()

        for name, value in train(model, step).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        engine.destroy()
    for cls in (zero.CPUAdam, torch.optim.AdamW):
        with Init():
            model = _pair()
        ZeroOptimizer(model, cls(model.parameters(), lr=0.1), stage=3, offload_optimizer={"device": "cpu"}).close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_configurations_adam_over_a_model_of_init(world_size: int, tmp_path: Any) -> None:
    run_ranks(world_size, _check_offload_after_init, str(tmp_path))
