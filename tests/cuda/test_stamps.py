"""DeviceRing, the ring of device times as used by the host, with a fake CUDA driver."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.device.fake_device import FakeDevice
from tests.support.device.shim_kernels import COMPILER, WITHOUT_COMPILER
from torchlens_perf.cuda.driver import CudaDriver
from torchlens_perf.cuda.reduction import ExactColumn, ReducedWindow, SumColumn
from torchlens_perf.cuda.stamps import NO_SLOT, DeviceRing
from torchlens_perf.errors import DeviceError

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT_COMPILER)
# Costs of calls on the fake device.
LAUNCH_NS, STAMP_NS = 1500, 1000
MILLISECOND = 1_000_000


def new_ring(device: FakeDevice, slots: int = 4, places: int = 64) -> DeviceRing:
    """Return a ring on the default stream."""
    return DeviceRing(device.driver, device.functions("stamp", "reduce_window"), slots, places)


def section(
    device: FakeDevice, ring: DeviceRing, name: str, duration_ns: int, stream: int = 0
) -> None:
    """Run a section with work of the given duration."""
    slot = ring.assign_slot(name)
    ring.enqueue_stamp(NO_SLOT, slot, stream)
    device.spin(duration_ns, stream)
    ring.enqueue_stamp(slot, NO_SLOT, stream)


def reduced(device: FakeDevice, ring: DeviceRing) -> ReducedWindow:
    """Return the result of a reduction after some time."""
    assert ring.enqueue_reduction(0)
    device.advance(1000 * MILLISECOND)
    result = ring.collect_result()
    assert result is not None
    return result


def test_section_is_timed_by_the_device(device: FakeDevice) -> None:
    """A section of one millisecond is measured as that, plus the fake device's launch time.

    Start times are device times.
    """
    ring = new_ring(device)
    began_ns = device.now_ns()
    for _ in range(3):
        section(device, ring, "attention", MILLISECOND)
    section(device, ring, "mlp", 5 * MILLISECOND)
    rows = reduced(device, ring)
    over_ns = LAUNCH_NS * 2 + STAMP_NS
    assert ring.names == ["attention", "mlp"]
    assert rows.sums[:, SumColumn.COUNT].tolist() == [3, 1, 0, 0]
    assert rows.exact[0, ExactColumn.MEDIAN] == MILLISECOND + over_ns
    assert rows.sums[1, SumColumn.NS] == 5 * MILLISECOND + over_ns
    assert rows.exact[0, ExactColumn.FIRST_START] >= began_ns


def test_captured_graph_appends_one_record_at_each_replay(device: FakeDevice) -> None:
    """Seven replays of a captured section make seven records with separate times."""
    ring, stream = new_ring(device), device.new_stream()
    device.begin_capture(stream)
    section(device, ring, "decode", MILLISECOND, stream)
    graph = device.end_capture(stream)
    device.advance(10 * MILLISECOND)
    assert reduced(device, ring).sums[0, SumColumn.COUNT] == 0, "capturing is no run"
    for _ in range(7):
        device.replay(graph)
    rows = reduced(device, ring)
    assert rows.sums[0, SumColumn.COUNT] == 7
    assert rows.exact[0, ExactColumn.MEDIAN] == MILLISECOND + 2 * LAUNCH_NS + STAMP_NS
    assert (
        rows.exact[0, ExactColumn.LAST_END] - rows.exact[0, ExactColumn.FIRST_START]
        > 7 * MILLISECOND
    )


def test_sections_of_twenty_steps_are_recorded_without_synchronization(device: FakeDevice) -> None:
    """In each step, sections are reduced and the result is collected while the host runs ahead."""
    ring = new_ring(device)
    section(device, ring, "warm up", 1)
    before, counted, pending = device.synchronizations, 0, 0
    for _ in range(20):
        for _ in range(3):
            section(device, ring, "attention", MILLISECOND)
        pending += not ring.enqueue_reduction(0)
        device.advance(2 * MILLISECOND)  # The step takes three milliseconds on the device.
        rows = ring.collect_result()
        counted += int(rows.sums[1, SumColumn.COUNT]) if rows is not None else 0
    assert pending > 0, "the device was never behind: the test shows nothing"
    assert device.synchronizations == before
    device.advance(1000 * MILLISECOND)
    last = ring.collect_result()
    counted += int(last.sums[1, SumColumn.COUNT]) if last is not None else 0
    assert counted + int(reduced(device, ring).sums[1, SumColumn.COUNT]) == 60


def test_records_that_overflow_the_device_ring_are_counted_as_lost(device: FakeDevice) -> None:
    """A hundred records are written to 64 places.

    The newest 63 are read, because the oldest may just be overwritten.
    """
    ring = new_ring(device)
    for _ in range(100):
        section(device, ring, "hot", 10)
    rows = reduced(device, ring)
    assert rows.sums[0, SumColumn.COUNT] == 63
    assert rows.sums[0, SumColumn.LOST] == 37


def test_section_names_beyond_the_slots_are_not_stamped(device: FakeDevice) -> None:
    ring = new_ring(device, slots=2)
    assert [ring.assign_slot(name) for name in ("a", "b", "c", "a")] == [0, 1, NO_SLOT, 0]


def test_reduction_waits_until_the_last_one_is_collected(device: FakeDevice) -> None:
    """The page-locked memory of the last reduction is in use. No record is lost by the delay."""
    ring = new_ring(device)
    section(device, ring, "a", MILLISECOND)
    assert ring.enqueue_reduction(0)
    assert ring.collect_result() is None
    section(device, ring, "a", MILLISECOND)
    assert not ring.enqueue_reduction(0)
    device.advance(100 * MILLISECOND)
    first = ring.collect_result()
    assert first is not None
    assert ring.collect_result() is None, "once"
    assert first.sums[0, SumColumn.COUNT] == 1
    assert reduced(device, ring).sums[0, SumColumn.COUNT] == 1


def test_reduction_is_not_captured_into_a_graph(device: FakeDevice) -> None:
    """A captured reduction would write to memory that the host is reading."""
    ring, stream = new_ring(device), device.new_stream()
    device.begin_capture(stream)
    assert not ring.enqueue_reduction(stream)
    device.end_capture(stream)


def test_collected_result_does_not_change_with_the_next_copy(device: FakeDevice) -> None:
    """The next copy from the device overwrites the memory of the first."""
    ring = new_ring(device)
    section(device, ring, "a", MILLISECOND)
    first = reduced(device, ring)
    kept = first.sums.copy()
    section(device, ring, "a", 9 * MILLISECOND)
    reduced(device, ring)
    np.testing.assert_array_equal(first.sums, kept)


def test_device_bytes_is_the_size_of_the_allocated_memory(device: FakeDevice) -> None:
    """The default size is less than 32 MiB."""
    before = device.live_bytes
    ring = DeviceRing(device.driver, device.functions("stamp", "reduce_window"))
    assert device.live_bytes - before == ring.device_bytes < 4 << 20


def test_missing_cuda_driver_raises_device_error() -> None:
    """ctypes raises an OSError, which is converted."""
    with pytest.raises(DeviceError, match="driver cannot be loaded"):
        CudaDriver("libcuda.so.of-another-planet")


def test_failing_driver_call_raises_with_function_and_number(device: FakeDevice) -> None:
    with pytest.raises(DeviceError, match=r"cuMemAlloc_v2 failed with CUDA error 2"):
        device.driver.allocate(1 << 40)
