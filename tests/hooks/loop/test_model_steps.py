"""The number of steps that a model had made before this process, by its restored counter."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.processes import only_report, run_warm
from tests.support.recording import recorded

SAVED = 60


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, then: Callable[[], None]) -> None:
    """Make four steps."""
    for _ in range(4):
        model(torch.randn(2, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        then()


def restored(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer with the state of a checkpoint after SAVED steps."""
    made = copy.deepcopy(optimizer.state_dict())
    parameters = range(len(made["param_groups"][0]["params"]))
    moments = {"exp_avg": torch.zeros(1, 4), "exp_avg_sq": torch.zeros(1, 4)}
    made["state"] = {each: {"step": torch.tensor(float(SAVED)), **moments} for each in parameters}
    optimizer.load_state_dict(made)
    return optimizer


def offset_of(tmp_path: Path, make: Callable[[nn.Module], Any], *, by_hand: bool = False) -> Any:
    model = nn.Linear(4, 1, bias=False)
    optimizers = make(model)
    with recorded(tmp_path, model) as recording:
        assert recording.watch is not None
        step = recording.watch.step if by_hand else lambda: None
        train(model, *optimizers, then=step)
    assert recording.internal_errors == 0
    return recording.metadata["step_offset"]


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_counter_of_a_restored_optimizer_is_published(
    name: str, by_hand: bool, tmp_path: Path
) -> None:
    kind = getattr(torch.optim, name)
    make = lambda model: [restored(kind(model.parameters()))]  # noqa: E731
    assert offset_of(tmp_path, make, by_hand=by_hand) == SAVED


def test_new_optimizer_begins_at_zero_and_one_without_counter_is_not_known(tmp_path: Path) -> None:
    assert offset_of(tmp_path / "a", lambda model: [torch.optim.AdamW(model.parameters())]) == 0
    assert offset_of(tmp_path / "b", lambda model: [torch.optim.SGD(model.parameters())]) is None


def test_counter_of_several_optimizer_steps_in_a_step_is_not_used(tmp_path: Path) -> None:
    """w.step() shows that only after the first step."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = restored(torch.optim.Adam(model.parameters()))
    with recorded(tmp_path, model) as recording:
        for _ in range(3):
            for _ in range(5):
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
            assert recording.watch is not None
            recording.watch.step()
    assert recording.metadata["step_offset"] is None


def test_counter_on_a_device_is_not_read(tmp_path: Path) -> None:
    """Reading it would wait for the device. The meta device raises an error for that."""

    class OnDevice(torch.optim.AdamW):
        def step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
            for state in self.state.values():
                state["step"] = torch.zeros((), device="meta")

    assert offset_of(tmp_path, lambda model: [restored(OnDevice(model.parameters()))]) is None


def test_step_number_of_a_framework_is_published(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"""
import torch
from torchlens_perf.integrations.framework_run import FrameworkRun
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run, number = FrameworkRun({{}}, None), {SAVED}
run.begin(model, lambda: number)
for number in range({SAVED + 1}, {SAVED + 9}):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    run.step()
run.end()
""")
    done = run_warm([sys.executable, str(script)], tmp_path)
    assert done.returncode == 0, done.stderr
    (attempt,) = only_report(tmp_path)["goodput"].attempts
    assert (attempt.first_step, attempt.steps) == (SAVED, 8)
