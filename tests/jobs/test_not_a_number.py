"""Test of the report on a run whose loss is NaN.

tests/support/model_zoo.py has a case that compares the parameters of such a run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlens_perf as perf
from tests.sidecar.test_node import finish
from torchlens_perf.commands.cli import main
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.place.node import node_name

STEPS = 60


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")


def test_report_of_a_diverged_run_contains_only_finite_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every step is counted as usual."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    with perf.watch(model, optimizer, dir=str(tmp_path), sidecar=False, report="off") as watch:
        for _ in range(STEPS):
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert loss.isnan()
    assert watch.run_dir is not None
    finish(RunDirectory(watch.run_dir), node_name())
    capsys.readouterr()
    assert main(["report", str(watch.run_dir), "--json"]) == 0
    value = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert main(["report", str(watch.run_dir)]) == 0

    assert value["steps"]["count"] == STEPS
    assert value["quality"]["lost"] == 0
    assert "nan" not in capsys.readouterr().out.lower()
