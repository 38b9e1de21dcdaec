"""Verdicts on jobs of reinforcement learning with planted faults, and times against own logs.

    python -m benchmarks.rl_verdicts --seeds 2 --clean 4 --folder /tmp/rl
    python -m benchmarks.rl_verdicts --faults slow_engine+slow_tool --clean 0
    python -m benchmarks.rl_verdicts --seeds 8 --clean 6 --minutes 20 --out rl.jsonl
    python -m benchmarks.rl_verdicts --gains

Each run is a job of benchmarks/rl_job.py. The first verdicts on slow iterations should have the
planted causes and processes; a clean run should have none. The times of the report are compared with
the logs that the processes wrote themselves. Further arguments are passed to rl_job.py.

With --out, each run appends a line to a file, and runs of the file are not repeated. With --minutes, no
run begins later. A campaign can so be continued, or be divided among processes by --first.

With --gains, each job is run again without its fault, or with a change that `what_if` predicts. What
the report of the first run said should contain the difference of their mean iterations.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rl_job import ENGINES, FAULTS
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory

MOST_ERROR = 0.05
"""Largest difference between a time of the report and of a log, as a share of the log's."""
PAIRS = (
    "slow_engine+slow_tool", "slow_reward+slow_weights", "long_samples+slow_trainer_rank",
    "loaded_engine+slow_reward",
)  # fmt: skip
"""Two faults at once. Each seed has one pair."""
_NEGLIGIBLE_S = 0.05
"""Parts that take less time per iteration are not compared."""


def read_log(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def read_truth(folder: Path) -> dict[str, float]:
    """Return seconds per iteration by the logs of the processes, without the first iteration."""
    iterations = read_log(folder, "rank-0")
    stages: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for name in (*(f"engine-{index}" for index in range(ENGINES)), "tool", "reward"):
        for row in read_log(folder, name):
            if "id" in row:
                stages[row["id"].partition("-")[0]].setdefault(row["id"], []).extend(
                    (row["begin"], row["end"])
                )
    sums: dict[str, float] = defaultdict(float)
    for row in iterations[1:]:
        times = stages[str(row["iteration"])]
        # The sample whose reward ended last: begin and end of generation, tool and reward.
        last = max(times.values(), key=lambda each: each[5])
        sums["rollout"] += row["complete"] - row["start"]
        sums["generation"] += last[1] - last[0]
        sums["tool"] += last[3] - last[2]
        sums["reward"] += last[5] - last[4]
        sums["steps"] += row["steps_end"] - row["steps_begin"]
        sums["weights"] += row["end"] - row["steps_end"]
    return {part: seconds / (len(iterations) - 1) for part, seconds in sums.items()}


def read_measured(report: Any) -> dict[str, float]:
    """Return the same times by the report."""
    found = report["iterations"]
    rollout = sum(
        seconds
        for part, seconds in found.parts.items()
        if part not in ("steps", "weights", "other")
    )
    return {"rollout": rollout, **found.parts}


def judge(run: Path, fault: str, seed: int, engine: str, truth: dict[str, float]) -> dict[str, Any]:
    """Return whether the report on a run is right. engine: name of the engine with a fault.

    truth: seconds per iteration by the logs of the processes.
    """
    report: Any = load_report(RunDirectory(run), lost_time=False)
    verdicts = [each for each in report["verdicts"] if each.kind == "slow_iteration"]
    named = [(each.evidence.cause, each.evidence.found.subject) for each in verdicts]
    if any(each.kind == "straggler" and each.rank == 1 for each in report["verdicts"]):
        # The verdict on a slow rank replaces the one on iterations.
        named.append(("slow_trainer_rank", "rank 1"))
    planted = fault.split("+") if fault else []
    first = dict(named[: max(1, len(planted))])
    measured = read_measured(report)
    errors = {
        part: round(measured.get(part, 0.0) / seconds - 1, 4)
        for part, seconds in truth.items()
        if seconds >= _NEGLIGIBLE_S
    }
    subjects = {
        "slow_engine": engine, "loaded_engine": engine, "slow_trainer_rank": "rank 1",
    }  # fmt: skip
    is_right = first.keys() == {*planted} and all(
        first[each] == subjects.get(each, first[each]) for each in planted
    )
    return {
        "fault": fault,
        "seed": seed,
        "right": is_right,
        "causes": named,
        "iterations_s": [report["iterations"].count, round(report["iterations"].mean_s, 3)],
        "others": [each.kind for each in report["verdicts"] if each.kind != "slow_iteration"],
        "text": verdicts[0].sentence if verdicts else "",
        "shares": {each.kind: round(each.share, 3) for each in report["iterations"].causes},
        "truth": truth,
        "errors": errors,
        "accurate": all(abs(each) <= MOST_ERROR for each in errors.values()),
        "lost": report["iterations"].lost_events,
    }


def run_job(folder: Path, fault: str, seed: int, further: Sequence[str]) -> Path:
    """Run a job. Return its run directory."""
    command = [sys.executable, "-m", "benchmarks.rl_job", str(folder), "--seed", str(seed)]
    command += [*further, *(["--fault", fault] if fault else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{fault or 'clean'} {seed}: {done.stderr[-2000:]}")
    return Path(done.stdout.splitlines()[-1])


_TAIL = ("--long-tail", "--iterations", "12")
GAINS: tuple[tuple[str, Sequence[str], Sequence[str], str], ...] = (
    *((fault, (), (), "") for fault in FAULTS if fault != "idle_engines"),
    ("idle_engines", (), ("--overlap",), "asynchronous"),
    ("long_samples", (), ("--more", "2"), "over_sampling"),
    ("", ("--engines", "2"), ("--engines", "3"), "one_engine_more"),
    ("", _TAIL, ("--most-tokens", "CAP", *_TAIL), "cut_at_p99"),
)
"""A fault and arguments of a job, arguments of the second job, and the kind of the change that
`what_if` predicts; "" for the removal of the fault."""


def compare_gain(
    folder: Path, case: tuple[str, Sequence[str], Sequence[str], str], seed: int
) -> dict[str, Any]:
    """Run a job and its changed job. Compare the difference with what was said about the first."""
    fault, first, second, kind = case
    report: Any = load_report(RunDirectory(run_job(folder / "first", fault, seed, first)))
    found = report["iterations"]
    if kind:
        change = next(each for each in found.what_if if each.kind == kind)
        said_s = [change.low_s, change.gain_s, change.high_s]
        cap = str(change.value)
    else:
        cause = next(each for each in found.causes if each.kind == fault)
        said_s = [each / found.count for each in (cause.low_s, cause.seconds, cause.high_s)]
        cap = ""
    second = [cap if each == "CAP" else each for each in second]
    changed: Any = load_report(
        RunDirectory(run_job(folder / "second", fault if kind else "", seed, second))
    )
    gain_s = found.mean_s - changed["iterations"].mean_s
    return {
        "fault": fault,
        "change": kind or "fault removed",
        "seed": seed,
        "iterations_s": [round(found.mean_s, 3), round(changed["iterations"].mean_s, 3)],
        "gain_s": round(gain_s, 3),
        "said_s": [round(each, 3) for each in said_s],
        "right": said_s[0] <= gain_s <= said_s[-1],
    }


def check_gains(folder: Path, seed: int, faults: Sequence[str]) -> None:
    found = []
    for index, case in enumerate(each for each in GAINS if each[0] in (*faults, "")):
        found.append(compare_gain(folder / f"gain-{index}-{seed}", case, seed))
        print(json.dumps(found[-1]), flush=True)
    print(f"inside of the bounds: {sum(each['right'] for each in found)} of {len(found)}")


def run_case(
    folder: Path, fault: str, seed: int, strength: float, further: Sequence[str]
) -> dict[str, Any]:
    run = run_job(folder, fault, seed, ["--strength", str(strength), *further])
    return judge(run, fault, seed, f"engine-{seed % ENGINES}", read_truth(folder))


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _list_cases(given: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Yield faults and seeds such that each part of a campaign has all kinds."""
    clean = 0
    for seed in range(given.seeds):
        yield from ((fault, given.first + seed) for fault in given.faults)
        if given.pairs:
            yield PAIRS[(given.first + seed) % len(PAIRS)], given.first + seed
        while clean < given.clean * (seed + 1) / given.seeds:
            yield "", 1000 * given.first + clean
            clean += 1


def _describe(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line on each kind of fault, and one on all runs."""
    done = [each for each in found if "error" not in each]
    for fault in sorted({each["fault"] for each in done}):
        mine = [each for each in done if each["fault"] == fault]
        loads = [each["load"] for each in mine]
        yield (
            f"{fault or 'clean':32} right {sum(each['right'] for each in mine):3} of {len(mine):3}"
            f"  within {MOST_ERROR:.0%} {sum(each['accurate'] for each in mine):3}"
            f"  load {min(loads):.1f} to {max(loads):.1f}"
        )
    planted = [each for each in done if each["fault"]]
    clean = [each for each in done if not each["fault"]]
    yield (
        f"right: {sum(each['right'] for each in planted)} of {len(planted)} planted; named in"
        f" {sum(not each['right'] for each in clean)} of {len(clean)} clean runs; times within"
        f" {MOST_ERROR:.0%}: {sum(each['accurate'] for each in done)} of {len(done)} runs;"
        f" failed: {len(found) - len(done)}"
    )


def main(
    run_case: Callable[[Path, str, int, float, Sequence[str]], dict[str, Any]] = run_case,
) -> None:
    """Run and judge jobs. run_case: returns what judge() does."""
    parser = argparse.ArgumentParser(description="Verdicts on jobs of reinforcement learning.")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each fault")
    parser.add_argument("--clean", type=int, default=4, help="runs without a fault")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--faults", nargs="*", default=FAULTS)
    parser.add_argument("--pairs", action="store_true", help="also two faults at once")
    parser.add_argument("--strength", type=float, default=1.0, help="size of the faults")
    parser.add_argument("--gains", action="store_true", help="what is removed gains what was said")
    parser.add_argument("--folder", type=Path, help="by default, a temporary one")
    parser.add_argument("--out", type=Path, help="file of runs, which is continued")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run later")
    given, further = parser.parse_known_args()
    until_s = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        if given.gains:
            for seed in range(given.seeds):
                check_gains(folder, given.first + seed, given.faults)
            return
        out = given.out or Path(temporary) / "runs.jsonl"
        for fault, seed in _list_cases(given):
            key = [fault, seed, given.strength]
            done = (each["key"] for each in _read_lines(out) if "error" not in each)
            if time.monotonic() < until_s and key not in done:
                mine = folder / f"{fault or 'clean'}-{seed}-{given.strength}"
                # A job that failed left its logs.
                shutil.rmtree(mine, ignore_errors=True)
                load = os.getloadavg()[0]
                try:
                    row = run_case(mine, fault, seed, given.strength, further)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    row = {"fault": fault, "seed": seed, "error": str(error)}
                load = round((load + os.getloadavg()[0]) / 2, 1)
                line = json.dumps({"key": key, **row, "load": load})
                print(line, flush=True)
                with out.open("a") as file:
                    file.write(line + "\n")
        print(*_describe(_read_lines(out)), sep="\n")


if __name__ == "__main__":
    main()
