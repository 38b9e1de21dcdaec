"""Slow ranks in merged windows: times that devices have merged over all ranks (aggregate="device").
Pure.

A window has 64 steps. Rank 0 receives, for each part of the device's step, the median over all
ranks. Rank 0 also receives the excess of ranks whose work is an outlier. A rank is slow if its work
is an outlier in MIN_WINDOWS consecutive windows, with an excess worth naming. A rank's episode ends
after QUIET_WINDOWS windows in which its work is not an outlier.

If sidecars do not exchange data, merged windows are the only data on ranks of other nodes. Merged
windows show less than the straggler detector (detector.py), which has the rows of all ranks:

- The first slow step is known only as precisely as a window, plus the steps that the device was
  behind its host.
- Only medians are known. A rank that is slow in less than half of the steps is not detected. An
  excess below 1 % of the median, or below five deviations of the ranks, is not detected either.
- It is not known which ranks do the same work. With a known pipeline, or if more than a quarter of
  the ranks are outliers, no rank is named. Of two ranks, the faster rank counts as usual.
- Host activity and workload are not known. A gap may be data loading, other host code or lack of a
  CPU. Costs are upper bounds.
- Steps before the start of this sidecar are missing.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from torchlens_perf.run.device.merged_rows import STANDS_OUT, MergedRow, unpack_row
from torchlens_perf.run.device.step_parts import StepPart
from torchlens_perf.run.grouping import group_values
from torchlens_perf.run.rank_ranges import parse_ranges
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.run.ring import Kind
from torchlens_perf.verdicts.stragglers.candidates import (
    MIN_LASTING_NS,
    MIN_LOST_NS,
    MIN_ROWS,
    MIN_SHARE,
)
from torchlens_perf.verdicts.stragglers.episodes import Episode, SharedCost, phase_of_excess
from torchlens_perf.verdicts.stragglers.findings import Findings
from torchlens_perf.verdicts.stragglers.placement import BY_DEVICE, STAGES, Placement

MIN_WINDOWS, QUIET_WINDOWS = 3, 2
# The phase of an episode in which the rank's device waits for its host.
GAP = "gap"
# If more than one in this many ranks is an outlier, the ranks are assumed to do different work.
_RANKS_PER_OUTLIER = 4
# Number of newest windows that are kept, to measure episodes and to check the detector's episodes.
_KEPT = 64
_ROW_OF_PART = {
    "forward": StepPart.FORWARD, "recompute": StepPart.RECOMPUTE, "backward": StepPart.BACKWARD,
    "optimizer": StepPart.OPTIMIZER,
    "host": StepPart.GAP,
}  # fmt: skip
# A rank that is slow in at least this share of the steps is visible in medians.
_SEEN_SHARE = 0.6
# The kernel rank_scores uses the same values of these constants.
_ROBUST_DEVIATION, _MIN_SPREAD = 1.4826, 0.01


@dataclasses.dataclass(frozen=True)
class _MergedWindow:
    first_step: int
    last_step: int
    median_ns: npt.NDArray[np.float64]
    """Medians over the ranks, indexed by StepPart."""
    spread_ns: float
    """Spread of work between the ranks."""
    excess_ns: Mapping[int, npt.NDArray[np.float64]]
    """Excess indexed by Row, for ranks whose work is an outlier, and for the slowest rank of each
    row."""
    score: Mapping[int, float]
    """Outlier scores of work, by rank."""
    has_all: bool
    """True if the window contains all outliers. A window has room for eight."""

    def shows_rank(self, rank: int) -> bool:
        """Return True if the window shows whether the work of this rank is an outlier."""
        return self.has_all or rank in self.score

    @property
    def step_ns(self) -> float:
        return float(self.median_ns[StepPart.STEP])

    def is_slow(self, rank: int) -> bool:
        return self.score.get(rank, 0.0) >= STANDS_OUT and bool(
            self.excess_ns[rank][StepPart.WORK] >= MIN_SHARE * self.step_ns
        )

    def gain_without_ns(self, *ranks: int) -> float:
        """Return by how much the slowest of these ranks exceeds all other ranks in work."""
        work = {rank: float(excess[StepPart.WORK]) for rank, excess in self.excess_ns.items()}
        others = [excess for rank, excess in work.items() if rank not in ranks]
        return max(
            0.0,
            max((work.get(rank, 0.0) for rank in ranks), default=0.0) - max(others, default=0.0),
        )


@dataclasses.dataclass
class _SlowRank:
    """A slow rank, or a rank that may become slow."""

    rank: int
    since_step: int
    from_start: bool
    windows: deque[_MergedWindow]
    """The newest windows in which the rank was slow."""
    slow: int = 0
    seen: int = 0
    quiet: int = 0
    quiet_since: int = 0
    named_step: int | None = None
    until_step: int | None = None


class MergedWindows:
    """Finds slow ranks in the merged windows of one attempt of a job. Call add_records() with the
    records of rank 0 in order."""

    def __init__(self) -> None:
        self.ranks = 0
        self.seen = 0
        """Number of windows in which ranks were compared."""
        self.windows: deque[_MergedWindow] = deque(maxlen=_KEPT)
        """The newest windows in which ranks were compared."""
        self._last_step = -1
        self._slow: dict[int, _SlowRank] = {}
        self._over: list[_SlowRank] = []

    def add_records(self, records: npt.NDArray[np.void], ranks: int) -> None:
        """Add records of any kind, and judge the windows among them.

        All records of a window must be added in one call. ranks: number of ranks of the job.
        """
        self.ranks = ranks
        merged = [unpack_row(record, []) for record in records[records["kind"] == Kind.MERGED]]
        by_step = group_values((row.step, row) for row in merged if row.row >= 0)
        for step, rows in by_step.items():
            first_step, self._last_step = self._last_step + 1, step
            window = _make_window(first_step, step, rows, ranks)
            if window is not None:
                self._judge_window(window)

    def episodes(self) -> list[Episode]:
        """Return the episodes of ranks that are or were slow."""
        now = [_build_episode(each) for each in self._slow.values() if each.named_step is not None]
        before = [_build_episode(each) for each in self._over if each.named_step is not None]
        if len(now) < 2:
            return [*now, *before]
        newest, ranks = list(self.windows)[-MIN_WINDOWS:], [each.rank for each in now]
        shared_ns = float(np.mean([window.gain_without_ns(*ranks) for window in newest]))
        from_step = max(each.since_step for each in now)
        costs = [
            SharedCost(shared_ns, each.cost_ns, min(shared_ns, each.excess_ns), from_step)
            for each in now
        ]
        return [
            *(
                dataclasses.replace(each, shared=cost)
                for each, cost in zip(now, costs, strict=True)
            ),
            *before,
        ]

    def detectable_ns(self) -> float:
        """Return the smallest excess that would be detected in the newest windows."""
        newest = list(self.windows)[-MIN_WINDOWS:]
        return max(max(STANDS_OUT * each.spread_ns, MIN_SHARE * each.step_ns) for each in newest)

    def disputes_episode(self, episode: Episode) -> bool:
        """Return True if a detector's episode should be visible in these windows but is not."""
        if episode.phase == "cpu" or episode.slow_share < _SEEN_SHARE:
            return False
        inside = [each for each in self.windows if each.first_step >= episode.since_step][
            -MIN_WINDOWS:
        ]
        seen = [
            each
            for each in inside
            if each.shows_rank(episode.rank)
            and episode.excess_ns >= 2 * STANDS_OUT * each.spread_ns
        ]
        return len(seen) == MIN_WINDOWS and not any(
            each.score.get(episode.rank, 0.0) >= STANDS_OUT for each in seen
        )

    def _judge_window(self, window: _MergedWindow) -> None:
        is_first, self.seen = not self.seen, self.seen + 1
        self.windows.append(window)
        for rank in window.score:
            if window.is_slow(rank) and rank not in self._slow:
                self._slow[rank] = _SlowRank(rank, window.first_step, is_first, deque(maxlen=_KEPT))
        for rank, slow in list(self._slow.items()):
            if not window.shows_rank(rank):
                # The window does not show whether the rank is slow.
                continue
            slow.seen += 1
            if window.is_slow(rank):
                slow.windows.append(window)
                slow.slow, slow.quiet = slow.slow + 1, 0
                if slow.named_step is None and self._is_worth_naming(slow):
                    slow.named_step = window.last_step
                continue
            slow.quiet_since = slow.quiet_since if slow.quiet else window.first_step
            slow.quiet += 1
            if slow.named_step is None:
                del self._slow[rank]
            elif slow.quiet == QUIET_WINDOWS:
                slow.until_step, slow.seen = slow.quiet_since, slow.seen - QUIET_WINDOWS
                self._over.append(self._slow.pop(rank))

    def _is_worth_naming(self, slow: _SlowRank) -> bool:
        if len(slow.windows) < MIN_WINDOWS:
            return False
        steps = [each.last_step - each.first_step + 1 for each in slow.windows]
        lasted_ns = sum(
            count * each.step_ns for count, each in zip(steps, slow.windows, strict=True)
        )
        lost = (
            count * each.excess_ns[slow.rank][StepPart.WORK]
            for count, each in zip(steps, slow.windows, strict=True)
        )
        return bool(lasted_ns >= MIN_LASTING_NS or sum(lost) >= MIN_LOST_NS)


def combine_with_windows(
    findings: Findings, windows: MergedWindows, places: Mapping[int, Placement]
) -> Findings:
    """Return the detector's findings, combined with those from merged windows.

    Slow ranks that only the windows show are added if the detector does not compare all ranks of
    the job. If the detector compares all ranks, the episodes of ranks that only the windows show
    are `unconfirmed`. The detector's episodes that the windows should show but do not show are
    `disputed`. places: placements of the ranks that the detector knows.
    """
    # Ranks of different pipeline stages or models do different work.
    stages = any(name in STAGES for place in places.values() for name in place.coordinates)
    models = {place.population for place in places.values()}
    if windows.seen < MIN_WINDOWS or stages or len(models) > 1:
        return findings
    compared = {
        rank for usual in findings.usual if len(of := parse_ranges(usual.ranks)) > 1 for rank in of
    }
    now = {each.rank for each in findings.slow_now}
    by_device = {rank for rank, place in places.items() if place.population.endswith(BY_DEVICE)}
    episodes = [
        (
            dataclasses.replace(each, disputed=True)
            if not each.is_over and each.rank in by_device and windows.disputes_episode(each)
            else each
        )
        for each in findings.episodes
    ]
    only_here = [each for each in windows.episodes() if each.rank not in now]
    if len(compared) >= windows.ranks:
        min_excess_ns = findings.detectable_ns
        unconfirmed = [
            each
            for each in only_here
            if not each.is_over and min_excess_ns is not None and each.excess_ns >= min_excess_ns
        ]
        return dataclasses.replace(
            findings, episodes=tuple(episodes), unconfirmed=tuple(unconfirmed)
        )
    known = {each.rank for each in findings.episodes}
    episodes += [each for each in only_here if not each.is_over or each.rank not in known]
    newest = windows.windows[-1]
    return findings.with_episodes(
        episodes,
        rows=max(findings.rows, windows.seen),
        step_ns=findings.step_ns or newest.step_ns,
        detectable_ns=max(findings.detectable_ns or 0.0, windows.detectable_ns()),
        compared=windows.ranks,
        last_step=max(findings.last_step, newest.last_step),
    )


def remove_window_findings(findings: Findings) -> Findings:
    """Return the findings without those from merged windows."""
    judged = [
        dataclasses.replace(each, disputed=False)
        for each in findings.episodes
        if not each.by_windows
    ]
    return dataclasses.replace(findings, episodes=tuple(judged), unconfirmed=())


def _make_window(
    first_step: int, last_step: int, rows: list[MergedRow], ranks: int
) -> _MergedWindow | None:
    """Return a window from its rows; None if its ranks cannot be compared."""
    work = next((row for row in rows if row.row == StepPart.WORK), None)
    if (
        work is None
        or work.times < MIN_ROWS * ranks
        or work.outstanding > max(1, ranks // _RANKS_PER_OUTLIER)
    ):
        return None
    median_ns = np.zeros(len(StepPart))
    excess_ns: dict[int, npt.NDArray[np.float64]] = {}
    score: dict[int, float] = {}
    for row in rows:
        median_ns[row.row] = row.median_ns
        if row.slowest >= 0:
            excess_ns.setdefault(row.slowest, np.zeros(len(StepPart)))[row.row] = row.excess_ns
            if row.row == StepPart.WORK:
                score[row.slowest] = row.score
    spread_ns = max(_ROBUST_DEVIATION * work.mad_ns, _MIN_SPREAD * work.median_ns)
    has_all = work.outstanding <= sum(each >= STANDS_OUT for each in score.values())
    return _MergedWindow(first_step, last_step, median_ns, spread_ns, excess_ns, score, has_all)


def _build_episode(slow: _SlowRank) -> Episode:
    windows, rank = list(slow.windows), slow.rank
    excess: Any = np.mean([each.excess_ns[rank] for each in windows], axis=0)
    usual: Any = np.mean([each.median_ns for each in windows], axis=0)
    above, usual_parts = np.zeros(len(OWN_PARTS)), np.zeros(len(OWN_PARTS))
    for part, row in _ROW_OF_PART.items():
        above[OWN_PARTS.index(part)], usual_parts[OWN_PARTS.index(part)] = excess[row], usual[row]
    # If no part exceeds the usual time, the rank is slightly slower in all parts, which is the
    # phase "compute".
    phase, phase_excess_ns = (
        phase_of_excess(above, usual_parts) if above.any() else ("compute", 0.0)
    )
    excess_ns = float(excess[StepPart.WORK])
    assert slow.named_step is not None
    return Episode(
        rank=rank,
        phase=GAP if phase == "host" else phase,
        judged_from_step=slow.since_step,
        from_start=slow.from_start,
        last_step=windows[-1].last_step,
        until_step=slow.until_step,
        named_step=slow.named_step,
        excess_ns=excess_ns,
        phase_excess_ns=phase_excess_ns,
        cost_ns=float(np.mean([each.gain_without_ns(rank) for each in windows])),
        work_ns=float(usual[StepPart.WORK]) + excess_ns,
        others_work_ns=float(usual[StepPart.WORK]),
        step_ns=float(usual[StepPart.STEP]),
        z_score=float(np.median([each.score[rank] for each in windows])),
        slow_share=slow.slow / slow.seen,
        slow_excess_ns=excess_ns,
        more_workload=0.0,
        by_windows=True,
    )
