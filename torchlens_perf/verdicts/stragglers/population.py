"""Judgement of the ranks of a population as their step bins arrive, and their episodes. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.robust import fast_median
from torchlens_perf.verdicts.stragglers.candidates import MIN_ROWS, MIN_SHARE, ComparedBins
from torchlens_perf.verdicts.stragglers.episodes import Episode, shared_cost_ns
from torchlens_perf.verdicts.stragglers.excess import change_point, over_since
from torchlens_perf.verdicts.stragglers.window import BinBatch, SlidingWindow

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.verdicts.stragglers.own_time import OwnTime

# Rows (step bins) from one judgement to the next.
EVERY = 4
WARM_UP_ROWS = 4
_CHUNK_ROWS = 32


class Population:
    """Ranks that do the same work, and their episodes."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []
        self._window: SlidingWindow | None = None
        self._pending: list[BinBatch] = []
        # Numbers of the last and the first judged row.
        self._judged = -1
        self._first: int | None = None
        self._ended: set[int] = set()
        # Open episodes of these ranks include the excess that a larger workload explains.
        self._with_workload: set[int] = set()
        self.rows = 0
        self.compared = 0
        self.last_step = -1
        self.step_ns = self.work_ns = self.wait_ns = 0.0
        self.own: OwnTime | None = None
        self.detectable_ns = float("inf")
        # Index of the rows that the usual times are computed from.
        self._recent: tuple[npt.NDArray[np.int64], ...] | None = None
        # The usual step without ready time.
        self._running_ns = 0.0

    @property
    def ranks(self) -> list[int]:
        return [] if self._window is None else self._window.ranks.tolist()

    @property
    def steps_needed(self) -> int:
        """Number of steps after which its ranks are compared; 0 if it has fewer than two ranks."""
        window = self._window
        return (
            (WARM_UP_ROWS + MIN_ROWS + EVERY) * window.width
            if window and len(window.ranks) > 1
            else 0
        )

    def add(self, block: BinBatch) -> None:
        """Add rows, to be judged by the next judge()."""
        if (block.key >= 0).any():
            self._pending.append(block)

    def end(self, rank: int) -> None:
        """Mark a rank as ended, so that the others are judged without waiting for it."""
        self._ended.add(rank)

    def judge(self, *, final: bool = False) -> None:
        """Judge the new rows that all ranks have, in order.

        final: also judge the rows after the last full interval.
        """
        for chunk in self._pending_chunks():
            self._place(chunk)
            self._judge_ready(final=False)
        # Rows may become ready without new ones, when a rank that was waited for has ended.
        self._judge_ready(final=final)

    def _pending_chunks(self) -> list[list[BinBatch]]:
        """Return the pending rows in chunks that fit into the window."""
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
        # Only chunks with rows, as there may be long gaps between them.
        for begin in np.unique(rows // _CHUNK_ROWS * _CHUNK_ROWS).tolist():
            pieces = [
                block.between(begin * width, (begin + _CHUNK_ROWS) * width) for block in pending
            ]
            chunks.append([block for block in pieces if (block.key >= 0).any()])
        return [chunk for chunk in chunks if chunk]

    def _place(self, chunk: list[BinBatch]) -> None:
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
            window = window.with_ranks(ranks)
        self._window = window
        for block in chunk:
            window.put(block)

    def _judge_ready(self, *, final: bool) -> None:
        window = self._window
        if window is None or window.newest.max() < 0:
            return
        frontier = window.frontier(self._ended)
        if self._first is None:
            self._first = window.oldest()
            self._judged = self._first - 1
        begin = max(self._judged, frontier - window.rows)
        ends = range((begin + 1) // EVERY * EVERY + EVERY, frontier + 2, EVERY)
        before = self._judged
        # For a single rank only the usual times are computed, which need the newest rows only.
        for end in ends if len(window.ranks) > 1 else ends[-1:]:
            self._judge_at(window, end)
        if final and frontier > self._judged:
            self._judge_at(window, frontier + 1)
        # These usual times are only reported, so once a call is enough.
        if self._judged > before and self._recent is not None:
            self.work_ns = float(fast_median(window.own_ns[self._recent].ravel(), 0))
            self.own = window.mean_own_time(self._recent)
            self.wait_ns = float(fast_median(window.wait_ns[self._recent].ravel(), 0))
        self._end_with_ranks(window)

    def _judge_at(self, window: SlidingWindow, end: int) -> None:
        """Judge the rows before row number `end`."""
        self._judged, self._recent = end - 1, None
        first = self._first or 0
        keys, present = window.comparable(first + (WARM_UP_ROWS if self._from_start else 0), end)
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
        # A single rank cannot be compared, as in a pipeline with one rank for each stage.
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
        rows = ComparedBins(window, present, keys, with_workload, self.step_ns, self._running_ns)
        self.episodes = [
            each if each.is_over else self._updated_episode(each, rows) for each in self.episodes
        ]
        self._begin_episodes(rows)
        self.detectable_ns = rows.detectable_ns()

    @property
    def _from_start(self) -> bool:
        """True if the run's first steps were judged.

        The first recorded step may have the number 1, with torchrun.
        """
        return self._window is not None and (self._first or 0) * self._window.width <= 1

    def _end_with_ranks(self, window: SlidingWindow) -> None:
        """End the episodes of ranks that have ended while others went on."""
        gone = set(window.ranks[window.newest < self._judged].tolist()) & self._ended
        self.episodes = [
            (
                dataclasses.replace(each, until_step=each.last_step + 1)
                if not each.is_over and each.rank in gone
                else each
            )
            for each in self.episodes
        ]

    def _updated_episode(self, episode: Episode, rows: ComparedBins) -> Episode:
        """Return an open episode with the newest values, or with its end."""
        index = rows.index_of(episode.rank)
        if index is None:
            return episode
        begin = rows.row_of(episode.judged_from_step)
        series = rows.without_stalls(episode.phase, index, begin)
        over = over_since(series > episode.slow_excess_ns / 2, episode.slow_share, MIN_ROWS)
        worth_ns = MIN_SHARE * self._running_ns
        # With much noise, the test above cannot show that only little of the excess is left.
        if over is None and series.mean() < worth_ns / 2:
            over = min(int(np.cumsum(series - worth_ns).argmax()) + 1, len(series) - 1)
        if over is not None:
            return dataclasses.replace(
                episode, until_step=int(rows.keys[begin + over]) * rows.width
            )
        if not episode.from_start and begin >= MIN_ROWS and len(series) < 4 * MIN_ROWS:
            # At first, the excess may only be significant together with earlier rows. With more
            # rows, the first slow row can be determined better. It stays after the end of the
            # rank's previous episode, which was reported.
            before = max(
                begin - MIN_ROWS, rows.row_of(self._ends_of_last_episodes().get(episode.rank, 0))
            )
            begin = before + change_point(
                rows.without_stalls(episode.phase, index, before), episode.excess_ns
            )
            episode = dataclasses.replace(
                episode, judged_from_step=int(rows.keys[begin]) * rows.width
            )
        return rows.described(episode, index, begin)

    def _begin_episodes(self, rows: ComparedBins) -> None:
        slow = {episode.rank for episode in self.episodes if not episode.is_over}
        # Rows of earlier episodes are not judged again.
        over = self._ends_of_last_episodes()
        for phase in ("", "cpu"):
            for index, start in rows.suspects(phase, over, slow):
                rank = int(rows.ranks[index])
                if rank not in slow:
                    first = int(rows.keys[0])
                    from_start = (
                        self._from_start
                        and start == 0
                        and first <= (self._first or 0) + WARM_UP_ROWS
                    )
                    self.episodes.append(
                        rows.episode(rank, index, start, phase, from_start=from_start)
                    )
                    slow.add(rank)
                    if rows.has_workload_in(index, start):
                        self._with_workload.add(rank)

    def _ends_of_last_episodes(self) -> dict[int, int]:
        """Return until_step of each rank's newest ended episode."""
        over: dict[int, int] = {}
        for episode in self.episodes:
            if episode.until_step is not None:
                over[episode.rank] = max(episode.until_step, over.get(episode.rank, 0))
        return over

    def share_costs(self, cost_ns: Mapping[int, float | None]) -> None:
        """Set the shared costs of the open episodes of these ranks."""
        self.episodes = [
            (
                dataclasses.replace(each, shared_cost_ns=cost_ns[each.rank])
                if not each.is_over and each.rank in cost_ns
                else each
            )
            for each in self.episodes
        ]

    def shared_costs_ns(self) -> dict[int, float | None]:
        """Return the shared cost by slow rank: the gain without all of them, over the steps in
        which all are slow.

        A cost is None if it is not known.
        """
        together, window = [each for each in self.episodes if not each.is_over], self._window
        ranks = [each.rank for each in together]
        if window is None or not together:
            return {}
        keys, present = window.comparable(
            max(each.judged_from_step for each in together) // window.width, self._judged + 1
        )
        slow = np.isin(window.ranks[present], ranks)
        if not len(keys) or not slow.any() or slow.all():
            return dict.fromkeys(ranks)
        cost_ns = shared_cost_ns(window, present[slow], present[~slow], keys)
        # A cost never exceeds the excess, as in described(): the job may also wait for a lack of
        # CPU, which is not work.
        return dict.fromkeys(ranks, min(cost_ns, max(each.excess_ns for each in together)))
