"""Which rank is slow, since when, in which phase, and what it costs. Pure: rows of ranks in, episodes out.

Step times equalise in synchronous training, so they name nobody. Judged is each rank's work: its step without the time
blocked in collectives, and without the time that its thread was ready and had no CPU. A rank's excess is its work above
the median of the other ranks that do the same, in the same step, so what makes all ranks slow together cancels.

At every EVERY-th row, for each rank: over which interval that ends now is its mean excess most standard errors above
half of what is worth naming (a window-limited generalised likelihood ratio; Lai, IEEE Trans. Inf. Theory 44, 1998)?
Single values are clipped, so that no single stall makes a verdict. A rank is named when its mean there is farther above
zero than chance gives among so many ranks and intervals, when the excess is worth a person's time and larger than the
ranks differ anyway, and when it lasts through the interval. It is dropped when the same test says that it has gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.board import Block, Board
from torchlens_perf.episodes import Episode, describe, gain_ns, shared_cost_ns
from torchlens_perf.excess import (
    change_point,
    excess_over_others,
    lasts,
    noise,
    over_since,
    own_errors,
    spread,
    strength,
    strongest_interval,
    threshold,
    without_stalls,
    without_workload,
)
from torchlens_perf.grouping import groups_of
from torchlens_perf.rank_ranges import ranges
from torchlens_perf.step_rows import Rows

if TYPE_CHECKING:
    import numpy.typing as npt

EVERY = 4  # rows between two judgements
LEAST_ROWS = 12  # of an interval that names somebody
WARM_UP_ROWS = 4
_LASTING_WORKLOAD = 48  # rows with more workload than the others, from which on that is a finding, and no excuse
WORKLOAD_FACTOR = 1.5  # times that, where the ranks' workload differs: what it explains is a straight line at best
LEAST_SHARE = 0.03  # of the step, or of the part of it with a CPU where that part is seen to cost the job something
_LEAST_GAIN = 0.0075  # of the step: what the job would gain without that
SPREAD_FACTOR = 4.0  # times the ranks' own spread, where there are enough ranks to know it
_RANKS_WITH_A_SPREAD = 8
_CHUNK_ROWS = 32
_MOST_SUSPECTS = 16  # at a time: if more ranks are slow at once, the slowest go first


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """What is known of a rank besides its times."""

    host: str = ""
    population: str = ""
    """Ranks with the same text do the same work, and are compared."""
    coordinates: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Its position in each dimension of the job's mesh: {"dp": 3, "pp": 0}."""


@dataclasses.dataclass(frozen=True)
class Usual:
    """What a population's ranks do in a step, in ns: medians over ranks and the newest rows."""

    population: str
    ranks: str
    """As ranges: "0-7"."""
    work_ns: float
    wait_ns: float


@dataclasses.dataclass(frozen=True)
class Findings:
    """The state of the judgement."""

    episodes: tuple[Episode, ...]
    rows: int
    """Common rows that were judged."""
    step_ns: float
    detectable_ns: float
    """The smallest excess that would have been named by now, had it lasted for the last 64 rows; inf: none."""
    compared: int
    """Ranks that were compared."""
    last_step: int
    usual: tuple[Usual, ...] = ()
    """By population."""

    def to_json(self) -> dict[str, Any]:
        value = dataclasses.asdict(self)
        value["episodes"] = [episode.to_json() for episode in self.episodes]
        value["detectable_ns"] = self.detectable_ns if np.isfinite(self.detectable_ns) else None
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Findings:
        detectable = value["detectable_ns"]
        return cls(
            **{
                **value,
                "episodes": tuple(Episode(**episode) for episode in value["episodes"]),
                "detectable_ns": float("inf") if detectable is None else detectable,
                "usual": tuple(Usual(**usual) for usual in value["usual"]),
            }
        )


NOTHING = Findings((), 0, 0.0, float("inf"), 0, -1)


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
        self._running_ns = 0.0  # the step without the time that its thread was ready and had no CPU
        self.detectable_ns = float("inf")

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
        rows = _Judged(board, present, keys, {rank: open_since[rank] for rank in self._with_workload})
        self._end_episodes(rows)
        self._begin_episodes(rows)
        self.detectable_ns = rows.detectable_ns(self.step_ns)

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

    def _end_episodes(self, rows: _Judged) -> None:
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

    def _begin_episodes(self, rows: _Judged) -> None:
        slow = {episode.rank for episode in self.episodes if episode.until_step is None}
        over: dict[int, int] = {}  # what has been judged and dropped is not judged again
        for episode in self.episodes:
            if episode.until_step is not None:
                over[episode.rank] = max(episode.until_step, over.get(episode.rank, 0))
        for phase in ("", "cpu"):
            for index, start in rows.suspects(phase, self.step_ns, self._running_ns, over):
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Bar:
    """What a time must have in which a rank is to be called slow."""

    rows: int
    excess_ns: float
    certain_ns: float
    """An excess from which on it is not asked what the job would gain without it."""
    gain_ns: float


class _Judged:
    """The rows that are judged at one time: common to all ranks that are there."""

    def __init__(
        self,
        board: Board,
        present: npt.NDArray[np.int64],
        keys: npt.NDArray[np.int64],
        with_workload: Mapping[int, int],
    ) -> None:
        """with_workload: ranks that are named for an excess that their workload is part of, and since which step."""
        self._board = board
        self._present = present
        self._at = keys % board.columns
        self.keys = keys
        self.width = board.width
        self.ranks = board.ranks[present]
        self.threshold = threshold(len(self.ranks))
        self._excess = board.excess_ns[np.ix_(present, self._at)]
        self._scales: dict[str, float] = {}
        self._series = {"": self._excess}
        workload = board.workload[np.ix_(present, self._at)]
        if np.isfinite(workload).all(axis=0).any():
            self._series[""] = left = without_workload(self._excess, workload, _LASTING_WORKLOAD)
            for rank, step in with_workload.items():
                if (index := self.index_of(rank)) is not None:
                    left[index, self.row_of(step) :] = self._excess[index, self.row_of(step) :]

    def has_workload_in(self, index: int, start: int) -> bool:
        """Whether the excess from row `start` on is judged as it was measured."""
        return bool((self._series[""][index, start:] == self._excess[index, start:]).all())

    def index_of(self, rank: int) -> int | None:
        index = int(np.searchsorted(self.ranks, rank))
        return index if index < len(self.ranks) and self.ranks[index] == rank else None

    def row_of(self, step: int) -> int:
        """The first row from that step on."""
        return min(int(np.searchsorted(self.keys * self.width, step)), len(self.keys) - 1)

    def series(self, phase: str) -> npt.NDArray[np.floating[Any]]:
        """[ranks, rows]: the excess that a phase is judged by."""
        kind = "cpu" if phase == "cpu" else ""
        if kind not in self._series:
            ready = np.nan_to_num(self._board.ready_ns[np.ix_(self._present, self._at)])
            self._series[kind] = excess_over_others(ready)
        return self._series[kind]

    def without_stalls(self, phase: str, index: int, start: int) -> npt.NDArray[np.floating[Any]]:
        """That of one rank from row `start` on, as far as it is judged by means."""
        return without_stalls(self.series(phase)[index, start:], self.scale(phase))

    def scale(self, phase: str) -> float:
        """Its noise."""
        kind = "cpu" if phase == "cpu" else ""
        if kind not in self._scales:
            self._scales[kind] = noise(self.series(kind))
        return self._scales[kind]

    def suspects(self, phase: str, step_ns: float, running_ns: float, over: Mapping[int, int]) -> list[tuple[int, int]]:
        """Indices of ranks that are slow now, the slowest first, and the row since which each one is.

        running_ns: the usual step without the time ready without a CPU. over: by rank, the step before which it is not
        looked at.
        """
        bar = self._bar(phase, step_ns, running_ns)
        if len(self.keys) < bar.rows:
            return []
        if phase == "cpu" and not np.isfinite(self._board.ready_ns[self._present, self._at[-1]]).all():
            return []
        found: dict[int, int] = {}
        # Intervals above zero show what comes and goes; but where a rank was always a little slower, they reach far
        # back, and weaken what is new. Those above half of what is worth naming do not.
        for level_ns in (0.0, bar.excess_ns / 2):
            for index, start in self._candidates(phase, bar.rows, level_ns, over):
                since = None if index in found else self._slow_since(phase, index, start, bar)
                if since is not None:
                    found[index] = since
        return list(found.items())

    def _bar(self, phase: str, step_ns: float, running_ns: float) -> _Bar:
        if phase == "cpu":  # who gets a CPU changes by chance for seconds: that is asked for longer, and more of it
            least_ns = 4 * LEAST_SHARE * step_ns
            return _Bar(8 * LEAST_ROWS, least_ns, least_ns, 0.0)
        # Where CPUs are short, the steps are as long as they are for that reason, which is no measure for work.
        least_share = LEAST_SHARE * self._workload_factor
        return _Bar(LEAST_ROWS, least_share * running_ns, least_share * step_ns, _LEAST_GAIN * step_ns)

    def _candidates(
        self, phase: str, least_rows: int, level_ns: float, over: Mapping[int, int]
    ) -> list[tuple[int, int]]:
        """Indices of ranks, the strongest first, and rows since which each one's mean is above zero beyond chance."""
        scale = self.scale(phase)
        deviations, level = self.series(phase) / scale, level_ns / scale
        found = strongest_interval(deviations, least_rows, level)
        for rank, step in over.items():
            index, first = self.index_of(rank), self.row_of(step)
            if index is not None:
                again = strongest_interval(deviations[index : index + 1, first:], least_rows, level)
                found.start[index], found.strength[index] = again.start[0] + first, again.strength[0]
        strongest = np.argsort(-found.strength, kind="stable")[:_MOST_SUSPECTS]
        intervals = [(index, int(found.start[index])) for index in strongest.tolist() if found.strength[index] > 0]
        return [each for each in intervals if strength(deviations[each[0], each[1] :]) >= self.threshold]

    def _slow_since(self, phase: str, index: int, start: int, bar: _Bar) -> int | None:
        """Since which row a rank is slow that is a candidate from row `start` on; None if it is not."""
        cpu = phase == "cpu"
        series = self.series(phase)
        interval = self.without_stalls(phase, index, start)
        mean = float(interval.mean())
        if mean < bar.excess_ns or not lasts(interval, self.scale(phase), own_errors(len(self.ranks)), strict=cpu):
            return None
        others = np.delete(series[:, start:].mean(axis=1), index)
        if len(self.ranks) >= _RANKS_WITH_A_SPREAD and mean < SPREAD_FACTOR * spread(others):
            return None
        if cpu and not self._is_last_for_lack_of_cpu(index, start, interval):
            return None
        if mean < bar.certain_ns and self._gain_ns(index, start) < bar.gain_ns:
            return None
        return start + min(change_point(interval, mean), len(interval) - LEAST_ROWS)

    def _gain_ns(self, index: int, start: int) -> float:
        """How much sooner the steps from row `start` on would have ended, had it had no more work."""
        others, excess_ns = np.delete(self._present, index), self.series("")[index, start:]
        return gain_ns(self._board, int(self._present[index]), others, self.keys[start:], excess_ns)

    def _is_last_for_lack_of_cpu(self, index: int, start: int, lack_ns: npt.NDArray[np.floating[Any]]) -> bool:
        """Whether it lacks a CPU in most steps, and is the one that the others wait for."""
        at = np.ix_(self._present, self._at[start:])
        own = self._board.parts_ns[at].sum(axis=2).mean(axis=1) + self._board.ready_ns[at].mean(axis=1)
        return int(own.argmax()) == index and float((lack_ns > lack_ns.mean() / 2).mean()) > 0.6

    def episode(self, rank: int, index: int, start: int, phase: str, *, from_start: bool) -> Episode:
        """What is to be said of a rank that is slow from row `start` on."""
        last_step = int(self.keys[-1] + 1) * self.width - 1
        episode = Episode(
            rank=rank, phase=phase, since_step=int(self.keys[start]) * self.width, from_start=from_start,
            last_step=last_step, until_step=None, named_step=last_step, excess_ns=0.0, phase_excess_ns=0.0, cost_ns=0.0,
            work_ns=0.0, others_work_ns=0.0, step_ns=0.0, strength=0.0, slow_share=0.0, slow_excess_ns=0.0,
            more_workload=0.0,
        )  # fmt: skip
        self.describe(episode, index, start)
        return episode

    def describe(self, episode: Episode, index: int, start: int) -> None:
        """Fills in what is measured from row `start` on."""
        series = self.series(episode.phase)[index, start:].astype(np.float64)
        others = np.delete(self._present, index)
        scale = self.scale(episode.phase)
        describe(episode, self._board, int(self._present[index]), others, self.keys[start:], series, scale)

    def detectable_ns(self, step_ns: float) -> float:
        """The smallest excess that would be named if it lasted for the last 64 rows."""
        rows = min(64, len(self.keys))
        clear_ns = self.threshold * self.scale("") / float(np.sqrt(rows))
        if len(self.ranks) >= _RANKS_WITH_A_SPREAD:
            clear_ns = max(clear_ns, SPREAD_FACTOR * spread(self.series("")[:, -rows:].mean(axis=1)))
        return max(LEAST_SHARE * self._workload_factor * step_ns, clear_ns)

    @property
    def _workload_factor(self) -> float:
        return 1.0 if self._series[""] is self._excess else WORKLOAD_FACTOR


class Judge:
    """Judges all ranks of a job, each beside those that do the same work. Fed as rows come; one thread."""

    def __init__(self) -> None:
        self._populations: dict[str, Population] = {}
        self._place: dict[int, Place] = {}

    def know(self, rank: int, place: Place) -> None:
        """Where a rank is; before its first rows. A rank that is placed anew begins anew."""
        self._place[rank] = place

    def add(self, rank: int, rows: Rows) -> None:
        """Rows of a rank, in the order of their steps."""
        self.add_block(self._place.get(rank, Place()).population, Block.of(rank, rows))

    def add_block(self, population: str, block: Block) -> None:
        """Rows of several ranks of a population."""
        self._populations.setdefault(population, Population()).add(block)

    def end(self, rank: int) -> None:
        """The rank has ended."""
        for population in self._populations.values():
            population.end(rank)

    def judge(self, *, final: bool = False) -> Findings:
        """Judges what has come. final: the run has ended."""
        populations = list(self._populations.values())
        usual = []
        for population in populations:
            population.judge(final=final)
        for name, population in self._populations.items():
            if population.step_ns:
                usual.append(Usual(name, ranges(population.ranks), population.work_ns, population.wait_ns))
        episodes = [episode for population in populations for episode in population.episodes]
        self._share_costs(episodes)
        compared = [population for population in populations if population.compared]
        found = dataclasses.replace(
            NOTHING,
            episodes=tuple(sorted(episodes, key=lambda episode: (episode.until_step is not None, -episode.cost_ns))),
            step_ns=max((population.step_ns for population in populations), default=0.0),
            last_step=max((population.last_step for population in populations), default=-1),
            usual=tuple(usual),
        )
        if not compared:
            return found
        return dataclasses.replace(
            found,
            rows=max(population.rows for population in compared),
            detectable_ns=max(population.detectable_ns for population in compared),
            compared=sum(population.compared for population in compared),
        )

    def _share_costs(self, episodes: Sequence[Episode]) -> None:
        """Ranks that are slow together cost the job much where each alone costs it nothing: the others are as slow."""
        slow = {episode.rank: episode for episode in episodes if episode.until_step is None}
        for group in groups_of(slow.keys(), self._place) if len(slow) > 1 else ():
            costs = [population.shared_cost_ns(group.ranks) for population in self._populations.values()]
            for rank in group.ranks:
                slow[rank].shared_cost_ns = max((cost for cost in costs if cost is not None), default=None)
