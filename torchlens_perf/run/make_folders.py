"""Make folders and check that they are writable, in the calling process or in a child.

A system call to a network disk that does not respond may block forever, and no signal interrupts
it. The training process therefore runs this file as a child, which imports nothing of this package.
The child removes its new folders unless the parent sends KEEP. The child also removes them if the
parent is killed.

Only this user, or optionally the folder's group, can enter the new folders. Existing folders must
belong to this user or to root, because other users may have made them in a shared folder.
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
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MAX_TRIES = 5
_MAX_REMOVALS, _REST_S = 20, 0.1


def make_folders(folders: list[str], access: str = PRIVATE) -> list[str]:
    """Make missing folders, check that the last one is writable, and return the new folders.

    folders: folders in a run directory. access: PRIVATE, or SHARED to make new folders readable for
    their group. Raise OSError, and remove all new folders, if a folder cannot be made or used.
    """
    made: list[str] = []
    try:
        for folder in folders:
            _check_links(folder)
            for tries_left in reversed(range(_MAX_TRIES)):
                try:
                    _make_folder(folder, _MODES[access], made)
                    break
                except FileNotFoundError:
                    # Another rank, which had made the parent folder, has just removed it.
                    if not tries_left:
                        raise
        # Process ids are not unique across containers, so the name is random.
        probe = os.path.join(folders[-1], f".writable-{os.urandom(8).hex()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(probe, "wb", opener=lambda path, _: os.open(path, flags, 0o600)) as file:
                # Some network disks assign root's files to another user.
                trusted = {0, os.geteuid(), os.fstat(file.fileno()).st_uid}
        finally:
            if os.path.lexists(probe):
                os.unlink(probe)
        for folder in folders:
            _check_owners(folder, trusted)
    except BaseException:
        remove_empty_folders(made)
        raise
    return made


def _check_links(folder: str) -> None:
    """Raise PermissionError if a folder or one of its two parents is another user's link."""
    for each in (folder, os.path.dirname(folder), os.path.dirname(os.path.dirname(folder))):
        try:
            found = os.lstat(each)
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(found.st_mode) and os.stat(os.path.dirname(each)).st_mode & _OTHERS_WRITE:
            _check_owner(each, found, {0, os.geteuid()})


def _check_owners(folder: str, trusted: set[int]) -> None:
    """Raise PermissionError if a folder or its run directory belongs to another user.

    The parent of the run directory is also checked if any user could have made it.
    """
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


def _make_folder(folder: str, mode: int, made: list[str]) -> None:
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    if not os.path.lexists(parent):
        _make_folder(parent, mode, made)
    try:
        os.mkdir(folder, mode)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise
    else:
        made.append(folder)
        found = stat.S_IMODE(os.stat(folder).st_mode)
        # The umask may have removed permissions.
        if found & mode != mode:
            os.chmod(folder, found | mode)


def remove_empty_folders(made: list[str]) -> bool:
    """Remove empty folders. Return True if none of the folders exists afterwards."""
    left = False
    for folder in reversed(made):
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno is None:
                raise  # It comes from a signal handler of the program, see interruption.py.
            left = True
    return not left


def _main() -> None:
    try:
        made = make_folders(sys.argv[2:], sys.argv[1])
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
        if remove_empty_folders(made):
            return
        # Other ranks may have made folders inside these folders and may be removing them too.
        time.sleep(_REST_S)


if __name__ == "__main__":
    _main()
