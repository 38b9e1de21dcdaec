"""Steps by the device's clock, with the host's activity while the device had no work."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tables import MS
from torchlens_perf.analysis.statistics.device_steps import (
    MAX_BEHIND_STEPS,
    DeviceStepJoin,
    HostTimeEstimator,
)
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.run.records import PARTS, StepTable
from torchlens_perf.run.ring import Flag, Kind, record_dtype

Row = tuple[Kind, int, float, float] | tuple[Kind, int, float, float, Kind]


def records(*rows: Row, flags: int = 0) -> np.ndarray:
    """Return records from tuples of kind, step, start in ms and duration in ms.

    A record of the kind DEVICE also has the kind of the span that the device executed.
    """
    made = np.zeros(len(rows), record_dtype())
    for record, row in zip(made, rows, strict=True):
        record["kind"], record["step"] = row[0], row[1]
        record["start_ns"], record["duration_ns"] = round(row[2] * MS), round(row[3] * MS)
        if len(row) == 5:
            record["value0"] = row[4]
        if row[0] == Kind.STEP:
            record["flags"] = flags
    return made


def device(step: int, kind: Kind, start_ms: float, duration_ms: float) -> Row:
    return Kind.DEVICE, step, start_ms, duration_ms, kind


def joined(made: np.ndarray, joiner: DeviceStepJoin | None = None) -> StepTable:
    return (joiner or DeviceStepJoin()).add_records(made, assemble_steps(made))


def parts_ms(table: StepTable, row: int = 0) -> dict[str, float]:
    return {
        part: ns / MS for part, ns in zip(PARTS, table.parts_ns[row].tolist(), strict=True) if ns
    }


def test_phases_of_a_device_step_exclude_stalls_and_recomputation() -> None:
    """Recomputation is not part of the enclosing backward pass."""
    table = joined(
        records(
            (Kind.FORWARD, 0, 0, 1), (Kind.BACKWARD, 0, 1, 1), (Kind.STEP, 0, 0, 3),
            device(0, Kind.FORWARD, 10, 20), device(0, Kind.WAIT, 12, 4), device(0, Kind.RECOMPUTE, 40, 8),
            device(0, Kind.WAIT, 41, 3), device(0, Kind.WAIT, 55, 5), device(0, Kind.BACKWARD, 30, 30),
            device(0, Kind.OPTIMIZER, 60, 5), device(0, Kind.STEP, 10, 57), flags=int(Flag.CHECKPOINT),
        )
    )  # fmt: skip

    assert parts_ms(table) == {
        "forward": 16, "recompute": 5, "backward": 30 - 8 - 5, "optimizer": 5, "communication": 12, "host": 2
    }  # fmt: skip
    assert (table.duration_ns[0], table.own_ns[0], table.flags[0]) == (
        57 * MS,
        45 * MS,
        Flag.CHECKPOINT,
    )


def test_device_step_whose_phases_were_not_timed_is_left_out() -> None:
    """Its time cannot be divided into parts, and it does not stay in memory."""
    joiner = DeviceStepJoin()
    made = records(
        (Kind.STEP, 0, 0, 3), (Kind.STEP, 1, 3, 3),
        device(0, Kind.STEP, 10, 57), device(1, Kind.FORWARD, 70, 20), device(1, Kind.STEP, 67, 30),
    )  # fmt: skip
    made[2]["flags"] = Flag.WITHOUT_PHASES
    table = joined(made, joiner)

    assert table.step.tolist() == [1]
    assert parts_ms(table) == {"forward": 20, "host": 10}
    assert sum(map(len, joiner._hosts)) == 0


def test_idle_time_of_the_device_is_divided_by_the_hosts_activity() -> None:
    """A device without work waits for the loader, for a blocking collective of the host, or for
    other host code.
    """
    host = (
        (Kind.DATA, 0, 100, 30),
        (Kind.FORWARD, 0, 131, 1),
        (Kind.WAIT, 0, 140, 6),
        (Kind.STEP, 0, 100, 60),
    )
    spans = (
        device(0, Kind.FORWARD, 131, 9),
        device(0, Kind.BACKWARD, 150, 10),
        device(0, Kind.STEP, 100, 60),
    )
    table = joined(records(*host, *spans))

    assert parts_ms(table) == {
        "data": 30,
        "forward": 9,
        "communication": 6,
        "backward": 10,
        "host": 5,
    }


def test_loader_costs_nothing_while_the_device_has_work() -> None:
    """The device is busy with the previous step while the loader runs."""
    table = joined(
        records(
            (Kind.DATA, 0, 0, 30), (Kind.FORWARD, 0, 30, 1), (Kind.STEP, 0, 0, 31),
            device(0, Kind.FORWARD, 100, 40), device(0, Kind.STEP, 98, 42),
        )
    )  # fmt: skip

    assert parts_ms(table) == {"forward": 40, "host": 2}


def test_host_wait_counts_only_while_the_device_is_idle() -> None:
    """If the host waits while the device is in a phase, the time already counts in the phase."""
    table = joined(
        records(
            (Kind.WAIT, 0, 5, 20),
            (Kind.STEP, 0, 0, 30),
            device(0, Kind.BACKWARD, 0, 20),
            device(0, Kind.STEP, 0, 30),
        )
    )

    assert parts_ms(table) == {"backward": 20, "communication": 5, "host": 5}


def test_step_is_complete_when_its_late_device_times_arrive() -> None:
    """The device is some steps behind.

    Records may arrive in any pieces, and a step is complete when its STEP record has arrived.
    """
    steps = [
        (
            (Kind.DATA, n, 10 * n, 2), (Kind.STEP, n, 10 * n, 10),
            device(n - 3, Kind.FORWARD, 10 * n, 4), device(n - 3, Kind.STEP, 10 * n, 10),
        )
        for n in range(3, 20)
    ]  # fmt: skip
    first = [(Kind.STEP, n, 10 * n, 10) for n in range(3)]
    whole = records(*first, *(row for step in steps for row in step))
    at_once, joiner = joined(whole), DeviceStepJoin()
    pieces = [joined(whole[first : first + 7], joiner) for first in range(0, len(whole), 7)]

    assert at_once.step.tolist() == list(range(17))
    assert [step for piece in pieces for step in piece.step.tolist()] == at_once.step.tolist()
    assert (
        np.concatenate([piece.parts_ns for piece in pieces]).tolist() == at_once.parts_ns.tolist()
    )
    assert not joined(whole[:0], joiner).step.tolist()


def test_step_without_device_times_is_left_out() -> None:
    """Later steps do not wait for a step that was in a capture or whose marks were skipped."""
    joiner = DeviceStepJoin()
    for n in range(3 * MAX_BEHIND_STEPS):
        joined(records((Kind.DATA, n, 10 * n, 2), (Kind.STEP, n, 10 * n, 10)), joiner)
    assert sum(map(len, joiner._hosts)) <= MAX_BEHIND_STEPS
    assert len(joiner._on_host.step) <= MAX_BEHIND_STEPS
    last = 3 * MAX_BEHIND_STEPS
    table = joined(records((Kind.STEP, last, 0, 10), device(last, Kind.STEP, 0, 9)), joiner)

    assert (table.step.tolist(), parts_ms(table)) == ([last], {"host": 9})


def test_spans_of_incomplete_steps_are_limited() -> None:
    """The device's record of each step is lost. A complete step that arrives late still counts."""
    joiner, stalls, steps = DeviceStepJoin(), 5, 3 * MAX_BEHIND_STEPS
    for n in range(steps):
        spans = [device(n, Kind.WAIT, 10 * n + k, 0.5) for k in range(stalls)]
        joined(records((Kind.STEP, n, 10 * n, 10), *spans), joiner)
    assert len(joiner._device.step) <= stalls * MAX_BEHIND_STEPS
    n = steps - MAX_BEHIND_STEPS // 2
    table = joined(records(device(n, Kind.STEP, 10 * n, 10)), joiner)
    assert (table.step.tolist(), parts_ms(table)) == ([n], {"communication": 2.5, "host": 7.5})


def test_memory_is_linear_in_the_number_of_spans_of_a_step() -> None:
    """The example has FSDP2, 82 modules and 8 micro-steps."""
    rows: list[Row] = []
    steps, stalls = 20, 2000
    for n in range(steps):
        begin_ms = n * 2.0 * stalls
        rows += [device(n, Kind.WAIT, begin_ms + k, 0.5) for k in range(stalls)]
        rows += [
            device(n, Kind.BACKWARD, begin_ms, stalls),
            device(n, Kind.STEP, begin_ms, stalls + 7),
        ]
        rows.append((Kind.STEP, n, begin_ms, stalls))
    made = records(*rows)
    tracemalloc.start()
    table = joined(made)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(table) == steps
    assert parts_ms(table) == {"backward": stalls / 2, "communication": stalls / 2, "host": 7}
    assert peak_bytes < 1000 * len(made), "with pairs, 1.3 GB"


def test_lack_of_a_cpu_counts_only_if_it_delays_the_device() -> None:
    """Lack of a CPU delays the device in a gap, or in a phase that the host started only 1 ms
    before. If the host is far ahead, the device is not delayed.
    """
    made = records(
        (Kind.FORWARD, 0, 9, 2), (Kind.BACKWARD, 0, 11, 2), (Kind.STEP, 0, 0, 30),
        device(0, Kind.FORWARD, 10, 6), device(0, Kind.BACKWARD, 16, 6), device(0, Kind.STEP, 0, 30),
    )  # fmt: skip
    host = assemble_steps(made)
    host.ready_ns[:] = 3 * MS
    table = DeviceStepJoin().add_records(made, host)

    ready_ms = dict(zip(PARTS, (table.ready_ns[0] / MS).tolist(), strict=True))
    assert {part: ms for part, ms in ready_ms.items() if ms} == {"data": 3, "host": 3, "forward": 2}


def test_lack_of_a_cpu_is_none_if_it_was_not_measured() -> None:
    made = records(
        (Kind.STEP, 0, 0, 30), device(0, Kind.FORWARD, 10, 6), device(0, Kind.STEP, 0, 30)
    )

    assert (joined(made).ready_ns == -1).all()


SPAN = st.tuples(
    st.sampled_from([Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER]),
    st.integers(0, 20),
    st.integers(0, 20),
)


@given(
    st.lists(
        st.tuples(
            st.lists(SPAN, max_size=4), st.lists(st.tuples(st.integers(0, 99), st.integers(1, 40)))
        )
    )
)
def test_parts_of_any_device_step_add_up_to_its_duration(
    steps: list[tuple[list[tuple[Kind, int, int]], list[tuple[int, int]]]],
) -> None:
    """No part is negative, for any phases, stalls and waits."""
    rows: list[Row] = []
    for number, (spans, waits) in enumerate(steps):
        at = begin = 1000 * number
        rows += [(Kind.DATA, number, begin + start, duration) for start, duration in waits]
        rows.append((Kind.STEP, number, begin, 100))
        for kind, gap, duration in spans:
            at += gap
            if duration > 2:
                rows.append(device(number, Kind.WAIT, at + 1, duration // 2))
            rows.append(device(number, kind, at, duration))
            at += duration
        rows.append(device(number, Kind.STEP, begin, at - begin + 5))
    table = joined(records(*rows))

    assert table.step.tolist() == list(range(len(steps)))
    assert (table.parts_ns >= 0).all()
    assert table.parts_ns.sum(axis=1).tolist() == table.duration_ns.tolist()


@pytest.mark.parametrize("rounding", [-1, 0, 1])
def test_stall_that_ends_with_its_phase_is_subtracted_from_it(
    rounding: int,
) -> None:
    """The stall and the backward pass end at the same time, except for a rounding error of 1 ns."""
    made = records(
        (Kind.STEP, 0, 0, 40), device(0, Kind.WAIT, 20, 10), device(0, Kind.BACKWARD, 10, 20),
        device(0, Kind.STEP, 0, 40),
    )  # fmt: skip
    made["duration_ns"][1] += rounding

    assert parts_ms(joined(made)) == pytest.approx(
        {"communication": 10, "backward": 10, "host": 20}, abs=1e-5
    )


# -- host times of a device step


def of_ns(values: np.ndarray, row: int = 0) -> dict[str, float]:
    return {
        part: ns / MS for part, ns in zip(PARTS, values[row].tolist(), strict=True) if 0 < ns < 1e15
    }


def test_device_step_has_the_hosts_time_and_lag_of_each_part() -> None:
    table = joined(
        records(
            (Kind.DATA, 0, 1, 2), (Kind.FORWARD, 0, 4, 5), (Kind.BACKWARD, 0, 9, 6), (Kind.WAIT, 0, 10, 1),
            (Kind.STEP, 0, 0, 17),
            device(0, Kind.STEP, 0, 30), device(0, Kind.FORWARD, 4.2, 5), device(0, Kind.BACKWARD, 12, 9),
        )
    )  # fmt: skip

    assert of_ns(table.issue_ns) == {
        "data": 2,
        "forward": 5,
        "backward": 6 - 1,
        "host": (4 - 2) + 2,
    }
    # The host waits from 0.2 ms after the forward pass, and from 6 ms after the backward pass.
    assert of_ns(table.lag_ns) == {"forward": 0.2, "backward": 3, "host": 6}


@pytest.mark.parametrize("around_ms", [0, 1], ids=["closure is all of it", "closure is part of it"])
def test_passes_in_the_closure_of_an_optimizer_count_once(around_ms: float) -> None:
    """Lightning's automatic optimization calls both passes in `optimizer.step(closure)`."""
    at_ms = 10 + around_ms
    spans = (
        (Kind.FORWARD, at_ms, 8), (Kind.BACKWARD, at_ms + 9, 14),
        (Kind.OPTIMIZER, 10, 23 + 6 * around_ms),
    )  # fmt: skip
    length_ms = 40.0
    table = joined(
        records(
            *((kind, 0, start, duration) for kind, start, duration in spans),
            (Kind.STEP, 0, 0, length_ms),
            *(device(0, kind, start + 2, duration) for kind, start, duration in spans),
            device(0, Kind.STEP, 2, length_ms),
        )
    )
    optimizer_ms = 1 + 6 * around_ms
    outside_ms = length_ms - 8 - 14 - optimizer_ms

    expected = {
        "forward": 8, "backward": 14, "optimizer": optimizer_ms, "host": outside_ms
    }  # fmt: skip
    assert of_ns(table.issue_ns) == expected
    assert parts_ms(table) == expected


def test_steps_timed_by_the_host_have_no_separate_host_times() -> None:
    table = assemble_steps(records((Kind.FORWARD, 0, 0, 1), (Kind.STEP, 0, 0, 3)))

    assert not table.issue_ns.any()
    assert not table.lag_ns.any()


def hosts_own_ms(steps: list[tuple[float, float, bool]], lag_at_end_ms: float = 1e9) -> list[float]:
    """Return a segment's own time on the host in each of the given steps.

    Each step is given as host time, device lag at the start, and whether the queue may be full.
    """
    host_times = HostTimeEstimator()
    found = []
    for taken_ms, lag_ms, may_be_full in steps:
        taken_ns, lag_ns, at_end_ns = (
            np.array([round(ms * MS)]) for ms in (taken_ms, lag_ms, lag_at_end_ms)
        )
        found.append(
            float(
                host_times.estimate_own_ns(taken_ns, lag_ns, at_end_ns, np.array([may_be_full]))[0]
            )
            / MS
        )
    return found


def test_wait_for_the_device_is_not_own_time_of_the_host() -> None:
    """The host waits for the device, so its time is 1 ms plus the device's lag."""
    lags_ms = [5.0 + 3 * (step % 2) for step in range(40)]

    found = hosts_own_ms([(1 + lag_ms, lag_ms, False) for lag_ms in lags_ms])

    assert found[-20:] == [1.0] * 20


def test_blocking_copy_between_steps_is_not_own_time_of_the_host() -> None:
    """The host needs about as long as the device lags, and at the end the device does not lag."""
    steps = [(81.0, 80.0, False)] * 3

    assert hosts_own_ms(steps, lag_at_end_ms=0.0) == [1.0] * 3
    assert hosts_own_ms(steps, lag_at_end_ms=70.0) == [81.0] * 3
    assert hosts_own_ms([(120.0, 80.0, False)], lag_at_end_ms=0.0) == [120.0]


def test_time_independent_of_the_lag_is_own_time_of_the_host() -> None:
    """A host that never waits needs the same time whether or not the device lags."""
    found = hosts_own_ms([(8.0, 5.0 + 3 * (step % 2), False) for step in range(40)])

    assert found[-20:] == [8.0] * 20


def test_own_time_with_a_full_queue_is_taken_from_other_steps() -> None:
    found = hosts_own_ms([(3.0, 0.0, False)] * 12 + [(20.0, 15.0, True)] * 5)

    assert found[-5:] == [3.0] * 5


def test_own_time_is_the_host_time_if_the_queue_was_always_full() -> None:
    """Only times with a full queue are known. A long device lag hides the wait (own_time.py)."""
    assert hosts_own_ms([(20.0, 15.0, True)] * 20)[-1] == 20.0


def test_device_makes_progress_when_it_reaches_a_mark() -> None:
    host_times = HostTimeEstimator()

    found = host_times.made_progress(np.array([5, 20]), np.array([0, 6, 18]), np.array([6, 18, 30]))
    later = host_times.made_progress(np.array([40]), np.array([10, 30, 40]), np.array([25, 45, 50]))

    assert found.tolist() == [True, False, True]
    # In the first interval, the device reached the mark at 20, known from the previous call.
    assert later.tolist() == [True, True, False]
