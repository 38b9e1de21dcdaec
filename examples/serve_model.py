"""Record inference: each request is a step, and each generated token is one forward pass in it.

    usage: python examples/serve_model.py [--requests N] [--slow-every N]

--slow-every N makes every Nth request slow: its tokenizing runs three times.
"""

import argparse
import time

import torch
from torch import nn

import torchlens_perf as perf


class Decoder(nn.Module):
    """A tiny model that returns the next token of a sequence."""

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
        # From here on only this call ends a step. Without it, each forward pass would be a step.
        w.step()
        for request in range(options.requests):
            with perf.section("tokenize"):
                repeat = 3 if options.slow_every and request % options.slow_every == 0 else 1
                time.sleep(0.001 * repeat)
                tokens = torch.randint(128, (4, 16))
            for _ in range(8):
                tokens = torch.cat((tokens, model(tokens)), 1)
            # `tokens` is the work of this request, so a longer answer does not count as a slower
            # one.
            w.step(tokens=4 * 8)
    print("answered", options.requests)


if __name__ == "__main__":
    main()
