"""Findings of a detector after a restart of the sidecar, merged with those before the restart.
Pure."""

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

# Number of rows after which an earlier episode can be ended. The detector needs as many to find a
# lack of CPU.
_MAX_ROWS = 8 * MIN_ROWS


class EarlierEpisodes:
    """The episodes that an earlier sidecar has found. After a restart, the detector has no earlier
    rows.

    A rank that was slow before and after the restart has one episode, with one first step and one
    key. Ended episodes are not reopened, because their alerts are closed. Not thread-safe.
    """

    def __init__(self, earlier: Findings) -> None:
        """earlier: saved findings of the earlier sidecar.

        Findings from merged windows are dropped.
        """
        earlier = without_windows(earlier)
        self._open = {episode.rank: episode for episode in earlier.slow_now}
        self._over = list(earlier.slow_before)
        # Earlier episodes that continue, by the key of the new detector's episode.
        self._same: dict[tuple[int, int], Episode] = {}
        self._seen: set[tuple[int, int]] = set()
        # The step up to which the new detector had few rows; -1 if it started with many.
        self._few_rows_step: int | None = None

    def merged_with(self, now: Findings) -> Findings:
        """Return the new detector's findings, merged with the earlier episodes."""
        if self._few_rows_step is None and now.rows:
            self._few_rows_step = now.last_step if now.rows <= 2 * MIN_ROWS else -1
        for episode in sorted(now.episodes, key=lambda each: each.named_step):
            if episode.key not in self._seen:
                self._seen.add(episode.key)
                self._begin_or_continue(episode, now.compared)
        if self._open:
            compared = {rank for usual in now.usual for rank in parse_ranges(usual.ranks)}
            left = [episode for rank, episode in self._open.items() if rank in compared]
            for episode in left:
                if _is_over(episode, now, max(episode.last_step, self._few_rows_step or -1)):
                    self._end_earlier(self._open.pop(episode.rank))
        return now.with_episodes(
            [*map(self._as_before, now.episodes), *self._open.values(), *self._over]
        )

    def _begin_or_continue(self, episode: Episode, compared: int) -> None:
        before = self._open.pop(episode.rank, None)
        if before is None:
            return
        # A healthy time between the two episodes, if any, had too few known steps to be detected:
        # they are one.
        gap = episode.judged_from_step - before.last_step
        if gap < _steps_to_tell(before, compared) or episode.judged_from_step <= (
            self._few_rows_step or -1
        ):
            self._same[episode.key] = before
        else:
            self._end_earlier(before)

    def _end_earlier(self, before: Episode) -> None:
        """End an earlier episode after its last judged step. Its true end is not known."""
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
    """Return the number of steps within which the rank would be named again, if still as slow."""
    took = before.named_step - before.judged_from_step + 1
    lasted = before.last_step - before.judged_from_step + 1
    return 3 * max(took, lasted * (threshold(compared) / max(before.z_score, 1.0)) ** 2)


def _is_over(before: Episode, now: Findings, since_step: int) -> bool:
    """Return True if the rank would have been named again by now, if still slow.

    since_step: the step before the first one that the new detector has.
    """
    if not now.compared:
        return False
    # Intermittent slowness needs more rows than its mean suggests, see is_persistent().
    rare = (1 - before.slow_share) / max(before.slow_share, 0.01)
    min_rows = min(
        _MAX_ROWS, max(MIN_ROWS, 2 * self_normalized_threshold(now.compared) ** 2 * rare)
    )
    if now.rows < (_MAX_ROWS if before.phase == "cpu" else min_rows):
        return False
    if now.last_step - since_step < _steps_to_tell(before, now.compared):
        return False
    return now.detectable_ns is not None and now.detectable_ns <= before.excess_ns
