"""Tests of Python stacks and states of real processes, and of errors of py-spy."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import warm_python
from torchlens_perf import Config, watch
from torchlens_perf.run import tracer
from torchlens_perf.run.processes import process_start_ticks
from torchlens_perf.sidecar.host.stacks import (
    MAX_LINES,
    Stack,
    find_py_spy,
    read_main_stack,
    read_process_state,
    read_source_line,
    request_stack_by_signal,
)

needs_py_spy = pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed")

BLOCKED = """
import sys, threading, time

def blocks():
    print("ready", flush=True)
    print("read", sys.stdin.readline().strip(), flush=True)

def descend(levels):
    return descend(levels - 1) if levels else blocks()

threading.Thread(target=time.sleep, args=(60,), name="other", daemon=True).start()
descend({levels})
"""
# The parent waits in state D of the kernel until its child calls exec or ends. The parent must
# never run again.
VFORKS = """
import ctypes, os
if ctypes.CDLL(None).vfork() == 0:
    os.write(1, b"ready %d\\n" % os.getpid())
    ctypes.CDLL(None).sleep(60)
    os._exit(0)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts Python programs and waits until they are ready.

    All programs are ended when the test ends.
    """
    started: list[subprocess.Popen[str]] = []

    def starts(program: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield starts
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def wait_for(pid: int, state: str) -> None:
    """Wait until a process has a state. Waiting is necessary, because the kernel stops a process a
    while after the signal.
    """
    deadline = time.monotonic() + 30
    while read_process_state(pid) != state:
        assert time.monotonic() < deadline, read_process_state(pid)
        time.sleep(0.001)


def functions(stack: Stack) -> list[str]:
    assert stack.reason == ""
    return [line.partition(" (")[0] for line in stack.lines]


# -- stacks


@needs_py_spy
def test_stack_lists_only_the_main_threads_frames_innermost_first(start: Start) -> None:
    """Each frame shows its file and line."""
    process = start(BLOCKED.format(levels=2))
    ready(process)

    stack = read_main_stack(process.pid)

    assert functions(stack) == ["blocks", "descend", "descend", "descend", "<module>"]
    assert stack.lines[0] == "blocks (<string>:6)"


@needs_py_spy
def test_source_line_is_read_from_disk_or_left_empty(start: Start, tmp_path: Path) -> None:
    """The line is empty for code without a file, for a missing file, and if the disk hangs."""
    script = tmp_path / "blocks.py"
    script.write_text(BLOCKED.format(levels=1))
    process = start(f"import runpy; runpy.run_path({str(script)!r})")
    ready(process)
    stack = read_main_stack(process.pid)
    assert stack.innermost == (str(script), 6)
    assert read_source_line(stack) == 'print("read", sys.stdin.readline().strip(), flush=True)'

    script.unlink()
    assert read_source_line(stack) == ""
    os.mkfifo(script)  # Reading this file blocks forever.
    assert read_source_line(stack, timeout_s=0.2) == ""
    assert read_source_line(Stack((), "no reason")) == ""


@needs_py_spy
def test_stopped_process_stays_stopped_after_its_stack_is_read(start: Start) -> None:
    """The process continues after SIGCONT."""
    process = start(BLOCKED.format(levels=0))
    ready(process)
    os.kill(process.pid, signal.SIGSTOP)
    wait_for(process.pid, "stopped")

    stacks = [read_main_stack(process.pid) for _ in range(5)]

    assert {tuple(functions(stack)) for stack in stacks} == {("blocks", "descend", "<module>")}
    assert read_process_state(process.pid) == "stopped"
    os.kill(process.pid, signal.SIGCONT)
    assert process.communicate("all is well\n", timeout=30)[0] == "read all is well\n"
    assert process.returncode == 0


@needs_py_spy
def test_deep_stack_is_cut_to_the_innermost_frames(start: Start) -> None:
    """The last line contains the number of omitted frames."""
    process = start(BLOCKED.format(levels=100))
    ready(process)

    stack = read_main_stack(process.pid)

    assert len(stack.lines) == MAX_LINES + 1
    assert stack.lines[0].startswith("blocks ")
    # The 103 frames are blocks, 101 calls of descend, and <module>.
    assert stack.lines[-1] == f"and {103 - MAX_LINES} more"


@needs_py_spy
def test_users_line_is_the_innermost_one_outside_libraries(start: Start, tmp_path: Path) -> None:
    """The main thread waits inside the standard library."""
    script = tmp_path / "waits.py"
    script.write_text("import threading\nprint('ready', flush=True)\nthreading.Event().wait()\n")
    process = start(f"import runpy; runpy.run_path({str(script)!r})")
    ready(process)

    deadline = time.monotonic() + 30
    while not (stack := read_main_stack(process.pid)).lines[0].startswith("Condition.wait "):
        assert time.monotonic() < deadline, stack
    assert stack.user_line == "waits.py:3 in <module>"


@needs_py_spy
def test_permission_error_of_py_spy_is_reported_without_a_retry(
    start: Start, tmp_path: Path
) -> None:
    if os.getuid() == 0:
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            pytest.skip(
                "root may read all processes, and there is no setpriv to become another user"
            )
        victim = start(BLOCKED.format(levels=0))
        ready(victim)
        with tempfile.TemporaryDirectory() as name:  # Other users cannot read tmp_path.
            # Run the real py-spy as a user who has no files here.
            program, calls, folder = tmp_path / "py-spy", tmp_path / "calls", Path(name)
            folder.chmod(0o755)
            copy = shutil.copy(find_py_spy() or "", folder / "program")
            as_nobody = f"{setpriv} --reuid=65534 --regid=65534 --clear-groups"
            program.write_text(f'#!/bin/sh\necho call >> {calls}\nexec {as_nobody} {copy} "$@"\n')
            program.chmod(0o755)
            stack = read_main_stack(victim.pid, program=str(program))
        assert calls.read_text() == "call\n"
    else:
        stack = read_main_stack(1)

    assert stack.lines == ()
    assert re.fullmatch(
        r"not permitted to read the process: the process is user \d+'s, and its sidecar user"
        r" \d+'s. "
        r"Permit it: run both as one user|"
        r"not permitted to read the process: it has rights that its sidecar lacks, or is not"
        r" dumpable \(prctl\(2\)\). "
        r"Permit it: the capability CAP_SYS_PTRACE, .*|"
        r"not permitted to read the process: kernel.yama.ptrace_scope is [123].*|"
        r"not permitted to read the process: the container's .*",
        stack.reason,
    ), stack.reason


@needs_py_spy
def test_reason_names_both_users_if_the_process_is_another_users(tmp_path: Path) -> None:
    """The sidecar has no privileges, and root owns the process. The test needs setpriv and root."""
    setpriv = shutil.which("setpriv")
    if os.getuid() != 0 or setpriv is None:
        pytest.skip("needs root and setpriv to be two users")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        program = shutil.copy(find_py_spy() or "", folder / "py-spy")
        code = (
            "import os, sys; from pathlib import Path\n"
            "from torchlens_perf.sidecar.host.stacks import read_main_stack\n"
            "os.setuid(65534)\n"
            f"print(read_main_stack(int(sys.argv[1]), program={str(program)!r}).reason)\n"
        )
        command = [sys.executable, "-c", code, str(os.getpid())]
        done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert (
        "the process is user 0's, and its sidecar user 65534's. Permit it: run both as one user"
        in done.stdout
    )


@needs_py_spy
def test_reason_says_that_the_process_is_not_dumpable(start: Start) -> None:
    """Reading such a process needs CAP_SYS_PTRACE even as the same user.

    The reason is one line with a remedy.
    """
    process = start(
        "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n" + BLOCKED.format(levels=0)
    )
    ready(process)
    if os.getuid() == 0:  # A process with CAP_SYS_PTRACE reads the stack.
        assert read_main_stack(process.pid).lines
        return
    assert "is not dumpable" in read_main_stack(process.pid).reason


@pytest.mark.parametrize(
    ("scope", "error", "remedy"),
    [
        (
            "1",
            "Permission Denied: Try again with elevated permissions",
            "`sudo sysctl kernel.yama.ptrace_scope=0`",
        ),
        ("2", "Error: Permission denied (os error 13)", "`sudo sysctl kernel.yama.ptrace_scope=1`"),
        ("3", "Permission denied", "kernel.yama.ptrace_scope = 1 in /etc/sysctl.d, and a reboot"),
        ("0", "Error: Operation not permitted (os error 1)", "`docker run --cap-add=SYS_PTRACE`"),
        ("", "Operation not permitted", "`docker run --cap-add=SYS_PTRACE`"),
    ],
)
def test_reason_names_a_remedy_for_each_kernel_restriction(
    scope: str, error: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restrictions are the settings of Yama and the seccomp filter of a container.

    Each read calls py-spy only once.
    """
    program, calls = tmp_path / "py-spy", tmp_path / "calls"
    program.write_text(f"#!/bin/sh\necho call >> {calls}\necho '{error}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(tracer, "YAMA", tmp_path / "ptrace_scope")
    if scope:
        tracer.YAMA.write_text(f"{scope}\n")
    reason = read_main_stack(os.getpid(), program=str(program)).reason

    assert remedy in reason
    assert "\n" not in reason
    assert calls.read_text() == "call\n"


@needs_py_spy
def test_py_spy_error_is_reported_for_a_program_without_python() -> None:
    """The reason omits py-spy's backtrace."""
    with subprocess.Popen(["sleep", "60"]) as process:
        stack = read_main_stack(process.pid)
        process.kill()

    assert stack.lines == ()
    assert stack.reason == "py-spy: Failed to find python version from target process"


def test_stack_of_an_ended_process_is_missing_with_the_reason() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()

    assert read_main_stack(process.pid, program=sys.executable) == Stack(
        (), f"there is no process {process.pid}"
    )


def test_missing_py_spy_is_reported_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    assert read_main_stack(os.getpid()) == Stack((), "py-spy is not installed: pip install py-spy")


def test_py_spy_next_to_the_python_executable_is_preferred_to_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = [tmp_path / folder / "py-spy" for folder in ("environment", "path")]
    for program in programs:
        program.parent.mkdir()
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs[1].parent))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment" / "python"))

    assert find_py_spy() == str(programs[0])
    programs[0].unlink()
    assert find_py_spy() == str(programs[1])


# Folder of the package, place of the program, and the program's path in the package's file list.
INSTALLED = {
    "pip install --target": ("target", "target/bin", "../../bin/py-spy"),
    "pip install --user": (
        "home/lib/python3/site-packages",
        "home/bin",
        "../../../bin/py-spy",
    ),
    "pip install --prefix, no file list": ("site-packages", "site-packages/bin", ""),
    "conda, other script folder": ("env/lib/site-packages", "env/tools", "../../tools/py-spy"),
}


def install_py_spy(folder: Path, site: str, place: str, listed: str) -> Path:
    """Write a package and its program as an installer does. Return the program's path."""
    information = folder / site / "py_spy-0.4.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: py-spy\nVersion: 0.4.0\n")
    if listed:
        (information / "RECORD").write_text(f"{listed},,\n")
    program = folder / place / "py-spy"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("way", INSTALLED)
def test_py_spy_that_is_not_on_path_is_found_by_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    program = install_py_spy(tmp_path / "new", *INSTALLED[way])
    stale = install_py_spy(tmp_path / "stale", "site", "site/bin", "bin/py-spy")
    stale.chmod(0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    sites = [str(tmp_path / "stale" / "site"), str(tmp_path / "new" / INSTALLED[way][0])]
    monkeypatch.setattr(sys, "path", sites)

    found = find_py_spy()
    assert found is not None
    assert os.path.samefile(found, program)
    program.unlink()
    assert find_py_spy() is None


def test_hanging_py_spy_is_killed_after_the_timeout(tmp_path: Path) -> None:
    program, pid_file = tmp_path / "py-spy", tmp_path / "pid"
    program.write_text(f"#!/bin/sh\necho $$ > {pid_file}\nexec sleep 600\n")
    program.chmod(0o755)

    stack = read_main_stack(os.getpid(), timeout_s=2.0, program=str(program))

    assert stack == Stack((), "py-spy did not answer within 2 s (process state: running)")
    assert read_process_state(int(pid_file.read_text())) == "dead"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("not json", "py-spy: its answer cannot be read"),
        ('{"pid": 1}', "py-spy: its answer cannot be read"),
        ("[]", "the main thread runs no Python code"),
    ],
)
def test_unexpected_output_of_py_spy_is_reported_as_the_reason(
    tmp_path: Path, answer: str, reason: str
) -> None:
    """No exception is raised."""
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)

    assert read_main_stack(os.getpid(), program=str(program)) == Stack((), reason)


def test_py_spy_that_cannot_be_executed_is_reported_as_the_reason(tmp_path: Path) -> None:
    """The program is built for another CPU or is not executable."""
    program = tmp_path / "py-spy"
    program.write_bytes(b"\x7fELF")

    assert (
        read_main_stack(os.getpid(), program=str(program)).reason
        == "py-spy cannot be run: Permission denied"
    )


# -- states


def test_process_state_is_read_while_running_stopped_zombie_and_gone(start: Start) -> None:
    process = start(BLOCKED.format(levels=0))
    ready(process)
    assert read_process_state(process.pid) == "running"
    os.kill(process.pid, signal.SIGSTOP)
    wait_for(process.pid, "stopped")
    os.kill(process.pid, signal.SIGCONT)
    wait_for(process.pid, "running")
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert (
        read_process_state(process.pid) == "dead"
    )  # The process has ended but was not waited for.
    process.wait()
    assert read_process_state(process.pid) == "dead"


def test_debugged_process_is_traced_rather_than_stopped(start: Start) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    attach, detach = 16, 17
    process = start(BLOCKED.format(levels=0))
    ready(process)
    if libc.ptrace(attach, process.pid, None, None):
        pytest.skip(f"ptrace is not permitted here: {os.strerror(ctypes.get_errno())}")
    try:
        wait_for(process.pid, "traced")
    finally:
        os.waitpid(process.pid, os.WUNTRACED)
        libc.ptrace(detach, process.pid, None, None)


def test_process_in_kernel_state_d_is_uninterruptible(start: Start) -> None:
    process = start(VFORKS)
    child = int(ready(process).split()[1])
    try:
        wait_for(process.pid, "uninterruptible")
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)


def test_process_whose_pid_was_reused_is_dead(start: Start) -> None:
    process = start(BLOCKED.format(levels=0))
    ready(process)
    started = process_start_ticks(process.pid)
    assert started is not None

    assert read_process_state(process.pid, started) == "running"
    assert read_process_state(process.pid, started - 1) == "dead"


def test_process_state_is_read_correctly_if_the_program_name_looks_like_one(tmp_path: Path) -> None:
    program = tmp_path / "x) T 1 ("
    program.symlink_to(shutil.which("sleep") or "/bin/sleep")
    with subprocess.Popen([str(program), "60"]) as process:
        deadline = time.monotonic() + 30
        while b"x) T 1 (" not in Path(f"/proc/{process.pid}/stat").read_bytes():
            assert time.monotonic() < deadline
        state = read_process_state(process.pid)
        process.kill()

    assert state == "running"


def test_blocked_process_writes_its_stack_on_sigusr2(tmp_path: Path) -> None:
    """The watch installs `faulthandler`. After the watch, the signal has no handler."""
    script = tmp_path / "blocked.py"
    script.write_text(
        "import signal, sys, time, torchlens_perf as perf\n"
        "def stuck():\n"
        # The loop is one line, which makes the stack the same at any time.
        "    print('ready', flush=True); sys.stdin.readline()\n"
        "with perf.watch(config=perf.Config(_faulthandler=True, sidecar=False, report='off',"
        " dir=sys.argv[1])) as w:\n"
        "    stuck()\n"
        "print(signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "runs")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (file,) = (tmp_path / "runs").rglob("*.stack")
        started = process_start_ticks(process.pid) or 0
        stack = request_stack_by_signal(process.pid, file, started)
        assert "in stuck" in stack.lines[0], stack
        assert request_stack_by_signal(process.pid, file, started).lines == stack.lines
        output, _ = process.communicate("\n", timeout=60)
        assert output == "True\n"
        assert not file.exists()
        assert request_stack_by_signal(process.pid, file, started).reason
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("listens", [True, False])
def test_sigusr2_is_not_sent_to_a_process_without_a_handler(
    listens: bool, start: Start, tmp_path: Path
) -> None:
    """The signal is also not sent to another process with the same pid."""
    file = tmp_path / "left.stack"
    file.touch()
    listening = (
        "import faulthandler, signal; faulthandler.register(signal.SIGUSR2,"
        f" file=open({str(file)!r}, 'w'))\n"
    )
    process = start((listening if listens else "") + BLOCKED.format(levels=0))
    ready(process)
    started = process_start_ticks(process.pid)
    assert started is not None

    stack = request_stack_by_signal(
        process.pid, file, started - 1 if listens else started, timeout_s=0.1
    )

    assert stack.reason.startswith("it could not be asked: ")
    assert file.read_bytes() == b""
    assert process.communicate("all is well\n", timeout=30)[0] == "read all is well\n"
    assert process.returncode == 0


# A program that checks SIGUSR2 around a watch. The test replaces {before}, {inside} and {after}
# with lines of code.
AROUND = """
import faulthandler, os, signal, sys
from pathlib import Path
import torchlens_perf as perf

def handler(number, frame):
    print("handler", flush=True)

folder, mine = Path(sys.argv[1]), open(sys.argv[2], "w")
{before}
with perf.watch(config=perf.Config(_faulthandler=True, sidecar=False, report="off", dir=str(folder))) as w:
    {inside}
{after}
print("alive", len(list(folder.rglob("*.stack"))), os.path.getsize(sys.argv[2]) > 0, flush=True)
"""
SEND = "os.kill(os.getpid(), signal.SIGUSR2)"


def around(folder: Path, before: str = "", inside: str = "pass", after: str = "") -> str:
    """Run the program with the lines before, inside and after the watch, and return its output."""
    program = AROUND.format(before=before, inside=inside, after=after)
    command = [sys.executable, "-c", program, str(folder / "runs"), str(folder / "mine")]
    done = warm_python.run(command, 60)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


def test_users_faulthandler_registration_is_kept(tmp_path: Path) -> None:
    """signal.getsignal() does not show a registration of faulthandler."""
    register = "faulthandler.register(signal.SIGUSR2, file=mine)"

    assert around(tmp_path, register, SEND, SEND) == "alive 0 True\n"
    assert (tmp_path / "mine").read_text().count("Current thread") == 2


def test_signal_that_the_user_ignores_stays_ignored(tmp_path: Path) -> None:
    """Slurm may send SIGUSR2 inside a watch or after its end."""
    ignore = "signal.signal(signal.SIGUSR2, signal.SIG_IGN)"
    inside = f"{SEND}; print(len(list(folder.rglob('*.stack'))), flush=True)"
    assert around(tmp_path, ignore, inside, SEND) == "0\nalive 0 False\n"


def test_users_handler_installed_inside_a_watch_is_kept(tmp_path: Path) -> None:
    """A sidecar does not send the signal, because the stack file is removed."""
    inside = (
        f"signal.signal(signal.SIGUSR2, handler); {SEND}; import time; time.sleep(0.06); w.step();"
        " w.step()\n    print(len(list(folder.rglob('*.stack'))), flush=True)"
    )
    assert around(tmp_path, inside=inside, after=SEND) == "handler\n0\nhandler\nalive 0 False\n"


def test_stack_file_is_removed_before_the_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar sends the signal as long as the stack file exists."""
    left: list[int] = []
    unregister = faulthandler.unregister
    monkeypatch.setattr(
        faulthandler,
        "unregister",
        lambda number: left.append(len(list(tmp_path.rglob("*.stack")))) or unregister(number),
    )
    with watch(config=Config(_faulthandler=True, sidecar=False, report="off", dir=str(tmp_path))):
        assert len(list(tmp_path.rglob("*.stack"))) == 1

    assert left == [0]
