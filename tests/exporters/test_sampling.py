"""Selection of the steps and ranks that are sent as traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tables import step_table
from torchlens_perf.analysis.statistics.steps import zero_device_columns
from torchlens_perf.exporters.sampling.budget import SpanBudget
from torchlens_perf.exporters.sampling.decision import EVERYTHING, TraceDecision
from torchlens_perf.exporters.sampling.rank_rows import RecentRankTimes, select_explaining_ranks
from torchlens_perf.exporters.sampling.slow_steps import MIN_STEPS, SlowStepDetector
from torchlens_perf.exporters.sampling.step_sampler import JobSnapshot, StepSampler
from torchlens_perf.exporters.sampling.trace_buffer import BufferedSteps, TraceBuffer
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.records import StepTable, TracedStep
from torchlens_perf.run.ring import Kind, record_dtype
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.stragglers.window import BinBatch

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


def known(
    world_size: int = 4, spans: int = 10, here: Sequence[int] | None = None, found: RecentRankTimes | None = None,
    slow: Sequence[int] = (), complete: bool = True,
) -> JobSnapshot:  # fmt: skip
    """Return the state from which steps are selected.

    By default all ranks run on this node.
    """
    ranks = range(world_size) if here is None else here
    there = dict.fromkeys(ranks if complete else list(ranks)[:-1], spans)
    places: Mapping[int, Placement] = {
        rank: Placement(f"node-{rank // 8}") for rank in range(world_size)
    }
    return JobSnapshot(
        lambda step: there, frozenset(ranks), world_size, found or RecentRankTimes(), slow, places
    )


# -- the budget of spans


@given(
    st.integers(1, 500),
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 3000)), max_size=200),
)
def test_span_budget_is_not_exceeded_in_any_minute(
    per_s: int, demands: list[tuple[float, int]]
) -> None:
    """Callers that send at most as many spans as refill_until() returns stay within the budget."""
    budget, now_s, sent = SpanBudget(per_s), 0.0, []
    for after_s, spans in demands:
        now_s += after_s
        if spans <= budget.refill_until(now_s):
            budget.spend(spans)
            sent.append((now_s, spans))
    for first_s, _ in sent:
        assert (
            sum(spans for at_s, spans in sent if first_s <= at_s < first_s + 60) <= 60 * per_s + 1
        )


def test_span_budget_is_refilled_by_step_timestamps() -> None:
    """A step that arrives late has an earlier timestamp, which does not change the budget."""
    budget = SpanBudget(100)
    budget.spend(budget.refill_until(50.0))
    assert budget.refill_until(50.0) == 0
    assert budget.refill_until(40.0) == 0
    assert budget.refill_until(51.0) == pytest.approx(100 * 2 / 3)
    assert SpanBudget(0).is_unlimited


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


# -- selection of ranks


def test_selected_ranks_are_slow_or_arrive_last_or_have_most_or_median_work() -> None:
    found = RecentRankTimes()
    found.add_batch(rows([10, 11, 40, 12, 13, 30], [30, 29, 8, 28, 27, 2], key=7))
    row = found.times_in_step(7)
    places = {rank: Placement("node", "b" if rank == 3 else "a") for rank in range(6)}
    matter = select_explaining_ranks(row, [4], places)
    assert matter == {"slow": [4], "arrived last": [5], "most work": [2], "reference": [0]}
    assert select_explaining_ranks(row, [4], places, within={0, 4}) == {
        "slow": [4],
        "reference": [0],
    }
    assert select_explaining_ranks(None, [4], places) == {"slow": [4]}
    assert select_explaining_ranks(None, [], places) == {}


def test_step_is_found_in_bins_of_different_widths() -> None:
    """Bins of different widths are merged."""
    found = RecentRankTimes()
    found.add_batch(rows([10, 20], [5, 1], key=2, width=4))
    late = dataclasses.replace(rows([70], [0], key=1, width=8), ranks=np.array([2]))
    found.add_batch(late)
    row = found.times_in_step(9)
    assert row is not None
    assert (row.work_ns / MS).tolist() == [10, 20, 70]
    assert found.times_in_step(16) is None
    assert found.rank_quantiles_s()["work", "max"] == pytest.approx(0.02)


# -- selection of steps


def test_all_ranks_of_a_small_job_are_sent() -> None:
    """The first steps and every tenth step are sent once all records have arrived."""
    chooser = StepSampler(200)
    chooser.add_steps(steps([100] * 25), 10, 0.0)
    assert chooser.select_steps(0, known(complete=False), 1.0) == []
    assert chooser.decided_to == -1
    chosen = chooser.select_steps(0, known(), 1.0)
    assert [(each.step, each.because, each.roles) for each in chosen] == [
        (0, "first", ()), (1, "first", ()), (2, "first", ()), (10, "number", ()), (20, "number", ()),
    ]  # fmt: skip
    assert chooser.decided_to == 24
    assert chooser.select_steps(0, known(), 2.0) == []


def test_step_is_sent_without_a_silent_rank_after_three_seconds() -> None:
    chooser = StepSampler(200)
    chooser.add_steps(steps([100]), 10, 0.0)
    assert chooser.select_steps(0, known(complete=False), 2.9) == []
    assert len(chooser.select_steps(0, known(complete=False), 3.0)) == 1


def test_large_job_sends_only_the_ranks_that_explain_the_step() -> None:
    """Once the step bins of all ranks have arrived, the selected ranks share the budget of
    spans.
    """
    found = RecentRankTimes()
    chooser = StepSampler(200)
    chooser.add_steps(steps([100]), 100, 0.0)
    of_job = known(4096, 200, here=range(8), found=found, slow=[17])
    assert chooser.select_steps(0, of_job, 1.0) == []
    work_ms = np.linspace(10, 20, 4096)
    found.add_batch(rows(work_ms.tolist(), (30 - work_ms).tolist()))
    (chosen,) = chooser.select_steps(0, of_job, 1.0)
    assert chosen.roles == (("slow", (17,)), ("arrived last", (4095,)), ("reference", (2047,)))
    assert 200 <= chosen.max_spans <= 225
    assert chosen.role_of_rank(17) == "slow"
    assert chosen.role_of_rank(16) is None


def test_step_with_very_many_spans_is_sent_in_part() -> None:
    """The step has 100,000 spans, but uses only a part of the budget of spans."""
    chooser = StepSampler(200)
    chooser.add_steps(steps([100]), 100, 0.0)
    (chosen,) = chooser.select_steps(0, known(1, 100_000), 9.0)
    assert 0 < chosen.max_spans < 2100


def test_steps_beyond_the_budget_are_counted_in_the_next_traced_step() -> None:
    chooser = StepSampler(30)  # The budget allows 600 spans at once and 20 per second.
    chooser.add_steps(steps([100] * 50), 1, 0.0)
    chosen = chooser.select_steps(0, known(), 9.0)
    assert len(chosen) < 50
    assert chooser.left_out == 50 - len(chosen)
    chooser.add_steps(steps([100], first_step=50, start_s=60.0), 1, 10.0)
    (last,) = chooser.select_steps(0, known(), 20.0)
    assert (last.step, last.left_out > 0) == (50, True)
    assert sum(each.left_out for each in [*chosen, last]) == chooser.left_out


def test_slow_steps_leave_budget_for_a_later_verdict() -> None:
    """The slow step and the step of the verdict are sent with their reasons."""
    chooser = StepSampler(20)  # The budget allows 400 spans at once.
    chooser.add_steps(steps([100] * 100), 1000, 0.0)
    chooser.select_steps(0, known(), 1.0)
    chooser.add_steps(steps([200] * 40, first_step=100, start_s=60.0), 1000, 60.0)
    chosen = chooser.select_steps(0, known(), 70.0)
    assert {each.because for each in chosen} == {"slow"}
    assert 3 <= len(chosen) < 20
    chooser.add_newest_step(70.0)
    assert [(each.step, each.because) for each in chooser.select_steps(0, known(), 70.0)] == [
        (139, "verdict")
    ]


def test_no_step_is_sent_if_sampling_is_off() -> None:
    """No steps are sampled by their number if `every` is 0. `samples_slow` turns off slow steps."""
    chooser = StepSampler(0)
    chooser.add_steps(steps([*[100] * 99, 1000]), 0, 0.0)
    assert chooser.select_steps(0, known(), 9.0) == []
    chooser.samples_slow = False
    chooser.add_steps(steps([1000], first_step=101), 7, 0.0)
    chooser.add_newest_step(0.0)
    assert chooser.select_steps(0, known(), 9.0) == []


# -- messages of node 0


def test_oldest_steps_are_dropped_until_the_message_fits() -> None:
    """The remaining steps are unchanged."""
    traced = [
        TracedStep(3, step, "slow", (("slow", (5, 4000)), ("reference", (17,))), 200, 2)
        for step in range(90)
    ]
    said = TraceDecision(3, 89, (5, 4000), tuple(traced))
    for room in (400, 1023):
        data = said.encode(room)
        assert len(data) <= room
        heard = TraceDecision.decode(data)
        assert (heard.attempt, heard.decided_to, heard.standing) == (3, 89, (5, 4000))
        assert heard.steps == tuple(traced[-len(heard.steps) :])
        assert heard.steps
    assert (
        TraceDecision.decode(TraceDecision(0, EVERYTHING, (), ()).encode(100)).decided_to
        == EVERYTHING
    )
    assert said.encode(10) == b""


@given(st.binary(max_size=200))
def test_invalid_sampling_messages_are_rejected(data: bytes) -> None:
    with pytest.raises(ValueError, match="node 0"):
        TraceDecision.decode(data)


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
    trace = shelf.entries_with_step(37)[0].build_trace(37)
    assert trace is not None
    assert (trace.step, len(trace.spans)) == (37, 10)
