"""Loops that run models without gradients in each step are described as what they do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlens_perf as perf
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory

pytestmark = pytest.mark.long  # Each job has a sidecar.
STEPS, TOKENS = 40, 8


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return self.linear(batch)

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        for _ in range(TOKENS):
            tokens = torch.cat([tokens, self(tokens[-1:])])
        return tokens


def generate(model: Network, reference: Network) -> torch.Tensor:
    """Train on samples of the model itself, as GRPO does."""
    return model.generate(torch.ones(1, 4))


def evaluate(model: Network, reference: Network) -> torch.Tensor:
    """Evaluate all data in each step, as scripts on graphs do."""
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 4))
    model.train()
    return torch.ones(2, 4)


def refer(model: Network, reference: Network) -> torch.Tensor:
    """Compare with a copy that is not trained, as DPO does."""
    with torch.no_grad():
        return reference(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (generate, f"{TOKENS} for each backward pass: generation, sampling"),
        (evaluate, "a reference, teacher or EMA network, sampling or an evaluation"),
        (refer, "a reference, teacher or EMA network, sampling or an evaluation"),
    ],
)
def test_passes_without_gradients_are_named(program: Any, expected: str, tmp_path: Path) -> None:
    model, reference = Network(), Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with perf.watch(dir=str(tmp_path), report="text") as w:
        for _ in range(STEPS):
            batch = program(model, reference)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert w.run_dir is not None
    report = load_report(RunDirectory(w.run_dir))

    text = " ".join(each.text for each in report["verdicts"])
    assert "Forward passes without gradients take " in text
    assert expected in text
    assert report["steps"]["count"] == STEPS
