"""How far a long command is, on a real terminal and elsewhere; and Ctrl-C."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest

from tests.support.processes import ROOT

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
MANY_STEPS = ["-m", "torchlens_perf", "simulate", "--rows", "--ranks", "64", "--steps", "100000000"]


class Terminal:
    """A process whose stderr is a terminal. Its stdout is a pipe."""

    def __init__(self, *arguments: str) -> None:
        self._screen, terminal = pty.openpty()
        self.shown = ""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=terminal,
            text=True, env=environment,
        )  # fmt: skip
        os.close(terminal)

    def read_until(self, text: str) -> None:
        """Raises EOFError if that never comes."""
        while text not in self.shown:
            self._read()

    def _read(self) -> None:
        try:
            piece = os.read(self._screen, 1 << 16)
        except OSError:  # as Linux says that nobody has the terminal any more
            piece = b""
        if not piece:
            raise EOFError(self.shown)
        self.shown += piece.decode()

    def end(self) -> str:
        """Lets it go on, and returns its stdout."""
        out, _ = self.process.communicate("\n")
        try:
            while True:
                self._read()
        except EOFError:
            os.close(self._screen)
        return out

    @property
    def left(self) -> str:
        """What stays on the screen of what was written since the last line was erased."""
        return self.shown.rpartition("\x1b[2K")[2].strip()


def test_shown_on_a_terminal_and_gone_at_the_end() -> None:
    """The line has its text as it is and how much is done; it leaves nothing, and stdout is not its."""
    terminal = Terminal("-c", WORK)
    terminal.read_until("25%")
    out = terminal.end()

    assert "reading [bold] names" in terminal.shown
    assert terminal.left == ""
    assert "\x1b[?25l" not in terminal.shown, "the cursor is hidden, which a SIGKILL would leave so"
    assert out == "asked for\nat the end\n"


def test_quiet_shows_nothing() -> None:
    terminal = Terminal("-c", WORK, "quiet")

    assert terminal.end() == "asked for\nat the end\n"
    assert terminal.shown == ""


@pytest.mark.parametrize("colors", ["", "1"])
def test_nothing_without_a_terminal(colors: str) -> None:
    """Nor where colours are asked for, as in a CI's log."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FORCE_COLOR": colors}
    done = subprocess.run(
        [sys.executable, "-c", WORK], input="\n", capture_output=True, text=True, env=environment, check=True
    )

    assert (done.stdout, done.stderr) == ("asked for\nat the end\n", "")


def test_ctrl_c_is_one_line() -> None:
    """A long command on a terminal shows how far it is; with Ctrl-C it ends with 130, and one line is left."""
    terminal = Terminal(*MANY_STEPS)
    terminal.read_until("simulating")
    terminal.process.send_signal(signal.SIGINT)

    assert terminal.end() == ""
    assert terminal.process.returncode == 130
    assert terminal.left == "torchlens-perf: interrupted"
