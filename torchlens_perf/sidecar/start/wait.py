"""Wait through a run's first seconds with as few imports as possible.

The sidecar reads a run that ends within SHORT_RUN_S once, at its end. The start of reading takes
half a second of CPU time, which training would lose. While this process waits, it reads a few words
of each ring's header. The wait ends at once in these cases:

- a rank ends,
- a ring fills up,
- a user asks for results,
- no rank finishes a step for STALLED_S,
- a ring's header cannot be read.

In the meantime, a thread imports the next modules on idle CPUs (preload.py). The report is
therefore ready in time even after a run of a few seconds.

If the job keeps all CPUs busy, each second of this process's CPU time costs the job a second, because
its ranks and threads wait for each other. The wait then lasts BUSY_WAIT_S. Nothing is imported, and
records that the ring would lose are moved to a spool (run/rings/spool.py). If another program
receives results during the run, or the spool is full, the imports start earlier: after STARVED_S,
with a small share of a CPU.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from torchlens_perf.run.sidecar_status import AT_ONCE, LOADS, SEVERAL_NODES, SHARED, write_status
from torchlens_perf.sidecar import priority, termination
from torchlens_perf.sidecar.busy import BusyCpus
from torchlens_perf.sidecar.rings.waiting import WaitingRing
from torchlens_perf.sidecar.wake import Wake

TYPE_CHECKING = False  # a copy of typing.TYPE_CHECKING, because importing typing takes long
if TYPE_CHECKING:
    from torchlens_perf.sidecar.start.preload import ImportThread

SHORT_RUN_S = 5.0
# After this time, an import thread that gets no idle CPU is given a small share of a CPU. After
# twice this time, the sidecar starts to read the rings.
STARVED_S = 10.0
# On busy CPUs, the start of reading takes at most half a percent of this time.
BUSY_WAIT_S = 90.0
# The wait ends early in a job that makes no progress, which may be a hang.
STALLED_S = 8.0
# If a ring will be full within this time, the imports run at normal priority.
SOON_FULL_S = 14.0
PRELOAD_AFTER_S = 0.5
# The imports start at the first of these fill levels of a ring, and reading starts at the second.
# The ring must not overflow before the first records are read.
FILLING, FULL = 1 / 8, 1 / 2
POLL_INTERVAL_S = 0.025
# Longest interval on busy CPUs if the kernel reports new files.
_MAX_POLL_INTERVAL_S = 0.5
# A poll should find this share of a ring to be new at most.
_NEW_SHARE = 1 / 16
# On busy CPUs, records are moved to the spools at this fill level. The imports start when the
# spools of the node have three quarters of their largest number of records (24 MB).
SPOOL_AT = 1 / 4
MAX_SPOOLED_RECORDS = 3 << 17
_SPOOL_FILLING = 3 / 4
_RESCAN_INTERVAL_S = 0.25
# These suffixes are copies from run/directory.py and run/mailbox.py, which take long to import.
_REGISTERED = ".registered"
# A sidecar with one of these variables exports while the job runs (exporters/otlp_environment.py).
_EXPORTS = (
    "OTEL_EXPORTER_OTLP_",
    "OTEL_TRACES_EXPORTER",
    "OTEL_METRICS_EXPORTER",
    "OTEL_LOGS_EXPORTER",
)
_REQUESTS, _REPORT, _LISTENERS = (".answer", ".view"), ".report", (".alerts", ".figures")


class RingWatch:
    """Watch on the headers of one node's rings, until the rings should be read."""

    def __init__(self, folder: str, rings: Sequence[str] = ()) -> None:
        """folder: this node's folder of registered rings, see RunDirectory.register_ring().

        rings: "DESCRIPTOR:PATH" of rings that this process had open before its exec. A ring in
        anonymous memory may have no other open descriptor.
        """
        self.rings: dict[str, WaitingRing] = {}
        for descriptor, _, path in (each.partition(":") for each in rings):
            os.set_inheritable(int(descriptor), False)
            self.rings[path] = WaitingRing(path, int(descriptor))
        self.is_followed = any(name.startswith(_EXPORTS) for name in os.environ)
        """True if a program receives results while the job runs."""
        self.is_ending = False
        """True if a rank ends and waits for its report."""
        self.new_share = 0.0
        """The largest share of a ring that was written between the last two polls."""
        self._folder = folder
        self._gone: set[str] = set()
        self._has_request = self._spools = False
        self._rescanned_s = float("-inf")

    def poll_rings(self, now_s: float, rescan_s: float = 0.0, *, spools: bool = False) -> bool:
        """Return True if reading should start.

        now_s: CLOCK_MONOTONIC. rescan_s: time since the last search for files and for ended
        processes after which they are searched again. spools: move records of filling rings to
        their spools.
        """
        rescans = now_s - self._rescanned_s >= rescan_s
        try:
            if rescans:
                self._rescanned_s = now_s
                self._open_new_rings()
            due = [
                ring.poll_header(now_s) or (rescans and not ring.is_writer_alive())
                for ring in self.rings.values()
            ]
        except (OSError, ValueError):
            return True  # RingSources will report the error.
        self.new_share = max((ring.new_share for ring in self.rings.values()), default=0.0)
        self._spools = spools and all(map(self._move_records_if_filling, self.rings.values()))
        # A rank registers its ring before it starts the sidecar. Without rings there is no work.
        return any(due) or not due or self._has_request or self._fullest >= FULL

    def _move_records_if_filling(self, ring: WaitingRing) -> bool:
        """Move records to the ring's spool if the ring is filling. Return False if that fails."""
        room = MAX_SPOOLED_RECORDS - self._spooled
        return ring.fill_level < SPOOL_AT or (room > 0 and ring.move_records_to_spool(room))

    @property
    def poll_due_s(self) -> float:
        """Time in seconds until the next poll is due because a rank is stopped."""
        return min((ring.poll_due_s for ring in self.rings.values()), default=float("inf"))

    @property
    def has_filling_ring(self) -> bool:
        """True if a ring, or the room for spools, may be full soon."""
        if self._spools:
            return self._spooled >= _SPOOL_FILLING * MAX_SPOOLED_RECORDS
        return self._fullest >= FILLING

    def time_until_loss_s(self, waited_s: float) -> float:
        """Return when records will be lost, if the rings fill as fast as until now."""
        rate = sum(ring.head for ring in self.rings.values()) / waited_s
        room = MAX_SPOOLED_RECORDS - self._spooled if self._spools else 0
        rings_s = [ring.room * waited_s / ring.head for ring in self.rings.values() if ring.head]
        return min(rings_s) + room / rate if rings_s else float("inf")

    def time_since_progress_s(self, now_s: float) -> float:
        """Return the time since a rank has finished a step; 0 without rings."""
        return min((now_s - ring.step_s for ring in self.rings.values()), default=0.0)

    @property
    def _fullest(self) -> float:
        return max((ring.fill_level for ring in self.rings.values()), default=0.0)

    @property
    def _spooled(self) -> int:
        return sum(ring.spooled for ring in self.rings.values())

    def _open_new_rings(self) -> None:
        for path in self._list_rings():
            if path not in self.rings and path not in self._gone:
                try:
                    self.rings[path] = WaitingRing(path)
                    self.is_followed |= self.rings[path].is_scraped()
                except FileNotFoundError:
                    self._gone.add(path)  # An earlier sidecar has read this ring to its end.

    def _list_rings(self) -> list[str]:
        """Return the paths of RunDirectory.local_rings(). Also look for requests for results."""
        names = os.listdir(self._folder)
        self._has_request = any(name.endswith(_REQUESTS) for name in names)
        self.is_ending = any(name.endswith(_REPORT) for name in names)
        self.is_followed |= any(name.endswith(_LISTENERS) for name in names)
        links = sorted(name for name in names if name.endswith(_REGISTERED))
        return [os.readlink(f"{self._folder}/{name}") for name in links]


def wait_until_due(
    folder: str,
    prepare: Callable[[], ImportThread],
    *,
    impatient: bool = False,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
    longest_sleep_s: float = POLL_INTERVAL_S,
    busy_cpus: Callable[[float], bool | None] | None = None,
) -> tuple[dict[str, WaitingRing], ImportThread | None]:
    """Wait until reading should start.

    Return the open rings by path, and the import thread or None.

    The wait ends when a ring should be read, or on SIGTERM. The wait also ends after SHORT_RUN_S if
    all modules are imported, and after twice STARVED_S in any case. On busy CPUs it ends after
    BUSY_WAIT_S instead.

    folder: the folder of the node's registered rings.
    prepare: starts the import thread. Called once, after PRELOAD_AFTER_S or when a ring fills.
    impatient: do not wait for SHORT_RUN_S once all modules are imported, nor on busy CPUs.
    now, sleep: the clock. sleep() returns True if a new file has ended the sleep.
    longest_sleep_s: the interval between two polls grows to this length.
    busy_cpus: called with the time, returns True if no CPU is idle, and None if that is not known.
    """
    began_s, preload, hurries = now(), None, False
    rings, longest_s = RingWatch(folder), SHORT_RUN_S if impatient else 2 * STARVED_S
    busy_cpus = BusyCpus().poll if busy_cpus is None else busy_cpus
    was_busy = is_news = False
    sleep_s = POLL_INTERVAL_S
    while True:
        now_s = now()
        waited_s = now_s - began_s
        is_busy = False if impatient else busy_cpus(now_s)
        was_busy |= bool(is_busy)
        may_be_busy = was_busy or is_busy is None
        rescan_s = 0.0 if is_news else max(_RESCAN_INTERVAL_S, 2 * sleep_s)
        if rings.poll_rings(now_s, rescan_s, spools=may_be_busy) or termination.is_requested():
            break
        # A node whose CPUs were busy once may have a few idle moments.
        gives_way = may_be_busy and not rings.is_followed and not rings.has_filling_ring
        if waited_s >= (BUSY_WAIT_S if gives_way else longest_s):
            break
        if gives_way and rings.time_since_progress_s(now_s) >= STALLED_S:
            break
        if preload is None and (
            rings.has_filling_ring
            or (waited_s >= PRELOAD_AFTER_S and not (gives_way and is_busy is not False))
        ):
            preload = prepare()
        if preload is not None:
            if not hurries and not gives_way and (rings.has_filling_ring or waited_s >= STARVED_S):
                hurries = True
                is_soon = rings.time_until_loss_s(waited_s) < SOON_FULL_S
                preload.hurry(priority.USUAL_GROUP if is_soon else priority.SLOW_GROUP)
            if preload.is_done and (impatient or waited_s >= SHORT_RUN_S):
                break
        if is_news or rings.is_ending:
            sleep_s = POLL_INTERVAL_S
        elif rings.new_share > _NEW_SHARE:
            sleep_s = max(POLL_INTERVAL_S, sleep_s / 2)
        else:
            sleep_s = min(longest_sleep_s, 1.5 * sleep_s)
        is_news = bool(sleep(min(sleep_s, rings.poll_due_s)))
    return rings.rings, preload


def main(arguments: Sequence[str]) -> int:
    """Run the program that recorder.sidecar.ensure() starts. Return the exit code.

    arguments: "sidecar", the run directory, "--host" and its name, "--lock-descriptor" and its
    number. These may follow:

    - SEVERAL_NODES: the sidecar has to connect to other nodes while the job runs.
    - SHARED: the group may read the run directory.
    - AT_ONCE: start without waiting. Rings follow as "DESCRIPTOR:PATH".
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
    if AT_ONCE in more:
        write_status(lock, LOADS)
        waiting = RingWatch(folder, more[more.index(AT_ONCE) + 1 :])
        # Open the other rings now, because anonymous memory is freed when its process ends.
        waiting.poll_rings(time.monotonic())
        rings = waiting.rings
    else:
        write_status(lock, "has not begun to read")
        priority.lower_memory_priority()
        rings, preload = wait_until_due(
            folder,
            _start_imports,
            impatient=SEVERAL_NODES in more,
            sleep=wake.sleep,
            longest_sleep_s=_MAX_POLL_INTERVAL_S if wake.reports_files else POLL_INTERVAL_S,
        )
        write_status(lock, LOADS)
        if (
            preload is not None
            and not preload.wait_for_imports()
            and not termination.is_requested()
        ):
            # Other programs keep all CPUs busy, so the idle thread's imports may take minutes. A
            # thread cannot leave SCHED_IDLE, so this process executes itself again. The descriptors
            # stay open, because a ring in anonymous memory needs an open descriptor.
            for ring in rings.values():
                os.set_inheritable(ring.descriptor, True)
            opened = [f"{ring.descriptor}:{path}" for path, ring in rings.items()]
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], AT_ONCE, *opened])
    from torchlens_perf.sidecar.start.process import read_live_run

    return read_live_run(run, host, lock, rings, wake, shared=SHARED in more)


def _start_imports() -> ImportThread:
    from torchlens_perf.sidecar.start.preload import ImportThread

    return ImportThread()
