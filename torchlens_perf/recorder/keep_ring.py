"""Copy a ring from node-local memory into the run directory, at the end of a run without a sidecar."""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING

from torchlens_perf.output import above_standard_streams, wait_until_ready
from torchlens_perf.run import children
from torchlens_perf.run.rings import copy_out, memory

if TYPE_CHECKING:
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.run.ring import RingFile


@above_standard_streams()
def copy_ring_to_run(run: RunDirectory, host: str, ring: RingFile, timeout_s: float) -> str:
    """Let another process copy a closed ring from this node's memory into the run directory.

    After timeout_s that process continues alone. Return the problem, or "" without a problem or if the
    ring is already there. Raises OSError if no process can be started.
    """
    if ring.path.is_relative_to(run.path):
        return ""
    deadline_s = time.monotonic() + timeout_s
    descriptor = memory.open_to_read(str(ring.path))
    pipe: list[int] = []
    try:
        pipe += os.pipe()
        command = children.build_script_command(
            copy_out.__file__, str(descriptor), str(run.rings / ring.path.name), str(run.node_rings_path(host)),
            *map(str, run.ring_and_registration_paths(ring.path)),
        )  # fmt: skip
        children.start_detached(command, stdout=pipe[1], pass_fds=[descriptor])
        os.close(pipe.pop())
        if not wait_until_ready(pipe[0], select.POLLIN, deadline_s):
            return f"{run.rings} did not answer within {timeout_s:g} s; the copy goes on by itself"
        reason = os.read(pipe[0], 4096).decode(errors="replace")
    finally:
        for each in (descriptor, *pipe):
            os.close(each)
    if not reason:
        return ""
    return (
        f"{reason}; it is lost" if ring.path.is_symlink() else f"{reason}; it stays in {ring.path}"
    )
