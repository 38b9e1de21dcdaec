"""Planted bottlenecks: which class of lost time is first, and whether predicted gains come true.

    python -m benchmarks.bottlenecks record --seeds 0-9 --pairs 0-4 --out FOLDER
    python -m benchmarks.bottlenecks judge --out FOLDER
    python -m benchmarks.bottlenecks gains --out FOLDER

`record` records each kind with two ranks, and for the seeds of `--pairs` a run without the
bottleneck next to it. `judge` prints how often the first verdict names the planted one, and the
precise actions on runs without a bottleneck. `gains` compares the gain that `what-if` predicts from the
runs with the bottleneck with the measured difference to the runs without it, and this difference with
that of equal runs. Do nothing else on the
machine meanwhile.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import Table
from benchmarks.planted_faults import REPOSITORY, environment, seeds
from torchlens_perf.diagnosis.what_if import Replay, parse_change
from torchlens_perf.report.run_report import load_report_and_states
from torchlens_perf.report.usual_steps import read_usual_steps
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts.words.long_steps import LongStepsEvidence
from torchlens_perf.verdicts.words.report import PredictedChange, Report, mean_per_step

RANKS, RUN_TIMEOUT_S = 2, 180
# For each kind, what the first verdict must name (see _first_named), and the change that removes it.
KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "storage": (("data",), "data=0"),
    "workers": (("data",), "data=0"),
    "collation": (("data",), "data=0"),
    "host": (("host",), "host=0"),
    "section": (('section "tokenize"',), "section:tokenize=0"),
    "communication": (("communication",), "communication=0"),
    "slow_rank": (("slow rank",), "rank={slow}@median"),
    "imbalance": (("imbalance",), "rank=all@median"),
    "recompute": (("recompute",), "recompute=0"),
    "optimizer": (("optimizer",), "optimizer=0"),
    "module": (("wide",), "module:wide x0.5"),
    "saving": (("saving",), "saving=0"),
    "gc": (("garbage collection",), "gc=0"),
    "evaluation": (("evaluation", "forward passes without gradients"), "evaluation=0"),
    "rollouts": (("forward passes without gradients", "host", "forward"), "host=0"),
    "contention": (("cpu",), "contention=0"),
}
_BY_KIND = {
    "straggler": "slow rank",
    "imbalance": "imbalance",
    "lack_of_cpu": "cpu",
    "data_bound": "data",
    "communication_bound": "communication",
    "host_bound": "host",
}
# What the actions of a verdict on computing are about.
_BY_ACTION = {
    "recompute": ("heckpoint fewer",),
    "optimizer": ("torch.optim.",),
    "data": ("DataLoader", "persistent_workers"),
    "communication": ("communication", "no_sync"),
}
_LEFT = {"module": "module_half"}
"""What is left when the change is made; "none" for other kinds."""


def record(kinds: list[str], numbers: list[int], pairs: list[int], out: Path) -> None:
    """Record the runs that are missing. The seeds of `pairs` also get a run without the bottleneck."""
    out.mkdir(parents=True, exist_ok=True)
    port = 29500 + os.getpid() % 1000
    for seed in numbers:
        for kind in kinds:
            runs = {kind: kind, f"{kind}.left": _LEFT.get(kind, "none")}
            for name, planted in list(runs.items())[: 2 if seed in pairs else 1]:
                folder = out / f"{name}-{seed}"
                if not (folder / "done").exists():
                    shutil.rmtree(folder, ignore_errors=True)  # It may have an interrupted run.
                    port += 1
                    _run_ranks(planted, seed, folder, port)
            print(f"{kind} {seed} recorded", flush=True)


def _run_ranks(kind: str, seed: int, folder: Path, port: int) -> None:
    command = [sys.executable, "-m", "benchmarks.bottleneck_training", "--kind", kind]
    command += ["--seed", str(seed), "--out", str(folder)]
    ranks = []
    for rank in range(RANKS):
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        ranks.append(
            subprocess.Popen(
                command, cwd=REPOSITORY, env={**environment(), **rendezvous, **places},
                stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip
    for each in ranks:
        if each.wait(RUN_TIMEOUT_S):
            raise RuntimeError(f"{kind} {seed}: a rank failed")
    (run,) = (path.parent for path in folder.glob("*/nodes"))
    subprocess.run([sys.executable, "-m", "torchlens_perf", "sidecar", str(run)], cwd=REPOSITORY,
                   check=False, capture_output=True, timeout=RUN_TIMEOUT_S)  # fmt: skip
    (folder / "done").touch()


def _run_of(folder: Path) -> RunDirectory:
    (run,) = (path.parent for path in folder.glob("*/nodes"))
    return RunDirectory(run)


def _first_named(report: Report) -> str:
    """Return what the first verdict names. Where a job computes, that is what it should change."""
    row = next(row for row in report["verdicts"] if row.kind != "none")
    if isinstance(row.evidence, LongStepsEvidence):
        return " and ".join(row.evidence.long["kinds"]) or "long steps"
    if row.text.startswith("Waiting for other ranks"):
        return "imbalance"
    if row.text.startswith("Section"):
        return " ".join(row.text.split()[:2]).lower()
    if row.kind in _BY_KIND:
        return _BY_KIND[row.kind]
    action = row.action
    start = re.match(r"look first at ([^,;]+),", action)
    if start is not None:
        return start[1] if start[1] == "wide" else row.phase or "?"
    named = [name for name, words in _BY_ACTION.items() if any(word in action for word in words)]
    return named[0] if named else action


def judge(out: Path) -> None:
    """Print how often the first verdict names the planted bottleneck, and what else it names."""
    found: dict[str, list[str]] = defaultdict(list)
    sentences: dict[str, list[str]] = defaultdict(list)
    actions: list[str] = []
    clean = 0
    for folder in sorted(out.glob("*-*")):
        kind = folder.name.rpartition("-")[0]
        if not (folder / "done").exists():
            continue
        report, _ = load_report_and_states(_run_of(folder))
        if kind in KINDS:
            found[kind].append(_first_named(report))
            sentences[kind].append(report["verdicts"][0].sentence)
        else:
            clean += 1
            actions += [row.action for row in report["verdicts"] if row.because]
    table = Table("kind", "right", "others")
    for kind, firsts in found.items():
        right = [first for first in firsts if first in KINDS[kind][0]]
        others = ", ".join(sorted(set(firsts) - set(right)))
        table.row(kind, f"{len(right)} of {len(firsts)}", others)
    for kind, texts in sentences.items():
        print(f"{kind}:")
        for text in texts:
            print(f"  {text[:150]}")
    print(f"actions on {clean} runs without a bottleneck: {', '.join(actions) or 'none'}")


class Pair(NamedTuple):
    """A run with a bottleneck and the run after it without. Times are milliseconds of a mean step."""

    kind: str
    seed: str
    change: str
    predicted: PredictedChange | None
    measured_ms: float
    left_ms: float


def read_pairs(out: Path) -> Iterator[Pair]:
    """Yield the pairs of a folder, by kind and seed."""
    for kind, (_, text) in KINDS.items():
        for folder in sorted(out.glob(f"{kind}-*")):
            seed = folder.name.removeprefix(f"{kind}-")
            left = folder.with_name(f"{kind}.left-{seed}")
            if not (folder / "done").exists() or not (left / "done").exists():
                continue
            run = _run_of(folder)
            report, states = load_report_and_states(run)
            times = read_usual_steps(run, report, states)
            after, _ = load_report_and_states(_run_of(left))
            if times is None:
                continue
            slow = max(report["ranks"], key=lambda rank: rank["own_s"]["p50_s"] or 0.0)["rank"]
            replay = Replay(times, report, report["verdicts"])
            change = text.format(slow=slow)
            with_ms, left_ms = (
                1e3 * mean_per_step(each["steps"]["total_s"], each["steps"])
                for each in (report, after)
            )
            predicted = replay.predict([parse_change(change)])
            yield Pair(kind, seed, change, predicted, with_ms - left_ms, left_ms)


def estimate_noise_ms(pairs: list[Pair]) -> dict[str, float]:
    """Return for each seed how far the difference of two runs may be from the gain: two standard
    deviations of the difference of two runs that are equal.

    All runs of a seed without a bottleneck are equal, but for those with half of a module.
    """
    return {
        seed: 2 * 2**0.5 * statistics.stdev(p.left_ms for p in pairs if _is_equal(p, seed))
        for seed in {pair.seed for pair in pairs}
    }


def _is_equal(pair: Pair, seed: str) -> bool:
    return pair.seed == seed and pair.kind not in _LEFT


def gains(out: Path) -> None:
    """Print the predicted and the measured gain of each pair, and how many are inside the bounds.

    Equal runs differ by more than some bounds are wide. A measured gain is therefore an interval, too.
    """
    pairs = list(read_pairs(out))
    noise_ms = estimate_noise_ms(pairs)
    table = Table(
        "kind", "seed", "change", "predicted ms", "bounds ms", "measured ms", "noise ms", "inside"
    )
    inside: Counter[str] = Counter()
    needed: list[float] = []
    for kind, seed, change, predicted, measured_ms, _ in pairs:
        row = f"{measured_ms:.1f}", f"{noise_ms[seed]:.1f}"
        if predicted is None:
            table.row(kind, seed, change, "none", "", *row, "")
            continue
        gain, low, high = (
            1e3 * each for each in (predicted.gain_s, predicted.low_s, predicted.high_s)
        )
        outside_ms = max(low - measured_ms, measured_ms - high, 0.0)
        needed.append(abs(measured_ms - gain) / ((high - low) / 2))
        verdict = "no" if outside_ms > noise_ms[seed] else "within noise" if outside_ms else "yes"
        inside[verdict] += 1
        table.row(kind, seed, change, f"{gain:.1f}", f"{low:.1f} to {high:.1f}", *row, verdict)
    print(
        f"{inside['yes']} of {len(needed)} measured gains are inside the bounds, and"
        f" {inside['within noise']} more within the noise of the measurement. Bounds"
        f" {sorted(needed)[int(0.9 * len(needed))]:.2f} times as wide have nine of ten inside."
    )


def main() -> int:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("record", "judge", "gains"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=seeds, default=list(range(10)), help="like 0-9")
    parser.add_argument("--pairs", type=seeds, default=[], help="like 0-4")
    options = parser.parse_args()
    if options.command == "record":
        record(options.kinds, options.seeds, options.pairs, options.out)
    else:
        {"judge": judge, "gains": gains}[options.command](options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
