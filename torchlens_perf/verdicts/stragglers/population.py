"""A population: ranks that do the same work. Ranks are judged as their rows arrive. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.analysis.statistics.robust import fast_median
from torchlens_perf.analysis.statistics.step_bins import BinBatch
from torchlens_perf.verdicts.stragglers.candidates import MIN_ROWS, MIN_SHARE, SuspectSearch
from torchlens_perf.verdicts.stragglers.episodes import Episode, SharedCost, compute_shared_costs
from torchlens_perf.verdicts.stragglers.excess import find_change_point, find_recovery
from torchlens_perf.verdicts.stragglers.own_time import OwnTime
from torchlens_perf.verdicts.stragglers.placement import SlowRankGroup
from torchlens_perf.verdicts.stragglers.window import SlidingWindow

# Ranks are judged each time this many rows have arrived.
EVERY = 4
WARM_UP_ROWS = 4
_CHUNK_ROWS = 32


class JudgedRows(NamedTuple):
    """Rows that all ranks of a population have. Times are arrays [ranks, rows] in ns."""

    width: int
    ranks: npt.NDArray[np.int64]
    key: npt.NDArray[np.int64]
    """Row numbers: first step / width, ascending."""
    parts_ns: npt.NDArray[np.float32]
    """Work by part: [ranks, rows, len(OWN_PARTS)]."""
    duration_ns: npt.NDArray[np.float32]
    wait_ns: npt.NDArray[np.float32]
    ready_ns: npt.NDArray[np.float32]


class Population:
    """Ranks that do the same work, with the episodes in which they were slow."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []
        self._window: SlidingWindow | None = None
        self._pending: list[BinBatch] = []
        # Numbers of the last judged row and of the first row.
        self._judged = -1
        self._first: int | None = None
        self.ended: set[int] = set()
        """Ranks that have ended. Judging does not wait for their rows."""
        # Ranks whose open episodes include the effect of a larger workload.
        self._with_workload: set[int] = set()
        self.rows = 0
        self.compared = 0
        self.last_step = -1
        self.step_ns = self.work_ns = self.wait_ns = 0.0
        self.own: OwnTime | None = None
        self.detectable_ns = float("inf")
        # Index of the rows from which usual times are computed.
        self._recent: tuple[npt.NDArray[np.int64], ...] | None = None
        # Duration of the usual step without the time in which a rank had no CPU.
        self._running_ns = 0.0

    @property
    def ranks(self) -> list[int]:
        return [] if self._window is None else self._window.ranks.tolist()

    @property
    def steps_needed(self) -> int:
        """Number of steps after which the ranks are compared; 0 with fewer than two ranks."""
        window = self._window
        return (
            (WARM_UP_ROWS + MIN_ROWS + EVERY) * window.width
            if window and len(window.ranks) > 1
            else 0
        )

    def add_rows(self, block: BinBatch) -> None:
        """Add rows, which the next call of judge() judges."""
        if (block.key >= 0).any():
            self._pending.append(block)

    def judge(self, *, final: bool = False) -> None:
        """Judge the new rows that all ranks have, in order.

        final: True if the run has ended, so that the last rows are judged as well.
        """
        for chunk in self._pending_chunks():
            self._put_in_window(chunk)
            self._judge_complete_rows(final=False)
        # Earlier rows are also complete once the ranks that lack them have ended.
        self._judge_complete_rows(final=final)

    def _pending_chunks(self) -> list[list[BinBatch]]:
        """Return the pending rows in chunks of steps that fit into the window."""
        pending, self._pending = self._pending, []
        if not pending:
            return []
        width = max(block.width for block in pending)
        rows = np.unique(
            np.concatenate([block.key[block.key >= 0] * block.width // width for block in pending])
        )
        if rows[-1] - rows[0] <= _CHUNK_ROWS:
            return [pending]
        chunks = []
        # There may be long gaps between rows, so only chunks with rows are returned.
        for begin in np.unique(rows // _CHUNK_ROWS * _CHUNK_ROWS).tolist():
            pieces = [
                block.select_steps(begin * width, (begin + _CHUNK_ROWS) * width)
                for block in pending
            ]
            chunks.append([block for block in pieces if (block.key >= 0).any()])
        return [chunk for chunk in chunks if chunk]

    def _put_in_window(self, chunk: list[BinBatch]) -> None:
        window = self._window
        width = max(
            [block.width for block in chunk] + ([window.width] if window is not None else [])
        )
        ranks = np.unique(
            np.concatenate([block.ranks for block in chunk] + ([window.ranks] if window else []))
        )
        if window is None or width != window.width:
            # Rows of different widths cannot be compared.
            self._judged, self._first = -1, None
            window = SlidingWindow(ranks, width)
        elif len(ranks) != len(window.ranks):
            window = window.with_more_ranks(ranks)
        self._window = window
        for block in chunk:
            window.add_rows(block)

    def _judge_complete_rows(self, *, final: bool) -> None:
        window = self._window
        if window is None or window.newest.max() < 0:
            return
        frontier = window.newest_complete_row(self.ended)
        if self._first is None:
            self._first = window.oldest_row()
            self._judged = self._first - 1
        begin = max(self._judged, frontier - window.rows)
        ends = range((begin + 1) // EVERY * EVERY + EVERY, frontier + 2, EVERY)
        before = self._judged
        # For a single rank, only usual times are computed, from the newest rows.
        for end in ends if len(window.ranks) > 1 else ends[-1:]:
            self._judge_rows_before(window, end)
        if final and frontier > self._judged:
            self._judge_rows_before(window, frontier + 1)
        # Usual times are only reported, so computing them once for each call is enough.
        if self._judged > before and self._recent is not None:
            self.work_ns = float(fast_median(window.own_ns[self._recent].ravel(), 0))
            self.own = window.mean_own_time(self._recent)
            self.wait_ns = float(fast_median(window.wait_ns[self._recent].ravel(), 0))
        # Ranks that have ended while other ranks still run.
        gone = set(window.ranks[window.newest < self._judged].tolist()) & self.ended
        self.episodes = [
            (
                dataclasses.replace(each, until_step=each.last_step + 1)
                if not each.is_over and each.rank in gone
                else each
            )
            for each in self.episodes
        ]

    def _judge_rows_before(self, window: SlidingWindow, end: int) -> None:
        """Judge the ranks by the rows before row number `end`."""
        self._judged, self._recent = end - 1, None
        first = self._first or 0
        keys, present = window.comparable_rows(
            first + (WARM_UP_ROWS if self._sees_first_steps else 0), end
        )
        if len(keys) < MIN_ROWS or not len(present):
            return
        self._recent = recent = np.ix_(
            present[:: max(1, len(present) // 256)], keys[-64:] % window.columns
        )
        duration_ns, ready_ns = window.duration_ns[recent].ravel(), window.no_cpu_ns[recent].ravel()
        self.step_ns = float(fast_median(duration_ns, 0))
        self._running_ns = float(
            fast_median(duration_ns - np.where(np.isnan(ready_ns), 0, ready_ns), 0)
        )
        # A single rank cannot be compared, for example in a pipeline with one rank per stage.
        if len(present) < 2:
            return
        self.rows = max(self.rows, len(keys))
        self.compared, self.last_step = len(present), end * window.width - 1
        open_since = {
            episode.rank: episode.judged_from_step
            for episode in self.episodes
            if not episode.is_over
        }
        self._with_workload.intersection_update(open_since)
        with_workload = {rank: open_since[rank] for rank in self._with_workload}
        rows = SuspectSearch(window, present, keys, with_workload, self.step_ns, self._running_ns)
        self.episodes = [
            each if each.is_over else self._update_episode(each, rows) for each in self.episodes
        ]
        self._begin_episodes(rows)
        self.detectable_ns = rows.compute_detectable_ns()

    def read_newest_rows(self, most: int) -> JudgedRows | None:
        """Return the newest judged rows after the warm-up; None if a rank lacks them."""
        window = self._window
        if window is None or self._judged < 0:
            return None
        begin = (self._first or 0) + -(-WARM_UP_STEPS // window.width)
        keys, present = window.comparable_rows(begin, self._judged + 1)
        if len(present) < len(window.ranks):
            return None
        keys = keys[-most:]
        at = np.ix_(present, keys % window.columns)
        return JudgedRows(
            window.width,
            window.ranks,
            keys,
            window.parts_ns[at],
            window.duration_ns[at],
            window.wait_ns[at],
            window.ready_ns[at],
        )

    @property
    def _sees_first_steps(self) -> bool:
        """True if the first rows contain the run's first steps.

        With torchrun, the first recorded step may have the number 1.
        """
        return self._window is not None and (self._first or 0) * self._window.width <= 1

    def _update_episode(self, episode: Episode, rows: SuspectSearch) -> Episode:
        """Return an open episode with new measurements, or with its end if the rank has
        recovered."""
        index = rows.index_of(episode.rank)
        if index is None:
            return episode
        begin = rows.row_from_step(episode.judged_from_step)
        series = rows.stall_free_excess(episode.phase, index, begin)
        over = find_recovery(series > episode.slow_excess_ns / 2, episode.slow_share, MIN_ROWS)
        worth_ns = MIN_SHARE * self._running_ns
        # With much noise, the test above cannot show that the excess has become small. An excess of
        # fewer than two standard errors may be chance.
        if over is None and (series.mean() < worth_ns / 2 or episode.z_score < 2.0):
            over = min(int(np.cumsum(series - worth_ns).argmax()) + 1, len(series) - 1)
        if over is not None:
            return dataclasses.replace(
                episode, until_step=int(rows.keys[begin + over]) * rows.width
            )
        if episode.from_start or (begin >= MIN_ROWS and len(series) < 4 * MIN_ROWS):
            # With more rows, the first slow row can be determined more precisely. The end of the
            # rank's previous episode was reported, so the new episode must not begin before it.
            before = max(
                begin - MIN_ROWS,
                rows.row_from_step(self._ends_of_last_episodes().get(episode.rank, 0)),
            )
            change = before + find_change_point(
                rows.stall_free_excess(episode.phase, index, before), episode.excess_ns
            )
            # The first rows of a rank that is slow from the start may have little excess by chance.
            stays = episode.from_start and change < begin + MIN_ROWS
            begin = begin if stays else change
            episode = dataclasses.replace(
                episode, judged_from_step=int(rows.keys[begin]) * rows.width, from_start=stays
            )
        return rows.measure_episode(episode, index, begin)

    def _begin_episodes(self, rows: SuspectSearch) -> None:
        slow = {episode.rank for episode in self.episodes if not episode.is_over}
        # The rows of earlier episodes are not judged again.
        over = self._ends_of_last_episodes()
        for phase in ("", "cpu"):
            for index, start in rows.find_suspects(phase, over, slow):
                rank = int(rows.ranks[index])
                if rank not in slow:
                    first = int(rows.keys[0])
                    from_start = (
                        self._sees_first_steps
                        and start == 0
                        and first <= (self._first or 0) + WARM_UP_ROWS
                    )
                    self.episodes.append(
                        rows.begin_episode(rank, index, start, phase, from_start=from_start)
                    )
                    slow.add(rank)
                    if rows.includes_workload_excess(index, start):
                        self._with_workload.add(rank)

    def _ends_of_last_episodes(self) -> dict[int, int]:
        """Return, for each rank with an ended episode, the until_step of its newest one."""
        # The episodes of a rank are in the order of their steps.
        return {each.rank: each.until_step for each in self.episodes if each.until_step is not None}

    def compute_shared_costs(self, groups: Sequence[SlowRankGroup]) -> dict[int, SharedCost | None]:
        """Return the shared cost for each slow rank; None if it is not known.

        groups: slow ranks that are repaired together.

        The shared cost is the time by which steps would end earlier without all slow ranks, in the
        steps in which all of them are slow.
        """
        together, window = [each for each in self.episodes if not each.is_over], self._window
        ranks = [each.rank for each in together]
        if window is None or not together:
            return {}
        keys, present = window.comparable_rows(
            max(each.judged_from_step for each in together) // window.width, self._judged + 1
        )
        slow = np.isin(window.ranks[present], ranks)
        if not len(keys) or not slow.any() or slow.all():
            return dict.fromkeys(ranks)
        numbers = window.ranks[present[slow]]
        unit_of = {rank: -1 - at for at, group in enumerate(groups) for rank in group.ranks}
        units = np.array([unit_of.get(rank, rank) for rank in numbers.tolist()])
        found = compute_shared_costs(window, present[slow], present[~slow], keys, units)
        # As in measure_episode(), a cost never exceeds the excess: the job may also wait because a
        # rank lacks a CPU, but this wait is not part of the rank's excess.
        most_ns = max(each.excess_ns for each in together)
        from_step = max(each.since_step for each in together)
        limited = [
            SharedCost(
                min(each.cost_ns, most_ns),
                min(each.gain_ns, most_ns),
                min(each.lone_ns, most_ns),
                from_step,
            )
            for each in found
        ]
        return dict.fromkeys(ranks) | dict(zip(numbers.tolist(), limited, strict=True))
