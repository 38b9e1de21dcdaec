"""Cost of a watch that times every module of a model with 5000 tiny modules, with a budget of 0.5 %.

Blocks of steps without and with the watch's hooks take turns, as in training_step.py. They begin
after 50 steps in which the recorder gets to know its cost. Then two ranks train the same model over
gloo, one of which waits for three tenths of a step, and the report must name that rank only.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import torchlens_perf as perf
from benchmarks.measure import Table, ratio_interval
from benchmarks.training_step import Arm

MODULES, BUDGET, FIRST_STEPS, ROUNDS, STEPS = 5000, 0.005, 50, 60, 4
RANK_STEPS, SLOWER = 120, 0.3
WARM_STEPS = 6
TIMEOUT_S = 300


class Deep(nn.Module):
    """Many modules that compute almost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(MODULES)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch)  # type: ignore[no-any-return]


def make_step(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.Tensor]:
    return torch.optim.SGD(model.parameters(), 0.001, foreach=True), torch.ones(2, 4)


def measure_cost() -> Table:
    model = Deep()
    optimizer, batch = make_step(model)

    def block(arm: Arm, steps: int) -> float:
        with arm:
            # The hooks get to know the loop in the first steps.
            for number in range(WARM_STEPS + steps):
                if number == WARM_STEPS:
                    begin = time.perf_counter_ns()
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return (time.perf_counter_ns() - begin) / steps

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        watch = perf.watch(dir=folder, report="quiet", modules="all", budget=BUDGET).start()
        plain, watched = Arm(model, None), Arm(model, watch, modules="all")
        watched.__exit__()
        block(watched, FIRST_STEPS)
        without, found = [], []
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(found) < ROUNDS and time.monotonic() < deadline_s:
            for arm, values in ((plain, without), (watched, found)):
                values.append(block(arm, STEPS))
        period = watched.module_period
        watch.stop()
    middle, low, high = (100 * (each - 1) for each in ratio_interval(found, without))
    table = Table(
        f"{MODULES} modules, budget {BUDGET:.1%}", "ms", "cost in %", "bar (upper end)", ""
    )
    table.row("without a watch", f"{statistics.median(without) / 1e6:.1f}", "", "", "")
    table.row(
        f"modules timed in 1 of {period} steps", f"{statistics.median(found) / 1e6:.1f}",
        f"{middle:+.2f} [{low:+.2f}, {high:+.2f}]", f"at most {100 * BUDGET} %", table.bar(high <= 100 * BUDGET),
    )  # fmt: skip
    return table


def train_rank(folder: str) -> None:
    """Train as one of two ranks. Rank 1 waits in each forward pass."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, slow = Deep(), dist.get_rank() == 1
    optimizer, batch = make_step(model)
    last_layer = list(model.parameters())[-2:]
    with perf.watch(model, optimizer, dir=folder, modules="all", budget=BUDGET, report="text"):
        wait_s = 0.0
        for number in range(RANK_STEPS):
            begin_s = time.perf_counter()
            loss = model(batch).sum()
            time.sleep(wait_s)
            loss.backward()
            for each in last_layer:
                dist.all_reduce(each.grad)
            optimizer.step()
            optimizer.zero_grad()
            if slow and number == WARM_STEPS:
                wait_s = SLOWER * (time.perf_counter() - begin_s)
    dist.destroy_process_group()


def find_slow_rank() -> Table:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        subprocess.run(
            [*command, "-m", "benchmarks.many_modules", folder], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )  # fmt: skip
        (run,) = Path(folder).iterdir()
        report = perf.open_run(run).report()
    named = [each.rank for each in report["verdicts"] if each.kind == "straggler"]
    quality = report["quality"]
    table = Table("two ranks, rank 1 waits for 0.3 steps", "named", "modules timed in 1 of", "")
    table.row("slow ranks", str(named), str(quality["module_period"]), table.bar(named == [1]))
    return table


def main() -> int:
    """Print the tables. Return the number of missed bars."""
    torch.set_num_threads(1)
    cost = measure_cost()
    print()
    return cost.missed + find_slow_rank().missed


if __name__ == "__main__":
    train_rank(sys.argv[1])
