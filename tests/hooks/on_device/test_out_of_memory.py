"""What is written when memory runs out, and that nothing else happens; torch's functions are stood in for."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.device.fake_allocator import GB, FakeAllocator, block, frames, installed, segment, snapshot
from tests.support.recording import recorded
from torchlens_perf import Watch
from torchlens_perf.errors import RAISE, swallowed
from torchlens_perf.hooks.on_device import out_of_memory
from torchlens_perf.recorder import torch_instruments, torch_private


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    fake = installed(monkeypatch)
    fake.uses(70 * GB, 78 * GB)
    fake.held = snapshot([segment([block(60 * GB, stack=frames()), block(10 * GB), block(8 * GB, "inactive")])])
    return fake


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of a test follow each other at once: what a table costs is not held against them."""
    monkeypatch.setattr(out_of_memory, "_MAX_SHARE", 0)


def files(watch: Watch) -> list[str]:
    assert watch.run_dir is not None
    return sorted(path.name for path in (watch.run_dir / "oom").glob("*"))


def written(watch: Watch, name: str) -> dict[str, Any]:
    assert watch.run_dir is not None
    value: dict[str, Any] = json.loads((watch.run_dir / "oom" / name).read_text())
    return value


class Hungry(torch.nn.Module):
    """Runs out of memory in its forward pass."""

    def __init__(self, allocator: FakeAllocator) -> None:
        super().__init__()
        self.allocator = allocator

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.allocator.runs_out(12 * GB, 2 * GB)
        return value


def test_a_table_is_written(tmp_path: Path, allocator: FakeAllocator) -> None:
    """Who, when, where it was asked for, how much, and what held the memory."""
    model = torch.nn.Sequential(Hungry(allocator))
    with recorded(tmp_path, model) as recording:
        for _ in range(3):
            recording.watch.step()
        with torch.enable_grad():
            model(torch.ones(1))
        assert files(recording.watch) == ["rank00000-3.json"]
        value = written(recording.watch, "rank00000-3.json")

    asked = (value["rank"], value["step"], value["device"], value["asked_bytes"], value["free_bytes"])
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
    who = metadata["identity"]
    return f"rank{who['rank']:05d}-attempt{who['attempt']}-{who['pid']}-{who['process_started']}"


def test_one_observer_a_process_and_none_that_acts_after_the_watch(tmp_path: Path, allocator: FakeAllocator) -> None:
    """It cannot be taken away: a second watch uses the first one's, and between them it does nothing."""
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


def test_nothing_is_attached_before_cuda_is_there(tmp_path: Path, allocator: FakeAllocator) -> None:
    """Attaching, and recording a history, would initialize it, and so break processes that are forked later."""
    allocator.initialized = False
    with recorded(tmp_path, memory="history") as recording:
        recording.watch.step()
        assert (allocator.observers, allocator.history) == ([], None)
        allocator.initialized = True
        recording.watch.step()
        assert len(allocator.observers) == 1
        assert allocator.history is not None


def test_a_history_is_recorded_while_the_watch_runs(tmp_path: Path, allocator: FakeAllocator) -> None:
    """20,000 entries, with Python stacks of allocations; the table then knows which are new."""
    held = allocator.held["segments"][0]["blocks"]
    entry = {"action": "alloc", "addr": held[1]["address"], "size": 1, "stream": 0, "time_us": 5}
    allocator.held["device_traces"] = [[entry]]
    with recorded(tmp_path, memory="history") as recording:
        assert allocator.history == ("all", "alloc", "python", 20_000, False, False, False, [])
        allocator.runs_out(GB, 0)
        rows = written(recording.watch, "rank00000-0.json")["table"]["rows"]
    assert allocator.snapshots == [True]
    assert [row["new_blocks"] for row in rows] == [0, 1]
    assert allocator.history is None


def test_the_jobs_own_history_is_left_alone(tmp_path: Path, allocator: FakeAllocator) -> None:
    """Neither replaced nor ended; its entries may be millions and are not asked for, its stacks are used."""
    theirs = allocator.history = ("all", "all", "all", 10**9)
    with recorded(tmp_path, memory="history") as recording:
        recording.watch.step()
        allocator.runs_out(GB, 0)
        assert written(recording.watch, "rank00000-1.json")["table"]["rows"][0]["stack"]
    assert allocator.history is theirs
    assert allocator.snapshots == [False]
    assert [note for note in recording.notes if note.startswith("memory history is off")]


def test_a_history_that_the_job_begins_later_is_not_ended(tmp_path: Path, allocator: FakeAllocator) -> None:
    """From then on it is the job's: neither asked for, as it has no bound, nor ended with the watch."""
    original = torch.cuda.memory._record_memory_history
    with recorded(tmp_path, memory="history"):
        torch.cuda.memory._record_memory_history(max_entries=10**9)
        theirs = allocator.history
        assert torch.cuda.memory._record_memory_history is original
        allocator.runs_out(GB, 0)
    assert allocator.snapshots == [False]
    assert theirs is not None
    assert allocator.history is theirs


def test_recording_a_history_is_as_before_after_the_watch(tmp_path: Path, allocator: FakeAllocator) -> None:
    """torch's function is ours for no longer than our history is recorded."""
    original = torch.cuda.memory._record_memory_history
    with recorded(tmp_path):
        assert torch.cuda.memory._record_memory_history is original
    with recorded(tmp_path, memory="history"):
        assert torch.cuda.memory._record_memory_history is not original
    assert torch.cuda.memory._record_memory_history is original
    assert allocator.history is None


@pytest.mark.parametrize("ours", [True, False])
def test_snapshots_of_captures_are_bounded(
    allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """A history of the job's own is not asked for; and nothing is pickled that is too large."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch_instruments.memory_history, "is_ours", ours)
    assert isinstance(torch_instruments.pickled_memory(), bytes)
    assert allocator.snapshots == [ours]
    monkeypatch.setattr(torch_instruments, "MAX_SNAPSHOT_ENTRIES", 2)
    observed = torch_instruments.pickled_memory()
    assert observed == "3 blocks and entries of the history are more than 2"


def test_without_the_setting_no_history_is_recorded(tmp_path: Path, allocator: FakeAllocator) -> None:
    """It is off by default: it makes each allocation dearer."""
    with recorded(tmp_path):
        assert allocator.history is None


def test_what_fails_in_it_does_not_replace_the_jobs_error(
    tmp_path: Path, allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an observer raises would be raised in the place of OutOfMemoryError, which the job may want to catch."""
    allocator.held = {}
    with recorded(tmp_path) as recording, monkeypatch.context() as broken:
        broken.setenv(RAISE, "0")
        broken.setattr(swallowed, "by_place", Counter())
        allocator.runs_out(GB, 0)
        assert swallowed.by_place == {"the table of device memory": 1}
    assert recording.internal_errors == 1


class Clock:
    """Time that goes on by 10 ms whenever somebody looks."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 10_000_000
        return self.now_ns


def test_errors_that_are_caught_again_and_again_cost_little(tmp_path: Path, allocator: FakeAllocator) -> None:
    """cuDNN tries algorithms until one fits: the next table comes when the last one was a hundredth of the time."""
    clock = Clock()
    with recorded(tmp_path) as recording:
        assert recording.watch._session is not None
        observer = out_of_memory._Observer(recording.watch._session, clock)
        for _ in range(4):
            observer.observed(0, GB, 0, 0)
        assert len(allocator.snapshots) == 1
        same = written(recording.watch, "rank00000-0.json")
        assert (same["untold"], same["table"] is None) == (3, False)
        clock.now_ns += 2_000_000_000  # the first one took 20 ms
        observer.observed(0, GB, 0, 0)
        assert written(recording.watch, "rank00000-0.json")["untold"] == 3
    assert len(allocator.snapshots) == 2


def test_an_error_shortly_after_a_table_is_told_of(tmp_path: Path, allocator: FakeAllocator) -> None:
    """It may be the one that ends the job: a file without a table, which points to the last one; only the newest."""
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
def test_whether_an_error_ended_the_watch(tmp_path: Path, allocator: FakeAllocator, fatal: bool) -> None:
    """Where none did, the job has caught the last one, whatever step was in progress."""
    with pytest.raises(MemoryError) if fatal else nullcontext(), recorded(tmp_path) as recording:
        recording.watch.step()
        allocator.runs_out(GB, 0)
        assert written(recording.watch, "rank00000-1.json")["caught"] is False
        if fatal:
            raise MemoryError
    (file,) = tmp_path.glob("**/oom/rank00000-1.json")
    assert json.loads(file.read_text())["caught"] is not fatal


@pytest.mark.usefixtures("unhurried")
def test_the_newest_tables_stay(tmp_path: Path, allocator: FakeAllocator) -> None:
    """At most eight of a process; one of each step, the last."""
    with recorded(tmp_path) as recording:
        for _ in range(12):
            allocator.runs_out(GB, 0)
            allocator.runs_out(2 * GB, 0)
            recording.watch.step()
        assert files(recording.watch) == sorted(f"rank00000-{step}.json" for step in range(4, 12))
        assert written(recording.watch, "rank00000-11.json")["asked_bytes"] == 2 * GB


def test_without_the_setting_memory_there_is_none(tmp_path: Path, allocator: FakeAllocator) -> None:
    """memory="off": neither readings nor an observer."""
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
def test_what_torch_lacks_is_told(
    tmp_path: Path, allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch, name: str, note: str
) -> None:
    """The readings go on without it, and so does the table without stacks."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.delattr(torch._C, name)
    torch_private.works.cache_clear()
    with recorded(tmp_path, memory="history") as recording:
        recording.watch.step()
    torch_private.works.cache_clear()

    assert [each for each in recording.notes if each.startswith(note)]
    assert allocator.history is None
    assert allocator.readings == 1
    assert len(allocator.observers) == (name == "_cuda_isHistoryEnabled")
