"""Spans, sections and module calls in the recorder."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.collective_rig import on_autograds_thread, on_thread
from tests.support.recorders import Rig
from torchlens_perf import _native
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.run import ring
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import Flag, Kind


@pytest.fixture
def rig(tmp_path: Path):
    made = Rig(tmp_path)
    yield made
    made.close()


def test_span_record_has_its_times_name_step_and_depth(rig: Rig) -> None:
    start = rig.clock.now_ns
    rig.span(Kind.DATA, "data", 50)
    (record,) = rig.records()

    assert (record["kind"], record["name"], record["step"], record["depth"]) == (
        Kind.DATA,
        "data",
        0,
        1,
    )
    assert (record["start_ns"], record["duration_ns"]) == (start, 50)


def test_nested_time_is_credited_to_the_enclosing_span(rig: Rig) -> None:
    """`nested_ns` is the time of direct children.

    `phase_ns` is the time of phases at any depth below, each counted once.
    """
    recorder, intern = rig.recorder, rig.ring.intern
    recorder.begin(Kind.FORWARD, intern("forward"))
    rig.clock.advance(1)
    recorder.begin(Kind.MODULE, intern("block"))
    rig.clock.advance(2)
    recorder.begin(Kind.WAIT, intern("wait"))
    rig.clock.advance(40)
    recorder.end(Kind.WAIT, intern("wait"))
    rig.span(Kind.SECTION, "part", 100)
    recorder.end(Kind.MODULE, intern("block"))
    rig.clock.advance(3)
    recorder.end(Kind.FORWARD, intern("forward"))
    wait, part, block, forward = rig.records()

    assert [each["duration_ns"] for each in (wait, part, block, forward)] == [40, 100, 142, 146]
    assert (block["nested_ns"], block["phase_ns"]) == (140, 40)
    assert (forward["nested_ns"], forward["phase_ns"]) == (142, 40)


def test_step_record_has_the_time_of_its_top_level_phases(rig: Rig) -> None:
    """A step's record ends where the next one starts."""
    rig.clock.advance(10)
    rig.span(Kind.DATA, "data", 20)
    rig.span(Kind.SECTION, "log", 5)
    assert rig.recorder.next_step(int(Flag.EVALUATION), 77, 2) == 1
    rig.clock.advance(9)
    assert rig.recorder.next_step() == 2
    _, _, first, second = rig.records()

    assert (first["duration_ns"], first["phase_ns"], first["nested_ns"]) == (35, 20, 25)
    assert (first["flags"], first["value0"], first["value1"], first["step"]) == (
        Flag.EVALUATION,
        77,
        2,
        0,
    )
    assert (second["start_ns"], second["duration_ns"], second["phase_ns"]) == (
        first["start_ns"] + 35,
        9,
        0,
    )


def test_charged_time_is_subtracted_from_the_open_span(rig: Rig) -> None:
    """Time charged to this package is also summed in the header."""
    recorder, forward = rig.recorder, rig.ring.intern("forward")
    recorder.begin(Kind.FORWARD, forward)
    rig.clock.advance(30)
    recorder.add_overhead(12)
    recorder.end(Kind.FORWARD, forward)
    (record,) = rig.records()

    assert (record["duration_ns"], record["phase_ns"], record["nested_ns"]) == (30, 12, 12)
    assert rig.reader.read_counter(ring.TOOL_NS) == 12


def test_interval_of_a_phase_is_credited_to_the_open_span(rig: Rig) -> None:
    """Intervals of other kinds are only recorded."""
    recorder, backward = rig.recorder, rig.ring.intern("backward")
    recorder.begin(Kind.BACKWARD, backward)
    rig.clock.advance(100)
    recorder.record_span(Kind.WAIT, rig.ring.intern("tail"), 500, 40, int(Flag.TAIL))
    recorder.record_span(Kind.MODULE_BACKWARD, rig.ring.intern("block"), 400, 60, 0, 1, 2)
    recorder.end(Kind.BACKWARD, backward)
    tail, block, whole = rig.records()

    assert (tail["start_ns"], tail["duration_ns"], tail["flags"], tail["depth"]) == (
        500,
        40,
        Flag.TAIL,
        2,
    )
    assert (block["value0"], block["value1"]) == (1, 2)
    assert (whole["phase_ns"], whole["nested_ns"]) == (40, 40)


def test_span_without_an_end_is_dropped_and_counted(rig: Rig) -> None:
    """The span is dropped when an enclosing one ends. Later spans are correct."""
    recorder, intern = rig.recorder, rig.ring.intern
    recorder.begin(Kind.FORWARD, intern("forward"))
    recorder.begin(Kind.SECTION, intern("lost"))
    recorder.begin(Kind.BACKWARD, intern("lost too"))
    rig.clock.advance(8)
    recorder.end(Kind.FORWARD, intern("forward"))
    rig.span(Kind.DATA, "data", 5)
    forward, data = rig.records()

    assert (forward["kind"], forward["duration_ns"]) == (Kind.FORWARD, 8)
    assert data["depth"] == 1
    assert rig.reader.read_counter(ring.UNBALANCED) == 2
    assert recorder.backwards == 0


def test_end_without_a_start_writes_no_record(rig: Rig) -> None:
    rig.recorder.end(Kind.DATA, rig.ring.intern("data"))

    assert rig.records() == []


def test_dropped_span_and_spans_inside_it_leave_no_record(rig: Rig) -> None:
    """All dropped spans are counted."""
    recorder, intern = rig.recorder, rig.ring.intern
    recorder.begin(Kind.OPTIMIZER, intern("optimizer"))
    recorder.begin(Kind.SECTION, intern("inside"))
    recorder.drop(Kind.OPTIMIZER, intern("optimizer"))
    rig.span(Kind.DATA, "data", 5)
    (data,) = rig.records()

    assert data["depth"] == 1
    assert rig.reader.read_counter(ring.UNBALANCED) == 2
    # The step itself is never dropped.
    recorder.drop(Kind.STEP, 0)
    assert rig.recorder.next_step() == 1


def test_spans_nested_deeper_than_64_levels_are_counted_and_not_recorded(rig: Rig) -> None:
    """The stack of open spans stays balanced."""
    recorder, name = rig.recorder, rig.ring.intern("deep")
    for _ in range(100):
        recorder.begin(Kind.SECTION, name)
        rig.clock.advance(1)
    for _ in range(100):
        recorder.end(Kind.SECTION, name)
    records = rig.records()

    assert [record["depth"] for record in records] == list(range(63, 0, -1))
    assert records[-1]["duration_ns"] == 100
    assert rig.reader.read_counter(ring.TOO_DEEP) == 100 - 63

    def recurse(module: None, left: int) -> None:
        if left:
            call(None, left - 1)

    call = _native.ModuleCall(recorder, name, recurse)
    call(None, 99)

    assert len(rig.records()) == 63
    assert rig.reader.read_counter(ring.TOO_DEEP) == 2 * (100 - 63)
    assert rig.reader.read_counter(ring.UNBALANCED) == 0
    rig.span(Kind.DATA, "data", 1)
    assert rig.records()[0]["depth"] == 1


def test_calls_of_a_closed_recorder_do_nothing(rig: Rig) -> None:
    """The state in the ring file is CLOSED."""
    recorder = rig.recorder
    recorder.begin(Kind.FORWARD, rig.ring.intern("forward"))
    recorder.activate()
    recorder.close()
    rig.ring.close()
    recorder.begin(Kind.DATA, 1)
    recorder.end(Kind.DATA, 1)
    recorder.record_span(Kind.DATA, 1, 0, 5)
    recorder.add_overhead(5)
    recorder.activate()
    with _native.section("after"):
        pass

    assert recorder.next_step() == 0
    assert (recorder.closed, recorder.written, recorder.step) == (True, 0, 0)
    assert rig.records() == []
    assert rig.reader.read_counter(ring.STATE) == ring.State.CLOSED


def test_abandoned_recorder_does_not_change_the_file(rig: Rig) -> None:
    """A forked child calls abandon(), because the file belongs to its parent."""
    rig.recorder.begin(Kind.FORWARD, rig.ring.intern("forward"))
    before = rig.ring.buffer[:]
    rig.recorder.abandon()
    rig.recorder.end(Kind.FORWARD, 1)

    assert rig.ring.buffer[:] == before
    assert rig.recorder.closed


def test_buffer_that_is_no_ring_file_is_refused() -> None:
    with pytest.raises(ValueError, match="ring file"):
        _native.Recorder(bytearray(300_000), lambda name: 0)


class TestSection:
    def test_section_records_only_while_a_recorder_is_active(self, rig: Rig) -> None:
        """A recorder is active between activate() and deactivate()."""
        section = _native.section("part")
        with section:
            rig.clock.advance(3)
        rig.recorder.activate()
        with section:
            rig.clock.advance(4)
        rig.recorder.deactivate()
        with section:
            rig.clock.advance(5)
        (record,) = rig.records()

        assert (record["kind"], record["name"], record["duration_ns"]) == (Kind.SECTION, "part", 4)

    def test_sections_may_be_nested_in_others_and_in_themselves(self, rig: Rig) -> None:
        rig.recorder.activate()
        outer, inner = _native.section("outer"), _native.section("inner")
        with outer:
            rig.clock.advance(1)
            with inner, outer:
                rig.clock.advance(10)
        records = rig.records()

        assert [(r["name"], r["depth"], r["duration_ns"], r["nested_ns"]) for r in records] == [
            ("outer", 3, 10, 0),
            ("inner", 2, 10, 10),
            ("outer", 1, 11, 10),
        ]

    def test_exception_in_a_section_is_passed_on_and_flagged(self, rig: Rig) -> None:
        """The user's exception object is unchanged."""
        rig.recorder.activate()
        raised = KeyError("mine")
        with pytest.raises(KeyError) as caught, _native.section("part"):
            raise raised

        assert caught.value is raised
        assert [record["flags"] for record in rig.records()] == [Flag.EXCEPTION]

    def test_section_returns_one_object_for_each_name(self, rig: Rig) -> None:
        """A name that is not a string raises."""
        section = _native.section

        assert section("a") is section("a")
        assert section("a").name == "a"
        assert repr(section("a")) == "section('a')"
        for wrong in (3, [], {"a": 1}, {"a"}, b"a", None):
            with pytest.raises(TypeError, match=f"takes a name, got {type(wrong).__name__}"):
                section(wrong)

    def test_section_has_its_name_in_the_file_of_the_next_recorder(
        self, rig: Rig, tmp_path: Path
    ) -> None:
        """The section was created with an earlier recorder."""
        section = _native.section("kept")
        rig.recorder.activate()
        with section:
            pass
        other = Rig(tmp_path)
        other.ring.intern("something else first")
        other.recorder.activate()
        with section:
            other.clock.advance(2)

        assert [record["name"] for record in rig.records()] == ["kept"]
        assert [record["name"] for record in other.records()] == ["kept"]
        other.close()

    def test_record_lost_by_interleaved_sections_is_counted(self, rig: Rig) -> None:
        """Sections in asyncio tasks may end out of order.

        One record is lost, and all other records are right.
        """
        rig.recorder.activate()
        first, second = _native.section("first"), _native.section("second")
        first.__enter__()
        second.__enter__()
        rig.clock.advance(5)
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        records = rig.records()

        assert [record["name"] for record in records] == ["first"]
        assert rig.reader.read_counter(ring.UNBALANCED) == 1

    def test_section_names_beyond_the_limit_share_one_name(
        self,
    ) -> None:
        """Names generated in a loop must not use unlimited memory."""
        program = (
            "from torchlens_perf._native import section\nprint(len({id(section(f'made up"
            " {i}')) for i in range(10_000)}), section('one more').name)"
        )
        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        count, name = ran.stdout.split(maxsplit=1)

        assert int(count) in (4096, 4097)
        assert name == "(other sections)\n"


def parts_of_step(rig: Rig) -> dict[str, int]:
    """Return the non-zero parts of the first step in nanoseconds."""
    (parts,) = assemble_steps(rig.reader.read_records().records).parts_ns.tolist()
    return {
        part: value for part, value in zip(PARTS, parts, strict=True) if value or part == "backward"
    }


class TestThreads:
    def test_span_on_another_thread_does_not_change_those_of_the_training_thread(
        self, rig: Rig
    ) -> None:
        """The record of the other thread has a flag."""
        recorder, intern = rig.recorder, rig.ring.intern
        recorder.begin(Kind.FORWARD, intern("forward"))
        thread = threading.Thread(target=lambda: rig.span(Kind.DATA, "prefetch", 30))
        thread.start()
        thread.join()
        recorder.end(Kind.FORWARD, intern("forward"))
        prefetch, forward = rig.records()

        assert (prefetch["flags"], prefetch["depth"], prefetch["duration_ns"]) == (
            Flag.OTHER_THREAD,
            1,
            30,
        )
        assert (forward["flags"], forward["phase_ns"], forward["nested_ns"]) == (0, 0, 0)

    def test_other_thread_that_takes_over_keeps_its_open_sections(self, rig: Rig) -> None:
        """After the takeover, spans of the first thread have the flag for other threads."""
        recorder, taken = rig.recorder, []

        def other() -> None:
            recorder.activate()
            with _native.section("epoch"):
                taken.append(recorder.take_over(False))
                rig.span(Kind.FORWARD, "forward", 30)
            taken.append(recorder.take_over(False))

        on_thread(other)
        rig.span(Kind.DATA, "prefetch", 5)
        recorder.deactivate()
        forward, epoch, prefetch = rig.records()

        assert taken == [True, True]
        assert (forward["flags"], forward["depth"], forward["duration_ns"]) == (0, 2, 30)
        assert (epoch["flags"], epoch["depth"], epoch["phase_ns"]) == (0, 1, 30)
        assert (prefetch["flags"], prefetch["depth"]) == (Flag.OTHER_THREAD, 1)

    def test_no_thread_takes_over_while_the_owner_is_inside_a_span(self, rig: Rig) -> None:
        """If the owner's thread has ended, its open spans do not matter.

        The new thread may only be inside sections.
        """
        recorder, forward = rig.recorder, rig.ring.intern("forward")
        taken = []

        def other(owner_ended: bool, inside: bool) -> None:
            if inside:
                recorder.begin(Kind.FORWARD, forward)
            taken.append(recorder.take_over(owner_ended))
            if inside:
                recorder.end(Kind.FORWARD, forward)

        on_thread(other, False, True)
        on_thread(other, True, True)
        recorder.begin(Kind.BACKWARD, forward)
        on_thread(other, False, False)
        assert (taken, recorder.backwards) == ([False, False, False], 1)
        on_thread(other, True, False)
        assert (taken[-1], recorder.backwards) == (True, 0)

    def test_backward_pass_on_another_thread_gets_no_recomputation(self, rig: Rig) -> None:
        """Calls of the owner and recomputation on autograd's thread do not belong to the other
        thread's pass.
        """
        recorder, backward, model = (
            rig.recorder,
            rig.ring.intern("backward"),
            rig.ring.intern("model"),
        )
        begun, end = threading.Event(), threading.Event()
        call = _native.ModuleCall(recorder, model, lambda: None)

        def other() -> None:
            recorder.begin(Kind.BACKWARD, backward)
            begun.set()
            end.wait(30)
            call()
            recorder.end(Kind.BACKWARD, backward)

        thread = threading.Thread(target=other)
        thread.start()
        begun.wait(30)
        assert recorder.backwards == 0
        call()
        recorder.begin(Kind.BACKWARD, backward)
        on_autograds_thread(rig.span, Kind.RECOMPUTE, "again", 30)
        recorder.end(Kind.BACKWARD, backward)
        end.set()
        thread.join()

        assert [(Kind(each["kind"]), each["flags"]) for each in rig.records()] == [
            (Kind.FORWARD, 0), (Kind.RECOMPUTE, Flag.OTHER_THREAD), (Kind.BACKWARD, 0),
            (Kind.RECOMPUTE, Flag.OTHER_THREAD), (Kind.BACKWARD, Flag.OTHER_THREAD),
        ]  # fmt: skip

    def test_wait_on_autograds_thread_is_subtracted_from_the_backward_pass(self, rig: Rig) -> None:
        """Recomputation on a device thread is subtracted too."""
        recorder, intern = rig.recorder, rig.ring.intern
        recorder.begin(Kind.BACKWARD, intern("backward"))
        rig.clock.advance(5)
        on_autograds_thread(rig.span, Kind.WAIT, "wait", 30)
        recorder.end(Kind.BACKWARD, intern("backward"))
        wait, backward = rig.records()

        assert (wait["flags"], wait["duration_ns"], wait["phase_ns"]) == (0, 30, 0)
        assert (backward["duration_ns"], backward["phase_ns"]) == (35, 30)

    def test_wait_inside_recomputation_counts_once(self, rig: Rig) -> None:
        """The wait is on autograd's thread. The wait does not count as recomputation."""
        recorder, backward, again = (
            rig.recorder,
            rig.ring.intern("backward"),
            rig.ring.intern("again"),
        )

        def compute_again() -> None:
            recorder.begin(Kind.RECOMPUTE, again)
            rig.clock.advance(10)
            rig.span(Kind.WAIT, "wait", 30)
            recorder.end(Kind.RECOMPUTE, again)

        recorder.begin(Kind.BACKWARD, backward)
        on_autograds_thread(compute_again)
        rig.clock.advance(5)
        recorder.end(Kind.BACKWARD, backward)

        assert [(each["duration_ns"], each["phase_ns"], each["flags"]) for each in rig.records()] == [
            (30, 0, 0), (40, 30, 0), (45, 40, 0),
        ]  # fmt: skip

    def test_simultaneous_waits_of_two_devices_do_not_exceed_the_backward_pass(
        self, rig: Rig
    ) -> None:
        """The step's parts add up to its duration and are not negative."""
        recorder, backward, wait = (
            rig.recorder,
            rig.ring.intern("backward"),
            rig.ring.intern("wait"),
        )
        one_waits, both_wait = threading.Event(), threading.Event()

        def other() -> None:
            recorder.begin(Kind.WAIT, wait)
            one_waits.set()
            both_wait.wait(30)
            recorder.end(Kind.WAIT, wait)

        recorder.begin(Kind.BACKWARD, backward)
        rig.clock.advance(5)
        thread = threading.Thread(target=on_autograds_thread, args=(other,))
        thread.start()
        assert one_waits.wait(30)
        on_autograds_thread(rig.span, Kind.WAIT, "wait", 30)
        both_wait.set()
        thread.join()
        recorder.end(Kind.BACKWARD, backward)
        recorder.next_step()
        parts = parts_of_step(rig)

        assert parts == {"backward": 0, "communication": 35}

    def test_wait_on_a_users_thread_is_not_subtracted(self, rig: Rig) -> None:
        """A thread that saves a checkpoint waits for other ranks independently of the training
        thread.
        """
        recorder, intern = rig.recorder, rig.ring.intern
        recorder.begin(Kind.BACKWARD, intern("backward"))
        on_thread(rig.span, Kind.WAIT, "wait", 30)
        recorder.end(Kind.BACKWARD, intern("backward"))
        wait, backward = rig.records()

        assert (wait["flags"], wait["duration_ns"]) == (Flag.OTHER_THREAD, 30)
        assert (backward["duration_ns"], backward["phase_ns"]) == (30, 0)

    @pytest.mark.parametrize("runner", [on_thread, on_autograds_thread])
    def test_wait_that_started_before_the_backward_pass_is_ignored(
        self, runner: Callable[..., None], rig: Rig
    ) -> None:
        """The wait is in no part of the step, and the backward pass keeps its time."""
        recorder, backward, wait = (
            rig.recorder,
            rig.ring.intern("backward"),
            rig.ring.intern("wait"),
        )
        began, backward_began = threading.Event(), threading.Event()

        def elsewhere() -> None:
            recorder.begin(Kind.WAIT, wait)
            began.set()
            backward_began.wait(30)
            recorder.end(Kind.WAIT, wait)

        thread = threading.Thread(target=runner, args=(elsewhere,))
        thread.start()
        assert began.wait(30)
        rig.clock.advance(300)
        recorder.begin(Kind.BACKWARD, backward)
        rig.clock.advance(20)
        backward_began.set()
        thread.join()
        recorder.end(Kind.BACKWARD, backward)
        recorder.next_step()

        assert parts_of_step(rig) == {"backward": 20, "host": 300}

    @pytest.mark.parametrize("inside", [Kind.WAIT, Kind.OPTIMIZER])
    def test_wait_on_autograds_thread_is_not_subtracted_from_other_phases(
        self, inside: Kind, rig: Rig
    ) -> None:
        """The training thread itself waits, or another thread is in a backward pass."""
        recorder, backward = rig.recorder, rig.ring.intern("backward")
        if inside == Kind.WAIT:
            recorder.begin(Kind.BACKWARD, backward)
        else:
            on_thread(recorder.begin, Kind.BACKWARD, backward)
        recorder.begin(inside, backward)
        on_autograds_thread(rig.span, Kind.WAIT, "wait", 30)
        recorder.end(inside, backward)
        wait, around = rig.records()

        assert (wait["flags"], around["phase_ns"]) == (Flag.OTHER_THREAD, 0)

    def test_simultaneous_spans_of_eight_threads_are_all_recorded(self, tmp_path: Path) -> None:
        """Every record is complete, and starts and ends are balanced."""
        rig = Rig(tmp_path, capacity=65536, clock=None)
        rig.recorder.activate()

        def work(index: int) -> None:
            with _native.section(f"thread {index}"):
                for _ in range(1000):
                    with _native.section("shared"):
                        pass

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        names = [record["name"] for record in rig.records()]

        assert names.count("shared") == 8000
        assert sorted(set(names) - {"shared"}) == [f"thread {index}" for index in range(8)]
        assert rig.reader.read_counter(ring.UNBALANCED) == 0
        rig.close()


class Module:
    """A callable that supports weak references, like nn.Module."""

    def forward(self, *args: object, **kwargs: object) -> tuple[object, ...]:
        return (self, args, kwargs)


class TestModuleCall:
    def test_timed_call_passes_arguments_and_result_unchanged(self, rig: Rig) -> None:
        """The function receives the module and all arguments."""
        module = Module()
        call = _native.ModuleCall(rig.recorder, 0, Module.forward)

        assert call(module) == (module, (), {})
        assert call(module, 1, 2, key=3) == (module, (1, 2), {"key": 3})
        assert call(module, *range(20), **{f"k{i}": i for i in range(20)})[1:] == (
            tuple(range(20)),
            {f"k{i}": i for i in range(20)},
        )

    def test_outermost_module_call_is_the_forward_phase(self, rig: Rig) -> None:
        """Calls inside the outermost one have the kind MODULE, or RECOMPUTE in a recomputation."""
        recorder, make = rig.recorder, _native.ModuleCall
        inner = make(recorder, rig.ring.intern("inner"), lambda: rig.clock.advance(2))
        outer = make(recorder, rig.ring.intern("outer"), inner)
        outer()
        backward = rig.ring.intern("backward")
        recorder.begin(Kind.BACKWARD, backward)
        outer()
        recorder.end(Kind.BACKWARD, backward)

        assert [(record["kind"], record["name"]) for record in rig.records()] == [
            (Kind.MODULE, "inner"),
            (Kind.FORWARD, "outer"),
            (Kind.MODULE, "inner"),
            (Kind.RECOMPUTE, "outer"),
            (Kind.BACKWARD, "backward"),
        ]

    def test_recomputation_in_a_nested_backward_pass_is_recognized(self, rig: Rig) -> None:
        """A model may start a backward pass in its forward pass and call itself there.

        Such a call must not count as an ordinary module call.
        """
        recorder, make = rig.recorder, _native.ModuleCall
        inner = make(recorder, rig.ring.intern("inner"), lambda: None)

        def with_backward() -> None:
            recorder.begin(Kind.BACKWARD, 0)
            inner()
            recorder.end(Kind.BACKWARD, 0)

        make(recorder, rig.ring.intern("outer"), with_backward)()

        assert [record["kind"] for record in rig.records()] == [
            Kind.RECOMPUTE,
            Kind.BACKWARD,
            Kind.FORWARD,
        ]

    def test_exception_in_a_timed_call_is_passed_on_and_flagged(self, rig: Rig) -> None:
        """The same exception object is raised, and the span ends."""
        raised = ValueError("mine")

        def fail() -> None:
            raise raised

        with pytest.raises(ValueError, match="mine") as caught:
            _native.ModuleCall(rig.recorder, 0, fail)()

        assert caught.value is raised
        assert [record["flags"] for record in rig.records()] == [Flag.EXCEPTION]
        rig.span(Kind.DATA, "data", 1)
        assert rig.records()[0]["depth"] == 1

    def test_observers_of_module_calls_run_in_sampled_steps_only(self, rig: Rig) -> None:
        """Observers run outside the span, and their time is charged to this package."""
        seen: list[object] = []

        def before(*args: object, **kwargs: object) -> None:
            rig.clock.advance(100)
            seen.append((args, kwargs))

        def after(result: object) -> None:
            rig.clock.advance(10)
            seen.append(result)

        call = _native.ModuleCall(
            rig.recorder, 0, lambda *args, **kwargs: "result", before=before, after=after
        )
        call(None, 1)
        rig.recorder.sampled = 1
        call(None, 2, key=3)

        assert seen == [((2,), {"key": 3}), "result"]
        assert [record["duration_ns"] for record in rig.records()] == [0, 0]
        assert rig.reader.read_counter(ring.TOOL_NS) == 110

    def test_outermost_forward_passes_are_reported_in_every_step(self, rig: Rig) -> None:
        """Calls by another watched module or in a backward pass are not reported."""
        seen: list[object] = []
        module_call, recorder = _native.ModuleCall, rig.recorder
        inner = module_call(recorder, 0, lambda: "inner", forward=seen.append)
        outer = module_call(recorder, 1, lambda: inner() and "outer", forward=seen.append)
        outer()
        inner()
        recorder.begin(Kind.BACKWARD, 0)
        outer()
        recorder.end(Kind.BACKWARD, 0)

        assert seen == ["outer", "inner"]

    def test_timed_call_that_outlives_its_recorder_only_calls_the_function(self, rig: Rig) -> None:
        """The recorder may be closed before or inside the call."""

        def close_inside() -> str:
            rig.recorder.close()
            rig.ring.close()
            return "result"

        call = _native.ModuleCall(rig.recorder, 0, close_inside)

        assert call() == "result"
        assert call() == "result"


class Called(Module):
    def __call__(self, *args: object) -> object:
        return self.forward(*args)


class CallsThrough(Called):
    def __call__(self, argument: object) -> object:
        return super().__call__(argument)


@pytest.fixture
def native(tmp_path: Path) -> Iterator[Rig]:
    """Route calls of Called.__call__ through the native recorder."""
    rig = Rig(tmp_path)
    assert _native.route_calls(Called.__call__)
    yield rig
    _native.unroute_calls(Called.__call__)
    rig.close()


class TestRoutedCalls:
    def test_only_modules_in_the_table_are_timed(self, native: Rig) -> None:
        """Thousands of modules are added and removed.

        Each call is timed while its module is in the table.
        """
        modules = [Called() for _ in range(3000)]
        timed = set(range(0, 3000, 3))
        for index in timed:
            call = _native.ModuleCall(native.recorder, 0, Called.__call__)
            _native.set_module_call(id(modules[index]), call)
        for index in sorted(timed)[::2]:
            _native.set_module_call(id(modules[index]), None)
            _native.set_module_call(id(modules[index]), None)
            timed.remove(index)
        for index, module in enumerate(modules):
            written = native.recorder.written
            assert module(index) == (module, (index,), {})
            assert native.recorder.written - written == (index in timed)
        for index in timed:
            _native.set_module_call(id(modules[index]), None)
        assert modules[0](1) == (modules[0], (1,), {})

    def test_module_call_through_super_is_counted_once(self, native: Rig) -> None:
        """Python may inline the call of super(), and an invalid call fails before that call."""
        module = CallsThrough()
        _native.set_module_call(id(module), _native.ModuleCall(native.recorder, 0, Called.__call__))
        assert _native.route_calls(CallsThrough.__call__)
        try:
            for _ in range(100):
                module(1)
            with pytest.raises(TypeError):
                module()
            list(map(Called.__call__, [module], [1]))
        finally:
            _native.unroute_calls(CallsThrough.__call__)
            _native.set_module_call(id(module), None)

        flags = [record["flags"] for record in native.records()]
        assert flags == [0] * 100 + [Flag.EXCEPTION] + [0]

    def test_module_calls_are_routed_once_and_restored(self, native: Rig) -> None:
        function, attributes = Called.__call__, dict(vars(Called))
        module = Called()
        assert not _native.route_calls(function)
        assert not _native.route_calls(len)
        _native.set_module_call(id(module), _native.ModuleCall(native.recorder, 0, function))
        _native.unroute_calls(function)
        _native.unroute_calls(len)
        module(1)
        assert native.recorder.written == 0
        assert _native.route_calls(function)
        module(1)
        assert native.recorder.written == 1
        assert dict(vars(Called)) == attributes
        _native.set_module_call(id(module), None)

    def test_invalid_arguments_of_set_module_call_are_refused(self, native: Rig) -> None:
        unfinished = _native.ModuleCall.__new__(_native.ModuleCall)
        for arguments in ((), (1,), (1, 2), (0, None), ("x", None), (1, unfinished), (1, None, 2)):
            with pytest.raises((TypeError, ValueError)):
                _native.set_module_call(*arguments)


def test_each_nvtx_range_that_is_opened_is_closed(rig: Rig) -> None:
    """Every start pushes the attribute of its name, and every end pops it. Spans whose end is lost
    are included.
    """
    calls: list[object] = []
    rig.recorder.set_nvtx(calls.append, lambda: calls.append("pop"), ["step", "a", "b"])
    a, b = rig.ring.intern("a"), rig.ring.intern("b")
    rig.recorder.begin(Kind.SECTION, a)
    rig.recorder.begin(Kind.SECTION, b)
    rig.recorder.end(Kind.SECTION, a)
    rig.recorder.begin(Kind.SECTION, rig.ring.intern("unknown to NVTX"))
    rig.recorder.close()

    assert calls == ["a", "b", "pop", "pop", "step", "pop"]


def test_a_step_has_exactly_these_records(rig: Rig) -> None:
    """Each field of each record of a step is known: times, nesting, flags and values."""
    rig.recorder.activate()
    start_ns = rig.clock.now_ns
    rig.span(Kind.DATA, "data", 10)
    with _native.section("part"):
        rig.clock.advance(4)
        rig.span(Kind.WAIT, "wait", 6)
    _native.ModuleCall(rig.recorder, rig.ring.intern("net"), lambda: rig.clock.advance(3))()
    rig.recorder.record_span(
        Kind.COLLECTIVE, rig.ring.intern("allreduce"), 5, 6, int(Flag.ASYNC), 1 << 40, 7
    )
    rig.recorder.add_overhead(2)
    rig.recorder.next_step(1, 1 << 33, 2)
    fields = (
        "kind", "name", "depth", "flags", "start_ns", "duration_ns", "nested_ns", "phase_ns", "value0", "value1",
    )  # fmt: skip

    assert [tuple(record[field] for field in fields) for record in rig.records()] == [
        (Kind.DATA, "data", 1, 0, start_ns, 10, 0, 0, 0, 0),
        (Kind.WAIT, "wait", 2, 0, start_ns + 14, 6, 0, 0, 0, 0),
        (Kind.SECTION, "part", 1, 0, start_ns + 10, 10, 6, 6, 0, 0),
        (Kind.FORWARD, "net", 1, 0, start_ns + 20, 3, 0, 0, 0, 0),
        (Kind.COLLECTIVE, "allreduce", 1, Flag.ASYNC, 5, 6, 0, 0, 1 << 40, 7),
        (Kind.STEP, "(other)", 0, 1, start_ns, 23, 25, 21, 1 << 33, 2),
    ]
    assert rig.reader.read_counter(ring.TOOL_NS) == 2
    rig.recorder.deactivate()
