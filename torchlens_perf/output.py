"""All output of this package in the training process: printing to stderr and logging. Nothing here
raises.

stderr may be closed, None, an object of the user's, a pipe without a reader, or use another
encoding. Output must never stop a job. Text that stderr does not accept is lost there, but is in
the run directory.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Any

from torchlens_perf.interruption import suppress

_WRITE_TIMEOUT_S = 1.0
"""Longest wait, for one text, until a reader of stderr reads."""
# A pipe or terminal that is ready accepts this much at once: the smallest PIPE_BUF that POSIX
# permits.
_CHUNK_BYTES = 512


_whatever_it_raises = suppress(Exception)
"""Guard around the user's stream and logging handlers. Interruptions pass."""


def is_terminal() -> bool:
    """Return True if stderr is a terminal."""
    with _whatever_it_raises:
        return sys.stderr is not None and bool(sys.stderr.isatty())
    return False


def write_to_stderr(text: str) -> None:
    """Write to stderr, if the program has one.

    Only exceptions such as KeyboardInterrupt can leave this function.
    """
    stream = sys.stderr
    # With stderr=None print() would write to stdout, which belongs to the job.
    if stream is None:
        return
    with _whatever_it_raises:
        descriptor = _plain_stream_descriptor(stream)
        if descriptor is not None:
            _write(descriptor, text.encode(stream.encoding, "backslashreplace"))
            return
        encoding = getattr(stream, "encoding", None)
        if isinstance(encoding, str):
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        stream.write(text)
        stream.flush()


def _plain_stream_descriptor(stream: Any) -> int | None:
    """Return the file descriptor of a plain text stream; None for other objects, or if write() was
    replaced.

    Writing to the descriptor leaves nothing in the stream's buffer. Python exits with code 120 if
    it cannot flush that buffer.
    """
    if type(stream) is not io.TextIOWrapper or "write" in vars(stream):
        return None
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        return None
    stream.flush()
    return descriptor


def wait_until_ready(descriptor: int, event: int, deadline_s: float) -> int:
    """Return the events of a descriptor once there is one; 0 at a deadline by the monotonic clock."""
    waiting = select.poll()
    waiting.register(descriptor, event)
    found = waiting.poll(1000 * max(0.0, deadline_s - time.monotonic()))
    return found[0][1] if found else 0


def _write(descriptor: int, content: bytes) -> None:
    """Write as much as is accepted in time.

    Stop if the reader is gone: writing then may raise SIGPIPE.
    """
    deadline_s = time.monotonic() + _WRITE_TIMEOUT_S
    while content:
        if wait_until_ready(descriptor, select.POLLOUT, deadline_s) != select.POLLOUT:
            return
        with suppress(BlockingIOError):
            content = content[os.write(descriptor, content[:_CHUNK_BYTES]) :]


class _GuardedLogger(logging.LoggerAdapter):  # type: ignore[type-arg] # Python 3.10 has no argument
    """A logger that ignores exceptions of its handlers, which belong to the user."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log as Logger.log() does. Without a handler, write to stderr as logging itself does."""
        with _whatever_it_raises:
            if not self.isEnabledFor(level):
                return
            if not self.logger.hasHandlers() and logging.lastResort is _LAST_RESORT:
                if _LAST_RESORT is not None and level >= _LAST_RESORT.level:
                    write_to_stderr(f"{str(msg) % args if args else msg}\n")
                return
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            self.logger.log(level, msg, *args, **kwargs)


_LAST_RESORT = logging.lastResort
logger = _GuardedLogger(logging.getLogger("torchlens_perf"), {})
sidecar_logger = logging.getLogger("torchlens_perf.sidecar")


@contextlib.contextmanager
def above_standard_streams() -> Iterator[None]:
    """Keep files that are opened in this context off descriptors 0, 1 and 2, in jobs that start
    with one closed.

    Otherwise text that native code or a child process writes to stderr could end up in a ring file.
    """
    taken: list[int] = []
    try:
        with suppress(OSError):
            while not taken or taken[-1] <= 2:
                taken.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
