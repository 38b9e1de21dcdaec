"""Compare runs of two sides: read their reports, and find the changes of all measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchlens_perf.compare.changes import Change, Outcome, find_changes
from torchlens_perf.compare.measures import (
    CONTENTION,
    DETAILS,
    STEP,
    Kind,
    Measure,
    collect_measures,
    list_differences,
)
from torchlens_perf.compare.run_noise import bootstrap_standard_errors, read_step_series
from torchlens_perf.compare.verdict_changes import VerdictChange, find_verdict_changes
from torchlens_perf.errors import RunStoreError
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.records import PARTS as RECORDED_PARTS
from torchlens_perf.store.reader import UnreadableFileError
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.view.theme import PARTS

# Times that change by less than this share of the step, and other values by twice this share of
# themselves, are not worth a line.
_WORTH = 0.005
MARGIN = 0.02
"""A change below this share of the step counts as no change."""
ONE_RUN_SPREAD = 0.1
"""Assumed standard deviation between runs, as a share, for a side with a single run.

The share of the step that waits for a CPU is added, since other programs vary from run to run.
"""
# A duration is the difference of two readings of a clock that counts nanoseconds.
_RESOLUTION_S = 2e-9
# Between runs, some time moves from one part or module to another: this share of the step.
_SHIFTED_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class ComparedRun:
    """One run: its report, its measures, and the relative noise of each part of its step."""

    run: RunDirectory
    report: Report
    values: Mapping[Measure, float]
    noise: Mapping[str, float]
    """Standard error in seconds, by name of a part, and "" for the step."""
    notes: Sequence[str]

    @property
    def contention_share(self) -> float:
        """Share of the typical step in which the training thread had no CPU."""
        return self.values.get(CONTENTION, 0.0) / self.values[STEP]

    def noise_of(self, measure: Measure) -> float:
        """Return the standard error of a value from within the run; NaN if it is not known."""
        if measure.kind is Kind.PART:
            return self.noise.get(measure.name, np.nan)
        if measure.kind is Kind.MEMORY:
            return 0.0
        whole = STEP if measure.kind is Kind.STEP else measure
        return self.noise.get("", np.nan) * (self.values[whole] / self.values[STEP])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Changes between two sides of runs."""

    before: Sequence[ComparedRun]
    after: Sequence[ComparedRun]
    changes: Mapping[Measure, Change]
    only_before: Sequence[Measure]
    """Measures that runs after lack."""
    only_after: Sequence[Measure]
    verdicts: Sequence[VerdictChange]
    """Verdicts that came, went or have another subject, those that stop or slow ranks first."""
    notes: Sequence[str]

    @property
    def step(self) -> Change:
        """Change of the typical step, which every compared run has."""
        return self.changes[STEP]

    def list_changed(self, *kinds: Kind) -> list[tuple[Measure, Change]]:
        """Return the changed measures of these kinds, the largest difference first."""
        found = [
            (measure, change)
            for measure, change in self.changes.items()
            if measure.kind in kinds and change.outcome is Outcome.CHANGED
        ]
        return sorted(found, key=lambda each: -abs(each[1].difference))


def read_compared_run(path: Path) -> ComparedRun:
    """Read a run for a comparison. Raise RunStoreError if it has no step to compare."""
    run = RunDirectory(path)
    report = load_report(run, lost_time=False)
    values = collect_measures(report)
    if STEP not in values:
        raise RunStoreError(f"{run.path} has no typical step to compare: it recorded too few steps")
    unreadable: list[UnreadableFileError] = []
    errors = bootstrap_standard_errors(read_step_series(run, unreadable))
    names = ["", *(PARTS[part].name for part in RECORDED_PARTS), PARTS["cpu"].name]
    notes = [f"{run.run_id}: {each.in_run}" for each in unreadable]
    return ComparedRun(run, report, values, dict(zip(names, errors.tolist(), strict=True)), notes)


def compare_runs(
    before: Sequence[Path],
    after: Sequence[Path],
    advanced: Callable[[int, int], object] = lambda done, total: None,
) -> Comparison:
    """Compare the runs of two sides. Raise RunStoreError for a run that cannot be read.

    advanced: called with the number of runs read so far and the total.
    """
    runs = []
    for path in (*before, *after):
        runs.append(read_compared_run(path))
        advanced(len(runs), len(before) + len(after))
    return build_comparison(runs[: len(before)], runs[len(before) :])


def build_comparison(before: Sequence[ComparedRun], after: Sequence[ComparedRun]) -> Comparison:
    """Return the changes between runs that are already read."""
    common = [each for each in before[0].values if _has_all(each, (*before, *after))]
    found: dict[Measure, Change] = {}
    for is_detail in (False, True):
        chosen = [each for each in common if (each.kind in DETAILS) is is_detail]
        if chosen:
            found |= zip(chosen, _changes(chosen, before, after), strict=True)
    notes = list_differences(before[0].report, after[0].report)
    notes += [note for run in (*before, *after) for note in run.notes]
    alone = [
        f"one run {name}" for name, side in (("before", before), ("after", after)) if len(side) == 1
    ]
    notes += [
        f"{' and '.join(alone)}: how much equal runs differ is not measured, and assumed to be"
        f" {_assume_spread((*before, *after)):.0%} of a typical step. Record 5 runs or more of each side"
    ] * bool(alone)
    return Comparison(
        before,
        after,
        found,
        [each for each in before[0].values if not _has_all(each, after)],
        [each for each in after[0].values if not _has_all(each, before)],
        find_verdict_changes(*([run.report for run in side] for side in (before, after))),
        notes,
    )


def _assume_spread(runs: Sequence[ComparedRun]) -> float:
    """Return the assumed standard deviation between runs, as a share, for a side with one run."""
    return ONE_RUN_SPREAD + max(run.contention_share for run in runs)


def _has_all(measure: Measure, runs: Sequence[ComparedRun]) -> bool:
    return all(measure in run.values for run in runs)


def _changes(
    chosen: Sequence[Measure], before: Sequence[ComparedRun], after: Sequence[ComparedRun]
) -> list[Change]:
    def matrix(runs: Sequence[ComparedRun], value: Callable[[ComparedRun, Measure], Any]) -> Any:
        return np.array([[value(run, each) for each in chosen] for run in runs], float)

    step_s = float(np.mean([run.values[STEP] for run in before]))
    values_before, values_after = (
        matrix(runs, lambda run, each: run.values[each]) for runs in (before, after)
    )
    noise_before, noise_after = (matrix(runs, ComparedRun.noise_of) for runs in (before, after))
    is_time = np.array([each.kind is not Kind.MEMORY for each in chosen])
    of_step = np.array([each.kind is not Kind.COLLECTIVE for each in chosen]) & is_time
    mean = values_before.mean(axis=0)
    scale = np.where(of_step, step_s, mean)
    spread = _assume_spread((*before, *after))
    largest = np.concatenate([values_before, values_after]).max(axis=0)
    assumed = spread * (largest + np.where(of_step, _SHIFTED_SHARE * step_s, 0.0))
    assumed[~is_time] = _WORTH * mean[~is_time]
    # One run says nothing on how much other programs will use the CPUs in the next one.
    is_contention = np.array([each == CONTENTION for each in chosen])
    assumed[is_contention] = 2 * largest[is_contention]
    worth = np.where(of_step, _WORTH, 2 * _WORTH) * scale
    worth[is_time] = np.maximum(worth[is_time], _RESOLUTION_S)
    found = find_changes(
        values_before, values_after, noise_before, noise_after, assumed, worth, MARGIN * scale
    )
    return [
        dataclasses.replace(change, outcome=Outcome.SAME)
        if change.outcome is Outcome.CHANGED and of.format(change.before) == of.format(change.after)
        else change
        for of, change in zip(chosen, found, strict=True)
    ]
