"""Copy a ring from node-local memory into the run directory, at the end of a run without a sidecar."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from typing import TYPE_CHECKING

from torchlens_perf.output import above_standard_streams
from torchlens_perf.run import children
from torchlens_perf.run.rings import copy_out, memory

if TYPE_CHECKING:
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.run.ring import RingFile


@above_standard_streams()
def copy_ring_to_run(run: RunDirectory, host: str, ring: RingFile, timeout_s: float) -> str:
    """Let a child process copy a closed ring from this node's memory into the run directory.

    After timeout_s the child continues alone. Return the problem, or "" without a problem or if the
    ring is already there. Raises OSError if no process can be started.
    """
    if ring.path.is_relative_to(run.path):
        return ""
    deadline_s = time.monotonic() + timeout_s
    descriptor = memory.open_to_read(str(ring.path))
    try:
        command = children.build_script_command(
            copy_out.__file__, str(descriptor), str(run.rings / ring.path.name), str(run.node_rings_path(host)),
            *map(str, run.ring_and_registration_paths(ring.path)),
        )  # fmt: skip
        process = children.start_child(
            command, stdout=subprocess.PIPE, bufsize=0, pass_fds=[descriptor]
        )
    finally:
        os.close(descriptor)
    assert process.stdout is not None
    with process.stdout as said:
        ready = select.poll()
        ready.register(said.fileno(), select.POLLIN)
        if not ready.poll(max(0.0, 1000 * (deadline_s - time.monotonic()))):
            return f"{run.rings} did not answer within {timeout_s:g} s; the copy goes on by itself"
        reason = os.read(said.fileno(), 4096).decode(errors="replace")
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline_s - time.monotonic()))
    if not reason:
        return ""
    return (
        f"{reason}; it is lost" if ring.path.is_symlink() else f"{reason}; it stays in {ring.path}"
    )
