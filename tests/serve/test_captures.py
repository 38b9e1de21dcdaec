"""Captures requested by the page's form, of a real training job, and access to their files."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.leftovers import eventually
from tests.support.page_server import PageServer, Viewer, links
from tests.support.processes import ROOT, SCRIPTS, clean_environ
from torchlens_perf.run import captures as capture_files
from torchlens_perf.run.captures import BY_USER, TRACE, Outcome, Request
from torchlens_perf.run.directory import RunDirectory

pytestmark = pytest.mark.distributed
ID = "20261121-013205-3fa9"


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Run a watched loop on the CPU until a file exists.

    Return the folder of runs, and that file.
    """
    folder, stop = tmp_path / "runs", tmp_path / "stop"
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "train_until_told.py"), str(folder), str(stop)],
        env={**clean_environ(), "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield folder, stop
    finally:
        stop.touch()
        process.wait(60)


def run_of(folder: Path) -> Path | None:
    """Return the folder's run, once it has a state."""
    found = [path for path in folder.glob("*") if list(path.glob("nodes/*.json"))]
    return found[0] if found else None


@pytest.mark.long  # tests/distributed/test_capture_live.py has a capture of a job.
def test_ranks_of_a_training_job_are_captured_and_files_downloaded(
    training: tuple[Path, Path],
) -> None:
    """The page follows the run while ranks are captured, until the run ends."""
    folder, stop = training
    assert eventually(lambda: run_of(folder) is not None)
    run = run_of(folder)
    assert run is not None
    with PageServer(folder) as server:
        viewer, api = server.viewer(), f"/runs/{run.name}/api"
        news = viewer.poll_changes(run.name)
        version = news.next()["version"]
        made = viewer.json(f"{api}/contents")["report"]["ranks"][0]["steps"]
        assert 'id="capture"' in viewer.page(run.name)
        asked = viewer.post(f"{api}/captures", ranks="0", steps="2")
        assert (asked.status, asked.json["ranks"], asked.json["steps"]) == (202, [0], 2), asked.text
        again = viewer.post(f"{api}/captures", ranks="0", steps="2")
        assert (again.status, "in progress" in again.json["problem"]) == (400, True)
        of = f"{api}/captures/{asked.json['id']}"
        assert eventually(lambda: viewer.json(of)["is_over"])
        (outcome,) = viewer.json(of)["outcomes"]
        assert viewer.json(of)["waiting"] == []
        assert re.match(r"steps \d+ to \d+; training paused for ", outcome["words"])
        (trace,) = [file for file in outcome["files"] if file["name"] == TRACE]
        answer = viewer.ask(f"/runs/{run.name}/{trace['address']}")
        assert (answer.status, len(answer.body)) == (200, trace["bytes"])
        assert answer.headers["content-disposition"] == f'attachment; filename="{TRACE}"'
        assert json.loads(gzip.decompress(answer.body))["traceEvents"]
        while news.next()["version"] == version:
            pass
        # The version may change because of the capture before there is a new step.
        assert eventually(
            lambda: viewer.json(f"{api}/contents")["report"]["ranks"][0]["steps"] > made
        )
        stop.touch()
        news.wait_for(is_live=False)
        page = viewer.page(run.name)
        # An ended run has no rank that could be captured, so the form is gone.
        assert 'id="capture"' not in page
        assert trace["address"] in links(page, "captures/")
        late = viewer.post(f"{api}/captures", ranks="0", steps="2")
        assert (late.status, "a capture needs a live run" in late.json["problem"]) == (400, True)
    assert [each.asked_by for each in capture_files.read_requests(run / "captures")[0]] == [BY_USER]


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({}, 400, "needs ranks"),
        ({"ranks": "0"}, 400, "needs ranks"),
        ({"ranks": "", "steps": "3"}, 400, "needs ranks"),
        ({"ranks": "0", "steps": "-1"}, 400, "needs ranks"),
        ({"ranks": "0", "steps": "21"}, 400, "from 1 to 20"),
        ({"ranks": "x", "steps": "3"}, 400, "expected ranks"),
        ({"ranks": "0-99999999999999999999", "steps": "3"}, 400, "expected ranks"),
        ({"ranks": "0", "steps": "3"}, 400, "a capture needs a live run"),
        ({"ranks": "0" * 20_000, "steps": "3"}, 400, "expected ranks"),
    ],
)
def test_invalid_capture_request_is_explained(
    viewer: Viewer, fields: dict[str, str], status: int, words: str
) -> None:
    answer = viewer.post("/runs/done/api/captures", **fields)
    assert answer.status == status, answer.text
    assert words in answer.json["problem"]


# -- files


@pytest.fixture(scope="module")
def captured(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with a capture of rank 2, whose trace is larger than a block.

    Rank 1 has not responded.
    """
    folder = tmp_path_factory.mktemp("captured")
    run = RunDirectory(folder / "run")
    shutil.copytree(runs / "done", run.path)
    request = Request(ID, BY_USER, 1.0, 0, (1, 2), 10, 2)
    capture_files.submit_request(run.captures, request)
    at = capture_files.rank_folder(run.captures, ID, 2)
    at.mkdir(parents=True)
    (at / TRACE).write_bytes(os.urandom(5 << 19))
    (at / "other.txt").write_text("not one of ours")
    outcome = Outcome(
        ID,
        2,
        10,
        2,
        files={TRACE: 5 << 19},
        left_out={"memory.pickle": "<i>no GPU</i>"},
        paused_s=0.25,
    )
    capture_files.write_capture_file(capture_files.outcome_path(at), outcome)
    secret = folder / "secret"
    secret.mkdir()
    for name in (TRACE, "stacks.txt", "capture.json"):
        (secret / name).write_text("secret")
    (run.captures / "link").symlink_to(secret)
    (run.captures / ID / "rank00003").symlink_to(secret)
    (at / "stacks.txt").symlink_to(secret / "stacks.txt")
    os.mkfifo(at / "flight_recorder.json")
    (at / "memory.pickle").mkdir()
    return folder


@pytest.fixture(scope="module")
def holder(captured: Path) -> Iterator[Viewer]:
    with PageServer(captured) as server:
        yield server.viewer()


def test_capture_files_are_linked_and_downloaded_completely(holder: Viewer, captured: Path) -> None:
    """One file has several blocks. Words from a file are shown as text."""
    page = holder.page("run")
    (address,) = links(page, "captures/")
    assert address == f"captures/{ID}/2/{TRACE}"
    assert "<i>no GPU" not in page
    answer = holder.ask(f"/runs/run/{address}")
    file = capture_files.rank_folder(captured / "run" / "captures", ID, 2) / TRACE
    assert answer.body == file.read_bytes()
    assert answer.headers["content-type"] == "application/octet-stream"
    progress = holder.json(f"/runs/run/api/captures/{ID}")
    # The request is so old that no sidecar will handle it.
    assert (progress["waiting"], progress["is_over"]) == ([1], True)
    assert holder.ask("/runs/run/api/captures/none").status == 404


@pytest.mark.parametrize(
    "path",
    [
        f"{ID}/2/stacks.txt", f"{ID}/2/flight_recorder.json", f"{ID}/2/memory.pickle", f"{ID}/2/other.txt",
        f"{ID}/3/{TRACE}", f"{ID}/3/stacks.txt", f"link/../{TRACE}", f"link/2/{TRACE}", f"{ID}/2/../2/{TRACE}",
        f"{ID}/2/%2e%2e%2f{TRACE}", f"../captures/{ID}/2/{TRACE}", f"%2e%2e/2/{TRACE}", f"{ID}/-2/{TRACE}",
        f"{ID}/00002/../{TRACE}", f"{ID}/%D9%A2/{TRACE}", f"{ID}%00/2/{TRACE}", f"{ID}/2/{TRACE}%00",
        f"./2/{TRACE}", f"{ID}.request.json", f"/2/{TRACE}",
    ],
)  # fmt: skip
def test_only_regular_capture_files_are_served(holder: Viewer, path: str) -> None:
    answer = holder.ask(f"/runs/run/captures/{path}")
    assert answer.status in (400, 404), answer.body[:100]
    assert b"secret" not in answer.body
    assert b"not one of ours" not in answer.body


def test_file_replaced_during_a_download_is_refused(captured: Path) -> None:
    from torchlens_perf.serve.captures import BLOCK_BYTES, read_file_block
    from torchlens_perf.store.run_folders import NotFoundError

    run = captured / "run"
    first, known = read_file_block(str(run), ID, "2", TRACE, 0, ())
    assert len(first) == BLOCK_BYTES
    file = capture_files.rank_folder(run / "captures", ID, 2) / TRACE
    content = file.read_bytes()
    assert (
        read_file_block(str(run), ID, "2", TRACE, BLOCK_BYTES, known)[0]
        == content[BLOCK_BYTES : 2 * BLOCK_BYTES]
    )
    file.unlink()
    file.write_bytes(content[:-1])
    with pytest.raises(NotFoundError):
        read_file_block(str(run), ID, "2", TRACE, BLOCK_BYTES, known)
