"""Steps assembled from the records of a rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.recorders import Rig
from torchlens_perf.analysis.statistics.steps import assemble_steps, build_step_traces
from torchlens_perf.run.records import OWN_PARTS, PARTS
from torchlens_perf.run.ring import Flag, Kind


@pytest.fixture
def rig(tmp_path: Path):
    made = Rig(tmp_path)
    yield made
    made.close()


def test_step_is_divided_into_parts_without_nested_phases(rig: Rig) -> None:
    """Waiting is the communication part. Time charged to this package is the tool's part."""
    recorder, intern = rig.recorder, rig.ring.intern
    rig.span(Kind.DATA, "data", 10)
    recorder.begin(Kind.FORWARD, intern("forward"))
    rig.span(Kind.MODULE, "block", 20)
    rig.span(Kind.WAIT, "wait", 5)
    recorder.end(Kind.FORWARD, intern("forward"))
    recorder.begin(Kind.BACKWARD, intern("backward"))
    rig.span(Kind.RECOMPUTE, "block", 7)
    rig.clock.advance(30)
    recorder.end(Kind.BACKWARD, intern("backward"))
    rig.clock.advance(3)
    recorder.add_overhead(2)
    rig.span(Kind.OPTIMIZER, "optimizer", 4)
    recorder.next_step(int(Flag.SAMPLED), 1000, 3)
    table = assemble_steps(rig.reader.read_records().records)

    expected = {
        "data": 10, "forward": 20, "recompute": 7, "backward": 30, "optimizer": 4, "communication": 5, "host": 1,
        "tool": 2,
    }  # fmt: skip
    assert dict(zip(PARTS, table.parts_ns[0].tolist(), strict=True)) == expected
    assert table.duration_ns.tolist() == [sum(expected.values())]
    assert table.own_ns.tolist() == [10 + 20 + 7 + 30 + 4 + 1]
    assert (table.memory_bytes[0], table.micro_steps[0], table.flags[0]) == (1000, 3, Flag.SAMPLED)


def test_unfinished_step_is_left_out(rig: Rig) -> None:
    """Phases after the last step's end make no step."""
    rig.span(Kind.DATA, "data", 10)
    rig.recorder.next_step()
    rig.span(Kind.DATA, "data", 99)
    table = assemble_steps(rig.reader.read_records().records)

    assert table.step.tolist() == [0]
    assert table.parts_ns[0, PARTS.index("data")] == 10


def test_spans_of_other_threads_add_to_no_part_of_a_step(rig: Rig) -> None:
    rig.recorder.record_span(Kind.DATA, rig.ring.intern("prefetch"), 0, 50, int(Flag.OTHER_THREAD))
    rig.clock.advance(80)
    rig.recorder.next_step()
    table = assemble_steps(rig.reader.read_records().records)

    assert table.parts_ns[0, PARTS.index("data")] == 0


spans = st.recursive(
    st.tuples(st.sampled_from([*Kind][1:]), st.integers(0, 50), st.just(())),
    lambda inner: st.tuples(
        st.sampled_from([*Kind][1:]), st.integers(0, 50), st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=12,
)


@given(steps=st.lists(st.lists(spans, max_size=5), min_size=1, max_size=4))
def test_parts_of_any_step_add_up_to_its_duration(
    steps: list, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No part is negative for any nesting of spans."""
    rig = Rig(tmp_path_factory.mktemp("ring"))

    def play(kind: Kind, nanoseconds: int, inside: tuple) -> None:
        name_id = rig.ring.intern(kind.name)
        rig.recorder.begin(kind, name_id)
        rig.clock.advance(nanoseconds)
        for each in inside:
            play(*each)
        rig.recorder.end(kind, name_id)

    for step in steps:
        for span in step:
            play(*span)
        rig.clock.advance(1)
        rig.recorder.next_step()
    table = assemble_steps(rig.reader.read_records().records)
    rig.close()

    assert (table.parts_ns.sum(axis=1) == table.duration_ns).all()
    assert (table.parts_ns >= 0).all()
    own = table.parts_ns[:, [PARTS.index(part) for part in OWN_PARTS]].sum(axis=1)
    assert (table.own_ns == own).all()


def test_trace_has_all_spans_of_its_step_and_no_others(rig: Rig) -> None:
    for step in range(3):
        rig.span(Kind.DATA, f"data {step}", 5)
        rig.span(Kind.SECTION, "part", 5)
        rig.recorder.next_step()
    records = rig.reader.read_records().records
    (trace,) = build_step_traces(records, rig.reader.names(), {1, 7})

    assert (trace.step, trace.duration_ns) == (1, 10)
    assert [(span.kind, span.name) for span in trace.spans] == [
        ("data", "data 1"),
        ("section", "part"),
    ]
