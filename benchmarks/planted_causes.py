"""The campaign of causes: two real gloo ranks, one of them slowed by a planted cause, and the
causes in the verdict.

    python -m benchmarks.planted_causes record --kinds gc slow_storage --seeds 0-9 --out FOLDER
    python -m benchmarks.planted_causes judge --out FOLDER

Each rank has its own CPU. The causes are memory pressure in a control group, a busy process on the
same core, a throttled disk, and a heap that is collected in every step. `clean` runs have no cause.
Needs root and two CPUs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import Table
from benchmarks.planted_cause_rank import STEPS
from benchmarks.planted_faults import seeds, started
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts.node_state import load_all

RANKS = 2
KINDS = ("memory_pressure", "busy_neighbour", "slow_storage", "gc", "clean")
RUN_TIMEOUT_S = 180


def record(runs: list[tuple[str, int]], out: Path, steps: int = STEPS) -> None:
    """Record runs of these kinds and seeds, one after the other.

    Raises RuntimeError if a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.planted_cause_rank", "--out", str(out)]
        command += [
            "--store",
            f"{folder}/store",
            "--steps",
            str(steps),
            *(f"{kind}:{seed}" for kind, seed in runs),
        ]
        with started(command, RANKS, out) as ranks:
            for rank, process in enumerate(ranks):
                if process.wait(RUN_TIMEOUT_S * len(runs)):
                    raise RuntimeError(f"rank {rank} failed: see {out}/rank{rank}.log")


def judge(folder: Path) -> tuple[int, int | None, list[str], str]:
    """Return a recorded run's slowed rank, named rank, kinds of causes, and sentence."""
    suspect, _, path = (folder / "truth").read_text().partition(" ")
    run = RunDirectory(Path(path))
    verdict = build_report(run.run_id, load_all(run))["verdicts"][0]
    diagnosis = verdict.diagnosis
    causes = () if diagnosis is None else diagnosis.causes
    named = verdict.rank if verdict.kind == "straggler" else None
    return int(suspect), named, [cause.kind for cause in causes], verdict.sentence


def main() -> int:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("record", "judge"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=seeds, default=seeds("0-9"), help="like 0-9 or 3,5")
    parser.add_argument("--each", action="store_true", help="the sentence of every run")
    asked = parser.parse_args()
    out: Path = asked.out.absolute()
    if asked.command == "record":
        if os.geteuid() != 0 or len(os.sched_getaffinity(0)) < RANKS:
            print("planted_causes needs root, and a CPU for each of its two ranks", file=sys.stderr)
            return 2
        out.mkdir(parents=True, exist_ok=True)
        for seed in asked.seeds:
            for kind in asked.kinds:
                if not (out / f"{kind}-{seed}" / "truth").exists():
                    begin_s = time.monotonic()
                    record([(kind, seed)], out)
                    print(f"{kind}-{seed}  {time.monotonic() - begin_s:.0f} s", flush=True)
        return 0
    table = Table("kind", "runs", "right rank", "right cause", "also", "wrong cause or rank")
    for kind in asked.kinds:
        results = [
            judge(folder) for folder in sorted(out.glob(f"{kind}-*")) if (folder / "truth").exists()
        ]
        if asked.each:
            for suspect, named, causes, text in results:
                print(f"{kind}: slowed {suspect}, named {named}, {causes}: {text}")
        right_rank = sum(named == suspect for suspect, named, _, _ in results)
        first = sum(
            named == suspect and causes[:1] == [kind] for suspect, named, causes, _ in results
        )
        also = sum(named == suspect and kind in causes[1:] for suspect, named, causes, _ in results)
        # The first cause counts as the verdict. Any cause other than the planted one counts as
        # wrong.
        wrong = sum(
            named not in (None, suspect) or bool(set(causes) - {kind})
            for suspect, named, causes, _ in results
        )
        table.row(kind, len(results), right_rank, first, also, wrong)
    return 0


if __name__ == "__main__":
    sys.exit(main())
