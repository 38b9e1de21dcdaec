"""Search for slow ranks in the rows of one judgement. Pure; detector.py describes the test."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.analysis.statistics.robust import robust_standard_deviation
from torchlens_perf.verdicts.stragglers.episodes import Episode, described, would_gain_ns
from torchlens_perf.verdicts.stragglers.excess import (
    change_point,
    excess_over_others,
    is_persistent,
    noise,
    self_normalized_threshold,
    strongest_interval,
    threshold,
    without_stalls,
    without_workload,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.verdicts.stragglers.window import SlidingWindow

# The fewest rows of an interval in which a rank is named.
MIN_ROWS = 12
# The excess must last this long or add up to this loss. For a second or two, the operating system
# or another program on the machine slows any rank.
MIN_LASTING_NS = 3e9
MIN_LOST_NS = 1e8
# A smaller excess, as a share of the step, is not worth a person's time.
MIN_SHARE = 0.03
# In steps that are long for lack of CPUs, the smallest gain of the job that is worth naming, as a
# share of the step.
_MIN_GAIN = 0.0075
# Factors on the share, time and loss above if all ranks are compared by their hosts' times. Hosts
# share their processors with other programs. In healthy runs, one host is slower by up to 5 % of
# the step for seconds.
_SHARE_OF_HOSTS, _LASTING_OF_HOSTS, _LOST_OF_HOSTS = 2.0, 5 / 3, 10.0
# Factor on MIN_SHARE if the ranks' workload differs: it is only explained by a linear fit.
WORKLOAD_FACTOR = 1.5
# The excess must exceed this many times the spread of the ranks, if there are enough ranks.
SPREAD_FACTOR = 4.0
_RANKS_WITH_A_SPREAD = 8
# More workload than other ranks for this many rows is a finding. Its effect is not subtracted.
_LASTING_WORKLOAD = 48
# An excess that is this many standard errors above the threshold is detected nearly always.
_POWER = 2.0
# A chosen interval may be shorter than all rows, by up to this factor.
_SURE = 0.8
# Above this number of candidates in one judgement, the strongest are considered.
_MAX_SUSPECTS = 16


class ComparedBins:
    """The rows of one judgement, which all present ranks have."""

    def __init__(
        self,
        window: SlidingWindow,
        present: npt.NDArray[np.int64],
        keys: npt.NDArray[np.int64],
        with_workload: Mapping[int, int],
        step_ns: float,
        running_ns: float,
    ) -> None:
        """Prepare the excess of all ranks.

        with_workload: first step of open episodes whose excess includes the part that a larger
        workload explains. step_ns: the usual step. running_ns: the usual step without ready time.
        """
        self._window = window
        self._present = present
        self._at = keys % window.columns
        self.step_ns = step_ns
        self._running_ns = running_ns
        self.keys = keys
        self.width = window.width
        self.ranks = window.ranks[present]
        self.threshold = threshold(len(self.ranks))
        self._excess = window.excess_ns[np.ix_(present, self._at)]
        self._hosts_share = float(window.by_host_share(np.ix_(present, self._at)).max())
        self._scales: dict[str, float] = {}
        self._series = {"": self._excess}
        workload = window.workload[np.ix_(present, self._at)]
        if np.isfinite(workload).all(axis=0).any():
            self._series[""] = left = without_workload(self._excess, workload, _LASTING_WORKLOAD)
            for rank, step in with_workload.items():
                if (index := self.index_of(rank)) is not None:
                    left[index, self.row_of(step) :] = self._excess[index, self.row_of(step) :]

    def has_workload_in(self, index: int, start: int) -> bool:
        """Return True if no part of the excess from row `start` on was subtracted because of the
        workload."""
        return bool((self._series[""][index, start:] == self._excess[index, start:]).all())

    def index_of(self, rank: int) -> int | None:
        index = int(np.searchsorted(self.ranks, rank))
        return index if index < len(self.ranks) and self.ranks[index] == rank else None

    def row_of(self, step: int) -> int:
        """Return the index of the first row from a step on."""
        return min(int(np.searchsorted(self.keys * self.width, step)), len(self.keys) - 1)

    def series(self, phase: str) -> npt.NDArray[np.floating[Any]]:
        """Return the excess that a phase is judged by: [ranks, rows]."""
        kind = "cpu" if phase == "cpu" else ""
        if kind not in self._series:
            ready = np.nan_to_num(self._window.no_cpu_ns[np.ix_(self._present, self._at)])
            self._series[kind] = excess_over_others(ready)
        return self._series[kind]

    def without_stalls(self, phase: str, index: int, start: int) -> npt.NDArray[np.floating[Any]]:
        """Return the excess of one rank from row `start` on, without single stalls, for means."""
        return without_stalls(self.series(phase)[index, start:], self.scale(phase))

    def scale(self, phase: str) -> float:
        kind = "cpu" if phase == "cpu" else ""
        if kind not in self._scales:
            self._scales[kind] = noise(self.series(kind))
        return self._scales[kind]

    def suspects(
        self, phase: str, over: Mapping[int, int], slow: Collection[int]
    ) -> list[tuple[int, int]]:
        """Return the index and the first slow row of each rank that is slow now.

        over: by rank, the step before which rows are ignored. slow: known slow ranks.
        """
        # Excess is compared with the step without ready time, as steps that are long for lack of
        # CPUs would hide it.
        min_rows, min_ns = MIN_ROWS, max(self._min_share * self._running_ns, self._min_of_hosts_ns)
        if phase == "cpu":
            # Scheduling favours ranks by chance for seconds, so lack of a CPU must last longer and
            # be larger.
            min_rows, min_ns = 8 * MIN_ROWS, 4 * MIN_SHARE * self.step_ns
        if len(self.keys) < min_rows:
            return []
        if (
            phase == "cpu"
            and not np.isfinite(self._window.no_cpu_ns[self._present, self._at[-1]]).all()
        ):
            return []
        # Intervals above zero detect intermittent slowness. But if a rank was always a little
        # slower, they reach far back and dilute a new excess. Intervals above half of the smallest
        # excess worth naming do not.
        candidates = [
            each
            for level in (0.0, min_ns / 2)
            for each in self._candidates(phase, min_rows, level, over)
        ]
        unusual = {index for index, _ in candidates} | {self.index_of(rank) for rank in slow}
        found: dict[int, int] = {}
        for index, start in candidates:
            since = None if index in found else self._slow_since(phase, index, start, min_ns)
            if since is not None and (phase == "cpu" or self._matters(index, start, unusual)):
                found[index] = since
        return list(found.items())

    def _candidates(
        self, phase: str, min_rows: int, level_ns: float, over: Mapping[int, int]
    ) -> list[tuple[int, int]]:
        """Return index and first row of ranks whose mean is significantly above the level.

        The strongest rank is first.
        """
        scale = self.scale(phase)
        deviations, level = self.series(phase) / scale, level_ns / scale
        found = strongest_interval(deviations, min_rows, level)
        for rank, step in over.items():
            index, first = self.index_of(rank), self.row_of(step)
            if index is not None:
                again = strongest_interval(deviations[index : index + 1, first:], min_rows, level)
                found.start[index], found.z_score[index] = again.start[0] + first, again.z_score[0]
        strongest = np.argsort(-found.z_score, kind="stable")[:_MAX_SUSPECTS].tolist()
        return [
            (index, int(found.start[index]))
            for index in strongest
            if found.z_score[index] >= self.threshold
        ]

    def _slow_since(self, phase: str, index: int, start: int, min_ns: float) -> int | None:
        """Return the first slow row of a rank that is a candidate from row `start` on, or None."""
        cpu = phase == "cpu"
        series = self.series(phase)
        interval = self.without_stalls(phase, index, start)
        mean = float(interval.mean())
        if mean < min_ns or not is_persistent(
            interval, self.scale(phase), self_normalized_threshold(len(self.ranks)), strict=cpu
        ):
            return None
        others = np.delete(series[:, start:].mean(axis=1), index)
        if len(
            self.ranks
        ) >= _RANKS_WITH_A_SPREAD and mean < SPREAD_FACTOR * robust_standard_deviation(others):
            return None
        steps = len(interval) * self.width
        if steps * self.step_ns < self._min_lasting_ns and steps * mean < self._min_lost_ns:
            return None
        if cpu and not self._is_last_for_lack_of_cpu(index, start, interval):
            return None
        return start + min(change_point(interval, mean), len(interval) - MIN_ROWS)

    def _matters(self, index: int, start: int, unusual: Collection[int | None]) -> bool:
        """Return True if the excess since row `start` is worth naming in steps that lack CPUs.

        This requires that the excess is a large enough share of the whole step, or that the job
        would gain enough without it.
        """
        excess_ns = self._series[""][index, start:]
        if float(self.without_stalls("", index, start).mean()) >= self._min_share * self.step_ns:
            return True
        usual = [
            place for other, place in enumerate(self._present.tolist()) if other not in unusual
        ]
        if not usual:
            return True
        others = np.array(usual)
        gain_ns = would_gain_ns(
            self._window, int(self._present[index]), others, self.keys[start:], excess_ns
        )
        return gain_ns >= _MIN_GAIN * self.step_ns

    @property
    def _min_lasting_ns(self) -> float:
        """MIN_LASTING_NS, or less if the rows of short steps cover less time."""
        return min(
            MIN_LASTING_NS * self._weighted_by_hosts(_LASTING_OF_HOSTS),
            _SURE * self._window.rows * self.width * self.step_ns,
        )

    @property
    def _min_share(self) -> float:
        return (
            MIN_SHARE
            * self._weighted_by_hosts(_SHARE_OF_HOSTS)
            * (1.0 if self._series[""] is self._excess else WORKLOAD_FACTOR)
        )

    @property
    def _min_lost_ns(self) -> float:
        return MIN_LOST_NS * self._weighted_by_hosts(_LOST_OF_HOSTS)

    def _weighted_by_hosts(self, factor: float) -> float:
        """Return the factor, weighted by the share of host times in own time."""
        return 1 + (factor - 1) * self._hosts_share

    @property
    def _min_of_hosts_ns(self) -> float:
        """Lack of a CPU of the rank that lacks most, weighted by the share of host times.

        It is measured for the training thread only. The autograd threads of a rank may lack as
        much.
        """
        if not self._hosts_share:
            return 0.0
        lack_ns = np.nan_to_num(self._window.no_cpu_ns[np.ix_(self._present, self._at)]).mean(
            axis=1
        )
        return self._hosts_share * float(lack_ns.max())

    def _is_last_for_lack_of_cpu(
        self, index: int, start: int, lack_ns: npt.NDArray[np.floating[Any]]
    ) -> bool:
        """Return True if the rank lacks a CPU in most steps and the others wait for it."""
        at = np.ix_(self._present, self._at[start:])
        own = self._window.own_ns[at].mean(axis=1) + self._window.no_cpu_ns[at].mean(axis=1)
        return int(own.argmax()) == index and float((lack_ns > lack_ns.mean() / 2).mean()) > 0.6

    def episode(
        self, rank: int, index: int, start: int, phase: str, *, from_start: bool
    ) -> Episode:
        """Return a new episode of a rank that is slow from row `start` on."""
        last_step = int(self.keys[-1] + 1) * self.width - 1
        episode = Episode(
            rank=rank, phase=phase, judged_from_step=int(self.keys[start]) * self.width, from_start=from_start,
            last_step=last_step, until_step=None, named_step=last_step, excess_ns=0.0, phase_excess_ns=0.0, cost_ns=0.0,
            work_ns=0.0, others_work_ns=0.0, step_ns=0.0, z_score=0.0, slow_share=0.0, slow_excess_ns=0.0,
            more_workload=0.0,
        )  # fmt: skip
        return self.described(episode, index, start)

    def described(self, episode: Episode, index: int, start: int) -> Episode:
        """Return the episode with its measurements from row `start` on."""
        series = self.series(episode.phase)[index, start:].astype(np.float64)
        others = np.delete(self._present, index)
        scale = self.scale(episode.phase)
        return described(
            episode,
            self._window,
            int(self._present[index]),
            others,
            self.keys[start:],
            series,
            scale,
        )

    def detectable_ns(self) -> float:
        """Return the smallest excess that would have been named, had it lasted through all rows."""
        rows = len(self.keys)
        error_ns = self.scale("") / float(np.sqrt(rows))
        # The excess would make the step itself longer, of which it must be a share.
        worth_ns = self._min_share * self.step_ns / (1 - self._min_share)
        min_ns = max(worth_ns, self._min_of_hosts_ns) + _POWER * error_ns
        min_ns = max(min_ns, (self.threshold + _POWER) * error_ns)
        if len(self.ranks) >= _RANKS_WITH_A_SPREAD:
            min_ns = max(
                min_ns,
                SPREAD_FACTOR * robust_standard_deviation(self.series("").mean(axis=1))
                + _POWER * error_ns,
            )
        if _SURE * rows * self.width * self.step_ns < self._min_lasting_ns:
            min_ns = max(min_ns, self._min_lost_ns / (_SURE * rows * self.width))
        return min_ns
