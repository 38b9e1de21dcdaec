"""Sleep until a file appears in a folder, a signal arrives, or a time is over.

A rank that ends waits for its report. The sidecar must notice its request at once, but each check
of the folder takes CPU time from a job that keeps all CPUs busy. Here the kernel reports new files
by a signal (F_NOTIFY of fcntl(2)), which writes a byte into a pipe.

This module has few imports, because start/wait.py uses it in the sidecar's first seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import time

from torchlens_perf.sidecar.stops import SleepObserver

# A process ignores this signal by default. A signal that arrives in the middle of an exec is
# therefore harmless.
_SIGNAL = signal.SIGURG
_EVENTS = fcntl.DN_CREATE | fcntl.DN_RENAME | fcntl.DN_MULTISHOT
# Interval of checks where the kernel reports no new files.
_CHECK_INTERVAL_S = 0.05


class Wake:
    """A sleep that new files and signals end. install() needs the main thread; one thread sleeps."""

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._folders: dict[str, int | None] = {}
        self.observer = SleepObserver()

    def install(self) -> None:
        """Let every signal with a handler end the sleep. Call it on the main thread."""
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(_SIGNAL, _ignore)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)

    def watch_folder(self, folder: str) -> None:
        """Let new files in a folder end the sleep. Later calls for the same folder do nothing."""
        if self._pipe is None or folder in self._folders:
            return
        self._folders[folder] = None
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.fcntl(descriptor, fcntl.F_SETSIG, _SIGNAL)
                fcntl.fcntl(descriptor, fcntl.F_NOTIFY, _EVENTS)
            except BaseException:
                os.close(descriptor)
                raise
            self._folders[folder] = descriptor

    @property
    def reports_files(self) -> bool:
        """True if new files in all watched folders end the sleep."""
        return bool(self._folders) and None not in self._folders.values()

    def sleep(self, duration_s: float) -> bool:
        """Sleep for at most `duration_s`. Return True if an event has ended the sleep."""
        if self._pipe is None:
            time.sleep(duration_s)
            return False
        self.observer.begin()
        readable, _, _ = select.select([self._pipe[0]], [], [], duration_s)
        self.observer.end(duration_s)
        if readable:
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe[0], 4096)
        return bool(readable)


def _ignore(number: int, frame: object) -> None:
    """Do nothing: the signal has written its byte already."""
