"""Judgements of each window of a run: compared ranks, slow ranks, and the limit of the step.
Pure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchlens_perf.analysis.statistics.robust import fast_median
from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.run.records import PARTS
from torchlens_perf.verdicts.causes.straggler_groups import stage_imbalance
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings, Usual
from torchlens_perf.verdicts.stragglers.window_excess import window_excess
from torchlens_perf.verdicts.words.bottleneck import Spent, spent

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.analysis.statistics.run_windows import RunWindows
    from torchlens_perf.verdicts.stragglers.episodes import Episode
    from torchlens_perf.verdicts.stragglers.placement import Placement

    Columns = npt.NDArray[np.bool_]
    """Shape [columns]."""

# A verdict still holds if it is absent in at most this many windows at the end of the run.
_MAX_ABSENT_AT_END = 1


class Stretch(NamedTuple):
    """A part of the run in which a condition held in most windows."""

    since_step: int
    until_step: int | None
    """None if the part lasts to the end of the run."""
    held: Columns
    """The windows of the part in which the condition held."""
    judged: Columns
    """The windows of the whole run that show whether the condition held."""
    inside: Columns
    """The judged windows of the part."""


@dataclasses.dataclass(frozen=True)
class JudgedWindows:
    """The windows of a run, with the findings and placements of its ranks."""

    windows: RunWindows
    findings: Findings
    places: Mapping[int, Placement]
    on_device: bool
    """True if all ranks are judged by their devices' clocks."""

    def compared_with_others(self, rank: int) -> Columns:
        """Return the windows in which a rank was compared with others.

        For a rank without windows here, on a node with another disk, return those in which any rank
        was compared.
        """
        here = np.isin(self.windows.ranks, rank)
        return np.asarray(
            (self._is_compared[here] if here.any() else self._is_compared).any(axis=0)
        )

    @property
    def anybody_compared(self) -> Columns:
        """The windows in which ranks were compared."""
        return np.asarray(self._is_compared.any(axis=0))

    @functools.cached_property
    def slow_columns(self) -> Columns:
        """The windows in which any rank was slow."""
        slow = np.zeros(len(self.windows), bool)
        for episode in self.findings.episodes:
            slow |= self.covered(episode)
        return slow

    def covered(self, episode: Episode) -> Columns:
        """Return the windows of an episode.

        If it is shorter than a window, return the one in which it began.
        """
        covered = self.windows.columns_between(episode.since_step, episode.until_step)
        if not covered.any():
            covered[
                max(
                    0,
                    int(np.searchsorted(self.windows.first_steps, episode.since_step, "right")) - 1,
                )
            ] = True
        return covered

    def limited_by(self, kind: str) -> Stretch | None:
        """Return the part of the run in which a kind of use limited the step; None if there is no
        such part.

        The rule is that of the verdict on the whole run (words/bottleneck.py). While one rank holds
        up the others, it causes their waiting, so only lack of a CPU is judged then.
        """
        judged = np.array([each is not None for each in self.spent])
        if kind == "lack_of_cpu":
            judged &= np.isfinite(self.windows.lack_ns).any(axis=(0, 2))
        else:
            judged &= ~self.slow_columns
        return self._stretch(
            judged, np.array([each is not None and each.limits(kind) for each in self.spent])
        )

    @functools.cached_property
    def spent(self) -> list[Spent | None]:
        """The uses of a usual step's time by column: means over the ranks; None without any."""
        found: list[Spent | None] = []
        windows = self.windows
        for column in range(len(windows)):
            there = np.isfinite(windows.duration_ns[:, column])
            if not there.any():
                found.append(None)
                continue
            measured = np.isfinite(windows.lack_ns[:, column, 0])
            parts, lack = (
                (
                    dict(
                        zip(PARTS, (values[some, column].mean(axis=0) / 1e9).tolist(), strict=True)
                    )
                    if some.any()
                    else {}
                )
                for values, some in ((windows.parts_ns, there), (windows.lack_ns, measured))
            )
            step_s = float(windows.duration_ns[there, column].mean()) / 1e9
            found.append(spent(step_s, parts, lack, device=self.on_device))
        return found

    def out_of_balance(self) -> Stretch | None:
        """Return the part of the run in which the now largest stage was the largest."""
        now = self.findings.imbalance
        if now is None:
            return None
        windows, rows = self.windows, dict[str, list[int]]()
        for row, rank in enumerate(windows.ranks):
            rows.setdefault(self.places[rank].population if rank in self.places else "", []).append(
                row
            )
        judged, held = np.zeros((2, len(windows)), bool)
        for column in range(len(windows)):
            if not all(
                np.isfinite(windows.work_ns[members, column]).all() for members in rows.values()
            ):
                continue
            usual = tuple(
                Usual(
                    population,
                    format_ranges([windows.ranks[row] for row in members]),
                    float(fast_median(windows.work_ns[members, column], 0)),
                    0.0,
                )
                for population, members in rows.items()
            )
            step_ns = float(np.nanmedian(windows.duration_ns[:, column]))
            found = stage_imbalance(
                dataclasses.replace(NOTHING, usual=usual, step_ns=step_ns), self.places
            )
            judged[column], held[column] = True, found is not None and found.stage == now.stage
        return self._stretch(judged, held)

    def tagged(self, flag: int) -> Columns:
        """Return the windows in which any rank has a flag of rank.TAGS."""
        return np.array([bool(flags & flag) for flags in self.windows.tags])

    @functools.cached_property
    def _is_compared(self) -> Columns:
        """True where a rank was compared: shape [ranks, columns]."""
        return np.isfinite(window_excess(self.windows, self.places))

    def _stretch(self, judged: Columns, held: Columns) -> Stretch | None:
        columns = np.flatnonzero(judged)
        found = longest(held[columns].tolist())
        if found is None:
            return None
        begin, end = found
        inside = np.zeros(len(judged), bool)
        inside[columns[begin:end]] = True
        until = None
        if len(columns) - end > _MAX_ABSENT_AT_END:
            until = int(self.windows.first_steps[columns[end - 1]]) + self.windows.width
        return Stretch(
            int(self.windows.first_steps[columns[begin]]), until, held & inside, judged, inside
        )


def longest(held: list[bool]) -> tuple[int, int] | None:
    """Return the slice with the largest surplus of True over False, as (start, end), or None.

    Of several such slices, return the newest.
    """
    best, found, since, total = 0, None, 0, 0
    for index, each in enumerate(held):
        if total <= 0:
            since, total = index, 0
        total += 1 if each else -1
        if each and total >= best:
            best, found = total, (since, index + 1)
    return found
