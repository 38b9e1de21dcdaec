"""Measure what a watch costs a job that makes a small model and an optimizer every 10 steps.

usage: many_optimizers.py FOLDER [MODELS] [PAIRS]

Plain and watched jobs alternate. The CPU time of the training thread is compared, because other
programs hardly change it. The last number is the overhead in the report of the watched job.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

import torchlens_perf as perf
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory

STEPS_PER_MODEL = 10


def train(models: int) -> float:
    """Return the CPU time of the training thread in seconds."""
    began_s = time.thread_time()
    rows = torch.randn(64, 256)
    for _ in range(models):
        model = nn.Sequential(
            nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(STEPS_PER_MODEL):
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return time.thread_time() - began_s


def train_watched(models: int, folder: Path) -> tuple[float, float]:
    """Return the CPU time, and the overhead that the report states."""
    with perf.watch(dir=str(folder), report="text") as w:
        used_s = train(models)
    assert w.run_dir is not None
    share = load_report(RunDirectory(w.run_dir))["quality"]["overhead_share"]
    return used_s, share


def main(folder: Path, models: int = 300, pairs: int = 7) -> None:
    torch.set_num_threads(1)
    # Objects of a usual program: a search of all objects takes its time for them.
    kept = [{"row": [number]} for number in range(100_000)]
    train(models // 10)
    measured = [(train(models), *train_watched(models, folder)) for _ in range(pairs)]
    extra = [100 * (watched / plain - 1) for plain, watched, _ in measured]
    stated = statistics.median(100 * share for _, _, share in measured)
    print(f"CPU time per pair: {', '.join(f'{each:+.1f} %' for each in extra)}")
    print(f"median {statistics.median(extra):+.1f} %, report {stated:.1f} %, {len(kept)} objects")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
