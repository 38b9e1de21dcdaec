"""Signals, exit codes and OOM kills that end processes, as the kernel shows them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchlens_perf.run.processes import process_start_ticks
from torchlens_perf.sidecar import ends
from torchlens_perf.sidecar.ends import EndObserver
from torchlens_perf.sidecar.host.cgroup import ControlGroup

WAITS = "import sys; sys.stdin.read(1)\n"
LIMIT = 64 << 20


def started(source: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", WAITS + source], stdin=subprocess.PIPE, **options
    )


def observer_of(pid: int) -> EndObserver:
    return EndObserver(pid, process_start_ticks(pid) or 0)


def finish(process: subprocess.Popen[bytes], *, reaped: bool = True) -> None:
    assert process.stdin is not None
    process.stdin.close()
    if reaped:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize(
    ("source", "signal", "exit_code"),
    [
        ("import os; os.kill(os.getpid(), 9)", 9, None),
        ("import os; os.abort()", 6, None),
        ("import os; os.kill(os.getpid(), 40)", 40, None),
        ("import os; os._exit(7)", None, 7),
        ("raise ValueError", None, 1),
        ("", None, 0),
    ],
)
def test_signal_or_exit_code_of_a_reaped_process_is_known(
    source: str, signal: int | None, exit_code: int | None
) -> None:
    process = started(source, stderr=subprocess.DEVNULL)
    observer = observer_of(process.pid)
    running = observer.read_end()
    finish(process)
    found = observer.read_end()
    observer.close()
    if found["signal"] is found["exit_code"] is None:
        pytest.skip("this kernel does not show how a reaped process ended (Linux 6.15)")

    assert running["signal"] is running["exit_code"] is None
    assert (found["signal"], found["exit_code"], found["oom_kills"]) == (signal, exit_code, 0)


def test_status_of_a_process_that_is_not_reaped_is_known_without_pidfd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    process = started("import os; os._exit(7)")
    observer = observer_of(process.pid)
    finish(process, reaped=False)
    zombie = observer.read_end()
    process.wait()

    assert zombie["exit_code"] == 7
    assert observer.read_end()["exit_code"] is None


def test_nothing_is_claimed_about_another_process_with_the_same_pid() -> None:
    process = started("import os; os._exit(7)")
    observer = EndObserver(process.pid, (process_start_ticks(process.pid) or 0) - 1)
    finish(process)

    assert observer.read_end() == {
        "signal": None, "exit_code": None, "oom_kills": 0, "memory_limit_bytes": None,
    }  # fmt: skip


def test_process_that_the_kernel_ended_for_lack_of_memory(
    memory_group: Callable[[int], Path],
) -> None:
    group = memory_group(LIMIT)
    process = started("x = b'1' * (256 << 20)")
    (group / "cgroup.procs").write_text(str(process.pid))
    observer = observer_of(process.pid)
    finish(process)
    found = observer.read_end()
    observer.close()

    assert (found["oom_kills"], found["memory_limit_bytes"]) == (1, LIMIT)
    assert found["signal"] in (9, None)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("memory.events", "low 0\nhigh 4\nmax 9\noom 3\noom_kill {}\noom_group_kill 0\n"),
        ("memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
    ],
)
def test_only_recent_kills_of_the_oom_killer_count(
    file: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill before the last two looks ended another process, such as a worker."""
    path = tmp_path / "root" / file
    path.parent.mkdir(parents=True)
    (tmp_path / "1").mkdir()
    (tmp_path / "1/cgroup").write_text("4:memory:/\n" if "/" in file else "0::/\n")
    group = ControlGroup(1, proc=tmp_path, root=tmp_path / "root")
    monkeypatch.setattr(ends, "ControlGroup", lambda pid: group)
    monkeypatch.setattr(ends, "time", SimpleNamespace(monotonic=lambda: 0.0))

    path.write_text(content.format(5))
    observer = observer_of(os.getpid())
    path.write_text(content.format(6))
    kills = [observer.read_end()["oom_kills"]]
    for now_s in (9.0, 10.0, 11.0, 20.0):
        observer.poll(now_s)
        kills.append(observer.read_end()["oom_kills"])
    path.unlink()
    kills.append(observer.read_end()["oom_kills"])

    assert kills == [1, 1, 1, 1, 0, 0]


def test_group_that_cannot_be_read_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> ControlGroup:
        raise PermissionError

    monkeypatch.setattr(ends, "ControlGroup", refuse)

    assert observer_of(os.getpid()).read_end()["oom_kills"] == 0
