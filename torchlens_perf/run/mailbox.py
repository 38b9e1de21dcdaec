"""Files of a node by which a training process hears from the sidecar while it runs: they lie beside its ring file.

The training process makes the file, and takes it away. The sidecar writes into it and never makes one: so one that
comes too late finds none and leaves nothing behind, and no text of an earlier attempt, or of another node, can be taken
for the one that is waited for. Results also lie in the run directory, but the disk there may not answer, and nobody who
trains must wait for it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from torchlens_perf.output import above_standard_streams

REPORT = ".report"
"""Where rank 0 waits for its report at the end."""
ANSWER = ".answer"
"""Where a process waits for what it has asked: the file's first text is the question, RESULTS or STEPS."""
VIEW = ".view"
"""Where the results are kept fresh for as long as somebody looks at the run: as RESULTS."""
ALERTS = ".alerts"
"""Where the newest alerts are kept, as a list in JSON."""
FIGURES = ".figures"
"""Where the sums of this rank's steps are kept fresh, as an object in JSON (sidecar/live_results.py)."""
KINDS = (REPORT, ANSWER, VIEW, ALERTS, FIGURES)
RESULTS, STEPS = "results", "steps"
_END = b"\0"
_POLL_INTERVAL_S = 0.01


class Mailbox:
    """The reader's side. One thread."""

    @above_standard_streams()
    def __init__(self, ring: Path, kind: str, question: str = "") -> None:
        """ring: the rank's ring file. Raises OSError, also where this process has one of that kind already. With any
        error there is no file.
        """
        self.path = ring.with_suffix(kind)
        self._pid = os.getpid()
        self._seen = (0, 0)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if question:
            try:
                os.write(self._descriptor, question.encode(errors="surrogateescape"))
            except BaseException:
                self.close()
                raise

    def news(self) -> str | None:
        """The text, if there is one that this has not returned yet. One call to the system where there is none."""
        found = os.fstat(self._descriptor)
        state = found.st_mtime_ns, found.st_size
        if state == self._seen:
            return None
        text = os.pread(self._descriptor, found.st_size, 0)
        if not text.endswith(_END):
            return None  # it is just being written
        self._seen = state
        return text.removesuffix(_END).decode(errors="replace")

    def wait(self, timeout_s: float) -> str | None:
        """The same; waits for it, at most so long."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            text = self.news()
            if text is not None or time.monotonic() >= deadline_s:
                return text
            time.sleep(_POLL_INTERVAL_S)

    def close(self) -> None:
        """Takes it away: nothing can come any more. In a forked child it stays, as it is the parent's."""
        os.close(self._descriptor)
        if self._pid == os.getpid():
            self.path.unlink(missing_ok=True)


def question(mailbox: Path) -> str | None:
    """The sidecar's side: what is asked in an ANSWER; None where nobody waits, or it has been answered."""
    try:
        descriptor = os.open(mailbox, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb", buffering=0) as file:
        text = file.read(64)
    asked = text.decode(errors="replace")
    return asked if asked in (RESULTS, STEPS) else None


def deliver(mailbox: str, text: str) -> None:
    """The sidecar's side. Does nothing where nobody waits. mailbox: its path, or "". Raises OSError."""
    try:
        descriptor = os.open(mailbox, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with open(descriptor, "wb", buffering=0) as file:
        rest = text.replace("\0", "").encode(errors="backslashreplace") + _END
        while rest:
            rest = rest[file.write(rest) or 0 :]
