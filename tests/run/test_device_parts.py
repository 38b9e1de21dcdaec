"""Tests that training process and sidecar divide a device's steps into equal parts.

Tests also check that the sidecar restores rows from their records.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchlens_perf.analysis.statistics.device_steps import DeviceStepJoin
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.cuda import step_parts
from torchlens_perf.cuda.step_parts import StepPartCollector
from torchlens_perf.run.device.merged_rows import SECTION, MergedRow, pack_row, unpack_row
from torchlens_perf.run.device.step_parts import (
    PART_OF_SPAN,
    ROW_NAMES,
    StepPart,
    compute_part_durations_ns,
)
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import Kind, record_dtype

KINDS = [Kind(kind) for kind in PART_OF_SPAN]
PART_OF_ROW = {
    StepPart.FORWARD: "forward", StepPart.RECOMPUTE: "recompute", StepPart.BACKWARD: "backward",
    StepPart.OPTIMIZER: "optimizer",
    StepPart.STALL: "communication", StepPart.GAP: "host",
}  # fmt: skip
# Few distinct values let many spans share starts, ends and lengths, or overlap slightly.
SPANS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 12), st.integers(0, 12)), max_size=9
)


class Known:
    """A replacement that records the steps."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def add_step(self, rows: list[int]) -> None:
        self.steps.append(rows)


Steps = list[tuple[list[tuple[Kind, int, int]], int]]


@given(st.lists(st.tuples(SPANS, st.integers(0, 40)), min_size=1, max_size=3))
def test_training_process_and_sidecar_divide_steps_into_the_same_parts(steps: Steps) -> None:
    """Spans may be nested, overlapping or of equal length. Host time never counts as a gap."""
    both_agree(steps)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1100, 3000), st.integers(1, 20)), min_size=2, max_size=3),
    st.integers(0, 999),
)
def test_training_process_and_sidecar_agree_on_parts_of_thousands_of_fsdp2_spans(
    shapes: list[tuple[int, int]], seed: int
) -> None:
    """The spans are the phases of each micro-step, with stalls inside of and between the phases."""
    steps: Steps = []
    random = Random(seed)
    for count, phases in shapes:
        spans, now_ns = [], 0
        for _ in range(phases):
            begin_ns = now_ns
            for _ in range(count // phases):
                stall_ns = random.randrange(50)
                spans.append((Kind.WAIT, now_ns + random.randrange(3), stall_ns))
                now_ns += stall_ns + random.randrange(60)
            spans.append((random.choice(KINDS), begin_ns, now_ns - begin_ns - random.randrange(2)))
            now_ns += random.randrange(100)
        steps.append((spans, now_ns))
    both_agree(steps)


def both_agree(steps: Steps) -> None:
    known, records = Known(), []
    parts = StepPartCollector(known)  # type: ignore[arg-type]
    for number, (spans, step_ns) in enumerate(steps):
        # A step without a backward pass is no training step, so an empty one is added.
        device = [*spans, (Kind.BACKWARD, 1000, 0), (Kind.STEP, 0, step_ns)]
        for kind, start_ns, duration_ns in device:
            parts.add_span(int(kind), number, start_ns, duration_ns)
            records.append((Kind.DEVICE, number, start_ns, duration_ns, kind))
        records.append((Kind.STEP, number, 0, step_ns, 0))
    made = np.zeros(len(records), record_dtype())
    for record, values in zip(made, records, strict=True):
        for field, value in zip(
            ("kind", "step", "start_ns", "duration_ns", "value0"), values, strict=True
        ):
            record[field] = value
    table = DeviceStepJoin().add_records(made, assemble_steps(made))
    assert len(table) == len(known.steps) == len(steps)
    for index, rows in enumerate(known.steps):
        by_part = {part: rows[row] for row, part in PART_OF_ROW.items()}
        assert {part: table.parts_ns[index, PARTS.index(part)] for part in by_part} == by_part
        assert (table.own_ns[index], table.duration_ns[index]) == (
            rows[StepPart.WORK],
            rows[StepPart.STEP],
        )


def test_steps_without_training_and_their_spans_are_left_out() -> None:
    known = Known()
    parts = StepPartCollector(known)  # type: ignore[arg-type]
    parts.add_span(int(Kind.FORWARD), 0, 0, 5)
    parts.add_span(int(Kind.STEP), 0, 0, 7)
    parts.add_span(int(Kind.BACKWARD), 1, 10, 5)
    parts.add_span(int(Kind.MODULE), 2, 20, 5)
    parts.add_span(int(Kind.BACKWARD), 2, 20, 5)
    parts.add_span(int(Kind.STEP), 2, 20, 6)
    assert known.steps == [compute_part_durations_ns([(int(Kind.BACKWARD), 20, 5)], 6)]
    for step in range(3, 3000):
        parts.add_span(int(Kind.BACKWARD), step, 20, 5)
        parts.add_span(int(Kind.STEP), step, 20, 6)
    assert len(known.steps) == 2998, "what is left of steps takes no room"


def test_step_with_too_many_spans_is_left_out_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without its stalls would show too much work."""
    monkeypatch.setattr(step_parts, "_MAX_SPANS", 10)
    known = Known()
    parts = StepPartCollector(known)  # type: ignore[arg-type]
    for step, stalls in ((0, 9), (1, 10), (2, 3)):
        parts.add_span(int(Kind.BACKWARD), step, 0, 100)
        for each in range(stalls):
            parts.add_span(int(Kind.WAIT), step, each * 10, 5)
        parts.add_span(int(Kind.STEP), step, 0, 100)
    assert [rows[StepPart.STALL] for rows in known.steps] == [45, 15]
    # Incomplete steps leave no spans behind.
    for step in range(3, 1000):
        parts.add_span(int(Kind.WAIT), step, 0, 5)
    assert len(parts._spans) == 1


def test_row_restored_from_its_record_equals_the_original() -> None:
    """Values that do not fit into a field are cut, and do not change other fields."""
    for row in (SECTION, *range(len(StepPart))):
        wanted = MergedRow(
            "attention" if row == SECTION else ROW_NAMES[row], 64 * 16384, 2**50, 2**43, 2**43 + 5, 10**7, 10**4, 16383,
            12.25, 3_000_000, row, 16384, 640,
        )  # fmt: skip
        record = np.zeros(1, record_dtype())[0]
        fields = ("start_ns", "duration_ns", "flags", "value0", "value1", "nested_ns", "phase_ns")
        for huge in (False, True):
            told = (
                wanted._replace(score=9e9, excess_ns=2**60, p50_ns=2**60, p99_ns=2**60)
                if huge
                else wanted
            )
            for field, value in zip(fields, pack_row(told), strict=True):
                record[field] = value
            record["step"], record["name_id"] = 640, 1
            found = unpack_row(record, ["(other)", "attention"])
            if huge:
                assert (found.score, found.p50_ns, found.excess_ns) == (
                    655.35,
                    2**44 - 1,
                    (2**31 - 1) * 1000,
                )
                found = found._replace(
                    score=12.25, excess_ns=3_000_000, p50_ns=2**43, p99_ns=2**43 + 5
                )
            assert found == wanted
