"""The fault campaign: real runs of four gloo ranks with one planted fault, and the verdicts on
them.

    python -m benchmarks.planted_faults record --kinds compute data --seeds 0-19 --out FOLDER
    python -m benchmarks.planted_faults judge --out FOLDER

`record` writes the run directory and truth.json to FOLDER/KIND-SEED/. An interrupted `record`
continues where it stopped. `judge` prints how often each judge names the right rank and phase. A
run takes about 15 seconds, so the campaign is not part of `make bench`. benchmarks/detectors runs
the same program under other tools.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.planted_truth import KINDS, RANKS, Truth, plant
from benchmarks.planted_verdicts import print_judgement

# Fresh processes start after this many runs, because a run may affect later runs of its process.
RUNS_PER_GROUP = 20
RUN_TIMEOUT_S = 180
REPOSITORY = Path(__file__).parent.parent


def seeds(text: str) -> list[int]:
    """Return the seeds in a text such as "0-4,7". Raises ValueError for a text without seeds."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    if not found:
        raise ValueError("no seeds")
    return found


def environment() -> dict[str, str]:
    """Return the environment of the ranks: one thread each, without the caller's settings."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHLENS", "OTEL_"))
    }
    path = os.pathsep.join(filter(None, (str(REPOSITORY), environ.get("PYTHONPATH"))))
    return {**environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def record(truths: list[Truth], out: Path) -> None:
    """Record the runs that are missing in `out`.

    Raises RuntimeError if ranks fail twice without a finished run.
    """
    out.mkdir(parents=True, exist_ok=True)
    fruitless = 0
    while missing := [truth for truth in truths if not (out / truth.name / "truth.json").exists()]:
        print(f"{len(truths) - len(missing)} of {len(truths)} recorded", flush=True)
        group = missing[:RUNS_PER_GROUP]
        failed = _run_group(group, out)
        fruitless = fruitless + 1 if not (out / group[0].name / "truth.json").exists() else 0
        if failed:
            print(
                f"the group ended: {failed}; see {out / 'rank*.log'}", file=sys.stderr, flush=True
            )
        if fruitless == 2:
            raise RuntimeError(f"{group[0].name} failed twice: {failed}")
    print(f"all {len(truths)} recorded in {out}", flush=True)


def _run_group(truths: list[Truth], out: Path) -> str:
    """Record these runs with one group of rank processes. Return an error message, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.planted_training", "--out", str(out)]
        command += [
            "--store",
            f"{folder}/store",
            *(f"{truth.kind}:{truth.seed}" for truth in truths),
        ]
        with started(command, RANKS, out) as ranks:
            return wait(ranks, time.monotonic() + RUN_TIMEOUT_S * len(truths))


@contextlib.contextmanager
def started(command: list[str], ranks: int, out: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start `ranks` processes, each with a log in `out`. Kill the remaining processes at the end."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            environ = {
                **environment(),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
            }
            with open(out / f"rank{rank}.log", "ab") as log:
                processes.append(subprocess.Popen(command, cwd=REPOSITORY, env=environ, stderr=log))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait(ranks: list[subprocess.Popen[bytes]], deadline_s: float) -> str:
    """Wait until all ranks have ended or one has failed: others would wait for a failed rank."""
    while time.monotonic() < deadline_s:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            return f"rank {failed[0]} with exit code {codes[failed[0]]}"
        if None not in codes:
            return ""
        time.sleep(0.2)
    return f"still running after {RUN_TIMEOUT_S} s a run"


def main() -> int:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "judge"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
        command.add_argument("--seeds", type=seeds, default=None, help="like 0-19 or 3,5")
        if name == "judge":
            command.add_argument(
                "--most-others",
                type=float,
                default=1.0,
                help="leave out runs disturbed more, 0 to 1",
            )
            command.add_argument("--each", action="store_true", help="a line for every run")
    asked = parser.parse_args()
    out: Path = asked.out.absolute()
    if asked.command == "judge":
        return print_judgement(out, asked.kinds, asked.seeds, asked.most_others, asked.each)
    truths = [plant(kind, seed) for seed in asked.seeds or seeds("0-19") for kind in asked.kinds]
    record(truths, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
