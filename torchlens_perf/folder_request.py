"""Folders on a disk that may not answer, asked for from the training process: a child makes them, and may hang for it.

The child is make_folders.py, some 15 ms of an interpreter without packages. It costs no more where all is well, and
nothing else bounds a call to a network disk whose server is gone: it sleeps in the kernel, and no signal ends it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torchlens_perf import make_folders
from torchlens_perf.errors import RunStoreError

MADE = "made"
_LOOK_EVERY_S = 0.001
_hanging: list[subprocess.Popen[bytes]] = []  # killed, and dead once their disk answers


class FolderRequest:
    """Asks at once; answer() tells. One thread."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """folders: absolute; they must be writable, and are made where they are missing, with their parents.

        Raises RunStoreError where no process can be started.
        """
        self._text = b""
        self._process: subprocess.Popen[bytes] | None = _child([str(folder) for folder in folders])
        _hanging[:] = [process for process in _hanging if process.poll() is None]
        assert self._process.stdout is not None
        self._answers = self._process.stdout
        os.set_blocking(self._answers.fileno(), False)

    def answer(self, timeout_s: float) -> str:
        """MADE, or why not, in the system's words; "" if nothing is known after this time."""
        deadline_s = time.monotonic() + timeout_s
        while self._process is not None and not self._is_over():
            if time.monotonic() > deadline_s:
                break
            time.sleep(_LOOK_EVERY_S)
        self.close()
        return self._text.decode(errors="replace").strip()

    def close(self) -> None:
        """Forgets it. Again is harmless."""
        process, self._process = self._process, None
        if process is None:
            return
        self._answers.close()
        process.kill()
        if self._text.endswith(b"\n"):
            process.wait()
        else:
            _hanging.append(process)

    def _is_over(self) -> bool:
        chunk = self._answers.read()
        self._text += chunk or b""
        return chunk == b"" or self._text.endswith(b"\n")


def _child(folders: list[str]) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise RunStoreError("no process can be started: Python does not know its own program (sys.executable is empty)")
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", make_folders.__file__, *folders],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            cwd="/",
        )
    except OSError as error:
        raise RunStoreError(f"no process can be started: {error.strerror or error}") from error


def answers(folder: Path, timeout_s: float) -> str:
    """Whether a folder can be written now: MADE, or why not, or "". Raises RunStoreError."""
    return FolderRequest([folder]).answer(timeout_s)
