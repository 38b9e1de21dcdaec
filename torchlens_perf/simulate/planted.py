"""Comparison of planted faults with the report's verdicts. For faults that were not found, the
comparison gives the reason. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.collectives.slow_link import MIN_RATIO
from torchlens_perf.analysis.statistics.quantities import format_duration
from torchlens_perf.run.rank_ranges import format_rank_list
from torchlens_perf.run.verdicts import format_step_range
from torchlens_perf.simulate.faults import LinkFault
from torchlens_perf.simulate.simulation import Fault, FaultEffect, Simulation, Topology
from torchlens_perf.verdicts.words.stragglers import MAX_NAMED

Row = Mapping[str, Any]
"""A row of the report's `verdicts`, as its JSON has it."""
NO_TRANSFERS = "--rows holds no transfer times: leave out --rows, and give --out"
# A fault explains long steps if it causes at least this share of their additional time.
_EXPLAINS = 0.5
_HIDDEN = (
    "a larger fault makes the same rank slow at the same time, and one verdict counts for one fault"
)
# A fault is rare if it makes fewer than this share of its steps longer.
_RARE = 0.25


def _steps_text(since: int, until: int | None) -> str:
    return f"in step {since}" if until == since + 1 else format_step_range(since, until)


@dataclasses.dataclass(frozen=True)
class NamingVerdict:
    """A verdict of the report that names ranks."""

    kind: str
    ranks: tuple[int, ...]
    slow_too: tuple[int, ...]
    """Other slow ranks that are included in the verdict's cost."""
    phase: str | None
    since_step: int | None
    until_step: int | None
    cost_s_per_step: float | None
    own_cost_s: float | None
    """With `slow_too`, the part of the cost that a repair of these ranks alone would save."""

    @property
    def place(self) -> tuple[list[int], slice]:
        """Index of the verdict's ranks and steps in an array [ranks, steps]."""
        return [*self.ranks, *self.slow_too], slice(self.since_step, self.until_step)

    def __str__(self) -> str:
        too = f" together with {format_rank_list(self.slow_too)}" if self.slow_too else ""
        if self.own_cost_s is not None:
            too += f", {format_duration(self.own_cost_s)} of it alone"
        cost = (
            "at an unknown cost"
            if self.cost_s_per_step is None
            else f"costs {format_duration(self.cost_s_per_step)} a step"
        )
        when = (
            "" if self.since_step is None else f", {_steps_text(self.since_step, self.until_step)}"
        )
        return (
            f"{format_rank_list(self.ranks)}, {self.phase or 'no phase'}{when}, {cost}{too} (verdict"
            f" {self.kind})"
        )


@dataclasses.dataclass(frozen=True)
class PlantedFault:
    """A fault that was planted, and the verdicts that name it."""

    fault: str
    """The fault as the user wrote it."""
    ranks: tuple[int, ...]
    """Ranks at fault, or the members of a slow group; empty if no rank is at fault."""
    phase: str | None
    since_step: int | None
    """The fault's first step; None if it does not begin within the run."""
    until_step: int | None
    """The first step after the fault; None if it lasts until the end of the run."""
    work_s_per_step: float
    """Additional work of a rank at fault, or additional transfer time of a slow group, in the steps
    of the fault."""
    cost_s_per_step: float
    """Additional time of the job's step in the steps of the fault."""
    found: bool | None
    """True if a verdict names any of the fault's ranks; None if no rank is at fault."""
    missed_ranks: tuple[int, ...]
    named_by: tuple[NamingVerdict, ...]
    why_not: str
    """The reason why some ranks at fault were not found; "" if unknown, or if all were found."""

    def format_lines(self) -> Iterator[str]:
        """Yield the lines of text on this fault."""
        state = {True: "found", False: "not found", None: "no rank is at fault"}[self.found]
        if self.found and self.missed_ranks:
            state += f", but not on {format_rank_list(self.missed_ranks)}"
        yield f"{self.fault}: {state}"
        if self.ranks and self.since_step is not None:
            yield (
                f"  planted    {format_rank_list(self.ranks)}, {self.phase},"
                f" {_steps_text(self.since_step, self.until_step)}, +{format_duration(self.work_s_per_step)},"
                f" costs {format_duration(self.cost_s_per_step)} a step"
            )
        yield from (f"  {'found':10} {each}" for each in self.named_by)
        if self.missed_ranks:
            yield f"  {'not found':10} {self.why_not or 'for an unknown reason'}"


@dataclasses.dataclass(frozen=True)
class ReportedVerdicts:
    """The report's verdicts, and the smallest slowdowns that the report can detect."""

    rows: Sequence[Row]
    detectable_s: float | None
    """The smallest detectable slowdown; None if no ranks were compared."""
    undecided_links: str | None
    """The reason why process groups were not compared; "" if they were compared; None without
    transfer times."""


@dataclasses.dataclass(frozen=True)
class FaultComparison:
    """All planted faults, and the verdicts on slow ranks and links that match none of them."""

    planted: tuple[PlantedFault, ...]
    unmatched: tuple[NamingVerdict, ...]

    def format_lines(self) -> Iterator[str]:
        """Yield lines of text; nothing without faults and unmatched verdicts."""
        counted = [each for each in self.planted if each.found is not None]
        if counted:
            found = sum(bool(each.found) and not each.missed_ranks for each in counted)
            yield f"planted faults: {found} of {len(counted)} found"
        for each in self.planted:
            yield from each.format_lines()
        yield from (f"not planted, but named: {each}" for each in self.unmatched)


class _Case(NamedTuple):
    """A fault of the simulation, with the steps that it concerns."""

    text: str
    fault: Fault
    mask: npt.NDArray[np.bool_]
    """True where a rank is at fault, or a member of a slow group: [ranks, steps]."""
    effect: FaultEffect


def compare_faults(
    texts: Sequence[str], simulation: Simulation, steps: int, compared: ReportedVerdicts
) -> FaultComparison:
    """Compare the planted faults with the verdicts. texts: the faults as the user wrote them."""
    numbers = np.arange(steps)
    masks = [fault.at_fault(numbers, simulation.topology) for fault in simulation.faults]
    cases = list(map(_Case, texts, simulation.faults, masks, simulation.fault_effects(steps)))
    verdicts = [_to_naming_verdict(row) for row in compared.rows]
    matches = [
        [number for number, case in enumerate(cases) if _is_match(row, verdict, case)]
        for row, verdict in zip(compared.rows, verdicts, strict=True)
    ]
    credited = [
        _faults_found_by_verdict(verdict, found, cases)
        for verdict, found in zip(verdicts, matches, strict=True)
    ]
    planted = []
    for number, case in enumerate(cases):
        named = [verdicts[row] for row, found in enumerate(credited) if number in found]
        is_hidden = any(
            number in found and number not in of_row
            for found, of_row in zip(matches, credited, strict=True)
        )
        planted.append(
            _build_planted_fault(
                case, named, _HIDDEN if is_hidden else "", cases, simulation, compared
            )
        )
    wrong = [
        verdict
        for verdict, found in zip(verdicts, matches, strict=True)
        if not found and verdict.kind.startswith(("straggler", "slow_link"))
    ]
    return FaultComparison(tuple(planted), tuple(wrong))


def _faults_found_by_verdict(
    named: NamingVerdict, found: Sequence[int], cases: Sequence[_Case]
) -> Sequence[int]:
    """Return the faults that a verdict finds, as indices. found: the faults that it matches.

    For each rank and step, a verdict can find only one fault. Faults in the verdict's phase are
    preferred, then larger faults.
    """
    if not named.kind.startswith("straggler"):
        return found

    def preference(number: int) -> tuple[bool, float]:
        case = cases[number]
        is_other_phase = getattr(case.fault, "phase", None) != named.phase
        return is_other_phase, -float(case.effect.work_ns[named.place].sum())

    credited, taken = [], np.zeros_like(cases[0].mask[named.place])
    for number in sorted(found, key=preference):
        of_fault = cases[number].mask[named.place]
        if (of_fault & ~taken).any():
            credited.append(number)
        taken |= of_fault
    return credited


def _to_naming_verdict(row: Row) -> NamingVerdict:
    evidence = row["evidence"].get("long") or row["evidence"]
    since, until = row["since_step"], None
    if row["kind"] == "slow_link":
        ranks = sorted({rank for link in evidence["found"]["links"] for rank in link["ranks"]})
    elif row["kind"] == "long_steps":
        ranks = [] if evidence["waited_for"] is None else [evidence["waited_for"]]
        since, until = min(evidence["steps"]), max(evidence["steps"]) + 1
    else:
        ranks = evidence.get("ranks") or ([] if row["rank"] is None else [row["rank"]])
        until = evidence.get("until_step")
    return NamingVerdict(
        row["kind"],
        tuple(ranks),
        tuple(evidence.get("slow_too", ())),
        row["phase"] or evidence.get("part"),
        since,
        until,
        row["cost_s_per_step"],
        evidence.get("own_cost_s"),
    )


def _is_match(row: Row, named: NamingVerdict, case: _Case) -> bool:
    """Return True if the verdict's kind, ranks and steps match the fault."""
    mask, evidence = case.mask, row["evidence"]
    members = set(np.flatnonzero(mask.any(axis=1)).tolist())
    if isinstance(case.fault, LinkFault):
        is_link = named.kind == "slow_link"
        links = [each["ranks"] for each in evidence["found"]["links"]] if is_link else [named.ranks]
        is_inside = any(members.issuperset(each) for each in links if each)
        return named.kind.startswith("slow_link") and is_inside
    if named.kind.startswith("imbalance"):
        return bool(named.ranks) and members.issuperset(named.ranks)
    if named.kind == "long_steps":
        steps = [step for step in evidence["long"]["steps"] if step < mask.shape[1]]
        if not members.intersection(named.ranks) or not steps:
            return False
        work_ns = case.effect.work_ns[named.ranks[0], steps].mean()
        return bool(work_ns >= _EXPLAINS * 1e9 * evidence["long"]["more_s"])
    return named.kind.startswith("straggler") and bool(mask[named.place].any())


def _build_planted_fault(
    case: _Case,
    named: Sequence[NamingVerdict],
    why: str,
    cases: Sequence[_Case],
    simulation: Simulation,
    compared: ReportedVerdicts,
) -> PlantedFault:
    """Return one fault with the verdicts that find it. why: why it may be missed, if known."""
    fault, mask = case.fault, case.mask
    members, steps = _fault_ranks(case, simulation.topology), np.flatnonzero(mask.any(axis=0))
    work_ns, cost_ns, since, until = 0.0, 0.0, None, None
    if len(steps):
        work_ns = float(case.effect.work_ns[mask].mean())
        cost_ns = float(case.effect.cost_ns[steps].mean())
        since, until = int(steps[0]), int(steps[-1]) + 1
    found = {rank for each in named for rank in (*each.ranks, *each.slow_too)}
    phase, missed = getattr(fault, "phase", None), tuple(sorted({*members} - found))
    if isinstance(fault, LinkFault):
        phase, missed = "communication", () if named else members
        work_ns = fault.share * simulation.work_ns if len(steps) else 0.0
    if missed:
        why = why or _reason_not_found(case, work_ns, cases, simulation, compared)
    return PlantedFault(
        fault=case.text,
        ranks=members,
        phase=phase if members else None,
        since_step=since,
        until_step=until if until != mask.shape[1] else None,
        work_s_per_step=work_ns / 1e9,
        cost_s_per_step=cost_ns / 1e9,
        found=len(missed) < len(members) if members else None,
        missed_ranks=missed,
        named_by=tuple(named),
        why_not=why if missed else "",
    )


def _fault_ranks(case: _Case, topology: Topology) -> tuple[int, ...]:
    """Return the ranks of a fault; () if no rank is at fault.

    A fault that does not begin within the run has ranks as well.
    """
    fault, mask = case.fault, case.mask
    if not mask.any():
        mask = fault.at_fault(np.array([fault.since]), topology)
    return tuple(np.flatnonzero(mask.any(axis=1)).tolist())


def _reason_not_found(
    case: _Case,
    work_ns: float,
    cases: Sequence[_Case],
    simulation: Simulation,
    compared: ReportedVerdicts,
) -> str:
    """Return the reason why the fault was not found; "" if unknown."""
    count, total = int(case.mask.any(axis=0).sum()), case.mask.shape[1]
    if not count:
        return f"it does not begin within the {total} steps"
    if isinstance(case.fault, LinkFault):
        return _reason_link_not_found(case.fault, simulation, compared.undecided_links)
    topology, detectable_s = simulation.topology, compared.detectable_s
    alike = topology.dp * topology.tp
    if alike < 2:
        return "not compared: no other rank does the same work"
    if detectable_s is None:
        return f"not compared: {total} steps are too few"
    smallest = f"the smallest detectable slowdown is {format_duration(detectable_s)} a step"
    reasons = []
    if work_ns / 1e9 < detectable_s:
        reasons.append(f"too small: {format_duration(work_ns / 1e9)} a step, and {smallest}")
    at_fault = np.any([each.mask for each in cases], axis=0)
    slow = at_fault.reshape(topology.pp, alike, total).sum(axis=1).max()
    if 2 * slow >= alike:
        reasons.append(
            f"{slow} of the {alike} ranks that do the same work are slow, so the others are no"
            " clear majority"
        )
    if reasons:
        return "; ".join(reasons)
    struck = int((case.effect.work_ns > 0).any(axis=0).sum())
    if struck < _RARE * count:
        is_compared = compared.undecided_links is not None
        rows = "" if is_compared else ", and --rows has no verdicts on long steps"
        return f"too rare: it makes {struck} of {count} steps longer{rows}"
    if count < total:
        return (
            f"too short: it lasts {count} of {total} steps, and {smallest} only for a rank that is"
            " slow in all of them"
        )
    if sum(row["kind"] == "straggler" for row in compared.rows) >= MAX_NAMED:
        return f"the report names {MAX_NAMED} slow ranks, nodes or positions at most"
    return ""


def _reason_link_not_found(fault: LinkFault, simulation: Simulation, undecided: str | None) -> str:
    if undecided is None:
        return NO_TRANSFERS
    if undecided:
        return f"not compared: {undecided}"
    ratio = 1 + fault.share / simulation.transfer_share(fault.dimension)
    if ratio >= MIN_RATIO:
        return ""
    return (
        f"too small: transfers take {ratio:.2g} times as long, and a slow link is named from"
        f" {MIN_RATIO:g} on"
    )
