"""Which optimizer updates offloaded states, and what ``effective`` reports about states and activations."""

# covers zero/_runtime/optimizer_parts.py zero/_runtime/suspended_memory.py zero/_runtime/validate.py

from __future__ import annotations

from typing import Any

import torch

import zero
from tests.ranks import run_ranks
from tests.zero.logs import logged
from tests.zero.models import new_model

ON_HOST = {"device": "cpu"}
ADAM = {"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}
CHOICES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("Adam", ADAM, "zero's CPUAdam", {**ADAM, "betas": (0.8, 0.9), "adamw_mode": True}),
    ("Adam", ADAM | {"adam_w_mode": False}, "zero's CPUAdam", {"adamw_mode": False, "eps": 1e-6}),
    ("AdamW", {"lr": 1e-3}, "zero's CPUAdam", {"adamw_mode": True, "weight_decay": 0.0}),
    ("AdamW", {"lr": 1e-3, "torch_adam": True}, "torch's AdamW", {"weight_decay": 0.0}),
    ("Adagrad", {"lr": 1e-3}, "zero's CPUAdagrad", {"lr": 1e-3}),
    ("Lion", {"lr": 1e-3}, "zero's CPULion", {"lr": 1e-3}),
    ("SGD", {"lr": 1e-3, "momentum": 0.9}, "torch's SGD", {"momentum": 0.9}),
    ("RMSprop", {"lr": 1e-3}, "torch's RMSprop", {"lr": 1e-3}),
]


def _initialized(config: dict[str, Any], optimizer: Any = None) -> tuple[zero.ZeroOptimizer, str]:
    """Initialize and close; return the engine and all log messages."""
    with logged() as texts:
        engine, wrapped, *_ = zero.initialize(model=new_model(), optimizer=optimizer, config=config)
    engine.destroy()
    return wrapped, "\n".join(texts)


def _check_json(rank: int) -> None:
    for kind, params, name, settings in CHOICES:
        config: dict[str, Any] = {"optimizer": {"type": kind, "params": params}}
        wrapped, text = _initialized(config | {"zero_optimization": {"stage": 2, "offload_optimizer": ON_HOST}})
        sentence = f"masters and moments are stored in host memory, updated on the host by {name}"
        assert sentence in str(wrapped.effective)
        assert text.count(sentence) == 1
        group = wrapped.param_groups[0]
        assert {key: group[key] for key in settings} == settings
    for zero_section in ({"stage": 2}, {"stage": 0, "offload_optimizer": ON_HOST}):
        wrapped, _ = _initialized({"optimizer": {"type": "Adam"}, "zero_optimization": zero_section})
        assert "on the host" not in str(wrapped.effective)
        assert type(wrapped.parts.inner) is torch.optim.AdamW


def test_the_jsons_optimizer_becomes_the_hosts() -> None:
    run_ranks(1, _check_json)


def _check_given(rank: int) -> None:
    for key in ({}, {"zero_force_ds_cpu_optimizer": True}, {"zero_force_ds_cpu_optimizer": False}):
        for cls, name in ((torch.optim.Adam, "torch's Adam"), (zero.CPUAdam, "zero's CPUAdam")):
            section = {"stage": 1, "offload_optimizer": ON_HOST | {"ratio": 0.5}, "reduce_bucket_size": 3000}
            config = {"zero_optimization": section, **key}
            wrapped, text = _initialized(config, lambda params, cls=cls: cls(params, lr=1e-3))
            assert type(wrapped.parts.inner) is cls
            sentence = f"% of the masters and moments are stored in host memory, updated on the host by {name}"
            assert sentence in str(wrapped.effective)
            assert text.count(sentence) == (rank == 0)
            assert "zero_force_ds_cpu_optimizer=" not in text


def test_an_optimizer_that_is_given_is_taken() -> None:
    run_ranks(2, _check_given)


def _check_activations(rank: int, folder: str) -> None:
    section: dict[str, Any] = {
        "partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 4,
    }  # fmt: skip
    for more, zcomm, expected in (
        ({}, {}, "stored on the device, in one buffer with room for 4; inactive: partition_activations (no other rank"),
        (
            {"cpu_checkpointing": True, "profile": True},
            {},
            "stored in host memory, in one buffer with room for 4, times",
        ),
        (
            {},
            {"activations": "nvme", "activations_nvme_path": folder},
            f"stored in files below {folder}, in one buffer",
        ),
    ):
        config = {"zero_optimization": {"stage": 1}, "activation_checkpointing": section | more, "zcomm": zcomm}
        wrapped, text = _initialized(config, torch.optim.Adam)
        assert f"inputs of checkpointed functions are {expected}" in str(wrapped.effective)
        assert text.count("inactive: partition_activations") == (rank == 0)
    wrapped, _ = _initialized({"zero_optimization": {"stage": 1}}, torch.optim.Adam)
    assert "checkpointed" not in str(wrapped.effective)


def test_effective_says_where_activations_rest(tmp_path: Any) -> None:
    run_ranks(2, _check_activations, str(tmp_path))
