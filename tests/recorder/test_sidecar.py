"""The start of a real sidecar: its cost for a job that has just started, and its robustness."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from tests.sidecar.test_node import WORK
from tests.support.busy_machine import PROCESSORS, busy_machine
from tests.support.processes import report, wait_for_sidecar
from tests.support.ranks import HOST, Rank
from torchlens_perf.errors import RunStoreError
from torchlens_perf.recorder.sidecar import ensure_running
from torchlens_perf.run import sidecar_status
from torchlens_perf.run.directory import (
    RunDirectory,
    find_sidecar_lock,
    sidecar_lock_path,
    sidecar_log_path,
)
from torchlens_perf.run.mailbox import ANSWER, RESULTS, Mailbox
from torchlens_perf.run.processes import (
    process_cpu_time_s,
    process_state_and_start,
    thread_ids,
)
from torchlens_perf.sidecar import priority

FIRST_SECOND_S = 0.4  # CPU seconds if an interpreter needs BARE_S to start.
BARE_S = 0.05
WORK_NS = 20_000_000  # CPU time of work that the job does while the sidecar starts.
# Modules of this package that the sidecar imports before it reads any data.
WAITING = {
    "torchlens_perf", "torchlens_perf.interruption", "torchlens_perf.run", "torchlens_perf.run.kept_file",
    "torchlens_perf.run.file_checks",
    "torchlens_perf.run.processes",
    "torchlens_perf.run.rings", "torchlens_perf.run.rings.memory",
    "torchlens_perf.run.sidecar_status",
    "torchlens_perf.sidecar", "torchlens_perf.sidecar.ends",
    "torchlens_perf.sidecar.host", "torchlens_perf.sidecar.host.cgroup", "torchlens_perf.sidecar.priority",
    "torchlens_perf.sidecar.rings", "torchlens_perf.sidecar.rings.waiting", "torchlens_perf.sidecar.start",
    "torchlens_perf.sidecar.start.wait", "torchlens_perf.sidecar.stops", "torchlens_perf.sidecar.termination",
    "torchlens_perf.sidecar.wake",
    "torchlens_perf.version",
}  # fmt: skip
# Some modules that the sidecar must not import before it reads any data.
HEAVY = {
    "argparse", "ctypes", "dataclasses", "inspect", "json", "logging", "numpy", "pyarrow", "rich", "socket", "ssl",
    "subprocess", "typing",
}  # fmt: skip
# Installed packages that the sidecar of a job on one node, without an endpoint and GPUs, does not
# need.
NEVER = {
    "argparse",
    "asyncio",
    "grpc",
    "opentelemetry",
    "pandas",
    "pynvml",
    "requests",
    "torch",
    "nvtx",
}


@pytest.fixture
def busy() -> Iterator[None]:
    """Run a program on each processor that uses all of it, in its own scheduling group."""
    with busy_machine(PROCESSORS):
        yield


def until(seen: Callable[[], object], timeout_s: float = 60) -> object:
    """Return the value of seen() once it is true."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := seen()):
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    return found


def started(run: RunDirectory, rank: Rank) -> int:
    """Start a sidecar as a rank does, wait until it runs, and return its pid."""
    assert ensure_running(run, rank.identity)
    return int(str(until(lambda: read_status(run)[0])))


def read_status(run: RunDirectory) -> tuple[int, int, str]:
    lock = find_sidecar_lock(run.run_id)
    return (0, 0, "") if lock is None else sidecar_status.read_status(str(lock))


def used_ns(pid: int, of: list[int]) -> int:
    """Return the CPU time of the given threads of a process that have not ended."""
    used = 0
    for thread in of:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text()
            used += int(text.split()[0])
    return used


def bare_start_s() -> float:
    """Return the CPU time of an interpreter that does nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(5):
        subprocess.run([sys.executable, "-c", ""], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 5


def imported(run: RunDirectory) -> list[str]:
    """Return the modules that the sidecar has imported, in order.

    The sidecar's log has the imports because PYTHONPROFILEIMPORTTIME is 1.
    """
    # At first the sidecar logs to the second file, later to the first.
    logs = [run.node_log_path(HOST), sidecar_log_path(sidecar_lock_path(run.run_id))]
    lines = [line for log in logs if log.exists() for line in log.read_text().splitlines()]
    return [line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")][
        1:
    ]


def test_first_second_of_the_sidecar_uses_little_cpu_time(run: RunDirectory) -> None:
    """The CPU time is compared with that of an interpreter's start on this machine."""
    rank = Rank(run, 0, 1)
    pid = started(run, rank)
    time.sleep(1.0)
    used_s = process_cpu_time_s(pid)
    rank.close()
    wait_for_sidecar(run)

    assert used_s <= FIRST_SECOND_S * max(1.0, bare_start_s() / BARE_S)


def test_sidecar_imports_modules_only_when_they_are_needed(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the sidecar waits, few modules are imported.

    For its work the sidecar imports NumPy, pyarrow and rich, but no other installed packages.
    """
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    rank = Rank(run, 0, 1)
    started(run, rank)
    rank.steps(30, **WORK)
    until(lambda: "has not begun" in read_status(run)[2])
    rank.close()
    wait_for_sidecar(run)
    names = imported(run)
    first = names[: names.index("torchlens_perf.sidecar.start.wait") + 1]

    assert {name for name in first if name.startswith("torchlens_perf")} == WAITING
    assert not set(first[first.index("torchlens_perf") :]) & HEAVY
    assert {"numpy", "pyarrow.parquet", "torchlens_perf.view.terminal"} <= set(names)
    # pyarrow tries to import pandas, without success.
    assert {name.partition(".")[0] for name in names if name != "pandas"} & NEVER == set()
    assert report(run)["ranks"][0]["steps"] == 30


@pytest.mark.slow
def test_ring_that_fills_during_the_initial_wait_loses_no_record(run: RunDirectory) -> None:
    """The sidecar interrupts its wait to read the ring."""
    rank = Rank(run, 0, 1, ring_records=1 << 14)
    started(run, rank)
    for _ in range(3):
        rank.steps(2000, **WORK)  # 10,000 records.
        until(lambda: counted(run) >= rank.session.recorder.written)
    rank.close()
    wait_for_sidecar(run)
    value = report(run)

    assert (value["ranks"][0]["steps"], value["quality"]["lost"]) == (6000, 0)


def counted(run: RunDirectory) -> int:
    """Return the number of records in the saved state."""
    path = run.node_state_path(HOST)
    processes = json.loads(path.read_text())["processes"].values() if path.exists() else ()
    return sum(int(process["counted"]) + 1 for process in processes)


def test_sidecar_threads_run_at_lower_priority_than_the_job_except_delivery(
    run: RunDirectory,
) -> None:
    """The thread that delivers the report has the job's priority."""
    rank = Rank(run, 0, 1)
    pid = started(run, rank)
    until(lambda: "is reading" in read_status(run)[2])
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    lower = {thread: os.getpriority(os.PRIO_PROCESS, thread) - mine for thread in thread_ids(pid)}
    works = [thread for thread, nice in lower.items() if nice == priority.NICE]
    main_ns = used_ns(pid, [pid])
    began_ns = used_ns(pid, works)
    until(lambda: used_ns(pid, works) > began_ns + WORK_NS)
    main_ns = used_ns(pid, [pid]) - main_ns
    rank.close()
    wait_for_sidecar(run)

    assert lower[pid] == 0
    # The main thread waits.
    assert main_ns < WORK_NS / 2


def test_short_run_on_busy_cpus_is_read_once_at_its_end(run: RunDirectory, busy: None) -> None:
    """Until then, the sidecar uses less CPU time than the start of two more interpreters."""
    rank = Rank(run, 0, 1, ring_records=1 << 16)
    pid = started(run, rank)
    began_s, used_s = time.monotonic(), process_cpu_time_s(pid)
    while time.monotonic() - began_s < 3.0:
        rank.steps(5, **WORK)
        time.sleep(0.01)
    made, used_s = rank.session.recorder.step, process_cpu_time_s(pid) - used_s
    threads, status = thread_ids(pid), read_status(run)[2]
    rank.close()
    wait_for_sidecar(run)
    value = report(run)

    assert used_s <= 2 * max(BARE_S, bare_start_s())
    assert (len(threads), status) == (1, "has not begun to read")
    assert (value["ranks"][0]["steps"], value["quality"]["lost"]) == (made, 0)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.long)])
def test_no_record_is_lost_at_a_high_rate_on_busy_cpus(
    run: RunDirectory, busy: None, killed: bool
) -> None:
    """The ring is overwritten once. The next sidecar reads what a killed one has not read."""
    rank = Rank(run, 0, 1, ring_records=1 << 16)
    pid, made, began_s = started(run, rank), 0, time.monotonic()
    while made < 16_000:  # 80,000 records in about 10 s.
        due = int(1_600 * (time.monotonic() - began_s))
        rank.steps(due - made, **WORK)
        if killed and made < 5_000 <= due:
            os.kill(pid, signal.SIGKILL)
            until(lambda: ensure_running(run, rank.identity))
        made = due
        time.sleep(0.02)
    rank.close()
    wait_for_sidecar(run)
    value = report(run)

    assert (value["ranks"][0]["steps"], value["quality"]["lost"]) == (made, 0)
    assert len(pd.read_parquet(run.steps)) == made


def test_run_on_busy_cpus_is_visible_while_it_lasts(run: RunDirectory, busy: None) -> None:
    """`top` and `serve` read the saved state."""
    rank = Rank(run, 0, 1)
    started(run, rank)

    def has_counted() -> bool:
        rank.steps(1, **WORK)
        return counted(run) > 5

    until(has_counted)
    shown, made = report(run)["ranks"][0]["steps"], rank.session.recorder.step
    rank.close()
    wait_for_sidecar(run)

    assert 0 < shown < made


@pytest.mark.long
def test_results_of_a_run_on_busy_cpus_are_there_on_request(run: RunDirectory, busy: None) -> None:
    """Afterwards the sidecar reads further and loses no record."""
    rank = Rank(run, 0, 1)
    started(run, rank)
    rank.steps(30, **WORK)
    time.sleep(1.5)
    box = Mailbox(rank.ring_path, ANSWER, RESULTS)
    results = box.wait_for_message(30.0)
    box.close()
    for _ in range(100):
        rank.steps(20, **WORK)
        time.sleep(0.03)
    rank.close()
    wait_for_sidecar(run)
    value = report(run)

    assert results is not None
    assert "30 steps" in json.loads(results)["text"]
    assert (value["ranks"][0]["steps"], value["quality"]["lost"]) == (2030, 0)


def test_next_sidecar_reads_everything_after_the_first_is_killed(run: RunDirectory) -> None:
    """The killed sidecar had read nothing."""
    rank = Rank(run, 0, 1)
    rank.steps(10, **WORK)
    pid = started(run, rank)
    os.kill(pid, signal.SIGKILL)
    until(lambda: process_state_and_start(pid)[0] in ("", "Z"))
    rank.steps(10, **WORK)
    assert ensure_running(run, rank.identity)
    until(lambda: read_status(run)[0] != pid)
    rank.close()
    wait_for_sidecar(run)
    value = report(run)

    assert (value["ranks"][0]["steps"], value["quality"]["lost"]) == (20, 0)


def test_second_sidecar_is_refused_while_the_first_starts(run: RunDirectory) -> None:
    """The first sidecar's lock is already locked when its interpreter starts."""
    rank = Rank(run, 0, 1)
    started(run, rank)
    command = [sys.executable, "-m", "torchlens_perf", "sidecar", str(run.path), "--host", HOST]
    second = subprocess.run(command, capture_output=True, text=True)
    again = ensure_running(run, rank.identity)
    rank.close()
    wait_for_sidecar(run)

    assert (second.returncode, again) == (2, False)
    assert "runs on this node already" in second.stderr


def test_sidecar_is_not_a_child_of_the_rank(run: RunDirectory) -> None:
    """Some launchers kill a rank's children when it ends (Ray), or all processes that it has
    started (DeepSpeed).
    """
    rank = Rank(run, 0, 1)
    pid = started(run, rank)
    rank.steps(30, **WORK)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    session = until(lambda: os.getsid(pid) if os.getsid(pid) == pid else 0)
    rank.close()
    wait_for_sidecar(run)

    assert str(pid) not in children
    assert session == pid
    assert report(run)["ranks"][0]["steps"] == 30


@pytest.mark.parametrize("wrong", ["python", "environment"])
def test_failed_start_of_a_sidecar_raises_and_leaves_no_file(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: str
) -> None:
    """Python is missing, or a variable is too long. The error is raised at once."""
    rank = Rank(run, 0, 1)
    if wrong == "python":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    else:
        monkeypatch.setenv("OF_THE_PROGRAM", "x" * 200_000)  # More than exec() takes.
    said = (
        "gone .sys.executable. cannot be run" if wrong == "python" else "the sidecar cannot start"
    )
    with pytest.raises(RunStoreError, match=said):
        ensure_running(run, rank.identity)
    assert find_sidecar_lock(run.run_id) is None
    rank.close()
