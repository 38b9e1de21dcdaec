"""Wait through a run's first seconds with as few imports as possible.

The sidecar reads a run that ends within SHORT_RUN_S once, at its end. The start of reading takes
half a second of CPU time, which training would lose. While this process waits, it reads a few words
of each ring's header, forty times a second. The wait ends at once in these cases:

- a rank ends,
- a ring fills up,
- a user asks for results,
- a ring's header cannot be read.

In the meantime, a thread imports the next modules on idle CPUs (preload.py). The report is
therefore ready in time even after a run of a few seconds. If no CPU is idle, the thread waits for
STARVED_S. Ranks wait for each other, so CPU time for imports costs the job twice as much. Without
idle CPUs, imports therefore start only after STARVED_S, or earlier if a ring fills. At first they
get only a small share of a CPU.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from torchlens_perf.run.sidecar_status import AT_ONCE, LOADS, SEVERAL_NODES, SHARED, write_status
from torchlens_perf.sidecar import priority, termination
from torchlens_perf.sidecar.rings.waiting import WaitingRing

TYPE_CHECKING = False  # a copy of typing.TYPE_CHECKING, because importing typing takes long
if TYPE_CHECKING:
    from torchlens_perf.sidecar.start.preload import ImportThread

SHORT_RUN_S = 5.0
# After this time, an import thread that gets no idle CPU is given a small share of a CPU. After
# twice this time, the sidecar starts to read the rings.
STARVED_S = 10.0
# If a ring fills within this time, the imports run at normal priority, because it will soon be
# full.
FAST_FILL_S = 2.0
PRELOAD_AFTER_S = 0.5
# The imports start when a ring reaches this fill level.
FILLING = 1 / 8
POLL_INTERVAL_S = 0.025
_RESCAN_INTERVAL_S = 0.25
# These suffixes are copies from run/directory.py and run/mailbox.py, which take long to import.
_REGISTERED = ".registered"
_REQUESTS = (".answer", ".view")


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
        self._folder = folder
        self._gone: set[str] = set()
        self._has_request = False
        self._rescanned_s = float("-inf")

    def poll_rings(self, now_s: float) -> bool:
        """Return True if reading should start. now_s: CLOCK_MONOTONIC."""
        rescans = now_s - self._rescanned_s >= _RESCAN_INTERVAL_S
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
        return any(due) or self._has_request

    @property
    def has_filling_ring(self) -> bool:
        """True if a ring may be full soon."""
        return any(ring.fill_level >= FILLING for ring in self.rings.values())

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
        links = sorted(name for name in names if name.endswith(_REGISTERED))
        return [os.readlink(f"{self._folder}/{name}") for name in links]


def wait_until_due(
    folder: str,
    prepare: Callable[[], ImportThread],
    *,
    impatient: bool = False,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> tuple[dict[str, WaitingRing], ImportThread | None]:
    """Wait until reading should start.

    Return the open rings by path, and the import thread or None.

    The wait ends when a ring should be read, or on SIGTERM. The wait also ends after SHORT_RUN_S if
    all modules are imported, and after twice STARVED_S in any case.

    folder: the folder of the node's registered rings.
    prepare: starts the import thread. Called once, after PRELOAD_AFTER_S or when a ring fills.
    impatient: do not wait for SHORT_RUN_S once all modules are imported.
    now, sleep: the clock.
    """
    began_s, preload, hurries = now(), None, False
    rings, longest_s = RingWatch(folder), SHORT_RUN_S if impatient else 2 * STARVED_S
    while not rings.poll_rings(now_s := now()) and (waited_s := now_s - began_s) < longest_s:
        if preload is None and (rings.has_filling_ring or waited_s >= PRELOAD_AFTER_S):
            preload = prepare()
        if preload is not None:
            if not hurries and (rings.has_filling_ring or waited_s >= STARVED_S):
                hurries = True
                preload.hurry(
                    priority.USUAL_GROUP if waited_s < FAST_FILL_S else priority.SLOW_GROUP
                )
            if preload.is_done and (impatient or waited_s >= SHORT_RUN_S):
                break
        if termination.is_requested():
            break
        sleep(POLL_INTERVAL_S)
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
    lock = int(descriptor)
    # The lock's folder also contains the links to registered rings.
    folder = os.path.dirname(os.readlink(f"/proc/self/fd/{lock}"))
    if AT_ONCE in more:
        write_status(lock, LOADS)
        waiting = RingWatch(folder, more[more.index(AT_ONCE) + 1 :])
        # Open the other rings now, because anonymous memory is freed when its process ends.
        waiting.poll_rings(time.monotonic())
        rings = waiting.rings
    else:
        write_status(lock, "has not begun to read")
        priority.lower_memory_priority()
        rings, preload = wait_until_due(folder, _start_imports, impatient=SEVERAL_NODES in more)
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

    return read_live_run(run, host, lock, rings, shared=SHARED in more)


def _start_imports() -> ImportThread:
    from torchlens_perf.sidecar.start.preload import ImportThread

    return ImportThread()
