"""Find and remove files that this process's runs left behind, and end their sidecars."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torchlens_perf.run import make_folders
from torchlens_perf.run.processes import process_start_ticks

# Names of this process's runs contain one of these texts. The second text is used if the process's
# start time cannot be read.
_DIGESTS = [
    hashlib.sha256(f"{socket.gethostname()}/{os.getpid()}/{started}".encode()).hexdigest()[:8]
    for started in (process_start_ticks(os.getpid()), None)
]


def places(runs: Path) -> list[Path]:
    """Return this process's local folders and all run directories.

    Runs of other processes are excluded. Links are excluded because they stay until their launcher
    has ended.
    """
    parents = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    local = [path for parent in parents for path in parent.glob(f"torchlens-perf-{os.getuid()}/*")]
    ours = [path for path in local if is_of_this_process(path) and not path.is_symlink()]
    return sorted(ours + list(runs.glob("*")))


def is_of_this_process(path: Path) -> bool:
    """Return True if the name is that of a run of this process."""
    return any(digest in path.name for digest in _DIGESTS)


def remaining_folders(runs: Path, timeout_s: float = 60) -> list[str]:
    """Return the remaining folders, once processes that make folders have ended.

    A process for which its rank no longer waits still creates its folders and then removes them.
    """
    eventually(lambda: not _processes(make_folders.__file__), timeout_s)
    return [f"{place}: {os.listdir(place)}" for place in places(runs)]


def remove(runs: Path) -> None:
    """Remove all folders. Other processes may remove some folders at the same time."""
    deadline_s = time.monotonic() + 10
    while (found := places(runs)) and time.monotonic() < deadline_s:
        for place in found:
            shutil.rmtree(place, ignore_errors=True)
    assert not found, found


def remove_local(said: str) -> None:
    """Remove the node-local files of the runs whose directories, DIR/runs/ID, appear in a text.

    A process that was killed together with its sidecar leaves such files.
    """
    for run_id in set(re.findall(r"/runs/([\w.-]*\w)", said)):
        for parent in ("/dev/shm", tempfile.gettempdir()):
            local = Path(parent) / f"torchlens-perf-{os.getuid()}"
            for place in local.glob(f"{run_id}*"):
                if place.is_symlink():
                    place.unlink(missing_ok=True)
                else:
                    shutil.rmtree(place, ignore_errors=True)


def end_sidecars() -> None:
    """Kill the sidecars of this process's runs.

    Sidecars are not child processes, and they need a second to start.
    """
    if not (pids := _processes("sidecar")):
        return
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not set(pids) & set(_processes("sidecar")))


def _processes(argument: str) -> list[int]:
    """Return the processes of this process's runs that have the argument in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            said = (entry / "cmdline").read_bytes()
            if f"\0{argument}\0".encode() in said and any(
                each.encode() in said for each in _DIGESTS
            ):
                found.append(int(entry.name))
    return found


def eventually(condition: Callable[[], bool], timeout_s: float = 60) -> bool:
    """Wait until the condition is true. Return False after a timeout."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        begun_s = time.monotonic()
        if condition():
            return True
        # A condition that takes long, such as a report, is tested less often.
        time.sleep(max(0.02, 4 * (time.monotonic() - begun_s)))
    return condition()
