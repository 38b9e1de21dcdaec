"""Classes for the findings of the straggler detector: slow ranks, their groups, and causes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.own_time import OwnTime

MORE_WORK = 0.05
"""A rank whose workload exceeds the others' by more than this share has too much work."""
_CLASSES = ("slow_compute", "slow_data", "slow_host", "more_work")


@dataclasses.dataclass(frozen=True)
class UsualTimes:
    """Median times of the newest steps of ranks that do the same work, in ns."""

    population: str
    ranks: str
    """The ranks as ranges, such as "0-7"."""
    work_ns: float
    wait_ns: float
    own: OwnTime | None = None
    """Own times by part, if ranks are judged by their devices; None if not known."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """A cause, or a possible cause, of a rank's slowness."""

    kind: str
    """gc, busy_neighbour, cpu_quota, own_threads, no_cpu, memory_pressure, slow_storage, cpu_clock,
    gpu_throttled, gpu_clock, gpu_neighbour, gpu_errors, pcie, nvlink, network, alloc_retries,
    tokens or machine, see experts/causes.py."""
    explains: float | None
    """Share of the rank's excess that the cause explains; None if it cannot be determined."""
    evidence: Mapping[str, float]
    """Signals of the rank. Keys with the prefix others_ are medians of the other ranks, and those
    with the prefix usual_ usual values of the rank."""
    about: Mapping[str, str]
    """Names: neighbour, control_group and gpu. `reason` divides some kinds: the signal of the reason
    for which a GPU is throttled, the signal that counts errors, evicted_pages, or
    tokens_untimed if the time of the experts is not known."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The causes of one rank's slowness, most likely cause first."""

    causes: tuple[Cause, ...]
    looked_at: tuple[str, ...]
    """Names of the possible causes that were checked. Without causes, these were ruled out."""
    not_measured: tuple[str, ...]
    """Names of the possible causes that could not be checked."""
    signals: Mapping[str, float]
    """The measured signals of the rank, as means over the steps in which it is slow."""
    others_signals: Mapping[str, float]
    """Medians of the other ranks' signals."""


@dataclasses.dataclass(frozen=True)
class StragglerGroup:
    """Ranks that are slow together and named by one verdict."""

    kind: str
    """"node" or "position" if the ranks have this in common; "rank" for a single rank."""
    name: str
    """The host, or the position such as "ep 3"; "" for a single rank."""
    ranks: tuple[int, ...]
    lead: Episode
    """The episode of the slowest rank."""

    host: str = ""
    """The host of the slowest rank."""
    location: str = ""
    """The location of this host in the data center, in words."""
    slower_modules_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Excess of modules on the slowest rank, if it is slow in the forward pass."""
    diagnosis: Diagnosis | None = None
    """The diagnosis of the slowest rank; None if no diagnosis was made."""
    slow_too: tuple[int, ...] = ()
    """Other slow ranks that do the same work, if their common cost is known."""
    step_ns: float | None = None
    """Mean step of which the cost is a share; None for the step of `lead`."""

    @property
    def cost_ns(self) -> float | None:
        """Time by which the step would be shorter without the ranks of the group and of `slow_too`;
        None if not known.

        This cost differs from the sum of the ranks' costs: without one of eight slow ranks, the job
        still waits for the other seven.
        """
        if self.is_shared:
            return None if self.lead.shared is None else self.lead.shared.cost_ns
        return self.lead.cost_ns

    @property
    def is_shared(self) -> bool:
        """True if the cost is that of several ranks."""
        return self.kind != "rank" or bool(self.slow_too)

    @property
    def cost_share(self) -> float | None:
        cost_ns, step_ns = self.cost_ns, self.step_ns or self.lead.step_ns
        return None if cost_ns is None else cost_ns / step_ns if step_ns else 0.0


@dataclasses.dataclass(frozen=True)
class StageImbalance:
    """A pipeline stage that has more work than the others. Times are in ns per step."""

    stage: str
    ranks: tuple[int, ...]
    work_ns: float
    others_work_ns: float
    """Mean work of the other stages."""
    stages: int
    """Number of all stages."""

    @property
    def cost_ns(self) -> float:
        """Time by which the step would be shorter if the same total work were divided equally among
        the stages."""
        return (self.work_ns - self.others_work_ns) * (self.stages - 1) / self.stages


@dataclasses.dataclass(frozen=True)
class Findings:
    """The detector's findings on all ranks at one time."""

    episodes: tuple[Episode, ...]
    rows: int
    """Number of rows that were compared between ranks."""
    step_ns: float
    detectable_ns: float | None
    """The smallest excess that would be detected if a rank had it in all rows; None if no excess
    can be detected yet."""
    compared: int
    """Number of compared ranks."""
    last_step: int
    steps_needed: int = 0
    """Number of steps after which ranks are compared; 0 if no two ranks do the same work."""
    usual: tuple[UsualTimes, ...] = ()
    """Usual times of each population."""
    unconfirmed: tuple[Episode, ...] = ()
    """Episodes that were found only in windows that devices merged, see merged_windows.py."""
    groups: tuple[StragglerGroup, ...] = ()
    """The ranks that are slow now, as groups that are reported together."""
    imbalance: StageImbalance | None = None
    diagnoses: tuple[tuple[tuple[int, int], Diagnosis], ...] = ()
    """Diagnoses of ranks that are no longer slow, by Episode.key."""

    @property
    def slow_now(self) -> tuple[Episode, ...]:
        """The open episodes of slow ranks, the costliest first."""
        return tuple(each for each in self.episodes if not each.is_over)

    @property
    def slow_before(self) -> tuple[Episode, ...]:
        """The ended episodes, the costliest first."""
        return tuple(each for each in self.episodes if each.is_over)

    def find_slow_with(self, episode: Episode) -> list[Episode]:
        """Return the episodes of other ranks that have steps in common with an episode."""
        until = episode.until_step or self.last_step + 1
        return [
            each
            for each in self.episodes
            if each.rank != episode.rank
            and each.since_step < until
            and episode.since_step < (each.until_step or until)
        ]

    def with_episodes(self, episodes: Iterable[Episode], **changed: Any) -> Findings:
        """Return a copy with these episodes. Open and costly episodes are sorted first."""
        in_order = tuple(sorted(episodes, key=lambda episode: (episode.is_over, -episode.cost_ns)))
        return dataclasses.replace(self, episodes=in_order, **changed)

    def diagnosis(self, key: tuple[int, int]) -> Diagnosis | None:
        """Return the diagnosis of an episode; None without a diagnosis. key: Episode.key."""
        now = (each.diagnosis for each in self.groups if each.lead.key == key)
        return next(now, None) or dict(self.diagnoses).get(key)


NOTHING = Findings((), 0, 0.0, None, 0, -1)


def cause_class(episode: Episode) -> str:
    """Return the class of an episode's cause: slow_compute, slow_data, slow_host, or more_work."""
    if episode.more_workload > MORE_WORK:
        return "more_work"
    if episode.phase == "data":
        return "slow_data"
    return (
        "slow_host"
        if episode.by_host or episode.phase in ("host", "gap", "cpu")
        else "slow_compute"
    )


def count_stragglers_by_class(findings: Findings) -> dict[str, int]:
    """Return the number of slow ranks of each class. All classes are included."""
    counts = Counter(map(cause_class, findings.slow_now))
    return {each: counts[each] for each in _CLASSES}
