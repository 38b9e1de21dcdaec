"""One run directory for all nodes: a node that has called the run otherwise than node 0 joins node 0's.

Where nodes could not agree on a name (identity.py), each made a run directory of its own. Once node 0 has said what
the run is called, the node's sidecar moves what is there into node 0's directory, if both are on a shared disk, and
leaves a symbolic link behind: every path that a process of the node knows goes on to lead there. Where they share no
disk, the name that node 0 uses becomes a link to this node's directory. Files of nodes have different names.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,119}")
_TRIES = 5  # files may come while the others are moved


def join_run(own: Path, run_id: str) -> bool:
    """Makes both names lead to one directory. own: this node's run directory. Returns whether it was moved.

    Raises OSError where it cannot; nothing is lost then, and it can be tried again.
    """
    if run_id == own.name or own.is_symlink() or not _NAME.fullmatch(run_id):
        return False
    whole = own.with_name(run_id)
    try:
        os.symlink(own.name, whole)
        return False
    except FileExistsError:
        if whole.is_symlink():  # this node's own, or of an earlier sidecar of it
            return False
    for left in range(_TRIES - 1, -1, -1):
        _move(own, whole)
        try:
            own.rmdir()
            break
        except OSError:
            if not left:
                raise
    os.symlink(run_id, own)
    return True


def _move(source: Path, target: Path) -> None:
    """Moves what is in a folder into another, folder by folder. What is there already stays; it is node 0's."""
    target.mkdir(exist_ok=True)
    for entry in list(os.scandir(source)):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            _move(path, target / entry.name)
            with contextlib.suppress(OSError):  # a file has come
                path.rmdir()
        elif (target / entry.name).exists():
            path.unlink(missing_ok=True)
        else:
            with contextlib.suppress(FileNotFoundError):  # what is only partly written goes as it is renamed
                os.rename(path, target / entry.name)
