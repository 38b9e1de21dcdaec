"""Bandwidths of `torchlens_perf check`, and an independent measurement in the same processes.

    python -m benchmarks.check_bandwidth --ranks 4 --minutes 3
    sudo python -m benchmarks.check_bandwidth --mbit 1000

The two alternate, so other load slows both: the independent loop runs before and after each value of
the check. It makes its own calls of torch.distributed, reads its own clock, and computes bus
bandwidths as doc/PERFORMANCE.md of nccl-tests does, from the mean time of all ranks. Medians of short
windows are compared on both sides, because other programs make some windows much longer. The last lines
have the median ratio of each operation and size, with its 95 % interval. `--mbit` limits the
loopback device of a network namespace, so that the link takes the time, as between nodes, and other
programs on the CPUs matter less. It needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
import timeit
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import ratio_interval
from torchlens_perf.check.communication import measure_groups, measure_links
from torchlens_perf.check.figures import RankFigures, collect
from torchlens_perf.check.ranks import Ranks
from torchlens_perf.run.place.launcher import detect_place

_WINDOW_S = 0.04
"""Time of a window of the independent measurement, about that of a round of the check."""
_LEAST_CALLS = 4
_SECONDS = 3.0
"""Time that the check has for all its collectives."""
_TRANSFER_BYTES = 1 << 22
_BUCKET = "burst 128kb latency 200ms"
"""The loopback device sends up to 64 KiB at once."""
SIZES = 1 << 14, 1 << 19, 1 << 22
"""Sizes of the collectives of a check on CPUs."""


def measure_windows(call: Callable[[], object]) -> list[float]:
    """Return the mean seconds of a call in three windows, which have no barriers between them."""
    dist.barrier()
    first_s = torch.tensor(timeit.timeit(call, number=3) / 3)
    dist.all_reduce(first_s, dist.ReduceOp.MAX)
    count = max(_LEAST_CALLS, min(200, round(_WINDOW_S / float(first_s))))
    stamps = [time.perf_counter()]
    for _ in range(3):
        for _ in range(count):
            call()
        stamps.append(time.perf_counter())
    windows = [(b - a) / count for a, b in itertools.pairwise(stamps)]
    of_ranks = torch.tensor(windows, dtype=torch.float64)
    dist.all_reduce(of_ranks)
    return [float(each) / dist.get_world_size() for each in of_ranks]


def list_operations(size: int) -> Iterator[tuple[str, Callable[[], list[float]]]]:
    """Yield names, and functions that return bus bandwidths in bytes per second."""
    ranks = dist.get_world_size()
    one = size // 4 // ranks
    nbytes = 4 * one * ranks

    def bandwidths(factor: float, call: Callable[[], object]) -> list[float]:
        return [factor * nbytes / each for each in measure_windows(call)]

    whole, other, part = torch.ones(ranks * one), torch.ones(ranks * one), torch.ones(one)
    zeros = torch.zeros(ranks * one)
    rows: tuple[tuple[str, float, Callable[[], object]], ...] = (
        ("allreduce", 2 * (ranks - 1) / ranks, lambda: dist.all_reduce(zeros)),
        (
            "allgather_base",
            (ranks - 1) / ranks,
            lambda: dist.all_gather_into_tensor(whole, part),
        ),
        (
            "reduce_scatter_base",
            (ranks - 1) / ranks,
            lambda: dist.reduce_scatter_tensor(part, zeros),
        ),
        ("alltoall_base", (ranks - 1) / ranks, lambda: dist.all_to_all_single(other, whole)),
        ("broadcast", 1.0, lambda: dist.broadcast(whole, 0)),
    )
    for name, factor, call in rows:
        yield name, partial(bandwidths, factor, call)


def measure_pair(rank: int) -> list[float]:
    """Return the bytes per second of messages from rank 0 to rank 1, by the receiver's clock."""
    payload, rates = torch.zeros(_TRANSFER_BYTES, dtype=torch.uint8), torch.zeros(3)
    dist.barrier()
    if rank == 0:
        for _ in range(1 + 3 * _LEAST_CALLS):
            dist.send(payload, 1)
    elif rank == 1:
        dist.recv(payload, 0)
        for window in range(3):
            begin_s = time.perf_counter()
            for _ in range(_LEAST_CALLS):
                dist.recv(payload, 0)
            rates[window] = _LEAST_CALLS * payload.nbytes / (time.perf_counter() - begin_s)
    dist.broadcast(rates, 1)
    return rates.tolist()


def alternate(ranks: Ranks) -> Iterator[tuple[str, float, float]]:
    """Measure everything once in both ways. Yield operations, and the values of check and loop."""
    operations = itertools.chain(*(list_operations(size) for size in SIZES))
    checked = measure_groups(ranks, {"world": ranks.size}, _SECONDS)
    for name, measure in operations:
        before = measure()
        title, members, rates = next(checked)
        after = measure()
        assert title.startswith(f"{name}, "), title
        place = " ".join(map(str, members))
        own = RankFigures(ranks.rank, str(ranks.rank), "", "CPU", "")
        own.values[title] = {place: rates}
        reported = collect(ranks.gather(own, RankFigures))[title][place]
        yield title, statistics.median(reported), statistics.median(before + after)
    before = measure_pair(ranks.rank)
    rows = measure_links(ranks, [[0], [1]], 0.2)
    after = measure_pair(ranks.rank)
    there = [row.bytes_per_s for row in rows if row.sender == 0]
    yield "transfers", statistics.median(there), statistics.median(before + after)


def be_rank(minutes: float) -> None:
    """Measure as one rank. Rank 0 prints a line of JSON for each pair of values."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    ranks = Ranks(detect_place(os.environ, None), 60 * minutes + 60, lambda _, reason: 1)
    begin_s = time.monotonic()
    is_over = False
    while not is_over:
        for name, checked, own in alternate(ranks):
            if ranks.rank == 0:
                row = {"operation": name, "check": checked, "independent": own}
                print(json.dumps(row), flush=True)
        is_over = ranks.gather(time.monotonic() - begin_s > 60 * minutes)[0]
    ranks.close()


def measure_both(
    size: int, minutes: float, port: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Return the values of check and independent loop by operation, of a job of this size."""
    place = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-m", "benchmarks.check_bandwidth", "--minutes", str(minutes)]
    started = [
        subprocess.Popen(
            [*command, "--be-rank"], text=True, stdout=subprocess.PIPE,
            env={**os.environ, **place, "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]  # fmt: skip
    printed = [each.communicate()[0] for each in started]
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in map(json.loads, printed[0].splitlines()):
        checked, own = found.setdefault(row["operation"], ([], []))
        checked.append(row["check"])
        own.append(row["independent"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Bandwidths of the check, measured twice.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--mbit", type=int, default=0, help="limit of the link, in Mbit/s")
    parser.add_argument("--port", type=int, default=29_600)
    parser.add_argument("--be-rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.be_rank:
        be_rank(given.minutes)
        return
    if given.mbit:
        limit = f"ip link set lo up && tc qdisc add dev lo root tbf rate {given.mbit}mbit {_BUCKET}"
        rest = ["--ranks", str(given.ranks), "--minutes", str(given.minutes)]
        command = shlex.join([sys.executable, "-m", "benchmarks.check_bandwidth", *rest])
        subprocess.run(["unshare", "--net", "sh", "-c", f"{limit} && {command}"], check=True)
        return
    found: dict[str, Any] = measure_both(given.ranks, given.minutes, given.port)
    for name, (checked, own) in found.items():
        ratio, low, high = ratio_interval(checked, own)
        rate = statistics.median(own) / 1e6
        print(
            f"{name:44} {ratio:.3f} of the independent {rate:,.0f} MB/s,"
            f" 95 % interval {low:.3f} to {high:.3f}, {len(own)} cycles"
        )


if __name__ == "__main__":
    main()
