"""Checks of who can change a file, and private files that other users can neither read nor replace.

Native code is only loaded from places that only this user and root can write to. Files that we
write are new, or already ours. Files that we read must be regular files, because opening a FIFO or
a device could block.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT_UID = 0
_PRIVATE_UMASK, _GROUP_UMASK = 0o077, 0o027
# The kernel has the same limit.
_MAX_LINKS = 40
_MODE_LIFETIME_S, _MAX_MODES = 30.0, 64
_modes: dict[str, tuple[float, int]] = {}
"""For each folder: time of the last check, and the mode of new files in it. Used on any thread."""


def why_others_can_change(path: Path) -> str | None:
    """Return why another user could change the file at `path`; None if none could.

    Root and this user do not count.

    All folders and symbolic links are checked from the top down, then the file. Each must belong to
    this user or to root and must not be writable by others. Parent folders may be sticky, as /tmp
    is. No other user can replace a checked part afterwards, so there is no race between check and
    use.

    Group permissions also cover access control lists, as they are the mask of a list. `/` is not
    checked: a user who can change it can change Python, too.

    Raise OSError if the file does not exist or cannot be checked. Any thread.
    """
    if not path.is_absolute():
        return f"{path} is not an absolute path"
    at, to_come, links = Path("/"), list(reversed(path.parts)), 0
    while to_come:
        part = to_come.pop()
        # `at` contains no link, because links were followed.
        at = at.parent if part == ".." else at / part
        if part in ("..", "/"):
            continue
        found = at.lstat()
        # In a sticky folder, users cannot rename or remove files of others.
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


class NotRegularFileError(OSError):
    """A FIFO, a device or a socket in the place of a regular file."""


def open_to_read(path: str | os.PathLike[str]) -> int:
    """Open a regular file without blocking. Raise OSError or NotRegularFileError. Any thread."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        raise NotRegularFileError(f"{os.fspath(path)} is not a regular file")
    return descriptor


class TooLargeError(OSError):
    """A file that is larger than any that this package writes in its place."""


def read_regular_file(path: str | os.PathLike[str], at_most: int) -> bytes:
    """Return a regular file's content.

    Raises as open_to_read(), and TooLargeError for more than `at_most` bytes.

    A sparse file of any size takes no room on its disk, so a file's size is checked before it is
    read.
    """
    with open(open_to_read(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # read() allocates the requested number of bytes, so `at_most` would waste memory.
        content = b"" if size > at_most else file.read(size + 1)
        # The file has grown since fstat().
        if len(content) > size:
            content += file.read(at_most + 1 - len(content))
        if max(size, len(content)) > at_most:
            raise TooLargeError(
                errno.EFBIG, f"it has {size} bytes; at most {at_most} are read", os.fspath(path)
            )
        return content


def open_to_append(path: str | os.PathLike[str], flags: int = 0) -> int:
    """Open this user's file for appending, or create it with the mode that create_private_file() uses.

    Follow no link.

    This is an opener for open(), which passes the flags. Any thread. Raise OSError: PermissionError
    for another user's file, NotRegularFileError for a file that is not regular.
    """
    folder = os.path.dirname(path)
    # These calls come first, so that an error leaves no new file.
    owners, mode = _owners_of_new_files(folder), _mode_of_new_files(folder)
    flags |= (
        os.O_WRONLY
        | os.O_APPEND
        | os.O_CREAT
        | os.O_NOFOLLOW
        | os.O_NONBLOCK
        | os.O_NOCTTY
        | os.O_CLOEXEC
    )
    descriptor = os.open(path, flags, 0o600)
    found = os.fstat(descriptor)
    try:
        if not stat.S_ISREG(found.st_mode):
            raise NotRegularFileError(f"{os.fspath(path)} is not a regular file")
        if found.st_uid not in owners:
            raise PermissionError(errno.EPERM, f"{os.fspath(path)} belongs to user {found.st_uid}")
        if mode != 0o600 and not found.st_size:
            os.fchmod(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def create_private_file(path: str | os.PathLike[str], like: str | os.PathLike[str] = "") -> int:
    """Open a new file for writing, with mode 0600, or 0640 in a folder that is shared with a group.

    Ignore the umask.

    An existing file is removed, not overwritten. like: a folder whose mode decides, by default the
    file's. Raise OSError. Any thread.
    """
    mode = _mode_of_new_files(like or os.path.dirname(path))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        # Existence is only checked on an error, because each call is a request to a shared disk's
        # metadata server.
        os.unlink(path)
        descriptor = os.open(path, flags, 0o600)
    if mode != 0o600:
        os.fchmod(descriptor, mode)
    return descriptor


def write_private_file(
    path: str | os.PathLike[str], content: str | bytes, like: str | os.PathLike[str] = ""
) -> None:
    """Write a new file with create_private_file(). Raise OSError."""
    with open(create_private_file(path, like), "wb") as file:
        file.write(
            content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
        )


def write_all(file: io.RawIOBase | io.FileIO, content: bytes) -> None:
    """Write all content to an unbuffered file.

    One write(2) to an almost full disk may be partial, without an error.

    Raise OSError.
    """
    rest = memoryview(content)
    while rest:
        taken = file.write(rest)
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[taken:]


def is_group_readable(folder: str | os.PathLike[str]) -> bool:
    """Return True if the folder's group may read it. Raise OSError."""
    return bool(os.stat(folder).st_mode & stat.S_IRGRP)


@contextlib.contextmanager
def restrict_new_files_like(folder: Path) -> Iterator[None]:
    """Make new files readable for this user, and for the folder's group if it can read the folder.

    Only this user can read them if the folder does not exist. This sets the umask of the whole
    process, so it must not be used in training processes.
    """
    with contextlib.ExitStack() as leaving:
        leaving.callback(os.umask, os.umask(_PRIVATE_UMASK))
        with contextlib.suppress(OSError):
            if is_group_readable(folder):
                os.umask(_GROUP_UMASK)
        yield


def is_trusted_request(path: Path, run: Path) -> bool:
    """Return True if the file at `path` belongs to this user, to root or to the run's owner.

    Raise OSError.
    """
    return path.lstat().st_uid in {_ROOT_UID, *_owners_of_new_files(run)}


def _owners_of_new_files(folder: str | os.PathLike[str]) -> set[int]:
    """Return the owners of files that this process creates in a folder.

    Some network disks map them to another user.
    """
    return {os.geteuid(), os.stat(folder or ".").st_uid}


def _mode_of_new_files(folder: str | os.PathLike[str]) -> int:
    """Return the mode of new files.

    It is cached for _MODE_LIFETIME_S, because each check is a request to a shared disk.
    """
    name, now_s = os.path.abspath(folder), time.monotonic()
    looked_s, mode = _modes.get(name, (float("-inf"), 0))
    if now_s - looked_s >= _MODE_LIFETIME_S:
        if len(_modes) >= _MAX_MODES:
            _modes.clear()
        mode = 0o640 if is_group_readable(name) else 0o600
        _modes[name] = now_s, mode
    return mode
