"""transformers' GPT-2 with random weights. Import this module only if the model is trained: it imports transformers."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch
from gpt_model import VOCABULARY
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["build"]

SEQ_LENGTH = 64


class Gpt2Loss(nn.Module):
    """GPT2LMHeadModel, but the forward returns the loss."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.gpt2 = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy in nats per byte, float32 []."""
        return cross_entropy(self.gpt2(input_ids=tokens).logits.flatten(0, 1).float(), targets.flatten())


def build(dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Build a GPT-2 of about 1 million parameters."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQ_LENGTH, n_embd=192, n_layer=2, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Gpt2Loss(config).to(device, dtype)
