"""What is counted about a rank, and its history of windows."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import MS, records, step_table
from torchlens_perf.rank_statistics import (
    FIRST_WINDOW_STEPS,
    MOST_WINDOWS,
    WARM_UP_STEPS,
    RankStatistics,
    WindowHistory,
)
from torchlens_perf.records import PARTS
from torchlens_perf.ring import Flag, Kind

NO_RECORDS = records([])


def test_windows_are_medians_of_aligned_steps() -> None:
    """A window holds the medians of the steps from a multiple of its width on; outliers do not move it."""
    history = WindowHistory()
    steps = [{"forward": 10}] * 7 + [{"forward": 500}] + [{"forward": 20, "data": 2}] * 8 + [{"forward": 1}]
    history.add(step_table(steps))
    windows = history.windows()

    assert windows.first_step.tolist() == [0, 8]
    assert windows.duration_ns.tolist() == [10 * MS, 22 * MS]
    assert windows.parts_ns[:, PARTS.index("data")].tolist() == [0, 2 * MS]


def test_window_in_progress_counts_from_half() -> None:
    """The last window is shown once it has half its steps."""
    history = WindowHistory()
    history.add(step_table([{"forward": 1}] * (FIRST_WINDOW_STEPS + 3)))
    assert len(history.windows().first_step) == 1
    history.add(step_table([{"forward": 1}], first_step=FIRST_WINDOW_STEPS + 3))
    assert len(history.windows().first_step) == 2


@pytest.mark.parametrize("flag", [Flag.EVALUATION, Flag.SKIPPED, Flag.PROBED])
def test_steps_with_other_work_are_not_compared(flag: Flag) -> None:
    """Evaluation, skipped and probed steps are left out of the windows."""
    history = WindowHistory()
    history.add(step_table([{"forward": 900}] * 4, flags=int(flag)))
    history.add(step_table([{"forward": 10}] * 4, first_step=4))

    assert history.windows().duration_ns.tolist() == [10 * MS]


def test_history_does_not_grow_with_the_run() -> None:
    """Beyond the most windows, neighbours are merged and the width doubles; the values stay what they were."""
    history = WindowHistory()
    for first in range(0, 100_000, 1000):
        history.add(step_table([{"forward": 10}] * 1000, first_step=first))
    windows = history.windows()

    assert len(windows.first_step) <= MOST_WINDOWS + 1
    assert windows.width == 256
    assert (windows.first_step % windows.width == 0).all()
    assert set(windows.duration_ns.tolist()) == {10.0 * MS}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 9))
def test_windows_do_not_depend_on_batches(durations: list[int], size: int) -> None:
    """Added one by one or in pieces of any size, the same steps give the same windows."""
    whole, pieces = WindowHistory(), WindowHistory()
    steps = [{"forward": duration} for duration in durations]
    whole.add(step_table(steps))
    for first in range(0, len(steps), size):
        pieces.add(step_table(steps[first : first + size], first_step=first))

    assert whole.to_json() == pieces.to_json()


def test_warm_up_is_counted_apart() -> None:
    """The first steps are in no distribution of steps, phases or modules, and are counted as steps all the same."""
    statistics = RankStatistics()
    steps = step_table([{"forward": 500}] * WARM_UP_STEPS + [{"forward": 10}] * 5, first_step=20)
    rows = [(Kind.MODULE, 1, step, 9) for step in range(20, 20 + WARM_UP_STEPS + 5)]
    statistics.add(records(rows), steps, ["", "block"], lost=0)

    assert statistics.warm_up.largest == 500 * MS
    assert (statistics.step.count, statistics.step.largest) == (5, 10 * MS)
    assert statistics.parts["forward"].sum_ns == 50 * MS
    assert statistics.modules["block"].count == 5
    assert (statistics.counted_steps, statistics.records, statistics.coverage) == (WARM_UP_STEPS + 5, len(rows), 1.0)


def test_lost_steps_lower_the_coverage() -> None:
    """Steps that are missing between the first and the last lower the coverage."""
    statistics = RankStatistics()
    statistics.add(NO_RECORDS, step_table([{}] * 10), [], lost=0)
    statistics.add(NO_RECORDS, step_table([{}] * 5, first_step=15), [], lost=321)

    assert statistics.coverage == 15 / 20
    assert statistics.lost == 321


def test_names_go_to_their_tables() -> None:
    """Modules count by own time under the user's name, collectives with their bytes, unknown names by that word."""
    statistics = RankStatistics()
    made = records(
        [
            (Kind.FORWARD, 0, 9, 100),
            (Kind.MODULE, 1, 9, 60),
            (Kind.MODULE_BACKWARD, 1, 9, 70),
            (Kind.SECTION, 2, 9, 5),
            (Kind.COLLECTIVE, 3, 9, 8),
            (Kind.COLLECTIVE, 3, 9, 8),
            (Kind.MODULE, 77, 9, 1),
        ]
    )
    made["nested_ns"][0], made["value0"][4:6] = 60, 1000
    statistics.add(made, step_table([{}] * 9), ["forward Net", "block", "log", "allreduce group=0"], lost=0)

    assert {name: sketch.sum_ns for name, sketch in statistics.modules.items()} == {
        "Net": 40,
        "block": 60,
        "(unknown)": 1,
    }
    assert statistics.module_backwards["block"].sum_ns == 70
    assert statistics.sections["log"].sum_ns == 5
    assert statistics.collectives["allreduce group=0"].bytes == 2000


def test_survives_json() -> None:
    """What is written and read again goes on as if nothing had happened."""
    first, second = step_table([{"data": 3, "host": 1}] * 30, memory=5), step_table([{"data": 4}] * 2, first_step=30)
    straight, saved = RankStatistics(), RankStatistics()
    for statistics in (straight, saved):
        statistics.add(records([(Kind.SECTION, 0, 7, 3)]), first, ["log"], lost=2)
    saved = RankStatistics.from_json(json.loads(json.dumps(saved.to_json())))
    for statistics in (straight, saved):
        statistics.add(NO_RECORDS, second, [], lost=0)

    left, right = straight.to_json(), saved.to_json()
    # The window in progress begins anew after reading: its first steps are a row of their own.
    left.pop("history")
    right.pop("history")
    assert left == right
    assert np.array_equal(straight.step.counts, saved.step.counts)
