"""Checks of numbers stay within their share of the time, and record nothing without the setting."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.recording import Recording, recorded
from torchlens_perf.hooks import numbers
from torchlens_perf.run.ring import Kind


def train(tmp_path: Path, steps: int, width: int = 64, **settings: Any) -> tuple[Recording, float]:
    """Return what was recorded, and the seconds that the steps took."""
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    began = time.perf_counter()
    with recorded(tmp_path, model, optimizer, **settings) as recording:
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(torch.ones(2, width)).sum()
            if step == 60:
                loss = loss * float("nan")
            loss.backward()
            optimizer.step()
            time.sleep(0.001)
    return recording, time.perf_counter() - began


def checks(recording: Recording) -> list[Any]:
    return [each for each in recording.records if each.kind == Kind.NUMBERS]


def test_gradient_norm_is_that_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth step is checked, however long that takes."""
    monkeypatch.setattr(numbers, "_SHARE", 1e9)
    torch.manual_seed(0)
    recording, _ = train(tmp_path, 80, check_numbers=4)
    found = {each.step: np.uint64(each.value0).view(np.float64) for each in checks(recording)}

    assert list(found) == list(range(3, 80, 4))
    assert {each.name for each in checks(recording)} == {"gradient norm"}
    finite = [value for step, value in found.items() if step < 60]
    assert len(set(finite)) == 1
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    model(torch.ones(2, 64)).sum().backward()
    assert finite[0] == pytest.approx(
        float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)), rel=1e-5
    )


def test_nothing_is_checked_by_default(tmp_path: Path) -> None:
    assert checks(train(tmp_path, 20)[0]) == []


def test_checks_take_at_most_their_share_of_the_time(tmp_path: Path) -> None:
    """Every step would be checked, each for longer than that."""
    recording, took_s = train(tmp_path, 400, width=128, check_numbers=1)
    spent_s = sum(each.duration_ns for each in checks(recording)) / 1e9

    assert 0 < spent_s < 1.2 * numbers._SHARE * took_s + 0.002
    assert len(checks(recording)) < 150


def test_loss_of_a_step_is_recorded_if_numbers_are_checked(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    for every, expected in ((0, []), (4, [1.5, 2.5])):
        with recorded(tmp_path, model, check_numbers=every) as recording:
            assert recording.watch is not None
            recording.watch.step(loss=1.5)
            recording.watch.step(loss=torch.tensor(2.5, requires_grad=True))
        values = [np.uint64(each.value0).view(np.float64) for each in checks(recording)]
        assert values == expected
