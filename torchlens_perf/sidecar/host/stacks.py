"""What a process that hangs is doing: its Python stack, read from outside by py-spy, and its state in the kernel.

py-spy runs with `--nonblocking`: it reads the process's memory, and neither attaches to it nor pauses it. Its usual way
(ptrace) pauses a running process for 0.4 ms, and fails on one that is stopped. Nothing is installed in the training
process: no signal handler, no `faulthandler`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from torchlens_perf.run import tracer
from torchlens_perf.run.processes import is_in, process_stat, text_of
from torchlens_perf.run.ring import STACK_SIGNAL

MAX_LINES = 15
_MAX_BYTES = 1 << 20
_TRIES = 3  # a process that runs meanwhile may change its frames under the reader
_KILLED_WITHIN_S = 0.5
_MAX_WORDS = 200  # characters of py-spy's own explanation
_STATES = {"T": "stopped", "t": "traced", "D": "uninterruptible", "Z": "dead", "X": "dead", "x": "dead"}
_REFUSALS = ("permission denied", "operation not permitted")  # of the kernel, and of a container's seccomp profile
_IN_CONTAINER = "in a container `docker run --cap-add=SYS_PTRACE`"
_FILTERED = "2"  # as in /proc/PID/status, of seccomp


@dataclasses.dataclass(frozen=True)
class Stack:
    """The Python stack of a process's main thread, or why there is none."""

    lines: tuple[str, ...]
    """Frames as "function (file:line)", the innermost first: at most MAX_LINES, and then how many more there are."""
    reason: str
    """Why `lines` is empty; else ""."""
    gil_holder: str = ""
    """Name of the thread that holds the GIL, if that is another one: the main thread may be waiting for it."""
    innermost: tuple[str, int] | None = None
    """File and line of the innermost frame, where py-spy knows it."""


def process_state(pid: int, started: int | None = None) -> str:
    """One of "running", "stopped" (SIGSTOP), "traced" (by a debugger), "uninterruptible" (state D) and "dead".

    It is the state of the main thread. started: when the process began, in clock ticks after boot
    (identity.process_started); another process with that pid counts as dead.
    """
    state, began = process_stat(pid)
    if not state or (started is not None and began != started):
        return "dead"
    return _STATES.get(state, "running")


def find_py_spy() -> str | None:
    """The py-spy program: of this Python's environment, or else on PATH; None if there is none."""
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")


def python_stack(pid: int, timeout_s: float = 5.0, program: str | None = None) -> Stack:
    """The stack of a process of this node. Blocks for at most about timeout_s; usually for 10 to 40 ms.

    The process is not paused; one that is stopped is read as it is, and stays stopped.
    program: py-spy, where find_py_spy() would not find it. Raises nothing.
    """
    answer, reason = _dump(pid, timeout_s, program)
    return Stack((), reason) if reason else _main_thread(pid, answer)


def python_stacks(pid: int, timeout_s: float = 5.0) -> str:
    """The stacks of all of its threads, as text; or why there are none. As python_stack() otherwise."""
    answer, reason = _dump(pid, timeout_s, None)
    if reason:
        return f"none: {reason}"
    try:
        return "\n".join(
            "\n".join([f"thread {each['thread_name'] or '?'}:", *(f"  {_line(frame)}" for frame in each["frames"])])
            for each in json.loads(answer)
        )
    except (ValueError, KeyError, TypeError):
        return "none: py-spy's answer cannot be read"


def source_line(stack: Stack, timeout_s: float = 1.0) -> str:
    """The innermost frame's line of source, as it is on disk now; "" if it cannot be read in time.

    By another process: where the disk hangs, that one does, and not the sidecar.
    """
    if stack.innermost is None:
        return ""
    path, line = stack.innermost
    try:
        succeeded, answer, _ = _run(["sed", "-n", f"{line}{{p;q}}", "--", path], timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.decode("utf-8", "replace").strip()[:_MAX_WORDS] if succeeded else ""


def _dump(pid: int, timeout_s: float, program: str | None) -> tuple[bytes, str]:
    """py-spy's answer, or why there is none."""
    program = program or find_py_spy()
    if program is None:
        return b"", "py-spy is not installed: pip install py-spy"
    if process_state(pid) == "dead":
        return b"", f"there is no process {pid}"
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    deadline_s = time.monotonic() + timeout_s
    errors = ""
    for _ in range(_TRIES):
        try:
            succeeded, answer, errors = _run(command, deadline_s - time.monotonic())
        except subprocess.TimeoutExpired:
            return b"", f"py-spy did not answer within {timeout_s:g} s (process state: {process_state(pid)})"
        except OSError as error:
            return b"", f"py-spy cannot be run: {error.strerror or error}"
        if succeeded:
            return answer, ""
        if any(refusal in errors.lower() for refusal in _REFUSALS):
            return b"", _not_permitted(pid)
    return b"", f"py-spy: {_last_cause(errors)}"


def asked_stack(pid: int, path: Path, started: int, timeout_s: float = 1.0) -> Stack:
    """What the process writes into `path` upon SIGUSR2 (hooks/stack.py), most recent call first.

    Raises nothing. started: as in process_state(); a process that is another one, or does not catch the signal, which
    would end it, gets none.
    """
    try:
        before = path.stat().st_size
        # Right before, because who asks may have waited for py-spy meanwhile.
        if not is_in("SigCgt", STACK_SIGNAL, pid):
            return Stack((), "it could not be asked: it does not listen to SIGUSR2")
        if process_state(pid, started) == "dead":
            return Stack((), f"it could not be asked: process {pid} has ended")
        os.kill(pid, STACK_SIGNAL)
        deadline_s = time.monotonic() + timeout_s
        while path.stat().st_size == before and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(0.02)  # it writes line by line
        with open(path, "rb") as file:
            file.seek(before)
            lines = file.read(_MAX_BYTES).decode("utf-8", "replace").splitlines()
    except OSError as error:
        return Stack((), f"it could not be asked: {error.strerror}")
    found = tuple(line.strip() for line in lines if line.startswith("  File"))
    return Stack(found[:MAX_LINES], "" if found else "it did not answer SIGUSR2")


def _run(command: list[str], timeout_s: float) -> tuple[bool, bytes, str]:
    """Whether it succeeded, what it wrote, and its errors. Raises OSError, or TimeoutExpired once it is killed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "RUST_BACKTRACE": "0"},
    )
    try:
        answer, errors = process.communicate(timeout=max(0.0, timeout_s))
    except subprocess.TimeoutExpired:
        process.kill()
        # Not subprocess.run, which then waits for good: who reads a process that is stuck in the kernel may get stuck
        # there too, where no signal arrives.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_KILLED_WITHIN_S)
        raise
    return process.returncode == 0, answer, errors.decode("utf-8", "replace")


def _main_thread(pid: int, answer: bytes) -> Stack:
    try:
        threads = json.loads(answer)
        # It has no name where threading was not imported. Before Python 3.11, threads have no id.
        mains = [each for each in threads if each["os_thread_id"] == pid]
        mains += [each for each in threads if each["thread_name"] == "MainThread"]
        frames = [frame for main in mains[:1] for frame in main["frames"]]
        lines = [_line(frame) for frame in frames]
        innermost = (str(frames[0]["filename"]), int(frames[0]["line"])) if frames else None
        holders = [each["thread_name"] or "?" for each in threads if each["owns_gil"] and each not in mains[:1]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return Stack((), "py-spy: its answer cannot be read")
    if not lines:
        return Stack((), "the main thread runs no Python code")
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"and {len(lines) - MAX_LINES} more"]
    return Stack(tuple(lines), "", holders[0] if holders else "", innermost)


def _line(frame: dict[str, Any]) -> str:
    return f"{frame['name']} ({frame['short_filename'] or frame['filename']}:{frame['line']})"


def _not_permitted(pid: int) -> str:
    """Return which of the kernel's rules for reading another process's memory forbids it, and how to permit it."""
    scope, us = text_of(tracer.YAMA), os.geteuid()
    them = text_of(f"/proc/{pid}/status").partition("\nUid:\t")[2].split("\t")[0]
    if us and them and them != str(us):
        why, how = f"the process is user {them}'s, and its sidecar user {us}'s", "run both as one user"
    elif scope == "1":
        why, how = "kernel.yama.ptrace_scope is 1", f"`sudo sysctl kernel.yama.ptrace_scope=0`, {_IN_CONTAINER}"
    elif scope == "2":
        why, how = "kernel.yama.ptrace_scope is 2", f"`sudo sysctl kernel.yama.ptrace_scope=1`, {_IN_CONTAINER}"
    elif scope == "3":
        why = "kernel.yama.ptrace_scope is 3, which only a reboot ends"
        how = "kernel.yama.ptrace_scope = 1 in /etc/sysctl.d, and a reboot"
    elif text_of("/proc/self/status").partition("\nSeccomp:\t")[2][:1] == _FILTERED:
        why, how = "the container's seccomp profile or its capabilities refuse it", _IN_CONTAINER
    else:
        why = "it has rights that its sidecar lacks, or is not dumpable (prctl(2))"
        how = f"the capability CAP_SYS_PTRACE, {_IN_CONTAINER}"
    return f"not permitted to read the process: {why}. Permit it: {how}; or set TORCHLENS_PERF_FAULTHANDLER=1"


def _last_cause(errors: str) -> str:
    """The innermost cause: py-spy prints an error, "Caused by:", and one cause a line."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return (lines or ["no answer"])[-1].removeprefix("Error: ")[:_MAX_WORDS]
