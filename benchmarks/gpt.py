"""A small GPT whose step is dispatch with almost no arithmetic: the worst case for a recorder."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.dropout1, self.dropout2 = (
            nn.Linear(width, width),
            nn.Dropout(0.0),
            nn.Dropout(0.0),
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        normed = self.norm1(x)
        q, k, v = (
            part(normed).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, width)
        )
        x = x + self.dropout1(self.out(mixed))
        return x + self.dropout2(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(
        self, layers: int = 6, width: int = 32, vocabulary: int = 256, context: int = 8
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(0.0)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        self.register_buffer("indices", torch.arange(context))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.tokens(ids) + self.positions(self.indices))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
