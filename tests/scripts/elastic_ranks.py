"""All-reduces under watch() in a job whose ranks leave, fail or return.

    usage: elastic_ranks.py [--leaves RANK] [--fails RANK] [--shrinks]

Each step sums a tensor with a unique size and unique values. Rank 0 prints a checksum of all sums.

- --leaves RANK: this rank ends its process after five steps. The other ranks continue in a new
group. - --fails RANK: this rank raises after five steps of its first attempt.
- --shrinks: train in a world of several ranks until one is gone, then make the steps without it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist

import torchlens_perf as perf

STEPS, BEFORE = 12, 5
SMALLEST = 16
# Time limit for the end of the other rank.
MAX_S = 60


def step(w: perf.Watch, number: int, group: dist.ProcessGroup | None = None) -> bytes:
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    payload = torch.full((SMALLEST + number,), float(10 * number + dist.get_rank()))
    dist.all_reduce(payload, group=group)
    assert set(payload.tolist()) == {float(10 * number * len(ranks) + sum(ranks))}
    w.step()
    return payload.numpy().tobytes()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--leaves", type=int, default=-1)
    parser.add_argument("--fails", type=int, default=-1)
    parser.add_argument("--shrinks", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    rest = dist.new_group(
        [other for other in range(dist.get_world_size()) if other != options.leaves]
    )
    done = hashlib.sha256()
    with perf.watch(report="off") as w:
        if options.shrinks and dist.get_world_size() > 1:
            print(f"rank {rank} of {dist.get_world_size()} trains", flush=True)
            deadline_s, number = time.monotonic() + MAX_S, 0
            while time.monotonic() < deadline_s:
                step(w, number)
                number += 1
            sys.exit("the other rank did not leave")
        for number in range(STEPS):
            if number == BEFORE and rank == options.fails and attempt == 0:
                raise RuntimeError("planted failure")
            if number == BEFORE and rank == options.leaves:
                break
            done.update(step(w, number, rest if number >= BEFORE and options.leaves >= 0 else None))
    if rank == 0:
        print("sums", done.hexdigest()[:16])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
