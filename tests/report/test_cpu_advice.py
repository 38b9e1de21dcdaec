"""CPU contention in the report: its cause, applicable advice, and the order of other costs."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.report.test_held import node
from tests.support.findings import MS, episode, findings
from tests.support.ranks import HOST, Rank
from tests.support.reports import checked
from tests.verdicts.words.test_bottleneck import BASE
from torchlens_perf.report.build import build_report
from torchlens_perf.run.cpu_programs import CHILD, OTHER, RANK, CpuProgram
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Flag
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.verdicts.node_state import CpuUsage
from torchlens_perf.verdicts.stragglers.findings import Diagnosis, StragglerGroup
from torchlens_perf.verdicts.verdict import Verdict

STARVED = {**BASE, "forward": 24.0, "cpu": 20.0}
STRESS = CpuProgram("stress-ng", 7, 0.95, OTHER)


def verdict(loops: list[list[dict[str, Any]]], users: CpuUsage, threads: int = 0) -> Verdict:
    report = checked(build_report("r", [node(loops, cpu_users=users, threads=threads)]))
    return next(row for row in report["verdicts"] if row.kind == "lack_of_cpu")


def action(loops: list[list[dict[str, Any]]], users: CpuUsage, threads: int = 0) -> str:
    return verdict(loops, users, threads).action


def test_process_that_uses_the_cpus_is_named_in_the_advice() -> None:
    said = action([[STARVED] * 60], CpuUsage(2, 0, [1.9, 2.0], [STRESS]), 1)

    assert (
        said
        == "stop or move the programs outside of the job that keep 95% of its CPUs busy (mainly"
        " stress-ng (pid 7)), or use more CPUs (now 2)."
    )


@pytest.mark.parametrize(
    ("users", "threads", "ranks", "words", "never"),
    [
        (
            CpuUsage(2, 0, [0.0, 5.0], []),
            1,
            1,
            ["more CPUs (now 2)."],
            ["threads", "workers", "ranks", "see what"],
        ),
        (
            CpuUsage(2, 0, [0.0, 5.0], []),
            8,
            1,
            ["OMP_NUM_THREADS, now 8", "more CPUs"],
            ["workers", "ranks"],
        ),
        (
            CpuUsage(2, 4, [0.0, 5.0], []),
            1,
            1,
            ["num_workers; child processes at once: 4"],
            ["threads", "ranks"],
        ),
        (CpuUsage(2, 1, [0.0, 5.0], []), 1, 1, ["more CPUs (now 2)."], ["workers"]),
        (CpuUsage(2, 0, [0.0, 5.0], []), 1, 2, ["fewer ranks per node"], ["threads", "workers"]),
        (
            CpuUsage(2, 0, [5.0, 10.0], []),
            1,
            1,
            ["find the programs outside of the job that keep 50%"],
            ["threads"],
        ),
        (
            CpuUsage(),
            0,
            1,
            ["see what else keeps the CPUs busy", "more CPUs"],
            ["ranks a node", "workers"],
        ),
        (
            CpuUsage(),
            1,
            1,
            ["see what else keeps the CPUs busy", "more CPUs."],
            ["threads", "now", "workers"],
        ),
    ],
    ids=[
        "one_of_each",
        "threads",
        "workers",
        "one_worker",
        "ranks",
        "nameless",
        "nothing_known",
        "threads_known",
    ],
)
def test_advice_on_cpus_has_only_applicable_changes(
    users: CpuUsage, threads: int, ranks: int, words: list[str], never: list[str]
) -> None:
    said = action([[STARVED] * 60] * ranks, users, threads)

    assert all(each in said for each in words), said
    assert not any(each in said for each in never), said


def test_three_busiest_programs_are_named_with_their_owners() -> None:
    """The rank's own process has the pid of the test's ranks."""
    pid = checked(build_report("r", [node([[STARVED] * 60])]))["ranks"][0]["pid"]
    users = CpuUsage(
        2,
        1,
        [1.9, 2.0],
        [
            STRESS,
            CpuProgram("python", pid, 0.6, RANK),
            CpuProgram("python", 9, 0.25, CHILD),
        ],
        ranks=1,
    )
    found = verdict([[STARVED] * 60], users, 1)

    assert (
        "The busiest programs on the job's CPUs: stress-ng (pid 7), not of this job, 0.95 CPUs; python"
        f" (pid {pid}), rank 0, 0.6 CPUs; python (pid 9), a child process of a rank, 0.25 CPUs."
        in found.explanation
    )
    assert "The job itself" not in found.sentence


@pytest.mark.parametrize(
    ("users", "threads", "words"),
    [
        (CpuUsage(2, 0, ranks=2), 1, ""),
        (CpuUsage(2, 0, ranks=2), 8, "2 ranks with 8 threads each, on 2 CPUs."),
        (CpuUsage(2, 3, ranks=1), 1, "1 rank with 1 thread and 3 child processes each, on 2 CPUs."),
        (CpuUsage(1, 0, ranks=2), 1, "2 ranks with 1 thread each, on 1 CPU."),
        (CpuUsage(8, 0), 64, ""),
        (CpuUsage(), 64, ""),
    ],
    ids=["enough", "threads", "workers", "ranks", "ranks unknown", "nothing known"],
)
def test_job_that_has_more_threads_than_cpus_is_named(
    users: CpuUsage, threads: int, words: str
) -> None:
    found = verdict([[STARVED] * 60] * 2, users, threads).sentence

    assert ("The job itself has more threads and processes than CPUs" in found) == bool(words)
    assert words in found


@pytest.mark.parametrize("flag", [Flag.EVALUATION, Flag.CHECKPOINT, Flag.COMPILED])
def test_flagged_long_steps_keep_their_verdict_despite_cpu_contention(flag: Flag) -> None:
    """Steps that are long only due to contention have no verdict."""
    loop = [dict(STARVED) for _ in range(200)]
    for step in range(20, 200, 20):
        loop[step] = {**STARVED, "host": 224.0, "cpu": 150.0, "cpu_in": "host", "flags": int(flag)}
    loop[55] = {**STARVED, "forward": 924.0, "cpu": 900.0}
    rows = checked(build_report("r", [node([loop])]))["verdicts"]

    assert [row.kind for row in rows] == ["lack_of_cpu", "long_steps"]
    assert (
        "1 longer step waits for a CPU 900 ms more than a typical step: 900 ms in total."
        in rows[0].sentence
    )


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (
            range(40, 60),
            " 20 longer steps wait for a CPU 60.0 ms more on average than a typical step: 1.20 s in total. Next: ",
        ),
        (
            [55],
            " 1 longer step waits for a CPU 900 ms more than a typical step: 900 ms in total. Next: ",
        ),
    ],
)
def test_steps_with_longer_cpu_contention_are_counted_without_a_verdict(
    steps: Sequence[int], words: str
) -> None:
    """Steps with longer contention are not typical steps."""
    more = 60.0 if len(steps) > 1 else 900.0
    loop = [dict(STARVED) for _ in range(100)]
    for step in steps:
        loop[step] = {**STARVED, "forward": 24.0 + more, "cpu": 20.0 + more}
    (row,) = checked(build_report("r", [node([loop])]))["verdicts"]

    assert words in row.sentence


def test_cpu_contention_is_not_ruled_out_if_it_is_the_verdict() -> None:
    """The slow rank's work excludes contention, so only the other explanations are listed as ruled
    out.
    """
    loops = [[{**STARVED, "backward": 8.0 + more} for _ in range(100)] for more in (0.0, 3.0)]
    slow = episode(1, 0, from_start=True, last_step=99, excess_ns=3 * MS, cost_ns=3 * MS)
    subjects = ("garbage collection", "waits for a CPU", "waits for a disk")
    why = Diagnosis((), subjects, (), {}, {})
    state = node(loops, findings(slow, last_step=99, compared=2))
    state.findings = dataclasses.replace(
        state.findings, groups=(StragglerGroup("rank", "", (1,), slow, diagnosis=why),)
    )
    texts = [row.sentence for row in checked(build_report("r", [state]))["verdicts"]]

    assert texts[0].startswith("CPU contention takes ")
    assert "Cause: none found (checked: garbage collection, waits for a disk). " in texts[1]


def test_sidecar_records_a_busy_program_outside_the_job(run: RunDirectory) -> None:
    """A rank waits for a CPU, while a program that is not part of the job is busy.

    The sidecar is a real one.
    """
    cpu = min(os.sched_getaffinity(0))
    busy = [
        sys.executable,
        "-c",
        f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass",
    ]
    rank = Rank(run, 0, 1)
    before = os.sched_getaffinity(0)
    # A shell starts the program and exits, because a child of the rank would count as one of its
    # workers.
    shell = ["/bin/sh", "-c", '"$@" >/dev/null 2>&1 & echo $!', "sh", *busy]
    neighbour = int(subprocess.run(shell, stdout=subprocess.PIPE, check=True).stdout)
    sidecar = Sidecar(run, HOST, None, lambda run, asked: None)
    os.sched_setaffinity(0, {cpu})
    try:
        ends = time.monotonic() + 60
        while (
            not sidecar.state.processes
            or not next(iter(sidecar.state.processes.values())).cpu_users.others[1]
        ):
            assert time.monotonic() < ends
            rank.steps(1, forward=5)
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                pass
            sidecar.read_rings()
            sidecar.count_records()
            sidecar.judge_ranks(time.monotonic())
    finally:
        os.sched_setaffinity(0, before)
        os.kill(neighbour, signal.SIGKILL)
        sidecar.close()
        rank.close()
    users = next(iter(sidecar.state.processes.values())).cpu_users

    assert users.cpus == users.ranks == 1
    assert users.others[0] > 0
    # Other programs of the machine may be busier than these two.
    owners = {neighbour: OTHER, os.getpid(): RANK}
    assert 0 < len(users.programs) <= 3
    assert all(each.owner == owners.get(each.pid, each.owner) for each in users.programs)
