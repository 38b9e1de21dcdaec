"""A watch that ends while the recorder runs Python code, either in that code or on another
thread.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.collective_rig import CollectiveRig
from tests.support.recorders import Rig
from torchlens_perf import _native, errors
from torchlens_perf.cuda.clock import create_clock_of_events
from torchlens_perf.run import ring
from torchlens_perf.run.ring import Kind

End = Callable[..., Any]
# Number of events that a new clock records.
ANCHORS = 5


class EndingRig:
    """A recorder that the test closes while one of its functions runs.

    After that, the recorder's file is unmapped, and no reference to the recorder is left.
    """

    def __init__(self, folder: Path, *, by_another_thread: bool) -> None:
        self.rig = CollectiveRig(folder, clock=None)
        self.recorder: Any = self.rig.recorder
        self.ended = 0
        self._by_another_thread = by_another_thread

    def end(self, *args: Any, **kwargs: Any) -> int:
        """End the watch. Code that the recorder runs calls this function."""
        if self._by_another_thread:
            thread = threading.Thread(target=self._end)
            thread.start()
            thread.join()
        else:
            self._end()
        return 1

    def _end(self) -> None:
        if self.recorder is not None:
            recorder, self.recorder = self.recorder, None
            del self.rig.recorder
            recorder.close()
            self.rig.ring.close()
            self.ended += 1

    def make(self, intern: Callable[[str], int]) -> None:
        """Make another recorder on the file, which calls the given function to get ids of names."""
        self.recorder.close()
        self.recorder = self.rig.recorder = _native.Recorder(self.rig.ring.buffer, intern)


def in_a_section(rig: EndingRig, name: str = "part") -> None:
    rig.recorder.activate()
    with _native.section(name):
        pass
    with _native.section(name):
        pass


def name_of_a_section(rig: EndingRig) -> None:
    rig.make(rig.end)
    in_a_section(rig, f"new {id(rig)}")


def nvtx_push(rig: EndingRig) -> None:
    rig.recorder.set_nvtx(rig.end, lambda: None, ["step"])
    in_a_section(rig)


def nvtx_pop(rig: EndingRig) -> None:
    rig.recorder.set_nvtx(lambda attributes: None, rig.end, ["step"])
    in_a_section(rig)


def nvtx_pop_of_what_was_lost(rig: EndingRig) -> None:
    """Pop the NVTX ranges of spans inside the closed one, and of spans above MAX_FRAMES."""
    rig.recorder.set_nvtx(lambda attributes: None, rig.end, ["step"])
    recorder = rig.recorder
    for name_id in range(80):
        recorder.begin(int(Kind.SECTION), name_id)
    recorder.end(int(Kind.SECTION), 20)
    recorder.drop(int(Kind.SECTION), 3)


def nvtx_pop_of_a_drop(rig: EndingRig) -> None:
    rig.recorder.set_nvtx(lambda attributes: None, rig.end, ["step"])
    recorder = rig.recorder
    recorder.begin(int(Kind.BACKWARD), 1)
    recorder.begin(int(Kind.SECTION), 2)
    recorder.drop(int(Kind.BACKWARD), 1)


def nvtx_pop_of_the_end(rig: EndingRig) -> None:
    """Close the recorder, which pops the open ranges."""
    rig.recorder.set_nvtx(lambda attributes: None, rig.end, ["step"])
    recorder = rig.recorder
    recorder.begin(int(Kind.BACKWARD), 1)
    recorder.begin(int(Kind.SECTION), 2)
    recorder.close()


class CalledEvents:
    """Events of a device. The record with a given number calls a function."""

    idle_stream = 0

    def __init__(self, called: Callable[[], object], number: int) -> None:
        self._called, self._records_left = called, number + ANCHORS

    def create_event(self) -> CalledEvents:
        return self

    def record(self, event: CalledEvents, stream: int) -> None:
        self._records_left -= 1
        if self._records_left == 0:
            self._called()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: CalledEvents) -> float:
        return 0.0


def calling_clock(called: Callable[[], object], number: int) -> Any:
    return create_clock_of_events(CalledEvents(called, number), lambda index: 0)


def mark_of_the_device(rig: EndingRig) -> None:
    rig.recorder.sampled = 1
    rig.recorder.set_device_clock(calling_clock(rig.end, 1))
    in_a_section(rig)


def end_on_the_device(rig: EndingRig) -> None:
    rig.recorder.sampled = 1
    rig.recorder.set_device_clock(calling_clock(rig.end, 2))
    in_a_section(rig)


def end_of_a_step_on_the_device(rig: EndingRig) -> None:
    rig.recorder.set_device_clock(calling_clock(rig.end, 1))
    rig.recorder.end_device_step()


def called_module(rig: EndingRig, **observers: Any) -> None:
    rig.recorder.sampled = 1
    call = _native.ModuleCall(rig.recorder, 1, lambda *args: args, **observers)
    assert call(None, 1, 2) == (None, 1, 2)
    assert call(None, 3) == (None, 3)


def device_in_a_module(rig: EndingRig) -> None:
    rig.recorder.set_device_clock(calling_clock(rig.end, 1))
    called_module(rig)


def device_after_a_module(rig: EndingRig) -> None:
    rig.recorder.set_device_clock(calling_clock(rig.end, 2))
    called_module(rig)


def nvtx_in_a_module(rig: EndingRig) -> None:
    rig.recorder.set_nvtx(rig.end, lambda: None, ["step"])
    called_module(rig)


def nvtx_after_a_module(rig: EndingRig) -> None:
    rig.recorder.set_nvtx(lambda attributes: None, rig.end, ["step"])
    called_module(rig)


def before_a_module(rig: EndingRig) -> None:
    called_module(rig, before=rig.end)


def after_a_module(rig: EndingRig) -> None:
    called_module(rig, after=rig.end)


def after_a_forward_pass(rig: EndingRig) -> None:
    called_module(rig, after=lambda result: None, forward=rig.end)


def inside_a_module(rig: EndingRig) -> None:
    call = _native.ModuleCall(rig.recorder, 1, rig.end)
    assert call() == 1


def waited(rig: EndingRig) -> None:
    recorder, work = rig.recorder, _native.timed_wait(lambda: "done")
    del recorder
    assert _native.timed_wait(lambda self: "done")(work) == "done"


def mark_before_a_wait(rig: EndingRig) -> None:
    rig.recorder.set_device_clock(calling_clock(print, 99), rig.end, lambda: None)
    waited(rig)


def mark_after_a_wait(rig: EndingRig) -> None:
    rig.recorder.set_device_clock(calling_clock(print, 99), lambda: None, rig.end)
    waited(rig)


def nvtx_before_a_wait(rig: EndingRig) -> None:
    rig.recorder.set_nvtx(rig.end, lambda: None, ["step"])
    waited(rig)


def nvtx_after_a_wait(rig: EndingRig) -> None:
    rig.recorder.set_nvtx(lambda attributes: None, rig.end, ["step"])
    waited(rig)


# A wait in progress has locked the lock that keeps the file mapped. Another thread's close() waits
# for this lock, as intended.
LOCKED = (nvtx_before_a_wait, nvtx_after_a_wait)
ON_A_DEVICE = (
    mark_of_the_device, end_on_the_device, end_of_a_step_on_the_device, device_in_a_module, device_after_a_module,
    mark_before_a_wait, mark_after_a_wait,
)  # fmt: skip
PLACES = (
    name_of_a_section, nvtx_push, nvtx_pop, nvtx_pop_of_what_was_lost, nvtx_pop_of_a_drop, nvtx_pop_of_the_end,
    nvtx_in_a_module, nvtx_after_a_module, before_a_module, after_a_module, after_a_forward_pass, inside_a_module,
    *LOCKED,
)  # fmt: skip


@pytest.mark.parametrize("by_another_thread", [False, True], ids=["by itself", "by another thread"])
@pytest.mark.parametrize(
    "place",
    [*PLACES, *ON_A_DEVICE],
    ids=lambda value: value.__name__.rpartition(".")[2],
)
def test_watch_may_end_while_the_recorder_runs_python_code(
    place: Callable[[EndingRig], None],
    by_another_thread: bool,
    tmp_path: Path,
) -> None:
    """The user's code sees no error and the same results. Only the current record is lost."""
    if by_another_thread and (place in LOCKED or place is nvtx_pop_of_the_end):
        pytest.skip("that thread waits for the mark")
    rig = EndingRig(tmp_path, by_another_thread=by_another_thread)
    place(rig)
    assert rig.ended == 1
    in_a_section_of_the_next_watch(tmp_path)


def in_a_section_of_the_next_watch(folder: Path) -> None:
    following = Rig(folder)
    following.recorder.activate()
    with _native.section("part"):
        following.clock.advance(3)
    assert [(each["name"], each["duration_ns"]) for each in following.records()] == [("part", 3)]
    following.close()


def test_next_watch_may_start_while_the_recorder_runs_python_code(tmp_path: Path) -> None:
    """While a section requests an id for its name, the watch ends and another one starts.

    No record is wrong.
    """
    first, second = (
        Rig(tmp_path, clock=None),
        Rig(tmp_path, clock=None),
    )
    section = _native.section(f"met by both {id(first)}")

    def intern(name: str) -> int:
        first.recorder.close()
        second.recorder.activate()
        with section:
            pass
        return 7

    first.recorder.close()
    first.recorder = _native.Recorder(first.ring.buffer, intern)
    first.recorder.activate()
    with section:
        pass
    with section:
        pass
    records = second.records()

    assert {each["name"] for each in records} == {section.name}
    assert len(records) >= 2
    assert second.reader.read_counter(ring.UNBALANCED) == 0
    assert first.records() == []
    first.close()
    second.close()


@pytest.mark.parametrize(
    "failing", [ValueError("planted"), "no number"], ids=["raises", "wrong type"]
)
def test_section_whose_name_has_no_id_is_recorded_as_other(
    failing: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The user's `with` block runs, and the error is counted. The id is requested once."""
    rig, asked = Rig(tmp_path), []

    def intern(name: str) -> Any:
        asked.append(name)
        if isinstance(failing, Exception):
            raise failing
        return failing

    monkeypatch.setattr("sys.unraisablehook", lambda raised: None)
    monkeypatch.setenv(errors.RAISE, "0")
    rig.recorder.close()
    rig.recorder = _native.Recorder(rig.ring.buffer, intern, rig.clock)
    rig.recorder.activate()
    section = _native.section(f"not to be had {failing!r}")
    for _ in range(3):
        with section:
            rig.clock.advance(2)

    assert [(each["name"], each["duration_ns"]) for each in rig.records()] == [
        (ring.OTHER_NAMES, 2)
    ] * 3
    assert asked == [section.name]
    assert rig.reader.read_counter(ring.INTERNAL_ERRORS) == 1
    rig.close()


def interrupted(*args: Any) -> int:
    """Raise KeyboardInterrupt like a signal handler in running Python code."""
    signal.raise_signal(signal.SIGINT)
    for _ in range(3):
        pass
    return 1


def interrupted_name(rig: EndingRig) -> None:
    rig.make(interrupted)
    in_a_section(rig, f"interrupted {id(rig)}")


def interrupted_push(rig: EndingRig) -> None:
    rig.recorder.set_nvtx(interrupted, lambda: None, ["step"])
    in_a_section(rig)


def interrupted_pop(rig: EndingRig) -> None:
    rig.recorder.set_nvtx(lambda attributes: None, interrupted, ["step"])
    in_a_section(rig)


def interrupted_mark(rig: EndingRig) -> None:
    rig.recorder.sampled = 1
    rig.recorder.set_device_clock(calling_clock(interrupted, 1))
    in_a_section(rig)


def interrupted_wait(rig: EndingRig) -> None:
    rig.recorder.set_device_clock(calling_clock(print, 99), interrupted, lambda: None)
    waited(rig)


@pytest.mark.parametrize(
    "place",
    [interrupted_name, interrupted_push, interrupted_pop, interrupted_mark, interrupted_wait],
    ids=lambda value: value.__name__.rpartition(".")[2],
)
def test_ctrl_c_while_the_recorder_runs_python_code_reaches_the_loop(
    place: Callable[[EndingRig], None], tmp_path: Path
) -> None:
    """No record is broken by the exception."""
    rig = EndingRig(tmp_path, by_another_thread=False)

    def loop() -> None:
        place(rig)
        for _ in range(1000):
            pass

    with pytest.raises(KeyboardInterrupt):
        loop()
    rig.end()
    in_a_section_of_the_next_watch(tmp_path)
