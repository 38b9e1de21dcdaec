"""Files that stay open while the user's program runs.

A program may close all descriptors, as daemons do, and open its own files under the same numbers.
"""

from __future__ import annotations

import os

from torchlens_perf.interruption import ours


class KeptFile:
    """An open file and its number, which is used only while the number belongs to this file."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: of the file, which close() closes."""
        self._number = descriptor
        self._identity = _identify(os.fstat(descriptor))

    def stat(self) -> os.stat_result | None:
        """Return fstat() of the file, or None if the program has closed the file."""
        try:
            found = os.fstat(self._number)
        except ours(OSError):
            return None
        return found if _identify(found) == self._identity else None

    def read(self, size: int) -> bytes:
        """Return the first bytes of the file; none if the program has closed the file.

        Raise OSError.
        """
        return b"" if self.stat() is None else os.pread(self._number, size, 0)

    def close(self) -> None:
        """Close the file, unless the program has closed it. Further calls do nothing."""
        number, self._number = (-1 if self.stat() is None else self._number), -1
        if number >= 0:
            os.close(number)


def _identify(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
