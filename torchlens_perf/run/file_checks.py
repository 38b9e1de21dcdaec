"""Checks of files inside of the training process.

os.path.exists(), isfile(), islink() and realpath() take each OSError for an answer, also the
TimeoutError of the program's signal handler that runs inside of them.
"""

from __future__ import annotations

import os
import stat

from torchlens_perf.interruption import ours

CLOCK_TICK_NS = 50_000_000
"""Longer than the tick of any kernel, which is the resolution of modification times."""


def is_missing(path: str | os.PathLike[str], *, follow_links: bool = True) -> bool:
    """Return True if nothing has this path; False if a failing disk does not tell.

    follow_links: True if a link that leads nowhere is missing, too.
    """
    try:
        os.stat(path, follow_symlinks=follow_links)
    except ours(OSError) as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


def is_file(path: str) -> bool:
    """Return True if a regular file has this path."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except ours(OSError, ValueError):
        return False


def resolve_links(path: str) -> str:
    """Return the absolute path without links, or with them if the path does not exist."""
    try:
        return os.path.realpath(path, strict=True)
    except ours(OSError):
        return os.path.abspath(path)
