"""Invalid values at every key: each gives a working configuration or a ConfigError that names the key."""

# covers zero/_config/key_support.py zero/_config/legacy.py zero/_config/optimizer_options.py

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zcomm import ConfigError
from zero._config import Config, NotAvailableError, explain, json_schema, parse, read_source, resolve_config
from zero._config.keys import definitions
from zero._optim.from_config import build_optimizer
from zero._optim.lr_schedulers import SCHEDULERS, build_scheduler


def _nested(kind: str, levels: int = 10_000) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if kind == "list" else {"enabled": value}
    return value


def _loop() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


class _Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not compared")

    __hash__ = None  # type: ignore[assignment]


VALUES: dict[str, Any] = {
    "null": None, "true": True, "zero": 0, "one": 1, "minus one": -1, "half": 0.5, "nan": math.nan, "inf": math.inf,
    "minus inf": -math.inf, "1e30": 1e30, "1e300": 1e300, "2**64": 2**64, "-2**64": -(2**64), "10**400": 10**400,
    "10**5000": 10**5000, "empty": "", "word": "x", "number in a string": "1e-4", "pair in a string": "0.9,0.95",
    "auto": "auto", "null character": "a\0b", "half a character": "\ud800", "long": "y" * 1_000_000, "bytes": b"abc",
    "empty list": [], "numbers": [1, 2.5], "mixed": ["a", 3], "lists": [[["a"]]], "deep list": _nested("list"),
    "empty object": {}, "object": {"a": 1}, "deep object": _nested("object"), "integer key": {3: 4},
    "mixed keys": {"enabled": True, None: 1, (1, 2): 3}, "loop": _loop(), "set": {1}, "object()": object(),
    "rude": _Rude(), "function": print, "tensor": torch.ones(2), "array": np.ones(2), "path": Path("a"),
    "decimal": Decimal("0.1"), "complex": 1j, "numpy": np.float32(0.5), "range": range(3),
}  # fmt: skip


def _known(schema: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every path of the JSON schema, including other names and old spellings."""
    for name, below in schema.get("properties", {}).items():
        yield (*path, name)
        for one in (below, *below.get("anyOf", ())):
            yield from _known(one, (*path, name))


OPTIONS = [
    (part, "params", name)
    for part, names in (
        ("optimizer", "lr betas eps weight_decay momentum dampening nesterov amsgrad bias_correction adam_w_mode"),
        ("scheduler", "warmup_min_lr warmup_max_lr warmup_num_steps total_num_steps warmup_type cycle_momentum"),
        ("scheduler", "cycle_first_step_size cycle_second_step_size decay_lr_rate lr_range_test_staircase"),
    )
    for name in names.split()
]
PATHS = [*_known(json_schema()), *OPTIONS]


def _raw(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return value  # type: ignore[no-any-return]


def _refusal_of(call: Callable[[], object]) -> ConfigError | None:
    try:
        call()
    except ConfigError as error:
        return error
    return None


def _read(raw: dict[str, Any], *, is_planned: bool) -> None:
    read = parse(raw, "dict")
    if is_planned:
        resolve_config(raw, {})
        assert explain(read, shows_all=True)


def test_there_is_a_path_for_every_key() -> None:
    assert len(PATHS) > 500
    assert {tuple(d.path.split(".")) for d in definitions(Config)} <= set(PATHS)


@pytest.mark.parametrize("kind", VALUES)
def test_any_value_at_any_key_works_or_is_named(kind: str) -> None:
    num_refused = 0
    for index, path in enumerate(PATHS):
        raw = _raw(path, VALUES[kind])
        error = _refusal_of(lambda r=raw, i=index: _read(r, is_planned=i % 5 == 0))
        if error is None:
            continue
        num_refused += not isinstance(error, NotAvailableError)
        words = re.split(r"\W+", str(error))
        of_alias = {name for d in definitions(Config) if path[-1] in d.key.aliases for name in d.path.split(".")}
        assert {path[-1], *of_alias} & set(words), (path, str(error)[:300])
        assert len(str(error)) < 2000
    if kind in ("deep list", "deep object", "integer key", "mixed keys", "loop", "10**5000"):
        assert num_refused == len(PATHS)
    if kind in ("null", "auto"):
        assert num_refused < 30, num_refused  # sections must be objects


@pytest.mark.parametrize("kind", VALUES)
def test_any_keyword_works_or_is_named(kind: str) -> None:
    names = "stage reduce_bucket_size weight_format gradient_format mode overlap_comm fp16 zero_optimization"
    for name in (*names.split(), "gradient_accumulation_steps", "residual_beta"):
        options = {name: VALUES[kind], "stage3_max_live_parameters": 5}
        error = _refusal_of(lambda o=options: resolve_config(None, o))
        assert error is None or name in str(error), str(error)[:300]


@pytest.mark.parametrize("kind", VALUES)
def test_any_value_of_an_option_builds_or_is_named(kind: str) -> None:
    for optimizer in ("AdamW", "SGD", "Adagrad", "RMSprop"):
        for on_host in (False, True):
            for option in ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "fused", "alpha"):
                with np.errstate(all="ignore"):
                    _tried(option, VALUES[kind], lambda params, o=optimizer, h=on_host: build_optimizer(
                        o, params, [torch.nn.Parameter(torch.zeros(2))], on_host=h))  # fmt: skip
    for scheduler in SCHEDULERS:
        required = {"total_num_steps": 9} if "Decay" in scheduler or "Cosine" in scheduler else {}
        required |= {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2} if scheduler == "OneCycle" else {}
        for _, _, option in (path for path in OPTIONS if path[0] == "scheduler"):
            inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
            _tried(option, VALUES[kind], lambda params, s=scheduler, i=inner, r=required: build_scheduler(
                s, {**r, **params}, i))  # fmt: skip


def _tried(option: str, value: Any, build: Any) -> None:
    error = _refusal_of(lambda: build({option: value}))
    assert error is None or option in str(error), str(error)[:300]


def test_infinity_and_zero_are_taken_as_front_ends_write_them(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(
        '{"steps_per_print": Infinity, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}'
    )
    read = read_source(path).values
    assert read.steps_per_print is None
    ramps = []
    for num_steps in (0, 2):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        assert read.scheduler.type == "WarmupLR"
        scheduler = build_scheduler("WarmupLR", {**read.scheduler.params, "warmup_num_steps": num_steps}, optimizer)
        ramps.append([])
        for _ in range(6):
            ramps[-1] += scheduler.get_last_lr()
            optimizer.step()
            scheduler.step()
    assert ramps[0] == ramps[1]  # the value that DeepSpeed replaces it with
    assert ramps[0][-1] == 0.1
    with pytest.raises(ConfigError, match=r"steps_per_print must be an integer or .*: got -inf|must be an integer"):
        parse({"steps_per_print": -math.inf}, "dict")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"optimizer": {"params": {"lr": "1e-4"}}}, r"params\.lr must be a number: got '1e-4', a string: .*1\.0e-4"),
        ({"optimizer": {"params": {"betas": "0.9,0.95"}}}, r"params\.betas must be a list of 2 numbers: got '0"),
        ({"optimizer": {"params": {"betas": [0.9]}}}, r"betas must be a list of 2 numbers: got \[0\.9\]"),
        ({"optimizer": {"params": {"lr": -1}}}, r"optimizer\.params\.lr must be at least 0"),
        ({"fp16": {"initial_scale_power": 1100}}, r"fp16\.initial_scale_power must be at most 127"),
        ({"gradient_accumulation_steps": 1e30}, r"gradient_accumulation_steps must be at most 9223372036854775807"),
        ({"fp16": {3: 4}}, r"keys of fp16 must be strings: got 3"),
        ({3: 4}, r"keys of the configuration must be strings: got 3"),
        ({"tensorboard": _nested("list")}, r"tensorboard must not be more than 32 levels deep"),
        ({"bf16": {}, "bfloat16": {}}, "bf16 and bfloat16 are the same key"),
        ({"lr": 1e-3}, r"lr \(did you mean 'optimizer\.params\.lr'\?\)"),
        ({"max_grad_norm": 1}, r"max_grad_norm \(did you mean 'gradient_clipping'\?\)"),
        ({"zero_optimization": {"cpu_offload": True, "offload_optimizer": [1]}}, r"offload_optimizer must be an"),
    ],
)  # fmt: skip
def test_what_is_wrong_and_where(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(raw, "dict")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("FusedAdam", "Adam"), ("DeepSpeedCPUAdam", "Adam"), ("adamw_torch_fused", "AdamW"), ("FusedLion", "Lion"),
     ("CPUAdagrad", "Adagrad"), ("AdmaW", "AdamW"), ("FusedLamb", "Lamb")],
)  # fmt: skip
def test_an_optimizer_of_another_name_is_recognised(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"got '{name}' \(did you mean '{meant}'\?\)"):
        build_optimizer(name, {}, [torch.nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize("name", ["Lars", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam"])
def test_deepspeeds_other_optimizers_are_refused_by_name(name: str) -> None:
    with pytest.raises(NotAvailableError, match=rf"optimizer\.type='{name}'.*Use AdamW"):
        build_optimizer(name, {"lr": 1e-3}, [torch.nn.Parameter(torch.zeros(2, 2))])


def _built(kind: str, params: dict[str, Any], *, on_host: bool = False) -> tuple[torch.nn.Parameter, Any]:
    param = torch.nn.Parameter(torch.ones(2))
    return param, build_optimizer(kind, params, [param], on_host=on_host)


def test_adam_without_bias_correction_is_exact_on_the_host_and_refused_elsewhere() -> None:
    param, optimizer = _built("Adam", {"lr": 0.5, "bias_correction": 0, "betas": [0.9, 0.99]}, on_host=True)
    param.grad = torch.full((2,), 2.0)
    optimizer.step()
    expected = 1 - 0.5 * (0.1 * 2.0) / (math.sqrt(0.01 * 4.0) + 1e-8)
    assert param.tolist() == pytest.approx([expected] * 2, rel=1e-6)
    for option in ("bias_correction", "fp32_optimizer_states"):
        for params in ({}, {"torch_adam": True}):
            with pytest.raises(NotAvailableError, match=rf"params\.{option}=False.*offload_optimizer\.device='cpu'"):
                _built("AdamW", {option: False, **params}, on_host=bool(params))
        assert isinstance(_built("Adam", {option: True})[1], torch.optim.AdamW)


@pytest.mark.parametrize("on_host", [False, True])
def test_options_that_are_written_elsewhere_are_not_dropped(on_host: bool) -> None:  # noqa: FBT001
    with pytest.raises(ConfigError, match=r"no 'max_grad_norm' .*'gradient_clipping', at the top level"):
        _built("Adam", {"max_grad_norm": 1.0}, on_host=on_host)
    with pytest.raises(ConfigError, match="Adam has no 'adamw_mode'"):
        _built("Adam", {"adamw_mode": False}, on_host=on_host)
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr must be a number: got '1e-3', a string"):
        _built("Adam", {"lr": "1e-3"}, on_host=on_host)


def test_lion_needs_no_offload_where_there_is_no_gpu() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = torch.tensor([1.0, -2.0, 0.0])
    build_optimizer("Lion", {"lr": 0.5}, [param]).step()
    assert param.tolist() == [-0.5, 0.5, 0.0]


def test_numbers_of_numpy_are_numbers_and_what_is_only_compared_with_may_be_huge() -> None:
    raw = {"train_batch_size": np.int64(8), "gradient_clipping": np.float32(0.5)}
    read = parse({**raw, "zero_optimization": {"reduce_bucket_size": 1e30}}, "dict").values
    assert (read.train_batch_size, read.gradient_clipping) == (8, 0.5)
    assert type(read.train_batch_size) is int
    assert read.zero_optimization.reduce_bucket_size == int(1e30)
