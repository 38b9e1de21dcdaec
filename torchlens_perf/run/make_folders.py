"""Makes folders, and sees whether they can be written: in the process that asks, or in one of its own.

A disk on the network may not answer, and a call to it then lasts for minutes or for ever; no signal ends it. So the
training process asks a child, which may hang in its place: this file, run as a program that imports nothing of ours.
The child removes what it has made, unless the parent sends KEEP: also if the parent is killed meanwhile.
"""

from __future__ import annotations

import os
import sys
import time

KEEP = b"keep"
_MODE = 0o755
_MAX_TRIES = 5
_MAX_REMOVALS, _REST_S = 20, 0.1


def make(folders: list[str]) -> list[str]:
    """Makes those that are missing, and a file in the last one, which is removed again. Returns what was missing.

    Raises OSError where that is not possible; nothing is left then.
    """
    made: list[str] = []
    try:
        for folder in folders:
            for tries_left in reversed(range(_MAX_TRIES)):
                try:
                    _make_one(folder, made)
                    break
                except FileNotFoundError:  # somebody else takes away again what they made, and we made it in there
                    if not tries_left:
                        raise
        # No two of these have one name: process ids are equal in two containers, and others may be at the same.
        probe = os.path.join(folders[-1], f".writable-{os.urandom(8).hex()}")
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.unlink(probe)
    except BaseException:
        remove(made)
        raise
    return made


def _make_one(folder: str, made: list[str]) -> None:
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    if not os.path.lexists(parent):
        _make_one(parent, made)
    try:
        os.mkdir(folder, _MODE)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise
    else:
        made.append(folder)


def remove(made: list[str]) -> bool:
    """Takes them away again, as far as they are there and empty. Returns whether none of them is left."""
    left = False
    for folder in reversed(made):
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            continue
        except OSError:
            left = True
    return not left


def _main() -> None:
    try:
        made = make(sys.argv[1:])
    except OSError as error:
        os.write(1, (error.strerror or str(error)).encode(errors="backslashreplace") + b"\n")
        return
    try:
        os.write(1, b"made\n")
        kept = os.read(0, len(KEEP)) == KEEP
    except OSError:
        kept = False
    if kept:
        return
    for _ in range(_MAX_REMOVALS):
        if remove(made):
            return
        time.sleep(_REST_S)  # other ranks may have made folders in these, and give up just now too


if __name__ == "__main__":
    _main()
