"""Tests of perf.role() and perf.event() in the processes of a job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchlens_perf as perf
from torchlens_perf.roles import recording
from torchlens_perf.roles.event_file import read_new_events
from torchlens_perf.run import directory

RUN = f"test-roles-{os.getpid()}"


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Record into a folder of this test, and begin as a new process does."""
    monkeypatch.setattr(directory, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(recording, "_process", recording._Process())
    return tmp_path


def written(folder: Path) -> dict[str, list[bytes]]:
    """Return the ids of all events by role and name of their process."""
    found = {}
    for path in folder.rglob("*.events"):
        new = read_new_events(path, 0, ended=True)
        found[f"{new.role}/{new.name}"] = new.events["id"].tolist()
    return found


def test_event_has_the_role_that_is_set_last(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    monkeypatch.setenv("TORCHLENS_PERF_RUN_ID", RUN)
    perf.event("sample_sent", id=1)
    perf.role("trainer", name="lead")
    perf.event("sample_sent", id=2)

    assert written(files) == {"trainer/lead": [b"1", b"2"]}


def test_forked_process_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    monkeypatch.setenv("TORCHLENS_PERF_RUN_ID", RUN)
    perf.role("rollout")
    perf.event("generation_begin", id="parent")
    child = os.fork()
    if not child:
        perf.role("tool")
        perf.event("tool_begin", id="child")
        os._exit(0)
    os.waitpid(child, 0)

    assert written(files) == {"rollout/": [b"parent"], "tool/": [b"child"]}


def test_detected_role_stays_detected_in_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_process", recording._Process())
    recording.detect_role("trainer", "rank 0")
    child = os.fork()
    if not child:
        os._exit(recording._process.is_detected)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_unknown_names_are_the_users_mistake() -> None:
    with pytest.raises(perf.ConfigError, match="did you mean 'generation_end'"):
        perf.event("generation_ended")
    with pytest.raises(perf.ConfigError, match="unknown role 'actor'"):
        perf.role("actor")


def test_without_a_run_id_nothing_is_recorded_and_one_warning_says_so(
    files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        perf.event("sample_sent", id=1)

    assert not written(files)
    assert [each.message for each in caplog.records] == [
        "torchlens_perf: events are not recorded: set TORCHLENS_PERF_RUN_ID to the same value in all"
        " processes of the job"
    ]


def test_switched_off_events_do_nothing(
    monkeypatch: pytest.MonkeyPatch, files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHLENS_PERF_RUN_ID", RUN)
    monkeypatch.setenv("TORCHLENS_PERF", "0")
    perf.event("sample_sent", id=1)

    assert not written(files)
    assert not caplog.records


def test_role_of_the_environment_holds_and_the_file_goes_with_its_process(files: Path) -> None:
    """Without a sidecar, no other process removes the file."""
    program = (
        "import sys, pathlib, torchlens_perf as perf\n"
        "from torchlens_perf.run import directory\n"
        "from torchlens_perf.roles.event_file import read_new_events\n"
        "directory._SHARED_MEMORY = pathlib.Path(sys.argv[1])\n"
        "perf.event('reward_begin', id=1)\n"
        "path, = pathlib.Path(sys.argv[1]).rglob('*.events')\n"
        "found = read_new_events(path, 0, ended=True)\n"
        "print(found.role, found.name, 'torch' in sys.modules)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, str(files)],
        env={**os.environ, "TORCHLENS_PERF_RUN_ID": RUN, "TORCHLENS_PERF_ROLE": "reward/judge"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert found.stdout == "reward judge False\n"
    assert not [*files.rglob("*.events")]
