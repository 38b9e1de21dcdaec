"""A shell in tmux: a real terminal whose size and contents tests can read and change."""

from __future__ import annotations

import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.support.processes import ROOT, clean_environ

MISSING = "tmux is not installed: apt-get install --no-install-recommends tmux"
PROMPT = "prompt> "


class Tmux:
    """A shell that waits for commands inside the context.

    The shell and its programs end with the context. Each object has its own tmux server.
    """

    def __init__(
        self, columns: int = 80, lines: int = 24, environment: Mapping[str, str] | None = None
    ) -> None:
        if shutil.which("tmux") is None:
            pytest.skip(MISSING)
        self._socket = f"torchlens-perf-{uuid.uuid4().hex[:8]}"
        environ = clean_environ(
            {"PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8", **(environment or {})}
        )
        self._environ = {
            name: value for name, value in environ.items() if not name.startswith("TMUX")
        }
        self._size = str(columns), str(lines)

    def type(self, *keys: str) -> None:
        """Type keys by tmux's names (Enter, Escape, C-c), or text."""
        self._tmux("send-keys", "-t", "0", *keys)

    def resize(self, columns: int, lines: int) -> None:
        self._tmux("resize-window", "-t", "0", "-x", str(columns), "-y", str(lines))

    def lines(self, *, styled: bool = False) -> list[str]:
        """Return the lines on the screen, with escape sequences for colours if `styled`."""
        return (
            self._tmux("capture-pane", "-p", "-t", "0", *(["-e"] if styled else []))
            .rstrip("\n")
            .split("\n")
        )

    def sees(self, what: str | Callable[[list[str]], object], timeout_s: float = 60) -> list[str]:
        """Wait until a text is on the screen, ignoring repeated spaces.

        Raises AssertionError with the screen after a timeout.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            lines = self.lines()
            if what in " ".join(" ".join(lines).split()) if isinstance(what, str) else what(lines):
                return lines
            assert time.monotonic() < deadline_s, "\n".join(lines)
            time.sleep(0.05)

    def pid(self) -> int:
        """Return the pid of the shell's foreground program."""
        shell = self._tmux("list-panes", "-F", "#{pane_pid}").strip()
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", shell], capture_output=True, text=True
        ).stdout.split()
        return int(children[-1])

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-L", self._socket, "-f", "/dev/null", "-u", *arguments]
        done = subprocess.run(
            command, env=self._environ, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        return done.stdout

    def __enter__(self) -> Tmux:
        columns, lines = self._size
        self._tmux(
            "new-session", "-d", "-x", columns, "-y", lines, "exec bash --norc --noprofile -i"
        )
        try:
            self.sees(lambda lines: lines[-1].rstrip().endswith(("$", "#")))
            self.type(f"PS1='{PROMPT}'; clear", "Enter")
            self.sees(lambda lines: lines == [PROMPT.strip()])
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        socket = Path(self._tmux("display-message", "-p", "#{socket_path}").strip())
        self._tmux("kill-server")
        socket.unlink(missing_ok=True)
