"""``peft``'s LoRA adapters on transformers' GPT-2 at stages 2 and 3 train as in one process without ZeRO."""

# covers bench/comparison/__init__.py bench/contenders/__init__.py

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero as deepspeed
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("peft", "transformers")),
        reason="needs peft, of the extra test, and transformers, of the extra bench",
    ),
]
VOCAB, LENGTH, STEPS = 64, 16, 4


def _model(*, is_checkpointed: bool = False) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=64, n_layer=3, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    base = GPT2LMHeadModel(config)
    lora = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn", "c_proj"], init_lora_weights=False,
        fan_in_fan_out=True, task_type="CAUSAL_LM",
    )  # fmt: skip
    model: Any = get_peft_model(base, lora)
    if is_checkpointed:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model  # type: ignore[no-any-return]


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=generator)
    return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]


def _trained_alone(world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    model = _model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = torch.stack([_loss(model, step, rank) for rank in range(world_size)]).mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def _check(rank: int, stage: int, options: dict[str, Any], tolerance: float) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # peft calls functions that transformers has deprecated
    losses, expected = _trained_alone(2)
    model = _model(is_checkpointed=options.pop("is_checkpointed", False))
    trainable = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in trainable)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, **options},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
    for step in range(STEPS):
        loss = _loss(engine, step, rank)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        assert abs(mean.item() / 2 - losses[step]) < 10 * tolerance
    params = dict(engine.module.named_parameters())
    assert sum(p.numel() for p in params.values() if p.requires_grad) == numel
    with deepspeed.zero.GatheredParameters(list(params.values())):
        for name, value in expected.items():
            torch.testing.assert_close(params[name].detach(), value, rtol=0, atol=tolerance, msg=name)
        with torch.no_grad(), engine.module.disable_adapter():  # type: ignore[operator]
            assert _loss(engine.module, 0, rank).isfinite()
    saved = sum(v.numel() for v in _adapter(engine.module).values())  # like state_dict(): full on rank 0
    assert saved == (numel if rank == 0 or stage < 3 else 0)
    engine.destroy()


def _adapter(model: nn.Module) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("stage", "options", "tolerance"),
    [
        (2, {}, 2e-5),
        (3, {}, 2e-5),
        (3, {"is_checkpointed": True}, 2e-5),
        (3, {"zero_quantized_nontrainable_weights": True}, 5e-2),
    ],
    ids=["stage 2", "stage 3", "checkpointing", "INT8 base"],
)
def test_lora_trains_as_alone(stage: int, options: dict[str, Any], tolerance: float) -> None:
    run_ranks(2, _check, stage, dict(options), tolerance)
