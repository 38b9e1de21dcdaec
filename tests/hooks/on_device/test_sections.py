"""device_section() in a watched loop on the fake device, from the stamp to the report."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import torchlens_perf as perf
from tests.support.device.fake_device import FakeDevice, FakeTorchDevice
from tests.support.device.shim_kernels import COMPILER, WITHOUT_COMPILER
from tests.support.recording import Recording, recorded, records_of
from tests.support.saved import saved
from torchlens_perf.analysis.statistics.device import DeviceStatistics
from torchlens_perf.cuda.stamps import DeviceRing
from torchlens_perf.hooks.on_device.stamps import StampHook
from torchlens_perf.recorder import device_sections
from torchlens_perf.run.ring import Kind

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT_COMPILER)
MILLISECOND, SECOND = 1_000_000, 1_000_000_000
OVER_NS = 10_000


@pytest.fixture
def torch_device(device: FakeDevice) -> FakeTorchDevice:
    """A device with a ring of four slots of 64 places."""
    return FakeTorchDevice(device)


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the state, as in a process that has used no section."""
    monkeypatch.setattr(device_sections, "_wanted", False)


def attach(recording: Recording, torch_device: FakeTorchDevice, *, decorated: bool = True) -> None:
    """Start as a watch does if torch has a device.

    decorated: a function has been decorated before.
    """
    if decorated:
        perf.device_section("a decorator")
    assert recording.watch is not None
    session = recording.watch._session
    assert session is not None
    session.attach([StampHook(torch_device, torch_device.now_ns)])


def statistics(recording: Recording) -> DeviceStatistics:
    """Return the sections' statistics as the sidecar computes them."""
    found = DeviceStatistics()
    found.add(records_of(recording), recording.interned)
    return saved(found)


def timed(device: FakeDevice, name: str, duration_ns: int, stream: int = 0) -> None:
    with perf.device_section(name):
        device.spin(duration_ns, stream)


def test_sections_of_eager_code_are_counted(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """Windows last a second, and the host does not wait for the device."""
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


def test_section_is_counted_in_each_replay_of_a_captured_graph(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        timed(device, "decode", MILLISECOND)  # Warm-up.
        torch_device.current_stream = device.new_stream()
        device.begin_capture(torch_device.current_stream)
        timed(device, "decode", MILLISECOND, torch_device.current_stream)
        recording.watch.step()  # The end of a step adds nothing to the capture.
        graph = device.end_capture(torch_device.current_stream)
        torch_device.current_stream = 0
        for _ in range(7):
            device.replay(graph)
            device.advance(2 * MILLISECOND)
            recording.watch.step()
    assert statistics(recording).stamped["decode"].count == 1 + 7


def test_graph_of_an_earlier_watch_is_timed(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """Its replays continue to stamp. Stamps between the watches are in neither."""
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


def test_surplus_of_the_ring_is_counted_as_lost(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """A hundred spans in a ring of 64 places, before the first reduction."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        for _ in range(100):
            timed(device, "hot", 10)
        device.advance(100 * MILLISECOND)
    found = statistics(recording)
    assert found.stamped["hot"].count == 63
    assert found.stamped_lost == 37


def test_ring_is_made_when_the_watch_begins(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """A function was decorated and the device is in use, so the first step may capture."""
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


def test_ring_is_not_made_inside_a_step(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """Without a section before the watch, it is made at a step's end.

    Earlier entries are counted.
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
            # A section that is open while the ring is made has no time.
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


def test_ring_is_made_after_the_device_comes_into_use(
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


def test_entries_are_counted_if_the_device_is_never_used(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    torch_device.used = False
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        for _ in range(3):
            timed(device, "decode", MILLISECOND)
            recording.watch.step()
    assert any("entered 3 times (decode)" in note for note in recording.notes)


def test_making_the_ring_counts_as_overhead(
    device: FakeDevice,
    torch_device: FakeTorchDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compilation takes a second."""

    def slow_ring() -> DeviceRing:
        time.sleep(0.05)
        return FakeTorchDevice.ring(torch_device)

    monkeypatch.setattr(torch_device, "ring", slow_ring)
    with recorded(tmp_path) as recording:
        attach(recording, torch_device, decorated=False)
        charged: list[int] = []
        session = recording.watch._session
        monkeypatch.setattr(session, "add_overhead", charged.append)
        timed(device, "decode", MILLISECOND)
        recording.watch.step()
    assert max(charged) >= 50 * MILLISECOND


def test_section_first_entered_in_a_capture_is_noted(
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


def test_names_beyond_the_slots_are_noted_once(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """Programs may generate names."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        for index in range(6):
            timed(device, f"section {index}", MILLISECOND)
        device.advance(100 * MILLISECOND)
    assert len(statistics(recording).stamped) == 4
    assert recording.notes == ["device sections: only 4 names are timed, and there are more"]


def test_generated_names_do_not_fill_the_metadata(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """Metadata for the sidecar is limited to 8 KB. Leaving the watch must not fail for it."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        for index in range(300):
            timed(device, f"request {index}", 10)
            recording.watch._session.note(f"note {index} " + "x" * 100)
    assert recording.notes[-1] == "further notes are left out: see the job's log"


def test_sections_on_a_second_device_are_noted(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """A ring belongs to one device."""
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


def test_result_of_an_ended_watch_is_discarded(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """The next watch does not use it."""
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
    """Further sections cost nothing."""
    torch_device.missing = "CuPy is missing: pip install it"
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        for _ in range(3):
            timed(device, "decode", MILLISECOND)
            recording.watch.step()
    assert recording.notes == ["device sections are not timed: CuPy is missing: pip install it"]


def test_busy_device_is_not_waited_for_at_the_end(
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
    """There is no error and no import of device modules."""
    with perf.device_section("anything"):
        pass

    @perf.device_section("function")
    def function(value: int) -> int:
        return value + 1

    assert function(1) == 2


def test_name_must_be_a_string() -> None:
    """The error is raised where the section is made."""
    with pytest.raises(TypeError, match="takes a name, got int"):
        perf.device_section(3)  # type: ignore[arg-type]
