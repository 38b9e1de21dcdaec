"""Find run directories. A link to a run does not count: it is another name of the same run."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torchlens_perf.config import Config
from torchlens_perf.errors import RunStoreError, TorchlensPerfError, printable
from torchlens_perf.run.directory import RunDirectory

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class NotFoundError(TorchlensPerfError):
    """The run or the file does not exist."""


class FoundRun(NamedTuple):
    """A run directory, and the time of its last change."""

    name: str
    changed_ns: int
    """UNIX time by the disk's clock at which a node last wrote its state; 0 if the folder cannot be
    read.
    """


def default_folder() -> Path:
    """Return the folder of runs from the environment or the default settings."""
    return Path(os.environ.get("TORCHLENS_PERF_DIR", Config.dir))


def find_runs(
    folder: str | Path, advanced: Callable[[int, int | None], object] = lambda done, total: None
) -> list[FoundRun]:
    """Return the runs in a folder, most recently changed first, or the folder itself if it is a
    run.

    Raise RunStoreError if the folder cannot be read.
    """
    try:
        if is_run(folder):
            return [FoundRun(os.path.basename(folder), last_change_ns(folder))]
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise RunStoreError(f"{folder} cannot be read: {error.strerror or error}") from None
    found = []
    for done, name in enumerate(names):
        advanced(done, len(names))
        try:
            found.append(FoundRun(name, last_change_ns(os.path.join(folder, name))))
        except NotFoundError:
            continue
        except OSError:
            found.append(FoundRun(name, 0))
    return sorted(found, key=lambda run: (-run.changed_ns, run.name))


def last_change_ns(path: str | Path) -> int:
    """Return the time at which a node last wrote its state.

    Writing renames a file, which changes the time of the folder of states. This folder is opened on
    each call, because a network file system may otherwise use a stale cache.

    Raise NotFoundError if there is no run, or OSError.
    """
    with contextlib.ExitStack() as opened:
        try:
            run = os.open(path, _FOLDER | os.O_NOFOLLOW)
            opened.callback(os.close, run)
            nodes = os.open("nodes", _FOLDER, dir_fd=run)
            opened.callback(os.close, nodes)
            return os.fstat(nodes).st_mtime_ns
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            name = printable(os.path.basename(path))[:100]
            raise NotFoundError(f"There is no run {name} here. It may have been removed.") from None


def open_run(path: str | Path) -> RunDirectory:
    """Return the run directory of a path. Raise NotFoundError if there is no run, or OSError."""
    last_change_ns(path)
    return RunDirectory(Path(path))


def is_run(path: str | Path) -> bool:
    """Return True if the path is a run. Raise OSError if it cannot be read."""
    with contextlib.suppress(NotFoundError):
        last_change_ns(path)
        return True
    return False
