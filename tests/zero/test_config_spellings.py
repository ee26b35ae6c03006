"""Spellings that DeepSpeed 0.19.8 takes: in files, in dicts of scripts, and in what front ends write.

Expected values are what its pydantic models and hjson gave for the same input.
"""

# covers zero/_config/parse.py zero/_config/value_types.py

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zcomm import ConfigError
from zero._config import NotAvailableError, parse, read_source, resolve_config
from zero._config.resolved import to_dtype

PLAIN = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "overlap_comm": False}, "train_batch_size": 8}
HJSON = """
# a comment, and keys without quotes
bf16: {"enabled": true,},  // another
/* and
   one of two lines */
"zero_optimization": {
  stage: 3      # no comma
  "overlap_comm": false
},
"train_batch_size": 8,
"""
STAGE3 = {
    "prefetch_bucket_size": 3, "param_persistence_threshold": 4, "model_persistence_threshold": 5,
    "max_live_parameters": 6, "max_reuse_distance": 7, "gather_16bit_weights_on_model_save": True,
    "module_granularity_threshold": 8, "use_all_reduce_for_fetch_params": True, "allgather_sequential": True,
}  # fmt: skip


class _Device(str, enum.Enum):
    cpu = "cpu"


class _Dtype(enum.Enum):
    bf16 = torch.bfloat16


def test_a_file_may_be_hjson(tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    path = tmp_path / "a.json"
    for text in (HJSON, "{" + HJSON + "}"):
        path.write_text(text)
        assert read_source(path).values == parse(PLAIN, "dict").values


@pytest.mark.parametrize(
    ("text", "message"),
    [("{bf16: {}, bf16: {}}", "keys must be unique: .*'bf16' twice"), ("{bf16: {}", "must be JSON"),
     ("", "must be JSON"), ("# nothing", "must be JSON"), ("[1,]", "must be a JSON object"),
     ("{bf16: {enabld: true}}", r"bf16\.enabld \(did you mean 'enabled'"), ("[" * 100_000, "must be JSON")],
)  # fmt: skip
def test_hjson_is_checked_as_json_is(text: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_source(tmp_path / "a.json")


def test_hjson_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(PLAIN))
    assert read_source(path).values.train_batch_size == 8
    path.write_text(HJSON)
    with pytest.raises(ConfigError, match=r"config must be JSON: .*line 2.*pip install hjson"):
        read_source(path)


def test_keys_of_stage_3_need_no_prefix() -> None:
    read = parse({"zero_optimization": {"stage": 3, **STAGE3}}, "dict")
    prefixed = {f"stage3_{name}": value for name, value in STAGE3.items()}
    assert read.values == parse({"zero_optimization": {"stage": 3, **prefixed}}, "dict").values
    for name, value in STAGE3.items():
        assert getattr(read.values.zero_optimization, f"stage3_{name}") == value
        with pytest.raises(ConfigError, match=f"{name} and .*stage3_{name} are the same key"):
            parse({"zero_optimization": {name: value, f"stage3_{name}": value}}, "dict")
    assert resolve_config(None, {"stage": 3, "max_live_parameters": 9}).settings.stage3_max_live_parameters == 9


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, True), (0, False), (1.0, True), ("true", True), ("False", False), ("yes", True), ("off", False), ("1", True)],
)
def test_booleans(value: Any, expected: bool) -> None:  # noqa: FBT001
    read = parse({"zero_optimization": {"overlap_comm": value, "cpu_offload": value}}, "dict").values
    assert read.zero_optimization.overlap_comm is expected
    assert read.zero_optimization.offload_optimizer.device == ("cpu" if expected else "none")
    if isinstance(value, str):  # there DeepSpeed would take "false" as true
        with pytest.raises(ConfigError, match=f"wall_clock_breakdown must be true or false: got '{value}'"):
            parse({"wall_clock_breakdown": value}, "dict")
    else:
        assert parse({"wall_clock_breakdown": value}, "dict").values.wall_clock_breakdown is expected
    assert resolve_config(None, {"overlap_comm": 0}).settings.overlap_comm is False


def test_numbers_in_strings_where_deepspeed_takes_them() -> None:
    raw = {"zero_optimization": {"stage": "3", "sub_group_size": "5.0"}, "fp16": {"min_loss_scale": "1e-3"}}
    read = parse(raw, "dict").values
    assert (read.zero_optimization.stage, read.zero_optimization.sub_group_size) == (3, 5)
    assert read.fp16.min_loss_scale == 1e-3
    refused = [
        ("zero_optimization", "reduce_bucket_size", "5e8"), ("zero_optimization", "sub_group_size", "5.5"),
        ("fp16", "loss_scale", "1e999"), ("fp16", "hysteresis", "9" * 10_000), ("aio", "block_size", "8"),
    ]  # fmt: skip
    for section, name, text in refused:
        with pytest.raises(ConfigError, match=rf"{section}\.{name} must be"):
            parse({section: {name: text}}, "dict")


def test_enums_dtypes_and_paths_of_a_script() -> None:
    raw = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": _Device.cpu, "nvme_path": Path("/x/y")}},
        "data_types": {"grad_accum_dtype": torch.bfloat16},
        "torch_autocast": {"dtype": _Dtype.bf16},
        "communication_data_type": "FP16",
    }
    read = resolve_config(raw, {}).configuration.values
    assert json.dumps(read.zero_optimization.offload_optimizer.device) == '"cpu"'
    assert type(read.zero_optimization.offload_optimizer.device) is str
    assert read.zero_optimization.offload_optimizer.nvme_path == "/x/y"
    assert to_dtype(read.torch_autocast.dtype) is torch.bfloat16
    assert (read.data_types.grad_accum_dtype, read.communication_data_type) == ("bfloat16", "fp16")
    assert parse({"torch_autocast": {"dtype": "torch.float16"}}, "dict").values.torch_autocast.dtype == "float16"
    with pytest.raises(ConfigError, match=r"torch_autocast\.dtype must be one of .*'torch\.int8'"):
        parse({"torch_autocast": {"dtype": torch.int8}}, "dict")
    with pytest.raises(ConfigError, match="hysteresis must be a number that float64 can hold"):
        parse({"fp16": {"hysteresis": enum.Enum("Huge", {"x": 10**5000}).x}}, "dict")  # type: ignore[attr-defined]


def test_one_string_is_a_list_of_one() -> None:
    read = parse({"zero_optimization": {"leaf_module": {"classes": "MoE", "names": ["a", "b"]}}}, "dict").values
    assert read.zero_optimization.leaf_module.classes == ("MoE",)
    assert read.zero_optimization.leaf_module.names == ("a", "b")
    with pytest.raises(ConfigError, match=r"classes must be a list of strings: got 'A,B'"):
        parse({"zero_optimization": {"leaf_module": {"classes": "A,B"}}}, "dict")


@pytest.mark.parametrize("given", [None, "auto", {}, {"device": "none"}, {"device": None}, {"device": "auto"}])
def test_nothing_is_offloaded(given: Any) -> None:
    raw = {"zero_optimization": {"stage": 3, "offload_optimizer": given, "offload_param": given}}
    assert parse(raw, "dict").values == parse({"zero_optimization": {"stage": 3}}, "dict").values


def test_keys_without_a_use_here_are_known() -> None:
    raw = {"sequence_parallel_size": 1, "seq_parallel_communication_data_type": "bf16", "cuda_visible_devices": "0,1",
           "vocabulary_size": 50257, "use_data_before_expert_parallelism": False}  # fmt: skip
    notes = "\n".join(resolve_config(raw, {}).notes)
    assert all(f"{name}=" in notes for name in raw if name != "sequence_parallel_size")
    for off in ({"compile": {"deepcompile": False}}, {"tensor_parallel": {"autotp_size": 1}}):
        assert resolve_config(off, {})


def test_all_that_is_missing_is_named_at_once() -> None:
    switched = "autotuning data_efficiency curriculum_learning elasticity progressive_layer_drop eigenvalue amp"
    names = (*switched.split(), "quantize_training", "hybrid_engine", "expert_parallel")
    wanted: dict[str, Any] = {name: {"enabled": True} for name in names}
    wanted |= {
        "compression_training": {"layer_reduction": {"enabled": True}}, "sparse_attention": {"mode": "fixed"},
        "tensor_parallel": {"autotp_size": 2}, "compile": {"deepcompile": True}, "pipeline": {"stages": 2},
        "sequence_parallel_size": 2,
    }  # fmt: skip
    with pytest.raises(NotAvailableError) as caught:
        resolve_config({**wanted, "zero_optimization": {"stage": 2, "mics_shard_size": 2, "zenflow": {}}}, {})
    named = {part.split("=")[0] for part in str(caught.value).partition(": ")[2].split("; ")}
    assert named == {*wanted, "zero_optimization.mics_shard_size", "zero_optimization.zenflow"}
