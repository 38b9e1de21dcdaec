"""Findings of the straggler detector: slow ranks, their groups, and their causes. Values only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.own_time import OwnTime


@dataclasses.dataclass(frozen=True)
class Usual:
    """Usual times of a population in a step, in ns: medians over its ranks and the newest rows."""

    population: str
    ranks: str
    """As ranges: "0-7"."""
    work_ns: float
    wait_ns: float
    own: OwnTime | None = None
    """Own times by part; None if not known."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """A cause, or a possible cause, of a rank's slowness."""

    kind: str
    """gc, busy_neighbour, cpu_quota, own_threads, no_cpu, memory_pressure, slow_storage, cpu_clock,
    gpu_throttled, gpu_clock, gpu_errors, pcie, nvlink, network or alloc_retries."""
    text: str
    """The observation, as a clause after "because"."""
    action: str
    explains: float | None
    """Share of the rank's excess that it accounts for; None where it cannot be determined."""
    evidence: Mapping[str, float]
    """Signals of the rank. Keys with the prefix others_ are medians of the other ranks."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The causes of one rank's slowness, the likeliest first."""

    causes: tuple[Cause, ...]
    looked_at: tuple[str, ...]
    """Names of the measured subjects, except the phase that is slow. Without causes, these were
    ruled out."""
    not_measured: tuple[str, ...]
    signals: Mapping[str, float]
    """All measured signals of the rank: means over the steps in which it is slow."""
    others_signals: Mapping[str, float]
    """Medians of the other ranks' signals."""


@dataclasses.dataclass(frozen=True)
class StragglerGroup:
    """Ranks that are slow together and named by one verdict."""

    kind: str
    """What they have in common: rank, node, or position."""
    name: str
    """The host, or the position as "ep 3"; "" for a rank."""
    ranks: tuple[int, ...]
    lead: Episode
    """The episode of the slowest rank."""

    host: str = ""
    """The host of the slowest rank."""
    location: str = ""
    """The location of that host, in words."""
    slower_modules_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """For slowness in the forward pass, the excess of modules on the slowest rank."""
    diagnosis: Diagnosis | None = None
    """The diagnosis of the slowest rank; None if no diagnosis was made."""
    slow_too: tuple[int, ...] = ()
    """Other slow ranks that do the same work, if the cost of all of them together is known."""

    @property
    def cost_ns(self) -> float | None:
        """Gain of the job per step without all ranks of the group and of `slow_too`; None if not
        known.

        It is not the sum of single costs: without one of eight slow ranks, the job waits for the
        other seven.
        """
        return (
            self.lead.cost_ns
            if self.kind == "rank" and not self.slow_too
            else self.lead.shared_cost_ns
        )

    @property
    def cost_share(self) -> float | None:
        cost_ns = self.cost_ns
        return (
            None if cost_ns is None else cost_ns / self.lead.step_ns if self.lead.step_ns else 0.0
        )


@dataclasses.dataclass(frozen=True)
class StageImbalance:
    """A pipeline stage that has more work than the others. Times in ns per step."""

    stage: str
    ranks: tuple[int, ...]
    work_ns: float
    others_work_ns: float
    """The mean of the other stages."""
    stages: int
    """Number of stages, including this one."""

    @property
    def cost_ns(self) -> float:
        """Gain of the job per step if all stages had the mean work.

        The total work stays the same.
        """
        return (self.work_ns - self.others_work_ns) * (self.stages - 1) / self.stages


@dataclasses.dataclass(frozen=True)
class Findings:
    """The findings about all ranks at one time."""

    episodes: tuple[Episode, ...]
    rows: int
    """Number of rows that were compared between ranks."""
    step_ns: float
    detectable_ns: float | None
    """The smallest excess that would have been named by now, had it lasted through `rows`; None if
    nothing would."""
    compared: int
    """Number of compared ranks."""
    last_step: int
    steps_needed: int = 0
    """Number of steps after which ranks with the same work are compared; 0 if no two ranks do the
    same work."""
    usual: tuple[Usual, ...] = ()
    """Usual times of each population."""
    unconfirmed: tuple[Episode, ...] = ()
    """Episodes that only windows merged by the devices show, see merged_windows.py."""
    groups: tuple[StragglerGroup, ...] = ()
    """The ranks that are slow now, in the groups in which they are reported."""
    imbalance: StageImbalance | None = None
    diagnoses: tuple[tuple[tuple[int, int], Diagnosis], ...] = ()
    """Diagnoses of ranks that are no longer slow, by Episode.key."""

    @property
    def slow_now(self) -> tuple[Episode, ...]:
        """The episodes of ranks that are slow, the costliest first."""
        return tuple(each for each in self.episodes if not each.is_over)

    @property
    def slow_before(self) -> tuple[Episode, ...]:
        """The episodes of ranks that are no longer slow in that phase, the costliest first."""
        return tuple(each for each in self.episodes if each.is_over)

    def with_episodes(self, episodes: Iterable[Episode], **changed: Any) -> Findings:
        """Return findings with these episodes, sorted: open ones first, then by descending cost."""
        in_order = tuple(sorted(episodes, key=lambda episode: (episode.is_over, -episode.cost_ns)))
        return dataclasses.replace(self, episodes=in_order, **changed)

    def diagnosis(self, key: tuple[int, int]) -> Diagnosis | None:
        """Return the diagnosis of an episode, open or ended; None without a diagnosis."""
        now = (each.diagnosis for each in self.groups if each.lead.key == key)
        return next(now, None) or dict(self.diagnoses).get(key)


NOTHING = Findings((), 0, 0.0, None, 0, -1)
