"""Read the Python stack of a process from outside with py-spy, and its state in the kernel.

py-spy runs with `--nonblocking`: it reads the process's memory and neither attaches to the process
nor pauses it. By default py-spy uses ptrace, which pauses a running process for 0.4 ms and fails on
a stopped process. The training process needs no signal handler and no `faulthandler`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torchlens_perf.run import tracer
from torchlens_perf.run.processes import is_signal_in_set, process_state_and_start, read_kernel_text
from torchlens_perf.run.ring import STACK_SIGNAL

MAX_LINES = 15
_MAX_BYTES = 1 << 20
# A running process may change its frames while py-spy reads them, so failed reads are repeated.
_TRIES = 3
_KILL_TIMEOUT_S = 0.5
_MAX_TEXT_CHARACTERS = 200
_STATES = {
    "T": "stopped",
    "t": "traced",
    "D": "uninterruptible",
    "Z": "dead",
    "X": "dead",
    "x": "dead",
}
# Error texts of the kernel and of a container's seccomp profile.
_REFUSALS = ("permission denied", "operation not permitted")
_IN_CONTAINER = "in a container `docker run --cap-add=SYS_PTRACE`"
# Why a value of kernel.yama.ptrace_scope forbids to read another process, and how to permit it.
_PTRACE_SCOPES = {
    "1": (
        "kernel.yama.ptrace_scope is 1",
        f"`sudo sysctl kernel.yama.ptrace_scope=0`, {_IN_CONTAINER}",
    ),
    "2": (
        "kernel.yama.ptrace_scope is 2",
        f"`sudo sysctl kernel.yama.ptrace_scope=1`, {_IN_CONTAINER}",
    ),
    "3": (
        "kernel.yama.ptrace_scope is 3, which only a reboot ends",
        "kernel.yama.ptrace_scope = 1 in /etc/sysctl.d, and a reboot",
    ),
}
# Directories of installed packages and of Python's own library.
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3\.\d+t?/")
_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
_SIGNAL_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
_SECCOMP_FILTER_MODE = "2"  # value of "Seccomp:" in /proc/PID/status


@dataclasses.dataclass(frozen=True)
class Stack:
    """The Python stack of a process's main thread, or the reason why it could not be read."""

    lines: tuple[str, ...]
    """Frames as "function (file:line)", innermost first.

    After MAX_LINES frames, one line gives the number of omitted frames.
    """
    reason: str
    """The reason why `lines` is empty, otherwise ""."""
    innermost: tuple[str, int] | None = None
    """File and line of the innermost frame, if py-spy reports them."""
    user_line: str = ""
    """Innermost line outside Python's and installed libraries, such as "train.py:65 in main"; "" if
    not known.
    """


def read_process_state(pid: int, started: int | None = None) -> str:
    """Return the state of the process's main thread.

    It is "running", "stopped" (SIGSTOP), "traced" (by a debugger), "uninterruptible" (state D) or
    "dead". started: when the process began, in clock ticks after boot (identity.process_started).
    If another process has the same pid now, the state is "dead".
    """
    state, began = process_state_and_start(pid)
    if not state or (started is not None and began != started):
        return "dead"
    return _STATES.get(state, "running")


def find_py_spy() -> str | None:
    """Return the path of py-spy in this Python's environment, on PATH or of its package, or None."""
    beside = str(Path(sys.executable).parent)
    folders = itertools.chain((beside, None), _list_script_folders("py-spy"))
    return next(filter(None, (shutil.which("py-spy", path=path) for path in folders)), None)


def _list_script_folders(package: str) -> Iterator[str]:
    """Yield the folders in which installers put the programs of a package, whether on PATH or not.

    `pip install --target` moves programs into TARGET/bin, and the package's file list still names
    their old place.
    """
    for found in importlib.metadata.distributions(name=package):
        yield str(found.locate_file("bin"))
        programs = (file for file in found.files or () if file.name == package)
        yield from (str(Path(str(found.locate_file(each))).parent) for each in programs)


def read_main_stack(pid: int, timeout_s: float = 5.0, program: str | None = None) -> Stack:
    """Return the stack of a process of this node, usually within 10 to 40 ms.

    Blocks for at most about timeout_s and raises no exception. The process is not paused, and a
    stopped process stays stopped. program: the path of py-spy, by default from find_py_spy().
    """
    answer, reason = _run_py_spy(pid, timeout_s, program)
    return Stack((), reason) if reason else _parse_main_stack(pid, answer)


def read_all_stacks(pid: int, timeout_s: float = 5.0) -> str:
    """Return the stacks of all threads as text, or the reason why they could not be read.

    The arguments are those of read_main_stack().
    """
    answer, reason = _run_py_spy(pid, timeout_s, None)
    if reason:
        return f"none: {reason}"
    try:
        return "\n".join(
            "\n".join(
                [
                    f"thread {each['thread_name'] or '?'}:",
                    *(f"  {_format_frame(frame)}" for frame in each["frames"]),
                ]
            )
            for each in json.loads(answer)
        )
    except (ValueError, KeyError, TypeError):
        return "none: py-spy's answer cannot be read"


def read_source_line(stack: Stack, timeout_s: float = 1.0) -> str:
    """Return the source line of the innermost frame, as it is on disk now.

    Returns "" if the line cannot be read in time. A child process reads the file, because a hung
    disk would block the sidecar.
    """
    if stack.innermost is None:
        return ""
    path, line = stack.innermost
    try:
        succeeded, answer, _ = _run_command(["sed", "-n", f"{line}{{p;q}}", "--", path], timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.decode("utf-8", "replace").strip()[:_MAX_TEXT_CHARACTERS] if succeeded else ""


def _run_py_spy(pid: int, timeout_s: float, program: str | None) -> tuple[bytes, str]:
    """Return py-spy's output, or the reason why it failed."""
    program = program or find_py_spy()
    if program is None:
        return b"", "py-spy is not installed: pip install py-spy"
    if read_process_state(pid) == "dead":
        return b"", f"there is no process {pid}"
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    deadline_s = time.monotonic() + timeout_s
    errors = ""
    for _ in range(_TRIES):
        try:
            succeeded, answer, errors = _run_command(command, deadline_s - time.monotonic())
        except subprocess.TimeoutExpired:
            return (
                b"",
                (
                    f"py-spy did not answer within {timeout_s:g} s (process state:"
                    f" {read_process_state(pid)})"
                ),
            )
        except OSError as error:
            return b"", f"py-spy cannot be run: {error.strerror or error}"
        if succeeded:
            return answer, ""
        if any(refusal in errors.lower() for refusal in _REFUSALS):
            return b"", _explain_refusal(pid)
    # The last line of py-spy's errors is the innermost cause of its failure.
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["no answer"]
    return b"", f"py-spy: {lines[-1].removeprefix('Error: ')[:_MAX_TEXT_CHARACTERS]}"


def request_stack_by_signal(pid: int, path: Path, started: int, timeout_s: float = 1.0) -> Stack:
    """Send SIGUSR2 and return the stack that the process writes to `path` (hooks/stack.py).

    Frames are sorted innermost first. Raises no exception. started: as in read_process_state().
    SIGUSR2 would end a process that does not catch it. SIGUSR2 is therefore sent only to a process
    that catches it and whose start time is `started`.
    """
    try:
        before = path.stat().st_size
        # Check right before sending the signal, because the caller may have waited for py-spy
        # before.
        if not is_signal_in_set("SigCgt", STACK_SIGNAL, pid):
            return Stack((), "it could not be asked: it does not listen to SIGUSR2")
        if read_process_state(pid, started) == "dead":
            return Stack((), f"it could not be asked: process {pid} has ended")
        os.kill(pid, STACK_SIGNAL)
        deadline_s = time.monotonic() + timeout_s
        while path.stat().st_size == before and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(0.02)  # The process writes the stack line by line.
        with open(path, "rb") as file:
            file.seek(before)
            lines = file.read(_MAX_BYTES).decode("utf-8", "replace").splitlines()
    except OSError as error:
        return Stack((), f"it could not be asked: {error.strerror}")
    found = tuple(line.strip() for line in lines if line.startswith("  File"))
    frames = [(each[1], each[2], each[3]) for each in map(_SIGNAL_FRAME.match, found) if each]
    return Stack(
        found[:MAX_LINES],
        "" if found else "it did not answer SIGUSR2",
        user_line=find_user_line(frames),
    )


def _run_command(command: list[str], timeout_s: float) -> tuple[bool, bytes, str]:
    """Run a command. Return whether the command succeeded, its output and its errors.

    Raises OSError, or TimeoutExpired after killing the process.
    """
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
        # If py-spy reads a process that is stuck in the kernel, py-spy may get stuck there too, and
        # not even SIGKILL ends it. subprocess.run() would wait without a limit for its end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_KILL_TIMEOUT_S)
        raise
    return process.returncode == 0, answer, errors.decode("utf-8", "replace")


def _parse_main_stack(pid: int, answer: bytes) -> Stack:
    try:
        threads = json.loads(answer)
        # py-spy reports no name of the main thread without `threading`, and no id before Python
        # 3.11.
        mains = [each for each in threads if each["os_thread_id"] == pid]
        mains += [each for each in threads if each["thread_name"] == "MainThread"]
        frames = [frame for main in mains[:1] for frame in main["frames"]]
        lines = [_format_frame(frame) for frame in frames]
        innermost = (str(frames[0]["filename"]), int(frames[0]["line"])) if frames else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return Stack((), "py-spy: its answer cannot be read")
    if not lines:
        return Stack((), "the main thread runs no Python code")
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"and {len(lines) - MAX_LINES} more"]
    user_line = find_user_line(
        (str(frame["filename"]), frame["line"], frame["name"]) for frame in frames
    )
    return Stack(tuple(lines), "", innermost, user_line)


def find_user_line(frames: Iterable[tuple[str, object, object]]) -> str:
    """Return the first line outside libraries. frames: file, line and function, innermost first."""
    for path, line, function in frames:
        if not (path.startswith(("<", _PACKAGE)) or _LIBRARY.search(path)):
            return f"{os.path.basename(path)}:{line} in {function}"
    return ""


def _format_frame(frame: dict[str, Any]) -> str:
    return f"{frame['name']} ({frame['short_filename'] or frame['filename']}:{frame['line']})"


def _explain_refusal(pid: int) -> str:
    """Describe which kernel rule forbids reading the process's memory, and how to permit it."""
    us = os.geteuid()
    them = read_kernel_text(f"/proc/{pid}/status").partition("\nUid:\t")[2].split("\t")[0]
    seccomp = read_kernel_text("/proc/self/status").partition("\nSeccomp:\t")[2][:1]
    if us and them and them != str(us):
        why = f"the process is user {them}'s, and its sidecar user {us}'s"
        how = "run both as one user"
    elif (scope := read_kernel_text(tracer.YAMA)) in _PTRACE_SCOPES:
        why, how = _PTRACE_SCOPES[scope]
    elif seccomp == _SECCOMP_FILTER_MODE:
        why, how = "the container's seccomp profile or its capabilities refuse it", _IN_CONTAINER
    else:
        why = "it has rights that its sidecar lacks, or is not dumpable (prctl(2))"
        how = f"the capability CAP_SYS_PTRACE, {_IN_CONTAINER}"
    return (
        f"not permitted to read the process: {why}. Permit it: {how}; or set"
        " TORCHLENS_PERF_FAULTHANDLER=1"
    )
