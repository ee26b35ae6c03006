"""The GPT of gpt_model.py as two modules, each one unit.

In a model this small the exchange of a layer has a few kilobytes; with a unit for each layer, latency would dominate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from gpt_model import GPT, GPTConfig
from torch import Tensor, nn

__all__ = ["HalvedGPT"]


class Front(nn.Module):
    """The embeddings and the first block."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = gpt.token_embedding, gpt.position_embedding
        self.block = gpt.blocks[0]

    def forward(self, tokens: Tensor) -> Tensor:
        """Activations [batch, seq, hidden] of int64 ``tokens`` [batch, seq]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.block(self.token_embedding(tokens) + self.position_embedding(positions))
        return x


class Back(nn.Module):
    """The last block, the norm and the head."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.block, self.final_norm, self.head = gpt.blocks[1], gpt.final_norm, gpt.head

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, seq, 256]."""
        logits: Tensor = self.head(self.final_norm(self.block(x)))
        return logits


class HalvedGPT(nn.Module):
    """A GPT of two blocks with the same values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.num_layers != 2:
            raise ValueError(f"num_layers must be 2, one for each half: num_layers={config.num_layers}")
        gpt = GPT(config)
        self.front, self.back = Front(gpt), Back(gpt)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy in nats per byte, float32 []."""
        return F.cross_entropy(self.back(self.front(tokens)).flatten(0, 1).float(), targets.flatten())
