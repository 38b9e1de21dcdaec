"""Starting the node's sidecar from a training process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from torchlens_perf.errors import RunStoreError
from torchlens_perf.run_directory import RunDirectory, sidecar_lock, sidecar_log
from torchlens_perf.sidecar_lock import SidecarLock
from torchlens_perf.sidecar_status import SEVERAL_NODES

if TYPE_CHECKING:
    from torchlens_perf.identity import Identity

# Where the user's Python finds us, but not what would make the sidecar a training process.
_DROPPED = ("TORCHLENS_PERF", "RANK", "LOCAL_RANK", "NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH")
# NumPy's libraries start a thread for each processor when they are imported, which takes half of that import's time.
_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


def ensure(run: RunDirectory, who: Identity) -> bool:
    """Starts the node's sidecar unless one lives. Returns whether it started one. who: the rank that starts it.

    The child inherits the locked descriptor, so there is no instant at which two could start. It is detached: a new
    session, no terminal, no GPU. Nothing is waited for, and the run directory is not touched: its disk may not answer.
    Raises RunStoreError where no process can be started.
    """
    if not sys.executable:
        raise RunStoreError("the sidecar cannot start: Python does not know its own program (sys.executable is empty)")
    try:
        return _start(run, who)
    except OSError as error:
        raise RunStoreError(f"the sidecar cannot start: {error.strerror or error}") from error


def _start(run: RunDirectory, who: Identity) -> bool:
    lock = SidecarLock(sidecar_lock(run.run_id))
    if not lock.acquire():
        return False
    try:
        environment = {name: value for name, value in os.environ.items() if name not in _DROPPED}
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment.update(dict.fromkeys(_THREADS, "1"))
        command = [sys.executable, "-m", "torchlens_perf", "sidecar", str(run.path), "--host", who.host]
        command += ["--lock-descriptor", str(lock.descriptor)]
        if who.world_size > who.local_world_size:
            command.append(SEVERAL_NODES)
        with open(sidecar_log(lock.path), "ab") as log:
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[lock.descriptor],
                start_new_session=True,
                cwd="/",
            )
    except BaseException:
        run.clear_local()
        lock.remove()
        raise
    lock.close()
    return True
