"""Makes folders, and sees whether they can be written: in the process that asks, or in one of its own.

A disk on the network may not answer, and a call to it then lasts for minutes or for ever; no signal ends it. So the
training process asks a child, which may hang in its place: this file, run as a program that imports nothing of ours.
The child removes what it has made, unless the parent sends KEEP: also if the parent is killed meanwhile.

Nobody but this user can enter what is made, or its group can, if that is asked for. What is there already must be this
user's, or root's: where others may write, they may have put it there.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time

KEEP = b"keep"
PRIVATE, SHARED = "private", "shared"
_MODES = {PRIVATE: 0o700, SHARED: 0o750}
_MAX_TRIES = 5
_MAX_REMOVALS, _REST_S = 20, 0.1


def make(folders: list[str], access: str = PRIVATE) -> list[str]:
    """Makes those that are missing, and a file in the last one, which is removed again. Returns what was missing.

    access: PRIVATE, or SHARED with the group that the file system gives them, to read. The folders lie in a run
    directory. Raises OSError where that is not possible; nothing is left then.
    """
    made: list[str] = []
    try:
        for folder in folders:
            _check_links(folder)
            for tries_left in reversed(range(_MAX_TRIES)):
                try:
                    _make_one(folder, _MODES[access], made)
                    break
                except FileNotFoundError:  # somebody else takes away again what they made, and we made it in there
                    if not tries_left:
                        raise
        # No two of these have one name: process ids are equal in two containers, and others may be at the same.
        probe = os.path.join(folders[-1], f".writable-{os.urandom(8).hex()}")
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # Some network disks give what root makes to somebody else.
            trusted = {0, os.geteuid(), os.fstat(descriptor).st_uid}
        finally:
            os.close(descriptor)
            os.unlink(probe)
        for folder in folders:
            _check_owners(folder, trusted)
    except BaseException:
        remove(made)
        raise
    return made


def _check_links(folder: str) -> None:
    """Raises PermissionError for a link of somebody else's in the place of a folder, or of the two that it is in."""
    for each in (folder, os.path.dirname(folder), os.path.dirname(os.path.dirname(folder))):
        try:
            found = os.lstat(each)
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(found.st_mode) and _others_may_write(os.path.dirname(each)):
            _check_owner(each, found, {0, os.geteuid()})


def _check_owners(folder: str, trusted: set[int]) -> None:
    """Raises PermissionError where a folder, or what it lies in, is somebody else's; or what that lies in, where
    anybody may have put that."""
    run = os.path.dirname(folder)
    for each in (folder, run):
        _check_owner(each, os.stat(each), trusted)
    parent = os.path.dirname(run)
    if os.stat(os.path.dirname(parent)).st_mode & stat.S_IWOTH:
        _check_owner(parent, os.stat(parent), trusted)


def _check_owner(path: str, found: os.stat_result, trusted: set[int]) -> None:
    if found.st_uid not in trusted:
        what = "a link of" if stat.S_ISLNK(found.st_mode) else "the folder of"
        raise PermissionError(errno.EPERM, f"{path} is {what} another user ({found.st_uid})")


def _others_may_write(folder: str) -> bool:
    return bool(os.stat(folder).st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _make_one(folder: str, mode: int, made: list[str]) -> None:
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    if not os.path.lexists(parent):
        _make_one(parent, mode, made)
    try:
        os.mkdir(folder, mode)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise
    else:
        made.append(folder)
        found = stat.S_IMODE(os.stat(folder).st_mode)
        if found & mode != mode:  # the umask has taken some
            os.chmod(folder, found | mode)


def remove(made: list[str]) -> bool:
    """Takes them away again, as far as they are there and empty. Returns whether none of them is left."""
    left = False
    for folder in reversed(made):
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            continue
        except OSError:
            left = True
    return not left


def _main() -> None:
    try:
        made = make(sys.argv[2:], sys.argv[1])
    except OSError as error:
        os.write(1, (error.strerror or str(error)).encode(errors="backslashreplace") + b"\n")
        return
    try:
        os.write(1, b"made\n")
        kept = os.read(0, len(KEEP)) == KEEP
    except OSError:
        kept = False
    if kept:
        return
    for _ in range(_MAX_REMOVALS):
        if remove(made):
            return
        time.sleep(_REST_S)  # other ranks may have made folders in these, and give up just now too


if __name__ == "__main__":
    _main()
