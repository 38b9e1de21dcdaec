"""Raise the limit of files that this process may have open."""

from __future__ import annotations

import resource

from torchlens_perf.interruption import suppress


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit if possible, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft
