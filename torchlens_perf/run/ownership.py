"""Who can change a file, and files of ours that nobody else can read or put something else in the place of.

Native code is loaded only from places that nobody but this user and root can write to. What we write is new, or ours
already; what we read is a regular file: a FIFO or a device in its place keeps nobody waiting.
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
_MAX_LINKS = 40  # as the kernel has it
_MODE_LIFETIME_S, _MAX_MODES = 30.0, 64
_modes: dict[str, tuple[float, int]] = {}
"""By folder: when it was looked at, and the mode of what is made in it. Any thread."""


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


class NotRegularFileError(OSError):
    """A FIFO, a device or a socket, where a file of ours should be."""


def open_to_read(path: str | os.PathLike[str]) -> int:
    """Opens a regular file; never waits for another process. Raises OSError, NotRegularFileError. Any thread."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        raise NotRegularFileError(f"{os.fspath(path)} is not a regular file")
    return descriptor


class TooLargeError(OSError):
    """A file that is larger than any that we write in its place."""


def read_bytes(path: str | os.PathLike[str], at_most: int) -> bytes:
    """Return a regular file's content. Raises as open_to_read(), and TooLargeError for more than `at_most` bytes.

    A sparse file of any size takes no room on its disk, so a file's size is checked before it is read.
    """
    with open(open_to_read(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > at_most else file.read(size + 1)  # Python allocates what is asked for
        if len(content) > size:  # it has grown
            content += file.read(at_most + 1 - len(content))
        if max(size, len(content)) > at_most:
            raise TooLargeError(errno.EFBIG, f"it has {size} bytes; at most {at_most} are read", os.fspath(path))
        return content


def open_to_append(path: str | os.PathLike[str], flags: int = 0) -> int:
    """Opens a file of this user's at its end, or makes it, mode as create() has it; follows no link.

    An opener for open(), which gives the flags. Any thread. Raises OSError: PermissionError for
    somebody else's file, NotRegularFileError for what is none.
    """
    folder = os.path.dirname(path)
    owners, mode = _ours(folder), _file_mode(folder)  # before there is a file that an error could leave
    flags |= os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
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


def create(path: str | os.PathLike[str], like: str | os.PathLike[str] = "") -> int:
    """Opens a new file for writing, mode 0600, or 0640 where its folder is shared with a group, whatever the umask.

    What lay at the path is removed, not written to. like: a folder to look at instead. Raises OSError. Any thread.
    """
    mode = _file_mode(like or os.path.dirname(path))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:  # asked for only then: each call is one for a shared disk's metadata server
        os.unlink(path)
        descriptor = os.open(path, flags, 0o600)
    if mode != 0o600:
        os.fchmod(descriptor, mode)
    return descriptor


def write(path: str | os.PathLike[str], content: str | bytes, like: str | os.PathLike[str] = "") -> None:
    """Writes a new file, as create() makes it. Raises OSError."""
    with open(create(path, like), "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode(errors="backslashreplace"))


def write_all(file: io.RawIOBase | io.FileIO, content: bytes) -> None:
    """Writes all of it to an unbuffered file: a disk that is nearly full takes a part, and says nothing of the rest.

    Raises OSError.
    """
    rest = memoryview(content)
    while rest:
        taken = file.write(rest)
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[taken:]


def is_shared(folder: str | os.PathLike[str]) -> bool:
    """Whether its group may read it. Raises OSError."""
    return bool(os.stat(folder).st_mode & stat.S_IRGRP)


@contextlib.contextmanager
def as_private_as(folder: Path) -> Iterator[None]:
    """What this process makes meanwhile can be read by this user, and by the folder's group if the folder can.

    By the umask, which is the whole process's: not in a training process. Where there is no folder yet: by this user.
    """
    with contextlib.ExitStack() as leaving:
        leaving.callback(os.umask, os.umask(_PRIVATE_UMASK))
        with contextlib.suppress(OSError):
            if is_shared(folder):
                os.umask(_GROUP_UMASK)
        yield


def may_ask(path: Path, run: Path) -> bool:
    """Whether what lies at `path` was put there by this user, by root or by the run's owner. Raises OSError."""
    return path.lstat().st_uid in {_ROOT_UID, *_ours(run)}


def _ours(folder: str | os.PathLike[str]) -> set[int]:
    """Return the owners of files that this process creates in a folder. Some network disks map them to another user."""
    return {os.geteuid(), os.stat(folder or ".").st_uid}


def _file_mode(folder: str | os.PathLike[str]) -> int:
    """Return the mode of new files. Kept for _MODE_LIFETIME_S: each look asks a shared disk, every few seconds."""
    name, now_s = os.path.abspath(folder), time.monotonic()
    looked_s, mode = _modes.get(name, (float("-inf"), 0))
    if now_s - looked_s >= _MODE_LIFETIME_S:
        if len(_modes) >= _MAX_MODES:
            _modes.clear()
        mode = 0o640 if is_shared(name) else 0o600
        _modes[name] = now_s, mode
    return mode
