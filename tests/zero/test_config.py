"""The configuration: every key is checked, none is ignored silently, and one definition generates all descriptions."""

# covers zero/_config/batch.py zero/_config/explain.py zero/_config/json_schema.py zero/_config/keys.py

from __future__ import annotations

import inspect
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zero.configs import CONFIGS, NEEDS_MORE
from zcomm import ConfigError
from zero._config import (
    Config,
    NotAvailableError,
    explain,
    json_schema,
    markdown_table,
    parse,
    read_source,
    resolve_config,
    solve_batch_sizes,
)
from zero._config.keys import definitions, section_type, unread_names
from zero._optim.from_config import KNOWN, ON_HOST, build_optimizer
from zero._optim.lr_schedulers import SCHEDULERS, build_scheduler
from zero.cli import main

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


@pytest.mark.parametrize("name", CONFIGS)
def test_tutorial_configurations_explain_every_key_they_give(name: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(CONFIGS[name]))
    assert main(["config", "explain", str(path), "--world-size", "2"]) == 0
    text = capsys.readouterr().out
    leaves = [word for word in re.findall(r'"(\w+)":', json.dumps(CONFIGS[name])) if word not in ("params", "type")]
    renamed = {
        "cpu_offload": "offload_optimizer.device",
        "cpu_offload_params": "offload_param.device",
        "stage3_param_persitance_threshold": "stage3_param_persistence_threshold",
    }
    for leaf in leaves:
        assert renamed.get(leaf, leaf) in text
    assert ("NOT AVAILABLE" in text) == (name in NEEDS_MORE)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_this_version_cannot_do_is_refused_by_name(name: str) -> None:
    if name not in NEEDS_MORE:
        assert resolve_config(CONFIGS[name], {}).settings.stage == CONFIGS[name]["zero_optimization"]["stage"]
        return
    with pytest.raises(NotAvailableError, match=r"offload_optimizer\.device='nvme'"):
        resolve_config(CONFIGS[name], {})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"gradient_cliping": 1.0}, r"gradient_cliping \(did you mean 'gradient_clipping'\?\)"),
        ({"zero_optimization": {"stge": 1}}, r"zero_optimization\.stge \(did you mean 'stage'\?\)"),
        ({"zero_optimization": {"offload_param": {"devise": 1}}}, r"devise \(did you mean 'device'\?\)"),
        ({"loss_scale": 0}, r"loss_scale \(it belongs in 'fp16'\)"),
        ({"fp16": {"stage": 0}}, r"fp16\.stage \(it belongs in 'zero_optimization'\)"),
        ({"offload_optimzer": {}}, r"did you mean 'zero_optimization\.offload_optimizer'\?"),
        ({"aio": {"bogus_xyz": 1}, "zzz": 2}, r"aio\.bogus_xyz; zzz"),
        ({"zero_optimization": {"stage": 4}}, r"stage must be one of 0, 1, 2, 3: zero_optimization\.stage=4"),
        ({"zero_optimization": {"stage": True}}, "stage must be an integer: got True"),
        ({"zero_optimization": {"reduce_bucket_size": 1.5}}, "reduce_bucket_size must be an integer: got 1.5"),
        ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, "must be an integer: got '5e8'"),
        ({"zero_optimization": {"overlap_comm": 2}}, "overlap_comm must be true or false: got 2"),
        ({"optimizer": {"torch_adam": True}}, r"optimizer\.torch_adam \(it belongs in 'optimizer\.params'\)"),
        ({"scheduler": {"params": {"warmup_type": "cosine"}}}, r"params\.warmup_type must be one of log, linear"),
        ({"fp16": {"loss_scale_window": 0}}, "loss_scale_window must be at least 1"),
        ({"fp16": {"min_loss_scale": 0}}, "min_loss_scale must be greater than 0"),
        ({"fp16": {"loss_scale": float("inf")}}, "loss_scale must be a number: got inf"),
        ({"fp16": [1]}, r"fp16 must be an object: got \[1\]"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "must not both be true"),
        ({"bf16": {}, "bfloat16": {}}, "are the same key"),
        ({"scheduler": {"type": "WarmupDecay"}}, r"did you mean 'WarmupDecayLR'\?"),
        ({"zero_optimization": {"cpu_offload": "maybe"}}, r"cpu_offload must be true or false: got 'maybe'"),
    ],
)
def test_mistakes_are_named(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(raw, "dict")


def test_files_are_checked_before_their_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text, message in (
        ("{", "must be JSON"),
        ("[]", "must be a JSON object"),
        ('{"bf16": {}, "bf16": {}}', "twice"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_source(path)
    with pytest.raises(ConfigError, match="readable JSON file"):
        read_source(tmp_path / "missing.json")


def test_old_spellings_are_taken_with_a_warning() -> None:
    zero = {"cpu_offload": True, "cpu_offload_use_pin_memory": False, "stage3_param_persitance_threshold": 7}
    read = parse({"zero_optimization": zero, "bfloat16": {"enabled": True}}, "dict")
    assert read.values.zero_optimization.offload_optimizer.device == "cpu"
    assert read.values.zero_optimization.offload_optimizer.pin_memory is False
    assert read.values.zero_optimization.stage3_param_persistence_threshold == 7
    assert read.values.bf16.enabled
    assert len(read.notes) == 4
    assert all("deprecated" in note or "is read as" in note for note in read.notes)
    assert parse({"zero_optimization": True}, "dict").values.zero_optimization.stage == 1


def test_auto_is_the_default_and_said() -> None:
    raw = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "gradient_clipping": "auto"}
    read = parse(raw, "dict")
    assert read.values == parse({"zero_optimization": {"stage": 2}}, "dict").values
    assert not read.given("zero_optimization.reduce_bucket_size")
    assert sum("'auto'" in note for note in read.notes) == 2


@pytest.mark.parametrize("given", [{"train": 24, "micro": 3, "steps": 4}])
@pytest.mark.parametrize("missing", [(), ("train",), ("micro",), ("steps",)])
def test_batch_sizes_are_solved(given: dict[str, int], missing: tuple[str, ...]) -> None:
    names = {
        "train": "train_batch_size",
        "micro": "train_micro_batch_size_per_gpu",
        "steps": "gradient_accumulation_steps",
    }
    raw = {names[name]: value for name, value in given.items() if name not in missing}
    sizes = solve_batch_sizes(parse(raw, "dict").values, world_size=2)
    assert (sizes.train, sizes.micro, sizes.accumulation) == (24, 3, 4)
    with pytest.raises(ConfigError, match=r"train_batch_size=24.*world size=5"):
        solve_batch_sizes(parse({"train_batch_size": 24, **raw}, "dict").values, world_size=5)


def test_batch_sizes_that_are_not_given() -> None:
    alone = solve_batch_sizes(parse({"train_batch_size": 6}, "dict").values, world_size=2)
    assert (alone.micro, alone.accumulation) == (3, 1)
    micro = solve_batch_sizes(parse({"train_micro_batch_size_per_gpu": 3}, "dict").values, world_size=2)
    assert (micro.train, micro.accumulation) == (6, 1)
    none = solve_batch_sizes(parse({}, "dict").values, world_size=2)
    assert (none.train, none.micro, none.accumulation) == (None, None, 1)
    assert "the caller decides" in none.note


def test_keys_become_settings_and_keywords_win() -> None:
    raw = {
        "zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2},
        "zcomm": {"gradient_format": ["int8", "nf4"]},
        "data_types": {"grad_accum_dtype": "bf16"},
    }
    plan = resolve_config(raw, {"stage": 2, "reduce_bucket_size": 10, "lr": 0.1, "fp16": {"enabled": True}})
    assert (plan.settings.stage, plan.settings.reduce_bucket_size) == (2, 10)
    assert (plan.settings.quantized_weights, plan.settings.hpz_partition_size) == (True, 2)
    assert plan.settings.gradient_format == ("int8", "nf4")
    assert plan.settings.gradient_dtype is torch.bfloat16
    assert plan.dtype is torch.float16
    assert plan.optimizer_options == {"lr": 0.1}
    assert plan.configuration.origins["fp16.enabled"] == "keyword"
    assert plan.configuration.origins["zero_optimization.stage"] == "keyword"
    assert resolve_config({"communication_data_type": "fp32"}, {}).settings.gradient_format == "none"
    assert resolve_config(None, {"zero_quantized_gradients": True}).settings.quantized_gradients
    assert (resolve_config(None, {}).settings.stage, resolve_config({}, {}).settings.stage) == (1, 0)


def test_what_has_no_effect_is_said() -> None:
    raw = {
        "zero_optimization": {"stage": 1, "zero_hpz_partition_size": 2, "contiguous_gradients": False},
        "fp16": {"hysteresis": 3},
        "aio": {"thread_count": 4},
    }
    notes = "\n".join(resolve_config(raw, {}).notes)
    assert re.search(r"zero_hpz_partition_size=2 has no effect: stage is below 3", notes)
    assert re.search(r"contiguous_gradients=False has no effect", notes)
    assert re.search(r"fp16\.hysteresis=3 has no effect: the loss scale is not dynamic", notes)
    assert re.search(r"aio\.thread_count is read as aio\.intra_op_parallelism", notes)
    assert not resolve_config({"zero_optimization": {"stage": 1, "overlap_comm": False}}, {}).notes


@pytest.mark.parametrize(
    "raw",
    [
        {"amp": {"enabled": True}},
        {"elasticity": {"max_train_batch_size": 8}},
        {"tensor_parallel": {"autotp_size": 2}},
        {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
    ],
)
def test_unavailable_keys_are_refused_unless_off(raw: dict[str, Any]) -> None:
    with pytest.raises(NotAvailableError, match="not available in this version"):
        resolve_config(raw, {})
    assert resolve_config({"amp": {"enabled": False}, "tensor_parallel": {"autotp_size": 1}}, {}).settings.stage == 0


@pytest.mark.parametrize(
    ("section", "misspelt", "nearest"),
    [
        ("amp", {"opt_lvl": "O1"}, r"amp\.opt_lvl \(did you mean 'opt_level'"),
        ("elasticity", {"min_gpu": 1}, r"elasticity\.min_gpu \(did you mean 'min_gpus'"),
        ("curriculum_learning", {"schedule_config": {"max_steps": [1]}}, r"schedule_config\.max_steps .*'max_step'"),
        ("compression_training", {"row_prunning": {}}, r"row_prunning \(did you mean 'row_pruning'"),
    ],
)
def test_a_misspelt_key_of_a_refused_section_is_found(section: str, misspelt: dict[str, Any], nearest: str) -> None:
    for switch in ({"enabled": False}, {}):
        with pytest.raises(ConfigError, match=nearest):
            parse({section: {**switch, **misspelt}}, "dict")


def test_every_section_that_is_not_read_has_its_names() -> None:
    nested = [d for d in definitions(Config) if "dict" in str(d.kind) and not d.path.endswith(".params")]
    assert not [d.path for d in nested if d.name not in unread_names()]
    known = {"compression_training": {"row_pruning": {"different_groups": {"mine": {"params": {"dense_ratio": 1}}}}}}
    assert parse(known, "dict").given("compression_training")


def test_loco_is_refused_with_what_there_is_instead() -> None:
    loco = {"zero_optimization": {"stage": 3, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}}
    with pytest.raises(
        NotAvailableError, match=r"zeropp_loco_param=.*delta_hpz.*residual_beta.*residual_reset_interval"
    ):
        resolve_config(loco, {})


def _accepts(schema: dict[str, Any], value: Any) -> bool:
    """A validator for the parts of JSON schema that the library's schema uses."""
    if "anyOf" in schema:
        return any(_accepts(option, value) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds = {"boolean": bool, "integer": int, "number": (int, float), "string": str, "array": list, "null": type(None)}
    if schema["type"] == "object":
        properties = schema.get("properties")
        if not isinstance(value, dict) or properties is None:
            return isinstance(value, dict)
        return all(key in properties and _accepts(properties[key], item) for key, item in value.items())
    if schema["type"] == "integer" and isinstance(value, float):
        return value.is_integer()
    is_kind = isinstance(value, kinds[schema["type"]]) and (schema["type"] == "boolean" or not isinstance(value, bool))
    if not is_kind or not isinstance(value, (int, float)):
        return is_kind
    return value >= schema.get("minimum", -math.inf) and value > schema.get("exclusiveMinimum", -math.inf)


def test_the_schema_takes_what_the_parser_takes() -> None:
    schema = json.loads(json.dumps(json_schema()))
    for raw in CONFIGS.values():
        assert _accepts(schema, raw)
    assert _accepts(schema, {"zero_optimization": {"stage": "auto"}, "bfloat16": {"enabled": True}})
    for wrong in ({"zero_optimization": {"stge": 1}}, {"zero_optimization": {"stage": 7}}, {"fp16": {"enabled": 2}}):
        assert not _accepts(schema, wrong)


def _is_parsed(raw: dict[str, Any]) -> bool:
    try:
        parse(raw, "dict")
    except ConfigError:
        return False
    return True


def test_the_schema_has_the_least_values_that_the_parser_has() -> None:
    schema = json.loads(json.dumps(json_schema()))
    for definition in definitions(Config):
        section, _, name = definition.path.rpartition(".")
        for value in (-1, 0, 0.5, 1):
            raw = _within(section, {name: value})
            assert _accepts(schema, raw) == _is_parsed(raw), raw
    assert not _is_parsed({"fp16": {"min_loss_scale": 0}})


def test_every_default_may_be_written_down() -> None:
    for definition in definitions(Config):
        section, _, name = definition.path.rpartition(".")
        if section_type(definition.kind) is None:
            value = json.loads(json.dumps(definition.default))
            assert _is_parsed(_within(section, {name: value})), f"{definition.path}={value!r}"


def test_every_key_is_described() -> None:
    for definition in definitions(Config):
        facts = definition.key
        assert facts.doc != "-" or facts.inactive or facts.unavailable, definition.path
        assert definition.kind is not bool or facts.false, f"{definition.path}: what does false do?"
    text = explain(parse({}, "dict"), shows_all=True)
    paths = [d.path for d in definitions(Config) if section_type(d.kind) is None]
    assert all(re.search(rf"^{re.escape(path)} +=", text, re.MULTILINE) for path in paths)


def test_the_table_of_the_docs_is_current(capsys: Any) -> None:
    assert main(["config", "table"]) == 0
    assert capsys.readouterr().out == markdown_table()
    (table,) = re.findall(
        r"<!-- config table: .*?-->\n(.*?)<!-- end of config table -->", DOCUMENT.read_text(), re.DOTALL
    )
    assert table.strip() == markdown_table().strip(), "run: zero config table"


def test_the_command_reports_errors(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"train_batch_size": 7}')
    assert main(["config", "explain", str(path), "--world-size", "2"]) == 1
    assert "train_batch_size=7" in capsys.readouterr().err


def _places() -> list[tuple[str, str]]:
    """Every section, with one of its keys at a time, including objects that nothing reads."""
    found = []
    for definition in definitions(Config):
        section, _, name = definition.path.rpartition(".")
        found.append((section, name))
        for known in unread_names().get(definition.name, ()):
            inner, _, leaf = known.rpartition(".")
            found.append((f"{definition.path}.{inner}".rstrip("."), leaf))
    return found


def _within(section: str, raw: dict[str, Any]) -> dict[str, Any]:
    for name in reversed(section.split(".") if section else []):
        raw = {name: raw}
    return raw


def test_every_misspelled_key_is_named_with_its_section_and_the_nearest() -> None:
    sections = {section for section, _ in _places()}
    assert len(sections) > 20
    assert {
        "zero_optimization.offload_optimizer",
        "checkpoint.writer",
        "timers.throughput",
        "zero_optimization.leaf_module",
    } <= sections
    for section, name in _places():
        wrong = f"{name[:-1]}_{name[-1]}"
        with pytest.raises(ConfigError) as caught:
            parse(_within(section, {wrong: True}), "a.json")
        start = "unknown keys in a.json: " + f"{section}.{wrong}".lstrip(".")
        assert str(caught.value).startswith(start), (section, name)
        near = re.search(r"did you mean '([\w.]+)'", str(caught.value))
        assert near is not None, (section, name)
        assert near[1].rpartition(".")[2] == name, (section, name)
    for section in sections:  # sections that have a valid and an invalid key: the invalid one
        with pytest.raises(ConfigError, match=r"unknown keys in dict: [\w.]*qqqqqq$"):
            parse(_within(section, {"qqqqqq": {}}), "dict")


def _options_of(kind: type) -> list[str]:
    return [name for name in inspect.signature(kind).parameters if name not in ("self", "params", "optimizer")]


@pytest.mark.parametrize(
    ("known", "on_host"), [({k: KNOWN[k] for k in ("adam", "adamw", "sgd", "rmsprop")}, False), (ON_HOST, True)]
)
def test_every_misspelled_option_of_an_optimizer_is_named(known: dict[str, type], *, on_host: bool) -> None:
    for kind, cls in known.items():
        for option in _options_of(cls):
            wrong = f"{option[:-1]}_{option[-1]}"
            with pytest.raises(ConfigError, match=f"optimizer.params of {kind} has no '{wrong}'"):
                build_optimizer(kind, {"lr": 1e-3, wrong: 1}, [torch.nn.Parameter(torch.zeros(2))], on_host=on_host)


def test_every_misspelled_option_of_a_scheduler_is_named() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    for kind, cls in SCHEDULERS.items():
        for option in _options_of(cls):
            wrong = f"{option[:-1]}_{option[-1]}"
            with pytest.raises(ConfigError, match=rf"no '{wrong}' \(did you mean '{option}'\?\)"):
                build_scheduler(kind, {wrong: 1}, optimizer)
