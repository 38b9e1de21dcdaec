"""Decide when the sidecar does each kind of work.

The job's threads may need all CPUs. The sidecar therefore works as rarely as readers of the results
accept, and more rarely if the work takes long. This module does no I/O.
"""

from __future__ import annotations

# Largest number of records that wait for the next segment, and of records of incomplete steps.
MAX_UNKEPT_RECORDS = 1 << 18
# Number of records that are counted without waiting for more.
MAX_WAITING_RECORDS = 1 << 19
# A poll should find the fullest ring at most at this level.
FILLING = 1 / 8
# From this level, the ring is read at the job's priority: on busy CPUs, low priority would lose
# records.
URGENT = 1 / 2
_MAX_POLL_S, _RARE_POLL_S, _IDLE_POLL_S = 0.5, 2.0, 4.0
_ACCOUNT_S, _LATEST_ACCOUNT_S, _LATEST_JUDGING_S = 1.0, 5.0, 5.0
_SAVE_S = 5.0
_KEEP_S, _LATEST_KEEP_S = 5.0, 60.0
# Write a segment before its records fill half of the ring. The ring still contains all unsaved
# records if all processes are killed at once.
_MAX_UNKEPT_SHARE = 1 / 2
# Interval of segments after SIGTERM, when the sidecar may be killed at any time.
_HURRIED_S = 1.0
# Largest share of the time for counting, for judging, and for writing the state.
_MAX_TIME_SHARE = 1 / 400
_MAX_WATCHED_TIME_SHARE = 1 / 20


class Schedule:
    """Schedule of the sidecar's work.

    Rings that fill fast are read more often. In long runs, files are written rarely.
    """

    def __init__(self, now_s: float) -> None:
        self._started_s = now_s
        self.poll_s = 0.05
        self.has_other_nodes = False
        """True if other nodes wait for what this node finds out about idle ranks."""
        self._hurries = False
        # Time at which each kind of work was last done. The first save is soon, to show the live
        # run early.
        self._done_s = {
            "account": now_s,
            "judge": now_s,
            "keep": now_s,
            "save": now_s + 0.2 - _SAVE_S,
        }

    def hurry(self) -> None:
        """Make counting and writing due now, and then once a second.

        Called after SIGTERM, when the sidecar may be killed at any time.
        """
        if not self._hurries:
            self._hurries = True
            self._done_s["account"] = self._done_s["keep"] = float("-inf")

    def adapt_poll_interval(self, fullest: float) -> None:
        """Adapt the poll interval to the level at which a poll finds the fullest ring.

        fullest: the highest share of a ring that was new in the last poll.
        """
        if fullest > FILLING:
            self.poll_s = max(0.005, self.poll_s / 2)
        else:
            idle_s = _RARE_POLL_S if self.has_other_nodes else _IDLE_POLL_S
            self.poll_s = min(idle_s if fullest == 0 else _MAX_POLL_S, self.poll_s * 1.5)

    def is_count_due(
        self, now_s: float, took_s: float, waiting_records: int = 0, *, watched: bool = False
    ) -> bool:
        """Return True if records should be counted: once a second, or sooner in a young run.

        waiting_records: number of records that were read and not counted. Many of them are counted
        at once, because they take memory.

        If counting takes long, it is due more rarely. Most of the time for counting is a fixed cost
        per module, so longer intervals save time. took_s: duration of the last count. watched: a
        process shows a continuous view of the run.
        """
        if waiting_records >= MAX_WAITING_RECORDS:
            return self._is_due("account", now_s, 0.0)
        if self._hurries:
            return self._is_due("account", now_s, _HURRIED_S)
        usual_s = self._young_interval_s(now_s, _ACCOUNT_S)
        rest_s = self._rest_s(took_s, _LATEST_ACCOUNT_S, watched=watched)
        return self._is_due("account", now_s, max(usual_s, rest_s))

    def is_judging_due(self, now_s: float, period_s: float, took_s: float = 0.0) -> bool:
        """Return True if ranks should be judged: once in a period, or sooner in a young run.

        took_s: duration of the last judging. If it takes long, it is due more rarely.
        """
        usual_s = self._young_interval_s(now_s, period_s)
        rest_s = self._rest_s(took_s, _LATEST_JUDGING_S)
        return self._is_due("judge", now_s, max(usual_s, rest_s))

    def is_segment_due(
        self, now_s: float, unkept_records: int, ring_share: float, *, failing: bool = False
    ) -> bool:
        """Return True if a segment should be written.

        The interval is half of the run's age, from 5 s to 60 s. The interval is shorter if there
        are many records.

        ring_share: the highest share of a ring that is not in a segment yet.
        failing: the last segment could not be written. If True, the number of records is ignored.
        """
        since_s = now_s - self._done_s["keep"]
        many = unkept_records >= MAX_UNKEPT_RECORDS or (
            since_s >= _KEEP_S and ring_share >= _MAX_UNKEPT_SHARE
        )
        due = many and not failing
        due |= self._hurries and since_s >= _HURRIED_S
        due |= since_s >= min(_LATEST_KEEP_S, max(_KEEP_S, (now_s - self._started_s) / 2))
        if due:
            self._done_s["keep"] = self._done_s["save"] = now_s
        return due

    def is_save_due(self, now_s: float, took_s: float, *, news: bool = False) -> bool:
        """Return True if the state should be saved: every 5 s, or more rarely if saving takes long.

        took_s: duration of the last save. news: there is a new finding to save at once.
        """
        usual_s = max(_SAVE_S, took_s / _MAX_TIME_SHARE)
        return self._is_due("save", now_s, 0.0 if news else usual_s)

    @property
    def is_idle(self) -> bool:
        """True if several polls in a row have found no new record."""
        return self.poll_s > _MAX_POLL_S and not self.has_other_nodes

    def _rest_s(self, took_s: float, latest_s: float, *, watched: bool = False) -> float:
        """Return the shortest interval of work that takes took_s; latest_s if the ranks are idle."""
        if self.is_idle and not watched:
            return latest_s
        return min(latest_s, took_s / (_MAX_WATCHED_TIME_SHARE if watched else _MAX_TIME_SHARE))

    def _is_due(self, what: str, now_s: float, period_s: float) -> bool:
        due = now_s - self._done_s[what] >= period_s
        if due:
            self._done_s[what] = now_s
        return due

    def _young_interval_s(self, now_s: float, usual_s: float) -> float:
        """Return the usual interval, or a shorter one while the run is young."""
        return min(usual_s, 0.1 + (now_s - self._started_s) / 10)
