"""The campaign on devices: real runs on asynchronous devices with one planted fault, and the named
ranks.

    python -m benchmarks.planted_devices record --ways ddp fsdp --seeds 0-5 --out FOLDER
    python -m benchmarks.planted_devices judge --out FOLDER

The runs use the tests' device (tests/device): streams are threads, the host only issues work, and
collectives are ordered in streams as NCCL's are. `record` writes the run directory and truth.json
to FOLDER/KIND-SEED/. An interrupted `record` continues where it stopped. `judge` prints the live
sidecars' verdicts and, for comparison, verdicts from the same runs' host times. With `--nodes 2`
the ranks are on two nodes (planted_nodes.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import Table
from benchmarks.planted_device_truth import (
    CLEAN,
    FAULTS,
    HIDDEN,
    HOST_DELAYS_MS,
    KINDS,
    LOOPS,
    RANKS,
    WAYS,
    pace,
    plant,
)
from benchmarks.planted_faults import RUN_TIMEOUT_S, seeds, started, wait
from benchmarks.planted_nodes import started_on_nodes
from benchmarks.planted_truth import Truth
from benchmarks.planted_verdicts import (
    Score,
    Suspect,
    judged_again,
    run_directory,
    score,
    slowest_step,
)
from torchlens_perf.verdicts import node_state

# Fresh processes start after this many runs.
RUNS_PER_GROUP = 15
JUDGES = {
    "torchlens_perf": lambda folder: live(folder),
    "by host times": judged_again,
    "slowest step": slowest_step,
}


def live(folder: Path) -> Suspect | None:
    """Return the costliest slow rank in the live sidecar's last findings."""
    states = node_state.load_all(run_directory(folder))
    findings = max((state.findings for state in states), key=lambda each: each.compared)
    return (
        Suspect(findings.episodes[0].rank, findings.episodes[0].phase)
        if findings.episodes
        else None
    )


def training(
    truths: list[Truth],
    out: Path,
    store: Path | None,
    device: str = "asyncdev",
    host_ms: tuple[int, int] = HOST_DELAYS_MS,
) -> list[str]:
    """Return the command of each rank in a group that does these runs of equal length.

    `store` is a new file, or None for the job's store.
    """
    command = [sys.executable, "-m", "benchmarks.planted_device_training", "--out", str(out)]
    command += [] if store is None else ["--store", str(store)]
    # Loops set their own number of steps.
    steps = next((truth.steps for truth in truths if pace(truth.kind, truth.seed) is None), 0)
    command += ["--device", device, "--steps", str(steps)]
    command += ["--host-ms", *map(str, host_ms)]
    return [*command, *(f"{truth.kind}:{truth.seed}" for truth in truths)]


def record(truths: list[Truth], out: Path, ranks: int, nodes: int = 1) -> int:
    """Record the runs that are missing in `out`. Return 1 if ranks fail twice in a row."""
    out.mkdir(parents=True, exist_ok=True)
    fruitless = 0
    while missing := [truth for truth in truths if not (out / truth.name / "truth.json").exists()]:
        print(f"{len(truths) - len(missing)} of {len(truths)} recorded", flush=True)
        group = missing[:RUNS_PER_GROUP]
        with tempfile.TemporaryDirectory() as folder:
            if nodes == 1:
                running = started(training(group, out, Path(folder) / "store"), ranks, out)
            else:
                running = started_on_nodes(training(group, out, None), ranks, nodes, out)
            with running as processes:
                failed = wait(processes, time.monotonic() + RUN_TIMEOUT_S * len(group))
        if failed:
            print(
                f"the group ended: {failed}; see {out / 'rank*.log'}", file=sys.stderr, flush=True
            )
        fruitless = fruitless + 1 if not (out / group[0].name / "truth.json").exists() else 0
        if fruitless == 2:
            return 1
    return 0


def print_judgement(out: Path, truths: list[Truth], each: bool) -> int:
    """Print a table of faults and judges. Return 1 if no run is recorded."""
    there = [
        (out / truth.name, truth) for truth in truths if (out / truth.name / "truth.json").exists()
    ]
    found: dict[tuple[str, str], list[Score]] = {}
    for folder, truth in there:
        answers = {name: judge(folder) for name, judge in JUDGES.items()}
        way, _, what = truth.kind.partition("-")
        innocent = not truth.faults or what == HIDDEN
        for name, answer in answers.items():
            groups = (
                (what, f"all of {way}", "all")
                if not innocent
                else (what, f"no rank in {way}", "no rank")
            )
            for group in groups:
                found.setdefault((group, name), []).append(score(truth, answer))
        if each:
            planted = ", ".join(
                f"rank {fault.rank} {fault.phase} {fault.ms or ''}" for fault in truth.faults
            )
            said = (
                f"{name}: {f'{one.rank} {one.phase}' if one else 'none'}"
                for name, one in answers.items()
            )
            print(f"{truth.name}: planted {planted or 'nothing'}; {'; '.join(said)}")
    table = Table(
        "what",
        "runs",
        *(f"{name}: {what}" for name in JUDGES for what in ("rank", "phase", "named")),
    )
    for group in dict.fromkeys(group for group, _ in found):
        cells = []
        for name in JUDGES:
            scores = found[group, name]
            for field in ("right_rank", "right_phase", "named"):
                cells.append(f"{sum(getattr(one, field) for one in scores)}/{len(scores)}")
        table.row(group, len(found[group, next(iter(JUDGES))]), *cells)
    return 0 if there else 1


def main() -> int:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("record", "judge"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, *LOOPS), default=list(WAYS))
    parser.add_argument(
        "--faults", nargs="+", choices=(*FAULTS, *CLEAN, HIDDEN), default=[*FAULTS, *CLEAN, HIDDEN]
    )
    parser.add_argument("--seeds", type=seeds, default=seeds("0-1"), help="like 0-19 or 3,5")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument(
        "--nodes", type=int, default=1, help="for record; 2 takes namespaces, and so root"
    )
    parser.add_argument("--each", action="store_true", help="a line for every run")
    asked = parser.parse_args()
    kinds = [
        kind
        for kind in KINDS
        if kind.partition("-")[0] in asked.ways and kind.partition("-")[2] in asked.faults
    ]
    truths = [plant(kind, seed, asked.ranks) for seed in asked.seeds for kind in kinds]
    out: Path = asked.out.absolute()
    if asked.command == "judge":
        return print_judgement(out, truths, asked.each)
    return record(truths, out, asked.ranks, asked.nodes)


if __name__ == "__main__":
    sys.exit(main())
