"""Create folders in a child process of the training process, because a disk may not respond.

The child runs run/make_folders.py, which takes about 15 ms. A call to a network disk without a
server sleeps in the kernel, where no signal ends it. Only another process can limit the wait.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from torchlens_perf.errors import RunStoreError
from torchlens_perf.interruption import ours, suppress
from torchlens_perf.run import children, make_folders

MADE = "made"
_END_TIMEOUT_S = 0.1
_unended: list[subprocess.Popen[bytes]] = []


class FolderRequest:
    """Request to create folders. The constructor sends the request.

    Folders are removed again unless keep_folders() is called. Not thread-safe.
    """

    def __init__(self, folders: Sequence[Path], *, shared: bool = False) -> None:
        """Start the child process. Raise RunStoreError if the process cannot be started.

        folders: absolute paths that must be writable. Missing folders are created.
        shared: True to let the user's group read new folders.
        """
        self._text = b""
        _unended[:] = [process for process in _unended if process.poll() is None]
        access = make_folders.SHARED if shared else make_folders.PRIVATE
        command = children.build_script_command(make_folders.__file__, access, *map(str, folders))
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = children.start_child(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        except ours(OSError) as error:
            raise RunStoreError(f"no process can be started: {error.strerror or error}") from error

    def wait_for_answer(self, timeout_s: float) -> str:
        """Return MADE, the system's error message, or "" if the child did not answer in time."""
        deadline_s = time.monotonic() + timeout_s
        if self._process is not None and self._process.stdout is not None and not self._text:
            descriptor, ended = self._process.stdout.fileno(), False
            ready = select.poll()
            ready.register(descriptor, select.POLLIN)
            while not ended and ready.poll(max(0.0, 1000 * (deadline_s - time.monotonic()))):
                chunk = os.read(descriptor, 4096)
                self._text += chunk
                ended = not chunk or chunk.endswith(b"\n")
        return self._text.decode(errors="replace").strip()

    def keep_folders(self) -> None:
        """Keep the folders that were created."""
        process = self._process
        if process is None or process.stdin is None:
            return
        if not self._text:
            # The child hangs or has not started. Some folders may exist.
            process.kill()
        elif process.poll() is None:  # A write to an ended child may raise SIGPIPE, so check first.
            with suppress(OSError):
                process.stdin.write(make_folders.KEEP)
        self.close()

    def close(self) -> None:
        """Remove created folders unless keep_folders() was called, and cancel the request.

        Further calls do nothing.
        """
        process, self._process = self._process, None
        if process is None or process.stdin is None or process.stdout is None:
            return
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(_END_TIMEOUT_S if self._text else 0)
        except subprocess.TimeoutExpired:
            _unended.append(process)


def find_folder_problem(folder: Path, timeout_s: float = 1.0, *, shared: bool = False) -> str:
    """Create a missing folder. Return why the folder is not writable, or "". Raises
    RunStoreError."""
    request = FolderRequest([folder], shared=shared)
    answer = request.wait_for_answer(timeout_s)
    request.keep_folders()
    return "" if answer == MADE else answer or f"its disk did not answer within {timeout_s:g} s"
