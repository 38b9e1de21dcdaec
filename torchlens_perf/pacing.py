"""When the sidecar does what. Pure: the caller tells the time."""

from __future__ import annotations

MOST_UNKEPT_RECORDS = 1 << 18  # that wait for the next segment, and that wait for their step's end
_SAVE_S = 2.0


class Pacing:
    """When to do what: reads sooner as rings fill faster, writes more rarely as the run gets longer. Pure."""

    def __init__(self, now_s: float) -> None:
        self._started_s = now_s
        self.poll_s = 0.05
        self._accounted_s = self._kept_s = now_s
        self._saved_s = now_s + 0.2 - _SAVE_S  # for the first time soon: somebody may want to see the live run

    def polled(self, fullest: float) -> None:
        """Aims at reading a ring when an eighth of it is new."""
        if fullest > 1 / 8:
            self.poll_s = max(0.005, self.poll_s / 2)
        else:
            self.poll_s = min(0.2, self.poll_s * 1.5)

    def account_due(self, now_s: float) -> bool:
        due = now_s - self._accounted_s >= min(1.0, 0.1 + (now_s - self._started_s) / 10)
        if due:
            self._accounted_s = now_s
        return due

    def keep_due(self, now_s: float, unkept_records: int, *, failing: bool = False) -> bool:
        """A segment when there are many records, or after a twentieth of the run's age, from 5 s to 60 s.

        failing: the last one could not be written; then only after that time, however many there are.
        """
        period_s = min(60.0, max(5.0, (now_s - self._started_s) / 20))
        many = unkept_records >= MOST_UNKEPT_RECORDS and not failing
        due = many or now_s - self._kept_s >= period_s
        if due:
            self._kept_s = self._saved_s = now_s
        return due

    def save_due(self, now_s: float, took_s: float) -> bool:
        """The state every 2 s, but so that writing it takes at most a twentieth of the time."""
        due = now_s - self._saved_s >= max(_SAVE_S, 20 * took_s)
        if due:
            self._saved_s = now_s
        return due
