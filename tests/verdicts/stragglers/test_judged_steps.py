"""By whose clock a rank is judged: decided once, before its first rows, and never mixed."""

from __future__ import annotations

import numpy as np

from tests.analysis.statistics.test_device_steps import device, records
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.run.ring import Kind
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE, HOST, SILENT_AFTER_STEPS, UNDECIDED, JudgedSteps


def step(number: int, *, timed: int | None = None) -> np.ndarray:
    """A host step of 10 ms, and the device's time, of 8 ms, of the step `timed`."""
    rows = [(Kind.STEP, number, 10 * number, 10)]
    if timed is not None:
        rows.append(device(timed, Kind.STEP, 10 * number, 8))
    return records(*rows)


def judged(judge: JudgedSteps, made: np.ndarray, on_device: bool | None) -> list[tuple[int, int]]:
    """Number and duration in ms of the steps that it is judged by now."""
    table = judge.add(made, assemble_steps(made), on_device=on_device)
    return [] if table is None else list(zip(table.step.tolist(), (table.duration_ns // 10**6).tolist(), strict=True))


def test_on_the_cpu_by_the_host_at_once() -> None:
    judge = JudgedSteps()
    assert [judged(judge, step(n), on_device=False) for n in range(2)] == [[(0, 10)], [(1, 10)]]
    assert judge.by == HOST


def test_on_a_device_by_its_clock() -> None:
    """The host's steps that came before the device's first time are not used; device times come late."""
    judge = JudgedSteps()
    found = [judged(judge, step(n, timed=n - 2 if n >= 3 else None), on_device=True) for n in range(6)]

    assert found == [[], [], [], [(1, 8)], [(2, 8)], [(3, 8)]]
    assert (judge.by, judge.rest()) == (DEVICE, None)


def test_a_model_that_was_on_the_cpu_when_the_watch_began() -> None:
    """Nobody knows yet what it computes on: its first steps wait for the device's clock."""
    judge = JudgedSteps()
    known = [None, None, True, True, True]
    found = [judged(judge, step(n, timed=n - 2 if n >= 3 else None), known[n]) for n in range(5)]

    assert found == [[], [], [], [(1, 8)], [(2, 8)]]
    assert judge.by == DEVICE


def test_a_silent_device_is_not_waited_for() -> None:
    """Then all of its host's steps are used, and device times that come after that are not."""
    judge = JudgedSteps()
    found = [judged(judge, step(n), on_device=True) for n in range(SILENT_AFTER_STEPS)]
    late = judged(judge, step(SILENT_AFTER_STEPS, timed=3), on_device=True)

    assert found[:-1] == [[]] * (SILENT_AFTER_STEPS - 1)
    assert found[-1] == [(n, 10) for n in range(SILENT_AFTER_STEPS)]
    assert (late, judge.by) == ([(SILENT_AFTER_STEPS, 10)], HOST)


def test_a_run_that_ends_before_it_is_decided() -> None:
    """It is judged by what there is; a run whose device nobody knows of waits for some steps only."""
    judge = JudgedSteps()
    assert judged(judge, step(0), on_device=None) == []
    rest = judge.rest()
    assert rest is not None
    assert (rest.step.tolist(), judge.by) == ([0], HOST)
    assert JudgedSteps().by == UNDECIDED


def test_an_earlier_sidecar_has_decided() -> None:
    assert judged(JudgedSteps(HOST), step(0), on_device=True) == [(0, 10)]
    assert judged(JudgedSteps(DEVICE), step(0), on_device=True) == []
