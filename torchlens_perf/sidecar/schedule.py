"""When the sidecar does what. Pure: the caller tells the time.

The job's threads may have no processor to spare, so each thing is done as rarely as whoever looks can bear, and more
rarely where it takes long.
"""

from __future__ import annotations

MAX_UNKEPT_RECORDS = 1 << 18  # that wait for the next segment, and that wait for their step's end
_LONGEST_REST_S = 0.5
_ACCOUNT_S, _LATEST_ACCOUNT_S = 1.0, 5.0
_SAVE_S = 5.0
_KEEP_S, _LATEST_KEEP_S = 5.0, 60.0
_MAX_UNKEPT_SHARE = 1 / 2  # of a ring: what is in no segment is still there if all processes are killed at once
_HURRIED_S = 1.0  # between two segments, once the sidecar may be killed at any time
_SHARE = 1 / 400  # of the time, that counting takes, and writing the state
_WATCHED_SHARE = 1 / 20  # of the time, that counting takes while somebody looks at the run


class Schedule:
    """When to do what: reads sooner as rings fill faster, writes more rarely as the run gets longer. Pure."""

    def __init__(self, now_s: float) -> None:
        self._started_s = now_s
        self.poll_s = 0.05
        self._hurries = False
        # When each was done last; saved for the first time soon: somebody may want to see the live run.
        self._done_s = {"account": now_s, "judge": now_s, "keep": now_s, "save": now_s + 0.2 - _SAVE_S}

    def hurry(self) -> None:
        """The sidecar may be killed at any time: all is counted and written now, and once a second from here on."""
        if not self._hurries:
            self._hurries = True
            self._done_s["account"] = self._done_s["keep"] = float("-inf")

    def polled(self, fullest: float) -> None:
        """Aims at reading a ring when an eighth of it is new."""
        if fullest > 1 / 8:
            self.poll_s = max(0.005, self.poll_s / 2)
        else:
            self.poll_s = min(_LONGEST_REST_S, self.poll_s * 1.5)

    def account_due(self, now_s: float, took_s: float, *, watched: bool = False) -> bool:
        """Once a second, in a young run sooner; later where it took long, most of which is for each module once.

        watched: somebody looks at the run all the time.
        """
        if self._hurries:
            return self._due("account", now_s, _HURRIED_S)
        rest_s = min(_LATEST_ACCOUNT_S, took_s / (_WATCHED_SHARE if watched else _SHARE))
        return self._due("account", now_s, max(self._young(now_s, _ACCOUNT_S), rest_s))

    def judge_due(self, now_s: float, period_s: float) -> bool:
        """So often, in a young run sooner."""
        return self._due("judge", now_s, self._young(now_s, period_s))

    def keep_due(self, now_s: float, unkept_records: int, ring_share: float, *, failing: bool = False) -> bool:
        """A segment: after half of the run's age, from 5 s to 60 s; sooner where there are many records.

        ring_share: of the ring with most records that are in no segment, how much of it they would fill.
        failing: the last one could not be written; then only after that time, however many there are.
        """
        since_s = now_s - self._done_s["keep"]
        many = unkept_records >= MAX_UNKEPT_RECORDS or (since_s >= _KEEP_S and ring_share >= _MAX_UNKEPT_SHARE)
        due = many and not failing
        due |= self._hurries and since_s >= _HURRIED_S
        due |= since_s >= min(_LATEST_KEEP_S, max(_KEEP_S, (now_s - self._started_s) / 2))
        if due:
            self._done_s["keep"] = self._done_s["save"] = now_s
        return due

    def save_due(self, now_s: float, took_s: float, *, news: bool = False) -> bool:
        """The state every 5 s; later where writing it took long. news: there is what somebody waits for: at once."""
        return self._due("save", now_s, 0.0 if news else max(_SAVE_S, took_s / _SHARE))

    def _due(self, what: str, now_s: float, period_s: float) -> bool:
        due = now_s - self._done_s[what] >= period_s
        if due:
            self._done_s[what] = now_s
        return due

    def _young(self, now_s: float, usual_s: float) -> float:
        """A shorter time, while the run is young."""
        return min(usual_s, 0.1 + (now_s - self._started_s) / 10)
