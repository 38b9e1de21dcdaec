"""Verdicts on jobs of TRL with planted faults, and times against own logs.

    python -m benchmarks.rl_trl_verdicts --seeds 7 --clean 6 --minutes 30 --out trl.jsonl

Like benchmarks/rl_verdicts.py, with benchmarks/rl_trl_job.py. All jobs are forked from this process,
which has imported TRL.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import rl_verdicts
from benchmarks.rl_job import ENGINES, Plan
from benchmarks.rl_trl_job import SIZES, run_job
from benchmarks.rl_verdicts import judge, read_log

ITERATIONS = 6


def read_truth(folder: Path) -> dict[str, float]:
    """Return seconds per iteration by the logs of the processes, without the first iteration."""
    turns: dict[str, list[Any]] = defaultdict(list)
    for index in range(ENGINES):
        for row in read_log(folder, f"engine-{index}"):
            turns[row["id"].rpartition("-")[0]].append(row)
    ranks = [read_log(folder, f"rank-{rank}") for rank in range(2)]
    of_kind: dict[str, list[Any]] = defaultdict(list)
    for row in itertools.chain(*ranks):
        of_kind[row["what"]].append(row)
    tools = {row["id"]: row for row in of_kind["tool"]}
    sums: dict[str, float] = defaultdict(float)
    rows = [row for row in ranks[0] if row["what"] == "iteration"]
    for row in rows[1:]:
        at = row["iteration"]
        # TRL's ranks wait for each other after the last answer, and again after the rewards.
        answers = [each for each in of_kind["answer"] if each["id"].startswith(f"{at}-")]
        last = max(answers, key=lambda each: each["end"])["id"]
        rewards = [each for each in of_kind["reward"] if each["iteration"] == at]
        reward = max(rewards, key=lambda each: each["end"])
        sums["rollout"] += row["complete"] - row["start"]
        sums["generation"] += sum(each["end"] - each["begin"] for each in turns[last])
        sums["tool"] += tools[last]["end"] - tools[last]["begin"]
        sums["reward"] += reward["end"] - reward["begin"]
        sums["steps"] += row["steps_end"] - row["steps_begin"]
        sums["weights"] += row["end"] - row["steps_end"]
    return {part: seconds / (len(rows) - 1) for part, seconds in sums.items()}


def run_case(
    folder: Path, fault: str, seed: int, strength: float, further: Sequence[str]
) -> dict[str, Any]:
    plan = Plan(folder, fault, seed, ITERATIONS, strength=strength, sizes=SIZES)
    ours, theirs = multiprocessing.Pipe()
    job = multiprocessing.get_context("fork").Process(target=_run_quietly, args=(plan, theirs))
    job.start()
    run = ours.recv() if ours.poll(400) else ""
    job.join()
    if not run:
        raise RuntimeError(f"{fault or 'clean'} {seed}: see {folder / 'output.txt'}")
    ports = json.loads((folder / "ports.json").read_text())
    engine = f"127.0.0.1:{ports[f'engine-{plan.victim}']}"
    return judge(Path(run), fault, seed, engine, read_truth(folder))


def _run_quietly(plan: Plan, result: Connection) -> None:
    """Run a job, whose processes write to a file of its folder."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    output = os.open(plan.folder / "output.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        result.send(str(run_job(plan)))
    except BaseException:
        result.send("")
        raise


if __name__ == "__main__":
    rl_verdicts.main(run_case)
