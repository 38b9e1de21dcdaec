"""report.html in the run directory, once the last report is written. Nobody waits for it.

A child process makes it, so that what it takes is bounded: time, memory, and processors that nobody else wants. It is
given up where another ring comes, which this sidecar is to read; the end of that process's run has a page of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.errors import printable
from torchlens_perf.run import children
from torchlens_perf.sidecar import termination

if TYPE_CHECKING:
    from pathlib import Path

    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.sidecar.node import Sidecar

logger = logging.getLogger("torchlens_perf.sidecar")

TIMEOUT_S = 120.0  # a page on 1024 ranks takes a third of it where processors are idle
TERMINATED_S = 10.0  # where somebody has asked this sidecar to end
MEMORY_BYTES = 4 << 30
_CPU_S = 120  # where this sidecar is killed, nobody else ends it
_LOOK_S = 0.1


def write_page(sidecar: Sidecar) -> None:
    """Writes it, where rank 0 is on this node; notes in the node's state why not. Raises OSError.

    The sidecar's thread, after the last report.
    """
    sources = sidecar.sources
    if sources.setting("writes_page") and any(source.state.identity.rank == 0 for source in sources):
        why_not = written(sidecar.run, sources.has_unread_rings)
        if why_not:
            sidecar.state.notes.append(f"report.html could not be written: {why_not}")
            sidecar.save(durably=True)


def written(run: RunDirectory, gives_up: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> str:
    """Writes it, or returns why not. gives_up: asked meanwhile; True ends it without a reason."""
    page = run.report.with_suffix(".html")
    command = children.command("report", str(run.path), "--html", str(page))
    environment = {**children.environment(), "ARROW_DEFAULT_MEMORY_POOL": "system"}  # others reserve more than they use
    began_s, before = time.monotonic(), _version(page)
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, cwd="/", env=environment
        )
        with contextlib.suppress(ProcessLookupError):
            _limit(child.pid, resource.RLIMIT_DATA, MEMORY_BYTES)
            _limit(child.pid, resource.RLIMIT_CPU, _CPU_S)
        while child.poll() is None:
            took_s = time.monotonic() - began_s
            late = took_s > (min(TERMINATED_S, timeout_s) if termination.is_asked() else timeout_s)
            if late or gives_up():
                child.kill()
                child.wait()
                return f"it took longer than {took_s:.0f} s" if late else ""
            time.sleep(_LOOK_S)
        said.seek(0)
        words = said.read().decode(errors="replace").strip().rpartition("\n")[2]
    # The page is put in its place when it is whole. A process that fails after that has done its work.
    if child.returncode and _version(page) == before:
        reason = words.removeprefix("torchlens-perf: ") or f"its process ended with {child.returncode}"
        return printable(reason)
    logger.info("%s", printable(words))
    return ""


def _version(page: Path) -> tuple[int, int]:
    """Which file lies there; zeros if there is none."""
    try:
        found = os.stat(page)
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _limit(pid: int, what: int, most: int) -> None:
    """Of what a process may take already, so much at most."""
    _, hard = resource.prlimit(pid, what)
    least = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.prlimit(pid, what, (least, least))
