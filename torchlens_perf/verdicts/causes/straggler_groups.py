"""Groups of slow ranks that have the same cause: a node, a position in the mesh, or a single rank.
Pure."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from torchlens_perf.run.grouping import group_values
from torchlens_perf.run.rank_ranges import parse_ranges
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import (
    NOTHING,
    Diagnosis,
    Findings,
    StageImbalance,
    StragglerGroup,
)
from torchlens_perf.verdicts.stragglers.placement import STAGES, Placement, group_slow

# The number of groups that are diagnosed, beginning with the costliest.
MAX_EXPLAINED = 8
MAX_MODULES = 3
# A pipeline stage is reported if its excess work is at least this share of the step.
MIN_IMBALANCE = 0.1


def add_straggler_groups(
    findings: Findings,
    places: Mapping[int, Placement],
    module_excess_ns: Callable[[int], Mapping[str, float]] | None = None,
    diagnosed: Callable[[StragglerGroup], Diagnosis] | None = None,
    before: Findings = NOTHING,
) -> Findings:
    """Return the findings with groups of slow ranks, their diagnoses, and an imbalanced stage.

    places: placements of all compared ranks. module_excess_ns: returns a rank's excess time by
    module. diagnosed: returns the diagnosis of a group. before: earlier findings, whose diagnoses
    of ranks that are no longer slow are kept.
    """
    groups = find_straggler_groups(findings.slow_now, places)
    for index, each in enumerate(groups[:MAX_EXPLAINED]):
        if module_excess_ns is not None and each.lead.phase == "forward":
            excess_ns = ((ns, name) for name, ns in module_excess_ns(each.lead.rank).items())
            largest = sorted(excess_ns, reverse=True)[:MAX_MODULES]
            each = dataclasses.replace(
                each, slower_modules_ns={name: ns for ns, name in largest if ns > 0}
            )
        groups[index] = (
            each if diagnosed is None else dataclasses.replace(each, diagnosis=diagnosed(each))
        )
    kept = ((episode.key, before.diagnosis(episode.key)) for episode in findings.slow_before)
    return dataclasses.replace(
        findings,
        groups=tuple(groups),
        imbalance=find_imbalance(findings, places),
        diagnoses=tuple((key, why) for key, why in kept if why is not None),
    )


def find_straggler_groups(
    episodes: Sequence[Episode], places: Mapping[int, Placement]
) -> list[StragglerGroup]:
    """Return the groups of the slow ranks in these episodes, the costliest first.

    places: placements of all compared ranks, whether slow or not.
    """
    left = {episode.rank: episode for episode in episodes}
    found = [
        StragglerGroup(
            kind, name, ranks, max(map(left.pop, ranks), key=lambda episode: episode.excess_ns)
        )
        for kind, name, ranks in group_slow(left.keys(), places)
    ]
    found += [StragglerGroup("rank", "", (rank,), episode) for rank, episode in left.items()]
    slow_in = group_values(
        (places.get(episode.rank, Placement()).population, episode.rank) for episode in episodes
    )
    for index, each in enumerate(found):
        place = places.get(each.lead.rank, Placement())
        same = set().union(
            *(slow_in[places.get(rank, Placement()).population] for rank in each.ranks)
        )
        slow_too = (
            tuple(sorted(same.difference(each.ranks))) if each.lead.shared is not None else ()
        )
        # Ranks that share one cost have one share of it: of the step since all of them are slow.
        last = max(
            (slow for slow in episodes if slow.rank in (*each.ranks, *slow_too)),
            key=lambda slow: slow.judged_from_step,
        )
        found[index] = dataclasses.replace(
            each,
            host=place.host,
            location=place.location,
            slow_too=slow_too,
            step_ns=last.step_ns,
        )
    return sorted(
        found, key=lambda each: (-(each.cost_ns or each.lead.cost_ns), -each.lead.excess_ns)
    )


def find_imbalance(findings: Findings, places: Mapping[int, Placement]) -> StageImbalance | None:
    """Return the pipeline stage with the most work if it exceeds the others by MIN_IMBALANCE; else
    None."""
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


def choose_suspect_and_healthy(
    findings: Findings, places: Mapping[int, Placement], within_reach: Collection[int]
) -> tuple[int, ...]:
    """Return a slow rank and a healthy rank to compare it with.

    The slow rank is the slowest of its group. Groups are considered by descending cost until one
    has its slowest rank in `within_reach`. The healthy rank does the same work, if possible on the
    same node. Without a healthy rank, return only the slow rank. Return () if no rank is slow.
    """
    suspect = next(
        (each.lead.rank for each in findings.groups if each.lead.rank in within_reach), None
    )
    if suspect is None:
        return ()
    slow = {episode.rank for episode in findings.slow_now}
    here = places.get(suspect, Placement())
    healthy = [
        rank
        for rank, place in places.items()
        if rank not in slow and rank in within_reach and place.population == here.population
    ]
    best = min(
        healthy,
        key=lambda rank: (places[rank].host != here.host, abs(rank - suspect), rank),
        default=None,
    )
    return (suspect,) if best is None else (suspect, best)
