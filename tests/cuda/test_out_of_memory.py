"""Files written at out-of-memory errors, with replaced functions of torch."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.device.fake_allocator import (
    GB,
    FakeAllocator,
    block,
    frames,
    installed,
    segment,
    snapshot,
)
from tests.support.recording import recorded
from torchlens_perf import Watch
from torchlens_perf.cuda import out_of_memory
from torchlens_perf.errors import RAISE, swallowed
from torchlens_perf.recorder import torch_instruments, torch_private

pytestmark = pytest.mark.usefixtures("each_step_is_due")


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    fake = installed(monkeypatch)
    fake.uses(70 * GB, 78 * GB)
    fake.held = snapshot(
        [segment([block(60 * GB, stack=frames()), block(10 * GB), block(8 * GB, "inactive")])]
    )
    return fake


@pytest.fixture
def no_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the minimum time between tables, because errors of a test follow each other
    quickly.
    """
    monkeypatch.setattr(out_of_memory, "_MIN_IDLE_RATIO", 0)


def files(watch: Watch) -> list[str]:
    assert watch.run_dir is not None
    return sorted(path.name for path in (watch.run_dir / "oom").glob("*"))


def written(watch: Watch, name: str) -> dict[str, Any]:
    assert watch.run_dir is not None
    value: dict[str, Any] = json.loads((watch.run_dir / "oom" / name).read_text())
    return value


class Hungry(torch.nn.Module):
    """A model that runs out of memory in its forward pass."""

    def __init__(self, allocator: FakeAllocator) -> None:
        super().__init__()
        self.allocator = allocator

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.allocator.runs_out(12 * GB, 2 * GB)
        return value


def test_out_of_memory_error_writes_a_table_of_the_memory(
    tmp_path: Path, allocator: FakeAllocator
) -> None:
    """The table has the process, time, place and size of the failed request, and the used memory."""
    model = torch.nn.Sequential(Hungry(allocator))
    with recorded(tmp_path, model) as recording:
        for _ in range(3):
            recording.watch.step()
        with torch.enable_grad():
            model(torch.ones(1))
        assert files(recording.watch) == ["rank00000-3.json"]
        value = written(recording.watch, "rank00000-3.json")

    asked = (
        value["rank"],
        value["step"],
        value["device"],
        value["asked_bytes"],
        value["free_bytes"],
    )
    assert asked == (0, 3, 0, 12 * GB, 2 * GB)
    assert (value["limit_bytes"], value["process"]) == (80 * GB, recording_key(recording.metadata))
    assert value["inside"][0] == "forward Sequential"
    assert value["module"] == "Sequential > Hungry"
    assert "fake_allocator.py" in value["stack"][0]
    assert value["stack"][1].startswith(f"{__file__}:")
    assert value["table"]["allocated_bytes"] == 70 * GB
    assert [row["bytes"] for row in value["table"]["rows"]] == [60 * GB, 10 * GB]
    assert value["table"]["rows"][0]["stack"][0].startswith(f"{__file__}:")
    assert value["table"]["history_events"] == 0
    assert recording.internal_errors == 0


def recording_key(metadata: dict[str, Any]) -> str:
    identity = metadata["identity"]
    return f"rank{identity['rank']:05d}-attempt{identity['attempt']}-{identity['pid']}-{identity['process_started']}"


def test_second_watch_reuses_the_memory_observer_of_the_first(
    tmp_path: Path, allocator: FakeAllocator
) -> None:
    """torch cannot remove an observer. The observer does nothing between two watches."""
    with recorded(tmp_path) as first:
        run = first.watch.run_dir
    allocator.runs_out(GB, 0)
    assert allocator.snapshots == []
    assert run is not None
    assert not (run / "oom").exists()

    with recorded(tmp_path) as second:
        allocator.runs_out(GB, 0)
        assert files(second.watch) == ["rank00000-0.json"]
    assert len(allocator.observers) == 1


def test_memory_observer_is_not_attached_before_cuda_is_initialized(
    tmp_path: Path, allocator: FakeAllocator
) -> None:
    """Attaching an observer or recording a history would initialize CUDA.

    Processes forked later would break.
    """
    allocator.initialized = False
    with recorded(tmp_path, memory="history") as recording:
        recording.watch.step()
        assert (allocator.observers, allocator.history) == ([], None)
        allocator.initialized = True
        recording.watch.step()
        assert len(allocator.observers) == 1
        assert allocator.history is not None


def test_allocation_history_is_recorded_during_the_watch(
    tmp_path: Path, allocator: FakeAllocator
) -> None:
    """The allocation history has 20,000 entries with Python stacks.

    With the history's stacks, the table shows which blocks are new.
    """
    held = allocator.held["segments"][0]["blocks"]
    entry = {"action": "alloc", "addr": held[1]["address"], "size": 1, "stream": 0, "time_us": 5}
    allocator.held["device_traces"] = [[entry]]
    with recorded(tmp_path, memory="history") as recording:
        # Later versions of torch add parameters at the end.
        history = ("all", "alloc", "python", 20_000, False, False, False, [])
        assert allocator.history[: len(history)] == history
        allocator.runs_out(GB, 0)
        rows = written(recording.watch, "rank00000-0.json")["table"]["rows"]
    assert allocator.snapshots == [True]
    assert [row["new_blocks"] for row in rows] == [0, 1]
    assert allocator.history is None


def test_allocation_history_of_the_job_is_used_but_not_changed(
    tmp_path: Path, allocator: FakeAllocator
) -> None:
    """The job's history may be large, so it is not replaced, ended or copied."""
    job_history = allocator.history = ("all", "all", "all", 10**9)
    with recorded(tmp_path, memory="history") as recording:
        recording.watch.step()
        allocator.runs_out(GB, 0)
        assert written(recording.watch, "rank00000-1.json")["table"]["rows"][0]["stack"]
    assert allocator.history is job_history
    assert allocator.snapshots == [False]
    assert [note for note in recording.notes if note.startswith("memory history is off")]


def test_allocation_history_begun_by_the_job_during_the_watch_is_not_ended(
    tmp_path: Path, allocator: FakeAllocator
) -> None:
    """The job's history is not copied either, because its size has no limit."""
    original = torch.cuda.memory._record_memory_history
    with recorded(tmp_path, memory="history"):
        torch.cuda.memory._record_memory_history(max_entries=10**9)
        job_history = allocator.history
        assert torch.cuda.memory._record_memory_history is original
        allocator.runs_out(GB, 0)
    assert allocator.snapshots == [False]
    assert job_history is not None
    assert allocator.history is job_history


def test_history_function_of_torch_is_restored_after_the_watch(
    tmp_path: Path, allocator: FakeAllocator
) -> None:
    original = torch.cuda.memory._record_memory_history
    with recorded(tmp_path):
        assert torch.cuda.memory._record_memory_history is original
    with recorded(tmp_path, memory="history"):
        assert torch.cuda.memory._record_memory_history is not original
    assert torch.cuda.memory._record_memory_history is original
    assert allocator.history is None


@pytest.mark.parametrize("ours", [True, False])
def test_size_of_memory_snapshots_in_captures_is_limited(
    allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """A capture neither copies a history that the job records nor pickles a large snapshot."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch_instruments.memory_history, "is_ours", ours)
    assert isinstance(torch_instruments.dump_memory_snapshot(), bytes)
    assert allocator.snapshots == [ours]
    monkeypatch.setattr(torch_instruments, "MAX_SNAPSHOT_ENTRIES", 2)
    observed = torch_instruments.dump_memory_snapshot()
    assert observed == "3 blocks and entries of the history are more than 2"


def test_allocation_history_is_off_by_default(tmp_path: Path, allocator: FakeAllocator) -> None:
    """An allocation history slows down each allocation."""
    with recorded(tmp_path):
        assert allocator.history is None


def test_exception_in_the_memory_observer_does_not_reach_the_job(
    tmp_path: Path, allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in an observer would replace OutOfMemoryError, which the job may catch."""
    allocator.held = {}
    with recorded(tmp_path) as recording, monkeypatch.context() as broken:
        broken.setenv(RAISE, "0")
        broken.setattr(swallowed, "by_place", Counter())
        allocator.runs_out(GB, 0)
        assert swallowed.by_place == {"the table of device memory": 1}
    assert recording.internal_errors == 1


class Clock:
    """A clock that advances by 10 ms at each reading."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 10_000_000
        return self.now_ns


def test_tables_of_repeated_errors_take_at_most_a_hundredth_of_the_time(
    tmp_path: Path, allocator: FakeAllocator
) -> None:
    """cuDNN catches an error for each algorithm that does not fit."""
    clock = Clock()
    with recorded(tmp_path) as recording:
        assert recording.watch._session is not None
        observer = out_of_memory._OomTableWriter(recording.watch._session, clock)
        for _ in range(4):
            observer.on_out_of_memory(0, GB, 0, 0)
        assert len(allocator.snapshots) == 1
        same = written(recording.watch, "rank00000-0.json")
        assert (same["untold"], same["table"] is None) == (3, False)
        clock.now_ns += 2_000_000_000  # 2 s after the first table, which took 20 ms.
        observer.on_out_of_memory(0, GB, 0, 0)
        assert written(recording.watch, "rank00000-0.json")["untold"] == 3
    assert len(allocator.snapshots) == 2


def test_error_shortly_after_a_table_writes_a_short_file(
    tmp_path: Path, allocator: FakeAllocator
) -> None:
    """Even shortly after a table, a file is written, because the error may end the job.

    The short file refers to the last table, and only the newest short file is kept.
    """
    with recorded(tmp_path) as recording:
        watch = recording.watch
        allocator.runs_out(GB, 0)
        for asked in (2, 3):
            watch.step()
            watch.step()
            allocator.runs_out(asked * GB, 0)
        assert files(watch) == ["rank00000-0.json", "rank00000-4.json"]
        brief = written(watch, "rank00000-4.json")
        first = written(watch, "rank00000-0.json")
    assert (brief["step"], brief["asked_bytes"], brief["untold"]) == (4, 3 * GB, 1)
    assert (brief["table"], brief["earlier"]) == (None, "oom/rank00000-0.json")
    assert (first["untold"], first["asked_bytes"], first["earlier"]) == (0, GB, None)
    assert len(allocator.snapshots) == 1


@pytest.mark.parametrize("fatal", [True, False])
def test_error_is_counted_as_caught_if_later_steps_follow(
    tmp_path: Path, allocator: FakeAllocator, fatal: bool
) -> None:
    """The step in progress does not count as a later step."""
    with pytest.raises(MemoryError) if fatal else nullcontext(), recorded(tmp_path) as recording:
        recording.watch.step()
        allocator.runs_out(GB, 0)
        assert written(recording.watch, "rank00000-1.json")["caught"] is False
        if fatal:
            raise MemoryError
    (file,) = tmp_path.glob("**/oom/rank00000-1.json")
    assert json.loads(file.read_text())["caught"] is not fatal


@pytest.mark.usefixtures("no_idle_time")
def test_only_the_newest_eight_tables_are_kept(tmp_path: Path, allocator: FakeAllocator) -> None:
    """The last table of each step is kept."""
    with recorded(tmp_path) as recording:
        for _ in range(12):
            allocator.runs_out(GB, 0)
            allocator.runs_out(2 * GB, 0)
            recording.watch.step()
        assert files(recording.watch) == sorted(f"rank00000-{step}.json" for step in range(4, 12))
        assert written(recording.watch, "rank00000-11.json")["asked_bytes"] == 2 * GB


def test_no_memory_observer_is_attached_if_memory_is_off(
    tmp_path: Path, allocator: FakeAllocator
) -> None:
    """The allocator is not read either."""
    with recorded(tmp_path, memory="off"):
        assert allocator.observers == []


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("_cuda_attach_out_of_memory_observer", "out of memory: torch lacks"),
        ("_cuda_memorySnapshot", "out of memory: torch lacks"),
        ("_cuda_isHistoryEnabled", "memory history: torch lacks"),
    ],
)
def test_missing_memory_functions_of_torch_are_noted(
    tmp_path: Path, allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch, name: str, note: str
) -> None:
    """Readings, and tables without stacks, do not need the missing functions."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.delattr(torch._C, name)
    torch_private.is_usable.cache_clear()
    with recorded(tmp_path, memory="history") as recording:
        recording.watch.step()
    torch_private.is_usable.cache_clear()

    assert [each for each in recording.notes if each.startswith(note)]
    assert allocator.history is None
    assert allocator.readings == 1
    assert len(allocator.observers) == (name == "_cuda_isHistoryEnabled")
