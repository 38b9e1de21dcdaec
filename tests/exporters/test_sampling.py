"""Selection of the steps that a node sends as traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tables import step_table
from torchlens_perf.analysis.statistics.step_bins import BinBatch
from torchlens_perf.analysis.statistics.steps import zero_device_columns
from torchlens_perf.exporters.rank_times import RecentRankTimes
from torchlens_perf.exporters.trace_buffer import BufferedSteps, TraceBuffer
from torchlens_perf.exporters.trace_sampling import (
    MIN_STEPS,
    SlowStepDetector,
    SpanBudget,
    StepSampler,
)
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.records import StepTable, TracedStep
from torchlens_perf.run.ring import Kind, record_dtype

MS = 1_000_000
S = 10**9


def steps(durations_ms: Sequence[float], first_step: int = 0, start_s: float = 0.0) -> StepTable:
    """Return a table of consecutive steps."""
    table = step_table([{"forward": 1}] * len(durations_ms), first_step=first_step)
    duration_ns = (np.array(durations_ms) * MS).astype(np.int64)
    start_ns = int(start_s * S) + np.cumsum(duration_ns) - duration_ns
    return dataclasses.replace(table, duration_ns=duration_ns, start_ns=start_ns)


def rows(
    work_ms: Sequence[float], wait_ms: Sequence[float], key: int = 0, width: int = 1
) -> BinBatch:
    """Return a row with one step bin for all ranks."""
    count = len(work_ms)
    parts = np.zeros((count, 1, 6))
    parts[:, 0, 1] = np.array(work_ms) * MS
    zeros = np.zeros((count, 1))
    return BinBatch(
        width, np.arange(count), np.full((count, 1), key), zeros.astype(np.int64), zeros,
        np.array(wait_ms)[:, None] * MS, zeros, zeros, parts, **zero_device_columns(parts, zeros),
    )  # fmt: skip


def select(
    sampler: StepSampler, now_s: float, *, ranks: int = 4, spans: int = 10, complete: bool = True
) -> list[TracedStep]:
    """Select steps on a node whose ranks have this number of spans in each step."""
    there = dict.fromkeys(range(ranks if complete else ranks - 1), spans)
    return sampler.select_steps(0, lambda step: there, range(ranks), now_s)


# -- the budget of spans


@given(
    st.integers(1, 500),
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 3000)), max_size=200),
)
def test_steps_exceed_the_budget_by_at_most_a_burst_and_one_step(
    per_s: int, demands: list[tuple[float, int]]
) -> None:
    """A step of any size may be sent while spans are left."""
    budget, now_s, sent, most = SpanBudget(per_s), 0.0, 0, 0
    for after_s, spans in demands:
        now_s += after_s
        if budget.refill_until(now_s) > 0:
            budget.spend(spans)
            sent, most = sent + spans, max(most, spans)
    assert sent <= per_s * now_s + budget.capacity + most


def test_span_budget_is_refilled_by_step_timestamps() -> None:
    """A step that arrives late has an earlier timestamp, which does not change the budget."""
    budget = SpanBudget(100)
    budget.spend(budget.refill_until(50.0))
    assert budget.refill_until(50.0) == 0
    assert budget.refill_until(40.0) == 0
    assert budget.refill_until(51.0) == pytest.approx(100)


# -- slow steps


def test_step_is_slow_if_it_exceeds_the_99th_percentile_of_earlier_steps() -> None:
    """At least 64 earlier steps are needed."""
    draw = np.random.default_rng(1)
    usual = (100 + draw.normal(0, 1, 300)).tolist()
    watch = SlowStepDetector()
    assert not watch.find_slow_steps(steps([500, *usual[: MIN_STEPS - 2]])).any()
    assert not watch.find_slow_steps(steps(usual)).any()
    slow = watch.find_slow_steps(steps([100, 130, 100, 109]))
    assert slow.tolist() == [False, True, False, False]


def test_lasting_slowdown_becomes_the_new_baseline() -> None:
    """When all steps get slower, they count as slow until they fill the window of earlier steps."""
    watch = SlowStepDetector()
    watch.find_slow_steps(steps([100] * 512))
    assert watch.find_slow_steps(steps([200] * 40)).all()
    assert not watch.find_slow_steps(steps([200] * 600)).any()
    assert watch.find_slow_steps(steps([240] * 10)).all()


# -- times of the ranks


def test_quantiles_over_ranks_are_those_of_the_newest_complete_row() -> None:
    found = RecentRankTimes()
    found.add_batch(rows([10, 20], [5, 1], key=2, width=4))
    found.add_batch(dataclasses.replace(rows([70], [0], key=2, width=8), ranks=np.array([2])))
    assert found.rank_quantiles_s()["work", "max"] == pytest.approx(0.02)
    assert found.rank_quantiles_s()["wait", "min"] == pytest.approx(0.001)


# -- selection of steps


def test_first_steps_and_every_nth_step_are_sent_once_all_records_have_arrived() -> None:
    sampler = StepSampler(200)
    sampler.add_steps(steps([100] * 25), 10, 0.0)
    assert select(sampler, 1.0, complete=False) == []
    assert [(each.step, each.because) for each in select(sampler, 1.0)] == [
        (0, "first"), (1, "first"), (2, "first"), (10, "number"), (20, "number"),
    ]  # fmt: skip
    assert select(sampler, 2.0) == []


def test_step_is_sent_without_a_silent_rank_after_three_seconds() -> None:
    sampler = StepSampler(200)
    sampler.add_steps(steps([100]), 10, 0.0)
    assert select(sampler, 2.9, complete=False) == []
    assert len(select(sampler, 3.0, complete=False)) == 1


def numbered_steps(sampler: StepSampler, spans: int, duration_ms: float, seed: int) -> set[int]:
    """Return the steps of 4,000 that a node of four ranks sends because of their numbers."""
    draw = np.random.default_rng(seed)
    sampler.add_steps(steps((duration_ms + draw.normal(0, 1, 4000)).tolist()), 10, 0.0)
    found = select(sampler, 9.0, spans=spans)
    return {each.step for each in found if each.because in ("first", "number")}


@pytest.mark.parametrize(("spans", "every"), [(10, 10), (100, 20), (900, 160)])
def test_two_nodes_select_the_same_numbered_steps_within_the_budget(spans: int, every: int) -> None:
    """Steps take 100 ms, so every tenth step of 4 ranks with 100 spans is 404 spans a second.

    The first steps may have 10,000 spans in total, a burst of 20 seconds.
    """
    first, second = (numbered_steps(StepSampler(500), spans, 100, seed) for seed in (1, 2))

    assert first == second
    by_number = [0, 1, 2, *range(10, 4000, 10)]
    of_burst = by_number[: 10_000 // (4 * (spans + 1))]
    assert first - {1, 2} == {*of_burst, *range(0, 4000, every)} - {1, 2}
    assert len(first) * 4 * (spans + 1) <= 500 * 400 + 10_000


def test_numbered_steps_of_a_short_run_are_sent() -> None:
    """Its steps take 8 ms, which makes more spans a second than the budget."""
    assert numbered_steps(StepSampler(200), 7, 8, 1) >= {0, 1, 2, 10, 20, 30, 40}


def test_steps_of_a_node_with_more_spans_are_among_the_steps_of_another_node() -> None:
    few = numbered_steps(StepSampler(500), 150, 100, 1)
    many = numbered_steps(StepSampler(500), 2500, 100, 2)

    assert len(many) < len(few)
    assert many < few


def test_steps_beyond_the_budget_are_counted_in_the_next_traced_step() -> None:
    sampler = StepSampler(30)
    sampler.add_steps(steps([100] * 50), 1, 0.0)
    chosen = select(sampler, 9.0)
    assert [each.step for each in chosen] == [*range(11), 32]
    assert sampler.left_out == 38
    assert [each.left_out for each in chosen] == [0] * 11 + [21]
    sampler.add_steps(steps([100] * 15, first_step=50), 1, 10.0)
    (last,) = select(sampler, 20.0)
    assert (last.step, last.left_out) == (64, 31)


def test_slow_steps_leave_budget_for_a_later_verdict() -> None:
    """The slow step and the step of the verdict are sent with their reasons."""
    sampler = StepSampler(40)  # Slow steps may use 200 spans at once.
    sampler.add_steps(steps([100] * 100), 1000, 0.0)
    select(sampler, 1.0)
    sampler.add_steps(steps([200] * 40, first_step=100, start_s=60.0), 1000, 60.0)
    chosen = select(sampler, 70.0)
    assert {each.because for each in chosen} == {"slow"}
    assert 3 <= len(chosen) < 20
    sampler.add_steps(steps([200], first_step=140, start_s=68.0), 1000, 70.0)
    select(sampler, 70.0)
    sampler.add_newest_step(70.0)
    assert [(each.step, each.because) for each in select(sampler, 70.0)] == [(140, "verdict")]
    sampler.add_newest_step(70.0)
    assert select(sampler, 70.0) == []


def test_only_the_node_that_finds_a_step_slow_sends_it() -> None:
    """The other node sends the same numbered steps."""
    sampled = []
    for stall_ms in (100, 900):
        sampler = StepSampler(200)
        sampler.add_steps(steps([100] * 150), 100, 0.0)
        sampler.add_steps(steps([stall_ms, *[100] * 100], first_step=150), 100, 0.0)
        sampled.append({each.step: each.because for each in select(sampler, 9.0)})

    usual, stalled = sampled
    assert usual.keys() == {0, 1, 2, 100, 200}
    assert stalled == {**usual, 150: "slow"}


def test_no_step_is_sent_if_sampling_is_off() -> None:
    """No steps are sampled by their number if `every` is 0. `samples_slow` turns off slow steps."""
    sampler = StepSampler(0)
    sampler.add_steps(steps([*[100] * 99, 1000]), 0, 0.0)
    assert select(sampler, 9.0) == []
    sampler = StepSampler(0, samples_slow=False)
    sampler.add_steps(steps([*[100] * 99, 1000], first_step=8), 1000, 0.0)
    sampler.add_newest_step(0.0)
    assert select(sampler, 9.0) == []


# -- the buffer of traces


def shelved(rank: int, first_step: int, key: str = "") -> BufferedSteps:
    """Return four steps with ten spans each."""
    records = np.zeros(44, record_dtype())
    records["step"] = np.repeat(np.arange(first_step, first_step + 4), 11)
    records["kind"] = [*[Kind.MODULE] * 10, Kind.STEP] * 4
    table = step_table([{"forward": 1}] * 4, first_step=first_step)
    return BufferedSteps(
        key or f"rank{rank}", rank, Anchor(0, 0, 0), records, records[:0], [""], table
    )


def test_trace_buffer_keeps_the_newest_steps_within_its_limit() -> None:
    """The buffer keeps only steps of the newest process of a rank."""
    shelf = TraceBuffer(max_bytes=5 * shelved(0, 0).records.nbytes)
    for first in range(0, 40, 4):
        for rank in (0, 1):
            shelf.append_steps(shelved(rank, first))
    assert shelf.count_spans_by_rank(39) == {0: 10, 1: 10}
    assert shelf.count_spans_by_rank(30) == {1: 10}
    assert shelf.count_spans_by_rank(0) == {}
    shelf.append_steps(shelved(1, 36, key="another"))
    assert [each.key for each in shelf.entries_with_step(37)] == ["rank0", "another"]
    (trace,) = shelf.entries_with_step(37)[0].build_traces(37)
    assert (trace.step, len(trace.spans)) == (37, 10)
