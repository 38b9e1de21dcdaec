"""Compare the ends of short runs with and without a watch on a busy machine: exit codes, stderr,
results.

Two ranks over gloo make three steps of DDP and end at once, which is the worst case for work still
in progress. Each round has a run of each kind, in shuffled order: unwatched, inside watch(), and
recorded from outside (as by torchrun's flag). Each kind of run is made once with and once without a
call of destroy_process_group().

gloo itself aborts some processes at exit ("terminate called without an active exception"), because
its thread drops a Python object while the interpreter ends. gloo also makes some processes hang: a
thread that has the GIL joins a thread that waits for the GIL. Aborts and hangs happen with and
without a watch. The benchmark therefore counts all failures and compares the rates with and without
a watch.

Ranks are forked from a process that has imported torch, and end as any interpreter does. Two
spinning processes keep the processors busy.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.measure import Table

# 200 runs with a watch, 100 without.
ROUNDS = 50
RANKS, STEPS = 2, 3
WAYS = ("unwatched", "watched", "recorded")
RUN_TIMEOUT_S = 30.0
MIN_P = 0.01
ABORT = "terminate called without an active exception"


@dataclasses.dataclass(frozen=True)
class Run:
    """Exit code (or minus the signal), stderr and result of each rank of one run."""

    way: str
    destroys: bool
    codes: tuple[int, ...]
    stderr: tuple[str, ...]
    results: tuple[str, ...]


def train(rank: int, way: str, destroys: bool, folder: Path) -> None:
    """Train one rank in a process that ends when this function returns."""
    import torchlens_perf as perf
    from torchlens_perf import autoload

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS
    )
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if way == "recorded":
        autoload.arm()
    with (
        perf.watch(model, optimizer, report="quiet")
        if way == "watched"
        else contextlib.nullcontext()
    ):
        for step in range(STEPS):
            model(torch.full((8, 16), 0.1 * (step + rank))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    data = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    (folder / f"result{rank}").write_text(hashlib.sha256(data).hexdigest())
    if destroys:
        dist.destroy_process_group()


def start_runs(rounds: int, folder: Path) -> None:
    """Fork the ranks of each run, and print each run's outcome as a line of JSON.

    The function also returns in each forked rank.
    """
    # An optimizer's first step imports torch._dynamo, which takes two thirds of such a run's time.
    import torch._dynamo  # noqa: F401

    kinds = [(way, destroys) for way in WAYS for destroys in (True, False)]
    draw = random.Random(1)
    for _ in range(rounds):
        draw.shuffle(kinds)
        for way, destroys in kinds:
            place = folder / uuid.uuid4().hex
            place.mkdir()
            pids = []
            for rank in range(RANKS):
                pid = os.fork()
                if pid == 0:
                    _become_rank(rank, place)
                    train(rank, way, destroys, place)
                    return
                pids.append(pid)
            codes = _wait(pids)
            told = [_text(place / f"stderr{rank}") for rank in range(RANKS)]
            results = [_text(place / f"result{rank}") for rank in range(RANKS)]
            print(json.dumps([way, destroys, codes, told, results]), flush=True)


def _become_rank(rank: int, folder: Path) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
        TORCHLENS_PERF_RUN_ID=f"short-{folder.name}", TORCHLENS_PERF_DIR=str(folder), TORCHLENS_PERF_REPORT="quiet",
        GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    descriptor = os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _wait(pids: list[int]) -> list[int]:
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline_s:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Run one spinning process per processor until the context or this process ends."""
    program = (
        "import os; parent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10 **"
        " 6): pass"
    )
    spinning = [
        subprocess.Popen([sys.executable, "-c", program]) for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def runs(rounds: int = ROUNDS) -> list[Run]:
    """Return all runs, which are made by a process that has imported only torch."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHLENS", "OTEL_"))
    }
    environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, busy():
        command = [sys.executable, "-m", "benchmarks.short_runs", str(rounds), folder]
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return [Run(way, destroys, *map(tuple, ranks)) for way, destroys, *ranks in told]


def chance(aborts: int, count: int, other_aborts: int, other_count: int) -> float:
    """Return the probability of at least this many aborts in `count` runs if both kinds of runs
    abort equally often.

    This is Fisher's exact test.
    """
    both, most = aborts + other_aborts, min(aborts + other_aborts, count)
    ways = math.comb(count + other_count, both)
    return (
        sum(math.comb(count, n) * math.comb(other_count, both - n) for n in range(aborts, most + 1))
        / ways
    )


def main() -> int:
    """Print the table. Return the number of missed bars."""
    table = Table(
        "ranks", "all", "exit code 0", "aborted", "hung", "other end", "other stderr", "bar", ""
    )
    found = runs()
    results = {result for run in found for result in run.results}
    for destroys in (True, False):
        unwatched = 0
        for way in WAYS:
            these = [run for run in found if (run.way, run.destroys) == (way, destroys)]
            ranks = [rank for run in these for rank in zip(run.codes, run.stderr, strict=True)]
            ends = collections.Counter(_end(code, stderr) for code, stderr in ranks)
            words = sum(bool(stderr.replace(ABORT, "").strip()) for _, stderr in ranks)
            bar = verdict = ""
            if way == WAYS[0]:
                unwatched = len(ranks) - ends["fine"]
            else:
                p = chance(len(ranks) - ends["fine"], len(ranks), unwatched, len(ranks))
                bar = f"as unwatched (p = {p:.2f})"
                verdict = table.bar(not ends["other"] and not words and p >= MIN_P)
            group = "destroyed" if destroys else "left"
            counts = (
                len(ranks),
                *(ends[end] for end in ("fine", "aborted", "hung", "other")),
                words,
            )
            table.row(f"{way}, process group {group}", *counts, bar, verdict)
    print(
        "\nresults:"
        f" {'the same in all runs' if len(results) == 1 else f'{len(results)} different ones'}"
    )
    return table.missed + (len(results) != 1)


def _end(code: int, stderr: str) -> str:
    if code == -signal.SIGABRT and ABORT in stderr:
        return "aborted"
    return {0: "fine", -signal.SIGKILL: "hung"}.get(code, "other")


if __name__ == "__main__":
    start_runs(int(sys.argv[1]), Path(sys.argv[2]))
