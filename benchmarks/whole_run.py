"""Cost of a watch for a whole run: the wall time from before `import torchlens_perf` to the
process's end.

A small GPT trains in a plain loop for about 1, 5, 60 and 300 s: one rank with two threads, and two
ranks with one thread each, so two processors are busy. A round is two runs without a watch, of which
the second is the control, and a run with a default watch, with the same steps, in random order.
Ranks are forked from a process that has imported torch but not torchlens_perf. Rounds in which other
programs took more than a twentieth of the processors are excluded if enough rounds remain.

The required limit (bar) applies to the start and the steps: entering the watch, and all steps. At
the end, rank 0 waits for the report that it prints, which is a part of the whole run. Where the
control differs as much as the watched run, the wall time tells nothing. `accounted` is then the
best estimate: the time that entering the watch takes, the overhead that the report states for the
steps, and the sidecar's processor time until the last step, divided by the number of processors.

`python -m benchmarks.whole_run 5:12 60:3 300:1 --one-rank` makes runs of these lengths with so many
rounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Table, ratio_interval

# Seconds of a run and number of rounds.
RUNS = {1: 40, 5: 24, 60: 6, 300: 2}
# Largest time that a watch may add to the start and the steps, in percent, by seconds of a run.
BARS = {5: 3.0, 60: 0.5, 300: 0.3}
RANKS = (1, 2)
CONTEXT, BATCH, WIDTH, LAYERS = 64, 8, 96, 3
TRIED_STEPS = 50
MAX_OTHERS = 0.05
# Multiple of the wanted rounds after which the benchmark stops.
MAX_TRIES = 3


@dataclasses.dataclass(frozen=True)
class Times:
    """Times of one run in seconds."""

    whole_s: float
    start_s: float
    """Importing the package and entering the watch, on the slowest rank."""
    steps_s: float
    end_s: float
    """From the end of rank 0's last step to the end of its process."""
    sidecar_cpu_s: float
    sidecar_cpu_before_end_s: float
    """The sidecar's processor time until rank 0's last step."""
    job_waits_s: float
    """Time in which rank 0's threads could run and had no processor, until its last step."""
    others: float
    """Share of the processors' time used by programs other than the ranks and their sidecar."""
    overhead: float
    """Share of the step time that recording took, by the report."""

    @property
    def training_s(self) -> float:
        return self.start_s + self.steps_s


@dataclasses.dataclass(frozen=True)
class Round:
    plain: Times
    control: Times
    watched: Times

    @property
    def others(self) -> float:
        return max(self.plain.others, self.control.others, self.watched.others)

    @property
    def accounted(self) -> float:
        """Share of the unwatched time that the parts of the watch take."""
        watched, unwatched_s = self.watched, (self.plain.training_s + self.control.training_s) / 2
        sidecar_s = watched.sidecar_cpu_before_end_s / (os.cpu_count() or 1)
        return (watched.start_s + watched.overhead * watched.steps_s + sidecar_s) / unwatched_s


def main(runs: Mapping[int, int] = RUNS, ranks_of_jobs: Sequence[int] = RANKS) -> int:
    """Print the table. Return the number of missed bars. runs: rounds by seconds of a run."""
    table = Table(
        "run", "rounds", "unwatched s", "start and steps, %", "control, %", "accounted, %", "bar", "",
        "the whole, %", "start ms", "end ms", "sidecar's CPU s before the end", "in all",
        "job's waits for CPUs, ms", "others' share",
    )  # fmt: skip
    for seconds, wanted in runs.items():
        bar = BARS.get(seconds)
        for ranks in ranks_of_jobs:
            rounds = quietest(measured(seconds, ranks, wanted), wanted)
            watched = [each.watched for each in rounds]
            training = added(rounds, "training_s")
            table.row(
                f"{seconds} s, {ranks} rank{'s' * (ranks > 1)}",
                len(rounds),
                f"{statistics.median(each.plain.whole_s for each in rounds):.2f}",
                percent(training),
                percent(
                    ratio_interval(
                        [each.control.training_s for each in rounds],
                        [each.plain.training_s for each in rounds],
                    )
                ),
                f"{100 * statistics.median(each.accounted for each in rounds):+.2f}",
                "" if bar is None else f"at most {bar:g} %",
                "" if bar is None else table.bar(100 * (training[0] - 1) <= bar),
                percent(added(rounds, "whole_s")),
                f"{1e3 * statistics.median(run.start_s for run in watched):.0f}",
                f"{1e3 * statistics.median(each.watched.end_s - each.plain.end_s for each in rounds):.0f}",
                f"{statistics.median(run.sidecar_cpu_before_end_s for run in watched):.2f}",
                f"{statistics.median(run.sidecar_cpu_s for run in watched):.2f}",
                f"{1e3 * statistics.median(each.watched.job_waits_s - each.plain.job_waits_s for each in rounds):.0f}",
                f"{statistics.median(each.others for each in rounds):.0%}",
            )
    return table.missed


def quietest(rounds: list[Round], wanted: int) -> list[Round]:
    """Return the undisturbed rounds, or the least disturbed half of `wanted` if there are fewer."""
    by_others = sorted(rounds, key=lambda each: each.others)
    return [
        each
        for i, each in enumerate(by_others)
        if each.others <= MAX_OTHERS or i < max(1, wanted // 2)
    ]


def added(rounds: Sequence[Round], part: str) -> tuple[float, float, float]:
    """Return the ratio of a part's time with a watch to that without, and its interval of 95 %."""
    unwatched = [(getattr(each.plain, part) + getattr(each.control, part)) / 2 for each in rounds]
    return ratio_interval([getattr(each.watched, part) for each in rounds], unwatched)


def percent(ratio: tuple[float, float, float]) -> str:
    middle, low, high = (100 * (value - 1) for value in ratio)
    return f"{middle:+.2f} [{low:+.2f}, {high:+.2f}]"


def measured(seconds: float, ranks: int, wanted: int) -> list[Round]:
    """Return all rounds, which are made by a fresh process that has imported only torch."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHLENS", "OTEL_"))
    }
    environ["OMP_NUM_THREADS"] = str(2 // ranks)
    command = [sys.executable, "-m", "benchmarks.whole_run", str(seconds), str(ranks), str(wanted)]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return [Round(*(Times(*run) for run in runs)) for runs in json.loads(done.stdout)]


def one_job(seconds: float, ranks: int, wanted: int) -> list[list[Any]]:
    """Run all rounds with this length and number of ranks in children of this process."""
    import torch  # noqa: F401 # once, for all of them

    def steps_per_s() -> float:
        return TRIED_STEPS / run_once(ranks, TRIED_STEPS, watched=False).steps_s

    steps = max(1, round(seconds * statistics.median(steps_per_s() for _ in range(5))))
    # The first run fills caches.
    run_once(ranks, TRIED_STEPS, watched=True)
    rounds: list[Round] = []
    draw, order = random.Random(1), ["plain", "control", "watched"]
    while (
        len(rounds) < MAX_TRIES * wanted
        and sum(each.others <= MAX_OTHERS for each in rounds) < wanted
    ):
        draw.shuffle(order)
        rounds.append(
            Round(**{name: run_once(ranks, steps, watched=name == "watched") for name in order})
        )
    return [list(dataclasses.astuple(each)) for each in rounds]


def run_once(ranks: int, steps: int, *, watched: bool) -> Times:
    """Run `ranks` forked processes. Raises RuntimeError if a rank fails."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        busy_s, own_s, begun_s = processors_s(), children_s(), time.monotonic()
        children = [
            start_rank(rank, ranks, steps, folder, watched=watched) for rank in range(ranks)
        ]
        ended: dict[int, float] = {}
        for _ in children:
            pid, status = os.waitpid(-1, 0)
            ended[pid] = time.monotonic()
            if status:
                raise RuntimeError(
                    f"a rank ended with status {status}: {(folder / 'stderr').read_text()}"
                )
        last_s = max(ended.values())
        busy_s, own_s, took_s = processors_s() - busy_s, children_s() - own_s, last_s - begun_s
        told = [
            struct.unpack("5d", (folder / f"times{rank}").read_bytes()) for rank in range(ranks)
        ]
        cpu_s, overhead = read_results(folder) if watched else (0.0, 0.0)
        return Times(
            whole_s=last_s - min(began for began, *_ in told),
            start_s=max(entered - began for began, entered, *_ in told),
            steps_s=max(left - entered for _, entered, left, *_ in told),
            end_s=ended[children[0]] - told[0][2],
            sidecar_cpu_s=cpu_s,
            sidecar_cpu_before_end_s=told[0][3],
            job_waits_s=told[0][4],
            others=max(0.0, busy_s - own_s - cpu_s) / took_s / (os.cpu_count() or 1),
            overhead=overhead,
        )


def start_rank(rank: int, ranks: int, steps: int, folder: Path, *, watched: bool) -> int:
    """Fork one rank. Return its pid."""
    child = os.fork()
    if child:
        return child
    if ranks > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks)
        )
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    try:
        times = train(rank, ranks, steps, folder, watched=watched)
        (folder / f"times{rank}").write_bytes(struct.pack("5d", *times))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def train(
    rank: int, ranks: int, steps: int, folder: Path, *, watched: bool
) -> tuple[float, float, float, float, float]:
    """Train one rank. Return the times at which the rank began, entered its loop and left the loop
    (CLOCK_MONOTONIC), the sidecar's processor seconds then, and how long the threads had waited for
    a processor.
    """
    import torch
    import torch.distributed as dist
    from torch import nn

    from benchmarks.gpt import GPT

    torch.manual_seed(0)
    model: nn.Module = GPT(LAYERS, WIDTH, context=CONTEXT)
    if ranks > 1:
        store = dist.FileStore(str(folder / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 256, (BATCH, CONTEXT + 1))

    def step() -> None:
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    began_s = time.monotonic()
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if watched:
        import torchlens_perf as perf

        context = perf.watch(model, optimizer, dir=str(folder / "runs"))
    waits_s = waited_for_processors_s()
    with context as watch:
        entered_s = time.monotonic()
        for _ in range(steps):
            step()
        left_s = time.monotonic()
        waits_s = waited_for_processors_s() - waits_s
        cpu_s = cpu_so_far_s(watch.run_dir) if watched else 0.0
    if ranks > 1:
        dist.barrier()
    return began_s, entered_s, left_s, cpu_s, waits_s


def waited_for_processors_s() -> float:
    """Return how long the threads of this process could run and had no processor."""
    waits_ns = 0
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/schedstat") as file:
            waits_ns += int(file.read().split()[1])
    return waits_ns / 1e9


def cpu_so_far_s(run_dir: str) -> float:
    """Return the processor seconds of the run's sidecar until now."""
    from torchlens_perf.run import sidecar_status
    from torchlens_perf.run.directory import find_sidecar_lock
    from torchlens_perf.run.processes import process_cpu_time_s

    lock = find_sidecar_lock(Path(run_dir).name)
    return process_cpu_time_s(sidecar_status.read_status(str(lock))[0])


def read_results(folder: Path) -> tuple[float, float]:
    """Return the sidecar's processor time in all, once it has ended, and the overhead in the steps.

    Another process reads them, so that this one has not imported the package when it forks a rank.
    """
    command = [sys.executable, "-m", "benchmarks.whole_run", "--results", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return tuple(json.loads(done.stdout))


def print_results(folder: Path) -> None:
    import torchlens_perf as perf
    from tests.support.processes import wait_for_sidecar
    from torchlens_perf.run.directory import RunDirectory

    (run,) = [path.parent for path in (folder / "runs").glob("*/nodes")]
    wait_for_sidecar(RunDirectory(run))
    summary = perf.open_run(run).summary()
    json.dump((summary.sidecar_cpu_s, summary.overhead_share), sys.stdout)


def processors_s() -> float:
    """Return the processor seconds that all programs have used."""
    with open("/proc/stat") as file:
        ticks = [int(field) for field in file.readline().split()[1:9]]
    # The sum excludes idle time, also idle time during disk accesses.
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def children_s() -> float:
    """Return the processor seconds of the ranks that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    if sys.argv[1:2] == ["--results"]:
        sys.exit(print_results(Path(sys.argv[2])))
    if any(":" in argument for argument in sys.argv[1:]):
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        wanted = [each.split(":") for each in sys.argv[1:] if ":" in each]
        ranks = (1,) if "--one-rank" in sys.argv else RANKS
        sys.exit(main({int(seconds): int(rounds) for seconds, rounds in wanted}, ranks))
    json.dump(one_job(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])), sys.stdout)
