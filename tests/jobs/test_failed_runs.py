"""A run that an exception ends is reported as failed, on all screens and in exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.long import long, long_except
from tests.support.processes import only_report, run_warm, runs, torchrun

MODEL = """
import os, signal, sys, time, torch, torchlens_perf as perf
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps=20, width=8):
    for step in range(steps):
        model(torch.ones(4, 8 if step < 15 else width)).sum().backward()
        optimizer.step()
"""
WATCH = "perf.watch(model, optimizer)"
BAD = "train(width=9)"
WAYS = {
    "with": (f"with {WATCH}: {BAD}", True),
    "finally": (f"watch = {WATCH}.start()\ntry: {BAD}\nfinally: watch.stop()", True),
    "start": (f"watch = {WATCH}.start()\n{BAD}", True),
    "decorator": (f"@perf.watch()\ndef main(): {BAD}\nmain()", True),
    "nested": (f"with {WATCH}:\n  with {WATCH}: train()\n  {BAD}", True),
    "exit code": (f"with {WATCH}: train(); sys.exit(3)", True),
    "handled": (f"with {WATCH}:\n  try: {BAD}\n  except RuntimeError: train()", False),
    "after": (f"with {WATCH}: train()\nraise RuntimeError('not in the run')", False),
    "interrupted": (f"with {WATCH}: train(); raise KeyboardInterrupt", False),
    "exit 0": (f"with {WATCH}: train(); sys.exit(0)", False),
    "while handling": (
        f"try: 1 / 0\nexcept ZeroDivisionError: watch = {WATCH}.start(); train(); watch.stop()",
        False,
    ),
    "thread": (
        f"import threading\nwith {WATCH}:\n  t = threading.Thread(target=lambda: 1 / 0)\n"
        "  t.start(); t.join(); train()",
        False,
    ),
}


def run_program(source: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(MODEL + source)
    return run_warm([sys.executable, "train.py"], folder, **variables)


@pytest.mark.parametrize("way", long_except({"with", "exit code", "handled"}, WAYS))
def test_run_has_failed_if_an_exception_leaves_its_watch(way: str, tmp_path: Path) -> None:
    source, fails = WAYS[way]
    run_program(source, tmp_path)
    value = only_report(tmp_path)
    failed = [row for row in value["verdicts"] if row.kind == "failed"]

    assert (value["run"]["state"], len(failed)) == (("failed", 1) if fails else ("ended", 0))
    assert [rank["failure"] is not None for rank in value["ranks"]] == [fails]
    if fails:
        assert value["verdicts"][0] == failed[0]
        assert {"none", "compute_bound"}.isdisjoint(row.kind for row in value["verdicts"])


@pytest.mark.parametrize(
    ("source", "kind", "place"),
    [
        (BAD, "RuntimeError", "step 15, in forward of 0"),
        ("train()\ntorch.empty(1 << 60)", "RuntimeError", "step 20"),
        *long(
            ("train()\nraise MemoryError", "MemoryError", "step 20"),
            ("train()\nassert False, 'no data'", "AssertionError", "step 20"),
        ),
    ],
)
def test_automatically_recorded_program_has_failed(
    source: str, kind: str, place: str, tmp_path: Path
) -> None:
    done = run_program(source, tmp_path, TORCHLENS_PERF="1")
    first = only_report(tmp_path)["verdicts"][0]

    assert done.returncode == 1
    assert (first.kind, first.evidence.failure["type"]) == ("failed", kind)
    assert f"failed in {place}: {kind}" in first.sentence
    assert "train.py:" in first.sentence


def test_failure_is_in_the_printed_report_and_in_the_exit_code(tmp_path: Path) -> None:
    done = run_program(WAYS["with"][0], tmp_path, TORCHLENS_PERF_EXIT_TIMEOUT_S="60")
    (run,) = runs(tmp_path)
    command = [
        sys.executable,
        "-m",
        "torchlens_perf",
        "report",
        str(run.path),
        "--fail-on",
        "crash",
    ]
    asked = run_warm(command, tmp_path)

    for text in (done.stderr, asked.stdout):
        title, *lines = text.partition("torchlens_perf  ")[2].splitlines()
        assert re.search(r" steps in [\d.]+ m?s, failed$", title)
        first = next(line for line in lines if line and not line.startswith("  status "))
        assert first.split()[0] == "FAILED"
        assert "forward   in step 15" in text
        assert "  OK " not in text
    assert asked.returncode == 1


RANKS = """
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train(10)
if dist.get_rank() == 1:
    {end}
train(100)
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("end", "kind", "rank", "text"),
    [
        ("raise ValueError('bad batch')", "failed", 1, "step 10: ValueError: bad batch (train.py:"),
        *long(
            ("torch.empty(1 << 60)", "failed", 1, "can't allocate memory"),
            ("os.kill(os.getpid(), signal.SIGKILL)", "died", 1, "after step 9"),
            ("os._exit(1)", "died", 1, "after step 9"),
            (
                "sys.exit(3)",
                "failed",
                0,
                "Before, rank 1 ended without an exception (exit code 3).",
            ),
        ),
    ],
)
def test_rank_that_failed_first_is_named_before_ranks_that_lost_it(
    end: str, kind: str, rank: int, text: str, tmp_path: Path
) -> None:
    """torchrun ends rank 0 soon after. The line with the report's path is printed before."""
    (tmp_path / "train.py").write_text(MODEL + RANKS.format(end=end))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--logs-specs", "torchlens_perf", "train.py",
    ]  # fmt: skip
    done = run_warm(command, tmp_path)
    value = only_report(tmp_path)
    first = value["verdicts"][0]

    assert done.returncode != 0
    assert (first.kind, first.rank) == (kind, rank)
    assert text in first.sentence
    if kind == "failed" and rank == 1:
        assert "rank 0" in first.sentence.partition("Then the job ended: ")[2]
    (run,) = runs(tmp_path)
    assert ("FAILED" if kind == "failed" else "CRASH") in run.report.read_text()


IN_GROUP = """
group = "{group}"
with open(f"{{group}}/cgroup.procs", "w") as procs: procs.write(str(os.getpid()))
with perf.watch(model, optimizer) as watch:
    train(10)
    watch.summary()  # The sidecar answers, so it has seen the process.
    {end}
"""


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("os._exit(7)", "the process ended with exit code 7"),
        *long(
            (
                "torch.ones(1 << 28)",
                "killed by the kernel: out of memory (cgroup limit 512 MB; the rank used up to ",
            ),
            ("os.kill(os.getpid(), signal.SIGKILL)", "the process ended with SIGKILL"),
            (
                "subprocess.run([sys.executable, '-c', 'b\"1\" * (1 << 30)'], check=True)",
                "The kernel's OOM killer ended 1 process of its control group (cgroup limit 512",
            ),
        ),
    ],
)
def test_rank_that_the_kernel_ended_for_lack_of_memory_is_told_from_others(
    end: str, words: str, memory_group: Callable[[int], Path], tmp_path: Path
) -> None:
    group = memory_group(512_000_000)
    run_program("import subprocess\n" + IN_GROUP.format(group=group, end=end), tmp_path)

    assert words in only_report(tmp_path)["verdicts"][0].sentence


RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
@record
def main():
    with perf.watch(model, optimizer):
        train(10)
        if dist.get_rank() == 0:
            train(100)
    raise ValueError("no checkpoint: Next: x")
main()
"""


@pytest.mark.distributed
def test_exception_after_the_watch_is_read_from_torchruns_error_file(tmp_path: Path) -> None:
    """Rank 1 has left its watch, and rank 0 loses the connection to it."""
    (tmp_path / "train.py").write_text(MODEL + RECORDED)
    run_warm(torchrun("--log-dir", "logs", "train.py"), tmp_path)
    first = only_report(tmp_path)["verdicts"][0]

    assert (first.kind, first.rank) == ("failed", 1)
    assert "failed after watch() had ended with 10 steps: ValueError: no checkp" in first.sentence
    assert "Then the job ended: rank 0 by a lost connection." in first.sentence
