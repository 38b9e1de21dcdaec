"""Models of many kinds with one training step each, whose operations are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Step = Callable[[], Any]
MODELS: dict[str, Callable[[], Step]] = {}


def counted(make: Callable[[], Step]) -> Callable[[], Step]:
    MODELS[make.__name__] = make
    return make


class Block(nn.Module):
    """A decoder's block: grouped-query attention and an MLP."""

    def __init__(
        self, size: int = 32, heads: int = 4, kv_heads: int = 4, gated: bool = False, inner: int = 0
    ) -> None:
        super().__init__()
        inner, self.heads, self.kv_heads = inner or 4 * size, heads, kv_heads
        kv = size * kv_heads // heads
        self.query, self.key, self.value = (
            nn.Linear(size, each, bias=False) for each in (size, kv, kv)
        )
        self.out = nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, inner), nn.Linear(inner, size)
        self.gate = nn.Linear(size, inner) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        def split(part: Tensor, heads: int) -> Tensor:
            return part.unflatten(-1, (heads, -1)).transpose(1, 2)

        mixed = functional.scaled_dot_product_attention(
            split(self.query(x), self.heads), split(self.key(x), self.kv_heads),
            split(self.value(x), self.kv_heads), is_causal=True, enable_gqa=self.heads != self.kv_heads,
        )  # fmt: skip
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        inner = functional.gelu(self.up(x))
        return x + self.down(inner if self.gate is None else inner * self.gate(x))


class Decoder(nn.Module):
    """A GPT of the given blocks."""

    def __init__(
        self, make: Callable[[], nn.Module] = Block, *, layers: int = 2, recomputes: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(make() for _ in range(layers))
        self.head = nn.Linear(32, 50, bias=False)
        self.recomputes = recomputes

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


class Experts(nn.Module):
    """A block whose tokens each go to two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            result = result.index_add(0, row, expert(flat[row]) * weights[row, place, None])
        return x + result.view_as(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.up = nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1)
        self.last = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        low = functional.relu(self.down(x))
        return self.last(torch.cat([x, self.up(low + self.middle(low))], 1))


class MatrixAttention(nn.Module):
    """Attention by products of stacks of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.all(x).chunk(3, -1)
        return (query @ key.transpose(1, 2)).softmax(-1) @ value


def training(model: Callable[..., Any], *inputs: Tensor) -> Step:
    """Return one forward and backward pass."""
    return lambda: model(*inputs).sum().backward()


def _tokens() -> Tensor:
    return torch.randint(0, 50, (3, 20))


@counted
def mlp() -> Step:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    return training(model, torch.randn(5, 16))


@counted
def residual_network() -> Step:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=2, padding=3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.Flatten(), nn.Linear(16 * 64, 10),
    )  # fmt: skip
    return training(model, torch.randn(2, 3, 32, 32))


@counted
def u_net() -> Step:
    return training(UNet(), torch.randn(2, 3, 16, 16))


@counted
def audio_convolutions() -> Step:
    model = nn.Sequential(
        nn.Conv1d(1, 8, 9, stride=4), nn.ReLU(), nn.Conv1d(8, 8, 3, dilation=4, padding=4),
        nn.ConvTranspose1d(8, 1, 5, stride=3),
    )  # fmt: skip
    return training(model, torch.randn(2, 1, 200))


@counted
def video_convolutions() -> Step:
    return training(nn.Conv3d(2, 4, (3, 5, 5), padding=(1, 2, 0)), torch.randn(2, 2, 4, 9, 9))


@counted
def gpt() -> Step:
    return training(Decoder(), _tokens())


@counted
def gpt_with_grouped_queries() -> Step:
    return training(Decoder(lambda: Block(kv_heads=2, gated=True)), _tokens())


@counted
def gpt_with_experts() -> Step:
    return training(Decoder(Experts), _tokens())


@counted
def gpt_with_checkpoints() -> Step:
    return training(Decoder(recomputes=True), _tokens())


@counted
def gpt_in_bfloat16() -> Step:
    model, tokens = Decoder(), _tokens()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens).sum()
        loss.backward()

    return step


@counted
def vision_transformer() -> Step:
    patches = nn.Conv2d(3, 32, 8, stride=8)
    blocks, head = nn.Sequential(Block(), Block()), nn.Linear(32, 10)
    return training(
        lambda x: head(blocks(patches(x).flatten(2).transpose(1, 2)).mean(1)),
        torch.randn(2, 3, 32, 32),
    )


@counted
def bert() -> Step:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return training(nn.TransformerEncoder(layer, 2), torch.randn(3, 12, 32))


@counted
def encoder_and_decoder() -> Step:
    model = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
    return training(model, torch.randn(2, 9, 32), torch.randn(2, 7, 32))


@counted
def attention_by_products() -> Step:
    return training(MatrixAttention(), torch.randn(3, 10, 16))


@counted
def contraction() -> Step:
    left, right = (torch.randn(3, 4, 5, requires_grad=True) for _ in range(2))
    return lambda: torch.einsum("bij,bkj->bik", left, right).sum().backward()


@counted
def penalty_on_gradients() -> Step:
    """A backward pass through a backward pass. torch's counter allows no modules here."""
    inner, outer, x = (
        torch.randn(*shape, requires_grad=True) for shape in ((8, 16), (16, 1), (4, 8))
    )

    def step() -> None:
        (gradient,) = torch.autograd.grad(
            (torch.tanh(x @ inner) @ outer).sum(), x, create_graph=True
        )
        gradient.square().sum().backward()

    return step


@counted
def per_sample_gradients() -> Step:
    model, x = nn.Linear(6, 3), torch.randn(4, 6)
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, sample).square().sum()

    return lambda: torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
