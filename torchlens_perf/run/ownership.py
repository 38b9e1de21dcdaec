"""Who can change a file: native code is loaded only from places that nobody but this user and root can write to."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_ROOT_UID = 0
_MAX_LINKS = 40  # as the kernel has it


def others_can_change(path: Path) -> str | None:
    """Why somebody other than this user and root could change what lies at `path`; None if nobody could.

    Looks at each folder and symbolic link from the top down, then at what lies there: each must belong to this user or
    to root, and be writable by nobody else. Folders above may be sticky, as /tmp is. What has passed, nobody else can
    replace afterwards, so there is no race between looking and using. The group's bits stand for access control lists
    too: they are the mask of what a list permits. `/` itself is not looked at: whoever can change that has Python too.

    Raises OSError where nothing lies there, or it cannot be looked at. Any thread.
    """
    if not path.is_absolute():
        return f"{path} is not an absolute path"
    at, to_come, links = Path("/"), list(reversed(path.parts)), 0
    while to_come:
        part = to_come.pop()
        at = at.parent if part == ".." else at / part  # `at` holds no link: those were followed
        if part in ("..", "/"):
            continue
        found = at.lstat()
        # In a sticky folder nobody can rename or remove what belongs to somebody else.
        sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
        if found.st_uid not in (_ROOT_UID, os.geteuid()):
            return f"{at} belongs to user {found.st_uid}"
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            to_come += reversed(Path(os.readlink(at)).parts)
            at = at.parent
        elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not (to_come and sticky):
            who = "everybody" if found.st_mode & stat.S_IWOTH else f"group {found.st_gid}"
            return f"{at} can be written by {who}"
    return None
