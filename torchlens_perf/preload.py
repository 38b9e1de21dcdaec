"""Importing, on idle processors only, what a sidecar needs once it begins to read."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time

from torchlens_perf import priority
from torchlens_perf.processes import cpu_times_ns

# In the order in which they are needed. The exporters' are not among them: most runs have none.
MODULES = (
    "numpy",
    "torchlens_perf.sidecar_command",
    "torchlens_perf.sidecar_loop",
    "torchlens_perf.sidecar",
    "pyarrow.parquet",
    "torchlens_perf.report.terminal",
    "torchlens_perf.report.build",
)
_LOOK_S = 0.05
_MAX_S = 2.0  # where the kernel does not tell whether the thread gets a processor


class Preload:
    """A thread that imports MODULES, and rests after each import for as long as that took."""

    def __init__(self) -> None:
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._import, name="imports", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether all is imported."""
        return not self._thread.is_alive()

    def finish(self) -> bool:
        """Waits for the rest of the imports, without rests. False: the thread gets no processor, and is not done."""
        self._hurry.set()
        priority.set_group(priority.NICE)
        thread = self._thread.native_id
        began_s, before = time.monotonic(), cpu_times_ns(os.getpid(), thread)
        self._thread.join(_LOOK_S)
        while self._thread.is_alive():
            now = cpu_times_ns(os.getpid(), thread)
            if before is not None and now is not None:
                starves = now[1] - before[1] > now[0] - before[0]
            else:
                starves = time.monotonic() - began_s > _MAX_S
            if starves:
                return False
            before = now
            self._thread.join(_LOOK_S)
        return True

    def _import(self) -> None:
        priority.set_group(priority.IDLE_NICE)
        priority.make_thread_idle()
        with contextlib.suppress(ImportError):  # whoever needs it imports it again, and says so
            for name in MODULES:
                began_s = time.monotonic()
                importlib.import_module(name)
                self._hurry.wait(time.monotonic() - began_s)
        priority.set_group(priority.NICE)
