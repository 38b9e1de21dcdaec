"""Judgements of a run's windows: which ranks are compared, which are slow, and what limits the
step. Pure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.robust import fast_median
from torchlens_perf.analysis.statistics.run_windows import RunWindows
from torchlens_perf.analysis.statistics.time_account import TimeAccount
from torchlens_perf.run.loader_period import move_hidden_data_waits
from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.run.records import PARTS
from torchlens_perf.verdicts.causes.straggler_groups import find_imbalance
from torchlens_perf.verdicts.node_state import ProcessState
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings, UsualTimes
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.stragglers.window_excess import (
    compute_window_excess,
    group_rows_by_population,
)
from torchlens_perf.verdicts.words.bottleneck import StepBreakdown, break_down_step

WindowMask = npt.NDArray[np.bool_]
"""Shape [columns]."""


_IN_GAP = np.isin(PARTS, ("data", "host"))
# A condition still holds if it is absent in at most this many windows at the end of the run.
_MAX_ABSENT_AT_END = 1


def with_hidden_data_waits(
    windows: RunWindows, processes: Mapping[int, ProcessState]
) -> RunWindows:
    """Return the windows with the waits for data that waits for other ranks hide."""
    periods_ns = np.array([processes[rank].facts.loader_period_ns for rank in windows.ranks])
    parts_ns = move_hidden_data_waits(windows.parts_ns, periods_ns)
    hidden_ns = (parts_ns - windows.parts_ns)[..., PARTS.index("data")]
    return dataclasses.replace(windows, parts_ns=parts_ns, work_ns=windows.work_ns + hidden_ns)


class RunPart(NamedTuple):
    """A part of the run in which a condition held in most windows."""

    since_step: int
    until_step: int | None
    """None if the part lasts to the end of the run."""
    held: WindowMask
    """Windows of this part in which the condition held."""
    judged: WindowMask
    """Windows of the whole run in which the condition could be judged."""
    inside: WindowMask
    """Windows of this part in which the condition could be judged."""


@dataclasses.dataclass(frozen=True)
class JudgedWindows:
    """The windows of a run, with the findings and placements of its ranks."""

    windows: RunWindows
    findings: Findings
    places: Mapping[int, Placement]
    on_device: bool
    """True if all ranks are judged by their devices' clocks."""

    def windows_comparing_rank(self, rank: int) -> WindowMask:
        """Return the windows in which a rank was compared with others.

        For a rank without windows, whose node has another disk, return the windows in which any
        rank was compared.
        """
        here = np.isin(self.windows.ranks, rank)
        return np.asarray(
            (self._is_compared[here] if here.any() else self._is_compared).any(axis=0)
        )

    @property
    def compared_windows(self) -> WindowMask:
        """The windows in which ranks were compared."""
        return np.asarray(self._is_compared.any(axis=0))

    @functools.cached_property
    def slow_windows(self) -> WindowMask:
        """The windows in which any rank was slow."""
        slow = np.zeros(len(self.windows), bool)
        for episode in self.findings.episodes:
            slow |= self.windows_of_episode(episode.since_step, episode.until_step)
        return slow

    def windows_of_episode(self, since_step: int, until_step: int | None) -> WindowMask:
        """Return the windows of an episode.

        For an episode shorter than a window, return the window in which it began.
        """
        covered = self.windows.columns_between(since_step, until_step)
        if not covered.any():
            covered[
                max(
                    0,
                    int(np.searchsorted(self.windows.first_steps, since_step, "right")) - 1,
                )
            ] = True
        return covered

    def find_part_limited_by(self, kind: str) -> RunPart | None:
        """Return the part of the run in which one kind of time limited the step; None if there is
        no such part.

        kind: such as "data_bound". The rule is that of the verdict on the whole run
        (words/bottleneck.py). A slow rank makes other ranks wait, so windows with a slow rank are
        judged only for a lack of CPUs.
        """
        judged = np.array([each is not None for each in self.breakdowns])
        if kind == "lack_of_cpu":
            judged &= np.isfinite(self.windows.lack_ns).any(axis=(0, 2))
        else:
            judged &= ~self.slow_windows
        return self._find_part(
            judged,
            np.array([each is not None and each.is_limited_by(kind) for each in self.breakdowns]),
        )

    @functools.cached_property
    def breakdowns(self) -> list[StepBreakdown | None]:
        """The parts of a usual step in each window, as means over the ranks; None without data."""
        found: list[StepBreakdown | None] = []
        windows = self.windows
        for column in range(len(windows)):
            there = np.isfinite(windows.duration_ns[:, column])
            if not there.any():
                found.append(None)
                continue
            measured = np.isfinite(windows.lack_ns[:, column, 0])
            lack_ns = np.zeros(len(PARTS))
            if measured.any():
                lack_ns = windows.lack_ns[measured, column].mean(axis=0)
            if self.on_device:
                # The device waits for its host between the phases only.
                lack_ns = np.where(_IN_GAP, lack_ns, 0.0)
            parts_ns = windows.parts_ns[there, column].mean(axis=0)
            account = TimeAccount.from_parts(parts_ns, lack_ns)
            found.append(break_down_step(account, on_device=self.on_device))
        return found

    def find_imbalanced_part(self) -> RunPart | None:
        """Return the part of the run with the present imbalance of the pipeline, or None."""
        now = self.findings.imbalance
        if now is None:
            return None
        windows = self.windows
        rows = group_rows_by_population(windows.ranks, self.places)
        judged, held = np.zeros((2, len(windows)), bool)
        for column in range(len(windows)):
            if not all(
                np.isfinite(windows.work_ns[members, column]).all() for members in rows.values()
            ):
                continue
            usual = tuple(
                UsualTimes(
                    population,
                    format_ranges([windows.ranks[row] for row in members]),
                    float(fast_median(windows.work_ns[members, column], 0)),
                    0.0,
                )
                for population, members in rows.items()
            )
            step_ns = float(np.nanmedian(windows.duration_ns[:, column]))
            found = find_imbalance(
                dataclasses.replace(NOTHING, usual=usual, step_ns=step_ns), self.places
            )
            judged[column], held[column] = True, found is not None and found.stage == now.stage
        return self._find_part(judged, held)

    @functools.cached_property
    def _is_compared(self) -> WindowMask:
        """True where a rank was compared with others: shape [ranks, windows]."""
        return np.isfinite(compute_window_excess(self.windows, self.places))

    def _find_part(self, judged: WindowMask, held: WindowMask) -> RunPart | None:
        columns = np.flatnonzero(judged)
        found = find_mostly_true_slice(held[columns].tolist())
        if found is None:
            return None
        begin, end = found
        inside = np.zeros(len(judged), bool)
        inside[columns[begin:end]] = True
        until = None
        if len(columns) - end > _MAX_ABSENT_AT_END:
            until = int(self.windows.first_steps[columns[end - 1]]) + self.windows.width
        return RunPart(
            int(self.windows.first_steps[columns[begin]]), until, held & inside, judged, inside
        )


def find_mostly_true_slice(held: list[bool]) -> tuple[int, int] | None:
    """Return the slice in which True outnumbers False by the most, as (start, end); None without
    True.

    If several slices are equal, return the last one.
    """
    best, found, since, total = 0, None, 0, 0
    for index, each in enumerate(held):
        if total <= 0:
            since, total = index, 0
        total += 1 if each else -1
        if each and total >= best:
            best, found = total, (since, index + 1)
    return found
