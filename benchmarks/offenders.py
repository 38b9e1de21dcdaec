"""Find planted offenders in simulated fleets: precision, recall, and the time for many runs.

    python -m benchmarks.offenders --runs 100000

Runs of 2 to 16 nodes are drawn from a fleet. A healthy node is named in 1 of 200 of its runs, a bad node in
a third of them. Five hundred nodes have ten bad ones.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from torchlens_perf.actions import fleet, offenders

NODES, BAD = 500, 10
FALSE, TRUE = 0.005, 0.33
_FRAMEWORKS = ("none", "lightning", "accelerate, transformers.trainer")


def write_fleet(folder: Path, runs: int, seed: int) -> set[str]:
    """Write the table of a simulated fleet, and return the names of the bad nodes."""
    chosen = random.Random(seed)
    names = [f"node-{number:03}" for number in range(NODES)]
    bad = set(chosen.sample(names, BAD))
    with (folder / fleet.NAME).open("w") as file:
        for run in range(runs):
            used = chosen.sample(names, chosen.choice((2, 4, 4, 8, 8, 16)))
            hours = 8 * chosen.expovariate(0.5)
            about = {
                "run": f"run-{run}", "changed_ns": 1, "ended": "", "user": f"user-{run % 40}",
                "program": "train.py", "framework": _FRAMEWORKS[run % 3], "nodes": len(used),
            }  # fmt: skip
            if run % 10 == 9:
                # As in a run of an earlier version.
                del about["framework"]
            for node in used:
                row = about | {
                    "node": node,
                    "rank_hours": hours,
                    "kind": "",
                    "lost_rank_hours": 0.0,
                }
                file.write(json.dumps(row) + "\n")
                if chosen.random() < (TRUE if node in bad else FALSE):
                    lost = 0.1 * hours * len(used)
                    row |= {"rank_hours": 0.0, "kind": "straggler", "lost_rank_hours": lost}
                    file.write(json.dumps(row) + "\n")
    return bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--fleets", type=int, default=20)
    parser.add_argument("--engine", default="duckdb")
    options = parser.parse_args()
    right = wrong = missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.fleets):
            bad = write_fleet(Path(folder), 2000, seed)
            found = {each.node for each in offenders.read_fleet(Path(folder), options.engine)[0]}
            right, wrong, missed = (
                right + len(found & bad),
                wrong + len(found - bad),
                missed + len(bad - found),
            )
        print(
            f"{options.fleets} fleets of 2000 runs: {right} right, {wrong} wrong, {missed} missed"
        )
        print(
            f"precision {right / max(1, right + wrong):.1%}, recall {right / max(1, right + missed):.1%}"
        )
        bad = write_fleet(Path(folder), options.runs, 1)
        began_s = time.perf_counter()
        found = {each.node for each in offenders.read_fleet(Path(folder), options.engine)[0]}
        took_s = time.perf_counter() - began_s
        print(
            f"{options.runs} runs: {took_s:.1f} s, {len(found & bad)} of {BAD} found, {len(found - bad)} wrong"
        )


if __name__ == "__main__":
    main()
