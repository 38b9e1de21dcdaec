"""How a sidecar that a rank has started begins: it makes the run directory, and says there what it has to say.

The rank does not touch the run directory, as its disk may not answer; here that keeps nobody waiting. A disk that
refuses is asked again for as long as somebody records, and whoever waits for a report meanwhile gets the reason.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from pathlib import Path

from torchlens_perf import ring
from torchlens_perf.errors import RingError, RunStoreError
from torchlens_perf.report_mailbox import deliver
from torchlens_perf.ring import Reader, State
from torchlens_perf.run_directory import RunDirectory, sidecar_lock, sidecar_log, writer_lives

logger = logging.getLogger("torchlens_perf.sidecar")

_AGAIN_S = 1.0


def settle(run: RunDirectory, host: str) -> bool:
    """Returns whether there is a run directory; if not, nobody records any more, and the rings are gone.

    The sidecar's thread, with the lock. May block for as long as the disk does.
    """
    said = ""
    while True:
        try:
            run.create()
            _speak_in(keep_log(run, host))
            return True
        except (OSError, RunStoreError) as error:
            if str(error) != said:
                said = str(error)
                logger.error("%s", said)
        for mailbox in run.local_mailboxes():
            with contextlib.suppress(OSError):
                deliver(str(mailbox), f"torchlens_perf: no report: {said}\n")
        if not any(map(_is_written, run.local_rings())):
            for path in run.local_rings():
                run.remove_ring(path)
            return False
        time.sleep(_AGAIN_S)


def keep_log(run: RunDirectory, host: str) -> Path:
    """What sidecars have said on this node goes into the run directory. Returns its file. Raises OSError."""
    log, until_now = run.node_log(host), sidecar_log(sidecar_lock(run.run_id))
    with contextlib.suppress(FileNotFoundError):
        said = until_now.read_bytes()
        with open(log, "ab", buffering=0) as file:
            file.write(said)
        until_now.unlink()
    return log


def _speak_in(log: Path) -> None:
    """What this process says goes there from now on."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(descriptor, stream.fileno())
    finally:
        os.close(descriptor)


def _is_written(path: Path) -> bool:
    """Whether a ring's process lives and has not ended it."""
    if not writer_lives(path):
        return False
    try:
        reader = Reader(path)
    except (OSError, RingError):
        return False
    try:
        return reader.counter(ring.STATE) == State.OPEN
    finally:
        reader.close()
