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
    """The reason why a request has no result, in words for the viewer, with an HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        # Unpickling calls the class with these arguments.
        super().__init__(status, text)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[1])


class NoSuchError(TorchlensPerfError):
    """The run or file is not there. Raised in a reader."""


def address(name: str) -> str:
    """Return a name as a part of an address. The name may have any bytes, as on disk."""
    return quote(os.fsencode(name), safe="")


def name_in(raw_path: bytes) -> str:
    """Return the run's name from the raw path of a request, /runs/NAME/...; "" if it cannot be a
    folder's name.
    """
    parts = raw_path.split(b"/")
    name = os.fsdecode(unquote_to_bytes(parts[2])) if len(parts) > 2 else ""
    return "" if name in (".", "..") or "/" in name or "\0" in name or len(name) > 255 else name


def opened(path: str) -> int:
    """Open the folder of a run's states and return its descriptor.

    Runs in a reader, and does not follow a linked run.

    The folder is opened on each call, since a network file system asks its server only then,
    instead of using its cache. Raise NoSuchError if there is no run, or OSError.
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
        raise NoSuchError(f"There is no run {name} here. It may have been removed.") from None


def run_directory(path: str) -> RunDirectory:
    """Return the run directory if the path is a run.

    Runs in a reader. Raise the errors of opened().
    """
    os.close(opened(path))
    return RunDirectory(Path(path))


def is_run(path: str) -> bool:
    """Return True if the path is a run. Raise OSError if it cannot be read."""
    try:
        os.close(opened(path))
    except NoSuchError:
        return False
    return True
