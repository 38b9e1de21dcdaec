"""Run names: validation, addresses and folders.

Names are untrusted: they come from disks and from viewers.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from torchlens_perf.errors import TorchlensPerfError, printable
from torchlens_perf.run.directory import RunDirectory

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class ReadError(TorchlensPerfError):
    """A request has no result. The error has an HTTP status and a text for the viewer."""

    def __init__(self, status: int, text: str) -> None:
        # Unpickling calls the class with these arguments.
        super().__init__(status, text)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[1])


class NotFoundError(TorchlensPerfError):
    """The run or the file does not exist. Raised in a reader process."""


def quote_name(name: str) -> str:
    """Quote a name for use in an address. File names may contain any bytes."""
    return quote(os.fsencode(name), safe="")


def parse_run_name(raw_path: bytes) -> str:
    """Return NAME of the raw request path /runs/NAME/...; "" if no folder can have this name."""
    parts = raw_path.split(b"/")
    return check_run_name(os.fsdecode(unquote_to_bytes(parts[2])) if len(parts) > 2 else "")


def check_run_name(name: str) -> str:
    """Return the name; "" if no folder can have it."""
    return "" if name in (".", "..") or "/" in name or "\0" in name or len(name) > 255 else name


def open_nodes_folder(path: str) -> int:
    """Open the folder of a run's states and return its descriptor.

    Runs in a reader process. Links are not followed. The folder is opened on each call, because a
    network file system may otherwise use a stale cache. Raise NotFoundError if there is no run, or
    OSError.
    """
    try:
        run = os.open(path, _FOLDER | os.O_NOFOLLOW)
        try:
            return os.open("nodes", _FOLDER, dir_fd=run)
        finally:
            os.close(run)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        name = printable(os.path.basename(path))[:100]
        raise NotFoundError(f"There is no run {name} here. It may have been removed.") from None


def open_run(path: str) -> RunDirectory:
    """Return the run directory of a path. Raise the errors of open_nodes_folder()."""
    os.close(open_nodes_folder(path))
    return RunDirectory(Path(path))


def is_run(path: str) -> bool:
    """Return True if the path is a run. Raise OSError if it cannot be read."""
    try:
        os.close(open_nodes_folder(path))
    except NotFoundError:
        return False
    return True
