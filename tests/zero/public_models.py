"""Public models: architectures of transformers, built small from their configurations.

Each comes with the batches of one rank and step, and computes its own loss. transformers is imported when a model is
built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

VOCAB, WIDTH, LENGTH, MICRO_BATCH = 61, 32, 8, 2
IMAGE, FRAMES, MELS = 8, 16, 8
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Public(NamedTuple):
    """An architecture of transformers: its class, that of its configuration, and the sizes."""

    model: str
    config: str
    sizes: dict[str, Any]
    inputs: str = "tokens"


PUBLIC = {
    "GPT-2": Public(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 16}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "Llama": Public(
        "LlamaForCausalLM",
        "LlamaConfig",
        {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "max_position_embeddings": 16},
    ),
    "BERT": Public(
        "BertForMaskedLM",
        "BertConfig",
        {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "T5": Public(
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        | {"decoder_start_token_id": 0},
    ),
    "Mixtral": Public(
        "MixtralForCausalLM",
        "MixtralConfig",
        {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "num_local_experts": 3, "max_position_embeddings": 16},
    ),
    "ViT": Public(
        "ViTForImageClassification",
        "ViTConfig",
        {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"image_size": IMAGE, "patch_size": 4, "num_labels": 5}
        | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "images",
    ),
    "Whisper": Public(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": MELS, "dropout": 0.0}
        | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
        | {"max_source_positions": FRAMES // 2, "max_target_positions": 16, "decoder_start_token_id": 1},
        "sounds",
    ),
    "BLOOM": Public(
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": WIDTH, "n_layer": 2, "n_head": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
}


def new_public(name: str) -> nn.Module:
    """The model, in float32, from the same seed on every rank."""
    import transformers

    public = PUBLIC[name]
    words = {} if public.inputs == "images" else {"vocab_size": VOCAB, **SPECIAL}
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, public.model)(
        getattr(transformers, public.config)(**public.sizes, **words)
    )
    return model


def public_batch(name: str, step: int, rank: int) -> dict[str, Tensor]:
    """Keyword arguments of the forward. Every rank has equally many targets, because losses are means over them."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(3, VOCAB, (MICRO_BATCH, LENGTH), generator=generator)
    draw: dict[str, Callable[[], dict[str, Tensor]]] = {
        "tokens": lambda: {"input_ids": tokens, "labels": tokens},
        "images": lambda: {
            "pixel_values": torch.randn(MICRO_BATCH, 3, IMAGE, IMAGE, generator=generator),
            "labels": tokens[:, 0] % 5,
        },
        "sounds": lambda: {
            "input_features": torch.randn(MICRO_BATCH, MELS, FRAMES, generator=generator),
            "labels": tokens,
        },
    }
    return draw[PUBLIC[name].inputs]()


def public_loss(model: nn.Module, name: str, step: int, rank: int) -> Tensor:
    loss: Tensor = model(**public_batch(name, step, rank)).loss
    return loss
