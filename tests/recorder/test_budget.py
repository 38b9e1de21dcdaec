"""The budget that limits the recorder's cost, and the steps in which modules are timed."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchlens_perf as perf
from tests.support.recorders import Rig
from torchlens_perf import _native
from torchlens_perf.recorder.budget import EVERY_STEP, Budget, Spent
from torchlens_perf.run.ring import Flag, Kind

STEPS = 512


class Job:
    """A simulated training loop that keeps to a budget."""

    def __init__(self, share: float, *, step_ns: float, modules: int, mark_ns: float) -> None:
        self.step_ns, self.modules, self.mark_ns = step_ns, modules, mark_ns
        self.other_ns = 0.0
        self._spent = Spent(0, 0, 0, 0, 0, 0, 0, 0)
        self.budget = Budget(share, self._spent)

    def run(self, windows: int) -> None:
        for _ in range(windows):
            self.run_window(self.other_ns)

    def run_window(self, other_ns: float, stop_ns: float = 0, in_mark_ns: float = 0) -> None:
        """Run steps for at least 50 ms, and update the budget.

        `stop_ns`: time for which the process is stopped. `in_mark_ns`: the part of it in a mark
        whose cost is measured.
        """
        steps = max(1, round(60e6 / self.step_ns), self.budget.modules.period)
        timed = max(1, steps // self.budget.modules.period)
        spent = self._spent
        self._spent = Spent(
            spent.step + steps,
            spent.time_ns + int(steps * self.step_ns + stop_ns),
            spent.tool_ns + int(steps * other_ns),
            spent.records + steps + timed * self.modules,
            spent.module_calls + timed * self.modules,
            spent.module_steps + timed,
            spent.measured_calls + 4,
            spent.measured_ns + int(4 * self.mark_ns + in_mark_ns),
        )
        self.budget.update(self._spent)

    def share(self, period: int) -> float:
        """Return the share of the time that recording takes with this period."""
        return (self.other_ns + self.mark_ns * (1 + self.modules / period)) / self.step_ns


def spent_on_phases(budget: Budget, step_ns: float, cost_ns: float, windows: int) -> None:
    """Run windows of 64 steps without modules, in which phases cost the given time if timed."""
    spent = budget._last
    for _ in range(windows):
        timed = 64 // budget.phases.period
        spent = spent._replace(
            step=spent.step + 64,
            time_ns=spent.time_ns + int(64 * step_ns),
            tool_ns=spent.tool_ns + int(64 * 1000 + timed * cost_ns),
            records=spent.records + 64,
            phases_ns=spent.phases_ns + int(timed * cost_ns),
            phase_steps=spent.phase_steps + timed,
        )
        budget.update(spent)


def test_device_phases_are_thinned_only_if_the_rest_exceeds_the_budget() -> None:
    """Half of the budget of 0.5 % is 10 us in a step of 4 ms."""
    for cost_us, period in ((5, 1), (15, 2), (60, 8), (5000, 64)):
        budget = Budget(0.005, Spent(0, 0, 0, 0, 0, 0, 0, 0))
        spent_on_phases(budget, 4e6, cost_us * 1e3, 20)
        assert budget.phases.period == period, cost_us
        assert budget.phase_mask == (period - 1 or EVERY_STEP)
        spent_on_phases(budget, 4e9, cost_us * 1e3, 100)
        assert budget.phases.period == 1, "steps have become longer"


@given(
    step_ms=st.floats(0.2, 500),
    modules=st.integers(0, 20_000),
    mark_ns=st.floats(100, 2000),
    share=st.floats(0.001, 0.05),
)
def test_cost_is_below_the_budget_and_no_more_steps_are_left_out_than_needed(
    step_ms: float, modules: int, mark_ns: float, share: float
) -> None:
    """Half of the budget is left for what a measurement of marks does not see."""
    job = Job(share, step_ns=step_ms * 1e6, modules=modules, mark_ns=mark_ns)
    job.run(40)
    period = job.budget.modules.period

    possible = job.share(1 << 20) < 0.5 * share
    assert job.share(period) <= 0.5 * share * 1.01 or not possible or period == 1024
    assert period == 1 or job.share(period // 2) > 0.6 * 0.5 * share


def test_modules_are_timed_again_in_every_step_if_that_becomes_cheap() -> None:
    job = Job(0.01, step_ns=5e6, modules=500, mark_ns=800)
    job.run(20)
    assert job.budget.modules.period >= 8
    job.step_ns *= 100
    job.run(200)
    assert job.budget.modules.period == 1


def test_interrupted_hook_does_not_change_the_period() -> None:
    """The kernel may take the processor away inside of a hook, for longer than all hooks cost."""
    job = Job(0.01, step_ns=20e6, modules=100, mark_ns=400)
    job.run(20)
    for _ in range(20):
        job.run_window(other_ns=5e6)
        assert job.budget.modules.period == 1
        job.run(6)


STOPS_NS = {
    "SIGSTOP": 20e9, "suspended for a night": 4e13, "preempted": 4e6, "clock set back": -2e6,
}  # fmt: skip


@pytest.mark.parametrize("stop_ns", STOPS_NS.values(), ids=STOPS_NS)
@pytest.mark.parametrize("modules", [100, 5000])
def test_stop_in_a_mark_does_not_make_recording_look_expensive(
    stop_ns: float, modules: int
) -> None:
    """A process is stopped three times in succession, and later every tenth window."""
    job = Job(0.01, step_ns=20e6, modules=modules, mark_ns=400)
    job.run(20)
    period, mark_ns = job.budget.modules.period, job.budget.mark_ns
    for calm in (0, 0, 7, *[9] * 10):
        job.run_window(0, abs(stop_ns), stop_ns)
        assert (job.budget.modules.period, job.budget.mark_ns) == (period, mark_ns)
        job.run(calm)


def test_stop_between_marks_does_not_change_the_period() -> None:
    job = Job(0.01, step_ns=20e6, modules=5000, mark_ns=400)
    job.run(20)
    period = job.budget.modules.period
    for _ in range(20):
        job.run_window(0, 20e9)
        assert job.budget.modules.period == period > 1
        job.run(6)


def test_noisy_steps_do_not_change_the_period_all_the_time() -> None:
    """Durations of steps vary by a fifth."""
    draw, step_ns, changes = random.Random(0), 10e6, 0
    job = Job(0.01, step_ns=step_ns, modules=300, mark_ns=500)
    job.run(20)
    for _ in range(500):
        before = job.budget.modules.period
        job.step_ns = step_ns * draw.uniform(0.8, 1.2)
        job.run(1)
        changes += job.budget.modules.period != before
    assert changes <= 5


# -- the steps


def steps_with_modules(folder: Path, mask: int) -> list[int]:
    """Run steps of a root and an inner module. Return the steps in which the inner one was timed.

    The root is timed in every step, and the flag is set in all other steps.
    """
    folder.mkdir()
    rig = Rig(folder, capacity=4096)
    recorder, make = rig.recorder, _native.ModuleCall
    recorder.module_mask = mask
    inner = make(recorder, rig.ring.intern("inner"), lambda: None)
    root = make(recorder, rig.ring.intern("root"), inner)
    recorder.next_step()
    for _ in range(STEPS):
        root()
        recorder.next_step()
    records = rig.records()
    rig.close()
    timed, flagged = ([each["step"] for each in records if chosen(each)] for chosen in (
        lambda each: each["kind"] == Kind.MODULE,
        lambda each: each["kind"] == Kind.STEP and each["flags"] & Flag.WITHOUT_MODULES,
    ))  # fmt: skip
    roots = [each["step"] for each in records if each["kind"] == Kind.FORWARD]
    assert roots == list(range(1, STEPS + 1))
    assert sorted(timed + flagged) == roots
    assert recorder.module_calls == len(timed)
    assert recorder.module_steps == 1 + len(timed)
    return timed


def test_steps_of_a_longer_period_belong_to_shorter_ones(tmp_path: Path) -> None:
    """The number of steps is about the requested one, and no period is regular."""
    by_mask = {
        mask: steps_with_modules(tmp_path / str(mask), mask) for mask in (EVERY_STEP, 0, 1, 3, 15)
    }
    for steps, fewer in zip(by_mask.values(), list(by_mask.values())[1:], strict=False):
        assert set(fewer) < set(steps)
    for mask, expected in {EVERY_STEP: 512, 0: 504, 1: 256, 3: 128, 15: 32}.items():
        assert len(by_mask[mask]) == pytest.approx(expected, rel=0.3)
    distances = {after - before for before, after in zip(by_mask[3], by_mask[3][1:], strict=False)}
    assert len(distances) > 4


def test_steps_are_chosen_by_their_numbers(tmp_path: Path) -> None:
    """All ranks choose the same steps, also after a restart."""
    assert steps_with_modules(tmp_path / "ring", 3)[:8] == [6, 7, 10, 11, 16, 17, 19, 23]


def test_sampled_and_captured_steps_have_modules(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    recorder = rig.recorder
    inner = _native.ModuleCall(recorder, rig.ring.intern("inner"), lambda: None)
    root = _native.ModuleCall(recorder, rig.ring.intern("root"), inner)
    recorder.module_mask = 1023
    for sampled, flags in ((1, 0), (0, int(Flag.CAPTURED)), (0, 0)):
        recorder.next_step()
        recorder.sampled, recorder.step_flags = sampled, flags
        root()
    recorder.next_step()
    assert [each["step"] for each in rig.records() if each["kind"] == Kind.MODULE] == [1, 2]
    rig.close()


class Called:
    def __call__(self) -> None: ...


def test_cost_of_one_call_in_62_is_measured(tmp_path: Path) -> None:
    """The clock advances by 7 ns at each reading, of which two are before and after the span's."""
    rig = Rig(tmp_path, clock=itertools.count(7, 7).__next__)
    recorder, module, function = rig.recorder, Called(), Called.__call__
    call = _native.ModuleCall(recorder, rig.ring.intern("inner"), function)
    recorder.activate()
    assert _native.route_calls(function)
    _native.set_module_call(id(module), call)
    try:
        for _ in range(200):
            module()
        assert (recorder.measured_calls, recorder.measured_ns) == (4, 4 * (7 + 7))
    finally:
        _native.unroute_calls(function)
        _native.set_module_call(id(module), None)
        rig.close()


# -- in a job


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(100))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch


def train(folder: Path, budget: float) -> tuple[int, list[bool]]:
    """Return the period at the end, and for each step whether its modules were timed."""
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with perf.watch(model, optimizer, dir=folder, report="off", budget=budget) as w:
        for _ in range(300):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        recorder = w._session.recorder
        period = recorder.module_mask + 1
        timed = recorder.module_calls
    return period, timed / 100


@pytest.mark.slow
def test_small_budget_leaves_modules_out_in_most_steps(tmp_path: Path) -> None:
    period, timed = train(tmp_path / "small", 1e-4)
    assert period > 4
    assert timed < 150

    period, timed = train(tmp_path / "none", 0)
    assert period == EVERY_STEP + 1
    assert timed == 300
