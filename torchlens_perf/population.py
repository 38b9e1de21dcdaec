"""Ranks that do the same work, judged as their rows come, and the times in which one of them was slow. Pure."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from torchlens_perf.board import Block, Board
from torchlens_perf.episodes import Episode, shared_cost_ns
from torchlens_perf.excess import change_point, over_since
from torchlens_perf.suspects import LEAST_ROWS, LEAST_SHARE, JudgedRows

EVERY = 4  # rows between two judgements
WARM_UP_ROWS = 4
_CHUNK_ROWS = 32


class Population:
    """Ranks that do the same work, and their episodes."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []
        self._board: Board | None = None
        self._pending: list[Block] = []
        self._judged = -1  # row number up to which was judged
        self._first: int | None = None  # row number that the judgement began with
        self._ended: set[int] = set()
        self._with_workload: set[int] = set()  # ranks that were named for an excess that their workload is part of
        self.rows = 0
        self.compared = 0
        self.last_step = -1
        self.step_ns = self.work_ns = self.wait_ns = 0.0
        self.detectable_ns = float("inf")
        self._running_ns = 0.0  # the step without the time that its thread was ready and had no CPU

    @property
    def ranks(self) -> list[int]:
        return [] if self._board is None else self._board.ranks.tolist()

    def add(self, block: Block) -> None:
        """Takes rows over; they are judged by judge()."""
        if (block.key >= 0).any():
            self._pending.append(block)

    def end(self, rank: int) -> None:
        """The rank will send no more: the others are judged on without it."""
        self._ended.add(rank)

    def judge(self, *, final: bool = False) -> None:
        """Judges what has come since, row by row, as far as all ranks have it. final: also what is left at the end."""
        for chunk in self._chunks():
            self._place(chunk)
            self._judge_ready(final=False)
        self._judge_ready(final=final)  # also without new rows: a rank that has ended is not waited for

    def _chunks(self) -> list[list[Block]]:
        """The pending rows in pieces that the board has room for, whatever came at once."""
        pending, self._pending = self._pending, []
        if not pending:
            return []
        width = max(block.width for block in pending)
        first = min(int(block.key[block.key >= 0].min()) * block.width for block in pending) // width
        last = max(int(block.key.max()) * block.width for block in pending) // width
        if last - first <= _CHUNK_ROWS:
            return [pending]
        chunks = []
        for begin in range(first, last + 1, _CHUNK_ROWS):
            pieces = [block.between(begin * width, (begin + _CHUNK_ROWS) * width) for block in pending]
            chunks.append([block for block in pieces if (block.key >= 0).any()])
        return [chunk for chunk in chunks if chunk]

    def _place(self, chunk: list[Block]) -> None:
        board = self._board
        width = max([block.width for block in chunk] + ([board.width] if board is not None else []))
        ranks = np.unique(np.concatenate([block.ranks for block in chunk] + ([board.ranks] if board else [])))
        if board is None or width != board.width:
            # Rows of another width cannot be laid beside the old ones.
            self._judged, self._first = -1, None
            board = Board(ranks, width)
        elif len(ranks) != len(board.ranks):
            board = board.with_ranks(ranks)
        self._board = board
        for block in chunk:
            board.put(block)

    def _judge_ready(self, *, final: bool) -> None:
        board = self._board
        if board is None or board.newest.max() < 0:
            return
        frontier = board.frontier(self._ended)
        if self._first is None:
            self._first = board.oldest()
            self._judged = self._first - 1
        begin = max(self._judged, frontier - board.rows)
        for end in range((begin + 1) // EVERY * EVERY + EVERY, frontier + 2, EVERY):
            self._judge_at(board, end)
        if final and frontier > self._judged:
            self._judge_at(board, frontier + 1)
        self._end_with_ranks(board)

    def _judge_at(self, board: Board, end: int) -> None:
        """Judges the rows before number `end`."""
        self._judged = end - 1
        first = self._first or 0
        keys, present = board.judged(first + (WARM_UP_ROWS if self._from_start else 0), end)
        if len(keys) < LEAST_ROWS or not len(present):
            return
        sample = present[:: max(1, len(present) // 256)]
        recent = np.ix_(sample, keys[-64:] % board.columns)
        self.step_ns = float(np.median(board.duration_ns[recent]))
        self._running_ns = float(np.median(board.duration_ns[recent] - np.nan_to_num(board.ready_ns[recent])))
        self.work_ns = float(np.median(board.parts_ns[recent].sum(axis=2)))
        self.wait_ns = float(np.median(board.wait_ns[recent]))
        if len(present) < 2:  # nobody to compare it with, as in a pipeline of one rank a stage
            return
        self.rows = max(self.rows, len(keys))
        self.compared, self.last_step = len(present), end * board.width - 1
        open_since = {episode.rank: episode.since_step for episode in self.episodes if episode.until_step is None}
        self._with_workload.intersection_update(open_since)
        with_workload = {rank: open_since[rank] for rank in self._with_workload}
        rows = JudgedRows(board, present, keys, with_workload, self.step_ns, self._running_ns)
        self._end_episodes(rows)
        self._begin_episodes(rows)
        self.detectable_ns = rows.detectable_ns()

    @property
    def _from_start(self) -> bool:
        """Whether the run's first steps were judged. Under torchrun's flag the first recorded one has number 1."""
        return self._board is not None and (self._first or 0) * self._board.width <= 1

    def _end_with_ranks(self, board: Board) -> None:
        """A rank that has ended while others went on is slow no more."""
        gone = set(board.ranks[board.newest < self._judged].tolist()) & self._ended
        for episode in self.episodes:
            if episode.until_step is None and episode.rank in gone:
                episode.until_step = episode.last_step + 1

    def _end_episodes(self, rows: JudgedRows) -> None:
        for episode in self.episodes:
            index = rows.index_of(episode.rank)
            if episode.until_step is not None or index is None:
                continue
            begin = rows.row_of(episode.since_step)
            series = rows.without_stalls(episode.phase, index, begin)
            over = over_since(series > episode.slow_excess_ns / 2, episode.slow_share, LEAST_ROWS)
            worth_ns = LEAST_SHARE * self._running_ns
            if over is None and series.mean() < worth_ns / 2:  # little is left, hidden in much noise
                over = min(int(np.cumsum(series - worth_ns).argmax()) + 1, len(series) - 1)
            if over is not None:
                episode.until_step = int(rows.keys[begin + over]) * rows.width
                continue
            if not episode.from_start and begin >= LEAST_ROWS and len(series) < 4 * LEAST_ROWS:
                # With few rows it was named with those before it; with more, it is clearer when it began.
                before = begin - LEAST_ROWS
                begin = before + change_point(rows.without_stalls(episode.phase, index, before), episode.excess_ns)
                episode.since_step = int(rows.keys[begin]) * rows.width
            rows.describe(episode, index, begin)

    def _begin_episodes(self, rows: JudgedRows) -> None:
        slow = {episode.rank for episode in self.episodes if episode.until_step is None}
        over: dict[int, int] = {}  # what has been judged and dropped is not judged again
        for episode in self.episodes:
            if episode.until_step is not None:
                over[episode.rank] = max(episode.until_step, over.get(episode.rank, 0))
        for phase in ("", "cpu"):
            for index, start in rows.suspects(phase, over, slow):
                rank = int(rows.ranks[index])
                if rank not in slow:
                    first = int(rows.keys[0])
                    from_start = self._from_start and start == 0 and first <= (self._first or 0) + WARM_UP_ROWS
                    self.episodes.append(rows.episode(rank, index, start, phase, from_start=from_start))
                    slow.add(rank)
                    if rows.has_workload_in(index, start):
                        self._with_workload.add(rank)

    def shared_cost_ns(self, ranks: Collection[int]) -> float | None:
        """What the job would gain without all of these at once, since all are slow; None where it cannot be told."""
        together = [each for each in self.episodes if each.until_step is None and each.rank in ranks]
        board = self._board
        if board is None or not together:
            return None
        keys, present = board.judged(max(each.since_step for each in together) // board.width, self._judged + 1)
        slow = np.isin(board.ranks[present], [each.rank for each in together])
        if not len(keys) or not slow.any() or slow.all():
            return None
        return shared_cost_ns(board, present[slow], present[~slow], keys)
