"""Import the modules that a sidecar needs for reading, on idle CPUs only."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from torchlens_perf.run.processes import process_state_and_start, thread_cpu_time_ns
from torchlens_perf.sidecar import priority

# The order is that of first use. Exporters are left out, because most runs have no exporter.
MODULES = (
    "numpy",
    "numpy.ma",  # The first call of numpy.median() imports it.
    "torchlens_perf.sidecar.start.process",
    "torchlens_perf.sidecar.loop",
    "torchlens_perf.sidecar.node",
    "pyarrow.parquet",
    "torchlens_perf.view.terminal",
    "torchlens_perf.report.build",
)
_POLL_INTERVAL_S = 0.1
# If the thread gets less than this share of a CPU, a restart at normal priority is faster.
_MIN_CPU_SHARE = 1 / 3
# Time limit if the kernel does not report the thread's CPU time.
_TIMEOUT_S = 2.0


class ImportThread:
    """A thread that imports MODULES. After each import it pauses for as long as the import took."""

    def __init__(self) -> None:
        self._hurry = threading.Event()
        self._group_lock = threading.Lock()  # Both threads change the group's nice value.
        self._thread = threading.Thread(target=self._import_modules, name="imports", daemon=True)
        self._thread.start()

    def hurry(self, group: int) -> None:
        """Import without pauses from now on, and set the nice value of the session's group."""
        with self._group_lock:
            self._hurry.set()
            priority.set_group_nice_value(group)

    @property
    def is_done(self) -> bool:
        """True if the thread has ended."""
        return not self._thread.is_alive()

    def wait_for_imports(self) -> bool:
        """Wait for the remaining imports. Return False if the thread gets too little CPU time."""
        self.hurry(priority.USUAL_GROUP)
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            began_s, before_ns = time.monotonic(), self._cpu_time_ns()
            self._thread.join(_POLL_INTERVAL_S)
            if self.is_done:
                return True
            now_s, now_ns = time.monotonic(), self._cpu_time_ns()
            if before_ns is None or now_ns is None:
                is_starved = now_s > deadline_s
            else:
                is_starved = (now_ns - before_ns) / 1e9 < _MIN_CPU_SHARE * (
                    now_s - began_s
                ) and not self._is_waiting()
            if is_starved:
                return False

    def _cpu_time_ns(self) -> int | None:
        return thread_cpu_time_ns(os.getpid(), self._thread.native_id)

    def _is_waiting(self) -> bool:
        """Return True if the thread waits for something other than a CPU, such as a disk."""
        return process_state_and_start(os.getpid(), self._thread.native_id)[0] != "R"

    def _import_modules(self) -> None:
        priority.make_thread_idle()
        with self._group_lock:
            if not self._hurry.is_set():
                priority.set_group_nice_value(priority.IDLE_GROUP)
        # The code that needs a module repeats a failed import and reports the error.
        with contextlib.suppress(ImportError):
            for name in MODULES:
                began_s = time.monotonic()
                __import__(name)
                self._hurry.wait(time.monotonic() - began_s)
        priority.set_group_nice_value(priority.USUAL_GROUP)
