"""Mailbox files, in which a training process receives messages from its node's sidecar.

Mailboxes are next to the ring file. The training process creates and removes them. The sidecar only
writes to existing mailboxes. A late sidecar therefore leaves no file behind, and a process never
reads a message for another attempt or node.

Results are also in the run directory, but training must not wait for a disk that may not respond.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from torchlens_perf.interruption import ours
from torchlens_perf.output import above_standard_streams
from torchlens_perf.run import ownership
from torchlens_perf.run.kept_file import KeptFile

REPORT = ".report"
"""Mailbox for the report at the end of the run. Only rank 0 has one."""
ANSWER = ".answer"
"""Mailbox for the answer to a question. The training process first writes its question, RESULTS or
STEPS, into the file.
"""
VIEW = ".view"
"""Mailbox for live results while a user displays the run. The format is that of the answer to
RESULTS.
"""
ALERTS = ".alerts"
"""Mailbox for the newest alerts as a JSON list."""
KINDS = (REPORT, ANSWER, VIEW, ALERTS)
EVENTS = ".events"
"""Suffix of files in which processes write events (roles/), in the same folders."""
RESULTS, STEPS = "results", "steps"
_END = b"\0"
_POLL_INTERVAL_S = 0.01


class Mailbox:
    """Mailbox of a training process, which creates and reads it on one thread."""

    @above_standard_streams()
    def __init__(self, ring: Path, kind: str, question: str = "") -> None:
        """Create the mailbox file.

        ring: path of the rank's ring file. question: text to write into the file. Raise OSError,
        for example if the mailbox exists. The file is then not created.
        """
        self.path = ring.with_suffix(kind)
        self._pid = os.getpid()
        self._seen = (0, 0)
        descriptor = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        self._file = KeptFile(descriptor)
        if question:
            try:
                os.write(descriptor, question.encode(errors="surrogateescape"))
            except BaseException:
                self.close()
                raise

    def read_new_message(self) -> str | None:
        """Return the sidecar's message if it has changed since the last call, else None.

        If nothing has changed, the call costs one system call. A file that the program has closed
        is opened again by its path.
        """
        found = self._file.stat()
        if found is None:
            return self._reopen_and_read()
        state = found.st_mtime_ns, found.st_size
        if state == self._seen:
            return None
        text = self._file.read(found.st_size)
        if not text.endswith(_END):
            # The sidecar is still writing.
            return None
        self._seen = state
        return text.removesuffix(_END).decode(errors="replace")

    def _reopen_and_read(self) -> str | None:
        try:
            self._file = KeptFile(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
        except ours(OSError):
            return None
        return self.read_new_message()

    def wait_for_message(self, timeout_s: float) -> str | None:
        """Wait for a new message and return it; None after the timeout."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            text = self.read_new_message()
            if text is not None or time.monotonic() >= deadline_s:
                return text
            time.sleep(_POLL_INTERVAL_S)

    def close(self) -> None:
        """Close and remove the file. In a forked child, the file stays for the parent."""
        self._file.close()
        if self._pid == os.getpid():
            self.path.unlink(missing_ok=True)


def read_question(mailbox: Path) -> str | None:
    """Return the question in an ANSWER mailbox; None if it has no question. Called by the sidecar."""
    try:
        asked = ownership.read_regular_file(mailbox, 64).decode(errors="replace")
    except ours(OSError):
        return None  # A longer text is an answer.
    return asked if asked in (RESULTS, STEPS) else None


def deliver_text(mailbox: str, text: str) -> None:
    """Write a message to a mailbox if it still exists. Raise OSError. Called by the sidecar.

    mailbox: path of the file, or "".
    """
    try:
        descriptor = os.open(mailbox, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with open(descriptor, "wb", buffering=0) as file:
        content = text.replace("\0", "").encode(errors="backslashreplace")
        ownership.write_all(file, content + _END)
