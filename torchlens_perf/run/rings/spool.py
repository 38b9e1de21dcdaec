"""Keep records that the ring will soon overwrite, as plain bytes in a file next to the ring.

On a node whose CPUs are all busy, the sidecar begins to read late, because its libraries take half
a second of CPU time to import (sidecar/start/wait.py). Until then it moves records out of the ring
with a few system calls. The file is in shared memory like the ring, so the records survive if all
processes are killed.

This module has few imports, because start/wait.py uses it in the sidecar's first seconds.
"""

from __future__ import annotations

import os

# Size and position of the records in a ring file. They are not in run/ring.py, because its import
# takes long.
RECORD_BYTES, RECORDS_OFFSET = 64, 274432
IN_FLIGHT = 64
"""Largest number of records that several threads may be writing at once (Python implementation)."""
SUFFIX = ".spool"
# The largest part of free shared memory that one copy may take. DataLoaders also need this memory.
_SHARE_OF_FREE = 16


def spool_path(ring: str) -> str:
    """Return the path of a ring's spool. ring: path of the ring file."""
    return ring.removesuffix(".ring") + SUFFIX


def count_spooled(path: str) -> int:
    """Return the number of records in a spool, which begins with the ring's first record."""
    try:
        return os.stat(path, follow_symlinks=False).st_size // RECORD_BYTES
    except FileNotFoundError:
        return 0


def read_spool(path: str, first: int, count: int) -> bytes:
    """Return the bytes of `count` records from number `first` on. Raise OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, count * RECORD_BYTES, first * RECORD_BYTES)
    finally:
        os.close(descriptor)


class SpoolWriter:
    """Writer of a ring's spool. Used on one thread."""

    def __init__(self, ring: str, descriptor: int, capacity: int) -> None:
        """descriptor: of the ring. capacity: number of records in the ring."""
        self._path = spool_path(ring)
        self._ring = descriptor
        self._capacity = capacity
        self.end = count_spooled(self._path)
        """Number of the first record that is not in the spool."""

    def copy_new_records(self, head: int, most: int) -> int:
        """Append the records before number `head` to the spool. Return the number of records.

        most: the largest number of records to copy. Raise OSError if the ring has overwritten
        records in the meantime, or if there is not enough memory. The spool then stays as it was.
        """
        # A thread of the job may still be writing one of the newest records.
        stop = min(head - IN_FLIGHT, self.end + most)
        if stop <= self.end:
            return 0
        parts = self._read(self.end, stop)
        size = sum(map(len, parts))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o600)
        try:
            free = os.fstatvfs(file)
            if size * _SHARE_OF_FREE > free.f_bavail * free.f_frsize:
                raise OSError(f"{self._path}: too little memory is free")
            before = os.fstat(file).st_size
            if os.writev(file, parts) < size:
                os.ftruncate(file, before)
                raise OSError(f"{self._path}: no memory is free")
        finally:
            os.close(file)
        copied, self.end = stop - self.end, stop
        return copied

    def _read(self, first: int, stop: int) -> list[bytes]:
        """Return the bytes of records, in one or two parts. Raise OSError if they were overwritten."""
        begin = first & (self._capacity - 1)
        until_end = min(stop - first, self._capacity - begin)
        spans = ((begin, until_end), (0, stop - first - until_end))
        parts = [
            os.pread(self._ring, count * RECORD_BYTES, RECORDS_OFFSET + at * RECORD_BYTES)
            for at, count in spans
            if count
        ]
        head = int.from_bytes(os.pread(self._ring, 8, 64), "little")
        if head + IN_FLIGHT > first + self._capacity or sum(map(len, parts)) < RECORD_BYTES * (
            stop - first
        ):
            raise OSError(f"{self._path}: the ring has overwritten records")
        return parts
