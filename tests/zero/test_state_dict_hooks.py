"""State dicts with users' hooks that rename, nest and cast entries equal those of a plain model."""

# covers zero/_gather/hooks.py zero/_gather/saved_tensors.py zero/_runtime/shard_state.py

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from tests.ranks import run_ranks
from tests.zero.training import full_values, zero_optimizer
from zcomm import StateError
from zero import GatheredParameters
from zero._checkpoint.model_file import save_model_file

WIDTH = 6
OPTIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "offload": (torch.float32, {"offload_optimizer": {"device": "cpu"}}),
    "quantized": (torch.float32, {"quantized_weights": True, "stage3_param_persistence_threshold": 20}),
}


class Net(nn.Module):
    """Tied, frozen, shared and 0-dim parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.again = self.norm
        self.out = nn.Linear(WIDTH, WIDTH)
        self.out.weight = self.inp.weight
        self.out.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.again(self.norm(x))) * self.scale


def _moved(values: dict[str, Any], old: str, new: str) -> None:
    for key in [key for key in values if key.startswith(old)]:
        values[new + key.removeprefix(old)] = values.pop(key)


def _plain(model: Net) -> nn.Module:
    return model


def _wrapped(model: Net) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Sequential))
    return model


def _renaming(model: Net) -> nn.Module:
    model.register_state_dict_post_hook(lambda _, values, prefix, __: _moved(values, f"{prefix}layers.", f"{prefix}h."))
    model.register_load_state_dict_pre_hook(
        lambda _, values, prefix, *__: _moved(values, f"{prefix}h.", f"{prefix}layers.")
    )
    for layer in model.layers:
        layer.register_state_dict_post_hook(lambda _, values, prefix, __: _moved(values, f"{prefix}0.", f"{prefix}fc."))
        layer.register_load_state_dict_pre_hook(
            lambda _, values, prefix, *__: _moved(values, f"{prefix}fc.", f"{prefix}0.")
        )
    return model


def _casting(model: Net) -> nn.Module:
    def cast(_: nn.Module, values: dict[str, Any], prefix: str, __: Any) -> None:
        for key in [key for key in values if key.startswith(prefix)]:
            values[key] = values[key].to(torch.float64) * 2 if values[key].is_floating_point() else values[key].clone()

    def uncast(_: nn.Module, values: dict[str, Any], prefix: str, *__: Any) -> None:
        for key in [key for key in values if key.startswith(prefix)]:
            values[key] = values[key] / 2 if values[key].is_floating_point() else values[key]

    for module in (model.inp, model.layers[1]):
        module.register_state_dict_post_hook(cast)
        module.register_load_state_dict_pre_hook(uncast)
    return model


def _nesting(model: Net) -> nn.Module:
    def nest(_: nn.Module, values: dict[str, Any], prefix: str, __: Any) -> None:
        keys = [key for key in values if key.startswith(f"{prefix}layers.")]
        values[f"{prefix}nested"] = {key.removeprefix(prefix): values.pop(key) for key in keys}

    def unnest(_: nn.Module, values: dict[str, Any], prefix: str, *__: Any) -> None:
        values |= {prefix + key: value for key, value in values.pop(f"{prefix}nested", {}).items()}

    model.register_state_dict_post_hook(nest)
    model.register_load_state_dict_pre_hook(unnest)
    return model


class Own(nn.Linear):
    """Saves and loads its weight under another name."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        destination[f"{prefix}mine"] = self.weight if keep_vars else self.weight.detach()
        destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}mine" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}mine")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _saving_itself(model: Net) -> nn.Module:
    model.layers[0][0] = Own(WIDTH, WIDTH)
    return model


KINDS: dict[str, Callable[[Net], nn.Module]] = {
    "plain": _plain, "wrapped": _wrapped, "renaming": _renaming, "casting": _casting, "nesting": _nesting,
    "saving itself": _saving_itself,
}  # fmt: skip


class Outer(nn.Module):
    """Renames the model's entries as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.head = nn.Linear(2, 2)


def _built(kind: str, dtype: torch.dtype, seed: int) -> Any:
    torch.manual_seed(seed)
    model = KINDS[kind](Net())
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.rand_like(param))
    return model.to(dtype)


def _leaves(values: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{at}{key}/")
        else:
            yield at + key, value


def _assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    one, other = dict(_leaves(found)), dict(_leaves(expected))
    assert list(one) == list(other)
    for key, value in other.items():
        assert one[key].dtype == value.dtype, key
        assert torch.equal(one[key], value), key


def _step(model: nn.Module, optimizer: Any, dtype: torch.dtype) -> None:
    """The step changes only parameters that differ from their masters."""
    model.eval()
    model(torch.ones(2, WIDTH, dtype=dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _params(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in model.named_parameters()}


def _check_round_trip(rank: int, stage: int, which: str) -> None:
    dtype, options = OPTIONS[which]
    for kind in KINDS:
        plain, model = _built(kind, dtype, 0), _built(kind, dtype, 0)
        sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        with zero_optimizer(model, sgd, stage=stage, **options) as optimizer:
            is_here = stage < 3 or rank == 0
            for _ in range(2):
                _assert_same(model.state_dict(), plain.state_dict() if is_here else {})
                _assert_same(model.state_dict(keep_vars=stage == 3), plain.state_dict() if is_here else {})
                _step(model, optimizer, dtype)
            part = model.layers.state_dict()
            if kind != "nesting":
                _assert_same(part, plain.layers.state_dict() if is_here else {})
            saved = _built(kind, dtype, 1).state_dict()
            plain.load_state_dict(copy.deepcopy(saved))
            result = model.load_state_dict(copy.deepcopy(saved) if rank == 0 else {})
            assert not [*result.missing_keys, *result.unexpected_keys]
            _assert_same(model.state_dict(), plain.state_dict() if is_here else {})
            if which != "quantized":
                _assert_same(full_values(model), _params(plain))
            _step(model, optimizer, dtype)
            _assert_same(model.state_dict(), plain.state_dict() if is_here else {})


@pytest.mark.parametrize("which", list(OPTIONS))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_state_dicts_are_those_of_a_plain_model(world_size: int, stage: int, which: str) -> None:
    run_ranks(world_size, _check_round_trip, stage, which)


def _freeze_some(model: Any, shift: float = 0.0) -> Any:
    """One is in a layer that hooks rename; ``shift`` tells its values, and so its entries, from others."""
    model.layers[0][0].bias.requires_grad_(False)
    for param in model.parameters():
        if not param.requires_grad:
            param.data += shift
    return model


def _check_frozen_left_out(rank: int, stage: int, folder: str) -> None:
    file = Path(folder) / "model.bin"
    for kind in KINDS:
        model, plain = (_freeze_some(_built(kind, torch.float32, 0)) for _ in range(2))
        shifted = dict(_leaves(_freeze_some(_built(kind, torch.float32, 0), shift=1.0).state_dict()))
        expected = {key: value for key, value in _leaves(plain.state_dict()) if torch.equal(value, shifted[key])}
        assert len(shifted) - len(expected) == 2, "the frozen ones"
        sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with zero_optimizer(model, sgd, stage=stage) as optimizer:
            save_model_file(optimizer, file, exclude_frozen_parameters=True)
            torch.distributed.barrier()
            found = dict(_leaves(torch.load(file)))
            assert list(found) == list(expected), kind
            assert all(torch.equal(found[key], value) for key, value in expected.items()), kind
            torch.distributed.barrier()
            _assert_same(model.state_dict(), plain.state_dict() if stage < 3 or rank == 0 else {})


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_frozen_parameters_are_left_out_whatever_hooks_call_them(stage: int, tmp_path: Path) -> None:
    run_ranks(2, _check_frozen_left_out, stage, str(tmp_path))


def _check_late_and_outer_hooks(rank: int, stage: int, which: str) -> None:
    dtype, options = OPTIONS[which]
    model, plain = _built("wrapped", dtype, 0), _built("wrapped", dtype, 0)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=stage, **options) as optimizer:
        for each in (model, plain):
            _renaming(each)
            each.register_state_dict_post_hook(
                lambda _, values, prefix, __: values.update(n=values.pop(f"{prefix}scale"))
            )
        is_here = stage < 3 or rank == 0
        _assert_same(model.state_dict(), plain.state_dict() if is_here else {})
        torch.manual_seed(3)
        outer, of_plain = Outer(model), Outer(plain)
        of_plain.head = outer.head
        expected = of_plain.state_dict()
        heads = {key: value for key, value in expected.items() if key.startswith("head.")}
        _assert_same(outer.state_dict(), expected if is_here else heads)
        for compiled in (torch.compile(each, backend="eager") for each in (model,)):
            _assert_same(compiled.state_dict(), torch.compile(plain, backend="eager").state_dict() if is_here else {})
        _step(model, optimizer, dtype)


@pytest.mark.parametrize(("stage", "which"), [(1, "quantized"), (2, "bf16"), (3, "bf16"), (3, "quantized")])
def test_hooks_that_run_after_ours_and_models_around_ours(stage: int, which: str) -> None:
    run_ranks(2, _check_late_and_outer_hooks, stage, which)


def _check_parts(rank: int, stage: int, which: str) -> None:
    """A part of the model is loaded alone, and by a module around it."""
    dtype, options = OPTIONS[which]
    model, plain = _built("wrapped", dtype, 0), _built("wrapped", dtype, 0)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=stage, **options) as optimizer:
        for seed, of in enumerate((lambda m: m.layers[1], lambda m: nn.ModuleList([m.inp, m.norm])), 1):
            saved = of(_built("wrapped", dtype, seed)).state_dict()
            of(plain).load_state_dict(saved)
            of(model).load_state_dict(saved)
            _step(model, optimizer, dtype)
            _assert_same(model.state_dict(), plain.state_dict() if stage < 3 or rank == 0 else {})


@pytest.mark.parametrize("which", ["bf16", "quantized"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_parts_of_a_model_are_loaded(stage: int, which: str) -> None:
    run_ranks(2, _check_parts, stage, which)


def _check_other_ranks_do_not_count(rank: int, stage: int, which: str) -> None:
    dtype, options = OPTIONS[which]
    model, plain = _built("wrapped", dtype, 0), _built("wrapped", dtype, 0)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=stage, **options) as optimizer:
        masters = [master.clone() for _, _, master in optimizer.master_pieces()]
        other = _built("wrapped", dtype, 1).state_dict()
        model.load_state_dict({} if rank == 0 else other, strict=False)
        for (_, _, now), then in zip(optimizer.master_pieces(), masters, strict=True):
            assert torch.equal(now, then)
        some = {key: value for key, value in other.items() if key.startswith("layers.1.")}
        plain.load_state_dict(some, strict=False)
        model.load_state_dict(some if rank == 0 else other, strict=False)
        _step(model, optimizer, dtype)
        params = full_values(model)
        if which != "quantized":
            _assert_same(params, _params(plain))


@pytest.mark.parametrize("which", ["float32", "bf16", "quantized"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_other_ranks_load_is_undone(stage: int, which: str) -> None:
    run_ranks(2, _check_other_ranks_do_not_count, stage, which)


class Extra(nn.Linear):
    """Its extra state is a parameter."""

    def get_extra_state(self) -> Any:
        return {"copy": self.weight}

    def set_extra_state(self, state: Any) -> None:
        pass


def _raise(*_: Any) -> None:
    raise ValueError("of a hook")


def _check_errors(rank: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64), Extra(64, 64))
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=3):
        with pytest.raises(StateError, match=r"entry '1\._extra_state' has a parameter in it that stage 3 releases"):
            model.state_dict()
        assert (list(model[0].state_dict()) == ["weight", "bias"]) is (rank == 0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=3):
        start = full_values(model)
        for register, call in (
            (model[1].register_state_dict_post_hook, model.state_dict),
            (model[1].register_load_state_dict_pre_hook, lambda: model.load_state_dict(start)),
        ):
            hook = register(_raise)
            with pytest.raises(ValueError, match="of a hook"):
                call()
            hook.remove()
            for use in (lambda p: p.detach(), lambda p: p.copy_(start["0.weight"])):
                with pytest.raises(StateError, match="is released"), torch.no_grad():
                    use(model[0].weight)  # no state of the failed call remains
        _assert_same(model.state_dict(), start if rank == 0 else {})


def test_what_cannot_be_filled_is_an_error_and_a_failed_call_leaves_nothing() -> None:
    run_ranks(2, _check_errors)


def _check_unused_keys(rank: int, stage: int) -> None:
    model = _built("wrapped", torch.bfloat16, 0)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=stage):
        saved = _built("wrapped", torch.bfloat16, 1).state_dict()
        saved["layers.0._checkpoint_wrapped_module.2.weight"] = torch.ones(1)
        for given in (saved, {"scale": torch.ones(2)}):
            with pytest.raises(RuntimeError, match="loading state_dict"):
                model.load_state_dict(given if rank == 0 else {})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_keys_that_are_not_consumed_are_an_error_on_every_rank(stage: int) -> None:
    run_ranks(2, _check_unused_keys, stage)


def _check_assign(rank: int, stage: int, which: str) -> None:
    dtype, options = OPTIONS[which]
    model, plain = _built("wrapped", dtype, 0), _built("wrapped", dtype, 0)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=stage, **options) as optimizer:
        saved = _built("wrapped", dtype, 1).state_dict()
        plain.load_state_dict(saved, assign=True)
        model.load_state_dict(copy.deepcopy(saved), assign=True)
        _step(model, optimizer, dtype)
        _assert_same(model.state_dict(), plain.state_dict() if stage < 3 or rank == 0 else {})
        wide = {key: value.double() for key, value in saved.items()}
        error = r"would make 'inp\.weight' torch.float64|another rank could not load"
        with pytest.raises(RuntimeError, match=error):
            model.load_state_dict(wide if rank == 0 else {}, assign=True)


@pytest.mark.parametrize("which", ["float32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_assigning_copies_what_has_the_same_dtype(stage: int, which: str) -> None:
    run_ranks(2, _check_assign, stage, which)


def _check_torchs_helpers(rank: int, stage: int) -> None:
    model, plain = _built("wrapped", torch.bfloat16, 0), _built("wrapped", torch.bfloat16, 0)
    with zero_optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.0), stage=stage) as optimizer:
        full, is_here = StateDictOptions(full_state_dict=True), stage < 3 or rank == 0
        on_first = StateDictOptions(full_state_dict=True, cpu_offload=True)
        frozen = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        _assert_same(get_model_state_dict(model, options=on_first), get_model_state_dict(plain) if rank == 0 else {})
        for options in (None, full, frozen):
            if stage == 3:
                with pytest.raises(StateError, match=r"full_state_dict=True, cpu_offload=True"):
                    get_model_state_dict(model, options=options)
            elif options is not frozen:
                _assert_same(get_model_state_dict(model, options=options), get_model_state_dict(plain))
        for seed, options in enumerate(
            (None, full, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)), 1
        ):
            saved = _built("wrapped", torch.bfloat16, seed).state_dict()
            plain.load_state_dict(saved)
            set_model_state_dict(model, copy.deepcopy(saved), options=options)
            _step(model, optimizer, torch.bfloat16)
            _assert_same(model.state_dict(), plain.state_dict() if is_here else {})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_torchs_helpers_work_for_models(stage: int) -> None:
    run_ranks(2, _check_torchs_helpers, stage)


def _check_no_more_gathers(rank: int) -> None:
    """A call gathers each bucket once, whichever modules it is called on."""
    model = _built("wrapped", torch.bfloat16, 0)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=3) as optimizer:
        gathered = []
        runtime = optimizer.parts.runtime
        acquire = runtime.gatherer.acquire_all
        runtime.gatherer.acquire_all = lambda buckets: (gathered.extend(buckets), acquire(buckets))[1]
        model.state_dict()
        assert len(gathered) == len(set(gathered)) == len(runtime.buckets)
        with GatheredParameters(model.parameters()):
            _assert_same(model.state_dict(), _built("wrapped", torch.bfloat16, 0).state_dict() if rank == 0 else {})


def test_each_bucket_is_gathered_once() -> None:
    run_ranks(2, _check_no_more_gathers)
