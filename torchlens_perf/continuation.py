"""What a judge finds that began in the middle of a run, together with what the one before it had found. Pure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torchlens_perf.excess import own_errors, threshold
from torchlens_perf.rank_ranges import parse_ranges
from torchlens_perf.suspects import LEAST_ROWS

if TYPE_CHECKING:
    from torchlens_perf.episodes import Episode
    from torchlens_perf.straggler import Findings

_MOST_ROWS = 8 * LEAST_ROWS  # that are waited for; so long the judge looks at a rank that lacks a CPU


class Continuation:
    """For a sidecar that was started again: its judge knows no row from before.

    A rank that was slow then, and is slow still, is one straggler with one first step and one key. What has ended stays
    so, for its alert has been closed. One thread.
    """

    def __init__(self, earlier: Findings) -> None:
        """earlier: what the sidecar before has saved."""
        self._open = {episode.rank: episode for episode in earlier.episodes if episode.until_step is None}
        self._over = [episode for episode in earlier.episodes if episode.until_step is not None]
        self._same: dict[tuple[int, int], Episode] = {}  # by the new judge's key: the one that it goes on with
        self._seen: set[tuple[int, int]] = set()
        self._few_rows_step: int | None = None  # up to which the new judge has had few rows; -1 if it began with many

    def findings(self, now: Findings) -> Findings:
        """now: what the new judge finds."""
        if self._few_rows_step is None and now.rows:
            self._few_rows_step = now.last_step if now.rows <= 2 * LEAST_ROWS else -1
        for episode in sorted(now.episodes, key=lambda each: each.named_step):
            if episode.key not in self._seen:
                self._seen.add(episode.key)
                self._begins(episode, now.compared)
        if self._open:
            compared = {rank for usual in now.usual for rank in parse_ranges(usual.ranks)}
            left = [episode for rank, episode in self._open.items() if rank in compared]
            for episode in left:
                if _is_over(episode, now, max(episode.last_step, self._few_rows_step or -1)):
                    self._end(self._open.pop(episode.rank))
        episodes = [*map(self._as_before, now.episodes), *self._open.values(), *self._over]
        episodes.sort(key=lambda episode: (episode.until_step is not None, -episode.cost_ns))
        return dataclasses.replace(now, episodes=tuple(episodes))

    def _begins(self, episode: Episode, compared: int) -> None:
        before = self._open.pop(episode.rank, None)
        if before is None:
            return
        # If it was fine between them, then for fewer steps, or fewer that are known, than tell it.
        gap = episode.since_step - before.last_step
        if gap < _steps_to_tell(before, compared) or episode.since_step <= (self._few_rows_step or -1):
            self._same[episode.key] = before
        else:
            self._end(before)

    def _end(self, before: Episode) -> None:
        """Its true end is not known: it was slow in the last step that was judged."""
        self._over.append(dataclasses.replace(before, until_step=before.last_step + 1))

    def _as_before(self, episode: Episode) -> Episode:
        before = self._same.get(episode.key)
        if before is None:
            return episode
        return dataclasses.replace(
            episode, since_step=before.since_step, from_start=before.from_start, named_step=before.named_step
        )


def _steps_to_tell(before: Episode, compared: int) -> float:
    """Within so many steps it would be named once more, were it slow as before, with little left to chance."""
    took = before.named_step - before.since_step + 1
    lasted = before.last_step - before.since_step + 1
    return 3 * max(took, lasted * (threshold(compared) / max(before.strength, 1.0)) ** 2)


def _is_over(before: Episode, now: Findings, since_step: int) -> bool:
    """Whether it would have been named once more by now. since_step: that the new judge knows the steps from."""
    if not now.compared:
        return False
    # What comes and goes is asked for longer than its mean tells, see lasts().
    rare = (1 - before.slow_share) / max(before.slow_share, 0.01)
    least_rows = min(_MOST_ROWS, max(LEAST_ROWS, 2 * own_errors(now.compared) ** 2 * rare))
    if now.rows < (_MOST_ROWS if before.phase == "cpu" else least_rows):
        return False
    if now.last_step - since_step < _steps_to_tell(before, now.compared):
        return False
    return now.detectable_ns <= before.excess_ns
