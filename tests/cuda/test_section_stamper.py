"""Tests of device_section() in a watched loop on the fake device, from time stamps to the report."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import torchlens_perf as perf
from tests.support.device.fake_device import FakeDevice, FakeTorchDevice
from tests.support.device.shim_kernels import COMPILER, WITHOUT_COMPILER
from tests.support.recording import Recording, recorded, records_of
from tests.support.saved import save_and_load
from torchlens_perf.analysis.statistics.device import DeviceStatistics
from torchlens_perf.cuda.section_stamper import DeviceSectionHook
from torchlens_perf.cuda.stamps import DeviceRing
from torchlens_perf.recorder import device_sections
from torchlens_perf.run.ring import Kind

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason=WITHOUT_COMPILER),
    pytest.mark.usefixtures("each_step_is_due"),
]
MILLISECOND, SECOND = 1_000_000, 1_000_000_000
OVER_NS = 10_000


@pytest.fixture
def torch_device(device: FakeDevice) -> FakeTorchDevice:
    """Replace the device with one whose ring has four slots of 64 entries."""
    return FakeTorchDevice(device)


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the module's state to that of a process that has used no section."""
    monkeypatch.setattr(device_sections, "_wanted", False)


def attach(recording: Recording, torch_device: FakeTorchDevice, *, decorated: bool = True) -> None:
    """Start the hook as a watch does if torch has a device.

    `decorated` is True if a function was decorated before the watch.
    """
    if decorated:
        perf.device_section("a decorator")
    assert recording.watch is not None
    session = recording.watch._session
    assert session is not None
    session.attach([DeviceSectionHook(torch_device, torch_device.now_ns)])


def statistics(recording: Recording) -> DeviceStatistics:
    """Return the statistics of sections in the way the sidecar computes them."""
    found = DeviceStatistics()
    found.add_records(records_of(recording), recording.interned)
    return save_and_load(found)


def timed(device: FakeDevice, name: str, duration_ns: int, stream: int = 0) -> None:
    with perf.device_section(name):
        device.spin(duration_ns, stream)


def test_device_section_in_eager_code_is_counted_without_waiting(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """Statistics cover one second each, and the host does not wait for the device."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        timed(device, "attention", MILLISECOND)
        synchronizations = device.synchronizations
        for step in range(40):
            timed(device, "attention", MILLISECOND)
            timed(device, "mlp", (1 + step % 2) * MILLISECOND)
            device.advance(100 * MILLISECOND)
            recording.watch.step()
        assert device.synchronizations == synchronizations
    found = statistics(recording)
    assert found.stamped["attention"].count == 41
    assert found.stamped["mlp"].count == 40
    assert found.stamped["attention"].quantile_ns(0.5) == pytest.approx(MILLISECOND, rel=0.02)
    assert found.stamped["mlp"].max_ns == pytest.approx(2 * MILLISECOND, abs=OVER_NS)
    assert found.stamped_lost == 0
    windows = {each.step for each in recording.of(Kind.SKETCH, "mlp")}
    assert len(windows) > 2
    assert recording.notes == []


def test_device_section_is_counted_in_each_replay_of_a_captured_graph(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        timed(device, "decode", MILLISECOND)  # Warm up before the capture.
        torch_device.current_stream = device.new_stream()
        device.begin_capture(torch_device.current_stream)
        timed(device, "decode", MILLISECOND, torch_device.current_stream)
        recording.watch.step()  # The end of a step adds nothing to the graph.
        graph = device.end_capture(torch_device.current_stream)
        torch_device.current_stream = 0
        for _ in range(7):
            device.replay(graph)
            device.advance(2 * MILLISECOND)
            recording.watch.step()
    assert statistics(recording).stamped["decode"].count == 1 + 7


def test_sections_in_a_graph_of_an_earlier_watch_are_timed(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """Replays of the old graph write time stamps.

    Stamps written between two watches belong to no watch.
    """
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        timed(device, "decode", MILLISECOND)
        stream = torch_device.current_stream = device.new_stream()
        device.begin_capture(stream)
        timed(device, "decode", MILLISECOND, stream)
        graph = device.end_capture(stream)
        torch_device.current_stream = 0
        device.advance(10 * MILLISECOND)
    for _ in range(5):
        device.replay(graph)
    device.advance(50 * MILLISECOND)
    with recorded(tmp_path) as later:
        attach(later, torch_device)
        later.watch.step()
        device.advance(50 * MILLISECOND)
        for _ in range(3):
            device.replay(graph)
            device.advance(10 * MILLISECOND)
            later.watch.step()
    assert statistics(recording).stamped["decode"].count == 1
    assert statistics(later).stamped["decode"].count == 3


def test_sections_that_overflow_the_device_ring_are_counted_as_lost(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """A hundred sections end before the first reduction, but the ring has 64 entries."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        for _ in range(100):
            timed(device, "hot", 10)
        device.advance(100 * MILLISECOND)
    found = statistics(recording)
    assert found.stamped["hot"].count == 63
    assert found.stamped_lost == 37


def test_device_ring_is_created_at_the_start_of_a_watch_if_needed(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """A decorated function and a device in use show that the first step may be captured."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        made = device.calls("cuMemAlloc_v2"), device.synchronizations
        assert made[0] > 0
        stream = torch_device.current_stream = device.new_stream()
        device.begin_capture(stream)
        timed(device, "decode", MILLISECOND, stream)
        graph = device.end_capture(stream)
        torch_device.current_stream = 0
        device.replay(graph)
        device.advance(100 * MILLISECOND)
        recording.watch.step()
        assert (device.calls("cuMemAlloc_v2"), device.synchronizations) == made
    assert statistics(recording).stamped["decode"].count == 1
    assert recording.notes == []


def test_device_ring_is_created_between_steps_and_not_inside_a_step(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """Without a section before the watch, the ring is created at a step's end.

    Uses of the section before the ring's creation are counted.
    """
    with recorded(tmp_path) as recording:
        attach(recording, torch_device, decorated=False)
        recording.watch.step()
        assert device.calls("cuMemAlloc_v2") == 0, "no section was used before"
        synchronizations = device.synchronizations
        for _ in range(3):
            timed(device, "decode", MILLISECOND)
        with perf.device_section("whole"):
            assert device.calls("cuMemAlloc_v2") == 0
            assert device.synchronizations == synchronizations
            # A section that is open while the ring is created has no time.
            recording.watch.step()
            assert device.calls("cuMemAlloc_v2") > 0
        for _ in range(2):
            timed(device, "decode", MILLISECOND)
        device.advance(100 * MILLISECOND)
        recording.watch.step()
    found = statistics(recording)
    assert found.stamped["decode"].count == 2
    assert "whole" not in found.stamped
    (note,) = recording.notes
    assert note.startswith(
        "device sections: not timed when entered 4 times (decode, whole): the memory for their"
        " times"
    )


def test_device_ring_is_created_once_the_device_is_in_use(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """The model is moved to the device after the start of the watch."""
    torch_device.used = False
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        timed(device, "decode", MILLISECOND)
        recording.watch.step()
        assert device.calls("cuMemAlloc_v2") == 0
        torch_device.used = True
        timed(device, "decode", MILLISECOND)
        recording.watch.step()
        timed(device, "decode", MILLISECOND)
        device.advance(100 * MILLISECOND)
    assert statistics(recording).stamped["decode"].count == 1
    assert any("entered 2 times (decode)" in note for note in recording.notes)


def test_sections_are_counted_as_missing_if_the_device_is_never_used(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    torch_device.used = False
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        for _ in range(3):
            timed(device, "decode", MILLISECOND)
            recording.watch.step()
    assert any("entered 3 times (decode)" in note for note in recording.notes)


def test_creating_the_device_ring_counts_as_overhead(
    device: FakeDevice,
    torch_device: FakeTorchDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiling the kernels takes a second."""

    def slow_ring() -> DeviceRing:
        time.sleep(0.05)
        return FakeTorchDevice.get_or_create_ring(torch_device)

    monkeypatch.setattr(torch_device, "get_or_create_ring", slow_ring)
    with recorded(tmp_path) as recording:
        attach(recording, torch_device, decorated=False)
        charged: list[int] = []
        session = recording.watch._session
        monkeypatch.setattr(session, "add_overhead", charged.append)
        timed(device, "decode", MILLISECOND)
        recording.watch.step()
    assert max(charged) >= 50 * MILLISECOND


def test_section_first_used_in_a_capture_is_noted_and_not_timed(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """Memory cannot be allocated in a capture. The note says how to have the section timed."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device, decorated=False)
        torch_device.current_stream = device.new_stream()
        device.begin_capture(torch_device.current_stream)
        timed(device, "decode", MILLISECOND, torch_device.current_stream)
        recording.watch.step()  # The step ends inside the capture.
        assert device.calls("cuMemAlloc_v2") == 0
        device.end_capture(torch_device.current_stream)
    assert device.calls("cuMemAlloc_v2") == 0
    assert any(
        "was captured before there was memory for its times" in note for note in recording.notes
    )
    assert any("entered 1 times (decode)" in note for note in recording.notes)


def test_section_names_beyond_the_slots_are_noted_once(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """Programs may generate any number of names."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        for index in range(6):
            timed(device, f"section {index}", MILLISECOND)
        device.advance(100 * MILLISECOND)
    assert len(statistics(recording).stamped) == 4
    assert recording.notes == ["device sections: only 4 names are timed, and there are more"]


def test_notes_beyond_the_metadata_limit_are_left_out_with_many_section_names(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """Metadata for the sidecar is limited to 8 KB.

    Leaving the watch must not fail if the names do not fit.
    """
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        for index in range(300):
            timed(device, f"request {index}", 10)
            recording.watch._session.note(f"note {index} " + "x" * 100)
    assert recording.notes[-1] == "further notes are left out: see the job's log"


def test_device_sections_on_a_second_device_are_noted(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """A device ring belongs to one device, so sections on another device are not timed."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        timed(device, "here", MILLISECOND)
        torch_device.index = 1
        launches = device.calls("cuLaunchKernel")
        with perf.device_section("there"):
            pass
        recording.watch.step()
        assert device.calls("cuLaunchKernel") == launches
        torch_device.index = 0
        device.advance(100 * MILLISECOND)
    assert set(statistics(recording).stamped) == {"here"}
    assert recording.notes == ["device sections: timed on one device of the process only"]


def test_pending_section_times_of_an_ended_watch_are_discarded(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """The next watch does not receive section times of the last one."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        timed(device, "decode", 10 * SECOND)
    device.advance(20 * SECOND)
    with recorded(tmp_path) as later:
        attach(later, torch_device)
        for _ in range(3):
            timed(device, "decode", MILLISECOND)
        device.advance(SECOND)
    assert statistics(later).stamped["decode"].count == 3
    assert statistics(later).stamped["decode"].max_ns < 2 * MILLISECOND


def test_missing_cupy_is_noted_once(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """Further sections do nothing."""
    torch_device.missing = "CuPy is missing: pip install it"
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        for _ in range(3):
            timed(device, "decode", MILLISECOND)
            recording.watch.step()
    assert recording.notes == ["device sections are not timed: CuPy is missing: pip install it"]


def test_end_of_the_watch_does_not_wait_for_a_busy_device(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """The host waits a few milliseconds at most, and notes the sections that are missing."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        timed(device, "decode", 10 * SECOND)
        synchronizations = device.synchronizations
    assert device.synchronizations == synchronizations
    assert any("were not known when the watch ended" in note for note in recording.notes)


def test_device_section_without_a_watch_does_nothing() -> None:
    """No error is raised and no device module is imported."""
    with perf.device_section("anything"):
        pass

    @perf.device_section("function")
    def function(value: int) -> int:
        return value + 1

    assert function(1) == 2


def test_device_section_raises_if_its_name_is_not_a_string() -> None:
    """The error is raised when the section is created."""
    with pytest.raises(TypeError, match="takes a name, got int"):
        perf.device_section(3)  # type: ignore[arg-type]
