"""Importing, on idle processors only, what a sidecar needs once it begins to read."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from torchlens_perf.run.processes import cpu_time_ns, process_stat
from torchlens_perf.sidecar import priority

# In the order in which they are needed. The exporters' are not among them: most runs have none.
MODULES = (
    "numpy",
    "numpy.ma",  # NumPy's first median imports it
    "torchlens_perf.sidecar.start.process",
    "torchlens_perf.sidecar.loop",
    "torchlens_perf.sidecar.node",
    "pyarrow.parquet",
    "torchlens_perf.view.terminal",
    "torchlens_perf.report.build",
)
_LOOK_S = 0.1
_STARVES = 1 / 3  # share of the time with a processor below which to begin anew, at the usual priority, is faster
_MAX_S = 2.0  # where the kernel does not tell that


class Preload:
    """A thread that imports MODULES, and rests after each import for as long as that took."""

    def __init__(self) -> None:
        self._hurry = threading.Event()
        self._one_at_a_time = threading.Lock()  # of the two threads, to change the group
        self._thread = threading.Thread(target=self._import, name="imports", daemon=True)
        self._thread.start()

    def hurry(self, group: int) -> None:
        """Without rests from now on, and the process's session with this nice value."""
        with self._one_at_a_time:
            self._hurry.set()
            priority.set_group(group)

    @property
    def is_done(self) -> bool:
        """Whether all is imported."""
        return not self._thread.is_alive()

    def finish(self) -> bool:
        """Waits for the rest of the imports, without rests. False: the thread gets no processor, and is not done."""
        self.hurry(priority.USUAL_GROUP)
        deadline_s = time.monotonic() + _MAX_S
        while True:
            began_s, before_ns = time.monotonic(), self._cpu_time_ns()
            self._thread.join(_LOOK_S)
            if self.is_done:
                return True
            now_s, now_ns = time.monotonic(), self._cpu_time_ns()
            if before_ns is None or now_ns is None:
                starves = now_s > deadline_s
            else:
                starves = (now_ns - before_ns) / 1e9 < _STARVES * (now_s - began_s) and not self._sleeps()
            if starves:
                return False

    def _cpu_time_ns(self) -> int | None:
        return cpu_time_ns(os.getpid(), self._thread.native_id)

    def _sleeps(self) -> bool:
        """Whether it waits for a disk, say, and not for a processor."""
        return process_stat(os.getpid(), self._thread.native_id)[0] != "R"

    def _import(self) -> None:
        priority.make_thread_idle()
        with self._one_at_a_time:
            if not self._hurry.is_set():
                priority.set_group(priority.IDLE_GROUP)
        with contextlib.suppress(ImportError):  # whoever needs it imports it again, and says so
            for name in MODULES:
                began_s = time.monotonic()
                __import__(name)
                self._hurry.wait(time.monotonic() - began_s)
        priority.set_group(priority.USUAL_GROUP)
