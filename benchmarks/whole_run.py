"""Cost of a watch for a whole run: the wall time from before `import torchlens_perf` to the
process's end.

A small GPT trains in a plain loop for about 1, 5, 60 and 300 s: one rank with two threads, and two
ranks with one thread each, so two processors are busy. A pair is a run without and a run with a
default watch, with the same steps, in random order. Ranks are forked from a process that has
imported torch but not torchlens_perf. Pairs in which other programs took more than a twentieth of
the processors are excluded if enough pairs remain.

The required limit (bar) applies to the start and the steps: entering the watch, and all steps. At
the end, rank 0 waits for the report that it prints, which is a part of the whole run. The sidecar's
processor time until the last step depends less on other programs than the wall time.

`python -m benchmarks.whole_run 5:12 60:3 300:1 --one-rank` makes runs of these lengths with so many
pairs.
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

# Seconds of a run and number of pairs.
RUNS = {1: 40, 5: 24, 60: 6, 300: 2}
# Largest time that a watch may add to the start and the steps, in percent, by seconds of a run.
BARS = {5: 3.0, 60: 0.5, 300: 0.3}
RANKS = (1, 2)
CONTEXT, BATCH, WIDTH, LAYERS = 64, 8, 96, 3
TRIED_STEPS = 50
MAX_OTHERS = 0.05
# Multiple of the wanted pairs after which the benchmark stops.
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


@dataclasses.dataclass(frozen=True)
class Pair:
    plain: Times
    watched: Times

    @property
    def others(self) -> float:
        return max(self.plain.others, self.watched.others)


def main(runs: Mapping[int, int] = RUNS, ranks_of_jobs: Sequence[int] = RANKS) -> int:
    """Print the table. Return the number of missed bars. runs: pairs by seconds of a run."""
    table = Table(
        "run", "pairs", "unwatched s", "start and steps, %", "bar", "", "the whole, %", "start ms", "end ms",
        "sidecar's CPU s before the end", "in all", "job's waits for CPUs, ms", "others' share",
    )  # fmt: skip
    for seconds, wanted in runs.items():
        bar = BARS.get(seconds)
        for ranks in ranks_of_jobs:
            pairs = quietest(measured(seconds, ranks, wanted), wanted)
            plain, watched = [pair.plain for pair in pairs], [pair.watched for pair in pairs]
            whole = ratio_interval([run.whole_s for run in watched], [run.whole_s for run in plain])
            training = ratio_interval(
                [run.start_s + run.steps_s for run in watched],
                [run.start_s + run.steps_s for run in plain],
            )
            table.row(
                f"{seconds} s, {ranks} rank{'s' * (ranks > 1)}",
                len(pairs),
                f"{statistics.median(run.whole_s for run in plain):.2f}",
                percent(training),
                "" if bar is None else f"at most {bar:g} %",
                "" if bar is None else table.bar(100 * (training[0] - 1) <= bar),
                percent(whole),
                f"{1e3 * statistics.median(run.start_s for run in watched):.0f}",
                f"{1e3 * statistics.median(pair.watched.end_s - pair.plain.end_s for pair in pairs):.0f}",
                f"{statistics.median(run.sidecar_cpu_before_end_s for run in watched):.2f}",
                f"{statistics.median(run.sidecar_cpu_s for run in watched):.2f}",
                f"{1e3 * statistics.median(pair.watched.job_waits_s - pair.plain.job_waits_s for pair in pairs):.0f}",
                f"{statistics.median(pair.others for pair in pairs):.0%}",
            )
    return table.missed


def quietest(pairs: list[Pair], wanted: int) -> list[Pair]:
    """Return the undisturbed pairs, or the least disturbed half of `wanted` if there are fewer."""
    by_others = sorted(pairs, key=lambda pair: pair.others)
    return [
        pair
        for i, pair in enumerate(by_others)
        if pair.others <= MAX_OTHERS or i < max(1, wanted // 2)
    ]


def percent(ratio: tuple[float, float, float]) -> str:
    middle, low, high = (100 * (value - 1) for value in ratio)
    return f"{middle:+.2f} [{low:+.2f}, {high:+.2f}]"


def measured(seconds: float, ranks: int, wanted: int) -> list[Pair]:
    """Return all pairs, which are made by a fresh process that has imported only torch."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHLENS", "OTEL_"))
    }
    environ["OMP_NUM_THREADS"] = str(2 // ranks)
    command = [sys.executable, "-m", "benchmarks.whole_run", str(seconds), str(ranks), str(wanted)]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return [Pair(Times(*plain), Times(*watched)) for plain, watched in json.loads(done.stdout)]


def one_job(seconds: float, ranks: int, wanted: int) -> list[tuple[Any, Any]]:
    """Run all pairs with this length and number of ranks in children of this process."""
    import torch  # noqa: F401 # once, for all of them

    def steps_per_s() -> float:
        return TRIED_STEPS / run_once(ranks, TRIED_STEPS, watched=False).steps_s

    steps = max(1, round(seconds * statistics.median(steps_per_s() for _ in range(5))))
    # The first run fills caches.
    run_once(ranks, TRIED_STEPS, watched=True)
    pairs: list[Pair] = []
    draw, order = random.Random(1), [False, True]
    while (
        len(pairs) < MAX_TRIES * wanted
        and sum(pair.others <= MAX_OTHERS for pair in pairs) < wanted
    ):
        draw.shuffle(order)
        runs = {watched: run_once(ranks, steps, watched=watched) for watched in order}
        pairs.append(Pair(runs[False], runs[True]))
    return [(dataclasses.astuple(pair.plain), dataclasses.astuple(pair.watched)) for pair in pairs]


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
        cpu_s = sidecar_cpu_s(folder) if watched else 0.0
        return Times(
            whole_s=last_s - min(began for began, *_ in told),
            start_s=max(entered - began for began, entered, *_ in told),
            steps_s=max(left - entered for _, entered, left, *_ in told),
            end_s=ended[children[0]] - told[0][2],
            sidecar_cpu_s=cpu_s,
            sidecar_cpu_before_end_s=told[0][3],
            job_waits_s=told[0][4],
            others=max(0.0, busy_s - own_s - cpu_s) / took_s / (os.cpu_count() or 1),
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


def sidecar_cpu_s(folder: Path) -> float:
    """Return the sidecar's last reported processor time, once it has ended."""
    from tests.support.processes import wait_for_sidecar
    from torchlens_perf.run.directory import RunDirectory

    (run,) = [path.parent for path in (folder / "runs").glob("*/nodes")]
    wait_for_sidecar(RunDirectory(run))
    (state,) = run.glob("nodes/*.json")
    return float(json.loads(state.read_text())["sidecar_cpu_s"])


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
    if any(":" in argument for argument in sys.argv[1:]):
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        wanted = [each.split(":") for each in sys.argv[1:] if ":" in each]
        ranks = (1,) if "--one-rank" in sys.argv else RANKS
        sys.exit(main({int(seconds): int(pairs) for seconds, pairs in wanted}, ranks))
    json.dump(one_job(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])), sys.stdout)
