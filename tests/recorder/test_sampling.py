"""Selection of the steps that are sampled for backward times and device times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchlens_perf.recorder.sampling import SamplingSchedule, StepBoundary

MS = 1_000_000


def sampled_steps(
    schedule: SamplingSchedule, steps: int, cost_ns: float, step_ns: float
) -> list[int]:
    found = []
    for step in range(steps):
        if schedule.is_sampled(step):
            found.append(step)
            schedule.set_period(cost_ns, step_ns)
    return found


def test_cheap_samples_have_the_requested_period() -> None:
    """Every 16th step is sampled, starting in the middle of the first 16."""
    assert sampled_steps(SamplingSchedule(16, 0.005), 64, cost_ns=1 * MS, step_ns=100 * MS) == [
        8,
        24,
        40,
        56,
    ]


def test_no_step_is_sampled_with_a_period_of_zero() -> None:
    assert sampled_steps(SamplingSchedule(0, 0.005), 1000, cost_ns=1, step_ns=MS) == []


@given(cost_ms=st.floats(0.01, 50), step_ms=st.floats(0.5, 500))
def test_sampling_takes_at_most_a_thousandth_of_the_time(cost_ms: float, step_ms: float) -> None:
    """Expensive sampling is less frequent than requested, but still uses more than half of the
    limit.
    """
    schedule = SamplingSchedule(16, 0.005)
    for _ in range(8):
        schedule.set_period(cost_ms * MS, step_ms * MS)

    share = cost_ms / (schedule.period * step_ms)
    assert share <= 0.001
    assert schedule.period == 16 or share > 0.0005 * (1 - 1e-9)


@given(cost_ms=st.floats(0.1, 20), other=st.floats(0.25, 4))
def test_ranks_with_different_sampling_costs_sample_common_steps(
    cost_ms: float, other: float
) -> None:
    """In the long run, a rank with higher costs samples a subset of the steps of a rank with lower
    costs.
    """
    periods = []
    for cost in (cost_ms, cost_ms * other):
        schedule = SamplingSchedule(16, 0.005)
        for _ in range(8):
            schedule.set_period(cost * MS, 3 * MS)
        periods.append({step for step in range(1 << 15) if schedule.is_sampled(step)})

    few, many = sorted(periods, key=len)
    assert few <= many


def test_slow_first_sample_is_corrected_within_eight_periods() -> None:
    """The first sampled step imports and compiles.

    The next sample corrects the estimate of the cost.
    """
    schedule = SamplingSchedule(16, 0.005)
    schedule.set_period(cost_ns=5000 * MS, step_ns=3 * MS)
    assert schedule.period == 128
    schedule.set_period(cost_ns=0.04 * MS, step_ns=3 * MS)
    assert schedule.period == 16


def test_costs_that_a_sample_causes_in_later_steps_count() -> None:
    """A device's times of a sampled step are read in later steps."""
    cheap, dear = SamplingSchedule(16, 0.005), SamplingSchedule(16, 0.005)
    for schedule in (cheap, dear):
        schedule.start_recording(StepBoundary(0, 0, 0))
        for round_ in range(4):
            begin, later = 8 + 16 * round_, 9 + 16 * round_
            schedule.begun = StepBoundary(begin, begin * MS, 0)
            schedule.end_sampled_step(StepBoundary(later, later * MS, 0))
            if schedule is dear:
                schedule.later_ns += 0.06 * MS
    assert (cheap.period, dear.period) == (16, 64)
