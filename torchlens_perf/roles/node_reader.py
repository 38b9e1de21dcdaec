"""Read the events of a node without a trainer, in a process of its own.

A watched trainer's sidecar reads the events of its node. On other nodes, the first process with a
role starts this program. The nodes share the run directory.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from torchlens_perf.config import Config, from_environment
from torchlens_perf.errors import guard
from torchlens_perf.output import above_standard_streams
from torchlens_perf.roles.event_file import LOCK
from torchlens_perf.run import children, ownership
from torchlens_perf.run.directory import (
    SIDECAR_LOCK,
    RunDirectory,
    is_writer_running,
    remove_empty_user_folders,
)
from torchlens_perf.run.mailbox import EVENTS
from torchlens_perf.run.place.node import node_name
from torchlens_perf.run.rings import memory
from torchlens_perf.run.sidecar_lock import SidecarLock

_PERIOD_S = 0.5


def is_read(folder: Path) -> bool:
    """Return True if a process reads the events in a run's folder of this node."""
    return any(memory.is_held(folder / name, fcntl.LOCK_SH) for name in (SIDECAR_LOCK, LOCK))


@guard("starting the reader of events", passes=())
@above_standard_streams()
def ensure_running(run_id: str, folder: Path) -> None:
    """Start the reader unless the events are read already. It is no child of this process.

    folder: the run's folder of this node. Without TORCHLENS_PERF_DIR, the run directory is not known.
    """
    config = Config(**from_environment(os.environ))
    if "TORCHLENS_PERF_DIR" not in os.environ or not config.sidecar or is_read(folder):
        return
    lock = SidecarLock(folder / LOCK)
    if lock.acquire():
        run = str(Path(config.dir).absolute() / run_id)
        try:
            command = children.build_command("events", run, str(lock.descriptor))
            children.start_detached(command, pass_fds=[lock.descriptor])
        except BaseException:
            lock.remove()
            raise
        lock.close()


def main(arguments: Sequence[str]) -> int:
    """Read events until the processes of this node have ended, or a sidecar takes over.

    arguments: "events", the run directory, and the descriptor of the lock, which is locked.
    """
    run, descriptor = RunDirectory(Path(arguments[1])), int(arguments[2])
    lock = SidecarLock(Path(os.readlink(f"/proc/self/fd/{descriptor}")), descriptor)
    folder, requests = lock.path.parent, list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: requests.append(number))
    os.nice(5)  # As a sidecar. With 19, a busy node wrote nothing for half a minute.
    while lock.acquire():
        _read_until_end(run, folder, requests)
        lock.remove()
        # A process creates its file before it checks the lock.
        if not run.find_local_mailboxes(EVENTS) or is_read(folder):
            break
    remove_empty_user_folders()
    return 0


def _read_until_end(run: RunDirectory, folder: Path, requests: list[int]) -> None:
    # These imports take long, and the process that has started this program may be very short.
    from torchlens_perf.roles.drain import EventReader

    disk_bytes, reader = Config(**from_environment(os.environ)).disk_bytes, None
    requests.append(0)  # The first file shows the others that this node has events.
    while True:
        files = run.find_local_mailboxes(EVENTS)
        is_taken = memory.is_held(folder / SIDECAR_LOCK, fcntl.LOCK_SH)
        ends = is_taken or not any(map(is_writer_running, files))
        # The trainer creates the run directory.
        if run.nodes.is_dir():
            with guard("reading events", passes=()), ownership.restrict_new_files_like(run.nodes):
                reader = reader or EventReader(run, node_name())
                reader.read()
                if ends or requests or reader.is_file_due or reader.is_asked:
                    reader.write(disk_bytes, ended=ends)
                    requests.clear()
        if ends:
            # A sidecar also reads what processes have written since.
            for path in () if is_taken else files:
                path.unlink(missing_ok=True)
            return
        time.sleep(_PERIOD_S)
