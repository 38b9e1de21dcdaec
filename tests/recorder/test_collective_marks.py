"""C functions of the recorder that the native tap calls, also on other threads and without the GIL.

The tests call the functions directly, so no tap is built.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.collective_rig import NAME, CollectiveRig, on_thread, sequence
from tests.support.processes import ROOT
from torchlens_perf import _native
from torchlens_perf.recorder.recorder import EndDetection
from torchlens_perf.run.ring import Flag, Kind

MAX_PENDING = 1024  # As in native/collective.c.


class _Operation(ctypes.Structure):
    """The struct `Collective` of native/collective.h."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("name_id", "group", "sequence", "flags")),
        ("bytes", ctypes.c_uint64),
        ("generation", ctypes.c_uint64),
        ("start_ns", ctypes.c_int64),
        ("call_ns", ctypes.c_int64),
        *((name, ctypes.c_uint32) for name in ("step", "depth", "within", "ordinal")),
        ("pending", ctypes.c_uint64),
    ]  # fmt: skip


class _Marks(ctypes.Structure):
    """The struct `CollectiveMarks`."""

    _fields_ = [("version", ctypes.c_int)] + [
        (name, ctypes.c_void_p)
        for name in (
            "issue", "returned", "completed", "wait_began", "wait_ended", "claim", "part_over", "part_began", "pass_on",
            "place", "failed",
        )
    ]  # fmt: skip


class NativeMarks:
    """The functions that the native tap calls.

    Functions made with `gil=False` run without the GIL, as on a backend's thread.
    """

    def __init__(self, *, gil: bool) -> None:
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype, pointer_of.argtypes = (
            ctypes.c_void_p,
            [ctypes.py_object, ctypes.c_char_p],
        )
        capsule = _native.collective_marks()
        marks = _Marks.from_address(pointer_of(capsule, b"torchlens_perf._native.collective_marks"))
        made = ctypes.PYFUNCTYPE if gil else ctypes.CFUNCTYPE
        operation = ctypes.POINTER(_Operation)
        self.version = marks.version
        self.issue = made(ctypes.c_int, operation)(marks.issue)
        self.returned = made(None, operation, ctypes.c_int)(marks.returned)
        self.completed = made(None, ctypes.c_uint64)(marks.completed)
        self.failed = made(None, ctypes.c_uint64)(marks.failed)
        self.wait_began = made(ctypes.c_int)(marks.wait_began)
        self.wait_ended = made(None, ctypes.c_int)(marks.wait_ended)

    def start(self, name_id: int, sequence: int, *, group: int = 0) -> _Operation:
        """Start an operation whose end the backend will report."""
        operation = _Operation(name_id=name_id, group=group, sequence=sequence, bytes=4096)
        assert self.issue(operation) == 1
        self.returned(operation, int(EndDetection.BY_CALLBACK))
        return operation


@pytest.fixture
def native(tmp_path: Path) -> Iterator[CollectiveRig]:
    made = CollectiveRig(tmp_path, capacity=1 << 14)
    yield made
    made.close()


def test_operation_ends_when_its_backends_thread_reports_the_end(native: CollectiveRig) -> None:
    """The record has the issuer's step and depth, and lasts until the reported end."""
    marks = NativeMarks(gil=True)
    native.ring.add_group_row("0")
    operation = marks.start(native.ring.intern(NAME), 3)
    native.recorder.next_step()
    native.clock.advance(70)
    assert [(each.issued, each.ended) for each in native.reader.read_group_progress()] == [(4, 0)]
    assert [each["kind"] for each in native.records()] == [Kind.STEP]
    on_thread(marks.completed, operation.pending)
    (record,) = native.records()

    assert (record["duration_ns"], record["step"], record["depth"]) == (70, 0, 1)
    # The thread that ends the operation has no influence on the flags.
    assert record["flags"] == Flag.COMPLETED
    assert [(each.issued, each.ended) for each in native.reader.read_group_progress()] == [(4, 4)]


@pytest.mark.parametrize(("calls_python", "elements"), [(False, 1_000_000), (True, 40)])
def test_waits_without_the_gil_leave_the_recorders_reference_count_right(
    tmp_path: Path, calls_python: bool, elements: int
) -> None:
    """The count is no atomic number, so only threads with the GIL may change it.

    This thread changes it meanwhile, and would overwrite another thread's changes. qsort() calls a
    function many times without the GIL.
    """
    rig = CollectiveRig(tmp_path, clock=None, capacity=1 << 14)
    marks = NativeMarks(gil=False)
    recorder = rig.recorder
    if calls_python:
        recorder.set_nvtx(lambda attributes: None, lambda: None, ["step"])
    sort = ctypes.CDLL(None).qsort

    def wait() -> None:
        assert marks.wait_began() == 1
        sorted_bytes = ctypes.create_string_buffer(elements)
        sort(sorted_bytes, ctypes.c_size_t(elements), ctypes.c_size_t(1), marks.wait_began)
        marks.wait_ended(0)

    kept = [recorder] * 1_000_000  # A wrong count does not free the recorder.
    before = sys.getrefcount(recorder)
    thread = threading.Thread(target=wait)
    thread.start()
    while thread.is_alive():
        kept[:10_000]
    assert sys.getrefcount(recorder) == before
    rig.close()


def test_operation_written_by_close_is_not_written_again_at_its_end(native: CollectiveRig) -> None:
    """A late end is written neither to the closed file nor to the next watch's file."""
    marks = NativeMarks(gil=True)
    name_id = native.ring.intern(NAME)
    before, ended = marks.start(name_id, 0), marks.start(name_id, 1)
    marks.completed(ended.pending)
    native.recorder.close()
    assert [(sequence(each), each["flags"]) for each in native.records()] == [
        (1, Flag.COMPLETED),
        (0, 0),
    ]

    following = CollectiveRig(native.ring.path.parent)
    operation = marks.start(following.ring.intern(NAME), 5)
    marks.completed(before.pending)
    assert following.records() == native.records() == []
    marks.completed(operation.pending)
    assert [sequence(each) for each in following.records()] == [5]
    following.close()
    marks.completed(operation.pending)


def test_operations_above_the_limit_are_recorded_without_an_end(native: CollectiveRig) -> None:
    """An operation above the limit is recorded at once, and its end writes nothing.

    Places of ended operations are used again.
    """
    marks = NativeMarks(gil=True)
    name_id = native.ring.intern(NAME)
    under_way = [marks.start(name_id, number) for number in range(MAX_PENDING)]
    assert native.records() == []
    surplus = [marks.start(name_id, MAX_PENDING + number) for number in range(3)]
    assert [(sequence(each), each["flags"]) for each in native.records()] == [
        (MAX_PENDING + n, 0) for n in range(3)
    ]

    for operation in (*surplus, *under_way):
        marks.completed(operation.pending)
    assert [(sequence(each), each["flags"]) for each in native.records()] == [
        (number, Flag.COMPLETED) for number in range(MAX_PENDING)
    ]
    again = marks.start(name_id, 5000)
    assert native.records() == []
    marks.completed(again.pending)
    assert [(sequence(each), each["flags"]) for each in native.records()] == [
        (5000, Flag.COMPLETED)
    ]


def test_operation_that_failed_is_flagged_in_its_record(native: CollectiveRig) -> None:
    marks = NativeMarks(gil=True)
    operation = marks.start(native.ring.intern(NAME), 0)
    marks.failed(operation.pending)
    marks.completed(operation.pending)  # Its place is free.
    (record,) = native.records()

    assert record["flags"] == Flag.COMPLETED | Flag.EXCEPTION


def test_wait_that_raised_is_flagged_in_its_record(native: CollectiveRig) -> None:
    """The tap of wait_tensor reports the error."""
    marks = NativeMarks(gil=True)
    native.call(0, EndDetection.BY_WAIT, call_ns=5)
    assert marks.wait_began() == 1
    native.clock.advance(30)
    marks.wait_ended(1)
    wait, collective = native.records()

    assert (wait["kind"], wait["duration_ns"], wait["flags"]) == (Kind.WAIT, 30, Flag.EXCEPTION)
    assert (collective["duration_ns"], collective["flags"]) == (5, Flag.EXCEPTION)
    assert marks.version == 7


WAITS_WHILE_WATCHES_COME_AND_GO = """
import sys, threading, time
from pathlib import Path
from tests.support.collective_rig import CollectiveRig
from tests.recorder.test_collective_marks import NativeMarks

def push(attributes):
    pushed.append(attributes)

marks = NativeMarks(gil=False)
folder, pushed, popped, stop = Path(sys.argv[1]), [], [], threading.Event()

def wait():
    while not stop.is_set():
        for _ in range(100):
            if marks.wait_began():
                marks.wait_ended(0)

threads = [threading.Thread(target=wait) for _ in range(3)]
for thread in threads:
    thread.start()
deadline_s, watches = time.monotonic() + 3, 0
while time.monotonic() < deadline_s or watches <= 20:
    for listened_to in (True, False):
        rig = CollectiveRig(folder, clock=None)
        if listened_to:
            rig.recorder.set_nvtx(pushed.append, lambda: popped.append(0), [str(number) for number in range(9)])
        time.sleep(0.001)
        rig.recorder.close()
        rig.close()
        rig.ring.path.unlink()
        del rig
        watches += 1
stop.set()
for thread in threads:
    thread.join()
assert pushed and watches > 20, (len(pushed), watches)
"""


def test_waits_without_the_gil_are_safe_while_watches_begin_and_end(tmp_path: Path) -> None:
    """A wait must not access a recorder that is closed, freed, or just receiving Python functions
    to call.
    """
    program = [
        sys.executable,
        "-X",
        "faulthandler",
        "-c",
        WAITS_WHILE_WATCHES_COME_AND_GO,
        str(tmp_path),
    ]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT)

    assert done.returncode == 0, done.stderr


def test_threads_without_the_gil_write_complete_records(tmp_path: Path) -> None:
    """Threads unknown to Python write at the same time as the training thread.

    No record is lost.
    """
    operations, at_once, sections_each = 2000, 50, 40
    rig = CollectiveRig(tmp_path, capacity=1 << 17, clock=None)
    marks = NativeMarks(gil=False)
    name_id, section = rig.ring.intern(NAME), rig.ring.intern("section")
    libc = ctypes.CDLL(None)
    for first in range(0, operations, at_once):
        under_way = [marks.start(name_id, first + number) for number in range(at_once)]
        threads = [ctypes.c_ulong() for _ in under_way]
        for thread, operation in zip(threads, under_way, strict=True):
            completed = ctypes.cast(marks.completed, ctypes.c_void_p)
            assert (
                libc.pthread_create(
                    ctypes.byref(thread), None, completed, ctypes.c_void_p(operation.pending)
                )
                == 0
            )
            for _ in range(sections_each):
                rig.recorder.begin(Kind.SECTION, section)
                rig.recorder.end(Kind.SECTION, section)
        for thread in threads:
            assert libc.pthread_join(thread, None) == 0
    batch = rig.reader.read_records()
    written = batch.records[batch.records["kind"] == int(Kind.COLLECTIVE)]

    assert batch.lost == 0
    assert sorted(written["value1"] & 0xFFFFFFFF) == list(range(operations))
    assert set(written["flags"]) == {int(Flag.COMPLETED)}
    assert (batch.records["kind"] == int(Kind.SECTION)).sum() == operations * sections_each
    rig.close()
