"""``Model.of_config`` equals published counts and the modules that transformers builds, in memory or on meta."""

# covers zero/_config/sections.py zero/cli.py zero/plan/exchanges.py zero/plan/model.py

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zcomm import ConfigError
from zero.cli import main
from zero.plan import CLUSTERS, Job, Model, plan

LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192}
LLAMA_3_8B = LLAMA_3 | {"intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA_3_70B = LLAMA_3 | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
SMALL = {
    "vocab_size": 83, "hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
SMALL_GPT2 = {"vocab_size": 83, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 32}
SMALL_OPT = {
    "vocab_size": 83, "hidden_size": 24, "ffn_dim": 50, "num_hidden_layers": 3, "num_attention_heads": 4,
    "word_embed_proj_dim": 24, "max_position_embeddings": 32,
}  # fmt: skip
TIED, NOT_TIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
MODELS: list[tuple[str, dict[str, Any], int | None]] = [
    ("GPT2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),
    ("GPT2", SMALL_GPT2 | {"n_inner": 50} | NOT_TIED, None),
    ("OPT", {}, 125_239_296),
    ("OPT", SMALL_OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}, None),
    ("OPT", SMALL_OPT | {"enable_bias": False, "_remove_final_layer_norm": True} | NOT_TIED, None),
    ("OPT", SMALL_OPT | {"layer_norm_elementwise_affine": False}, None),
    ("GPTNeoX", {}, 20_554_567_680),
    ("GPTNeoX", SMALL | {"attention_bias": False} | TIED, None),
    ("Llama", {}, 6_738_415_616),
    ("Llama", LLAMA_3_8B, 8_030_261_248),
    ("Llama", LLAMA_3_70B, 70_553_706_496),
    ("Llama", SMALL | {"attention_bias": True, "mlp_bias": True, "head_dim": 10} | TIED, None),
    ("Mistral", {}, 7_241_732_096),
    ("Mistral", SMALL | {"head_dim": 8}, None),
    ("Qwen2", SMALL | TIED, None),
    ("Qwen3", SMALL | {"head_dim": 8, "attention_bias": True}, None),
    ("Mixtral", {}, 46_702_792_704),
    ("Mixtral", SMALL | {"num_local_experts": 5, "num_experts_per_tok": 3} | TIED, None),
]
"""transformers' family, what differs from its defaults, and the published count, if there is one."""


def _built(family: str, values: dict[str, Any]) -> tuple[Any, nn.Module]:
    """The configuration, and its module on the meta device."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: it is in the bench extra")
    config = getattr(transformers, f"{family}Config")(**values)
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    with torch.device("meta"):
        return config, getattr(transformers, kind)(config)


@pytest.mark.parametrize(("family", "values", "published"), MODELS)
def test_counts_are_those_of_the_module(family: str, values: dict[str, Any], published: int | None) -> None:
    config, module = _built(family, values)
    model = Model.of_config(config)
    assert model.numel == sum(param.numel() for param in module.parameters())
    assert published is None or model.numel == published
    assert Model.of_config(json.loads(config.to_json_string()), sequence=16).numel == model.numel
    layer = next(child for child in module.modules() if isinstance(child, nn.ModuleList))[0]
    grown = model.of_layers(model.num_layers + 1).numel - model.numel
    assert grown == sum(param.numel() for param in layer.parameters())


def test_units_are_those_that_the_optimizer_gathers() -> None:
    config, _ = _built("GPT2", SMALL_GPT2)
    found = [unit.numels for unit in Model.of_config(config).units for _ in range(unit.repeats)]
    layer = [24, 24, 24 * 72, 72, 24 * 24, 24, 24, 24, 24 * 96, 96, 96 * 24, 24]
    assert list(map(sorted, found)) == list(map(sorted, [[83 * 24], [32 * 24], layer, layer, layer, [24, 24]]))
    mixed = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3)])
    with pytest.raises(ConfigError, match="equal layers"):
        Model.of_module(mixed, num_layers=3, hidden=2).of_layers(4)


def test_the_class_that_the_configuration_names_is_counted() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: it is in the bench extra")
    config = transformers.BertConfig(num_hidden_layers=3, hidden_size=24, num_attention_heads=4, vocab_size=83)
    config.architectures = ["BertForSequenceClassification"]
    expected = sum(param.numel() for param in transformers.BertForSequenceClassification(config).parameters())
    assert Model.of_config(config).numel == expected
    assert Model.of_config(config).read == "BertForSequenceClassification, 3 layers of 24"


def test_experts_that_a_token_is_not_sent_to_take_no_time() -> None:
    """Computation is that of a model with as many experts as a token uses, except for the router's rows."""
    config, _ = _built("Mixtral", {})
    small = _built("Mixtral", {"num_local_experts": 2})[1]
    model = Model.of_config(config, sequence=1000)
    active = sum(param.numel() for param in small.parameters()) + 32 * 6 * 4096
    assert model.active_numel == active
    assert model.active_numel - model.of_layers(31).active_numel == (active - 2 * 32000 * 4096 - 4096) / 32
    row = plan(model, CLUSTERS["8xa100"], Job(is_checkpointed=False))[0]
    flops = (6 * active + 12 * 32 * 4096 * 1000) * 1000
    assert row.times.computation == pytest.approx(flops / (CLUSTERS["8xa100"].tflops * 1e12 * 0.45))


def test_the_command_says_what_it_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1} | SMALL))
    assert main(["plan", "--model", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "read: MixtralForCausalLM, 3 layers of 24" in shown
    assert "a token uses" in shown
    numel = Model.of_config(json.loads(path.read_text())).numel
    assert main(["estimate", str(numel), "--largest-layer", str(24 * (4 * 3 * 50 + 4 + 24 + 24 + 24 + 2))]) == 0
    by_number = capsys.readouterr().out
    assert main(["estimate", str(path)]) == 0
    assert capsys.readouterr().out == by_number
    assert main(["estimate", "13b"]) == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plan", "--model", "nothing.json"], "there is no file nothing.json: a model must be one of"),
        (["estimate", "nothing"], "there is no file nothing: a model must be one of"),
    ],
)
def test_what_is_not_there(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    shown = capsys.readouterr().err
    assert text in shown
    assert "nothing" in shown


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"model_type": "nothing"}, "cannot build model_type='nothing'.*of_module.*--parameters"),
        (SMALL, "cannot build model_type=None"),
        ({"model_type": "llama", "architectures": ["GPT2LMHeadModel"]} | SMALL, "GPT2LMHeadModel is no model of Llama"),
        ({"model_type": "llama", "architectures": ["AutoConfig"]} | SMALL, "AutoConfig"),
        ({"model_type": "llama", "architectures": ["nothing"]} | SMALL, "nothing"),
        ({"model_type": "llama"} | SMALL | {"intermediate_size": [1, 2]}, "intermediate_size"),
        ({"model_type": "llama"} | SMALL | {"num_hidden_layers": 10**9}, "1 to 10000 layers"),
        ({"model_type": "mixtral", "num_local_experts": 10**9} | SMALL, "1 to 10000 layers and experts"),
        ({"model_type": "t5", "num_layers": 2}, "one stack of layers"),
        ({"model_type": "clip", "architectures": ["CLIPModel"]}, "one stack of layers"),
        ({"model_type": "llava"}, "one stack of layers"),
        ({"model_type": "jetmoe", "num_hidden_layers": 2, "num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ({"model_type": "llama"} | SMALL | {"hidden_size": -1}, "cannot build"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3} | SMALL,
            "num_experts_per_tok=3, num_experts=2",
        ),
        ({"model_type": "gpt2"} | SMALL_GPT2, "1 to 32 tokens for this model: sequence=64"),
    ],
)
def test_what_cannot_be_counted_is_refused(values: dict[str, Any], text: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: it is in the bench extra")
    with pytest.raises(ConfigError, match=text):
        Model.of_config(values, sequence=64)


def test_a_model_without_a_longest_sequence_needs_one() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: it is in the bench extra")
    bloom = {"model_type": "bloom", "n_layer": 2, "hidden_size": 16, "n_head": 2, "vocab_size": 83}
    assert Model.of_config(bloom, sequence=4096).sequence == 4096
    with pytest.raises(ConfigError, match="names no longest sequence: sequence=None; set --sequence"):
        Model.of_config(bloom)
    assert Model.of_config({"model_type": "llama"} | SMALL, sequence=64).sequence == 64  # no table: rotary positions


def test_kernels_that_are_not_installed_are_not_needed() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: it is in the bench extra")
    assert Model.of_config({"model_type": "llama", "_attn_implementation": "flash_attention_2"} | SMALL).numel > 0


def test_without_transformers_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="pip install transformers, or give the model on the meta device"):
        Model.of_config({"model_type": "gpt2"} | SMALL_GPT2)
