"""A small decoder-only transformer over bytes: the model that the benchmarks of this folder train.

    tokens [batch, seq] -> embedding + position -> blocks (attention, MLP; pre-norm) -> norm -> logits [batch, seq, 256]

The width of every tensor follows from three numbers, named as in Megatron's scripts: ``num_layers``, ``hidden_size``
and ``num_attention_heads``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY = 256  # one token for each value of a byte


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model."""

    num_layers: int = 4
    hidden_size: int = 256
    num_attention_heads: int = 4
    seq_length: int = 128

    def __post_init__(self) -> None:
        """Refuse a head width that is not a whole number."""
        if self.hidden_size % self.num_attention_heads:
            msg = (
                "hidden_size must be a multiple of num_attention_heads: "
                f"hidden_size={self.hidden_size}, num_attention_heads={self.num_attention_heads}"
            )
            raise ValueError(msg)


class Block(nn.Module):
    """Causal self-attention and an MLP four times as wide, each behind a LayerNorm and a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        """Create the layers of one block."""
        super().__init__()
        width = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_input = nn.Linear(width, 4 * width)
        self.mlp_output = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations [batch, seq, hidden] to the same shape."""
        batch, seq, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, seq, 3, self.num_attention_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, head, seq, width of a head]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_output(attended.transpose(1, 2).reshape(batch, seq, width))
        return x + self.mlp_output(F.gelu(self.mlp_input(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """The whole model. ``forward`` returns the loss, so that a training loop needs nothing else."""

    def __init__(self, config: GPTConfig) -> None:
        """Create the layers and initialize them as GPT-2 does: normal(0, 0.02), smaller before a residual sum."""
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(VOCABULARY, config.hidden_size)
        self.position_embedding = nn.Embedding(config.seq_length, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, VOCABULARY, bias=False)
        residual_std = 0.02 / (2 * config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                ends_residual = name.endswith(("attention_output.weight", "mlp_output.weight"))
                nn.init.normal_(parameter, std=residual_std if ends_residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte, float32 [], of int64 ``targets`` [batch, seq]."""
        return F.cross_entropy(self.logits(tokens).flatten(0, 1).float(), targets.flatten())

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the scores [batch, seq, 256] of the byte after each of int64 ``tokens`` [batch, seq]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))
