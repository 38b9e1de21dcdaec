"""Check who can change a file, and write files that other users can neither read nor replace.

Native code is loaded only from folders that only this user and root can write to. Files that this
package writes are new or belong to this user. Files that it reads must be regular files, because
opening a FIFO or a device could block.
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

from torchlens_perf.interruption import suppress

_ROOT_UID = 0
_PRIVATE_UMASK, _GROUP_UMASK = 0o077, 0o027
# The kernel follows at most the same number of links.
_MAX_LINKS = 40
_MODE_LIFETIME_S, _MAX_MODES = 30.0, 64
_modes: dict[str, tuple[float, int]] = {}
"""For each folder: time of the last check, and mode of new files. Any thread may use it."""


def why_others_can_change(path: Path) -> str | None:
    """Return why a user other than root could change the file at `path`; None if none could.

    All folders and symbolic links are checked from the top down, then the file. Each must belong to
    this user or to root and must not be writable by others. Parent folders may be sticky, as /tmp
    is. Other users cannot replace a part that has been checked, so the result stays valid.

    The group permissions also cover access control lists, because they are the mask of such a list.
    `/` is not checked, because a user who can change `/` can also change Python.

    Raise OSError if the file does not exist or cannot be checked. Any thread may call this.
    """
    if not path.is_absolute():
        return f"{path} is not an absolute path"
    at, to_come, links = Path("/"), list(reversed(path.parts)), 0
    while to_come:
        part = to_come.pop()
        # `at` contains no links, because they have been followed.
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
    """The path leads to a FIFO, a device or a socket instead of a regular file."""


def open_to_read(path: str | os.PathLike[str]) -> int:
    """Open a regular file without blocking, and no link. Raise OSError or NotRegularFileError.

    Any thread may call this.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        raise NotRegularFileError(f"{os.fspath(path)} is not a regular file")
    return descriptor


class TooLargeError(OSError):
    """The file is larger than any file that this package writes to its path."""


def read_regular_file(path: str | os.PathLike[str], at_most: int) -> bytes:
    """Return the content of a regular file.

    The size is checked before the file is read, because a huge sparse file takes no disk space.

    Raise TooLargeError for more than `at_most` bytes, and the same errors as open_to_read().
    """
    with open(open_to_read(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # read(at_most) would waste memory, because read() allocates the requested number of bytes.
        content = b"" if size > at_most else file.read(size + 1)
        # If there is more content, the file has grown since fstat().
        if len(content) > size:
            content += file.read(at_most + 1 - len(content))
        if max(size, len(content)) > at_most:
            raise TooLargeError(
                errno.EFBIG, f"it has {size} bytes; at most {at_most} are read", os.fspath(path)
            )
        return content


def open_to_append(path: str | os.PathLike[str], flags: int = 0) -> int:
    """Open this user's file for appending, or create it with the mode of create_private_file().

    Symbolic links are not followed. This function is an opener for open(), which passes the flags.
    Any thread may call it. Raise OSError: PermissionError for another user's file,
    NotRegularFileError for a file that is not regular.
    """
    folder = os.path.dirname(path)
    # These calls may fail, so they are made before the file is created.
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
    try:
        found = os.fstat(descriptor)
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

    The umask has no effect. An existing file is removed and not overwritten. Any thread may call
    this. like: folder that determines the mode, by default the file's own folder. Raise OSError.
    """
    mode = _mode_of_new_files(like or os.path.dirname(path))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        # unlink() is only called after an error, because each call is a request to the metadata
        # server of a shared disk.
        os.unlink(path)
        descriptor = os.open(path, flags, 0o600)
    if mode != 0o600:
        os.fchmod(descriptor, mode)
    return descriptor


def write_private_file(
    path: str | os.PathLike[str], content: str | bytes, like: str | os.PathLike[str] = ""
) -> None:
    """Write content to a new file of create_private_file(). Raise OSError."""
    with open(create_private_file(path, like), "wb") as file:
        file.write(
            content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
        )


def replace_private_file(
    path: Path, content: str | bytes, like: str | os.PathLike[str] = ""
) -> None:
    """Write content to a file of create_private_file(), atomically. Raise OSError.

    Until then the content is in a hidden file in the same folder, which any exception removes.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        write_private_file(partial, content, like)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_all(file: io.RawIOBase | io.FileIO, content: bytes | memoryview) -> None:
    """Write all content to an unbuffered file. Raise OSError.

    On an almost full disk, one write(2) may write only a part of the content without an error.
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
    """Context in which new files are as private as a folder: readable for its group, or not.

    If the folder does not exist, only this user can read new files. The context changes the umask
    of the whole process, so training processes must not use it.
    """
    with contextlib.ExitStack() as leaving:
        leaving.callback(os.umask, os.umask(_PRIVATE_UMASK))
        with suppress(OSError):
            if is_group_readable(folder):
                os.umask(_GROUP_UMASK)
        yield


def is_trusted_request(path: Path, run: Path) -> bool:
    """Return True if the file at `path` belongs to this user, to root or to the run's owner.

    Raise OSError.
    """
    return path.lstat().st_uid in {_ROOT_UID, *_owners_of_new_files(run)}


def _owners_of_new_files(folder: str | os.PathLike[str]) -> set[int]:
    """Return the possible owners of files that this process creates in a folder.

    Some network disks assign new files to another user.
    """
    return {os.geteuid(), os.stat(folder or ".").st_uid}


def _mode_of_new_files(folder: str | os.PathLike[str]) -> int:
    """Return the mode for new files in a folder.

    The mode is cached for _MODE_LIFETIME_S, because each check is a request to a shared disk.
    """
    name, now_s = os.path.abspath(folder), time.monotonic()
    looked_s, mode = _modes.get(name, (float("-inf"), 0))
    if now_s - looked_s >= _MODE_LIFETIME_S:
        if len(_modes) >= _MAX_MODES:
            _modes.clear()
        mode = 0o640 if is_group_readable(name) else 0o600
        _modes[name] = now_s, mode
    return mode
