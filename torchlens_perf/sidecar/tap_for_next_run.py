"""Build the native tap on collectives for the next run, and describe its state in the report.

A child process builds the tap (commands/tap_build.py), when the run has lasted for a while or has
ended. A build at the end alone would often fail, because schedulers of clusters end the sidecar
together with the job. The child uses only idle CPUs and spare memory, and ends with the sidecar.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from torchlens_perf.run import children, tap_requirements
from torchlens_perf.sidecar import priority

logger = logging.getLogger("torchlens_perf.sidecar")

# After this time, a run has usually compiled its own code. Shorter runs are not disturbed.
_START_AFTER_S = 120.0
_RETRY_INTERVAL_S = 30.0
# Free memory that a build during the run needs. The compiler uses 0.9 GB at its peak.
_NEEDED_BYTES = 4 << 30
_CPU_TIMEOUT_S = 600
_PR_SET_PDEATHSIG = 1


class TapBuilder:
    """Builder of the native tap. Not thread-safe.

    One thread must make all calls until finish(), because the child ends with its thread.
    """

    def __init__(self, *, builds: bool) -> None:
        """builds: False if a user has started the sidecar and waits for its end."""
        self._builds = builds
        self._name = ""
        self._outlook = ""
        self._child: subprocess.Popen[str] | None = None
        self._to_be_built = False
        self._due_s = _START_AFTER_S

    def describe_tap_for_report(self, name: str, *, wanted: bool) -> str:
        """Return the native tap's state for the report, or "" if all ranks have loaded the tap.

        name: file name of the tap that ranks did not find. wanted: the setting
        TORCHLENS_PERF_BUILD_TAP.
        """
        if name and name != self._name and self._child is None:
            self._name = name
            self._outlook, self._to_be_built = self._decide_build(name, wanted)
        return self._outlook

    def start_if_due(self, running_s: float) -> None:
        """Start the build if the run is long enough, or read the result of a finished build.

        Does not wait for the build. running_s: time since the sidecar started.
        """
        if self._to_be_built and running_s > self._due_s:
            if _has_spare_memory():
                self._start_child()
            self._due_s = running_s + _RETRY_INTERVAL_S
        elif self._child is not None and self._child.poll() is not None:
            self._read_result(self._child)

    def finish(self, timeout_s: float = 600.0) -> None:
        """Start the build if it was not due before. Wait for the child for at most `timeout_s`.

        Called after the last report, when no process waits for the sidecar.
        """
        if self._to_be_built:
            self._start_child()
        child = self._child
        if child is None:
            return
        try:
            child.wait(timeout_s)
            self._read_result(child)
        except subprocess.TimeoutExpired:
            child.terminate()

    def _decide_build(self, name: str, wanted: bool) -> tuple[str, bool]:
        """Return the tap's state for the report, and whether the tap should be built."""
        if not wanted:
            return "no native tap is built: TORCHLENS_PERF_BUILD_TAP is off", False
        reason = tap_requirements.why_not_buildable(name)
        if reason is not None:
            return f"no native tap yet: {reason}", False
        if not self._builds:
            return "torchlens-perf build-tap builds the native tap", False
        return "the sidecar builds the native tap for the next run", True

    def _start_child(self) -> None:
        self._to_be_built = False
        logger.info("building the native tap on collectives: %s", self._name)
        self._child = subprocess.Popen(
            children.build_command("build-tap", "--in-background", self._name),
            env=children.build_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd="/",
        )

    def _read_result(self, child: subprocess.Popen[str]) -> None:
        self._child = None
        # The last line of the output is the result, or the compiler's first error.
        last_line = (
            child.communicate()[0].strip().rpartition("\n")[2].removeprefix("torchlens-perf: ")
        )
        if child.returncode == 0:
            self._outlook = "the native tap has been built, for the next run"
        else:
            self._outlook = (
                "no native tap yet:"
                f" {last_line or f'its build has ended with status {child.returncode}'}"
            )
        logger.info("%s (%s)", self._outlook, last_line)


def become_background_child() -> None:
    """Give the calling child process the lowest priority, and make it end with its parent.

    SCHED_IDLE also lowers the priority for disk access. If memory runs out, the kernel ends this
    process first.
    """
    signal.signal(signal.SIGTERM, _exit_on_signal)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    priority.set_group_nice_value(priority.IDLE_GROUP)
    with contextlib.suppress(OSError):
        os.nice(19)
    priority.make_thread_idle()  # The compiler inherits the policy.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_TIMEOUT_S, _CPU_TIMEOUT_S))


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Exit with SystemExit, so `finally` blocks of the build end the compiler and remove files."""
    sys.exit(128 + number)


def _has_spare_memory() -> bool:
    """Return True if enough memory for the compiler is free."""
    from torchlens_perf.sidecar.host.cgroup import ControlGroup

    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        left = [ControlGroup(os.getpid()).memory_left_bytes()]
    except OSError:
        return False
    left += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min((each for each in left if each is not None), default=0) > _NEEDED_BYTES
