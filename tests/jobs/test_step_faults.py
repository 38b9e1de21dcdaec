"""Tests in which each of our functions in the steps fails in turn.

Training continues with the same bits, and errors are counted.

Excluded are the recorder's marks, which are in C by default. A guard around each Python mark would
double its cost.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchlens_perf as perf
from tests.support.interruptions import failing, functions_called
from tests.support.long import long
from tests.support.process_state import changed_since, state
from tests.support.recording import EVERYTHING
from torchlens_perf.errors import RAISE, swallowed
from torchlens_perf.recorder import step_callbacks

PACKAGE = str(Path(perf.__file__).parent)
# For these functions, an error at their start has the same effect as an error in the functions that
# they call.
IN_TORCHS_PLACE = {
    "call_hook",
    "call_native",
    "timed_next",
    "timed_iter",
    "timed_backward",
    "scaler_step_and_report",
    "step_and_report",
}


@pytest.fixture(autouse=True)
def _lenient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Do not raise internal errors, as in a user's process."""
    monkeypatch.setenv(RAISE, "0")
    monkeypatch.setattr(swallowed, "by_place", type(swallowed.by_place)())
    # Make the callbacks run at each step, even on a fast machine.
    monkeypatch.setattr(step_callbacks, "_THROTTLE_NS", 0)
    # A garbage collection could call our functions in one run and not in the next.
    gc.disable()
    yield
    gc.enable()
    swallowed.by_place.clear()


class Job:
    """A deterministic loop with data, sections, gradient accumulation, a scaler and two
    optimizers.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
        self.optimizers = [
            torch.optim.AdamW(self.model[0].parameters()), torch.optim.SGD(self.model[2].parameters(), 0.1)
        ]  # fmt: skip
        self.data = TensorDataset(torch.randn(8, 4))

    def steps(self) -> list[Any]:
        """Make two steps of two micro-steps each. Return the parameters."""
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for number, (batch,) in enumerate(DataLoader(self.data, 2)):
            with perf.section("all of it"):
                scaler.scale(self.model(batch).square().mean()).backward()
            if number % 2:
                for optimizer in self.optimizers:
                    scaler.step(optimizer)
                scaler.update()
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
        return [parameter.tolist() for parameter in self.model.parameters()]


def begin(job: Job, folder: Path) -> perf.Watch:
    return perf.watch(
        job.model,
        job.optimizers,
        dir=str(folder),
        sidecar=False,
        report="off",
        ring_records=4096,
        **EVERYTHING,
    ).__enter__()


def functions_in_steps(folder: Path) -> list[CodeType]:
    """Return the package's functions that run in the third and fourth step, except those of
    errors.py.
    """
    # The first run imports modules.
    for _ in range(2):
        job = Job()
        watch = begin(job, folder)
        job.steps()
        functions = functions_called(job.steps, PACKAGE)
        watch.__exit__(None, None, None)
    return [
        code
        for code in functions
        if not code.co_filename.endswith("errors.py") and code.co_name not in IN_TORCHS_PLACE
    ]


@pytest.mark.slow
@pytest.mark.parametrize("every", [4, *long(1)])
def test_error_in_any_function_in_the_steps_is_counted_and_harmless(
    every: int, tmp_path: Path
) -> None:
    """The error is logged, training is the same, and no hook stays.

    One in `every` functions also raises a KeyboardInterrupt, which reaches the user.
    """
    plain = Job()
    expected = [plain.steps(), plain.steps()]
    functions = functions_in_steps(tmp_path)
    gc.collect()
    gc.freeze()
    torch.manual_seed(0)
    before, problems = state(), []
    for number, code in enumerate(functions):
        for error in (RuntimeError("planted"), KeyboardInterrupt())[: 1 + (number % every == 0)]:
            name = (
                f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_name}"
                f" {type(error).__name__}"
            )
            swallowed.by_place.clear()
            job, found, interrupted, other = Job(), [], False, None
            watch = begin(job, tmp_path)
            found.append(job.steps())
            try:
                with failing(code, error) as raised:
                    found.append(job.steps())
            except KeyboardInterrupt:
                interrupted = True
            except BaseException as went_through:
                other = went_through
            error.__traceback__ = None
            watch.__exit__(None, None, None)
            counted = sum(swallowed.by_place.values())
            gc.collect()
            torch.manual_seed(0)
            different = changed_since(before)
            wrong = {
                "was not called again": not raised,
                f"went through: {other!r}": other is not None,
                "Ctrl-C did not go through": (
                    isinstance(error, KeyboardInterrupt) and not interrupted
                ),
                "trains otherwise": not interrupted and other is None and found != expected,
                "was not counted": not interrupted and other is None and not counted,
                f"left attached: {different}": bool(different),
            }
            problems += [f"{name}: {what}" for what, is_wrong in wrong.items() if is_wrong]

    assert not problems, "\n".join(problems)
    assert len(functions) > 10
