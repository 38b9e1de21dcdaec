"""Folders on a disk that may not answer, asked for from the training process: a child makes them, and may hang for it.

The child is run/make_folders.py, some 15 ms of an interpreter without packages. It costs no more where all is well, and
nothing else bounds a call to a network disk whose server is gone: it sleeps in the kernel, and no signal ends it.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from torchlens_perf.errors import RunStoreError
from torchlens_perf.run import children, make_folders

MADE = "made"
_END_TIMEOUT_S = 0.1  # of a child that has answered
_unended: list[subprocess.Popen[bytes]] = []


class FolderRequest:
    """Asks at once; answer() tells. Whatever is not kept is taken away again. One thread."""

    def __init__(self, folders: Sequence[Path], *, shared: bool = False) -> None:
        """folders: absolute; they must be writable, and are made where they are missing, with their parents.

        shared: what is made can be read by its group.

        Raises RunStoreError where no process can be started.
        """
        self._text = b""
        _unended[:] = [process for process in _unended if process.poll() is None]
        access = make_folders.SHARED if shared else make_folders.PRIVATE
        command = children.script(make_folders.__file__, access, *map(str, folders))
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = children.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        except OSError as error:
            raise RunStoreError(f"no process can be started: {error.strerror or error}") from error

    def answer(self, timeout_s: float) -> str:
        """MADE, or why not, in the system's words; "" if nothing is known after this time."""
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

    def keep(self) -> None:
        """What was made stays."""
        process = self._process
        if process is None or process.stdin is None:
            return
        if not self._text:
            process.kill()  # it hangs, or has not begun; it may have made some of them
        elif process.poll() is None:  # it waits for this word: to write to one that is gone may be a deadly signal
            with contextlib.suppress(OSError):
                process.stdin.write(make_folders.KEEP)
        self.close()

    def close(self) -> None:
        """What was made, or will be, is taken away, unless it was kept. Again is harmless."""
        process, self._process = self._process, None
        if process is None or process.stdin is None or process.stdout is None:
            return
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(_END_TIMEOUT_S if self._text else 0)
        except subprocess.TimeoutExpired:
            _unended.append(process)


def problem_with(folder: Path, timeout_s: float = 1.0, *, shared: bool = False) -> str:
    """Why a folder cannot be written just now, also after having been made; "" if it can. Raises RunStoreError."""
    request = FolderRequest([folder], shared=shared)
    answer = request.answer(timeout_s)
    request.keep()
    return "" if answer == MADE else answer or f"its disk did not answer within {timeout_s:g} s"
