"""From slow ranks to what they have in common: one rank, a whole node, or a position in the mesh. Pure."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torchlens_perf.diagnosis import Diagnosis
from torchlens_perf.episodes import Episode
from torchlens_perf.grouping import STAGES, groups_of
from torchlens_perf.rank_ranges import parse_ranges
from torchlens_perf.straggler import Findings, Place

MOST_NAMED = 8
MOST_MODULES = 3  # of a culprit
LEAST_IMBALANCE = 0.1  # of the step: what a pipeline stage does more than the others on average


@dataclasses.dataclass(frozen=True)
class Culprit:
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
    site: str = ""
    """Where that host is, in words."""
    slower_modules_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Where it is slow in the forward pass, the modules that take longer on the slowest rank than on the others, and by
    how much; empty if not known."""
    diagnosis: Diagnosis | None = None
    """Why the slowest rank is slow; None where it was not asked."""

    @property
    def cost_ns(self) -> float | None:
        """What the job would gain a step without all of its ranks; None where that is not known.

        Not the sum of theirs, nor that of one: without one of eight slow ranks, the job waits for the other seven.
        """
        return self.lead.cost_ns if self.kind == "rank" else self.lead.shared_cost_ns

    @property
    def cost_share(self) -> float | None:
        """The same as a share of the step."""
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
class Named:
    """Who is to be named now."""

    culprits: tuple[Culprit, ...] = ()
    imbalance: StageImbalance | None = None
    past: Mapping[tuple[int, int], Diagnosis] = dataclasses.field(default_factory=dict)
    """By Episode.key, why ranks were slow that no longer are."""

    def diagnosis(self, key: tuple[int, int]) -> Diagnosis | None:
        """Why a rank is, or was, slow in this episode; None if that is not known."""
        now = (each.diagnosis for each in self.culprits if each.lead.key == key)
        return next(now, None) or self.past.get(key)

    def to_json(self) -> dict[str, Any]:
        past = [[*key, diagnosis.to_json()] for key, diagnosis in self.past.items()]
        return {**dataclasses.asdict(dataclasses.replace(self, past={})), "past": past}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Named:
        return cls(
            tuple(
                Culprit(
                    **{
                        **each,
                        "ranks": tuple(each["ranks"]),
                        "lead": Episode(**each["lead"]),
                        "diagnosis": each["diagnosis"] and Diagnosis.from_json(each["diagnosis"]),
                    }
                )
                for each in value["culprits"]
            ),
            value["imbalance"]
            and StageImbalance(**{**value["imbalance"], "ranks": tuple(value["imbalance"]["ranks"])}),
            {(rank, step): Diagnosis.from_json(diagnosis) for rank, step, diagnosis in value["past"]},
        )


NOBODY = Named()


def name(
    findings: Findings,
    places: Mapping[int, Place],
    module_excess_ns: Callable[[int], Mapping[str, float]] | None = None,
    diagnosed: Callable[[Culprit], Diagnosis] | None = None,
    before: Named | None = None,
) -> Named:
    """Who is slow now. `places` has all ranks that were compared.

    module_excess_ns: by module, how much longer it takes on that rank than on the others. diagnosed: why it is slow.
    before: who was named last, of whom it is kept why.
    """
    now = [episode for episode in findings.episodes if episode.until_step is None]
    found = culprits(now, places)[:MOST_NAMED]
    if module_excess_ns is not None:
        found = [
            dataclasses.replace(each, slower_modules_ns=_largest(module_excess_ns(each.lead.rank)))
            if each.lead.phase == "forward"
            else each
            for each in found
        ]
    if diagnosed is not None:
        found = [dataclasses.replace(each, diagnosis=diagnosed(each)) for each in found]
    past = {}
    for episode in findings.episodes:
        why = before.diagnosis(episode.key) if before is not None and episode.until_step is not None else None
        if why is not None:
            past[episode.key] = why
    return Named(tuple(found), stage_imbalance(findings, places), past)


def _largest(excess_ns: Mapping[str, float]) -> dict[str, float]:
    above = sorted(((value, name) for name, value in excess_ns.items() if value > 0), reverse=True)
    return {name: value for value, name in above[:MOST_MODULES]}


def culprits(episodes: Sequence[Episode], places: Mapping[int, Place]) -> list[Culprit]:
    """Who is to be named for these episodes, the costliest first. `places` has all ranks that were compared."""
    left = {episode.rank: episode for episode in episodes}
    found = [
        Culprit(kind, name, ranks, _lead([left.pop(rank) for rank in ranks]))
        for kind, name, ranks in groups_of(left.keys(), places)
    ]
    found += [Culprit("rank", "", (rank,), episode) for rank, episode in left.items()]
    at = [places.get(each.lead.rank, Place()) for each in found]
    found = [dataclasses.replace(each, host=place.host, site=place.site) for each, place in zip(found, at, strict=True)]
    return sorted(found, key=lambda each: (-(each.cost_ns or each.lead.cost_ns), -each.lead.excess_ns))


def _lead(episodes: Iterable[Episode]) -> Episode:
    return max(episodes, key=lambda episode: episode.excess_ns)


def stage_imbalance(findings: Findings, places: Mapping[int, Place]) -> StageImbalance | None:
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
    if work[largest] - mean < LEAST_IMBALANCE * findings.step_ns:
        return None
    ranks = tuple(sorted(rank for part, _ in stages[largest] for rank in part))
    return StageImbalance(largest, ranks, work[largest], mean, len(work))
