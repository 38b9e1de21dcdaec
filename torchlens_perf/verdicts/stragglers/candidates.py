"""Search for slow ranks in their newest rows. Pure. detector.py describes the statistical test."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.robust import robust_standard_deviation
from torchlens_perf.verdicts.stragglers.episodes import Episode, measure_episode, possible_gain_ns
from torchlens_perf.verdicts.stragglers.excess import (
    detection_threshold,
    estimate_noise,
    excess_over_others,
    find_change_point,
    find_strongest_intervals,
    is_persistent,
    limit_stalls,
    persistence_threshold,
    subtract_workload_effect,
)
from torchlens_perf.verdicts.stragglers.window import SlidingWindow

# Smallest number of rows in which an excess makes a rank slow.
MIN_ROWS = 12
# The excess must last this long or add up to this loss. The operating system or another program may
# slow any rank for a second or two.
MIN_LASTING_NS = 3e9
MIN_LOST_NS = 1e8
# An excess below this share of the step is not worth investigating.
MIN_SHARE = 0.03
# If steps are long because CPUs are lacking, a rank is named only if the job would gain at least
# this share of the step without the rank's excess.
_MIN_GAIN = 0.005
# Factors on the share, time and loss above if ranks are compared by host times. Hosts share their
# CPUs with other programs. Even in healthy runs, a host may be slower by 5 % of the step for some
# seconds.
_SHARE_OF_HOSTS, _LASTING_OF_HOSTS, _LOST_OF_HOSTS = 2.0, 5 / 3, 10.0
# Factor on the threshold of standard errors, likewise. What other programs take from a host lasts for
# many rows, so that its rows are not independent and the mean's error is underestimated.
_ERRORS_OF_HOSTS = 2.0
# Factor on that threshold and on MIN_SHARE for ranks that wait for a CPU all the time. Programs that
# take CPUs also take caches and memory bandwidth, often those of one rank for the whole run.
_WITH_CONTENTION = 2.5
# If hosts set the pace, a slow rank is often the last one: the job gains at least this share of its
# excess without it. If hosts only wander, another rank is last in most rows.
_GAIN_OF_HOSTS = 0.5
# Factor on MIN_SHARE if the ranks' workload differs. A linear fit explains the workload's effect
# only roughly.
WORKLOAD_FACTOR = 1.5
# The excess must exceed this many times the spread of the ranks, if there are enough ranks.
SPREAD_FACTOR = 4.0
_RANKS_WITH_A_SPREAD = 8
# If a rank has more workload than other ranks for this many rows, the workload is reported, and its
# effect is not subtracted from the rank's excess.
_LASTING_WORKLOAD = 48
# An excess that is this many standard errors above the threshold is almost always detected.
_POWER = 2.0
# The strongest interval may be shorter than all rows, by up to this factor.
_SURE = 0.8
# Only this many candidates are considered, beginning with the strongest.
_MAX_SUSPECTS = 16


class SuspectSearch:
    """Search for slow ranks in the rows that all present ranks have."""

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

        with_workload: by rank, the first step of open episodes whose excess includes the effect of
        a larger workload. step_ns: usual duration of a step. running_ns: usual duration of a step
        without the time in which ranks lacked a CPU.
        """
        self._window = window
        self._present = present
        self._at = keys % window.columns
        self.step_ns = step_ns
        self._running_ns = running_ns
        self.keys = keys
        self.width = window.width
        self.ranks = window.ranks[present]
        self._excess = window.excess_ns[np.ix_(present, self._at)]
        self._hosts_share = float(window.launch_shares(np.ix_(present, self._at)).max())
        contention = 1 - running_ns / step_ns if step_ns else 0.0
        self._contention_factor = 1 + (_WITH_CONTENTION - 1) * contention
        self.threshold = detection_threshold(len(self.ranks)) * max(
            self._weight_by_host_share(_ERRORS_OF_HOSTS), self._contention_factor
        )
        self._scales: dict[str, float] = {}
        self._series = {"": self._excess}
        workload = window.workload[np.ix_(present, self._at)]
        if np.isfinite(workload).all(axis=0).any():
            self._series[""] = left = subtract_workload_effect(
                self._excess, workload, _LASTING_WORKLOAD
            )
            for rank, step in with_workload.items():
                if (index := self.index_of(rank)) is not None:
                    left[index, self.row_from_step(step) :] = self._excess[
                        index, self.row_from_step(step) :
                    ]

    def includes_workload_excess(self, index: int, start: int) -> bool:
        """Return True if the excess from row `start` on includes the effect of the workload."""
        return bool((self._series[""][index, start:] == self._excess[index, start:]).all())

    def index_of(self, rank: int) -> int | None:
        index = int(np.searchsorted(self.ranks, rank))
        return index if index < len(self.ranks) and self.ranks[index] == rank else None

    def row_from_step(self, step: int) -> int:
        """Return the index of the first row that begins at a step or later."""
        return min(int(np.searchsorted(self.keys * self.width, step)), len(self.keys) - 1)

    def excess_series(self, phase: str) -> npt.NDArray[np.floating[Any]]:
        """Return the excess [ranks, rows]: in lack of a CPU for the phase "cpu", else in work."""
        kind = "cpu" if phase == "cpu" else ""
        if kind not in self._series:
            ready = np.nan_to_num(self._window.no_cpu_ns[np.ix_(self._present, self._at)])
            self._series[kind] = excess_over_others(ready)
        return self._series[kind]

    def stall_free_excess(
        self, phase: str, index: int, start: int
    ) -> npt.NDArray[np.floating[Any]]:
        """Return the excess of one rank from row `start` on, with single stalls reduced."""
        return limit_stalls(self.excess_series(phase)[index, start:], self.noise_of(phase))

    def noise_of(self, phase: str) -> float:
        kind = "cpu" if phase == "cpu" else ""
        if kind not in self._scales:
            self._scales[kind] = estimate_noise(self.excess_series(kind))
        return self._scales[kind]

    def find_suspects(
        self, phase: str, over: Mapping[int, int], slow: Collection[int]
    ) -> list[tuple[int, int]]:
        """Return the index and the first slow row of each rank that is slow now.

        over: by rank, the step before which rows are ignored. slow: ranks known to be slow.
        """
        # The excess is compared with the step without lack of CPUs. Otherwise, steps that are long
        # because CPUs are lacking would hide the excess.
        min_rows, min_ns = MIN_ROWS, max(self._min_share * self._running_ns, self._host_cpu_lack_ns)
        if phase == "cpu":
            # The scheduler may favour some ranks for seconds. Lack of a CPU must therefore last
            # longer and be larger than an excess in work.
            min_rows, min_ns = 8 * MIN_ROWS, 4 * MIN_SHARE * self.step_ns
        if len(self.keys) < min_rows:
            return []
        if (
            phase == "cpu"
            and not np.isfinite(self._window.no_cpu_ns[self._present, self._at[-1]]).all()
        ):
            return []
        # Intervals above zero detect intermittent slowness. However, if a rank was always slightly
        # slower, intervals above zero begin early and dilute a new excess. Therefore, also search
        # for intervals above half of the smallest excess worth naming.
        candidates = [
            each
            for level in (0.0, min_ns / 2)
            for each in self._find_candidates(phase, min_rows, level, over)
        ]
        unusual = {index for index, _ in candidates} | {self.index_of(rank) for rank in slow}
        found: dict[int, int] = {}
        for index, start in candidates:
            since = None if index in found else self._first_slow_row(phase, index, start, min_ns)
            if since is not None and (
                phase == "cpu" or self._is_worth_naming(index, start, unusual)
            ):
                found[index] = since
        return list(found.items())

    def _find_candidates(
        self, phase: str, min_rows: int, level_ns: float, over: Mapping[int, int]
    ) -> list[tuple[int, int]]:
        """Return index and first row of ranks whose mean excess is significantly above the level.

        The rank with the most significant excess is first.
        """
        scale = self.noise_of(phase)
        deviations, level = self.excess_series(phase) / scale, level_ns / scale
        found = find_strongest_intervals(deviations, min_rows, level)
        for rank, step in over.items():
            index, first = self.index_of(rank), self.row_from_step(step)
            if index is not None:
                again = find_strongest_intervals(
                    deviations[index : index + 1, first:], min_rows, level
                )
                found.start[index], found.z_score[index] = again.start[0] + first, again.z_score[0]
        strongest = np.argsort(-found.z_score, kind="stable")[:_MAX_SUSPECTS].tolist()
        return [
            (index, int(found.start[index]))
            for index in strongest
            if found.z_score[index] >= self.threshold
        ]

    def _first_slow_row(self, phase: str, index: int, start: int, min_ns: float) -> int | None:
        """Return the first slow row of a candidate whose interval begins at `start`, or None."""
        cpu = phase == "cpu"
        series = self.excess_series(phase)
        interval = self.stall_free_excess(phase, index, start)
        mean = float(interval.mean())
        if mean < min_ns or not is_persistent(
            interval, self.noise_of(phase), persistence_threshold(len(self.ranks)), strict=cpu
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
        if cpu and not self._delays_others_by_lack_of_cpu(index, start, interval):
            return None
        return start + min(find_change_point(interval, mean), len(interval) - MIN_ROWS)

    def _is_worth_naming(self, index: int, start: int, unusual: Collection[int | None]) -> bool:
        """Return True if the excess from row `start` on is worth naming.

        The excess must be a large enough share of the whole step, or the job must gain enough
        without it. If hosts set the pace, the job must gain enough of the excess.
        """
        excess_ns = self._series[""][index, start:]
        mean_ns = float(self.stall_free_excess("", index, start).mean())
        is_large = mean_ns >= self._min_share * self.step_ns
        usual = [
            place for other, place in enumerate(self._present.tolist()) if other not in unusual
        ]
        if not usual or (is_large and not self._hosts_share):
            return True
        others = np.array(usual)
        gain_ns = possible_gain_ns(
            self._window, int(self._present[index]), others, self.keys[start:], excess_ns
        )
        if is_large:
            return gain_ns >= min(_GAIN_OF_HOSTS, self._hosts_share) * mean_ns
        return gain_ns >= _MIN_GAIN * self.step_ns

    @property
    def _min_lasting_ns(self) -> float:
        """The time for which an excess must last, or less if all rows cover less time."""
        return min(
            MIN_LASTING_NS * self._weight_by_host_share(_LASTING_OF_HOSTS),
            _SURE * self._window.rows * self.width * self.step_ns,
        )

    @property
    def _min_share(self) -> float:
        return (
            MIN_SHARE
            * max(self._weight_by_host_share(_SHARE_OF_HOSTS), self._contention_factor)
            * (1.0 if self._series[""] is self._excess else WORKLOAD_FACTOR)
        )

    @property
    def _min_lost_ns(self) -> float:
        return MIN_LOST_NS * self._weight_by_host_share(_LOST_OF_HOSTS)

    def _weight_by_host_share(self, factor: float) -> float:
        """Return the factor if ranks are compared by host times only, and 1 without host times.

        If only a share of their times is host time, return a value between 1 and the factor.
        """
        return 1 + (factor - 1) * self._hosts_share

    @property
    def _host_cpu_lack_ns(self) -> float:
        """The longest mean lack of a CPU of any rank, weighted by the share of host times.

        The lack is measured for the training thread. Autograd threads may lack a CPU for as long.
        """
        if not self._hosts_share:
            return 0.0
        lack_ns = np.nan_to_num(self._window.no_cpu_ns[np.ix_(self._present, self._at)]).mean(
            axis=1
        )
        return self._hosts_share * float(lack_ns.max())

    def _delays_others_by_lack_of_cpu(
        self, index: int, start: int, lack_ns: npt.NDArray[np.floating[Any]]
    ) -> bool:
        """Return True if the rank lacks a CPU in most steps and other ranks wait for it."""
        at = np.ix_(self._present, self._at[start:])
        own = self._window.own_ns[at].mean(axis=1) + self._window.no_cpu_ns[at].mean(axis=1)
        return int(own.argmax()) == index and float((lack_ns > lack_ns.mean() / 2).mean()) > 0.6

    def begin_episode(
        self, rank: int, index: int, start: int, phase: str, *, from_start: bool
    ) -> Episode:
        """Return the new episode of a rank that is slow from row `start` on."""
        last_step = int(self.keys[-1] + 1) * self.width - 1
        episode = Episode(
            rank=rank, phase=phase, judged_from_step=int(self.keys[start]) * self.width, from_start=from_start,
            last_step=last_step, until_step=None, named_step=last_step, excess_ns=0.0, phase_excess_ns=0.0, cost_ns=0.0,
            work_ns=0.0, others_work_ns=0.0, step_ns=0.0, z_score=0.0, slow_share=0.0, slow_excess_ns=0.0,
            more_workload=0.0,
        )  # fmt: skip
        return self.measure_episode(episode, index, start)

    def measure_episode(self, episode: Episode, index: int, start: int) -> Episode:
        """Return the episode with its measurements from row `start` on."""
        series = self.excess_series(episode.phase)[index, start:].astype(np.float64)
        others = np.delete(self._present, index)
        scale = self.noise_of(episode.phase)
        return measure_episode(
            episode,
            self._window,
            int(self._present[index]),
            others,
            self.keys[start:],
            series,
            scale,
        )

    def compute_detectable_ns(self) -> float:
        """Return the smallest excess that would be detected if a rank had it in all rows."""
        rows = len(self.keys)
        error_ns = self.noise_of("") / float(np.sqrt(rows))
        # The excess is compared with a step that includes the excess. If ranks wait for CPUs in turn,
        # each is the last one in its share of the steps.
        worth_ns = max(
            self._min_share * self._running_ns,
            min(self._min_share, _MIN_GAIN * len(self.ranks)) * self.step_ns,
        )
        min_ns = max(worth_ns / (1 - self._min_share), self._host_cpu_lack_ns) + _POWER * error_ns
        min_ns = max(min_ns, (self.threshold + _POWER) * error_ns)
        if len(self.ranks) >= _RANKS_WITH_A_SPREAD:
            min_ns = max(
                min_ns,
                SPREAD_FACTOR * robust_standard_deviation(self.excess_series("").mean(axis=1))
                + _POWER * error_ns,
            )
        if _SURE * rows * self.width * self.step_ns < self._min_lasting_ns:
            min_ns = max(min_ns, self._min_lost_ns / (_SURE * rows * self.width))
        return min_ns
