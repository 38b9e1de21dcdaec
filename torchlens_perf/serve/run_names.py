"""Runs by name: what a name may be, its address, and its folder. Names come from disks and from viewers."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from torchlens_perf.errors import TorchlensPerfError, printable
from torchlens_perf.run.directory import RunDirectory

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class ReadError(TorchlensPerfError):
    """Why there is no answer, in words for the viewer, with a status of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)  # all arguments: it is pickled
        self.status = status

    def __str__(self) -> str:
        return str(self.args[1])


class NoSuchError(TorchlensPerfError):
    """The run or file is not there. Raised in a reader."""


def address(name: str) -> str:
    """A name as a part of an address; any bytes that a disk has."""
    return quote(os.fsencode(name), safe="")


def name_in(raw_path: bytes) -> str:
    """The run's name in the path of a request, /runs/NAME/... as it was sent; "" if that is no name of a folder."""
    parts = raw_path.split(b"/")
    name = os.fsdecode(unquote_to_bytes(parts[2])) if len(parts) > 2 else ""
    return "" if name in (".", "..") or "/" in name or "\0" in name or len(name) > 255 else name


def opened(path: str) -> int:
    """A descriptor of the folder of a run's states, whatever the run's name is; no link to it is followed. In a reader.

    Opened anew each time: only then does a network disk ask its server instead of answering from memory. Raises
    NoSuchError where there is no run, OSError.
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
    """The run, once it is known to be one. In a reader. Raises as opened()."""
    os.close(opened(path))
    return RunDirectory(Path(path))


def is_run(path: str) -> bool:
    """Raises OSError where that cannot be known."""
    try:
        os.close(opened(path))
    except NoSuchError:
        return False
    return True
