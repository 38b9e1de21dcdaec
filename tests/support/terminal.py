"""A pseudo-terminal that runs a program and collects its output."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence

from tests.support.processes import ROOT, clean_environ


class OnTerminal:
    """A program that runs inside the context on a terminal of the given size."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        size: tuple[int, int] = (80, 24),
    ) -> None:
        self._master, slave = pty.openpty()
        columns, lines = size
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.modes = termios.tcgetattr(slave)
        self._slave = slave
        environ = {
            "TERM": "xterm-256color",
            "LC_ALL": "C.UTF-8",
            "PYTHONPATH": str(ROOT),
            **(environment or {}),
        }
        self.process = subprocess.Popen(
            list(command),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=clean_environ(environ),
            start_new_session=True,
        )
        self.written = b""

    def wait_for(self, what: str | Callable[[str], bool], timeout_s: float = 60) -> str:
        """Wait until a text is written, and return all output.

        Raises AssertionError with the output after a timeout.
        """
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            text = self.written.decode(errors="replace")
            if what in text if isinstance(what, str) else what(text):
                return text
            if not self._read(0.2) and self.process.poll() is not None:
                break
        text = self.written.decode(errors="replace")
        assert (what in text) if isinstance(what, str) else what(text), text[-3000:]
        return text

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def end(self, timeout_s: float = 60) -> int:
        """Read output until the program ends. Return the exit code."""
        deadline_s = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline_s:
            self._read(0.1)
        while self._read(0.1):
            pass
        return self.process.wait(0.1)

    def modes_now(self) -> list[object]:
        """Return the terminal's key modes.

        After a program has restored the modes, they equal `modes`.
        """
        return list(termios.tcgetattr(self._slave))

    def _read(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], timeout_s)
        if not ready:
            return False
        self.written += os.read(self._master, 65536)
        return True

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._slave)
        os.close(self._master)
