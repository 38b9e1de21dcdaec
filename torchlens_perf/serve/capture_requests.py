"""Captures for a viewer: asks for one as `torchlens-perf capture` does, says what comes of it, and reads its files.

In a reader.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchlens_perf.report.captures import captures
from torchlens_perf.run import captures as capture_files
from torchlens_perf.run.captures import FLIGHT_RECORDER, SNAPSHOT, STACKS, TRACE
from torchlens_perf.serve.ask_capture import ask_capture
from torchlens_perf.serve.live_page import capture_address, captured_words
from torchlens_perf.serve.readers import NoSuchError
from torchlens_perf.serve.run_names import run_directory

BLOCK_BYTES = 1 << 20
_FILES = {TRACE, SNAPSHOT, FLIGHT_RECORDER, STACKS, "capture.json"}
_RANK = re.compile(r"[0-9]{1,9}")
_INSIDE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def ask(path: str, ranks: str, steps: int, python: bool, force: bool) -> dict[str, Any]:
    """Raises ConfigError for what cannot be asked, RunStoreError where that cannot be written."""
    made = ask_capture(run_directory(path), [ranks], steps, python=python, force=force)
    return {"id": made.id, "ranks": list(made.ranks), "from_step": made.from_step, "steps": made.steps}


def progress(path: str, capture: str) -> dict[str, Any]:
    """What came of a request so far: `outcomes` by rank, the ranks that are waited for, and whether that is over."""
    run = run_directory(path)
    request = next((each for each in capture_files.read_requests(run.captures)[0] if each.id == capture), None)
    if request is None:
        raise NoSuchError("there is no such capture")
    rows = [row for row in captures(run) if row["id"] == capture]
    waiting = sorted({*request.ranks} - {row["rank"] for row in rows})
    return {
        "outcomes": [
            {
                "rank": row["rank"],
                "words": captured_words(row),
                "files": [
                    {"name": file, "bytes": of["bytes"], "address": capture_address(capture, row["rank"], file)}
                    for file, of in row["files"].items()
                ],
            }
            for row in rows
        ],
        "waiting": waiting,
        "is_over": not waiting or not capture_files.is_open(run.captures, request, time.time()),
    }


def block(
    path: str, capture: str, rank: str, file: str, at: int, known: tuple[int, ...]
) -> tuple[bytes, tuple[int, ...]]:
    """BLOCK_BYTES of a captured file from `at` on, and which file that is: its device, inode and size.

    known: which file it was before, (): any. Follows no link in the run. Raises NoSuchError, also for another file than
    the one before; OSError.
    """
    if not _RANK.fullmatch(rank) or file not in _FILES or not capture_files.is_id(capture):
        raise NoSuchError("there is no such file")
    folder = capture_files.rank_folder(Path("captures"), capture, int(rank))
    descriptor = _opened(path, [*folder.parts, file])
    try:
        found = os.fstat(descriptor)
        identity = (found.st_dev, found.st_ino, found.st_size)
        if not stat.S_ISREG(found.st_mode) or known not in ((), identity):
            raise NoSuchError("there is no such file any more")
        return os.pread(descriptor, BLOCK_BYTES, at), identity
    finally:
        os.close(descriptor)


def _opened(folder: str, parts: Sequence[str]) -> int:
    """A descriptor of what lies there, each part looked up in the one before. Raises NoSuchError, for a link too;
    OSError."""
    at = -1
    try:
        at = os.open(folder, _INSIDE | os.O_DIRECTORY)
        for part in parts[:-1]:
            below = os.open(part, _INSIDE | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = below
        return os.open(parts[-1], _INSIDE, dir_fd=at)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        raise NoSuchError("there is no such file") from None
    finally:
        if at >= 0:
            os.close(at)
