"""Collectives and waits in the native recorder and in the Python one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.collective_rig import NAME, CollectiveRig, on_thread, sequence
from tests.support.recorders import Rig
from torchlens_perf import _native
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.patch import patched
from torchlens_perf.recorder.recorder import EndDetection
from torchlens_perf.run.ring import (
    DEPTH,
    MAX_GROUPS,
    MAX_RECENT,
    METADATA_OFFSET,
    RECENT,
    Flag,
    GroupProgress,
    Kind,
)
from torchlens_perf.sidecar.progress import read_operations


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[CollectiveRig]:
    made = CollectiveRig(tmp_path)
    yield made
    made.close()


# -- one operation


def test_collective_record_has_times_phase_bytes_and_sequence_number(rig: CollectiveRig) -> None:
    """The record also has the step, the depth and the position in the step."""
    rig.recorder.begin(Kind.BACKWARD, rig.ring.intern("backward"))
    start_ns = rig.clock.now_ns
    rig.call(7, EndDetection.UNKNOWN, flags=int(Flag.ASYNC), size=123)
    rig.call(8, EndDetection.UNKNOWN)
    rig.recorder.end(Kind.BACKWARD, rig.ring.intern("backward"))
    rig.recorder.next_step()
    rig.call(9, EndDetection.UNKNOWN)
    first, second, third = rig.collectives()

    assert (first["name"], first["start_ns"], first["step"], first["depth"]) == (
        NAME,
        start_ns,
        0,
        2,
    )
    assert (first["value0"], sequence(first), first["flags"]) == (123, 7, Flag.ASYNC)
    assert [rig.reader.names()[each["value1"] >> 32] for each in (first, third)] == [
        "backward",
        "(other)",
    ]
    assert (second["phase_ns"] - first["phase_ns"], third["phase_ns"]) == (1, 0)
    assert (third["step"], third["depth"]) == (1, 1)


class Payload:
    nbytes = 4096


def test_functions_of_a_group_are_recorded_as_blocking_collectives(rig: CollectiveRig) -> None:
    """They share the group's sequence numbers, and each call is a wait from its begin on."""

    def reduce(payload: object, *, result: str = "sum") -> str:
        rig.clock.advance(50)
        return result

    def fail(payload: object) -> None:
        raise ValueError(payload)

    slot, parts = rig.ring.add_group_row("tp:0"), (int(EndDetection.BY_WAIT), "nbytes")
    name_id = rig.ring.intern(NAME)
    recorded, failing, gathered = (
        _native.native_hook("collective", each, rig.recorder, name_id, slot, *parts)
        for each in (reduce, fail, reduce)
    )
    assert recorded(Payload()) == "sum"
    with pytest.raises(ValueError, match="Payload"):
        failing(Payload())
    assert gathered(3, result="parts") == "parts"
    records = rig.records()
    found = [each for each in records if each["kind"] == Kind.COLLECTIVE]
    waits = [each["duration_ns"] for each in records if each["kind"] == Kind.WAIT]

    assert [
        (each["name"], sequence(each), each["value0"], each["duration_ns"], each["flags"])
        for each in found
    ] == [
        (NAME, 0, 4096, 50, Flag.COMPLETED),
        (NAME, 1, 4096, 0, Flag.EXCEPTION),
        (NAME, 2, 0, 50, Flag.COMPLETED),
    ]
    assert waits == [50, 0, 50]
    rig.recorder.close()
    assert recorded(Payload()) == "sum"


def test_function_whose_end_nothing_reports_is_recorded_without_a_wait(rig: CollectiveRig) -> None:
    """A call for a device only enqueues the operation. A group without a row is not recorded."""
    slot, unknown = rig.ring.add_group_row("tp:0"), int(EndDetection.UNKNOWN)
    recorded, unseen = (
        _native.native_hook("collective", len, rig.recorder, 0, each, unknown, None)
        for each in (slot, MAX_GROUPS)
    )
    assert (recorded("four"), unseen("four")) == (4, 4)
    (record,) = rig.records()
    assert (record["kind"], record["value0"], record["flags"]) == (Kind.COLLECTIVE, 0, 0)


def test_position_in_the_step_restarts_with_a_new_recorder(tmp_path: Path) -> None:
    """Operations that an earlier watch recorded in the same step do not count."""
    ordinals = []
    for _ in range(2):
        rig = CollectiveRig(tmp_path)
        rig.call(0, EndDetection.UNKNOWN)
        ordinals += [each["phase_ns"] for each in rig.collectives()]
        rig.close()

    assert ordinals == [0, 0]


def test_operation_lasts_until_the_end_of_an_immediate_wait(rig: CollectiveRig) -> None:
    """The wait is a separate phase."""
    rig.call(0, EndDetection.BY_WAIT, call_ns=5)
    rig.clock.advance(1)
    rig.wait(40)
    wait, collective = rig.records()

    assert (collective["duration_ns"], collective["nested_ns"], collective["flags"]) == (
        46,
        5,
        Flag.COMPLETED,
    )
    assert (wait["kind"], wait["name"], wait["duration_ns"], wait["flags"]) == (
        Kind.WAIT,
        "wait",
        40,
        0,
    )


def test_operation_without_an_immediate_wait_has_no_end(rig: CollectiveRig) -> None:
    """The record is written with the next operation, because a later wait may belong to another
    one.
    """
    rig.call(0, EndDetection.BY_WAIT, call_ns=5)
    assert rig.collectives() == []
    rig.clock.advance(1000)
    rig.call(1, EndDetection.BY_WAIT, call_ns=6)
    (first,) = rig.collectives()
    rig.wait(10)
    (second,) = rig.collectives()

    assert (sequence(first), first["duration_ns"], first["nested_ns"], first["flags"]) == (
        0,
        5,
        5,
        0,
    )
    assert (sequence(second), second["duration_ns"], second["flags"]) == (1, 16, Flag.COMPLETED)


def test_operation_with_unknown_end_has_the_duration_of_its_call(rig: CollectiveRig) -> None:
    """The flag for the operation's end is not set."""
    rig.call(0, EndDetection.UNKNOWN, call_ns=5)
    rig.wait(40)
    collective, _ = rig.records()

    assert (collective["duration_ns"], collective["nested_ns"], collective["flags"]) == (5, 5, 0)


def test_blocking_operation_ends_with_its_call_and_counts_as_a_wait(rig: CollectiveRig) -> None:
    """The call does not count for the enclosing phase."""
    forward = rig.ring.intern("forward")
    rig.recorder.begin(Kind.FORWARD, forward)
    start_ns = rig.clock.now_ns
    rig.call(0, EndDetection.BY_RETURN, call_ns=50, name="monitored_barrier group=0")
    rig.recorder.end(Kind.FORWARD, forward)
    collective, wait, around = rig.records()

    assert (collective["duration_ns"], collective["nested_ns"], collective["flags"]) == (
        50,
        50,
        Flag.COMPLETED,
    )
    assert (wait["kind"], wait["name"]) == (Kind.WAIT, "monitored_barrier group=0")
    assert (wait["start_ns"], wait["duration_ns"], wait["depth"]) == (start_ns, 50, 2)
    assert (around["phase_ns"], around["nested_ns"]) == (50, 50)
    assert rig.recorder.waited_ns == 50


def test_operation_belongs_to_the_step_that_issued_it(rig: CollectiveRig) -> None:
    """The operation may end in a later step and keeps its position in the issuing step."""
    rig.recorder.next_step()
    rig.call(0, EndDetection.UNKNOWN)
    rig.call(1, EndDetection.BY_WAIT)
    rig.recorder.next_step()
    rig.recorder.next_step()
    rig.wait(30)
    first, second = rig.collectives()

    assert [(each["step"], each["phase_ns"]) for each in (first, second)] == [(1, 0), (1, 1)]
    assert rig.recorder.step == 3


# -- waits


def test_waited_time_is_the_sum_of_waits_of_the_training_thread(rig: CollectiveRig) -> None:
    """`waited_ns` contains no other time. Each wait is also in the step's phases."""
    rig.wait(10)
    rig.clock.advance(100)
    # This wait is not in Work.wait, so its caller counts it.
    rig.span(Kind.WAIT, "backward tail", 1000)
    rig.wait(20)
    rig.recorder.next_step()
    *_, step = rig.records()

    assert rig.recorder.waited_ns == 30
    assert (step["phase_ns"], step["duration_ns"]) == (1030, 1130)


def test_timed_wait_passes_arguments_result_and_exception_on(rig: CollectiveRig) -> None:
    """Each call is a wait, also one that raises."""

    class Work:
        def wait(self, timeout: float = 0.0, *, fail: bool = False) -> tuple[Work, float]:
            rig.clock.advance(25)
            if fail:
                raise ValueError("planted")
            return self, timeout

    Work.wait = _native.timed_wait(Work.wait)  # type: ignore[method-assign]
    work = Work()

    assert work.wait() == (work, 0.0)
    assert work.wait(1.5) == work.wait(timeout=1.5) == (work, 1.5)
    with pytest.raises(ValueError, match="planted"):
        work.wait(fail=True)
    assert [(each["duration_ns"], each["flags"]) for each in rig.records()] == [(25, 0)] * 3 + [
        (25, Flag.EXCEPTION)
    ]
    assert rig.reader.read_counter(DEPTH) == 1
    rig.recorder.close()
    assert work.wait(3.0) == (work, 3.0)


def test_wait_that_raised_does_not_end_the_operation(rig: CollectiveRig) -> None:
    """After a timeout, the operation may still be running.

    The operation's record has the flag for exceptions and no end.
    """

    class Work:
        def wait(self) -> None:
            rig.clock.advance(25)
            raise ValueError("planted")

    Work.wait = _native.timed_wait(Work.wait)  # type: ignore[method-assign]
    rig.call(0, EndDetection.BY_WAIT, call_ns=5)
    with pytest.raises(ValueError, match="planted"):
        Work().wait()
    rig.call(1, EndDetection.BY_WAIT, call_ns=6)
    rig.wait(10)
    failed, following = rig.collectives()

    assert (sequence(failed), failed["duration_ns"], failed["flags"]) == (0, 5, Flag.EXCEPTION)
    assert (sequence(following), following["duration_ns"], following["flags"]) == (
        1,
        16,
        Flag.COMPLETED,
    )
    assert rig.recorder.waited_ns == 35


def test_operation_that_raised_is_flagged_in_its_record(rig: CollectiveRig) -> None:
    """The tap reports the exception after the call has returned."""
    issued = rig.issue(0, flags=int(Flag.ASYNC))
    rig.recorder.returned(issued, int(EndDetection.UNKNOWN), int(Flag.EXCEPTION))
    (record,) = rig.collectives()

    assert record["flags"] == Flag.ASYNC | Flag.EXCEPTION


def test_wait_wrapped_by_two_watches_counts_once(tmp_path: Path) -> None:
    """Another tool has wrapped the earlier watch's wait and still calls it.

    The next watch wraps the wrapper of the other tool.
    """
    earlier = CollectiveRig(tmp_path)

    class Work:
        def wait(self, timeout: float) -> float:
            rig.clock.advance(25)
            return timeout

    Work.wait = _native.timed_wait(Work.wait)  # type: ignore[method-assign]
    ours = Work.wait
    Work.wait = lambda work, timeout: ours(work, timeout)  # type: ignore[method-assign]
    earlier.close()
    rig = CollectiveRig(tmp_path)
    Work.wait = _native.timed_wait(Work.wait)  # type: ignore[method-assign]
    rig.call(0, EndDetection.BY_WAIT)

    assert Work().wait(1.5) == 1.5
    wait, collective = rig.records()
    assert (wait["duration_ns"], collective["flags"], rig.recorder.waited_ns) == (
        25,
        Flag.COMPLETED,
        25,
    )
    rig.close()


def test_timed_wait_behaves_like_a_method(rig: CollectiveRig) -> None:
    """The wait works bound, unbound, with keywords and many arguments, and has the name of the
    original.
    """

    class Work:
        def wait(self, *args: int, **kwargs: int) -> tuple[object, ...]:
            return self, args, kwargs

    Work.wait = _native.timed_wait(Work.wait)  # type: ignore[method-assign]
    work, many = Work(), tuple(range(20))
    bound = work.wait

    assert bound(*many, key=1) == Work.wait(work, *many, key=1) == (work, many, {"key": 1})
    assert Work.wait.__name__ == "wait"
    assert [each["name"] for each in rig.records()] == ["wait"] * 2
    with pytest.raises(TypeError):
        Work.wait()


def test_compiled_code_calls_the_timed_wait_with_its_object(tmp_path: Path) -> None:
    """Dynamo breaks its graph at Work.wait(), as without a watch."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FakeWork

    def function(x: torch.Tensor, work: dist.Work) -> torch.Tensor:
        y = x.sin()
        work.wait()
        return y.cos()

    rig, plain = CollectiveRig(tmp_path), vars(FakeWork)["wait"]
    torch._dynamo.reset()
    graphs = torch._dynamo.explain(function)(torch.ones(2), FakeWork()).graph_count
    with patched(
        FakeWork,
        "wait",
        torch_private.break_graph_at(_native.timed_wait(FakeWork.wait)),
    ):
        torch._dynamo.reset()
        assert torch._dynamo.explain(function)(torch.ones(2), FakeWork()).graph_count == graphs
        torch.compile(function, backend="eager")(torch.ones(2), FakeWork())

    assert len(rig.records()) == 2
    assert vars(FakeWork)["wait"] is plain
    rig.close()


def test_wait_inside_a_wait_counts_once(rig: CollectiveRig) -> None:
    """A Work that waits for others is one wait.

    A nested call must not end the wait that the outer call has started.
    """
    assert rig.recorder.begin_wait()
    rig.clock.advance(10)
    assert not rig.recorder.begin_wait()
    rig.clock.advance(5)
    rig.recorder.end_wait()
    (wait,) = rig.records()

    assert (wait["duration_ns"], rig.recorder.waited_ns, rig.reader.read_counter(DEPTH)) == (
        15,
        15,
        1,
    )


def test_wait_that_started_before_the_watch_is_not_recorded(rig: CollectiveRig) -> None:
    """No negative time is recorded either."""
    rig.clock.advance(10)
    rig.recorder.end_wait()
    rig.wait(5)

    assert [each["duration_ns"] for each in rig.records()] == [5]
    assert rig.recorder.waited_ns == 5


def test_each_wait_is_a_balanced_nvtx_range(rig: CollectiveRig) -> None:
    """The range has the attributes of the wait's name."""
    calls: list[str] = []
    attributes = [f"attributes of {name}" for name in rig.ring.names()]
    rig.recorder.set_nvtx(calls.append, lambda: calls.append("pop"), attributes)
    rig.call(0, EndDetection.BY_WAIT)
    rig.wait(5)

    assert calls == ["attributes of wait", "pop"]


# -- the table of process groups


def test_progress_of_each_group_is_in_the_file_header(rig: CollectiveRig) -> None:
    """An operation is issued on entry and ended at its end, so other processes can see that it
    hangs.
    """
    assert [rig.ring.add_group_row(name) for name in ("0", "1")] == [0, 1]
    issued = rig.issue(4, group=1)
    assert rig.reader.read_group_progress() == [GroupProgress("0", 0, 0), GroupProgress("1", 5, 0)]
    rig.recorder.returned(issued, int(EndDetection.BY_WAIT))
    assert rig.reader.read_group_progress()[1] == GroupProgress("1", 5, 0)
    rig.wait(5)

    assert rig.reader.read_group_progress() == [GroupProgress("0", 0, 0), GroupProgress("1", 5, 5)]


def test_highest_ended_number_of_a_group_never_decreases(rig: CollectiveRig) -> None:
    """Operations of a group may end out of order."""
    rig.ring.add_group_row("0")
    early, late = rig.issue(0), rig.issue(1)
    rig.recorder.returned(late, int(EndDetection.UNKNOWN))
    rig.recorder.returned(early, int(EndDetection.UNKNOWN))

    assert [(each.issued, each.ended) for each in rig.reader.read_group_progress()] == [(2, 2)]


@pytest.mark.parametrize("slot", [MAX_GROUPS, 1 << 16])
def test_groups_beyond_the_table_are_recorded_without_progress(
    slot: int, rig: CollectiveRig
) -> None:
    """The field after the table is not overwritten."""
    slots = [rig.ring.add_group_row(str(number)) for number in range(MAX_GROUPS + 3)]
    assert slots == [*range(MAX_GROUPS), MAX_GROUPS, MAX_GROUPS, MAX_GROUPS]
    table_end = (RECENT + 2 * MAX_RECENT) * 8
    beyond = bytes(rig.ring.buffer[table_end : METADATA_OFFSET + 1024])
    for number in range(3):
        rig.call(number, EndDetection.UNKNOWN, group=slot)
    rig.call(9, EndDetection.UNKNOWN, group=MAX_GROUPS - 1)

    assert [sequence(each) for each in rig.collectives()] == [0, 1, 2, 9]
    assert bytes(rig.ring.buffer[table_end : METADATA_OFFSET + 1024]) == beyond
    assert [each.issued for each in rig.reader.read_group_progress()] == [0] * (MAX_GROUPS - 1) + [
        10
    ]
    assert [each.sequence for each in rig.reader.read_last_operations()] == [9]


def test_last_operations_are_in_the_file_header_before_they_end(rig: CollectiveRig) -> None:
    """Other processes see in which operation a blocked rank is. The oldest operations are replaced."""
    for name in ("0", "1"):
        rig.ring.add_group_row(name)
    for number in range(MAX_RECENT + 4):
        rig.issue(number, group=number % 2)
    last = sorted(rig.reader.read_last_operations(), key=lambda each: each.sequence)

    assert [(each.group, each.sequence) for each in last] == [
        (str(number % 2), number) for number in range(4, MAX_RECENT + 4)
    ]
    assert {(each.name, each.bytes) for each in last} == {(NAME, 4096)}
    newest = {str(number % 2): number for number in range(MAX_RECENT + 4)}
    _, sizes, dtypes = read_operations(last, newest)
    assert (sizes, dtypes) == (dict.fromkeys("01", 4096), dict.fromkeys("01", "float32"))


# -- other threads


def test_operation_of_another_thread_is_flagged_and_not_counted(rig: CollectiveRig) -> None:
    """The operation and its wait do not count for the training thread.

    Sequence numbers continue across threads.
    """

    def elsewhere() -> None:
        rig.call(1, EndDetection.BY_RETURN, call_ns=30)
        rig.call(2, EndDetection.BY_WAIT)
        rig.wait(40)

    rig.recorder.next_step()
    rig.call(0, EndDetection.UNKNOWN)
    on_thread(elsewhere)
    rig.recorder.next_step()
    records = rig.records()
    collectives = [each for each in records if each["kind"] == Kind.COLLECTIVE]
    waits = [each for each in records if each["kind"] == Kind.WAIT]

    assert [each["phase_ns"] for each in collectives] == [0, 1, 2]
    assert [each["flags"] & Flag.OTHER_THREAD for each in collectives] == [
        0,
        Flag.OTHER_THREAD,
        Flag.OTHER_THREAD,
    ]
    assert [(each["duration_ns"], each["flags"]) for each in waits] == [
        (30, Flag.OTHER_THREAD),
        (40, Flag.OTHER_THREAD),
    ]
    assert (rig.recorder.waited_ns, records[-1]["phase_ns"], records[-1]["nested_ns"]) == (0, 0, 0)


def test_wait_ends_only_the_operation_of_its_own_thread(rig: CollectiveRig) -> None:
    issued, ended = threading.Event(), threading.Event()

    def elsewhere() -> None:
        rig.call(1, EndDetection.BY_WAIT)
        issued.set()
        ended.wait(30)
        rig.wait(3)

    rig.call(0, EndDetection.BY_WAIT)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert issued.wait(30)
    rig.wait(40)
    (mine,) = rig.collectives()
    ended.set()
    thread.join()
    (theirs,) = rig.collectives()

    assert (sequence(mine), mine["flags"]) == (0, Flag.COMPLETED)
    assert (sequence(theirs), theirs["flags"]) == (1, Flag.COMPLETED | Flag.OTHER_THREAD)


# -- the end of recording


def test_only_the_last_recorder_with_start_collectives_records_operations(tmp_path: Path) -> None:
    """A recorder without start_collectives() writes no operations."""
    earlier, later = (
        CollectiveRig(tmp_path),
        CollectiveRig(tmp_path),
    )
    silent = Rig(tmp_path)
    assert silent.recorder.issue(1, 0, 0, 0, 0) is None
    assert earlier.issue(0) is None
    for rig in (earlier, later):
        rig.wait(5)
    later.call(1, EndDetection.UNKNOWN)

    assert (silent.records(), earlier.records()) == ([], [])
    assert [each["kind"] for each in later.records()] == [Kind.WAIT, Kind.COLLECTIVE]
    for rig in (silent, earlier, later):
        rig.close()


def test_close_writes_running_operations_without_an_end(rig: CollectiveRig) -> None:
    """Each running operation leaves one record. Later calls write nothing."""
    late = rig.issue(2)
    rig.call(0, EndDetection.BY_CALLBACK, call_ns=5)
    rig.call(1, EndDetection.BY_WAIT, call_ns=6)
    rig.clock.advance(1000)
    rig.recorder.close()
    rig.recorder.returned(late, int(EndDetection.UNKNOWN))
    rig.recorder.end_wait()
    rig.recorder.begin_wait()
    found = rig.collectives()

    assert sorted((sequence(each), each["duration_ns"], each["flags"]) for each in found) == [
        (0, 5, 0),
        (1, 6, 0),
    ]
    assert rig.issue(3) is None


def test_close_writes_running_operations_of_other_threads_once(tmp_path: Path) -> None:
    """Some of the threads have ended. A wait after close() belongs to another operation."""
    rig = CollectiveRig(tmp_path)
    issued, closed = threading.Event(), threading.Event()

    def elsewhere() -> None:
        rig.call(1, EndDetection.BY_WAIT, call_ns=7)
        issued.set()
        closed.wait(30)
        rig.wait(3)
        following.wait(3)

    thread = threading.Thread(target=elsewhere)
    on_thread(rig.call, 0, EndDetection.BY_WAIT)
    thread.start()
    assert issued.wait(30)
    rig.recorder.close()
    following = CollectiveRig(tmp_path)
    following.call(2, EndDetection.BY_WAIT)
    closed.set()
    thread.join()
    found, unknown = rig.collectives(), int(Flag.OTHER_THREAD)

    assert sorted((sequence(each), each["duration_ns"], each["flags"]) for each in found) == [
        (0, 5, unknown), (1, 7, unknown),
    ]  # fmt: skip
    assert following.collectives() == []
    following.wait(3)
    assert [(sequence(each), each["flags"]) for each in following.collectives()] == [
        (2, Flag.COMPLETED)
    ]
    for each in (rig, following):
        each.close()


def test_operations_of_very_many_threads_are_recorded_without_an_end(rig: CollectiveRig) -> None:
    """Operations above the limit are recorded when they are issued."""
    issued, ended = threading.Barrier(101), threading.Event()

    def elsewhere(number: int) -> None:
        rig.call(number, EndDetection.BY_WAIT)
        issued.wait(30)
        ended.wait(30)
        rig.wait(3)

    threads = [threading.Thread(target=elsewhere, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    issued.wait(30)
    ended.set()
    for thread in threads:
        thread.join()
    found = rig.collectives()

    assert sorted(sequence(each) for each in found) == list(range(100))
    assert sum(bool(each["flags"] & Flag.COMPLETED) for each in found) >= 64


def test_abandoned_recorder_does_not_write_running_operations(rig: CollectiveRig) -> None:
    """In a forked child, the file belongs to the parent.

    A forked child may store nothing in its parent's file.
    """
    rig.ring.add_group_row("0")
    late = rig.issue(2)
    rig.call(0, EndDetection.BY_CALLBACK)
    rig.call(1, EndDetection.BY_WAIT)
    before = bytes(rig.ring.buffer)
    rig.recorder.abandon()
    rig.recorder.returned(late, int(EndDetection.BY_RETURN))
    rig.recorder.end_wait()

    assert bytes(rig.ring.buffer) == before
