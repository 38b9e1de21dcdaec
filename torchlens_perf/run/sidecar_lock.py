"""The lock that a node's sidecar owns while it is running."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from torchlens_perf.interruption import ours, suppress
from torchlens_perf.run import sidecar_status
from torchlens_perf.run.rings import memory

_MAX_TRIES = 5


class SidecarLock:
    """Lock of a node's sidecar, by flock(2) on a file.

    The kernel releases the lock of a killed process. A child can inherit the lock with the
    descriptor. The last owner removes the file. A process that acquires the lock must therefore
    check that the path still refers to the locked file.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        """descriptor: the file's descriptor if the parent process has opened and locked the file."""
        self.path = path
        self._descriptor = descriptor

    @property
    def descriptor(self) -> int:
        """Descriptor of the open file. Raise ValueError if the file is not open."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is not open")
        return self._descriptor

    def acquire(self) -> bool:
        """Acquire the lock if no process owns it, and return True on success.

        Raise OSError if the file cannot be created.
        """
        while True:
            if self._descriptor is None:
                self._descriptor = self._open()
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                current = self._is_current()
            except BlockingIOError:
                self.close()
                return False
            except BaseException:
                self.close()
                raise
            if current:
                return True
            self.close()

    def _open(self) -> int:
        """Open the file. Create the file and its folders if they are missing."""
        for tries_left in reversed(range(_MAX_TRIES)):
            for folder in (self.path.parent.parent, self.path.parent):
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    os.mkdir(folder, 0o700)
            try:
                return os.open(
                    self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
            except FileNotFoundError:
                if not tries_left:
                    raise
        raise AssertionError

    def restore_file(self) -> bool:
        """Recreate the file if a clean-up tool has removed it from shared memory.

        Only the owner of the lock may call this method. Without the file, another sidecar could
        start. If the file cannot be created, nothing changes. Return False if another process owns
        the lock now.
        """
        if self._is_current():
            return True
        anew = SidecarLock(self.path)
        try:
            if not anew.acquire():
                return False
        except ours(OSError):
            return True
        status = os.pread(self.descriptor, sidecar_status.BYTES, 0)
        self.close()
        self._descriptor = anew.descriptor
        with suppress(OSError):
            os.pwrite(self._descriptor, status, 0)
        return True

    def write_status(self, doing: str) -> None:
        """Write this sidecar's current activity to the lock file, see sidecar_status.py."""
        sidecar_status.write_status(self.descriptor, doing)

    def close(self) -> None:
        """Close the file. This releases the lock, unless a child has inherited the descriptor."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Remove the file and its folder, if the folder is empty, and release the lock.

        Do nothing if this process does not own the lock.
        """
        if self._descriptor is None:
            return
        # Keep a file that another sidecar has created after this sidecar's file was removed.
        if self._is_current():
            self.path.unlink(missing_ok=True)
        self.close()
        with suppress(OSError):
            self.path.parent.rmdir()

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False


def is_lock_held(path: Path) -> bool:
    """Return True if a process in any container owns the lock at `path`. Raise OSError."""
    return memory.is_locked(path, fcntl.LOCK_SH)
