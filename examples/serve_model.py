"""Inference, recorded: each request is a step, and each generated token one forward pass in it.

usage: python examples/serve_model.py [--requests N] [--slow-every N]

--slow-every plants a slow request: 1 of N does its tokenizing three times.
"""

import argparse
import time

import torch
from torch import nn

import torchlens_perf as perf


class Decoder(nn.Module):
    """A tiny model that gets a sequence and answers with the next token."""

    def __init__(self, vocabulary: int = 128, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens)))[:, -1].argmax(-1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--slow-every", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Decoder().eval()
    with torch.inference_mode(), perf.watch(model) as w:
        w.step()  # from here on nothing but this call ends a step; without it, each call of the model would be one
        for request in range(options.requests):
            with perf.section("tokenize"):
                repeat = 3 if options.slow_every and request % options.slow_every == 0 else 1
                time.sleep(0.001 * repeat)
                tokens = torch.randint(128, (4, 16))
            for _ in range(8):
                tokens = torch.cat((tokens, model(tokens)), 1)
            w.step(tokens=4 * 8)  # work in this request: a longer answer is no slower one
    print("answered", options.requests)


if __name__ == "__main__":
    main()
