"""Write report.html into the run directory after the last report. No rank waits for this page.

A child process writes the page, with limits on time, memory and CPU use. If a new ring appears, the
sidecar stops writing the page to read this ring. It writes the page when the ring's process has
ended.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.errors import printable
from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.run import children
from torchlens_perf.sidecar import termination

if TYPE_CHECKING:
    from pathlib import Path

    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.sidecar.node import Sidecar


# On idle CPUs, a page for 1024 ranks takes a third of this time.
TIMEOUT_S = 120.0
# Timeout after SIGTERM.
TERMINATED_S = 10.0
MEMORY_BYTES = 4 << 30
# This limit ends the child if the sidecar is killed.
_MAX_CPU_S = 120
_POLL_INTERVAL_S = 0.1


def write_page_if_wanted(sidecar: Sidecar) -> None:
    """Write the page if rank 0 is on this node. An error becomes a note in the node's state.

    Called after the last report. Raises OSError if the state cannot be saved.
    """
    sources = sidecar.sources
    if sources.settings.writes_page and any(source.state.identity.rank == 0 for source in sources):
        why_not = write_page_in_child_process(sidecar.run, sources.has_unread_rings)
        if why_not:
            sidecar.state.notes.append(f"report.html could not be written: {why_not}")
            sidecar.save_state(durably=True)


def write_page_in_child_process(
    run: RunDirectory, gives_up: Callable[[], bool], timeout_s: float = TIMEOUT_S
) -> str:
    """Write the page. Return the reason for a failure, otherwise "".

    gives_up: called repeatedly. If gives_up() returns True, the child is killed and the result is
    "".
    """
    page = run.report.with_suffix(".html")
    command = children.build_command("report", str(run.path), "--html", str(page))
    # Use the pool that reserves no more memory than it uses, because the limit includes reserved
    # memory.
    environment = {**children.build_environment(), "ARROW_DEFAULT_MEMORY_POOL": "system"}
    began_s, before = time.monotonic(), _file_version(page)
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd="/",
            env=environment,
        )
        with contextlib.suppress(ProcessLookupError):
            _lower_limit(child.pid, resource.RLIMIT_DATA, MEMORY_BYTES)
            _lower_limit(child.pid, resource.RLIMIT_CPU, _MAX_CPU_S)
        while child.poll() is None:
            took_s = time.monotonic() - began_s
            late = took_s > (
                min(TERMINATED_S, timeout_s) if termination.is_requested() else timeout_s
            )
            if late or gives_up():
                child.kill()
                child.wait()
                return f"it took longer than {took_s:.0f} s" if late else ""
            time.sleep(_POLL_INTERVAL_S)
        errors.seek(0)
        last_line = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    # The child replaces the page only when the new page is complete. If the page has been replaced,
    # a failure after that does not matter.
    if child.returncode and _file_version(page) == before:
        return printable(last_line or f"its process ended with {child.returncode}")
    logger.info("%s", printable(last_line))
    return ""


def _file_version(page: Path) -> tuple[int, int]:
    """Return inode and modification time of the page, or zeros if it does not exist."""
    try:
        found = os.stat(page)
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _lower_limit(pid: int, limited: int, maximum: int) -> None:
    """Lower a resource limit of a process to at most this value."""
    _, hard = resource.prlimit(pid, limited)
    value = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
    resource.prlimit(pid, limited, (value, value))
