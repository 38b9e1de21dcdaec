"""Accuracy of our verdicts on the recorded runs of the fault campaign, and of the slowest step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.detectors.scoring import has_right_phase
from benchmarks.measure import Table
from benchmarks.planted_truth import FAULTY, KINDS, Fault, Truth
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.store import segments
from torchlens_perf.store.file_names import list_nodes
from torchlens_perf.verdicts.causes.straggler_groups import add_straggler_groups
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.stragglers.findings import Findings
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.words.stragglers import SlowRankContext, build_straggler_verdicts

WARM_UP_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A judge's answer: the slow rank and its phase. The phase is None if the judge names no phase."""

    rank: int
    phase: str | None


@dataclasses.dataclass(frozen=True)
class Score:
    """Comparison of one answer with the truth."""

    named: bool
    right_rank: bool
    right_phase: bool
    """True if the answer names the right phase of the right rank."""


Detector = Callable[[Path], "Suspect | None"]


def fact(folder: Path, name: str) -> Any:
    """Return a fact of a recorded run that truth.json contains: `run`, its directory's name, or
    `others_share`.
    """
    return json.loads((folder / "truth.json").read_text())[name]


def run_directory(folder: Path) -> RunDirectory:
    """Return the run directory of a recorded run."""
    return RunDirectory(folder / fact(folder, "run"))


def slowest_step(folder: Path) -> Suspect | None:
    """Return the rank with the longest mean step, as on a dashboard of step times.

    Always names a rank.
    """
    steps = pd.read_parquet(run_directory(folder).steps, columns=["rank", "step", "duration_ns"])
    means = steps[steps["step"] >= WARM_UP_STEPS].groupby("rank")["duration_ns"].mean()
    return Suspect(int(means.idxmax()), None)


def judged_again(folder: Path) -> Suspect | None:
    """Return this version's verdict on a recorded run, which equals its live sidecar's.

    Of several slow ranks, one that is still slow at the end is preferred, then the costliest one.
    """
    episodes = findings(folder).episodes
    return Suspect(episodes[0].rank, episodes[0].phase) if episodes else None


def findings(folder: Path) -> Findings:
    """Return all findings of the judge in a recorded run."""
    run, judge = run_directory(folder), StragglerDetector()
    for host in list_nodes(run.spans):
        for origin, records, _, _ in segments.read_chunks(run, host):
            judge.add_steps(origin.rank, Placement(host), assemble_steps(records))
    return add_straggler_groups(judge.judge(final=True), judge.places)


def healthy_named(found: Findings, truth: Truth) -> set[int]:
    """Return the ranks without a fault that the report's verdicts name, as slow now or before."""
    now, before = build_straggler_verdicts(SlowRankContext(), found)
    named = {rank for verdict in (*now, *before) for rank in verdict.ranks}
    return named - {fault.rank for fault in truth.faults}


def steps_until_named(folder: Path, truth: Truth) -> int | None:
    """Return the number of steps from the start of the first fault until the faulty rank was named.

    None if the rank was not named.
    """
    fault = truth.faults[0]
    named = [each.named_step for each in findings(folder).episodes if each.rank == fault.rank]
    return min(named) - fault.first_step + 1 if named else None


JUDGES: dict[str, Detector] = {
    "torchlens_perf": judged_again,
    "slowest step": slowest_step,
}


def score(truth: Truth, named: Suspect | None) -> Score:
    """Compare an answer about the whole run with the truth.

    If the fault moved, its last rank is the right one.
    """
    if named is None or not truth.faults:
        return Score(named is not None, False, False)
    at_end: Fault = truth.faults[-1]
    right_rank = named.rank == at_end.rank
    return Score(True, right_rank, right_rank and has_right_phase(at_end, named.phase))


def recorded(
    out: Path, kinds: Iterable[str], seeds: Iterable[int] | None, most_others: float = 1.0
) -> list[tuple[Path, Truth]]:
    """Return folder and ground truth of each completely recorded run, by kind and seed.

    `most_others` excludes runs in which other processes took more than this share of the machine's
    processors.
    """
    wanted_kinds, wanted_seeds = list(kinds), None if seeds is None else set(seeds)
    found = [(path.parent, Truth.read(path)) for path in out.glob("*/truth.json")]
    chosen = [
        (folder, truth)
        for folder, truth in found
        if truth.kind in wanted_kinds and (wanted_seeds is None or truth.seed in wanted_seeds)
        if most_others >= 1 or fact(folder, "others_share") <= most_others
    ]
    return sorted(chosen, key=lambda each: (KINDS.index(each[1].kind), each[1].seed))


def print_judgement(
    out: Path,
    kinds: Iterable[str],
    seeds: Iterable[int] | None,
    most_others: float = 1.0,
    each: bool = False,
) -> int:
    """Print a table of kinds and judges.

    `each` adds a line per run. Return 1 if no run is recorded.
    """
    runs = recorded(out, kinds, seeds, most_others)
    table: dict[tuple[str, str], list[Score]] = {}
    for folder, truth in runs:
        answers = {name: judge(folder) for name, judge in JUDGES.items()}
        for name in answers:
            table.setdefault((truth.kind, name), []).append(score(truth, answers[name]))
        if each:
            planted = ", ".join(
                f"rank {fault.rank} {fault.phase} {fault.ms or ''}" for fault in truth.faults
            )
            said = "; ".join(
                f"{name}: {f'rank {named.rank} {named.phase}' if named else 'none'}"
                for name, named in answers.items()
            )
            print(f"{truth.name}: planted {planted or 'nothing'}; {said}")
    delays: dict[str, list[int | None]] = {}
    false_names: dict[str, list[bool]] = {}
    for folder, truth in runs:
        false_names.setdefault(truth.kind, []).append(bool(healthy_named(findings(folder), truth)))
        if truth.faults:
            delays.setdefault(truth.kind, []).append(steps_until_named(folder, truth))
    for kind, taken in delays.items():
        named = sorted(each for each in taken if each is not None)
        median = named[len(named) // 2] if named else None
        within = sum(each <= 60 for each in named)
        print(
            f"{kind}: named after {median} steps (median), within 60 steps in {within} of"
            f" {len(taken)}"
        )
    shown = Table(
        "kind",
        "runs",
        "healthy rank named",
        *(f"{name}: {what}" for name in JUDGES for what in ("right rank", "phase", "named")),
    )
    for kind in dict.fromkeys(truth.kind for _, truth in runs):
        cells = []
        for name in JUDGES:
            scores = table.get((kind, name), [])
            for field in ("right_rank", "right_phase", "named"):
                # In a healthy run no rank is the right answer.
                told = scores and (field == "named" or kind in FAULTY)
                cells.append(
                    f"{sum(getattr(one, field) for one in scores)}/{len(scores)}" if told else ""
                )
        shown.row(kind, len(false_names[kind]), sum(false_names[kind]), *cells)
    return 0 if runs else 1
