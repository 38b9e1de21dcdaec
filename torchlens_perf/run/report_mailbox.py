"""Where rank 0 waits for its report: a file on its node, beside its ring file.

The report also lies in the run directory, but the disk there may not answer, and rank 0 must not wait for it. Rank 0
makes the file, and only rank 0: a sidecar that comes too late finds none and leaves nothing behind. So no report of an
earlier attempt, or of another node, can be taken for the one that is waited for.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_END = b"\0"
_LOOK_EVERY_S = 0.01


class ReportMailbox:
    """Rank 0's side. One thread."""

    def __init__(self, ring: Path) -> None:
        """ring: the rank's ring file. Raises OSError."""
        self.path = ring.with_suffix(".report")
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def wait(self, timeout_s: float) -> str | None:
        """The text; None if it is not there after this time."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            text = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
            if text.endswith(_END):
                return text.removesuffix(_END).decode(errors="replace")
            if time.monotonic() > deadline_s:
                return None
            time.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        """Takes it away: nothing can come any more."""
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)


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
