"""Server programs on loopback: start one, wait until it is ready, and stop it with all its children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
_LONGEST_S = 900
"""Longest life of a server, in case that the test process is killed."""
_OF_OTHERS = ("TORCHLENS", "OTEL_", "DD_", "MLFLOW_", "PHOENIX_", "ROTEL_", "PYTHON")
"""Prefixes of variables that configure a server and that it must not inherit."""


class Server:
    """A running server program. It ends with close() or with its context."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        is_ready: Callable[[], object],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the program in `folder`, and wait until `is_ready` returns True.

        An OSError of `is_ready` means that the server is not ready. `environment` has additional
        variables. The log is written into `folder`.
        """
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(_OF_OTHERS)
        }
        self.log = folder / f"{Path(command[0]).name}.log"
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                ["timeout", str(_LONGEST_S), *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder,
                env={**inherited, **(environment or {})}, start_new_session=True,
            )  # fmt: skip
        try:
            wait_for(lambda: self._process.poll() is not None or _quietly(is_ready), 120)
            assert _quietly(is_ready), self.log.read_text(errors="replace")[-4000:]
            assert self._process.poll() is None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the server and all its children. A second call has no effect."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            if not _signalled(self._process.pid, how):
                break
            wait_for(self._has_ended, 10)
        self._process.wait(5)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _has_ended(self) -> bool:
        self._process.poll()
        return not _signalled(self._process.pid, 0)


def free_port() -> int:
    """Return a free TCP port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def accepts(port: int) -> bool:
    """Return True if the port of the loopback interface accepts connections.

    Raises OSError otherwise.
    """
    socket.create_connection(("127.0.0.1", port), timeout=1).close()
    return True


def wait_for(found: Callable[[], _T], timeout_s: float) -> _T:
    """Poll until the result is true or the timeout has passed. Return the last result."""
    deadline_s = time.monotonic() + timeout_s
    while not (answer := found()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return answer


def _signalled(group: int, how: int) -> bool:
    try:
        os.killpg(group, how)
    except ProcessLookupError:
        return False
    return True


def _quietly(is_ready: Callable[[], object]) -> bool:
    try:
        return bool(is_ready())
    except OSError:
        return False
