"""The lock that a node's sidecar holds while it lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from torchlens_perf.run import sidecar_status

_MAX_TRIES = 5


class SidecarLock:
    """flock(2) on a file.

    A killed process loses it, and a child can inherit it with the descriptor.

    The last holder removes the file. A process that gets the lock must check that the path still
    leads to the locked file.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        """descriptor: of the file, opened and locked by the process that started this one."""
        self.path = path
        self._descriptor = descriptor

    @property
    def descriptor(self) -> int:
        """Descriptor of the open file. Raise ValueError once it is closed."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is not open")
        return self._descriptor

    def acquire(self) -> bool:
        """Take the lock if it is free.

        Return True on success. Raise OSError if the file cannot be made.
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
        """Open the file. Make it and its folders again if the last holder has just removed them."""
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

    def restore(self) -> bool:
        """Recreate the file if a cleaner of shared memory has removed it.

        Return False if another process has the lock now.

        Call it only while holding the lock. Without the file, another sidecar could start at any
        time. If no file can be made, nothing changes.
        """
        if self._is_current():
            return True
        anew = SidecarLock(self.path)
        try:
            if not anew.acquire():
                return False
        except OSError:
            return True
        status = os.pread(self.descriptor, sidecar_status.BYTES, 0)
        self.close()
        self._descriptor = anew.descriptor
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, status, 0)
        return True

    def write_status(self, doing: str) -> None:
        """Write to the file what this sidecar is doing, see sidecar_status.py."""
        sidecar_status.write_status(self.descriptor, doing)

    def close(self) -> None:
        """Release the lock, unless a child has inherited it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Remove the file, and its folder if it is empty then, and release the lock.

        Do nothing without the lock.
        """
        if self._descriptor is None:
            return
        # If the file is not current, a cleaner has removed it and another sidecar has made a new
        # one.
        if self._is_current():
            self.path.unlink(missing_ok=True)
        self.close()
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False


def is_lock_held(path: Path) -> bool:
    """Return True if a process in any container holds a sidecar's lock. Raise OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
