"""Wait through a run's first seconds with as few imports as possible.

The imports for reading take half a second of CPU time, which a job on busy CPUs would lose. A run
that ends within SHORT_RUN_S is therefore read once, at its end. While this process waits, it reads a
few words of each ring's header. The wait ends at once in these cases:

- a rank ends,
- a ring is filling,
- a user asks for results,
- a ring's header cannot be read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from torchlens_perf.run.sidecar_status import LOADS, SEVERAL_NODES, SHARED, write_status
from torchlens_perf.sidecar import priority, termination
from torchlens_perf.sidecar.rings.waiting import FILLING, WaitingRing
from torchlens_perf.sidecar.wake import Wake

SHORT_RUN_S = 5.0
POLL_INTERVAL_S = 0.025
# Longest interval if the kernel reports new files.
_MAX_POLL_INTERVAL_S = 0.5
# A poll should find this share of a ring to be new at most.
_NEW_SHARE = 1 / 16
_RESCAN_INTERVAL_S = 0.25
# These suffixes are copies from run/directory.py and run/mailbox.py, which take long to import.
_REGISTERED = ".registered"
_REQUESTS, _REPORT = (".answer", ".view"), ".report"


class RingWatch:
    """Watch on the headers of one node's rings, until the rings should be read."""

    def __init__(self, folder: str) -> None:
        """folder: this node's folder of registered rings, see RunDirectory.register_ring()."""
        self.rings: dict[str, WaitingRing] = {}
        self.is_ending = False
        """True if a rank waits for its report."""
        self.new_share = 0.0
        """The largest share of a ring that was written between the last two polls."""
        self._folder = folder
        self._gone: set[str] = set()
        self._has_request = False
        self._rescanned_s = float("-inf")

    def poll_rings(self, now_s: float, rescan_s: float) -> bool:
        """Return True if reading should start.

        now_s: CLOCK_MONOTONIC. rescan_s: time since the last search for files and for ended
        processes after which they are searched again.
        """
        rescans = now_s - self._rescanned_s >= rescan_s
        try:
            if rescans:
                self._rescanned_s = now_s
                self._open_new_rings()
            due = [
                ring.poll_header(now_s)
                or ring.fill_level >= FILLING
                or (rescans and not ring.is_writer_alive())
                for ring in self.rings.values()
            ]
        except (OSError, ValueError):
            return True  # RingSources will report the error.
        self.new_share = max((ring.new_share for ring in self.rings.values()), default=0.0)
        # A rank registers its ring before it starts the sidecar. Without rings there is no work.
        return any(due) or not due or self._has_request

    @property
    def poll_due_s(self) -> float:
        """Time in seconds until the next poll is due because a rank is stopped."""
        return min((ring.poll_due_s for ring in self.rings.values()), default=float("inf"))

    def _open_new_rings(self) -> None:
        for path in self._list_rings():
            if path not in self.rings and path not in self._gone:
                try:
                    self.rings[path] = WaitingRing(path)
                except FileNotFoundError:
                    self._gone.add(path)  # An earlier sidecar has read this ring to its end.

    def _list_rings(self) -> list[str]:
        """Return the paths of RunDirectory.local_rings(). Also look for requests for results."""
        names = os.listdir(self._folder)
        self._has_request = any(name.endswith(_REQUESTS) for name in names)
        self.is_ending = any(name.endswith(_REPORT) for name in names)
        links = sorted(name for name in names if name.endswith(_REGISTERED))
        return [os.readlink(f"{self._folder}/{name}") for name in links]


def wait_until_due(
    folder: str,
    *,
    longest_s: float = SHORT_RUN_S,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
    longest_sleep_s: float = POLL_INTERVAL_S,
) -> dict[str, WaitingRing]:
    """Wait until a ring should be read, on SIGTERM, or for `longest_s`. Return the rings by path.

    folder: the folder of the node's registered rings.
    now, sleep: the clock. sleep() returns True if a new file has ended the sleep.
    longest_sleep_s: the interval between two polls grows to this length.
    """
    until_s, rings = now() + longest_s, RingWatch(folder)
    sleep_s, is_news = POLL_INTERVAL_S, False
    while True:
        now_s = now()
        rescan_s = 0.0 if is_news else max(_RESCAN_INTERVAL_S, 2 * sleep_s)
        if rings.poll_rings(now_s, rescan_s) or now_s >= until_s or termination.is_requested():
            return rings.rings
        if is_news or rings.is_ending:
            sleep_s = POLL_INTERVAL_S
        elif rings.new_share > _NEW_SHARE:
            sleep_s = max(POLL_INTERVAL_S, sleep_s / 2)
        else:
            sleep_s = min(longest_sleep_s, 1.5 * sleep_s)
        is_news = bool(sleep(min(sleep_s, rings.poll_due_s, max(0.0, until_s - now_s))))


def main(arguments: Sequence[str]) -> int:
    """Run the program that recorder.sidecar.ensure_running() starts. Return the exit code.

    arguments: "sidecar", the run directory, "--host" and its name, "--lock-descriptor" and its
    number. These may follow:

    - SEVERAL_NODES: connect to the sidecars of other nodes at once.
    - SHARED: the group may read the run directory.
    """
    _, run, _, host, _, descriptor, *more = arguments
    termination.install_handler()
    if os.getpid() != os.getpgrp():  # This process is still in the session of a shell.
        os.setsid()
    wake = Wake()
    wake.install()
    lock = int(descriptor)
    # The lock's folder also contains the links to registered rings.
    folder = os.path.dirname(os.readlink(f"/proc/self/fd/{lock}"))
    wake.watch_folder(folder)
    write_status(lock, "has not begun to read")
    priority.lower_memory_priority()
    rings = wait_until_due(
        folder,
        longest_s=0.0 if SEVERAL_NODES in more else SHORT_RUN_S,
        sleep=wake.sleep,
        longest_sleep_s=_MAX_POLL_INTERVAL_S if wake.reports_files else POLL_INTERVAL_S,
    )
    write_status(lock, LOADS)
    from torchlens_perf.sidecar.start.process import read_live_run

    return read_live_run(run, host, lock, rings, wake, shared=SHARED in more)
