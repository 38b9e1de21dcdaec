"""Who is slow by the windows that the devices merged over all ranks (aggregate="device"), beside the judge. Pure.

Of each window, 64 steps, rank 0 knows the ranks' median of each part of the device's step, and by how much the ranks
whose work stands out are above it. A rank is slow here when its work stands out in MIN_WINDOWS windows one after the
other, by what is worth a person's time. It is over after QUIET_WINDOWS without.

It is all that is known of the ranks of other nodes where sidecars do not talk to each other. It knows less than the
judge (detector.py), which has every rank's rows:

- Steps only by windows: since when is known to a window, and later by as many steps as the device was behind.
- Medians only: slowness that comes and goes in less than half of the steps is not seen, nor what is below 1 % of the
  median or five deviations of the ranks.
- Not which ranks do the same work. Where a pipeline is known, or more than a quarter of the ranks stand out, nobody is
  named; of two ranks, the faster one is what is usual.
- Not what the host did: a gap is the loader's or other host code's, and lack of a CPU is not distinguished from
  either. Not the workload. What the job would gain is at most what is said.
- Nothing of steps before this sidecar began.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.run.device.merged_rows import STANDS_OUT, MergedRow, unpacked
from torchlens_perf.run.device.step_parts import Row
from torchlens_perf.run.rank_ranges import parse_ranges
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.run.ring import Kind
from torchlens_perf.verdicts.stragglers.candidates import MIN_LASTING_NS, MIN_LOST_NS, MIN_ROWS, MIN_SHARE
from torchlens_perf.verdicts.stragglers.episodes import Episode, phase_of
from torchlens_perf.verdicts.stragglers.placement import BY_DEVICE, STAGES

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.verdicts.stragglers.findings import Findings
    from torchlens_perf.verdicts.stragglers.placement import Placement

MIN_WINDOWS, QUIET_WINDOWS = 3, 2
GAP = "gap"  # the phase of an episode whose rank's device waits for its host
_MAX_SLOW_SHARE = 4  # of the ranks, one in so many: else they do different work
_KEPT = 64  # windows of an episode that its figures are of, and that the judge's are held against
_ROW_OF_PART = {
    "forward": Row.FORWARD, "recompute": Row.RECOMPUTE, "backward": Row.BACKWARD, "optimizer": Row.OPTIMIZER,
    "host": Row.GAP,
}  # fmt: skip
_SEEN_SHARE = 0.6  # of the steps in which a rank is slow, so that its medians show it
_ROBUST_DEVIATION, _MIN_SPREAD = 1.4826, 0.01  # as rank_scores has them


@dataclasses.dataclass(frozen=True)
class _Window:
    first_step: int
    last_step: int
    median_ns: npt.NDArray[np.float64]
    """By row: the ranks' median."""
    spread_ns: float
    """Of the ranks' work."""
    excess_ns: Mapping[int, npt.NDArray[np.float64]]
    """By rank and row; of those that are slowest in it, and of those whose work stands out."""
    score: Mapping[int, float]
    """Of the work, by rank."""
    has_all: bool
    """Whether the work of no other rank stands out: a window holds eight at the most."""

    def is_known(self, rank: int) -> bool:
        """Whether it says how much this rank's work stands out."""
        return self.has_all or rank in self.score

    @property
    def step_ns(self) -> float:
        return float(self.median_ns[Row.STEP])

    def is_slow(self, rank: int) -> bool:
        if self.score.get(rank, 0.0) < STANDS_OUT:
            return False
        return bool(self.excess_ns[rank][Row.WORK] >= MIN_SHARE * self.step_ns)

    def gain_ns(self, *ranks: int) -> float:
        """How much more the work of the slowest of these ranks takes than that of any other rank."""
        work = {rank: float(excess[Row.WORK]) for rank, excess in self.excess_ns.items()}
        others = [excess for rank, excess in work.items() if rank not in ranks]
        return max(0.0, max((work.get(rank, 0.0) for rank in ranks), default=0.0) - max(others, default=0.0))


@dataclasses.dataclass
class _Slow:
    """A rank that is slow, or may be."""

    rank: int
    since_step: int
    from_start: bool
    windows: deque[_Window]
    """In which it was slow."""
    slow: int = 0
    seen: int = 0
    quiet: int = 0
    quiet_since: int = 0
    named_step: int | None = None
    until_step: int | None = None


class MergedWindows:
    """Fed with the records of rank 0, in order. One attempt of a job."""

    def __init__(self) -> None:
        self.ranks = 0
        self.seen = 0
        """Windows that ranks could be compared in."""
        self.windows: deque[_Window] = deque(maxlen=_KEPT)
        """The newest of them."""
        self._last_step = -1
        self._slow: dict[int, _Slow] = {}
        self._over: list[_Slow] = []

    def add(self, records: npt.NDArray[np.void], ranks: int) -> None:
        """records: any; a window's are there together. ranks: of the job."""
        self.ranks = ranks
        merged = [unpacked(record, []) for record in records[records["kind"] == Kind.MERGED]]
        by_step: dict[int, list[MergedRow]] = {}
        for row in merged:
            if row.row >= 0:
                by_step.setdefault(row.step, []).append(row)
        for step, rows in by_step.items():
            first_step, self._last_step = self._last_step + 1, step
            window = _window(first_step, step, rows, ranks)
            if window is not None:
                self._judge(window)

    def episodes(self) -> list[Episode]:
        """Of ranks that are slow, or were."""
        now = [each for each in self._slow.values() if each.named_step is not None]
        newest = list(self.windows)[-MIN_WINDOWS:]
        shared_ns = None
        if len(now) > 1:
            shared_ns = float(np.mean([window.gain_ns(*(each.rank for each in now)) for window in newest]))
        before = [_episode(each) for each in self._over if each.named_step is not None]
        return [*(dataclasses.replace(_episode(each), shared_cost_ns=shared_ns) for each in now), *before]

    def detectable_ns(self) -> float:
        """What would stand out, and be worth naming, in the newest windows."""
        newest = list(self.windows)[-MIN_WINDOWS:]
        return max(max(STANDS_OUT * each.spread_ns, MIN_SHARE * each.step_ns) for each in newest)

    def disputes(self, episode: Episode) -> bool:
        """Whether an episode of the judge's would be seen here, and is not."""
        if episode.phase == "cpu" or episode.slow_share < _SEEN_SHARE:
            return False
        inside = [each for each in self.windows if each.first_step >= episode.since_step][-MIN_WINDOWS:]
        seen = [
            each
            for each in inside
            if each.is_known(episode.rank) and episode.excess_ns >= 2 * STANDS_OUT * each.spread_ns
        ]
        return len(seen) == MIN_WINDOWS and not any(each.score.get(episode.rank, 0.0) >= STANDS_OUT for each in seen)

    def _judge(self, window: _Window) -> None:
        is_first, self.seen = not self.seen, self.seen + 1
        self.windows.append(window)
        for rank in window.score:
            if window.is_slow(rank) and rank not in self._slow:
                self._slow[rank] = _Slow(rank, window.first_step, is_first, deque(maxlen=_KEPT))
        for rank, slow in list(self._slow.items()):
            if not window.is_known(rank):
                continue  # neither slow nor quiet
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
        lasted_ns = sum(count * each.step_ns for count, each in zip(steps, slow.windows, strict=True))
        lost = (count * each.excess_ns[slow.rank][Row.WORK] for count, each in zip(steps, slow.windows, strict=True))
        return bool(lasted_ns >= MIN_LASTING_NS or sum(lost) >= MIN_LOST_NS)


def held_against(findings: Findings, windows: MergedWindows, places: Mapping[int, Placement]) -> Findings:
    """What the judge has found, held against the merged windows. places: of the ranks that it knows.

    Where it does not compare all ranks of the job, slow ranks that it does not name are taken over. Where it does, they
    are kept apart, as unconfirmed. What it names and the windows would show, and do not, is disputed.
    """
    if windows.seen < MIN_WINDOWS or _do_different_work(places):
        return findings
    compared = {rank for usual in findings.usual if len(of := parse_ranges(usual.ranks)) > 1 for rank in of}
    now = {each.rank for each in findings.slow_now}
    by_device = {rank for rank, place in places.items() if place.population.endswith(BY_DEVICE)}
    episodes = [
        dataclasses.replace(each, disputed=True)
        if not each.is_over and each.rank in by_device and windows.disputes(each)
        else each
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
        return dataclasses.replace(findings, episodes=tuple(episodes), unconfirmed=tuple(unconfirmed))
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
    """What the judge alone had found: another sidecar has other windows."""
    judged = [dataclasses.replace(each, disputed=False) for each in findings.episodes if not each.by_windows]
    return dataclasses.replace(findings, episodes=tuple(judged), unconfirmed=())


def _do_different_work(places: Mapping[int, Placement]) -> bool:
    """Whether ranks are known to be of different stages, or to compute different models."""
    stages = any(name in STAGES for place in places.values() for name in place.coordinates)
    return stages or len({place.population for place in places.values()}) > 1


def _window(first_step: int, last_step: int, rows: list[MergedRow], ranks: int) -> _Window | None:
    """None where ranks cannot be compared in it."""
    work = next((row for row in rows if row.row == Row.WORK), None)
    if work is None or work.times < MIN_ROWS * ranks or work.outstanding > max(1, ranks // _MAX_SLOW_SHARE):
        return None
    median_ns = np.zeros(len(Row))
    excess_ns: dict[int, npt.NDArray[np.float64]] = {}
    score: dict[int, float] = {}
    for row in rows:
        median_ns[row.row] = row.median_ns
        if row.slowest >= 0:
            excess_ns.setdefault(row.slowest, np.zeros(len(Row)))[row.row] = row.excess_ns
            if row.row == Row.WORK:
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
    # Where no part's median is above the others', all of it a little is what the sum shows.
    phase, phase_excess_ns = phase_of(above, usual_parts) if above.any() else ("compute", 0.0)
    excess_ns = float(excess[Row.WORK])
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
        work_ns=float(usual[Row.WORK]) + excess_ns,
        others_work_ns=float(usual[Row.WORK]),
        step_ns=float(usual[Row.STEP]),
        z_score=float(np.median([each.score[rank] for each in windows])),
        slow_share=slow.slow / slow.seen,
        slow_excess_ns=excess_ns,
        more_workload=0.0,
        by_windows=True,
    )
