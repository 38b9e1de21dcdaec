"""The live page's server: a real one on loopback, asked by a real client."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from tests.support.processes import ROOT, SCRIPTS, clean_environ
from torchlens_perf.run import captures as capture_files
from torchlens_perf.run.directory import RunDirectory

pytestmark = pytest.mark.distributed

SLOW = 3


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, rank 3 of 4 slow."""
    folder = tmp_path_factory.mktemp("runs")
    fault = f"constant:rank={SLOW},share=0.4,phase=forward,since=20"
    made = folder / f"done-{os.getpid()}"  # a run has one sidecar at a time, and others simulate too
    command = ["simulate", "--ranks", "4", "--steps", "96", "--fault", fault, "--out", str(made)]
    subprocess.run([sys.executable, "-m", "torchlens_perf", *command], check=True, capture_output=True, cwd=ROOT)
    made.rename(folder / "done")
    return folder


class Viewer:
    """A client of one server: knows its token, and keeps its cookie."""

    def __init__(self, address: str) -> None:
        self.address = urlsplit(address)
        self.host = self.address.netloc
        status, headers, _ = self.get(f"/?{self.address.query}")
        assert status == 303
        self.cookie = headers["set-cookie"].partition(";")[0]

    cookie = ""

    def get(self, path: str, method: str = "GET", body: str = "", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers by lower-case name, and body."""
        connection = http.client.HTTPConnection(self.host, timeout=60)
        given = {"Host": self.host, **({"Cookie": self.cookie} if self.cookie else {})}
        given.update({name.replace("_", "-"): value for name, value in headers.items()})
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in given.items():
                connection.putheader(name, value)
            if body:
                connection.putheader("Content-Length", str(len(body)))
                connection.putheader("Content-Type", "application/x-www-form-urlencoded")
            connection.endheaders(body.encode() or None)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def post(self, path: str, **fields: str) -> tuple[int, Any]:
        status, _, body = self.get(path, "POST", urlencode(fields), Origin=f"http://{self.host}")
        return status, json.loads(body)

    def json(self, path: str) -> Any:
        status, _, body = self.get(path)
        assert status == 200, body
        return json.loads(body)

    @contextlib.contextmanager
    def events(self, path: str) -> Iterator[Iterator[tuple[str, str]]]:
        """Server-sent events, as they come."""
        connection = http.client.HTTPConnection(self.host, timeout=60)
        connection.request("GET", path, headers={"Cookie": self.cookie})
        answer = connection.getresponse()
        assert answer.getheader("content-type", "").startswith("text/event-stream")

        def read() -> Iterator[tuple[str, str]]:
            fields: dict[str, str] = {}
            for line in answer:
                text = line.decode().rstrip("\n")
                if text:
                    name, _, value = text.partition(": ")
                    fields[name] = value
                elif "event" in fields:
                    yield fields["event"], fields["data"]
                    fields = {}

        try:
            yield read()
        finally:
            connection.close()


@contextlib.contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Viewer]]:
    """A server in a process of its own."""
    command = [sys.executable, "-m", "torchlens_perf", "serve", str(folder), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address, process.stderr.read() if process.stderr else ""
        yield process, Viewer(address)
    finally:
        process.kill()
        with contextlib.suppress(ValueError):  # what it has said was read
            process.communicate(timeout=20)  # its reader ends with it


@pytest.fixture(scope="module")
def viewer(simulated: Path) -> Iterator[Viewer]:
    with serving(simulated) as (_, found):
        yield found


def eventually(found: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while not (answer := found()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return answer


# -- who may look


def test_without_the_token_nothing_is_shown(viewer: Viewer) -> None:
    """No page, no JSON, no stream; a wrong token and somebody else's cookie are as none."""
    stranger = Viewer.__new__(Viewer)
    stranger.address, stranger.host = viewer.address, viewer.host
    for path in ("/", "/runs/done/", "/runs/done/api/contents", "/runs/done/api/changes", "/?token=wrong"):
        status, _, body = stranger.get(path)
        assert (status, b"done" in body) == (403, False), path
    status, _, _ = stranger.get("/", Cookie="torchlens_perf_x=y")
    assert status == 403


def test_another_name_is_not_taken_for_this_server(viewer: Viewer) -> None:
    """A name that somebody else's name server points to this machine reaches nothing, with the cookie or without."""
    status, _, _ = viewer.get("/", Host=f"evil.example:{viewer.address.port}")
    assert status == 421


def test_other_sites_cannot_ask_for_captures(viewer: Viewer) -> None:
    """A POST needs this server's own page as its origin."""
    for headers in ({}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
        status, _, _ = viewer.get("/runs/done/api/captures", "POST", "ranks=0&steps=3", **headers)
        assert status == 403


def test_headers_of_every_answer(viewer: Viewer) -> None:
    """Nothing is kept, framed, sniffed or referred to; the token leaves the address at once."""
    for path in ("/", "/runs/done/", "/runs/done/api/contents", "/runs/none/"):
        _, headers, _ = viewer.get(path)
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
    status, headers, _ = viewer.get(f"/runs/done/?{viewer.address.query}")
    assert (status, headers["location"]) == (303, "/runs/done/")
    assert "HttpOnly" in headers["set-cookie"]
    assert "samesite=strict" in headers["set-cookie"].lower()


@pytest.mark.parametrize(
    "path",
    [
        "/runs/../", "/runs/%2e%2e/", "/runs/..%2f..%2fetc/", "/runs/%00/", "/runs/nothing/", "/runs/link/",
        "/runs/done/captures/../../nodes/x", "/runs/done/captures/a/%2e%2e/b", "/runs/done/captures/a/b/..%2f..%2fx",
        "/runs/done/captures/x/link/report.txt",
    ],
)  # fmt: skip
def test_paths_lead_nowhere_else(viewer: Viewer, simulated: Path, path: str) -> None:
    """Neither dots nor links lead out of the folder, nor out of a run's captures."""
    link = simulated / "link"
    if not link.is_symlink():
        link.symlink_to(simulated / "done")
        (simulated / "done" / "captures" / "x").mkdir(parents=True)
        (simulated / "done" / "captures" / "x" / "link").symlink_to(simulated / "done")
    status, _, body = viewer.get(path)
    assert status in (403, 404)
    assert b"root:" not in body


# -- what is shown


def test_list_of_runs(viewer: Viewer) -> None:
    status, _, body = viewer.get("/")
    assert status == 200
    assert b'href="runs/done/"' in body
    assert b"Rank 3" in body


def test_page_is_that_of_the_file(viewer: Viewer, simulated: Path) -> None:
    """The same contents as in a file of the run; any recorded step besides."""
    from torchlens_perf.page.gather.run_contents import contents

    status, _, body = viewer.get("/runs/done/")
    assert status == 200
    assert b'data-live="ended"' in body
    held = json.loads(json.dumps(contents(RunDirectory(simulated / "done"))))
    shown = viewer.json("/runs/done/api/contents")
    assert {**held, "written": ""} == {**shown, "written": ""}
    step = viewer.json("/runs/done/api/step/50")
    (row,) = step["steps"]
    assert (row["step"], [each["rank"] for each in row["ranks"]]) == (50, [0, 1, 2, 3])
    assert viewer.json("/runs/done/api/step/5000")["steps"] == []


def test_ended_run_says_so_at_once(viewer: Viewer) -> None:
    with viewer.events("/runs/done/api/changes") as events:
        viewer.get("/runs/done/")
        assert next(events)[0] == "ended"


def test_damaged_and_hostile_runs_are_listed(tmp_path: Path, simulated: Path) -> None:
    """A run that cannot be read is one that says why; names are text."""
    folder = tmp_path / "runs"
    shutil.copytree(simulated / "done", folder / "good", symlinks=True)
    (folder / "bad" / "nodes").mkdir(parents=True)
    (folder / "bad" / "nodes" / "n.json").write_text("{")
    (folder / "<b>name" / "nodes").mkdir(parents=True)
    with serving(folder) as (_, viewer):
        status, _, body = viewer.get("/")
        assert status == 200
        assert b"<b>name" not in body
        assert b"3 runs" in body
        status, _, body = viewer.get("/runs/bad/")
        assert (status, b"cannot be read" in body) == (503, True)
        shutil.rmtree(folder / "good")
        assert viewer.get("/runs/good/")[0] == 404
        assert viewer.get("/")[0] == 200


# -- a run that goes on


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A watched loop on the CPU until it is told to stop: the folder of runs, and the file that tells it."""
    folder, stop = tmp_path / "runs", tmp_path / "stop"
    environ = {**clean_environ(), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "train_until_told.py"), str(folder), str(stop)],
        env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield folder, stop
    finally:
        process.kill()
        process.wait()


def run_of(folder: Path) -> Path | None:
    """Its run, once that has a state."""
    found = [path for path in folder.glob("*") if not path.is_symlink() and list(path.glob("nodes/*.json"))]
    return found[0] if found else None


def test_a_run_is_followed_to_its_end(training: tuple[Path, Path]) -> None:
    """Viewers hear of what is new, and that it has ended; a capture is asked for by the page's button, and fetched."""
    folder, stop = training
    run = eventually(lambda: run_of(folder))
    assert run is not None
    with serving(folder) as (_, viewer), viewer.events(f"/runs/{run.name}/api/changes") as events:
        first = viewer.json(f"/runs/{run.name}/api/contents")["report"]["ranks"][0]["steps"]
        kind, _ = next(events)
        while viewer.json(f"/runs/{run.name}/api/contents")["report"]["ranks"][0]["steps"] <= first:
            kind, _ = next(events)
        assert kind == "changed"

        status, asked = viewer.post(f"/runs/{run.name}/api/captures", ranks="0", steps="2")
        assert (status, asked.get("ranks")) == (202, 1), asked
        of = f"/runs/{run.name}/api/captures/{asked['id']}"
        (outcome,) = eventually(lambda: viewer.json(of)["outcomes"])
        assert outcome["files"], outcome
        for file in outcome["files"]:
            status, headers, body = viewer.get(f"/runs/{run.name}/{file['path']}")
            assert (status, len(body)) == (200, file["bytes"])
            assert headers["content-disposition"] == "attachment"
        status, answer = viewer.post(f"/runs/{run.name}/api/captures", ranks="77", steps="2")
        assert status == 400
        assert "77" in answer["problem"]

        stop.touch()
        for kind, _ in events:
            if kind == "ended":
                break
        assert viewer.json(f"/runs/{run.name}/api/contents")["report"]["run"]["live"] is False
    assert len(capture_files.read_requests(run / "captures")[0]) == 1


# -- its life


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ends_at_once_when_it_is_asked(simulated: Path, number: signal.Signals) -> None:
    """Also while somebody looks; without a traceback, and with no process left."""
    with serving(simulated) as (process, viewer), viewer.events("/runs/done/api/changes") as events:
        viewer.get("/runs/done/")
        next(events)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(number)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert eventually(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def test_what_cannot_be_is_one_line(simulated: Path, tmp_path: Path) -> None:
    """A taken port, a folder that is none, an address for everybody without --share: exit code 2 and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for arguments, word in (
            ([str(simulated), "--port", str(taken.getsockname()[1])], "--port"),
            ([str(tmp_path / "none")], "serve DIR"),
            ([str(simulated), "--host", "0.0.0.0"], "--share"),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "torchlens_perf", "serve", *arguments],
                cwd=ROOT, capture_output=True, text=True, timeout=60, env={**os.environ},
            )  # fmt: skip
            assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
            assert word in done.stderr
