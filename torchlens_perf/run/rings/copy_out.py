"""Copy a ring file into the run directory, in a separate process that may wait for the disk.

This program imports nothing of this package. It inherits the ring file's descriptor, so the copy
continues if the training process ends.
"""

from __future__ import annotations

import contextlib
import os
import sys

_CHUNK_BYTES = 1 << 20


def copy_ring(descriptor: int, target: str, listed_in: str, source: list[str]) -> None:
    """Write the ring file, add its path to the node's list of rings, and remove the source's paths.

    descriptor: of the source. listed_in: path of the list. source: paths of the ring file and of
    its registrations. Raise OSError if the ring file cannot be written. The source then stays.
    """
    os.makedirs(os.path.dirname(target), 0o700, exist_ok=True)
    partial = f"{target}.partial"
    try:
        with open(partial, "xb", buffering=0, opener=_open_private) as file:
            at = 0
            while chunk := os.pread(descriptor, _CHUNK_BYTES, at):
                at += file.write(chunk) or 0
        os.rename(partial, target)
    except OSError:
        if os.path.exists(partial):
            os.unlink(partial)
        raise
    with open(listed_in, "ab", buffering=0, opener=_open_private) as file:
        file.write(os.fsencode(target) + b"\n")
    for path in source:
        if os.path.lexists(path):
            os.unlink(path)
    for folder in {os.path.dirname(path) for path in source}:
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _open_private(path: str, flags: int) -> int:
    # Opening a FIFO must not block.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _main() -> None:
    descriptor, target, listed_in, *source = sys.argv[1:]
    try:
        copy_ring(int(descriptor), target, listed_in, source)
    except OSError as error:
        os.write(1, (error.strerror or str(error)).encode(errors="backslashreplace"))


if __name__ == "__main__":
    _main()
