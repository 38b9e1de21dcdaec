"""The choice of the host's or the device's clock for a rank, made before its first bins."""

from __future__ import annotations

import numpy as np

from tests.analysis.statistics.test_device_steps import device, records
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.run.ring import Kind
from torchlens_perf.verdicts.stragglers.judged_steps import (
    DEVICE,
    HOST,
    SILENT_AFTER_STEPS,
    UNDECIDED,
    JudgedSteps,
)


def step(number: int, *, timed: int | None = None) -> np.ndarray:
    """Return a host step of 10 ms, and device times of 8 ms for the step `timed`."""
    rows = [(Kind.STEP, number, 10 * number, 10)]
    if timed is not None:
        rows.append(device(timed, Kind.STEP, 10 * number, 8))
    return records(*rows)


def judged(judge: JudgedSteps, made: np.ndarray, on_device: bool | None) -> list[tuple[int, int]]:
    """Return number and duration in ms of the steps that can be judged now."""
    table = judge.add_records(made, assemble_steps(made), on_device=on_device)
    return (
        []
        if table is None
        else list(zip(table.step.tolist(), (table.duration_ns // 10**6).tolist(), strict=True))
    )


def test_rank_on_the_cpu_is_judged_by_the_host_at_once() -> None:
    judge = JudgedSteps()
    assert [judged(judge, step(n), on_device=False) for n in range(2)] == [[(0, 10)], [(1, 10)]]
    assert judge.by == HOST


def test_rank_on_a_device_is_judged_by_the_device() -> None:
    """Host steps before the first device time are not used. Device times arrive late."""
    judge = JudgedSteps()
    found = [
        judged(judge, step(n, timed=n - 2 if n >= 3 else None), on_device=True) for n in range(6)
    ]

    assert found == [[], [], [], [(1, 8)], [(2, 8)], [(3, 8)]]
    assert (judge.by, judge.decide_for_host()) == (DEVICE, None)


def test_steps_wait_until_the_device_of_a_rank_is_known() -> None:
    """The model was on the CPU when the watch began."""
    judge = JudgedSteps()
    known = [None, None, True, True, True]
    found = [judged(judge, step(n, timed=n - 2 if n >= 3 else None), known[n]) for n in range(5)]

    assert found == [[], [], [], [(1, 8)], [(2, 8)]]
    assert judge.by == DEVICE


def test_rank_on_a_device_without_times_is_judged_by_the_host() -> None:
    """All steps of the host are used, and device times that arrive later are not."""
    judge = JudgedSteps()
    found = [judged(judge, step(n), on_device=True) for n in range(SILENT_AFTER_STEPS)]
    late = judged(judge, step(SILENT_AFTER_STEPS, timed=3), on_device=True)

    assert found[:-1] == [[]] * (SILENT_AFTER_STEPS - 1)
    assert found[-1] == [(n, 10) for n in range(SILENT_AFTER_STEPS)]
    assert (late, judge.by) == ([(SILENT_AFTER_STEPS, 10)], HOST)


def test_rank_of_a_short_run_is_judged_by_the_host() -> None:
    judge = JudgedSteps()
    assert judged(judge, step(0), on_device=None) == []
    rest = judge.decide_for_host()
    assert rest is not None
    assert (rest.step.tolist(), judge.by) == ([0], HOST)
    assert JudgedSteps().by == UNDECIDED


def test_clock_chosen_by_an_earlier_sidecar_is_kept() -> None:
    assert judged(JudgedSteps(HOST), step(0), on_device=True) == [(0, 10)]
    assert judged(JudgedSteps(DEVICE), step(0), on_device=True) == []
