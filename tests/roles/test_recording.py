"""Tests of perf.role() and perf.event() in the processes of a job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import torchlens_perf as perf
from torchlens_perf.errors import swallowed
from torchlens_perf.roles import openai_hooks, recording
from torchlens_perf.roles.event_file import LOCK, read_new_events
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


def test_invalid_variable_does_not_reach_a_followed_library(
    monkeypatch: pytest.MonkeyPatch, files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHLENS_PERF", "maybe")
    monkeypatch.delenv("TORCHLENS_PERF_RAISE")
    recording.detect_role("tool")
    for _ in range(2):
        recording.record("sample_sent", 1)
    assert caplog.text.count("TORCHLENS_PERF='maybe': must be 1 or 0") == 1
    assert not written(files)
    swallowed.by_place.clear()


def test_server_that_sends_null_for_a_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch, files: Path
) -> None:
    monkeypatch.setenv("TORCHLENS_PERF_RUN_ID", RUN)
    recording.detect_role("tool")
    client = SimpleNamespace(base_url="http://user:secret@engine:1/v1")
    request = openai_hooks._Request(SimpleNamespace(_client=client), ())
    request.add(SimpleNamespace(usage=SimpleNamespace(prompt_tokens=None, completion_tokens=3)))
    request.end()
    (path,) = files.rglob("*.events")
    events = read_new_events(path, 0, ended=True).events
    assert (events["tokens_in"].tolist(), events["tokens_out"].tolist()) == ([-1, -1], [-1, 3])
    assert b"engine:1" in path.read_bytes()
    assert b"secret" not in path.read_bytes()


def test_library_of_a_process_whose_role_is_not_known_records_nothing(
    monkeypatch: pytest.MonkeyPatch, files: Path
) -> None:
    monkeypatch.setenv("TORCHLENS_PERF_RUN_ID", RUN)
    recording.record("generation_begin", 1)
    assert not written(files)
    perf.role("other")
    recording.record("generation_begin", 2)
    assert written(files) == {"other/": [b"2"]}


def test_only_a_longer_chat_with_the_same_begin_continues_a_sample() -> None:
    client = SimpleNamespace(base_url="http://engine:1/v1")
    texts = [["a"], ["a", "b", "c"], ["a", "x", "c", "d"], ["a"], ["a"], ["a", "b"]]
    found = []
    for each in texts:
        chat = [{"role": "user", "content": text} for text in each]
        request = openai_hooks._Request(SimpleNamespace(_client=client), chat)
        request.end()
        found.append(request.sample)
    first, second, third, fourth, fifth, sixth = found
    assert (first, fifth) == (second, sixth)
    assert len({first, third, fourth, fifth}) == 4


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


def test_program_that_cannot_start_a_reader_leaves_no_lock(
    monkeypatch: pytest.MonkeyPatch, files: Path
) -> None:
    """In a program that was frozen, there is no Python to start."""
    monkeypatch.setenv("TORCHLENS_PERF_RUN_ID", RUN)
    monkeypatch.setenv("TORCHLENS_PERF_DIR", str(files / "runs"))
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.delenv("TORCHLENS_PERF_RAISE")
    perf.role("rollout")
    perf.event("generation_begin", id=1)

    assert written(files) == {"rollout/": [b"1"]}
    assert not list(files.rglob(LOCK))
    assert not recording.node_reader.is_read(next(files.rglob("*.events")).parent)
    swallowed.by_place.clear()


def test_lock_of_a_killed_reader_goes_with_its_folder(
    monkeypatch: pytest.MonkeyPatch, files: Path
) -> None:
    monkeypatch.setenv("TORCHLENS_PERF_RUN_ID", RUN)
    directory.call_in_local_folder("of-a-killed-job", lambda folder: (folder / LOCK).touch())
    (left,) = files.rglob(LOCK)
    perf.event("generation_begin", id=1)

    assert not left.parent.exists()
