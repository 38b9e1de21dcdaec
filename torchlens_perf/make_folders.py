"""Makes folders, and sees whether they can be written: in the process that asks, or in one of its own.

A disk on the network may not answer, and a call to it then lasts for minutes or for ever; no signal ends it. So the
training process asks a child, which may hang in its place: this file, run as a program that imports nothing of ours.
"""

from __future__ import annotations

import os
import sys

_MODE = 0o755


def make(folders: list[str]) -> None:
    """Makes them, and a file in the last one, which is removed again. Raises OSError where that is not possible."""
    for folder in folders:
        os.makedirs(folder, _MODE, exist_ok=True)
    # No two of these have one name: process ids are equal in two containers, and others may be at the same.
    probe = os.path.join(folders[-1], f".writable-{os.urandom(8).hex()}")
    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    os.unlink(probe)


def _main() -> None:
    try:
        make(sys.argv[1:])
        word = "made"
    except OSError as error:
        word = error.strerror or str(error)
    os.write(1, word.encode(errors="backslashreplace") + b"\n")


if __name__ == "__main__":
    _main()
