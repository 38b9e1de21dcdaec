"""device_section() in a watched loop, whose device is the fake one, from the stamp to the report."""

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
    """In which no section has been made."""
    monkeypatch.setattr(device_sections, "_wanted", False)


def attach(recording: Recording, torch_device: FakeTorchDevice, *, decorated: bool = True) -> None:
    """What a watch does where torch has a device. decorated: a function has been, before it begins."""
    if decorated:
        perf.device_section("a decorator")
    assert recording.watch is not None
    session = recording.watch._session
    assert session is not None
    session.attach([StampHook(torch_device, torch_device.now_ns)])


def statistics(recording: Recording) -> DeviceStatistics:
    """What the sidecar makes of it."""
    found = DeviceStatistics()
    found.add(records_of(recording), recording.interned)
    return saved(found)


def timed(device: FakeDevice, name: str, duration_ns: int, stream: int = 0) -> None:
    with perf.device_section(name):
        device.spin(duration_ns, stream)


def test_sections_of_eager_code(device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path) -> None:
    """Every one is counted, in windows of a second, and nobody waits for the device."""
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


def test_replays_of_a_captured_graph(device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path) -> None:
    """Captured inside the watch; each replay counts."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        timed(device, "decode", MILLISECOND)  # the warm-up
        torch_device.current_stream = device.new_stream()
        device.begin_capture(torch_device.current_stream)
        timed(device, "decode", MILLISECOND, torch_device.current_stream)
        recording.watch.step()  # a step that ends inside the capture puts nothing into it
        graph = device.end_capture(torch_device.current_stream)
        torch_device.current_stream = 0
        for _ in range(7):
            device.replay(graph)
            device.advance(2 * MILLISECOND)
            recording.watch.step()
    assert statistics(recording).stamped["decode"].count == 1 + 7


def test_a_later_watch_finds_the_graph_of_an_earlier_one(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """Its replays go on stamping; what they stamped between the watches is in neither."""
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


def test_what_the_ring_cannot_hold_is_lost_and_counted(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """A hundred in a ring of 64 before anything was reduced."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        for _ in range(100):
            timed(device, "hot", 10)
        device.advance(100 * MILLISECOND)
    found = statistics(recording)
    assert found.stamped["hot"].count == 63
    assert found.stamped_lost == 37


def test_the_ring_is_made_when_the_watch_begins(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """Where a function was decorated and the device is in use: the first step may capture at once."""
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


def test_nothing_is_made_inside_a_step(device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path) -> None:
    """Without a section before the watch: at the end of the step that enters one. What was entered is counted."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device, decorated=False)
        recording.watch.step()
        assert device.calls("cuMemAlloc_v2") == 0, "nobody has asked for sections"
        synchronizations = device.synchronizations
        for _ in range(3):
            timed(device, "decode", MILLISECOND)
        with perf.device_section("whole"):
            assert device.calls("cuMemAlloc_v2") == 0
            assert device.synchronizations == synchronizations
            recording.watch.step()  # open across the ring's making: no time, and none that is wrong
            assert device.calls("cuMemAlloc_v2") > 0
        for _ in range(2):
            timed(device, "decode", MILLISECOND)
        device.advance(100 * MILLISECOND)
        recording.watch.step()
    found = statistics(recording)
    assert found.stamped["decode"].count == 2
    assert "whole" not in found.stamped
    (note,) = recording.notes
    assert note.startswith("device sections: entered 4 times (decode, whole) before there was memory for their times")


def test_a_device_that_comes_into_use_later(device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path) -> None:
    """The model is moved there after the watch has begun: at the end of the first such step that enters a section."""
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


def test_a_device_that_never_comes_into_use(device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path) -> None:
    """What was entered is counted at the end."""
    torch_device.used = False
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        for _ in range(3):
            timed(device, "decode", MILLISECOND)
            recording.watch.step()
    assert any("entered 3 times (decode)" in note for note in recording.notes)


def test_the_step_that_makes_the_ring_is_charged(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes a second: that is ours, and not the step's."""

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


def test_first_entered_in_a_capture(device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path) -> None:
    """No memory can be allocated there: not timed, and said how to have it timed."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device, decorated=False)
        torch_device.current_stream = device.new_stream()
        device.begin_capture(torch_device.current_stream)
        timed(device, "decode", MILLISECOND, torch_device.current_stream)
        recording.watch.step()  # inside of it, too
        assert device.calls("cuMemAlloc_v2") == 0
        device.end_capture(torch_device.current_stream)
    assert device.calls("cuMemAlloc_v2") == 0
    assert any("was captured before there was memory for its times" in note for note in recording.notes)
    assert any("entered 1 times (decode)" in note for note in recording.notes)


def test_more_names_than_slots(device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path) -> None:
    """The surplus is not timed; said once, as programs make names up."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        for index in range(6):
            timed(device, f"section {index}", MILLISECOND)
        device.advance(100 * MILLISECOND)
    assert len(statistics(recording).stamped) == 4
    assert recording.notes == ["device sections: only 4 names are timed, further ones are not"]


def test_names_made_up_without_end(device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path) -> None:
    """What the sidecar must know has room for 8 KB: leaving the watch does not fail for it."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        for index in range(300):
            timed(device, f"request {index}", 10)
            recording.watch._session.note(f"note {index} " + "x" * 100)
    assert recording.notes[-1] == "further notes are left out: see the job's log"


def test_another_device_of_the_process(device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path) -> None:
    """A ring is one device's: on another one nothing is stamped, and it is said."""
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


def test_a_watch_that_ended_while_its_result_was_on_its_way(
    device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path
) -> None:
    """The next watch does not take it for its own."""
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


def test_without_cupy(device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path) -> None:
    """Said once, and the section costs nothing further."""
    torch_device.missing = "CuPy is missing: pip install it"
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        for _ in range(3):
            timed(device, "decode", MILLISECOND)
            recording.watch.step()
    assert recording.notes == ["device sections are not timed: CuPy is missing: pip install it"]


def test_a_busy_device_at_the_end(device: FakeDevice, torch_device: FakeTorchDevice, tmp_path: Path) -> None:
    """It is asked for some milliseconds and not waited for; that the rest is missing is said."""
    with recorded(tmp_path) as recording:
        attach(recording, torch_device)
        timed(device, "decode", 10 * SECOND)
        synchronizations = device.synchronizations
    assert device.synchronizations == synchronizations
    assert any("was not known when the watch ended" in note for note in recording.notes)


def test_without_a_watch_nothing_happens() -> None:
    """No error, no import of what has to do with devices."""
    with perf.device_section("anything"):
        pass

    @perf.device_section("function")
    def function(value: int) -> int:
        return value + 1

    assert function(1) == 2


def test_a_name_is_a_string() -> None:
    """The user's mistake is said where it is made."""
    with pytest.raises(TypeError, match="takes a name, got int"):
        perf.device_section(3)  # type: ignore[arg-type]
