"""Findings of a detector that began in the middle of a run, merged with those of the one before it. Pure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torchlens_perf.run.rank_ranges import parse_ranges
from torchlens_perf.verdicts.stragglers.candidates import MIN_ROWS
from torchlens_perf.verdicts.stragglers.excess import self_normalized_threshold, threshold
from torchlens_perf.verdicts.stragglers.merged_windows import without_windows

if TYPE_CHECKING:
    from torchlens_perf.verdicts.stragglers.episodes import Episode
    from torchlens_perf.verdicts.stragglers.findings import Findings

_MAX_ROWS = 8 * MIN_ROWS  # that are waited for; the detector looks at a rank that lacks a CPU for as many


class EarlierEpisodes:
    """The episodes that an earlier sidecar has found: the detector of one that was started again has none of its rows.

    A rank that was slow then, and is slow still, is one straggler with one first step and one key. What has ended stays
    so, for its alert has been closed. One thread.
    """

    def __init__(self, earlier: Findings) -> None:
        """earlier: what the sidecar before has saved. What it knew from merged windows is found again, or is not."""
        earlier = without_windows(earlier)
        self._open = {episode.rank: episode for episode in earlier.slow_now}
        self._over = list(earlier.slow_before)
        self._same: dict[tuple[int, int], Episode] = {}  # by the new detector's key: the one that it goes on with
        self._seen: set[tuple[int, int]] = set()
        self._few_rows_step: int | None = None  # up to which the new detector had few rows; -1 if it began with many

    def merged_with(self, now: Findings) -> Findings:
        """Return what the new detector finds now, with the earlier episodes."""
        if self._few_rows_step is None and now.rows:
            self._few_rows_step = now.last_step if now.rows <= 2 * MIN_ROWS else -1
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
        return now.with_episodes([*map(self._as_before, now.episodes), *self._open.values(), *self._over])

    def _begins(self, episode: Episode, compared: int) -> None:
        before = self._open.pop(episode.rank, None)
        if before is None:
            return
        # If it was fine between them, that lasted for too few steps, or too few known ones, to detect.
        gap = episode.judged_from_step - before.last_step
        if gap < _steps_to_tell(before, compared) or episode.judged_from_step <= (self._few_rows_step or -1):
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
            episode,
            judged_from_step=before.judged_from_step,
            from_start=before.from_start,
            named_step=before.named_step,
        )


def _steps_to_tell(before: Episode, compared: int) -> float:
    """Within so many steps it would be named once more, were it slow as before, with little left to chance."""
    took = before.named_step - before.judged_from_step + 1
    lasted = before.last_step - before.judged_from_step + 1
    return 3 * max(took, lasted * (threshold(compared) / max(before.z_score, 1.0)) ** 2)


def _is_over(before: Episode, now: Findings, since_step: int) -> bool:
    """Whether it would have been named once more by now. since_step: from which on the new detector has the steps."""
    if not now.compared:
        return False
    # Intermittent slowness needs more rows than its mean suggests, see is_persistent().
    rare = (1 - before.slow_share) / max(before.slow_share, 0.01)
    min_rows = min(_MAX_ROWS, max(MIN_ROWS, 2 * self_normalized_threshold(now.compared) ** 2 * rare))
    if now.rows < (_MAX_ROWS if before.phase == "cpu" else min_rows):
        return False
    if now.last_step - since_step < _steps_to_tell(before, now.compared):
        return False
    return now.detectable_ns is not None and now.detectable_ns <= before.excess_ns
