"""Everything that the training process prints or logs for us goes through this module, and nothing in it raises.

stderr may be closed, None, any object of the user's, a pipe that nobody reads, or of another encoding. What is wrong
with it is no reason to stop a job: the text is lost then, and the run directory has it all the same.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
import time
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

_WRITE_TIMEOUT_S = 1.0
"""Longest wait for a reader of stderr that does not read, for one text."""
_CHUNK_BYTES = 512  # a pipe or terminal that is ready takes this much at once (POSIX's smallest PIPE_BUF)


_whatever_it_raises = contextlib.suppress(Exception)
"""Around calls of the user's stream and logging handlers."""


def is_terminal() -> bool:
    """Whether stderr is a terminal."""
    with _whatever_it_raises:
        return sys.stderr is not None and bool(sys.stderr.isatty())
    return False


def say(text: str) -> None:
    """Writes to stderr, where the user's program has one. Raises nothing but what is no Exception, as Ctrl-C."""
    stream = sys.stderr
    if stream is None:  # print() would take stdout then, which is the job's
        return
    with _whatever_it_raises:
        descriptor = _descriptor(stream)
        if descriptor is not None:
            _write(descriptor, text.encode(stream.encoding, "backslashreplace"))
            return
        stream.write(_encodable(stream, text))
        flush = getattr(stream, "flush", None)
        if flush is not None:
            flush()


def _descriptor(stream: Any) -> int | None:
    """The open file below Python's own kind of stream; None for other objects, and where write() was replaced.

    What stays in a stream's buffer because nobody takes it would make Python exit with code 120.
    """
    if type(stream) is not io.TextIOWrapper or "write" in vars(stream):
        return None
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        return None
    stream.flush()
    return descriptor


def _write(descriptor: int, content: bytes) -> None:
    """Write what is taken in time. No more is written where the reader is gone, as that may be a deadly signal."""
    ready = select.poll()
    ready.register(descriptor, select.POLLOUT)
    deadline_s = time.monotonic() + _WRITE_TIMEOUT_S
    while content:
        events = ready.poll(1000 * max(0.0, deadline_s - time.monotonic()))
        if not events or events[0][1] & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
            return
        with contextlib.suppress(BlockingIOError):
            content = content[os.write(descriptor, content[:_CHUNK_BYTES]) :]


def _encodable(stream: Any, text: str) -> str:
    encoding = getattr(stream, "encoding", None)
    return text.encode(encoding, "backslashreplace").decode(encoding) if isinstance(encoding, str) else text


if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # not subscriptable before Python 3.11


class _GuardedLogger(_Adapter):
    """A logger whose handlers, which are the user's, may raise what they like."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """As Logger.log(); without a handler, as logging itself does then, on stderr."""
        with _whatever_it_raises:
            if not self.isEnabledFor(level):
                return
            if not self.logger.hasHandlers() and logging.lastResort is _LAST_RESORT:
                if _LAST_RESORT is not None and level >= _LAST_RESORT.level:
                    say(f"{str(msg) % args if args else msg}\n")
                return
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            self.logger.log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs


_LAST_RESORT = logging.lastResort
logger = _GuardedLogger(logging.getLogger("torchlens_perf"), {})


@contextlib.contextmanager
def above_standard_streams() -> Iterator[None]:
    """Files that are opened inside never get descriptor 0, 1 or 2, where the job was started with one of them closed.

    What native code and children write to their stderr would else go into a ring.
    """
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
                if taken[-1] > 2:
                    break
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
