"""The measures of many runs of a job in order of time, and the runs from which they changed.

ruptures finds where the typical step may have changed. A place counts if the runs before and after
it differ by the test of a comparison.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.compare.changes import Outcome
from torchlens_perf.compare.comparison import (
    ComparedRun,
    Comparison,
    build_compared_run,
    build_comparison,
)
from torchlens_perf.compare.measures import STEP, list_differences
from torchlens_perf.diagnosis.goodput import add_price, combine_jobs
from torchlens_perf.errors import RunStoreError
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory

if TYPE_CHECKING:
    from pathlib import Path

    from torchlens_perf.verdicts.words.report_goodput import Goodput

MIN_RUNS = 4
"""Fewest runs on each side of a change."""
MIN_COMPARED = 2 * MIN_RUNS
"""With fewer runs, no changes are looked for."""
# A penalty in units of the variance between neighbouring runs, as in a Bayesian criterion.
_PENALTY = 3.0


@dataclasses.dataclass(frozen=True)
class HistoryChange:
    """A run from which the typical step is different."""

    first: ComparedRun
    comparison: Comparison
    """The runs since the previous change, compared with those until the next one."""
    last_before: ComparedRun

    @property
    def changed_settings(self) -> list[str]:
        """Differences between the two runs, such as "torch 2.12.0 -> 2.13.0"."""
        return list_differences(self.last_before.report, self.first.report)


@dataclasses.dataclass(frozen=True)
class History:
    """Runs of a job, the oldest first."""

    runs: Sequence[ComparedRun]
    changes: Sequence[HistoryChange]
    jobs: Mapping[str, Goodput]
    """The goodput of each job, including runs that are too short to be compared."""
    notes: Sequence[str]


def read_history(
    paths: Sequence[Path],
    advanced: Callable[[int, int], object] = lambda done, total: None,
    price: float | None = None,
) -> History:
    """Read runs and find changes of their typical step. Runs that cannot be compared are noted.

    advanced: called with the number of runs read so far and the total. price: of an hour of one
    device.
    """
    runs, goodputs, notes = [], [], []
    for number, path in enumerate(paths, 1):
        run = RunDirectory(path)
        try:
            report = load_report(run, lost_time=False)
            if report["goodput"] is not None:
                goodputs.append((run.run_id, report["goodput"]))
            runs.append(build_compared_run(run, report))
        except RunStoreError as error:
            notes.append(str(error))
        advanced(number, len(paths))
    runs.sort(key=lambda run: run.report["run"]["started"] or "")
    if len(runs) < MIN_COMPARED:
        notes.append(f"{len(runs)} runs: changes are looked for from {MIN_COMPARED} runs on")
    jobs = combine_jobs(goodputs)
    for job in jobs.values():
        add_price(job, price)
    return History(runs, find_history_changes(runs), jobs, notes)


def find_history_changes(runs: Sequence[ComparedRun]) -> list[HistoryChange]:
    """Return the changes of the typical step, the oldest first."""
    if len(runs) < MIN_COMPARED:
        return []
    places = [0, *_find_places(np.array([run.values[STEP] for run in runs])), len(runs)]
    while len(places) > 2:
        compared = [
            build_comparison(runs[before:at], runs[at:after])
            for before, at, after in zip(places, places[1:], places[2:], strict=False)
        ]
        doubtful = [
            at for at, each in enumerate(compared)
            if each.step.outcome is not Outcome.CHANGED
        ]  # fmt: skip
        if not doubtful:
            return [
                HistoryChange(runs[at], each, runs[at - 1])
                for at, each in zip(places[1:-1], compared, strict=True)
            ]
        # Without this place, its neighbours are compared over more runs.
        del places[doubtful[0] + 1]
    return []


def _find_places(steps_s: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[int]:
    """Return the indexes of the first runs after possible changes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ruptures and SciPy warn of deprecated names.
        import ruptures  # type: ignore[import-untyped]

    values = np.log(steps_s)
    noise = np.median(np.abs(np.diff(values))) / 0.954
    if not noise:
        noise = 1e-6
    search = ruptures.KernelCPD(kernel="linear", min_size=MIN_RUNS).fit(values[:, None] / noise)
    found: list[int] = search.predict(pen=_PENALTY * np.log(len(values)))
    return found[:-1]
