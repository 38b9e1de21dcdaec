"""The progress line of long commands on a terminal and elsewhere, Ctrl-C, and --quiet."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import os
import pty
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.endpoints import silent
from tests.support.processes import ROOT
from tests.support.ranks import HOST, Rank, read_to_end, run_without_traces
from torchlens_perf.commands import doctor, tap_build
from torchlens_perf.commands.cli import _build_parser, main
from torchlens_perf.commands.doctor import LIMITED, OK, Check
from torchlens_perf.commands.progress import Progress
from torchlens_perf.report.run_report import load_report_and_states
from torchlens_perf.run.directory import find_sidecar_lock
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.sidecar.replay import replay

WORK = """
import sys
from torchlens_perf.commands.progress import Progress
with Progress("reading [bold] names", quiet="quiet" in sys.argv, after_s=0.0) as progress:
    progress(1, 4)
    if progress._timer is not None:
        progress._timer.join()  # it is shown by now
    print("asked for", flush=True)
    sys.stdin.readline()  # until the parent has seen it
print("at the end")
"""
MANY_STEPS = ["-m", "torchlens_perf", "simulate", "--ranks", "16", "--steps", "100000000"]


class Terminal:
    """A process whose stderr is a terminal and whose stdout is a pipe."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._screen, terminal = pty.openpty()
        self.shown, self._text = "", codecs.getincrementaldecoder("utf-8")(errors="replace")
        environment = {
            **os.environ,
            **environment,
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm",
            "COLUMNS": "80",
        }
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=terminal,
            text=True, env=environment,
        )  # fmt: skip
        os.close(terminal)

    def read_until(self, text: str) -> None:
        """Read the terminal until a text appears.

        Raises EOFError if the process ends before the text appears.
        """
        while text not in self.shown:
            self._read()

    def _read(self) -> None:
        try:
            piece = os.read(self._screen, 1 << 16)
        except OSError:  # Linux raises EIO when no process has the terminal open.
            piece = b""
        if not piece:
            raise EOFError(self.shown)
        self.shown += self._text.decode(piece)  # A character may be split between two reads.

    def end(self) -> str:
        """Let the process finish and return its stdout.

        The terminal is read until the process ends, so the process cannot block while it writes.
        """
        with ThreadPoolExecutor(1) as pool:
            at_end = pool.submit(self.process.communicate, "\n")
            try:
                while True:
                    self._read()
            except EOFError:
                os.close(self._screen)
            return at_end.result()[0]

    @property
    def left(self) -> str:
        """Return the text on the screen after the last line was erased."""
        return self.shown.rpartition("\x1b[2K")[2].strip()


def test_progress_line_is_shown_on_a_terminal_and_erased_at_the_end() -> None:
    """The line is not part of stdout."""
    terminal = Terminal("-c", WORK)
    terminal.read_until("25%")
    out = terminal.end()

    assert "reading [bold] names" in terminal.shown
    assert terminal.left == ""
    assert "\x1b[?25l" not in terminal.shown, "the cursor is hidden, which a SIGKILL would leave so"
    assert out == "asked for\nat the end\n"


def test_quiet_command_shows_no_progress() -> None:
    terminal = Terminal("-c", WORK, "quiet")

    assert terminal.end() == "asked for\nat the end\n"
    assert terminal.shown == ""


@pytest.mark.parametrize("colors", ["", "1"])
def test_no_progress_is_shown_without_a_terminal(colors: str) -> None:
    """Forced colours, as in the log of a CI job, make no difference."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FORCE_COLOR": colors}
    done = subprocess.run(
        [sys.executable, "-c", WORK],
        input="\n",
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )

    assert (done.stdout, done.stderr) == ("asked for\nat the end\n", "")


@pytest.mark.parametrize("files", [False, True])
def test_ctrl_c_exits_with_130_and_one_line(files: bool, tmp_path: Path) -> None:
    """A long command shows its progress before Ctrl-C.

    Afterwards nothing is left in shared memory.
    """
    run_id = f"simulated-{uuid.uuid4().hex[:12]}"
    terminal = Terminal(*MANY_STEPS, *(["--out", str(tmp_path / run_id)] if files else ["--rows"]))
    terminal.read_until("simulating")
    terminal.process.send_signal(signal.SIGINT)

    assert terminal.end() == ""
    assert terminal.process.returncode == 130
    assert terminal.left == "torchlens-perf: interrupted"
    assert find_sidecar_lock(run_id) is None
    assert (tmp_path / run_id / "nodes").exists() is files


def test_ctrl_c_that_is_swallowed_is_raised_again() -> None:
    """The exception may get lost in C code that imports a module, or in a callback."""
    before = signal.getsignal(signal.SIGINT)
    with Progress("working") as progress:
        progress(1)
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            progress(2)

    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[str]:
    """Return a small run directory."""
    with run_without_traces(tmp_path) as run:
        rank = Rank(run, 0, 1)
        rank.steps(50, forward=4, backward=6)
        rank.close()
        read_to_end(run)
        yield str(run.path)


def test_ctrl_c_ends_a_replay_to_a_silent_endpoint_at_once(run_dir: str) -> None:
    """Nothing is left in shared memory."""
    with silent() as address:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "TORCHLENS_PERF_TRACE_EVERY": "1"}
        terminal = Terminal(
            "-m", "torchlens_perf", "sidecar", run_dir, "--host", HOST, **environment
        )
        terminal.read_until("replaying the run")
        terminal.process.send_signal(signal.SIGINT)

        assert terminal.end() == ""
    assert terminal.process.returncode == 130
    assert terminal.left == "torchlens-perf: interrupted"
    assert find_sidecar_lock(Path(run_dir).name) is None


def test_replay_does_not_import_pandas(run_dir: str, tmp_path: Path) -> None:
    """pyarrow would import pandas for its first array, and Ctrl-C during that import would be
    lost.
    """
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "pandas.py").write_text("import os; os._exit(7)")
    done = subprocess.run(
        [sys.executable, "-m", "torchlens_perf", "sidecar", run_dir, "--host", HOST], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'modules'}{os.pathsep}{ROOT}"}, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("replayed 50 steps")


def test_progress_counts_segments_of_a_replay_and_node_files_of_a_report(tmp_path: Path) -> None:
    """A damaged segment is counted too."""
    with run_without_traces(tmp_path) as run:
        rank = Rank(run, 0, 1)
        sidecar = Sidecar(run, HOST, None, lambda run, asked: None)
        for _ in range(3):
            rank.steps(20, forward=4, backward=6)
            sidecar.read_rings()
            sidecar.count_records()
            sidecar.save_records()
        rank.close()
        sidecar.read_rings()
        sidecar.count_records()
        sidecar.save_records()
        sidecar.close()
        first = sorted(run.spans.iterdir())[0]
        first.write_bytes(b"damaged")
        calls: list[tuple[int, int]] = []
        replay(run, None, advanced=lambda *call: calls.append(call))
        count = len(list(run.spans.iterdir()))
        assert calls == [(place + 1, count) for place in range(count)]
        assert count >= 3
        calls.clear()
        load_report_and_states(run, lambda *call: calls.append(call))
        assert calls == [(1, 1)]


def test_quiet_report_prints_only_the_report(
    run_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", run_dir, "--quiet"]) == 0
    assert "50 steps" in capsys.readouterr().out


def test_quiet_replay_prints_errors_only(run_dir: str) -> None:
    command = [sys.executable, "-m", "torchlens_perf", "sidecar", "--quiet", "--host", HOST]
    done = subprocess.run([*command, run_dir], capture_output=True, text=True)
    failed = subprocess.run([*command, "/nowhere"], capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == "torchlens-perf: there is no directory /nowhere\n"


_LOGS = """
import contextlib, logging, sys
from pathlib import Path
from torchlens_perf.sidecar.start.process import read_or_replay
read_or_replay(Path(sys.argv[1]), sys.argv[2], quiet=len(sys.argv) > 3)
logger = logging.getLogger("torchlens_perf.sidecar")
logger.info("what goes on")
logger.warning("what went wrong")
"""


def test_quiet_sidecar_logs_problems_only(run_dir: str) -> None:
    """A sidecar that a user starts logs to stderr."""
    command = [sys.executable, "-c", _LOGS, run_dir, HOST]
    usual, quiet = (
        subprocess.run([*command, *more], capture_output=True, text=True)
        for more in ([], ["quiet"])
    )

    assert "INFO what goes on" in usual.stderr
    assert "what goes on" not in quiet.stderr
    assert "WARNING what went wrong" in quiet.stderr


def test_quiet_doctor_omits_passed_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check(OK, "recorder", "native"), Check(LIMITED, "tap", "missing", "build it")]
    monkeypatch.setattr(doctor, "run_checks", lambda: iter(checks))
    assert main(["doctor", "--quiet"]) == 0
    assert capsys.readouterr().out == "limited tap: missing; build it\n"
    assert main(["doctor", "--verbose"]) == 0
    assert capsys.readouterr().out == "ok      recorder: native\nlimited tap: missing; build it\n"


def test_quiet_build_prints_nothing_on_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tap_build, "build_tap", lambda: Path("/there/tap.so"))
    assert (main(["build-tap", "--quiet"]), capsys.readouterr().out) == (0, "")
    assert (main(["build-tap"]), capsys.readouterr().out) == (0, "/there/tap.so\n")


@pytest.mark.parametrize("wanted", ["1", "0"])
def test_quiet_run_prints_no_report_and_no_note(wanted: str, tmp_path: Path) -> None:
    """A report is printed only if the user asks for one. No note is printed if recording is off."""
    (tmp_path / "train.py").write_text("import os; print(os.environ.get('TORCHLENS_PERF_REPORT'))")
    command = [sys.executable, "-m", "torchlens_perf", "run", "--quiet", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHLENS_PERF": wanted}
    del environment["TORCHLENS_PERF_REPORT"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("quiet\n", "")
    environment["TORCHLENS_PERF_REPORT"] = "text"
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("text\n", "")


def test_every_command_accepts_quiet() -> None:
    (commands,) = [
        action
        for action in _build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    assert len(commands.choices) >= 7
    assert [
        name for name, each in commands.choices.items() if "--quiet" not in each.format_help()
    ] == []
