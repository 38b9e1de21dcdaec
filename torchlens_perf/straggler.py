"""Which rank is slow, since when, in which phase, and what it costs. Pure: rows of ranks in, episodes out.

Step times equalise in synchronous training, so they name nobody. Judged is each rank's work: its step without the time
blocked in collectives, and without the time that its thread was ready and had no CPU. A rank's excess is its work above
the median of the other ranks that do the same, in the same step, so what makes all ranks slow together cancels.

At every EVERY-th row, for each rank: over which interval that ends now is its mean excess most standard errors above
zero (a window-limited generalised likelihood ratio; Lai, IEEE Trans. Inf. Theory 44, 1998)? Single values are clipped,
so that no single stall makes a verdict. A rank is named when that is more than chance gives among so many ranks and
intervals, when the excess is worth a person's time and larger than the ranks differ anyway, and when it lasts through
the interval. It is dropped when the same test says that the excess has gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.excess import (
    JUDGED_ROWS,
    excess_over_others,
    lasts,
    noise,
    over_since,
    strongest_interval,
    threshold,
    without_workload,
)
from torchlens_perf.rank_ranges import ranges
from torchlens_perf.records import OWN_PARTS
from torchlens_perf.step_rows import OTHER_WORK, Rows

if TYPE_CHECKING:
    import numpy.typing as npt

EVERY = 4  # rows between two judgements
LEAST_ROWS = 10  # of an interval that names somebody
WARM_UP_ROWS = 4
LEAST_SHARE = 0.025  # of the step: what is not worth a person's time
SPREAD_FACTOR = 4.0  # times the ranks' own spread, where there are enough ranks to know it
_RANKS_WITH_A_SPREAD = 8
_LATE_ROWS = 64  # a rank that is so far behind the others is missing, and is not waited for
_COMPUTE = ("forward", "backward")
_ENOUGH_HISTORY = JUDGED_ROWS + 64


@dataclasses.dataclass(frozen=True)
class Place:
    """What is known of a rank besides its times."""

    host: str = ""
    population: str = ""
    """Ranks with the same text do the same work, and are compared."""
    coordinates: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Its position in each dimension of the job's mesh: {"dp": 3, "pp": 0}."""


@dataclasses.dataclass
class Episode:
    """A time in which one rank was slow. Times in ns, means per step over the episode."""

    rank: int
    phase: str
    """An own part, "compute" where forward and backward grew alike, or "cpu" where it lacked a CPU."""
    since_step: int
    from_start: bool
    """Whether it was slow from the first steps on that were judged."""
    last_step: int
    until_step: int | None
    """The step from which on it was no longer slow; None while it is."""
    named_step: int
    """The step after which it was named."""
    excess_ns: float
    phase_excess_ns: float
    cost_ns: float
    """How much sooner the step would have ended without it."""
    work_ns: float
    others_work_ns: float
    step_ns: float
    strength: float
    """Standard errors, with clipped values."""
    slow_share: float
    """Share of the steps in which it was slow by at least half of its usual excess when slow."""
    slow_excess_ns: float
    """Median excess in those."""
    more_workload: float
    """How much more workload it had than the others, as a share; 0 if not known."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


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


class _Board:
    """The newest rows of all ranks of one population: arrays [ranks, columns], a column for each row of steps."""

    def __init__(self, ranks: Sequence[int], width: int, columns: int) -> None:
        self.width = width
        self.columns = columns
        self.ranks = np.array(sorted(ranks), np.int64)
        shape = (len(ranks), columns)
        self.key = np.full(shape, -1, np.int64)  # row number: first step / width
        self.flags = np.zeros(shape, np.int64)
        self.duration_ns, self.wait_ns, self.ready_ns, self.workload = (np.full(shape, np.nan) for _ in range(4))
        self.parts_ns = np.full((*shape, len(OWN_PARTS)), np.nan, np.float32)
        self.newest = np.full(len(ranks), -1, np.int64)

    def put(self, index: int, rows: Rows) -> None:
        keys = rows.step[-self.columns :] // self.width
        at = keys % self.columns
        for name in ("flags", "duration_ns", "wait_ns", "ready_ns", "workload"):
            getattr(self, name)[index, at] = getattr(rows, name)[-self.columns :]
        self.parts_ns[index, at] = rows.work_ns[-self.columns :]
        self.key[index, at] = keys
        self.newest[index] = max(self.newest[index], int(keys[-1]))


class Population:
    """Ranks that do the same work, and their episodes."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []
        self._board: _Board | None = None
        self._pending: list[tuple[int, Rows]] = []
        self._judged = -1  # row number up to which was judged
        self._first: int | None = None  # row number that the judgement began with
        self._ended: set[int] = set()
        self.rows = 0
        self.step_ns = 0.0
        self.detectable_ns = float("inf")
        self.work_ns = self.wait_ns = 0.0

    @property
    def ranks(self) -> list[int]:
        return [] if self._board is None else self._board.ranks.tolist()

    @property
    def last_step(self) -> int:
        return -1 if self._board is None or self._judged < 0 else (self._judged + 1) * self._board.width - 1

    def add(self, rank: int, rows: Rows) -> None:
        """Takes rows over; they are judged by judge()."""
        if len(rows):
            self._pending.append((rank, rows))

    def end(self, rank: int) -> None:
        """The rank will send no more: the others are judged on without it."""
        self._ended.add(rank)

    def judge(self, *, final: bool = False) -> None:
        """Judges what has come since, row by row, as far as all ranks have it. final: also what is left at the end."""
        for chunk in self._chunks():
            self._place(chunk)
            self._judge_ready(final=False)
        if final:
            self._judge_ready(final=True)

    def _chunks(self) -> list[list[tuple[int, Rows]]]:
        """The pending rows in pieces that the board has room for, whatever came at once."""
        pending, self._pending = self._pending, []
        if not pending:
            return []
        width = max(rows.width for _, rows in pending)
        first = min(int(rows.step[0]) for _, rows in pending) // width
        last = max(int(rows.step[-1]) for _, rows in pending) // width
        if last - first < _LATE_ROWS:
            return [pending]
        chunks = []
        for begin in range(first, last + 1, _LATE_ROWS // 2):
            low, high = begin * width, (begin + _LATE_ROWS // 2) * width
            piece = [(rank, _between(rows, low, high)) for rank, rows in pending]
            chunks.append([(rank, rows) for rank, rows in piece if len(rows)])
        return [chunk for chunk in chunks if chunk]

    def _place(self, chunk: list[tuple[int, Rows]]) -> None:
        board = self._board
        width = max([rows.width for _, rows in chunk] + ([board.width] if board is not None else []))
        ranks = {rank for rank, _ in chunk} | set(self.ranks)
        if board is None or width != board.width or len(ranks) != len(board.ranks):
            grown = _Board(sorted(ranks), width, _ENOUGH_HISTORY)
            if board is not None and width == board.width:
                at = np.searchsorted(grown.ranks, board.ranks)
                for name in ("key", "flags", "duration_ns", "wait_ns", "ready_ns", "workload", "parts_ns", "newest"):
                    getattr(grown, name)[at] = getattr(board, name)
            elif board is not None:
                self._judged, self._first = -1, None  # rows of another width cannot be laid beside the old ones
            self._board = board = grown
        for rank, rows in chunk:
            index = int(np.searchsorted(board.ranks, rank))
            board.put(index, rows if rows.width == board.width else widened(rows, board.width))

    def _judge_ready(self, *, final: bool) -> None:
        board = self._board
        if board is None:
            return
        live = np.array([rank not in self._ended for rank in board.ranks.tolist()])
        newest = board.newest[live] if live.any() else board.newest
        # A rank that is far behind does not hold up the judgement of the others.
        frontier = int(newest[newest >= newest.max() - _LATE_ROWS].min())
        if not live.any():
            frontier = int(board.newest.max())
        if self._judged < 0:
            self._judged = int(board.key[board.key >= 0].min()) - 1
        if self._first is None:
            self._first = self._judged + 1
        begin = max(self._judged, frontier - JUDGED_ROWS)
        for end in range(begin // EVERY * EVERY + EVERY, frontier + 2, EVERY):
            if end - 1 > self._judged:
                self._judge_at(board, end)
        if final and frontier > self._judged:
            self._judge_at(board, frontier + 1)

    def _judge_at(self, board: _Board, end: int) -> None:
        """Judges the rows before number `end`."""
        self._judged = end - 1
        first = self._first or 0
        keys = np.arange(max(first + (WARM_UP_ROWS if first == 0 else 0), end - JUDGED_ROWS, 0), end)
        at = keys % board.columns
        there = board.key[:, at] == keys
        present = there.mean(axis=1) > 0.5 if len(keys) else np.zeros(len(board.ranks), bool)
        if len(keys) < LEAST_ROWS or not present.any():
            return
        flags = np.where(there, board.flags[:, at], 0)[present]
        whole = there[present].all(axis=0)
        good = whole & ((np.bitwise_or.reduce(flags, axis=0) & OTHER_WORK) == 0)
        if good.sum() < LEAST_ROWS:
            return
        rows = _Judged(board, np.flatnonzero(present), keys[good], at[good])
        if len(rows.ranks) < 2:  # nobody to compare it with, as in a pipeline of one rank a stage
            self.step_ns, self.work_ns = float(np.median(rows.duration_ns)), float(np.median(rows.work_ns))
            self.wait_ns = float(np.median(rows.wait_ns))
            return
        self.rows = int(good.sum()) if self.rows < JUDGED_ROWS else self.rows
        self.step_ns = float(np.median(rows.duration_ns))
        self.work_ns, self.wait_ns = float(np.median(rows.work_ns)), float(np.median(rows.wait_ns))
        self._end_episodes(rows)
        self._begin_episodes(rows)
        self.detectable_ns = rows.detectable_ns(self.step_ns)

    def _end_episodes(self, rows: _Judged) -> None:
        for episode in self.episodes:
            index = rows.index_of(episode.rank)
            if episode.until_step is not None or index is None:
                continue
            begin = int(np.searchsorted(rows.steps, episode.since_step))
            begin = min(begin, len(rows.steps) - 1)
            series = rows.series(episode.phase)[index, begin:]
            over = over_since(series > episode.slow_excess_ns / 2, episode.slow_share, LEAST_ROWS)
            if over is not None:
                episode.until_step = int(rows.steps[begin + over])
                continue
            rows.describe(episode, slice(begin, None))

    def _begin_episodes(self, rows: _Judged) -> None:
        slow = {episode.rank for episode in self.episodes if episode.until_step is None}
        over: dict[int, int] = {}  # what has been judged and dropped is not judged again
        for episode in self.episodes:
            if episode.until_step is not None:
                over[episode.rank] = max(episode.until_step, over.get(episode.rank, 0))
        for phase in ("", "cpu"):
            for index, start in rows.suspects(phase, self.step_ns, over):
                rank = int(rows.ranks[index])
                if rank in slow:
                    continue
                episode = rows.episode(rank, index, start, phase, from_start=start == 0 and rows.holds(self._first))
                slow.add(rank)
                self.episodes.append(episode)


class _Judged:
    """The rows that are judged at one time: common to all ranks that are there."""

    def __init__(
        self, board: _Board, present: npt.NDArray[np.int64], keys: npt.NDArray[np.int64], at: npt.NDArray[np.int64]
    ) -> None:
        self._first_key = int(keys[0])
        self.steps = keys * board.width
        self.width = board.width
        self.ranks = board.ranks[present]
        pick = np.ix_(present, at)
        self.parts_ns = board.parts_ns[pick]
        self.work_ns = self.parts_ns.sum(axis=2, dtype=np.float64)
        self.duration_ns = board.duration_ns[pick]
        self.ready_ns = board.ready_ns[pick]
        self.workload = board.workload[pick]
        self.wait_ns = board.wait_ns[pick]
        if len(self.ranks) < 2:
            return
        self.excess = without_workload(excess_over_others(self.work_ns), self.workload)
        self._scales = {"": noise(self.excess)}
        self.threshold = threshold(len(self.ranks))

    def holds(self, first_key: int | None) -> bool:
        """Whether the rows begin where the judgement began."""
        return first_key is not None and self._first_key <= first_key + WARM_UP_ROWS

    def index_of(self, rank: int) -> int | None:
        index = int(np.searchsorted(self.ranks, rank))
        return index if index < len(self.ranks) and self.ranks[index] == rank else None

    def series(self, phase: str) -> npt.NDArray[np.float64]:
        """The excess that a phase is judged by."""
        return self.ready_excess() if phase == "cpu" else self.excess

    def ready_excess(self) -> npt.NDArray[np.float64]:
        return excess_over_others(np.nan_to_num(self.ready_ns))

    def scale(self, phase: str) -> float:
        kind = "cpu" if phase == "cpu" else ""
        if kind not in self._scales:
            self._scales[kind] = noise(self.ready_excess())
        return self._scales[kind]

    def suspects(self, phase: str, step_ns: float, over: Mapping[int, int]) -> list[tuple[int, int]]:
        """Indices of ranks that are slow now, the slowest first, and where each one's interval begins.

        over: by rank, the step before which it is not looked at.
        """
        cpu = phase == "cpu"
        if cpu and not np.isfinite(self.ready_ns).all():
            return []
        series = self.series(phase)
        # Who gets a CPU changes by chance for seconds: that is asked for longer, and more of it.
        least_rows, least_share = (8 * LEAST_ROWS, 4 * LEAST_SHARE) if cpu else (LEAST_ROWS, LEAST_SHARE)
        if series.shape[1] < least_rows:
            return []
        deviations = series / self.scale(phase)
        found = strongest_interval(deviations, least_rows)
        for rank, step in over.items():
            index, first = self.index_of(rank), int(np.searchsorted(self.steps, step))
            if index is not None:
                again = strongest_interval(deviations[index : index + 1, first:], least_rows)
                found.start[index], found.strength[index] = again.start[0] + first, again.strength[0]
        suspects = []
        for index in np.argsort(-found.strength, kind="stable")[: max(16, len(self.ranks) // 4)].tolist():
            if found.strength[index] < self.threshold:
                break
            interval = series[index, found.start[index] :]
            mean = float(interval.mean())
            if mean < least_share * step_ns or not lasts(interval, strict=cpu):
                continue
            if len(self.ranks) >= _RANKS_WITH_A_SPREAD:
                means = np.delete(series[:, found.start[index] :].mean(axis=1), index)
                spread = 1.4826 * float(np.median(np.abs(means - np.median(means))))
                if mean < SPREAD_FACTOR * spread:
                    continue
            suspects.append((index, int(found.start[index])))
        return suspects

    def episode(self, rank: int, index: int, start: int, phase: str, *, from_start: bool) -> Episode:
        """What is to be said of a rank that is slow from row `start` on."""
        last_step = int(self.steps[-1]) + self.width - 1
        episode = Episode(
            rank=rank, phase=phase, since_step=int(self.steps[start]), from_start=from_start, last_step=last_step,
            until_step=None, named_step=last_step, excess_ns=0.0, phase_excess_ns=0.0, cost_ns=0.0, work_ns=0.0,
            others_work_ns=0.0, step_ns=0.0, strength=0.0, slow_share=0.0, slow_excess_ns=0.0, more_workload=0.0,
        )  # fmt: skip
        self.describe(episode, slice(start, None))
        return episode

    def describe(self, episode: Episode, since: slice) -> None:
        """Fills in what is measured over the rows since then."""
        index = self.index_of(episode.rank)
        if index is None:
            return
        cpu = episode.phase == "cpu"
        series = self.series(episode.phase)[index, since]
        if not len(series):
            return
        episode.last_step = int(self.steps[-1]) + self.width - 1
        episode.excess_ns = float(series.mean())
        high = series[series > episode.excess_ns / 2]
        usual = float(np.median(high)) if len(high) else episode.excess_ns
        slow = series > usual / 2
        episode.slow_share = float(slow.mean())
        episode.slow_excess_ns = float(np.median(series[slow])) if slow.any() else episode.excess_ns
        scale = self.scale(episode.phase)
        episode.strength = float(np.clip(series / scale, -3, 3).sum() / np.sqrt(len(series)))
        others = np.delete(np.arange(len(self.ranks)), index)
        episode.work_ns = float(self.work_ns[index, since].mean())
        episode.others_work_ns = float(np.median(self.work_ns[others][:, since], axis=0).mean())
        episode.step_ns = float(np.median(self.duration_ns[:, since]))
        episode.cost_ns = self._cost_ns(index, since)
        load = self.workload[:, since]
        if np.isfinite(load).all() and (typical := float(np.median(load[others]))) > 0:
            episode.more_workload = float(load[index].mean()) / typical - 1
        if cpu:
            episode.phase_excess_ns = episode.excess_ns
            return
        parts = self.parts_ns[:, since].astype(np.float64)
        usual_parts = np.median(parts[others], axis=0)
        above = (parts[index] - usual_parts)[slow].mean(axis=0) if slow.any() else np.zeros(len(OWN_PARTS))
        episode.phase, part_ns = phase_of(above, usual_parts.mean(axis=0))
        episode.phase_excess_ns = part_ns * episode.slow_share

    def _cost_ns(self, index: int, since: slice) -> float:
        """The step ends with the slowest rank: how much sooner it would without this one, less what noise gives any."""
        own = self.work_ns[:, since] + np.nan_to_num(self.ready_ns[:, since])
        order = np.partition(own, -2, axis=0)
        gains = np.where(own == order[-1], order[-1] - order[-2], 0.0).mean(axis=1)
        return max(0.0, float(gains[index] - np.median(np.delete(gains, index))))

    def detectable_ns(self, step_ns: float) -> float:
        rows = min(64, len(self.steps))
        if rows < LEAST_ROWS:
            return float("inf")
        return max(LEAST_SHARE * step_ns, self.threshold * self.scale("") / float(np.sqrt(rows)))


def phase_of(above_ns: npt.NDArray[np.float64], usual_ns: npt.NDArray[np.float64]) -> tuple[str, float]:
    """The phase that explains most of an excess, and how much: from the excess and the usual time of each own part.

    Where forward and backward are both slower, by a similar ratio, the rank computes slowly: "compute".
    """
    largest = int(np.argmax(above_ns))
    forward, backward = (OWN_PARTS.index(part) for part in _COMPUTE)
    pair = above_ns[forward] + above_ns[backward]
    if largest in (forward, backward) and min(above_ns[forward], above_ns[backward]) > 0.15 * pair:
        ratios = [above_ns[part] / max(1.0, usual_ns[part]) for part in (forward, backward)]
        if max(ratios) < 3 * min(ratios):
            return "compute", float(pair)
    return OWN_PARTS[largest], float(above_ns[largest])


def widened(rows: Rows, width: int) -> Rows:
    """Rows as means over `width` steps; what does not fill a row is left out."""
    per = width // rows.width
    keys = rows.step // width * width
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    counts = np.diff([*starts, len(keys)])
    whole = counts == per
    values: dict[str, Any] = {"width": width, "step": keys[starts][whole]}
    for name in ("duration_ns", "work_ns", "wait_ns", "ready_ns", "workload"):
        column = getattr(rows, name)
        values[name] = (np.add.reduceat(column, starts, axis=0) / per)[whole]
    values["flags"] = np.bitwise_or.reduceat(rows.flags, starts)[whole]
    return Rows(**values)


def _between(rows: Rows, low: int, high: int) -> Rows:
    chosen = (rows.step >= low) & (rows.step < high)
    values = {f.name: getattr(rows, f.name) for f in dataclasses.fields(Rows)}
    return Rows(**{name: value if name == "width" else value[chosen] for name, value in values.items()})


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
        population = self._place.get(rank, Place()).population
        self._populations.setdefault(population, Population()).add(rank, rows)

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
        compared = [population for population in populations if len(population.ranks) > 1]
        if not compared:
            return dataclasses.replace(NOTHING, episodes=tuple(episodes))
        return Findings(
            episodes=tuple(sorted(episodes, key=lambda episode: (episode.until_step is not None, -episode.cost_ns))),
            rows=max(population.rows for population in compared),
            step_ns=max(population.step_ns for population in compared),
            detectable_ns=max(population.detectable_ns for population in compared),
            compared=sum(len(population.ranks) for population in compared),
            last_step=max(population.last_step for population in compared),
            usual=tuple(usual),
        )
