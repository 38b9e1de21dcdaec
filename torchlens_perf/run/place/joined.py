"""Join the run directory of a node with that of node 0 if their run ids differ.

If nodes could not agree on a name (identity.py), each made its own run directory. Node 0 then sends
its name. On a shared disk, the node's sidecar moves its files into node 0's directory and leaves a
symbolic link, so that known paths stay valid. Without a shared disk, node 0's name becomes a link
to this node's directory. File names differ between nodes.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,119}")
# New files may appear during a move.
_TRIES = 5


def join_run(own: Path, run_id: str) -> bool:
    """Make both names refer to one directory. Return True if this node's directory was moved.

    own: this node's run directory. Raise OSError if that fails; no file is lost then, and the call
    can be repeated.
    """
    if run_id == own.name or own.is_symlink() or not _NAME.fullmatch(run_id):
        return False
    whole = own.with_name(run_id)
    try:
        os.symlink(own.name, whole)
        return False
    except FileExistsError:
        # The link is this node's own, or that of an earlier sidecar of this node.
        if whole.is_symlink():
            return False
    for left in range(_TRIES - 1, -1, -1):
        _merge_folder(own, whole)
        try:
            own.rmdir()
            break
        except OSError:
            if not left:
                raise
    os.symlink(run_id, own)
    return True


def _merge_folder(source: Path, target: Path) -> None:
    """Move the content of a folder into another, recursively.

    Existing files, which are node 0's, stay.
    """
    target.mkdir(exist_ok=True)
    for entry in list(os.scandir(source)):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            _merge_folder(path, target / entry.name)
            # A new file has appeared.
            with contextlib.suppress(OSError):
                path.rmdir()
        elif (target / entry.name).exists():
            path.unlink(missing_ok=True)
        else:
            # A partial file disappears when its writer renames it.
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, target / entry.name)
