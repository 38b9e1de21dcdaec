"""Tests of the sidecar's priority and memory limits."""

from __future__ import annotations

import functools
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.sidecar.test_node import WORK
from tests.support.leftovers import eventually
from tests.support.processes import wait_for_sidecar
from tests.support.ranks import Rank
from torchlens_perf.recorder import sidecar
from torchlens_perf.run import sidecar_status
from torchlens_perf.run.directory import RunDirectory, find_sidecar_lock, sidecar_lock_path
from torchlens_perf.run.processes import thread_ids
from torchlens_perf.run.sidecar_lock import SidecarLock
from torchlens_perf.sidecar import priority
from torchlens_perf.sidecar.loop import run_sidecar
from torchlens_perf.sidecar.node import Sidecar


def test_live_sidecar_has_low_priority_and_a_memory_limit(run: RunDirectory) -> None:
    """The sidecar's main thread has the job's priority.

    If memory runs out, the kernel ends the sidecar first.
    """
    rank = Rank(run, 0, 1)
    sidecar.ensure_running(run, rank.identity)
    assert eventually(lambda: sidecar_status.read_status(str(find_sidecar_lock(run.run_id)))[0] > 0)
    pid = sidecar_status.read_status(str(find_sidecar_lock(run.run_id)))[0]
    score = Path(f"/proc/{pid}/oom_score_adj")

    assert eventually(lambda: int(score.read_text()) == 1000)
    lower = min(19, os.getpriority(os.PRIO_PROCESS, 0) + priority.NICE)
    assert eventually(
        lambda: lower in [os.getpriority(os.PRIO_PROCESS, thread) for thread in thread_ids(pid)]
    )
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)
    assert eventually(
        lambda: resource.prlimit(pid, resource.RLIMIT_DATA)[0] == priority.MEMORY_BYTES
    )
    rank.close()
    wait_for_sidecar(run)


def threads_of_rounds(
    run: RunDirectory,
    rank: Rank,
    actions: Mapping[int, Callable[[], object]],
    monkeypatch: pytest.MonkeyPatch,
) -> list[int]:
    """Run a sidecar to its end. Return the thread of each round.

    actions: what happens in a round, by its number from 1.
    """
    lock = SidecarLock(sidecar_lock_path(run.run_id))
    assert lock.acquire()
    made = Sidecar(run, rank.identity.host, None, lambda *_: None)
    rounds: list[int] = []
    measure = made.sample_telemetry

    def measured() -> None:
        rounds.append(threading.get_native_id())
        if len(rounds) in actions:
            actions[len(rounds)]()
        measure()

    monkeypatch.setattr(made, "sample_telemetry", measured)
    with ThreadPoolExecutor(1) as beside_the_job:
        run_sidecar(made, lock, background=beside_the_job)
    return rounds


def test_last_round_runs_at_the_jobs_priority(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank waits for the last round. Earlier rounds run in a thread with low priority."""
    rank = Rank(run, 0, 1)
    rounds = threads_of_rounds(run, rank, {3: rank.close}, monkeypatch)
    main = threading.get_native_id()

    assert [each == main for each in rounds] == [False, False, False, True]
    assert len(set(rounds)) == 2


def test_ring_that_is_nearly_full_is_read_at_the_jobs_priority(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On busy CPUs, a thread with low priority might read it too late."""
    rank = Rank(run, 0, 1, ring_records=1024)
    fill = functools.partial(rank.steps, 150, **WORK)  # 750 records.
    rounds = threads_of_rounds(run, rank, {2: fill, 5: rank.close}, monkeypatch)
    main = threading.get_native_id()

    assert [each == main for each in rounds] == [False, False, True, False, False, True]


@pytest.mark.parametrize(("steps", "is_urgent"), [(20, False), (60, True)])
def test_imports_for_a_ring_that_fills_have_the_jobs_priority(
    run: RunDirectory, steps: int, is_urgent: bool
) -> None:
    """They take most of the CPU time of the sidecar's first seconds."""
    rank = Rank(run, 0, 1, ring_records=1024)
    rank.steps(steps, **WORK)
    sidecar.ensure_running(run, rank.identity)

    def read_status() -> tuple[int, int, str]:
        return sidecar_status.read_status(str(find_sidecar_lock(run.run_id)))

    assert eventually(lambda: "is reading" in read_status()[2])
    pid = read_status()[0]
    used_ns = {
        thread: int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
        for thread in thread_ids(pid)
    }
    rank.close()
    wait_for_sidecar(run)

    assert (used_ns[pid] > sum(used_ns.values()) / 2) == is_urgent


def test_allocation_over_the_limit_raises_memory_error() -> None:
    """The process continues after the error."""
    program = (
        "from torchlens_perf.sidecar.priority import set_memory_limit\n"
        "set_memory_limit(200_000_000)\n"
        "try: bytearray(300_000_000)\n"
        "except MemoryError: print('refused')\n"
        "print(len(bytearray(50_000_000)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["refused", "50000000"]
