"""Files by which a training process receives messages from its node's sidecar during a run.

They are next to its ring file. The training process creates and removes the file. The sidecar
writes to it and never creates one. A late sidecar therefore leaves nothing behind, and a reader
cannot get the text of another attempt or node.

Results are also in the run directory. Training must not wait for its disk, which may not respond.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from torchlens_perf.output import above_standard_streams

REPORT = ".report"
"""Rank 0 waits here for its report at the end."""
ANSWER = ".answer"
"""A process waits here for the answer to a question. The file's first text is the question, RESULTS
or STEPS.
"""
VIEW = ".view"
"""The sidecar updates the results here while a user displays the run. The format is that of
RESULTS.
"""
ALERTS = ".alerts"
"""The sidecar updates the newest alerts here, as a JSON list."""
FIGURES = ".figures"
"""The sidecar updates the sums of this rank's steps here, as a JSON object
(sidecar/live_results.py).
"""
KINDS = (REPORT, ANSWER, VIEW, ALERTS, FIGURES)
RESULTS, STEPS = "results", "steps"
_END = b"\0"
_POLL_INTERVAL_S = 0.01


class Mailbox:
    """The reader's end of a mailbox. One thread."""

    @above_standard_streams()
    def __init__(self, ring: Path, kind: str, question: str = "") -> None:
        """Make the file.

        Raise OSError, also if this process has a mailbox of that kind; no file is left then.

        ring: the rank's ring file.
        """
        self.path = ring.with_suffix(kind)
        self._pid = os.getpid()
        self._seen = (0, 0)
        self._descriptor = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        if question:
            try:
                os.write(self._descriptor, question.encode(errors="surrogateescape"))
            except BaseException:
                self.close()
                raise

    def news(self) -> str | None:
        """Return the text if it has changed since the last call, else None.

        A call without news costs one system call.
        """
        found = os.fstat(self._descriptor)
        state = found.st_mtime_ns, found.st_size
        if state == self._seen:
            return None
        text = os.pread(self._descriptor, found.st_size, 0)
        if not text.endswith(_END):
            # The sidecar is still writing.
            return None
        self._seen = state
        return text.removesuffix(_END).decode(errors="replace")

    def wait(self, timeout_s: float) -> str | None:
        """Wait for a changed text as news() returns it; None on timeout."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            text = self.news()
            if text is not None or time.monotonic() >= deadline_s:
                return text
            time.sleep(_POLL_INTERVAL_S)

    def close(self) -> None:
        """Remove the file. A forked child leaves it to its parent."""
        os.close(self._descriptor)
        if self._pid == os.getpid():
            self.path.unlink(missing_ok=True)


def read_question(mailbox: Path) -> str | None:
    """Return the question in an ANSWER, on the sidecar; None if it is no longer open."""
    try:
        descriptor = os.open(mailbox, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb", buffering=0) as file:
        text = file.read(64)
    asked = text.decode(errors="replace")
    return asked if asked in (RESULTS, STEPS) else None


def deliver_text(mailbox: str, text: str) -> None:
    """Write a text to a mailbox, on the sidecar. Do nothing if its reader has gone. Raise OSError.

    mailbox: path of the file, or "".
    """
    try:
        descriptor = os.open(mailbox, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with open(descriptor, "wb", buffering=0) as file:
        rest = text.replace("\0", "").encode(errors="backslashreplace") + _END
        while rest:
            rest = rest[file.write(rest) or 0 :]
