"""A GPT of the size of GPT-2 small (124 million parameters), and a small GPT whose step time is the
time of kernel launches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = (
            self.qkv(x)
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        context: int = 1024,
        words: int = 50304,
    ):
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(words, width),
            nn.Parameter(torch.zeros(context, width)),
        )
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())


def trainer(
    batch: int = 8, length: int = 1024, *, capturable: bool = False, **size: int
) -> tuple[GPT, Callable[[], None]]:
    """Return a model on the device and its training step in bf16."""
    torch.manual_seed(0)
    model = GPT(context=length, **size).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True, capturable=capturable)
    ids = torch.randint(0, model.tokens.num_embeddings, (batch, length), device="cuda")
    wanted = ids.roll(-1, 1)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids, wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not capturable)

    return model, step
