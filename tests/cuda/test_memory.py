"""Readings of torch's device allocator in a watched loop, with replaced functions of torch."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.support.device.fake_allocator import GB, FakeAllocator, installed
from tests.support.recording import Recording, recorded
from torchlens_perf.run.ring import Kind

pytestmark = pytest.mark.usefixtures("each_step_is_due")


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    return installed(monkeypatch)


@pytest.fixture
def no_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the minimum time between readings, because steps of a test are short."""
    monkeypatch.setattr("torchlens_perf.cuda.memory._MIN_IDLE_RATIO", 0)


def values(recording: Recording) -> dict[str, list[tuple[int, int, int]]]:
    """Return the step, value0 and value1 of each reading, grouped by its name."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for each in recording.of(Kind.MEMORY):
        found.setdefault(each.name, []).append((each.step, each.value0, each.value1))
    return found


@pytest.mark.usefixtures("no_idle_time")
def test_readings_of_the_allocator_are_recorded(tmp_path: Path, allocator: FakeAllocator) -> None:
    """Each step's record has the peak of the latest reading."""
    allocator.uses(2 * GB, 4 * GB, GB)
    allocator.fraction = 0.5
    with recorded(tmp_path) as recording:
        for step in range(3):
            if step == 2:
                allocator.uses(GB, 5 * GB, GB)
                allocator.stats.update(num_alloc_retries=3, num_ooms=1)
            recording.watch.step()

    assert values(recording) == {
        "allocated": [(0, 2 * GB, 2 * GB), (1, 2 * GB, 2 * GB), (2, GB, 2 * GB)],
        "reserved": [(0, 4 * GB, 4 * GB), (1, 4 * GB, 4 * GB), (2, 5 * GB, 5 * GB)],
        "inactive": [(0, GB, GB), (1, GB, GB), (2, GB, GB)],
        "alloc_retries": [(0, 0, 0), (1, 0, 0), (2, 3, 0)],
        "ooms": [(0, 0, 0), (1, 0, 0), (2, 1, 0)],
        "limit": [(0, 40 * GB, 0), (1, 40 * GB, 0), (2, 40 * GB, 0)],
    }
    assert [step.value0 for step in recording.steps] == [2 * GB] * 3
    assert recording.metadata["memory_source"] == "device allocator, peak"


def test_memory_readings_take_at_most_a_thousandth_of_the_time(
    tmp_path: Path, allocator: FakeAllocator
) -> None:
    allocator.uses(GB, GB)
    with recorded(tmp_path) as recording:
        for _ in range(3000):
            recording.watch.step()

    readings = recording.of(Kind.MEMORY, "allocated")
    for each, later in itertools.pairwise(readings):
        assert later.start_ns - each.start_ns >= 1000 * each.duration_ns
    assert len(readings) < 3000 / 16


@pytest.mark.usefixtures("no_idle_time")
def test_memory_is_not_read_before_cuda_is_initialized(
    tmp_path: Path, allocator: FakeAllocator
) -> None:
    """A reading would initialize CUDA. No number is recorded for a device without allocations."""
    allocator.initialized = False
    with recorded(tmp_path) as recording:
        recording.watch.step()
        allocator.initialized = True
        recording.watch.step()
        allocator.uses(GB, GB)
        recording.watch.step()

    assert [step for step, _, _ in values(recording)["allocated"]] == [2]
    assert allocator.readings == 1
    assert [step.value0 for step in recording.steps] == [0, 0, GB]


@pytest.mark.usefixtures("no_idle_time")
def test_missing_memory_counters_are_not_recorded_as_zero(
    tmp_path: Path, allocator: FakeAllocator
) -> None:
    """With cudaMallocAsync most counters stay 0, and a version of torch may lack a counter."""
    allocator.uses(GB, 2 * GB)
    allocator.backend = "cudaMallocAsync"
    with recorded(tmp_path / "async") as recording:
        recording.watch.step()
    assert set(values(recording)) == {"allocated", "reserved", "limit"}

    allocator.backend = "native"
    del allocator.stats["num_ooms"]
    with recorded(tmp_path / "old") as recording:
        recording.watch.step()
    assert "ooms" not in values(recording)
    assert "alloc_retries" in values(recording)


def test_custom_allocator_is_noted_once_and_not_read(
    tmp_path: Path, allocator: FakeAllocator
) -> None:
    """A custom allocator of torch has no memory statistics and no observers."""
    allocator.uses(GB, GB)
    allocator.backend = "pluggable"
    with recorded(tmp_path) as recording:
        for _ in range(40):
            recording.watch.step()

    assert values(recording) == {}
    assert [
        note
        for note in recording.notes
        if "memory is not measured: the job's own allocator" in note
    ]
    assert recording.internal_errors == 0
    assert allocator.observers == []
