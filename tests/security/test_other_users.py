"""Tests that folders, links, FIFOs and requests of other users are refused or ignored.

The tests use real owners and modes of files.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ranks import HOST, make_run
from torchlens_perf.errors import RunStoreError
from torchlens_perf.run import captures, directory, make_folders, ownership
from torchlens_perf.run.captures import LOOK_S, MAX_RANKS, Request
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.identity import detect_identity
from torchlens_perf.run.ring import RingReader
from torchlens_perf.sidecar.captures import CaptureRelay, LiveRank
from torchlens_perf.store import segments
from torchlens_perf.verdicts import node_state

SOMEBODY = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """Return a folder with the mode of /tmp."""
    folder = tmp_path / "world"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@as_root
@pytest.mark.parametrize("theirs", ["perf", "perf/run", "perf/run/nodes"])
def test_folder_of_another_user_in_a_sticky_folder_is_refused(theirs: str, world: Path) -> None:
    """/tmp is such a folder. The other user's folder stays unchanged."""
    folder = world / theirs
    folder.mkdir(parents=True)
    os.chown(folder, SOMEBODY, SOMEBODY)
    folder.chmod(0o777)
    before = sorted(world.rglob("*"))

    with pytest.raises(
        RunStoreError, match=rf"{folder} is the folder of another user \({SOMEBODY}\)"
    ):
        RunDirectory(world / "perf" / "run").create()
    assert sorted(world.rglob("*")) == before
    os.chown(folder, 0, 0)
    RunDirectory(world / "perf" / "run").create()


@as_root
def test_folder_of_another_user_is_accepted_in_a_team_folder(tmp_path: Path) -> None:
    """Few users can write to a team folder, so `dir` may belong to another user."""
    folder = tmp_path / "team" / "perf"
    folder.mkdir(parents=True)
    os.chown(folder, SOMEBODY, SOMEBODY)
    folder.chmod(0o2775)

    RunDirectory(folder / "run").create()
    assert (folder / "run" / "nodes").stat().st_uid == os.geteuid()


@as_root
@pytest.mark.parametrize("theirs", ["perf", "perf/run", "perf/run/steps"])
def test_link_in_place_of_a_folder_is_refused(theirs: str, world: Path, tmp_path: Path) -> None:
    """The link's target stays unchanged."""
    target = tmp_path / "target"
    target.mkdir()
    link = world / theirs
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.parent != world:
        link.parent.chmod(0o777)
    link.symlink_to(target)
    os.lchown(link, SOMEBODY, SOMEBODY)

    with pytest.raises(RunStoreError, match="is a link of another user"):
        RunDirectory(world / "perf" / "run").create()
    assert list(target.iterdir()) == []


@as_root
def test_second_local_folder_is_used_if_another_user_has_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may create one of the two folders in advance.

    If both folders belong to other users, the error is reported.
    """
    places = [tmp_path / "shm", tmp_path / "tmp"]
    monkeypatch.setattr(directory, "_SHARED_MEMORY", places[0])
    monkeypatch.setattr(directory.tempfile, "gettempdir", lambda: str(places[1]))
    for place in places:
        place.mkdir()
        place.chmod(0o1777)
    for number, place in enumerate(places):
        squatted = place / f"torchlens-perf-{os.getuid()}"
        shutil.rmtree(squatted, ignore_errors=True)
        squatted.mkdir(mode=0o777)
        os.chown(squatted, SOMEBODY, SOMEBODY)
        if number == 0:
            assert directory.sidecar_lock_path("run").parents[2] == places[1]
    assert list(directory.create_local_folders("run")) == []
    with pytest.raises(RunStoreError, match="can be written"):
        directory.sidecar_lock_path("run")


def test_written_files_replace_a_link_without_following_it(tmp_path: Path) -> None:
    """Files that are written as a whole replace the link.

    A log that is a link is refused.
    """
    victim, link = tmp_path / "victim", tmp_path / "report.partial"
    victim.write_text("mine")
    link.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        ownership.open_to_append(link)
    ownership.write_private_file(link, "text")

    assert victim.read_text() == "mine"
    assert link.read_text() == "text"
    assert not link.is_symlink()


@as_root
def test_log_of_another_user_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "host.log"
    log.touch()
    os.chown(log, SOMEBODY, SOMEBODY)

    with pytest.raises(PermissionError, match=f"belongs to user {SOMEBODY}"):
        ownership.open_to_append(log)


@pytest.mark.parametrize("where", ["../x", "/tmp/x", "..", "a/../../x", "\x1b[2J", "x\ny"])
def test_run_id_becomes_the_name_of_a_single_folder(where: str) -> None:
    """The run id may come from any launcher."""
    found = detect_identity(
        {"TORCHLENS_PERF_RUN_ID": where}, lambda digest, origin: "claimed"
    ).run_id

    assert found == "claimed" or directory._RUN_ID.fullmatch(found)
    assert Path("/runs", found).parent == Path("/runs")


def test_claim_that_leads_out_of_the_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim is a file in shared memory."""
    monkeypatch.setattr(directory, "_claim_or_join", lambda *_: "../../home/me")
    with pytest.raises(RunStoreError, match="is no run id"):
        directory.claim_run_id("digest", 1)


def _within(timeout_s: float, work: Callable[[], object]) -> None:
    """Fail if the work blocks."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), "it waits for a writer"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = make_run(tmp_path)
    made.captures.mkdir()
    return made


def test_fifo_in_place_of_any_file_does_not_block(run: RunDirectory) -> None:
    """The file is one that a sidecar or a report reads or writes."""
    places = [
        run.node_state_path(HOST), run.node_rings_path(HOST), run.node_log_path(HOST),
        run.spans / f"{HOST}-000001.parquet",
        run.captures / "one.request.json", run.node_state_path(HOST).with_suffix(".partial"), run.path / "some.ring",
        run.report.with_name(".report.txt.partial"),
    ]  # fmt: skip
    for path in places:
        os.mkfifo(path)
    notes: list[str] = []

    def look() -> None:
        with pytest.raises(node_state.DamagedStateError, match="is not a regular file"):
            node_state.load(run.node_state_path(HOST))
        assert run.rings_in_run_directory(HOST) == []
        with pytest.raises(OSError, match=r"."):
            ownership.open_to_append(run.node_log_path(HOST))
        assert list(segments.read_chunks(run, HOST, notes)) == []
        (why,) = captures.read_requests(run.captures)[1]
        assert "is not a regular file" in why
        with pytest.raises(Exception, match="too short"):
            RingReader(run.path / "some.ring")
        node_state.load_or_new(run, HOST).save(run)
        ownership.replace_private_file(run.report, "text")
        notes.append("done")

    _within(30, look)
    assert notes[-1] == "done"
    assert "is not a regular file" in notes[0]


def test_report_of_a_run_of_fifos_ends_with_one_line(run: RunDirectory) -> None:
    os.mkfifo(run.node_state_path(HOST))
    command = [sys.executable, "-m", "torchlens_perf", "report", str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert "is not a regular file" in done.stderr


@as_root
def test_sidecar_refuses_a_run_of_another_user(run: RunDirectory) -> None:
    """The refused sidecar leaves no lock on this node."""
    for folder in [run.path, *run.path.iterdir()]:
        os.chown(folder, SOMEBODY, SOMEBODY)
    command = [sys.executable, "-m", "torchlens_perf", "sidecar", str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert "the folder of another user" in done.stderr
    assert directory.find_sidecar_lock(run.run_id) is None
    assert list(Path("/dev/shm").glob(f"torchlens-perf-*/{run.run_id}*")) == []


def _ask(run: RunDirectory, ranks: tuple[int, ...] = (0,), *, forced: bool = False) -> Request:
    request = Request("one", captures.BY_USER, time.time(), 0, ranks, 12, 3, forced=forced)
    captures.submit_request(run.captures, request)
    return request


@as_root
def test_capture_request_of_another_user_is_ignored_with_a_note(run: RunDirectory) -> None:
    _ask(run)
    os.chown(captures.request_path(run.captures, "one"), SOMEBODY, SOMEBODY)
    relay = CaptureRelay(run)
    relay.advance_captures(
        {0: LiveRank(run.path / "rank0.ring", os.getpid(), 0, 10, refuses=False)}, LOOK_S
    )

    assert not captures.ring_request_path(run.path / "rank0.ring").exists()
    assert relay.notes == [
        "a capture request is invalid: one.request.json: another user has put it there"
    ]


def test_capture_requests_with_too_many_ranks_or_bytes_are_refused(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a request is refused for any owner."""
    many = tuple(range(MAX_RANKS + 1))
    relay = CaptureRelay(run)
    live = {
        rank: LiveRank(run.path / f"rank{rank}.ring", os.getpid(), 0, 10, refuses=True)
        for rank in many
    }
    relay.advance_captures(live, LOOK_S)
    request = _ask(run, many)
    relay.advance_captures(live, 2 * LOOK_S)
    refused = captures.read_outcome(run.captures, request, 0)

    assert refused is not None
    assert refused.ended.startswith(f"{MAX_RANKS + 1} ranks are more than {MAX_RANKS}")
    assert captures.why_refused(run.captures, _ask(run, many, forced=True)) == ""
    few = _ask(run, many[:MAX_RANKS])
    assert captures.why_refused(run.captures, few) == ""
    folder = captures.rank_folder(run.captures, "earlier", 0)
    folder.mkdir(parents=True)
    (folder / captures.TRACE).write_bytes(bytes(2 << 20))
    monkeypatch.setattr(captures, "MAX_KEPT_BYTES", 1 << 20)
    assert "MiB of captures" in captures.why_refused(run.captures, few)


def test_file_in_place_of_a_folder_raises_and_stays(tmp_path: Path) -> None:
    """The folders created before the error are removed."""
    file = tmp_path / "run"
    file.write_text(json.dumps({}))
    with pytest.raises(OSError, match="Not a directory"):
        make_folders.make_folders([str(file / "nodes")])
    assert file.is_file()
