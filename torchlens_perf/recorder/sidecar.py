"""Start the node's sidecar from a training process, and explain a report that is late."""

from __future__ import annotations

import time
from pathlib import Path

from torchlens_perf.config import EXCHANGE_TOKEN
from torchlens_perf.errors import RunStoreError, printable
from torchlens_perf.interruption import ours, suppress
from torchlens_perf.output import above_standard_streams
from torchlens_perf.run import children, ownership, sidecar_status
from torchlens_perf.run.directory import (
    RunDirectory,
    describe_kept_records,
    find_sidecar_lock,
    sidecar_lock_path,
    sidecar_log_path,
)
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.processes import process_cpu_time_s, process_state_and_start, thread_ids
from torchlens_perf.run.sidecar_lock import SidecarLock, is_lock_held
from torchlens_perf.run.sidecar_status import SEVERAL_NODES, SHARED

# If the sidecar's CPU time is less than this share of the waiting time, it lacks a CPU.
_STARVED_SHARE = 0.5
_MIN_JUDGED_WAIT_S = 0.1


@above_standard_streams()
def ensure_running(run: RunDirectory, identity: Identity, token: str = "") -> bool:
    """Start the node's sidecar unless one is running. Return True if it was started.

    identity: identity of the calling rank. token: Config._exchange_token.

    The sidecar inherits the locked descriptor, so two sidecars can never start. It is detached: it
    has its own session, no terminal and no GPU, and is not a child of the training process. This
    function does not wait for the sidecar or access the run directory, whose disk may hang. Raise
    RunStoreError if no process can be started.
    """
    try:
        return _start_if_not_running(run, identity, token)
    except ours(OSError) as error:
        raise RunStoreError(f"the sidecar cannot start: {error.strerror or error}") from error


def _start_if_not_running(run: RunDirectory, identity: Identity, token: str) -> bool:
    lock = SidecarLock(sidecar_lock_path(run.run_id))
    if not lock.acquire():
        return False
    try:
        command = children.build_command("sidecar", str(run.path), "--host", identity.node)
        command += ["--lock-descriptor", str(lock.descriptor)]
        if not identity.on_one_node:
            command.append(SEVERAL_NODES)
        if run.shared:
            command.append(SHARED)
        environment = (
            {**children.build_environment(), EXCHANGE_TOKEN: token}
            if token
            else children.build_environment()
        )
        with open(sidecar_log_path(lock.path), "ab", opener=ownership.open_to_append) as log:
            children.start_detached(
                command, stdout=log.fileno(), stderr=log.fileno(), env=environment,
                pass_fds=[lock.descriptor],
            )  # fmt: skip
    except BaseException:
        run.remove_local_leftovers()
        lock.remove()
        raise
    lock.close()
    return True


class LateReport:
    """Finds out why the report is missing at the end of a run, from the state of rank 0's sidecar.

    Create the object when the wait for the report begins. It only reads a lock file and /proc.
    """

    def __init__(self, run: RunDirectory, node: str, began_s: float) -> None:
        """began_s: monotonic time at which the watch began to end."""
        self._run, self._began_s = run, began_s
        self.report = printable(str(run.report))
        """Path of the report, for messages."""
        self._log = run.node_log_path(node)
        self._created_s = time.monotonic()
        self._cpu_time_s = self._read_sidecar_cpu_time_s()

    def read_progress(self) -> object:
        """Return a value that changes while the sidecar works or waits for a CPU."""
        with suppress(OSError):
            lock = find_sidecar_lock(self._run.run_id)
            pid, _, doing = sidecar_status.read_status(str(lock))
            if lock is not None and not pid and is_lock_held(lock):
                # The interpreter is starting.
                return time.monotonic()
            if pid and any(
                process_state_and_start(pid, thread)[0] == "R" for thread in thread_ids(pid)
            ):
                return time.monotonic()
            return doing, process_cpu_time_s(pid) if pid else 0.0
        return None

    def build_message(self) -> str:
        """Return the message to show instead of the report.

        Raise OSError if a file cannot be read.
        """
        waited_s = time.monotonic() - self._began_s
        lock = find_sidecar_lock(self._run.run_id)
        gone = self._explain_missing_report(lock)
        if gone:
            log = (
                self._log
                if lock is None or not sidecar_log_path(lock).exists()
                else sidecar_log_path(lock)
            )
            return (
                f"there is no report: {gone} (see {log}). Next: torchlens-perf sidecar"
                f" {self._run.path}"
            )
        _, _, status = sidecar_status.read_status(str(lock))
        if status == sidecar_status.CANNOT_WRITE:
            return f"there is no report: the sidecar {status}{describe_kept_records(self._run)}"
        return (
            f"the report is not ready after {waited_s:.1f} s (the sidecar"
            f" {self._describe_activity(lock)}); it will be in {self.report}; show it with:"
            f" torchlens-perf report {self._run.path}"
        )

    def _explain_missing_report(self, lock: Path | None) -> str:
        """Return why no process will write the report, or ""."""
        if lock is None:
            return "the sidecar has ended without one"
        pid, started, _ = sidecar_status.read_status(str(lock))
        if not pid:
            return "" if is_lock_held(lock) else "the sidecar could not be started"
        state, began = process_state_and_start(pid)
        return "the sidecar died" if state in ("", "Z", "X") or began != started else ""

    def _describe_activity(self, lock: Path | None) -> str:
        """Return what the sidecar is doing, or why it makes no progress."""
        waited_s = time.monotonic() - self._created_s
        pid, _, doing = sidecar_status.read_status(str(lock))
        if not pid:
            return "has not started yet"
        states = {process_state_and_start(pid, thread)[0] for thread in thread_ids(pid)}
        if states & {"T", "t"}:
            return f"is stopped: kill -CONT {pid}"
        if "R" in states:
            used_s = self._read_sidecar_cpu_time_s() - self._cpu_time_s
            if waited_s >= _MIN_JUDGED_WAIT_S and used_s < _STARVED_SHARE * waited_s:
                return (
                    f"{doing}; other programs keep the processors busy: it had one for {used_s:.2f}"
                    " s of that"
                )
        elif "D" in states:
            return f"waits for a disk while it {doing}"
        return doing

    def _read_sidecar_cpu_time_s(self) -> float:
        pid, _, _ = sidecar_status.read_status(str(find_sidecar_lock(self._run.run_id)))
        return process_cpu_time_s(pid) if pid else 0.0
