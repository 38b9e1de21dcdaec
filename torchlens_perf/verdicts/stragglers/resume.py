"""Merge the detector's findings from before and after a restart of the sidecar. Pure."""

from __future__ import annotations

import dataclasses

from torchlens_perf.run.rank_ranges import parse_ranges
from torchlens_perf.verdicts.stragglers.candidates import MIN_ROWS
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.excess import detection_threshold, persistence_threshold
from torchlens_perf.verdicts.stragglers.findings import Findings
from torchlens_perf.verdicts.stragglers.merged_windows import remove_window_findings

# Number of rows after which any earlier episode can be ended. The detector needs this many rows to
# detect lack of a CPU.
_MAX_ROWS = 8 * MIN_ROWS


class EarlierEpisodes:
    """The episodes that were found before a restart of the sidecar. Not thread-safe.

    After a restart, the detector has no earlier rows. If a rank was slow before and after the
    restart, the two episodes are merged into one, which keeps its first step and its key. Ended
    episodes are not reopened, because their alerts are closed.
    """

    def __init__(self, earlier: Findings) -> None:
        """earlier: the earlier sidecar's findings. Episodes from merged windows are ignored."""
        earlier = remove_window_findings(earlier)
        self._open = {episode.rank: episode for episode in earlier.slow_now}
        self._over = list(earlier.slow_before)
        # Earlier episodes that continue, by the key of the new episode.
        self._same: dict[tuple[int, int], Episode] = {}
        self._seen: set[tuple[int, int]] = set()
        # The step up to which the new detector had few rows; -1 if it started with many rows.
        self._few_rows_step: int | None = None

    def merge_into(self, now: Findings) -> Findings:
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
                if _has_recovered(episode, now, max(episode.last_step, self._few_rows_step or -1)):
                    self._end_earlier(self._open.pop(episode.rank))
        return now.with_episodes(
            [*map(self._with_earlier_start, now.episodes), *self._open.values(), *self._over]
        )

    def _begin_or_continue(self, episode: Episode, compared: int) -> None:
        before = self._open.pop(episode.rank, None)
        if before is None:
            return
        # If the rank was healthy between the two episodes, there were too few steps to detect that,
        # so the episodes are merged.
        gap = episode.judged_from_step - before.last_step
        if gap < _steps_until_named_again(before, compared) or episode.judged_from_step <= (
            self._few_rows_step or -1
        ):
            self._same[episode.key] = before
        else:
            self._end_earlier(before)

    def _end_earlier(self, before: Episode) -> None:
        """End an earlier episode with its last judged step, because the true end is not known."""
        self._over.append(dataclasses.replace(before, until_step=before.last_step + 1))

    def _with_earlier_start(self, episode: Episode) -> Episode:
        before = self._same.get(episode.key)
        if before is None:
            return episode
        return dataclasses.replace(
            episode,
            judged_from_step=before.judged_from_step,
            from_start=before.from_start,
            named_step=before.named_step,
        )


def _steps_until_named_again(before: Episode, compared: int) -> float:
    """Return the number of steps within which a rank would be named again if it is still slow."""
    took = before.named_step - before.judged_from_step + 1
    lasted = before.last_step - before.judged_from_step + 1
    return 3 * max(took, lasted * (detection_threshold(compared) / max(before.z_score, 1.0)) ** 2)


def _has_recovered(before: Episode, now: Findings, since_step: int) -> bool:
    """Return True if a rank that is still slow would have been named again by now.

    since_step: the last step before the first step of the new detector.
    """
    if not now.compared:
        return False
    # To detect intermittent slowness, more rows are needed, see is_persistent().
    rare = (1 - before.slow_share) / max(before.slow_share, 0.01)
    min_rows = min(_MAX_ROWS, max(MIN_ROWS, 2 * persistence_threshold(now.compared) ** 2 * rare))
    if now.rows < (_MAX_ROWS if before.phase == "cpu" else min_rows):
        return False
    if now.last_step - since_step < _steps_until_named_again(before, now.compared):
        return False
    return now.detectable_ns is not None and now.detectable_ns <= before.excess_ns
