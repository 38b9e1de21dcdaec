"""Slow ranks by the windows that devices merged over all ranks (aggregate="device"). Pure.

For each window of 64 steps, rank 0 receives the median over the ranks of each part of the device's
step. It also receives the excess of ranks whose work is an outlier. A rank is slow here if its work
is an outlier in MIN_WINDOWS consecutive windows, by an excess that is worth naming. Its episode
ends after QUIET_WINDOWS windows in which its work is no outlier.

If sidecars do not exchange data, these windows are the only source about ranks of other nodes. They
show less than the straggler detector (detector.py), which has the rows of every rank:

- The first slow step is known only to a window, plus the number of steps that the device was
  behind.
- Only medians are known. Slowness in less than half of the steps is not seen, nor an excess below 1
  % of the median or five deviations of the ranks.
- Ranks with the same work are not known. With a known pipeline, or if more than a quarter of the
  ranks are outliers, no rank is named. Of two ranks, the faster one counts as usual.
- Host activity is not known. A gap may be data loading, other host code or lack of a CPU. The
  workload is not known either, and costs are upper bounds.
- Steps before the start of this sidecar are missing.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.run.device.merged_rows import STANDS_OUT, MergedRow, unpack_row
from torchlens_perf.run.device.step_parts import StepPart
from torchlens_perf.run.rank_ranges import parse_ranges
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.run.ring import Kind
from torchlens_perf.verdicts.stragglers.candidates import (
    MIN_LASTING_NS,
    MIN_LOST_NS,
    MIN_ROWS,
    MIN_SHARE,
)
from torchlens_perf.verdicts.stragglers.episodes import Episode, phase_of
from torchlens_perf.verdicts.stragglers.placement import BY_DEVICE, STAGES

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.verdicts.stragglers.findings import Findings
    from torchlens_perf.verdicts.stragglers.placement import Placement

MIN_WINDOWS, QUIET_WINDOWS = 3, 2
# The phase of an episode in which the rank's device waits for its host.
GAP = "gap"
# If more than one in this many ranks is an outlier, the ranks do different work.
_RANKS_PER_OUTLIER = 4
# Number of newest windows that are kept: for the figures of an episode, and to check the detector's
# episodes.
_KEPT = 64
_ROW_OF_PART = {
    "forward": StepPart.FORWARD, "recompute": StepPart.RECOMPUTE, "backward": StepPart.BACKWARD,
    "optimizer": StepPart.OPTIMIZER,
    "host": StepPart.GAP,
}  # fmt: skip
# Medians show a rank that is slow in at least this share of the steps.
_SEEN_SHARE = 0.6
# The constants of rank_scores on the device.
_ROBUST_DEVIATION, _MIN_SPREAD = 1.4826, 0.01


@dataclasses.dataclass(frozen=True)
class _Window:
    first_step: int
    last_step: int
    median_ns: npt.NDArray[np.float64]
    """Medians over the ranks, by row."""
    spread_ns: float
    """Spread of the ranks' work."""
    excess_ns: Mapping[int, npt.NDArray[np.float64]]
    """Excess by rank and row, of the ranks that are slowest in a row and of those whose work is an
    outlier."""
    score: Mapping[int, float]
    """Scores of the work, by rank."""
    has_all: bool
    """True if the window has all outliers of the work. It has at most eight."""

    def is_known(self, rank: int) -> bool:
        """Return True if the window shows whether the work of this rank is an outlier."""
        return self.has_all or rank in self.score

    @property
    def step_ns(self) -> float:
        return float(self.median_ns[StepPart.STEP])

    def is_slow(self, rank: int) -> bool:
        if self.score.get(rank, 0.0) < STANDS_OUT:
            return False
        return bool(self.excess_ns[rank][StepPart.WORK] >= MIN_SHARE * self.step_ns)

    def gain_ns(self, *ranks: int) -> float:
        """Return by how much the work of the slowest of these ranks exceeds that of all other
        ranks."""
        work = {rank: float(excess[StepPart.WORK]) for rank, excess in self.excess_ns.items()}
        others = [excess for rank, excess in work.items() if rank not in ranks]
        return max(
            0.0,
            max((work.get(rank, 0.0) for rank in ranks), default=0.0) - max(others, default=0.0),
        )


@dataclasses.dataclass
class _Slow:
    """A slow rank, or a candidate."""

    rank: int
    since_step: int
    from_start: bool
    windows: deque[_Window]
    """The newest windows in which the rank was slow."""
    slow: int = 0
    seen: int = 0
    quiet: int = 0
    quiet_since: int = 0
    named_step: int | None = None
    until_step: int | None = None


class MergedWindows:
    """The merged windows of one attempt of a job. add() takes the records of rank 0, in order."""

    def __init__(self) -> None:
        self.ranks = 0
        self.seen = 0
        """Number of windows in which ranks could be compared."""
        self.windows: deque[_Window] = deque(maxlen=_KEPT)
        """The newest of these windows."""
        self._last_step = -1
        self._slow: dict[int, _Slow] = {}
        self._over: list[_Slow] = []

    def add(self, records: npt.NDArray[np.void], ranks: int) -> None:
        """Add records of any kind.

        The records of one window must come together. ranks: number of ranks of the job.
        """
        self.ranks = ranks
        merged = [unpack_row(record, []) for record in records[records["kind"] == Kind.MERGED]]
        by_step: dict[int, list[MergedRow]] = {}
        for row in merged:
            if row.row >= 0:
                by_step.setdefault(row.step, []).append(row)
        for step, rows in by_step.items():
            first_step, self._last_step = self._last_step + 1, step
            window = _make_window(first_step, step, rows, ranks)
            if window is not None:
                self._judge_window(window)

    def episodes(self) -> list[Episode]:
        """Return the episodes of ranks that are or were slow."""
        now = [each for each in self._slow.values() if each.named_step is not None]
        newest = list(self.windows)[-MIN_WINDOWS:]
        shared_ns = None
        if len(now) > 1:
            shared_ns = float(
                np.mean([window.gain_ns(*(each.rank for each in now)) for window in newest])
            )
        before = [_episode(each) for each in self._over if each.named_step is not None]
        return [
            *(dataclasses.replace(_episode(each), shared_cost_ns=shared_ns) for each in now),
            *before,
        ]

    def detectable_ns(self) -> float:
        """Return the smallest excess that would be named, by the newest windows."""
        newest = list(self.windows)[-MIN_WINDOWS:]
        return max(max(STANDS_OUT * each.spread_ns, MIN_SHARE * each.step_ns) for each in newest)

    def disputes(self, episode: Episode) -> bool:
        """Return True if an episode of the detector should be visible in these windows and is
        not."""
        if episode.phase == "cpu" or episode.slow_share < _SEEN_SHARE:
            return False
        inside = [each for each in self.windows if each.first_step >= episode.since_step][
            -MIN_WINDOWS:
        ]
        seen = [
            each
            for each in inside
            if each.is_known(episode.rank) and episode.excess_ns >= 2 * STANDS_OUT * each.spread_ns
        ]
        return len(seen) == MIN_WINDOWS and not any(
            each.score.get(episode.rank, 0.0) >= STANDS_OUT for each in seen
        )

    def _judge_window(self, window: _Window) -> None:
        is_first, self.seen = not self.seen, self.seen + 1
        self.windows.append(window)
        for rank in window.score:
            if window.is_slow(rank) and rank not in self._slow:
                self._slow[rank] = _Slow(rank, window.first_step, is_first, deque(maxlen=_KEPT))
        for rank, slow in list(self._slow.items()):
            if not window.is_known(rank):
                # The window does not show the rank, which counts neither as slow nor as not slow.
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

    def _is_worth_naming(self, slow: _Slow) -> bool:
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


def combined_with_windows(
    findings: Findings, windows: MergedWindows, places: Mapping[int, Placement]
) -> Findings:
    """Return the detector's findings, combined with the merged windows. places: placements of the
    ranks it knows.

    Slow ranks that only the windows show are added if the detector does not compare all ranks of
    the job. If it does, they become `unconfirmed`. Episodes that the windows should show and do not
    become `disputed`.
    """
    if windows.seen < MIN_WINDOWS or _do_different_work(places):
        return findings
    compared = {
        rank for usual in findings.usual if len(of := parse_ranges(usual.ranks)) > 1 for rank in of
    }
    now = {each.rank for each in findings.slow_now}
    by_device = {rank for rank, place in places.items() if place.population.endswith(BY_DEVICE)}
    episodes = [
        (
            dataclasses.replace(each, disputed=True)
            if not each.is_over and each.rank in by_device and windows.disputes(each)
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


def without_windows(findings: Findings) -> Findings:
    """Return the detector's findings without merged windows.

    A restarted sidecar has other windows.
    """
    judged = [
        dataclasses.replace(each, disputed=False)
        for each in findings.episodes
        if not each.by_windows
    ]
    return dataclasses.replace(findings, episodes=tuple(judged), unconfirmed=())


def _do_different_work(places: Mapping[int, Placement]) -> bool:
    """Return True if the ranks are known to be of different stages or to compute different
    models."""
    stages = any(name in STAGES for place in places.values() for name in place.coordinates)
    return stages or len({place.population for place in places.values()}) > 1


def _make_window(
    first_step: int, last_step: int, rows: list[MergedRow], ranks: int
) -> _Window | None:
    """Return a window from its rows; None if ranks cannot be compared in it."""
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
    return _Window(first_step, last_step, median_ns, spread_ns, excess_ns, score, has_all)


def _episode(slow: _Slow) -> Episode:
    windows, rank = list(slow.windows), slow.rank
    excess: Any = np.mean([each.excess_ns[rank] for each in windows], axis=0)
    usual: Any = np.mean([each.median_ns for each in windows], axis=0)
    above, usual_parts = np.zeros(len(OWN_PARTS)), np.zeros(len(OWN_PARTS))
    for part, row in _ROW_OF_PART.items():
        above[OWN_PARTS.index(part)], usual_parts[OWN_PARTS.index(part)] = excess[row], usual[row]
    # If no part's median is above the others', all parts together are a little slower: it computes
    # slowly.
    phase, phase_excess_ns = phase_of(above, usual_parts) if above.any() else ("compute", 0.0)
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
        cost_ns=float(np.mean([each.gain_ns(rank) for each in windows])),
        work_ns=float(usual[StepPart.WORK]) + excess_ns,
        others_work_ns=float(usual[StepPart.WORK]),
        step_ns=float(usual[StepPart.STEP]),
        z_score=float(np.median([each.score[rank] for each in windows])),
        slow_share=slow.slow / slow.seen,
        slow_excess_ns=excess_ns,
        more_workload=0.0,
        by_windows=True,
    )
