"""Where the bytes of a ring lie: in memory, so that a store into them neither fails nor waits for a disk.

A process that stores into a mapped file gets SIGBUS where the file system finds no room for the page, or has given up
its disk. In shared memory (tmpfs) the pages are taken when the file is made. Where that has no room, or is no tmpfs, a
ring lies in anonymous memory (memfd_create(2)), which is a tmpfs without a bound: in the ring's place is a link to the
descriptor of the process that made it. The sidecar opens that as soon as it is registered, and so keeps it when the
process is killed.

Both count as memory of the process's control group. At its limit the kernel frees other memory, or kills a process in
it, as for any other memory that a process takes: when the ring is made, never at a store.

Imports next to nothing: a sidecar's first seconds need it (sidecar/start/wait.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Collection

TMPFS, EXT = 0x01021994, 0xEF53  # statfs(2); ext2, ext3 and ext4 have the same
IN_MEMORY = frozenset({TMPFS})
WITHOUT_SIGBUS = frozenset({TMPFS, EXT})
"""Where a store into reserved blocks went well also when the disk was full, or was given up."""
_HELD = ".held"
_NO_EXECUTION = 8  # MFD_NOEXEC_SEAL, which a machine may demand; kernels before 6.3 do not know it
_POLL_INTERVAL_S = 0.005


def lies_on(folder: str | os.PathLike[str], kinds: Collection[int]) -> bool:
    """Whether the folder's file system is of one of these kinds. An overlay is none of them, whatever lies below it."""
    import ctypes

    found = (ctypes.c_long * 64)()  # struct statfs begins with the kind
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(folder), ctypes.byref(found)):
        return False
    return int(found[0]) in kinds


def reserve_file(path: str | os.PathLike[str], size: int) -> mmap.mmap:
    """Makes a file, mode 0600, with all of its blocks, and maps it. Raises OSError; there is no file then.

    A shared flock(2) on it lasts as long as a process has it mapped, see is_mapped().
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
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
    """The same in anonymous memory, with a link at `path`; and the descriptor, which the caller closes."""
    descriptor = _memfd(_name(path))
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        place = f"/proc/{os.getpid()}/fd/{descriptor}"
        os.stat(place)  # raises where /proc is not what it should be
        mapped = mmap.mmap(descriptor, size)
        os.symlink(place, path)
    except BaseException:
        os.close(descriptor)
        raise
    return mapped, descriptor


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _NO_EXECUTION)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def open_to_read(path: str) -> int:
    """Opens a ring, wherever it lies. Raises OSError: FileNotFoundError also where it went with its last process."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO is too short
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    for link in (path, _held(path)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            place = os.readlink(link)
            # Another process may have that number by now, and something else at that descriptor.
            if place.startswith("/proc/") and os.readlink(place) == f"/memfd:{_name(path)} (deleted)":
                return os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    raise FileNotFoundError(errno.ENOENT, "it was in the memory of a process that has ended", path)


def hold(path: str, descriptor: int) -> None:
    """Says that this process has a ring open that may be in anonymous memory, and where. descriptor: stays open."""
    if os.path.islink(path):
        partial = f"{_held(path)}-{os.getpid()}"
        with contextlib.suppress(OSError):
            os.symlink(f"/proc/{os.getpid()}/fd/{descriptor}", partial)
            os.replace(partial, _held(path))


def wait_until_held(path: str, descriptor: int, timeout_s: float) -> bool:
    """Whether another process has the ring open at the end of this time, or sooner. descriptor: this process's."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(_held(path)), os.fstat(descriptor)):
                return True
        if not os.path.lexists(path):
            return True  # it has been read to its end
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_INTERVAL_S)


def forget(path: str) -> None:
    """Removes a ring's file or link, and who has it open. Raises OSError, but not if it is gone."""
    for each in (path, _held(path)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(each)


def is_mapped(path: str) -> bool:
    """Whether a process has the file of a ring mapped that it made, or its parent: in whichever container."""
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


def _held(path: str) -> str:
    return path.removesuffix(".ring") + _HELD


def _name(path: str) -> str:
    return os.path.basename(path).removesuffix(".ring")
