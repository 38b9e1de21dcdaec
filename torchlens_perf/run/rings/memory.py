"""Memory of a ring: a store into it must neither fail nor wait for a disk.

A process that stores into a mapped file gets SIGBUS if the file system has no room for the page or
has lost its disk. In shared memory (tmpfs) the pages are allocated when the file is made. If it has
no room, or is not a tmpfs, the ring is in anonymous memory (memfd_create(2)), a tmpfs without a
size limit. The ring's path is then a link to the descriptor in the process that made it. The
sidecar opens it on registration, which keeps the memory when the process is killed.

Both count as memory of the process's control group. At its limit the kernel frees other memory, or
kills a process, as for any allocation. That can happen when the ring is made, never at a store.

Imports almost nothing, for a fast start of the sidecar (sidecar/start/wait.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Collection

# Values of statfs(2). ext2, ext3 and ext4 have the same one.
TMPFS, EXT = 0x01021994, 0xEF53
IN_MEMORY = frozenset({TMPFS})
WITHOUT_SIGBUS = frozenset({TMPFS, EXT})
"""File systems on which stores into reserved blocks succeeded even when the disk was full or had
been lost.
"""
_HELD = ".held"
# MFD_NOEXEC_SEAL, which a machine may require. Kernels before 6.3 do not support it.
_NO_EXECUTION = 8
_POLL_INTERVAL_S = 0.005


def is_on_file_system(folder: str | os.PathLike[str], kinds: Collection[int]) -> bool:
    """Return True if the folder is on one of these file systems.

    An overlay never matches, whatever is below it.
    """
    import ctypes

    # struct statfs begins with the type.
    found = (ctypes.c_long * 64)()
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(folder), ctypes.byref(found)):
        return False
    return int(found[0]) in kinds


def reserve_file(path: str | os.PathLike[str], size: int) -> mmap.mmap:
    """Make a file, mode 0600, with all of its blocks allocated, and map it.

    Raise OSError; no file is left then.

    A shared flock(2) on it lasts as long as a process has it mapped, see is_mapped().
    """
    descriptor = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        os.posix_fallocate(descriptor, 0, size)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return mmap.mmap(descriptor, size)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def reserve_anonymous(path: str, size: int) -> tuple[mmap.mmap, int]:
    """Map anonymous memory, with a link at `path`.

    Return the map and the descriptor, which the caller closes.
    """
    descriptor = _create_memfd(_ring_name(path))
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        place = f"/proc/{os.getpid()}/fd/{descriptor}"
        # This raises an error if /proc is not usable.
        os.stat(place)
        mapped = mmap.mmap(descriptor, size)
        os.symlink(place, path)
    except BaseException:
        os.close(descriptor)
        raise
    return mapped, descriptor


def _create_memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _NO_EXECUTION)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def open_to_read(path: str) -> int:
    """Open a ring in a file or in anonymous memory.

    Raise OSError: FileNotFoundError if its last process has ended.
    """
    try:
        # A FIFO is too short to be a ring.
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    for link in (path, _held_link_path(path)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            place = os.readlink(link)
            # Another process may have this pid by now, with another file at the descriptor.
            if (
                place.startswith("/proc/")
                and os.readlink(place) == f"/memfd:{_ring_name(path)} (deleted)"
            ):
                return os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    raise FileNotFoundError(errno.ENOENT, "it was in the memory of a process that has ended", path)


def announce_open_ring(path: str, descriptor: int) -> None:
    """Announce that this process has a ring in anonymous memory open. descriptor: must stay
    open.
    """
    if os.path.islink(path):
        partial = f"{_held_link_path(path)}-{os.getpid()}"
        with contextlib.suppress(OSError):
            os.symlink(f"/proc/{os.getpid()}/fd/{descriptor}", partial)
            os.replace(partial, _held_link_path(path))


def wait_until_opened_elsewhere(path: str, descriptor: int, timeout_s: float) -> bool:
    """Wait until another process has the ring open, or has drained it.

    Return False after `timeout_s`.

    descriptor: this process's.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(_held_link_path(path)), os.fstat(descriptor)):
                return True
        if not os.path.lexists(path):
            # The sidecar has read the ring to its end and removed it.
            return True
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_INTERVAL_S)


def remove_ring_paths(path: str) -> None:
    """Remove a ring's file or link, and its mark of being held.

    Raise OSError, except for missing files.
    """
    for each in (path, _held_link_path(path)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(each)


def is_mapped(path: str) -> bool:
    """Return True if a ring file's maker, or its child, still has it mapped, in any container."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _held_link_path(path: str) -> str:
    return path.removesuffix(".ring") + _HELD


def _ring_name(path: str) -> str:
    return os.path.basename(path).removesuffix(".ring")
