"""What is found of slow ranks: who is slow, since when, together with whom, and why. Values only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.own_time import OwnTime


@dataclasses.dataclass(frozen=True)
class Usual:
    """What a population's ranks do in a step, in ns: medians over ranks and the newest rows."""

    population: str
    ranks: str
    """As ranges: "0-7"."""
    work_ns: float
    wait_ns: float
    own: OwnTime | None = None
    """None: not known."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """Something that makes a rank slow, or may."""

    kind: str
    """gc, busy_neighbour, cpu_quota, own_threads, no_cpu, memory_pressure, slow_storage, cpu_clock, gpu_throttled,
    gpu_clock, gpu_errors, pcie, nvlink, network or alloc_retries."""
    text: str
    """What is seen, after "because"."""
    action: str
    explains: float | None
    """Share of the rank's excess that it accounts for; None where it cannot be determined."""
    evidence: Mapping[str, float]
    """The rank's signals, and as others_* those of the other ranks."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The causes of one rank's slowness, the likeliest first."""

    causes: tuple[Cause, ...]
    looked_at: tuple[str, ...]
    """What was measured, in words: where there are no causes, these were ruled out. Without what it is slow in."""
    not_measured: tuple[str, ...]
    signals: Mapping[str, float]
    """All that is measured of the rank, as means over the steps in which it is slow."""
    others_signals: Mapping[str, float]
    """Medians of the other ranks'."""


@dataclasses.dataclass(frozen=True)
class StragglerGroup:
    """Ranks that are slow together, and why they are named together."""

    kind: str
    """rank, node, or position."""
    name: str
    """The host, or the position as "ep 3"; else ""."""
    ranks: tuple[int, ...]
    lead: Episode
    """That of the slowest rank."""

    host: str = ""
    """Of the slowest rank."""
    location: str = ""
    """Where that host is, in words."""
    slower_modules_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Where it is slow in the forward pass, the modules that take longer on the slowest rank than on the others, and by
    how much; empty if not known."""
    diagnosis: Diagnosis | None = None
    """Why the slowest rank is slow; None where it was not asked."""
    slow_too: tuple[int, ...] = ()
    """Other slow ranks that do the same work, where it is known what all of them cost together."""

    @property
    def cost_ns(self) -> float | None:
        """What the job would gain a step without all of its ranks and those of `slow_too`; None: not known.

        Not the sum of theirs, nor that of one: without one of eight slow ranks, the job waits for the other seven.
        """
        return self.lead.cost_ns if self.kind == "rank" and not self.slow_too else self.lead.shared_cost_ns

    @property
    def cost_share(self) -> float | None:
        cost_ns = self.cost_ns
        return None if cost_ns is None else cost_ns / self.lead.step_ns if self.lead.step_ns else 0.0


@dataclasses.dataclass(frozen=True)
class StageImbalance:
    """A pipeline stage that has more work than the others. Times in ns per step."""

    stage: str
    ranks: tuple[int, ...]
    work_ns: float
    others_work_ns: float
    """The mean of the other stages."""
    stages: int
    """How many there are, this one included."""

    @property
    def cost_ns(self) -> float:
        """What balancing gains: the work stays the same in all, so each stage comes to the mean of all of them."""
        return (self.work_ns - self.others_work_ns) * (self.stages - 1) / self.stages


@dataclasses.dataclass(frozen=True)
class Findings:
    """The state of the judgement."""

    episodes: tuple[Episode, ...]
    rows: int
    """Common rows that were judged."""
    step_ns: float
    detectable_ns: float | None
    """The smallest excess that would have been named by now, had it lasted through `rows`; None: none."""
    compared: int
    """Ranks that were compared."""
    last_step: int
    steps_needed: int = 0
    """How many steps ranks that do the same work must make until they are compared; 0: no two ranks do."""
    usual: tuple[Usual, ...] = ()
    """By population."""
    unconfirmed: tuple[Episode, ...] = ()
    """Of ranks that windows merged by the devices name, and the judgement does not, see merged_windows.py."""
    groups: tuple[StragglerGroup, ...] = ()
    """The ranks that are slow now, as they are reported: alone, or with those that are slow together."""
    imbalance: StageImbalance | None = None
    diagnoses: tuple[tuple[tuple[int, int], Diagnosis], ...] = ()
    """With Episode.key, why ranks were slow that no longer are."""

    @property
    def slow_now(self) -> tuple[Episode, ...]:
        """The episodes of ranks that are slow, the costliest first."""
        return tuple(each for each in self.episodes if not each.is_over)

    @property
    def slow_before(self) -> tuple[Episode, ...]:
        """The episodes of ranks that are no longer slow in that phase, the costliest first."""
        return tuple(each for each in self.episodes if each.is_over)

    def with_episodes(self, episodes: Iterable[Episode], **changed: Any) -> Findings:
        """Return findings with these episodes: those that hold first, the costliest of each first."""
        in_order = tuple(sorted(episodes, key=lambda episode: (episode.is_over, -episode.cost_ns)))
        return dataclasses.replace(self, episodes=in_order, **changed)

    def diagnosis(self, key: tuple[int, int]) -> Diagnosis | None:
        """Why a rank is, or was, slow in this episode; None if that is not known."""
        now = (each.diagnosis for each in self.groups if each.lead.key == key)
        return next(now, None) or dict(self.diagnoses).get(key)


NOTHING = Findings((), 0, 0.0, None, 0, -1)
