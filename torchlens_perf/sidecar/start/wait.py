"""A sidecar's first seconds: it waits, with next to nothing imported.

A run that ends within SHORT_RUN_S is read once, at its end: to begin reading takes half a second of processor time,
which training would miss. Until then this process looks at a few words of each ring's header, forty times a second.
It goes on at once where a rank has ended, where a ring fills, where somebody asks for results, and where something is
not as it should be.

Meanwhile a thread that gets idle processors only imports what comes next (preload.py), so that the report on a run of
some seconds is there when the run ends. Where no processor is idle it has STARVED_S. To take one from threads that wait
for one another costs a job twice what it gives: it is taken late, or where a ring fills, and slowly at first.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from torchlens_perf.run.sidecar_status import AT_ONCE, LOADS, SEVERAL_NODES, SHARED, write_status
from torchlens_perf.sidecar import priority, termination
from torchlens_perf.sidecar.rings.waiting import WaitingRing

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from torchlens_perf.sidecar.start.preload import Preload

SHORT_RUN_S = 5.0
STARVED_S = 10.0  # after which a starving thread gets a small share of a processor, and twice as long after, any
FAST_FILL_S = 2.0  # a ring that fills within this time is soon full
PRELOAD_AFTER_S = 0.5
FILLING = 1 / 8  # share of a ring from which on what reads it is imported
LOOK_S = 0.025
_LOOK_AROUND_S = 0.25  # between two looks for new rings, and whether processes live
_REGISTERED = ".registered"  # as in run/directory.py
_ASKS = (".answer", ".view")  # as in run/mailbox.py


class Wait:
    """The rings of one node until one of them should be read."""

    def __init__(self, folder: str, rings: Sequence[str] = ()) -> None:
        """folder: of this node, where the rings are registered, see RunDirectory.register_ring().

        rings: "DESCRIPTOR:PATH" of those that this process had open before its exec: they may be nowhere else by now.
        """
        self.rings: dict[str, WaitingRing] = {}
        for descriptor, _, path in (each.partition(":") for each in rings):
            os.set_inheritable(int(descriptor), False)
            self.rings[path] = WaitingRing(path, int(descriptor))
        self._folder = folder
        self._gone: set[str] = set()
        self._asked = False
        self._around_s = float("-inf")

    def update(self, now_s: float) -> bool:
        """Returns whether to go on. now_s: CLOCK_MONOTONIC."""
        around = now_s - self._around_s >= _LOOK_AROUND_S
        try:
            if around:
                self._around_s = now_s
                self._open_new()
            due = [ring.update(now_s) or (around and not ring.writer_lives()) for ring in self.rings.values()]
        except (OSError, ValueError):
            return True  # whoever reads it says what is wrong with it
        return any(due) or self._asked

    @property
    def fills(self) -> bool:
        """Whether one of them may be full soon."""
        return any(ring.filled >= FILLING for ring in self.rings.values())

    def _open_new(self) -> None:
        for path in self._paths():
            if path not in self.rings and path not in self._gone:
                try:
                    self.rings[path] = WaitingRing(path)
                except FileNotFoundError:
                    self._gone.add(path)  # an earlier sidecar has read it to its end

    def _paths(self) -> list[str]:
        """As RunDirectory.local_rings(). Sees whether somebody asks for results, too."""
        names = os.listdir(self._folder)
        self._asked = any(name.endswith(_ASKS) for name in names)
        links = sorted(name for name in names if name.endswith(_REGISTERED))
        return [os.readlink(f"{self._folder}/{name}") for name in links]


def wait(
    folder: str,
    prepare: Callable[[], Preload],
    *,
    impatient: bool = False,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> tuple[dict[str, WaitingRing], Preload | None]:
    """Waits until there is something to read; or for SHORT_RUN_S, and until all is imported; or twice STARVED_S.

    With SIGTERM it goes on at once. folder: where the node's rings are registered. prepare: called once, when the run
    is PRELOAD_AFTER_S old, or a ring fills. impatient: goes on as soon as that is done. now, sleep: the clock. Returns
    how far the rings were last, by path, and what was begun. The rings stay open.
    """
    began_s, preload, hurries = now(), None, False
    rings, longest_s = Wait(folder), SHORT_RUN_S if impatient else 2 * STARVED_S
    while not rings.update(now_s := now()) and (waited_s := now_s - began_s) < longest_s:
        if preload is None and (rings.fills or waited_s >= PRELOAD_AFTER_S):
            preload = prepare()
        if preload is not None:
            if not hurries and (rings.fills or waited_s >= STARVED_S):
                hurries = True
                preload.hurry(priority.USUAL_GROUP if waited_s < FAST_FILL_S else priority.SLOW_GROUP)
            if preload.is_done and (impatient or waited_s >= SHORT_RUN_S):
                break
        if termination.is_asked():
            break
        sleep(LOOK_S)
    return rings.rings, preload


def main(arguments: Sequence[str]) -> int:
    """What recorder.sidecar.ensure() starts. Returns the exit code.

    arguments: "sidecar", the run directory, "--host" and its name, "--lock-descriptor" and its number. Then,
    SEVERAL_NODES: other nodes are to be met while the job runs. SHARED: the group may read. AT_ONCE: nothing is to be
    waited for; rings follow.
    """
    _, run, _, host, _, descriptor, *more = arguments
    termination.install()
    if os.getpid() != os.getpgrp():  # the session is that of the shell which started this process
        os.setsid()
    lock = int(descriptor)
    folder = os.path.dirname(os.readlink(f"/proc/self/fd/{lock}"))  # the lock lies beside them
    if AT_ONCE in more:
        write_status(lock, LOADS)
        waiting = Wait(folder, more[more.index(AT_ONCE) + 1 :])
        waiting.update(time.monotonic())  # opens the others: anonymous memory is gone with its process
        rings = waiting.rings
    else:
        write_status(lock, "has not begun to read")
        priority.spare_memory()
        rings, preload = wait(folder, _preload, impatient=SEVERAL_NODES in more)
        write_status(lock, LOADS)
        if preload is not None and not preload.finish() and not termination.is_asked():
            # Other programs keep all processors busy, and what that thread has begun may take it minutes.
            for ring in rings.values():
                os.set_inheritable(ring.descriptor, True)  # what lies in anonymous memory would be gone
            opened = [f"{ring.descriptor}:{path}" for path, ring in rings.items()]
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], AT_ONCE, *opened])
    from torchlens_perf.sidecar.start.process import attend

    return attend(run, host, lock, rings, shared=SHARED in more)


def _preload() -> Preload:
    from torchlens_perf.sidecar.start.preload import Preload

    return Preload()
