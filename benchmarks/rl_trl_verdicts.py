"""Verdicts on jobs of TRL with planted faults, and times against own logs.

    python -m benchmarks.rl_trl_verdicts --seeds 2 --clean 4 --folder /tmp/trl

Like benchmarks/rl_verdicts.py, with benchmarks/rl_trl_job.py. All jobs are forked from this process,
which has imported TRL.
"""

from __future__ import annotations

import json
import multiprocessing
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import rl_verdicts
from benchmarks.rl_job import ENGINES, Plan
from benchmarks.rl_trl_job import PER_RANK, run_job
from benchmarks.rl_verdicts import judge, read_log

ITERATIONS = 6
STRENGTH = {
    "slow_engine": 2.0, "slow_tool": 2.5, "slow_reward": 2.5, "slow_weights": 2.0, "slow_trainer_rank": 2.0,
    "idle_engines": 2.5,
}  # fmt: skip
"""Sizes of faults relative to those of rl_job.py. Iterations are several times as long as there."""


def read_truth(folder: Path) -> dict[str, float]:
    """Return seconds per iteration by the logs of the processes, without the first iteration."""
    iterations = read_log(folder, "rank-0")
    turns: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for index in range(ENGINES):
        for row in read_log(folder, f"engine-{index}"):
            if row["what"] == "generation":
                iteration, sample, _ = map(int, row["id"].split("-"))
                turns[iteration, sample].append(row)
    ranks = [read_log(folder, f"rank-{rank}") for rank in range(2)]
    tools = {row["id"]: row for rows in ranks for row in rows if row["what"] == "tool"}
    rewards = [{row["iteration"]: row for row in rows if row["what"] == "reward"} for rows in ranks]
    sums: dict[str, float] = defaultdict(float)
    rows = [row for row in iterations if row["what"] == "iteration"]
    for row in rows[1:]:
        at = row["iteration"]
        # All ranks wait for the sample whose last turn ended last.
        last = max(
            range(2 * PER_RANK),
            key=lambda index: max(each["end"] for each in turns[at, index]),
        )
        reward, tool = rewards[last // PER_RANK][at], tools[f"{at}-{last}"]
        sums["rollout"] += row["complete"] - row["start"]
        sums["generation"] += sum(each["end"] - each["begin"] for each in turns[at, last])
        sums["tool"] += tool["end"] - tool["begin"]
        sums["reward"] += reward["end"] - reward["begin"]
        sums["steps"] += row["steps_end"] - row["steps_begin"]
        sums["weights"] += row["end"] - row["steps_end"]
    return {part: seconds / (len(rows) - 1) for part, seconds in sums.items()}


def run_case(folder: Path, fault: str, seed: int, further: Sequence[str]) -> dict[str, Any]:
    plan = Plan(folder, fault, seed, ITERATIONS, strength=STRENGTH.get(fault, 1.0))
    ours, theirs = multiprocessing.Pipe()
    job = multiprocessing.get_context("fork").Process(
        target=lambda: theirs.send(str(run_job(plan)))
    )
    job.start()
    run = ours.recv() if ours.poll(400) else ""
    job.join()
    ports = json.loads((folder / "ports.json").read_text())
    engine = f"127.0.0.1:{ports[f'engine-{plan.victim}']}"
    return judge(Path(run), fault, seed, engine, read_truth(folder))


if __name__ == "__main__":
    rl_verdicts.main(run_case)
