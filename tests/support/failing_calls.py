"""System calls that fail or block forever on demand: failing_calls.c, loaded with LD_PRELOAD."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
EACH = -1


@cache
def library() -> Path:
    """Compile the library once per process."""
    folder = tempfile.mkdtemp(prefix="failing-calls-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    built = Path(folder) / "failing_calls.so"
    subprocess.run(
        ["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", built, SOURCE, "-ldl"],
        check=True,
    )
    return built


class FailingCalls:
    """Makes a system call fail in a process that was started with the library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
        self._library.counted.restype = ctypes.c_long
        self._library.disarm.restype = ctypes.c_long
        self._library.failed_call.restype = ctypes.c_char_p

    def arm(self, paths: Sequence[str], nth: int, error: int) -> None:
        """Make the nth call fail. `paths` are prefixes of paths, or "*", "fork", "getcwd" or
        "gethostname".

        `nth` counts from 1. With 0 no call fails, and with EACH all calls fail.
        """
        self._library.arm(":".join(paths).encode(), nth, error)

    def counted(self) -> int:
        """Return the number of calls since arm()."""
        return self._library.counted()

    def disarm(self) -> tuple[int, str]:
        """Stop the failures. Return the number of calls and the name of the failed call."""
        return self._library.disarm(), self._library.failed_call().decode()


@contextlib.contextmanager
def kill_all_at_end(mark: str) -> Iterator[None]:
    """At the end, kill every process with this text in its environment. Blocked ones never end."""
    try:
        yield
    finally:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark.encode() in (entry / "environ").read_bytes():
                        os.kill(int(entry.name), signal.SIGKILL)
