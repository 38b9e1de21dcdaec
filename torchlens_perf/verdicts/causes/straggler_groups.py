"""From slow ranks to what they have in common: one rank, a whole node, or a position in the mesh. Pure."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from torchlens_perf.run.rank_ranges import parse_ranges
from torchlens_perf.verdicts.causes.rules import Diagnosis
from torchlens_perf.verdicts.stragglers.detector import Findings
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.placement import STAGES, Placement, groups_of

MAX_NAMED = 8
MAX_MODULES = 3  # of a straggler group
MIN_IMBALANCE = 0.1  # of the step: what a pipeline stage does more than the others on average


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
class StragglerSummary:
    """The stragglers to report now: groups, a stage imbalance, and why earlier ones were slow."""

    groups: tuple[StragglerGroup, ...] = ()
    imbalance: StageImbalance | None = None
    past: tuple[tuple[tuple[int, int], Diagnosis], ...] = ()
    """With Episode.key, why ranks were slow that no longer are."""

    def diagnosis(self, key: tuple[int, int]) -> Diagnosis | None:
        """Why a rank is, or was, slow in this episode; None if that is not known."""
        now = (each.diagnosis for each in self.groups if each.lead.key == key)
        return next(now, None) or dict(self.past).get(key)


NOBODY = StragglerSummary()


def name(
    findings: Findings,
    places: Mapping[int, Placement],
    module_excess_ns: Callable[[int], Mapping[str, float]] | None = None,
    diagnosed: Callable[[StragglerGroup], Diagnosis] | None = None,
    before: StragglerSummary | None = None,
) -> StragglerSummary:
    """Who is slow now. `places` has all ranks that were compared.

    module_excess_ns: by module, how much longer it takes on that rank than on the others. diagnosed: why it is slow.
    before: who was named last, of whom it is kept why.
    """
    found = straggler_groups(findings.slow_now, places)[:MAX_NAMED]
    if module_excess_ns is not None:
        found = [
            dataclasses.replace(each, slower_modules_ns=_largest(module_excess_ns(each.lead.rank)))
            if each.lead.phase == "forward"
            else each
            for each in found
        ]
    if diagnosed is not None:
        found = [dataclasses.replace(each, diagnosis=diagnosed(each)) for each in found]
    past = []
    for episode in findings.slow_before:
        why = before.diagnosis(episode.key) if before is not None else None
        if why is not None:
            past.append((episode.key, why))
    return StragglerSummary(tuple(found), stage_imbalance(findings, places), tuple(past))


def _largest(excess_ns: Mapping[str, float]) -> dict[str, float]:
    above = sorted(((value, name) for name, value in excess_ns.items() if value > 0), reverse=True)
    return {name: value for value, name in above[:MAX_MODULES]}


def straggler_groups(episodes: Sequence[Episode], places: Mapping[int, Placement]) -> list[StragglerGroup]:
    """Who is to be named for these episodes, the costliest first. `places` has all ranks that were compared."""
    left = {episode.rank: episode for episode in episodes}
    found = [
        StragglerGroup(kind, name, ranks, max(map(left.pop, ranks), key=lambda episode: episode.excess_ns))
        for kind, name, ranks in groups_of(left.keys(), places)
    ]
    found += [StragglerGroup("rank", "", (rank,), episode) for rank, episode in left.items()]
    of: dict[str, set[int]] = defaultdict(set)
    for episode in episodes:
        of[places.get(episode.rank, Placement()).population].add(episode.rank)
    for index, each in enumerate(found):
        place = places.get(each.lead.rank, Placement())
        same = set().union(*(of[places.get(rank, Placement()).population] for rank in each.ranks))
        slow_too = tuple(sorted(same.difference(each.ranks))) if each.lead.shared_cost_ns is not None else ()
        found[index] = dataclasses.replace(each, host=place.host, location=place.location, slow_too=slow_too)
    return sorted(found, key=lambda each: (-(each.cost_ns or each.lead.cost_ns), -each.lead.excess_ns))


def stage_imbalance(findings: Findings, places: Mapping[int, Placement]) -> StageImbalance | None:
    """The pipeline stage with the most work, if that is much more than the others'. None without stages."""
    stages: dict[str, list[tuple[tuple[int, ...], float]]] = defaultdict(list)
    for usual in findings.usual:
        ranks = parse_ranges(usual.ranks)
        coordinates = places[ranks[0]].coordinates if ranks and ranks[0] in places else {}
        stage = next((f"{name} {coordinates[name]}" for name in STAGES if name in coordinates), "")
        if stage:
            stages[stage].append((ranks, usual.work_ns))
    if len(stages) < 2 or not findings.step_ns:
        return None
    work = {stage: max(value for _, value in parts) for stage, parts in stages.items()}
    largest = max(work, key=lambda stage: work[stage])
    others = [value for stage, value in work.items() if stage != largest]
    mean = sum(others) / len(others)
    if work[largest] - mean < MIN_IMBALANCE * findings.step_ns:
        return None
    ranks = tuple(sorted(rank for part, _ in stages[largest] for rank in part))
    return StageImbalance(largest, ranks, work[largest], mean, len(work))


def suspect_and_healthy(
    named: StragglerSummary, findings: Findings, places: Mapping[int, Placement], within_reach: Collection[int]
) -> tuple[int, ...]:
    """The slowest rank of the costliest straggler group that is within reach, and one that nobody suspects beside it.

    Of the same population, and of its node where there is one: then the node is not what they differ by. Only the
    suspect where there is no other; () where nobody is named.
    """
    suspect = next((each.lead.rank for each in named.groups if each.lead.rank in within_reach), None)
    if suspect is None:
        return ()
    slow = {rank for each in named.groups for rank in each.ranks}
    slow |= {episode.rank for episode in findings.slow_now}
    here = places.get(suspect, Placement())
    healthy = [
        rank
        for rank, place in places.items()
        if rank not in slow and rank in within_reach and place.population == here.population
    ]
    best = min(healthy, key=lambda rank: (places[rank].host != here.host, abs(rank - suspect), rank), default=None)
    return (suspect,) if best is None else (suspect, best)
