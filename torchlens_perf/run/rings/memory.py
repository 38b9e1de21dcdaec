"""Allocate memory for a ring file, to which writes neither fail nor wait for a disk.

A write to a mapped file causes SIGBUS if the file system has no space for the page or has lost its
disk. In shared memory (tmpfs), all pages are allocated when the file is created. If shared memory
has not enough space, or is not a tmpfs, anonymous memory is used instead (memfd_create(2)), which
has no size limit. The path of the ring file is then a link to the descriptor of the process that
made it. The sidecar opens this link on registration. The sidecar's descriptor keeps the memory if
the process is killed.

Shared and anonymous memory both count as memory of the process's control group. At the group's
limit, the kernel frees other memory or kills a process. Only the creation of the ring file can
exceed the limit.

This module imports almost nothing, because the sidecar must start fast (sidecar/start/wait.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Collection

from torchlens_perf.interruption import ours, suppress
from torchlens_perf.run import file_checks
from torchlens_perf.run.kept_file import KeptFile

# File system types of statfs(2). ext2, ext3 and ext4 have the same type.
TMPFS, EXT = 0x01021994, 0xEF53
IN_MEMORY = frozenset({TMPFS})
WITHOUT_SIGBUS = frozenset({TMPFS, EXT})
"""File systems on which writes to mapped and allocated blocks succeed on a full or lost disk."""
_HELD = ".held"
# MFD_NOEXEC_SEAL. Some machines require this flag, but kernels before 6.3 do not support it.
_NO_EXECUTION = 8
_MAP_FIXED = 0x10
_POLL_INTERVAL_S = 0.005


def is_on_file_system(folder: str | os.PathLike[str], kinds: Collection[int]) -> bool:
    """Return True if a folder is on a file system of one of these types.

    A folder on an overlay file system never matches.
    """
    import ctypes

    # The first field of struct statfs is the type.
    found = (ctypes.c_long * 64)()
    failed = ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(folder), ctypes.byref(found))
    return not failed and int(found[0]) in kinds


def reserve_file(path: str | os.PathLike[str], size: int) -> mmap.mmap:
    """Create a file with mode 0600, allocate all of its blocks, and map it.

    A shared flock(2) on the file lasts as long as a process has it mapped, see is_held(). Raise
    OSError if a call fails. No file is left then.
    """
    descriptor = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        os.posix_fallocate(descriptor, 0, size)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return _map(descriptor, size)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def reserve_anonymous(path: str, size: int) -> tuple[mmap.mmap, KeptFile]:
    """Allocate and map anonymous memory, and create a link to it at `path`.

    Return the map and the memory's file. The caller closes both.
    """
    descriptor = _create_memfd(_ring_name(path))
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        place = f"/proc/{os.getpid()}/fd/{descriptor}"
        # stat() raises an error if /proc is not usable.
        os.stat(place)
        mapped = _map(descriptor, size)
        os.symlink(place, path)
    except BaseException:
        os.close(descriptor)
        raise
    return mapped, KeptFile(descriptor)


def _map(descriptor: int, size: int) -> mmap.mmap:
    """Map a file without keeping a descriptor of it. Raise OSError.

    mmap.mmap(descriptor, size) duplicates the descriptor and closes its number at the end. By then,
    the program may have closed the number and opened a file of its own under it. So the file
    replaces anonymous memory, for which mmap.mmap() keeps no descriptor.
    """
    import ctypes

    mapped = mmap.mmap(-1, size)
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    start = ctypes.c_char.from_buffer(mapped)
    address = ctypes.addressof(start)
    # The object at the start would keep close() from unmapping the memory.
    del start
    place = call(
        ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_SHARED | _MAP_FIXED, descriptor, ctypes.c_long(0),
    )  # fmt: skip
    if place != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapped


def _create_memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _NO_EXECUTION)
    except ours(OSError) as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def open_to_read(path: str) -> int:
    """Open a ring in a file or in anonymous memory, and return the descriptor.

    Raise OSError: FileNotFoundError if no process has the memory open any more.
    """
    try:
        # O_NONBLOCK keeps the call from waiting if the path is a FIFO.
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except ours(OSError) as error:
        if error.errno != errno.ELOOP:
            raise
    for link in (path, _held_link_path(path)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            place = os.readlink(link)
            # Another process may have this pid now. Its descriptor then belongs to another file.
            if (
                place.startswith("/proc/")
                and os.readlink(place) == f"/memfd:{_ring_name(path)} (deleted)"
            ):
                return os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    raise FileNotFoundError(errno.ENOENT, "it was in the memory of a process that has ended", path)


def announce_open_ring(path: str, descriptor: int) -> None:
    """Announce that this process has a ring in anonymous memory open.

    descriptor: of the ring. It must stay open.
    """
    if os.path.islink(path):
        partial = f"{_held_link_path(path)}-{os.getpid()}"
        with suppress(OSError):
            os.symlink(f"/proc/{os.getpid()}/fd/{descriptor}", partial)
            os.replace(partial, _held_link_path(path))


def wait_until_opened_elsewhere(path: str, file: KeptFile, timeout_s: float) -> bool:
    """Wait until another process has opened the ring, or has drained and removed it.

    file: the ring in this process. Return False after `timeout_s`, or if the program has closed
    the file.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = file.stat()
        with suppress(OSError):
            if found is not None and os.path.samestat(os.stat(_held_link_path(path)), found):
                return True
        if file_checks.is_missing(path, follow_links=False):
            # The sidecar has read all records and removed the ring.
            return True
        if found is None or time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_INTERVAL_S)


def remove_ring_paths(path: str) -> None:
    """Remove a ring's file or link, and the link of announce_open_ring().

    Missing files are ignored. Raise OSError for other errors.
    """
    for each in (path, _held_link_path(path)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(each)


def is_held(path: str | os.PathLike[str], lock: int = fcntl.LOCK_EX) -> bool:
    """Return is_locked(); False if the file cannot be opened.

    A ring file is held while the process that made it, or its child, has it mapped.
    """
    with suppress(OSError):
        return is_locked(path, lock)
    return False


def is_locked(path: str | os.PathLike[str], lock: int) -> bool:
    """Return True if a process in any container holds a flock(2) that excludes this kind of lock.

    Raise OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _held_link_path(path: str) -> str:
    return path.removesuffix(".ring") + _HELD


def _ring_name(path: str) -> str:
    return os.path.basename(path).removesuffix(".ring")
