"""Join the run directory of a node with that of node 0 if their run ids differ.

Nodes that could not agree on a run id (identity.py) have each made a run directory. Node 0 then
sends its run id to the others. On a shared disk, the node's sidecar moves its files into node 0's
directory. A symbolic link keeps the old paths valid. Without a shared disk, node 0's run id becomes
a link to this node's directory. File names contain the node's name, so they do not collide.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from torchlens_perf.interruption import ours, suppress

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,119}")
# New files may appear during a move.
_TRIES = 5


def join_run_directories(own: Path, run_id: str) -> bool:
    """Make both run ids refer to one directory. Return True if this node's files were moved.

    own: this node's run directory. run_id: node 0's run id. Raise OSError if an operation fails. No
    file is lost then, and the call can be repeated.
    """
    if run_id == own.name or own.is_symlink() or not _NAME.fullmatch(run_id):
        return False
    whole = own.with_name(run_id)
    try:
        os.symlink(own.name, whole)
        return False
    except FileExistsError:
        # This sidecar or an earlier one of this node has made the link.
        if whole.is_symlink():
            return False
    for left in range(_TRIES - 1, -1, -1):
        _merge_folder(own, whole)
        try:
            own.rmdir()
            break
        except ours(OSError):
            if not left:
                raise
    os.symlink(run_id, own)
    return True


def _merge_folder(source: Path, target: Path) -> None:
    """Move the content of a folder into another folder, recursively.

    If both contain a file, the file in the target stays, because it is node 0's.
    """
    target.mkdir(exist_ok=True)
    for entry in list(os.scandir(source)):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            _merge_folder(path, target / entry.name)
            # rmdir() fails if another process has just written a new file.
            with suppress(OSError):
                path.rmdir()
        elif (target / entry.name).exists():
            path.unlink(missing_ok=True)
        else:
            # The writer of a partial file may have just renamed it.
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, target / entry.name)
