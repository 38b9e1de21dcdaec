"""Create folders in another process than the training process, because a disk may not respond.

That process runs run/make_folders.py, which takes about 15 ms. A call to a network disk without a
server sleeps in the kernel, where no signal ends it. Only another process can limit the wait.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from pathlib import Path

from torchlens_perf.errors import RunStoreError
from torchlens_perf.interruption import ours, suppress
from torchlens_perf.output import wait_until_ready
from torchlens_perf.run import children, make_folders

MADE = "made"
_END_TIMEOUT_S = 0.1


class FolderRequest:
    """Request to create folders. The constructor sends the request.

    Folders are removed again unless keep_folders() is called. Not thread-safe.
    """

    def __init__(self, folders: Sequence[Path], *, shared: bool = False) -> None:
        """Start the other process. Raise RunStoreError if it cannot be started.

        folders: absolute paths that must be writable. Missing folders are created.
        shared: True to let the user's group read new folders.
        """
        self._text = b""
        access = make_folders.SHARED if shared else make_folders.PRIVATE
        command = children.build_script_command(make_folders.__file__, access, *map(str, folders))
        # Two pipes, each with its end to read and its end to write.
        self._pipes: list[int] = []
        started = False
        try:
            for _ in range(2):
                self._pipes += os.pipe()
            children.start_detached(command, stdin=self._pipes[0], stdout=self._pipes[3])
            started = True
        except ours(OSError) as error:
            raise RunStoreError(f"no process can be started: {error.strerror or error}") from error
        finally:
            if not started:
                self.close()
        for end in (3, 0):
            os.close(self._pipes.pop(end))

    def wait_for_answer(self, timeout_s: float) -> str:
        """Return MADE, the system's error message, or "" without an answer in time."""
        deadline_s, ended = time.monotonic() + timeout_s, bool(self._text) or not self._pipes
        while not ended and wait_until_ready(self._pipes[1], select.POLLIN, deadline_s):
            chunk = os.read(self._pipes[1], 4096)
            self._text += chunk
            ended = not chunk or chunk.endswith(b"\n")
        return self._text.decode(errors="replace").strip()

    def keep_folders(self) -> None:
        """Keep the folders that were created, or that a slow disk still creates."""
        # Without a reader, a write may raise SIGPIPE.
        if self._pipes and not wait_until_ready(self._pipes[0], select.POLLOUT, 0) & select.POLLERR:
            with suppress(OSError):
                os.write(self._pipes[0], make_folders.KEEP)
        self.close()

    def close(self) -> None:
        """Remove created folders unless keep_folders() was called, and cancel the request.

        Further calls do nothing.
        """
        pipes, self._pipes = self._pipes, []
        for each in pipes:
            if self._text and each == pipes[-1]:
                # The other process closes its end when it has removed its folders.
                wait_until_ready(each, select.POLLIN, time.monotonic() + _END_TIMEOUT_S)
            os.close(each)


def find_folder_problem(folder: Path, timeout_s: float = 1.0, *, shared: bool = False) -> str:
    """Create a missing folder. Return why the folder is not writable, or "". Raises
    RunStoreError."""
    request = FolderRequest([folder], shared=shared)
    answer = request.wait_for_answer(timeout_s)
    request.keep_folders()
    return "" if answer == MADE else answer or f"its disk did not answer within {timeout_s:g} s"
