"""One rank of the programs, under one tool. The campaign, or a tool's launcher, starts it.

python -m benchmarks.detectors.rank TOOL --store FILE          # reads runs from its input
python -m benchmarks.detectors.rank TOOL KIND:SEED FOLDER      # in a launcher's process group
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path

import torch.distributed as dist

from benchmarks.detectors.protocol import times_path, write_answer, write_json
from benchmarks.detectors.tools import TOOLS, Job
from benchmarks.planted_training import join
from benchmarks.planted_truth import plant


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("run", nargs="*", metavar="KIND:SEED FOLDER")
    parser.add_argument("--store", type=Path, help="file that the ranks meet at")
    asked = parser.parse_args()
    watch = TOOLS[asked.tool].watch
    assert watch is not None
    rank, ranks = join(asked.store)
    for line in [" ".join(asked.run)] if asked.run else sys.stdin:
        run, folder = line.rstrip("\n").split(" ", 1)
        kind, _, seed = run.partition(":")
        job = Job(plant(kind, int(seed), ranks), rank, Path(folder))
        dist.barrier()
        named = watch(job)
        if rank == 0:
            write_json(job.folder / "truth.json", job.truth.to_json())
            write_answer(job.folder, named)
        dist.barrier()
        # The campaign waits for these files.
        write_json(times_path(job.folder, rank), job.seconds)
        del job
        gc.collect()
    # gloo's threads may still be finishing the last collective.
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
