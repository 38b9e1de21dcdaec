"""Reading of a live run by top: contents, frequency, and messages if there are no new data."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live_simulation import LiveSimulation
from tests.top.reports import add_node, report_of
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.top.reading import RunReader
from torchlens_perf.verdicts.words.run_state import SILENT_S

HOST = "node-0000"


class Clock:
    """A monotonic clock. Each reading takes a given number of seconds."""

    def __init__(self, each_s: float = 0.0) -> None:
        self.now_s, self.each_s = 1000.0, each_s

    def __call__(self) -> float:
        self.now_s += self.each_s
        return self.now_s


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveSimulation]:
    with LiveSimulation(tmp_path / "run", 2) as running:
        yield running


def test_reader_waits_for_the_run_directory(tmp_path: Path) -> None:
    """The run is shown once the directory exists and a sidecar has written to it."""
    reader = RunReader(RunDirectory(tmp_path / "run"), monotonic=Clock())
    assert reader.poll().trouble == f"{tmp_path}/run does not exist yet"
    with LiveSimulation(tmp_path / "run", 2) as live:
        assert "has no data yet" in reader.poll().trouble
        live.add_blocks()
        view = reader.poll()

    assert (view.trouble, report_of(view)["steps"]["count"]) == ("", 32)


def test_unchanged_files_are_not_read_again(live: LiveSimulation) -> None:
    """Without changes, the view is the same object."""
    live.add_blocks()
    other = add_node(live.run, 1)
    reader = RunReader(live.run, monotonic=Clock())
    view = reader.poll()
    assert reader.poll() is view
    before = other.stat()
    # If the unchanged file were read again, the damage would be noticed.
    other.write_bytes(b"x" * before.st_size)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    live.add_blocks()
    newer = reader.poll()

    assert newer is not view
    assert newer.trouble == ""
    assert [rank["steps"] for rank in report_of(newer)["ranks"]] == [64, 64, 32, 32]


def test_damaged_node_is_named_and_others_are_shown(live: LiveSimulation) -> None:
    """After a repair there is no message."""
    live.add_blocks()
    other = add_node(live.run, 1)
    good = other.read_bytes()
    reader = RunReader(live.run, monotonic=Clock())
    reader.poll()
    other.write_bytes(good[:-100])
    view = reader.poll()

    assert [rank["rank"] for rank in report_of(view)["ranks"]] == [0, 1]
    assert view.trouble.startswith(f"{other} cannot be read: ")
    assert view.trouble.endswith("the ranks of that node are missing")
    other.write_bytes(good)
    assert (reader.poll().trouble, len(report_of(reader.poll())["ranks"])) == ("", 4)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99}', "\x00"])
def test_last_view_stays_if_all_files_are_damaged(live: LiveSimulation, text: str) -> None:
    """Without an earlier view, only the problem is shown."""
    live.add_blocks()
    path = live.run.node_state_path(HOST)
    reader, good = RunReader(live.run, monotonic=Clock()), path.read_bytes()
    report = report_of(reader.poll())
    path.write_text(text)
    for _ in range(2):
        assert reader.poll().report is report
        assert str(path) in reader.poll().trouble
    assert RunReader(live.run, monotonic=Clock()).poll().report is None
    path.write_bytes(good)
    assert reader.poll().trouble == ""


def test_inconsistent_files_are_reported_as_a_problem(live: LiveSimulation) -> None:
    live.add_blocks()
    path = live.run.node_state_path(HOST)
    good = path.read_bytes()
    state = json.loads(good)
    for process in state["processes"].values():
        process["statistics"]["parts"] = {}
    path.write_text(json.dumps(state))
    reader = RunReader(live.run, monotonic=Clock())
    view = reader.poll()

    assert view.report is None
    assert f"{path} cannot be used: KeyError" in view.trouble
    path.write_bytes(good)
    assert reader.poll().trouble == ""


def test_removed_run_directory_keeps_the_last_view(live: LiveSimulation) -> None:
    """The message says that the numbers are old.

    When the directory is back, the run is read again.
    """
    live.add_blocks()
    reader = RunReader(live.run, monotonic=Clock())
    report = report_of(reader.poll())
    kept = shutil.copytree(live.run.path, live.run.path.with_name("kept"))
    shutil.rmtree(live.run.path)
    view = reader.poll()

    assert view.report is report
    assert view.trouble.startswith(f"{live.run.path} or its files were removed")
    kept.rename(live.run.path)
    assert reader.poll().trouble == ""


def test_run_is_silent_after_a_minute_without_updates(live: LiveSimulation) -> None:
    live.add_blocks()
    clock = Clock()
    reader = RunReader(live.run, monotonic=clock)
    view = reader.poll()
    clock.now_s += SILENT_S - 1
    assert reader.poll() is view
    clock.now_s += 62
    assert reader.poll().trouble.startswith(
        "no new data from node-0000 for 2 minutes or more: the sidecar has ended"
    )
    live.add_blocks()
    assert reader.poll().trouble == ""


def test_run_whose_file_is_old_is_silent_at_once(live: LiveSimulation) -> None:
    """The run may have been killed an hour ago."""
    live.add_blocks()
    reader = RunReader(live.run, unix=lambda: time.time() + 3600)

    assert "no new data from node-0000 for 1 hour or more" in reader.poll().trouble


def test_run_whose_sidecar_writes_rarely_is_not_silent(live: LiveSimulation) -> None:
    """Sidecars of many ranks write less often.

    Silence begins at three times the longest interval.
    """
    live.add_blocks()
    clock = Clock()
    reader = RunReader(live.run, monotonic=clock)
    reader.poll()
    clock.now_s += 100
    live.add_blocks()
    reader.poll()
    clock.now_s += 299
    assert reader.poll().trouble == ""
    clock.now_s += 2
    assert "no new data" in reader.poll().trouble


def test_ended_run_is_not_silent(live: LiveSimulation) -> None:
    live.add_blocks()
    live.end_run()
    clock = Clock()
    reader = RunReader(live.run, monotonic=clock)
    clock.now_s += 1e6

    assert (reader.poll().trouble, reader.poll().has_ended) == ("", True)


def test_run_that_takes_long_to_read_is_read_more_rarely(live: LiveSimulation) -> None:
    """A reading of ten seconds is followed by forty seconds of rest: at most a fifth of a core."""
    live.add_blocks()
    clock = Clock()
    reader = RunReader(live.run, monotonic=clock)
    clock.each_s = 10.0
    view = reader.poll()
    clock.each_s = 0.0
    live.add_blocks()
    clock.now_s += 39.0
    assert reader.poll() is view
    clock.now_s += 2.0
    assert reader.poll() is not view


def test_view_has_the_population_of_each_rank(tmp_path: Path) -> None:
    with LiveSimulation(tmp_path / "run", 4, stages=2) as live:
        live.add_blocks()
        view = RunReader(live.run, monotonic=Clock()).poll()
    of = view.populations

    assert of[0] == of[1] != of[2] == of[3]
