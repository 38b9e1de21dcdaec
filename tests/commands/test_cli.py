"""The command line: what it prints, and how it says that the user has erred."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import HOST, Rank, make_run
from torchlens_perf.commands.cli import main
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.sidecar.node import Sidecar

WORK = {"data": 1, "forward": 4, "backward": 6, "host": 1}


@pytest.fixture
def finished(tmp_path: Path) -> RunDirectory:
    """A run directory with a finished run."""
    run = make_run(tmp_path)
    rank = Rank(run, 0, 1)
    rank.steps(50, **WORK)
    rank.close()
    sidecar = Sidecar(run, HOST, None, lambda run, asked: None)
    sidecar.poll()
    sidecar.account()
    sidecar.keep()
    sidecar.close()
    return run


def test_report(finished: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """`report` prints the report of a run, plain where stdout is no terminal."""
    assert main(["report", str(finished.path)]) == 0
    out = capsys.readouterr().out

    assert "50 steps" in out
    assert f"run directory: {finished.path}" in out
    assert "\x1b" not in out


def test_report_as_json(finished: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """`report --json` prints one JSON value with its schema's number."""
    assert main(["report", str(finished.path), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)

    assert (value["schema"], value["run"]["id"], value["steps"]["count"]) == (2, finished.run_id, 50)


def test_report_finds_the_newest(
    finished: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a run directory, `report` takes the newest in TORCHLENS_PERF_DIR."""
    monkeypatch.setenv("TORCHLENS_PERF_DIR", str(finished.path.parent))
    assert main(["report", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["id"] == finished.run_id


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "/nowhere"], "/nowhere is not a run directory"),
        (["sidecar", "/nowhere"], "/nowhere is not a run directory"),
        (["run"], "a script is needed"),
        (["run", "-m"], "a script is needed"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A user's mistake is exit code 2 and one line on stderr that says what is wrong."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()

    assert out == ""
    assert err.startswith(f"torchlens-perf: {message}")
    assert err.count("\n") == 1


def test_no_run_here(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`report` in a folder without runs says so."""
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2
    assert "no run directory in torchlens-perf" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 99}', '{"schema": 1, "host": 3}', "\x00\x01"])
def test_damaged_state_is_named(finished: RunDirectory, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A state file that was damaged is one line and exit code 2, never a traceback."""
    finished.node_state(HOST).write_text(text)
    assert main(["report", str(finished.path)]) == 2
    err = capsys.readouterr().err

    assert err.startswith(f"torchlens-perf: {finished.node_state(HOST)}")
    assert err.count("\n") == 1


def test_reader_that_stops_early(finished: RunDirectory) -> None:
    """`report | head` ends quietly when nobody reads on."""
    command = f"{sys.executable} -m torchlens_perf report {finished.path} --json | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)

    assert (done.stdout, done.stderr, done.returncode) == ("{\n", "", 0)


def test_replay_by_command(finished: RunDirectory) -> None:
    """`sidecar` on a finished run replays it, and says what it did and that nothing was sent without an endpoint."""
    command = [sys.executable, "-m", "torchlens_perf", "sidecar", str(finished.path), "--host", HOST]
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "replayed 50 steps, 200 records; no OTLP endpoint is configured, so nothing was sent\n"


def test_help_needs_no_torch() -> None:
    """The command line answers without importing torch."""
    program = (
        "import contextlib, sys; from torchlens_perf.commands.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.stdout.startswith("usage: torchlens-perf")
    assert done.stdout.endswith("False\n")
