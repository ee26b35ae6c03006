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
    matmul_dtype: torch.dtype | None = None
    """Matrix products are computed in this dtype; None: in the parameters' own."""

    def __post_init__(self) -> None:
        """Refuse a hidden size that the heads do not divide."""
        if self.hidden_size % self.num_attention_heads:
            msg = (
                "hidden_size must be a multiple of num_attention_heads: "
                f"hidden_size={self.hidden_size}, num_attention_heads={self.num_attention_heads}"
            )
            raise ValueError(msg)


class Linear(nn.Linear):
    """A linear layer that may compute in a wider dtype than its parameters have: see :func:`choose_matmul_dtype`."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype | None, *, bias: bool = True) -> None:
        """Create the parameters; ``dtype`` is that of the product, None for the parameters' own."""
        super().__init__(in_features, out_features, bias=bias)
        self.matmul_dtype = dtype

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        dtype = self.matmul_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x.to(dtype), self.weight.to(dtype), bias).to(x.dtype)


class Block(nn.Module):
    """Causal self-attention and an MLP four times as wide, each behind a LayerNorm and a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        """Create the layers of one block."""
        super().__init__()
        width, self.matmul_dtype = config.hidden_size, config.matmul_dtype
        self.num_attention_heads = config.num_attention_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = Linear(width, 3 * width, config.matmul_dtype)
        self.attention_output = Linear(width, width, config.matmul_dtype)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_input = Linear(width, 4 * width, config.matmul_dtype)
        self.mlp_output = Linear(4 * width, width, config.matmul_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations [batch, seq, hidden] to the same shape."""
        batch, seq, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, seq, 3, self.num_attention_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).to(self.matmul_dtype or x.dtype).unbind(0)
        # query, key, value: each [batch, head, seq, width of a head]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).to(x.dtype)
        x = x + self.attention_output(attended.transpose(1, 2).reshape(batch, seq, width))
        return x + self.mlp_output(F.gelu(self.mlp_input(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """The full model. ``forward`` returns the loss, so that a training loop needs nothing else."""

    def __init__(self, config: GPTConfig) -> None:
        """Create the layers and initialize them as GPT-2 does: normal(0, 0.02), smaller before a residual sum."""
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(VOCABULARY, config.hidden_size)
        self.position_embedding = nn.Embedding(config.seq_length, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)
        self.head = Linear(config.hidden_size, VOCABULARY, config.matmul_dtype, bias=False)
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
            x = self.run_block(block, x)
        return self.head(self.final_norm(x))

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        """Run one block; subclasses override it to checkpoint activations."""
        return block(x)


def choose_matmul_dtype(parameters: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which matrix products of ``parameters`` are fast on ``device``.

    Below AVX-512 torch multiplies bf16 matrices element by element, more than ten times slower than float32 ones; fp16
    matrices on any CPU without instructions for them.
    """
    is_slow = parameters == torch.float16 or torch.backends.cpu.get_cpu_capability() != "AVX512"
    return torch.float32 if device.type == "cpu" and is_slow else parameters
