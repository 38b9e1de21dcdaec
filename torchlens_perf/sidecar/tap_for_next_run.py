"""The sidecar's part in the native tap on collectives: it has it built for the next run, and says so in the report.

A child process builds (commands/tap_build.py): when the run has lasted for a while, or else when it has ended. Not only
at the end, because a cluster's scheduler ends the sidecar together with the job. The child takes only processors
and memory that nobody else wants, and ends with the sidecar.
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

_AFTER_S = 120.0  # of the run: by then it has built what it compiles itself, and what is short is not disturbed at all
_LOOK_AGAIN_S = 30.0
_NEEDED_BYTES = 4 << 30  # free memory while ranks run: the compiler takes 0.9 GB at its peak
_CPU_TIMEOUT_S = 600
_PR_SET_PDEATHSIG = 1


class TapForNextRun:
    """Belongs to the sidecar's thread. It must be the same one until finish(): the child ends with that thread."""

    def __init__(self, *, builds: bool) -> None:
        """builds: False for a sidecar that was started by hand: somebody waits for its end."""
        self._builds = builds
        self._name = ""
        self._outlook = ""
        self._child: subprocess.Popen[str] | None = None
        self._to_be_built = False
        self._due_s = _AFTER_S

    def outlook(self, name: str, *, wanted: bool) -> str:
        """What becomes of the native tap, for the report; "" where no rank has missed one.

        name: the file that ranks have looked for and not found. wanted: the setting TORCHLENS_PERF_BUILD_TAP.
        """
        if name and name != self._name and self._child is None:
            self._name = name
            self._outlook, self._to_be_built = self._look_ahead(name, wanted)
        return self._outlook

    def begin_if_due(self, running_s: float) -> None:
        """Starts the build in a run that lasts, and sees its end. Blocks for no longer than starting a process takes.

        running_s: how long the sidecar has run.
        """
        if self._to_be_built and running_s > self._due_s:
            if _memory_to_spare():
                self._begin()
            self._due_s = running_s + _LOOK_AGAIN_S
        elif self._child is not None and self._child.poll() is not None:
            self._see_result(self._child)

    def finish(self, timeout_s: float = 600.0) -> None:
        """Build what is to be built still, once the last report is written and the lock is given back.

        Nobody waits for that. Blocks until the child has ended, for `timeout_s` at most.
        """
        if self._to_be_built:
            self._begin()
        child = self._child
        if child is None:
            return
        try:
            child.wait(timeout_s)
            self._see_result(child)
        except subprocess.TimeoutExpired:
            child.terminate()

    def _look_ahead(self, name: str, wanted: bool) -> tuple[str, bool]:
        if not wanted:
            return "no native tap is built: TORCHLENS_PERF_BUILD_TAP is off", False
        reason = tap_requirements.obstacle(name)
        if reason is not None:
            return f"no native tap yet: {reason}", False
        if not self._builds:
            return "torchlens-perf build-tap builds the native tap", False
        return "the sidecar builds the native tap for the next run", True

    def _begin(self) -> None:
        self._to_be_built = False
        logger.info("building the native tap on collectives: %s", self._name)
        self._child = subprocess.Popen(
            children.command("build-tap", "--in-background", self._name),
            env=children.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd="/",
        )

    def _see_result(self, child: subprocess.Popen[str]) -> None:
        self._child = None
        said = child.communicate()[0].strip().rpartition("\n")[2].removeprefix("torchlens-perf: ")
        if child.returncode == 0:
            self._outlook = "the native tap has been built, for the next run"
        else:
            self._outlook = f"no native tap yet: {said or f'its build has ended with status {child.returncode}'}"
        logger.info("%s (%s)", self._outlook, said)


def give_way() -> None:
    """In the child: whatever else runs on the node goes first, and the parent's end is its end.

    SCHED_IDLE stands for the disk too. Where memory runs out, this process is the first to go.
    """
    signal.signal(signal.SIGTERM, _end)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    priority.set_group(priority.IDLE_GROUP)
    with contextlib.suppress(OSError):
        os.nice(19)
    priority.make_thread_idle()  # before the compiler is started, which is as idle then
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_TIMEOUT_S, _CPU_TIMEOUT_S))


def _end(number: int, frame: FrameType | None) -> None:
    """Through the `finally` of the build: the compiler ends, and what is not finished is removed."""
    sys.exit(128 + number)


def _memory_to_spare() -> bool:
    """Whether the compiler can have its memory without any process of the job having less."""
    from torchlens_perf.sidecar.host.cgroup import ControlGroup

    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        left = [ControlGroup(os.getpid()).memory_left_bytes()]
    except OSError:
        return False
    left += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min((each for each in left if each is not None), default=0) > _NEEDED_BYTES
