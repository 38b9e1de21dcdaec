"""Comparison of planted faults with the report's verdicts. For faults that were not found, the
comparison gives the reason. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.analysis.collectives.slow_link import MIN_RATIO
from torchlens_perf.analysis.statistics.quantities import format_duration
from torchlens_perf.run.rank_ranges import format_rank_list
from torchlens_perf.run.verdicts import format_step_range
from torchlens_perf.simulate.faults import LinkFault
from torchlens_perf.verdicts.words.order import ranks_in_row
from torchlens_perf.verdicts.words.stragglers import MAX_NAMED

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.simulate.simulation import Fault, FaultEffect, Simulation

Row = Mapping[str, Any]
"""A row of the report's `verdicts`, as its JSON has it."""
NO_TRANSFERS = "--rows holds no transfer times: leave out --rows, and give --out"
# A fault explains long steps if it causes at least this share of their additional time.
_EXPLAINS = 0.5
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

    def __str__(self) -> str:
        too = f" together with {format_rank_list(self.slow_too)}" if self.slow_too else ""
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


def compare_faults(
    texts: Sequence[str], simulation: Simulation, steps: int, compared: ReportedVerdicts
) -> FaultComparison:
    """Compare the planted faults with the verdicts. texts: the faults as the user wrote them."""
    effects = simulation.fault_effects(steps)
    lasting = [_fault_mask(fault, simulation, steps) for fault in simulation.faults]
    at_fault = np.zeros((simulation.topology.rank_count, steps), bool)
    for ranks_of_step in lasting:
        at_fault |= ranks_of_step
    cases = list(zip(simulation.faults, lasting, effects, strict=True))
    matches = [
        [index for index, case in enumerate(cases) if _is_match(row, *case)]
        for row in compared.rows
    ]
    credited = [
        _faults_found_by_verdict(row, found, cases)
        for row, found in zip(compared.rows, matches, strict=True)
    ]
    used = {index for index, found in enumerate(matches) if found}
    planted = []
    for number, (text, (fault, of_fault, effect)) in enumerate(zip(texts, cases, strict=True)):
        named = [
            _to_naming_verdict(row)
            for row, found in zip(compared.rows, credited, strict=True)
            if number in found
        ]
        is_hidden = any(
            number in found and number not in of_row
            for found, of_row in zip(matches, credited, strict=True)
        )
        planted.append(
            _build_planted_fault(
                text, fault, simulation, of_fault, effect, named, compared, at_fault, is_hidden
            )
        )
    wrong = [
        _to_naming_verdict(row)
        for index, row in enumerate(compared.rows)
        if index not in used and row["kind"].startswith(("straggler", "slow_link"))
    ]
    return FaultComparison(tuple(planted), tuple(wrong))


def _faults_found_by_verdict(
    row: Row,
    found: Sequence[int],
    cases: Sequence[tuple[Fault, npt.NDArray[np.bool_], FaultEffect]],
) -> list[int]:
    """Return the faults that a verdict finds, as indices. found: the faults that it matches.

    For each rank and step, a verdict can find only one fault. Faults in the verdict's phase are
    preferred, then larger faults.
    """
    if not row["kind"].startswith("straggler"):
        return list(found)
    named = _to_naming_verdict(row)
    ranks, steps = [*named.ranks, *named.slow_too], slice(named.since_step, named.until_step)

    def preference(number: int) -> tuple[bool, float]:
        fault, _, effect = cases[number]
        return getattr(fault, "phase", None) != named.phase, -float(
            effect.work_ns[ranks, steps].sum()
        )

    credited, taken = [], np.zeros_like(cases[0][1])
    for number in sorted(found, key=preference):
        of_fault = np.zeros_like(taken)
        of_fault[ranks, steps] = cases[number][1][ranks, steps]
        if (of_fault & ~taken).any():
            credited.append(number)
        taken |= of_fault
    return credited


def _fault_mask(fault: Fault, simulation: Simulation, steps: int) -> npt.NDArray[np.bool_]:
    """Return an array [ranks, steps] that is True where a rank is at fault, or a member of a slow
    group."""
    topology = simulation.topology
    found = np.zeros((topology.rank_count, steps), bool)
    group = (
        topology.group_ranks(fault.dimension, fault.rank) if isinstance(fault, LinkFault) else []
    )
    for step in range(steps):
        if isinstance(fault, LinkFault):
            found[group, step] = fault.is_active(step)
        else:
            found[list(fault.slow_ranks(step, topology)), step] = True
    return found


def _to_naming_verdict(row: Row) -> NamingVerdict:
    evidence = row["evidence"]
    until, since, slow_too = None, row["since_step"], tuple(evidence.get("slow_too", ()))
    if row["kind"] == "slow_link":
        ranks = sorted({rank for link in evidence["links"] for rank in link["ranks"]})
    elif row["kind"] == "long_steps":
        ranks = [] if evidence["waited_for"] is None else [evidence["waited_for"]]
        since, until = min(evidence["steps"]), max(evidence["steps"]) + 1
    else:
        ranks = list(ranks_in_row(row))
        until = evidence.get("until_step")
    phase = row["phase"] or evidence.get("part")
    return NamingVerdict(
        row["kind"], tuple(ranks), slow_too, phase, since, until, row["cost_s_per_step"]
    )


def _is_match(row: Row, fault: Fault, lasting: npt.NDArray[np.bool_], effect: FaultEffect) -> bool:
    """Return True if the verdict's kind, ranks and steps match the fault."""
    kind, named = row["kind"], _to_naming_verdict(row)
    members = set(np.flatnonzero(lasting.any(axis=1)).tolist())
    if isinstance(fault, LinkFault):
        links = (
            [each["ranks"] for each in row["evidence"]["links"]]
            if kind == "slow_link"
            else [named.ranks]
        )
        return kind.startswith("slow_link") and any(
            members.issuperset(each) for each in links if each
        )
    if kind.startswith("imbalance"):
        return bool(named.ranks) and members.issuperset(named.ranks)
    if kind == "long_steps":
        steps = [step for step in row["evidence"]["steps"] if step < lasting.shape[1]]
        if not members.intersection(named.ranks) or not steps:
            return False
        return bool(
            effect.work_ns[named.ranks[0], steps].mean()
            >= _EXPLAINS * 1e9 * row["evidence"]["more_s"]
        )
    if not kind.startswith("straggler"):
        return False
    return bool(lasting[[*named.ranks, *named.slow_too], named.since_step : named.until_step].any())


def _build_planted_fault(
    text: str, fault: Fault, simulation: Simulation, lasting: npt.NDArray[np.bool_], effect: FaultEffect,
    named: Sequence[NamingVerdict], compared: ReportedVerdicts, at_fault: npt.NDArray[np.bool_], is_hidden: bool,
) -> PlantedFault:  # fmt: skip
    """Return one fault with the verdicts that find it.

    is_hidden: True if a verdict on the fault's ranks and steps was credited to another fault.
    """
    members, steps = _fault_ranks(fault, simulation, lasting), np.flatnonzero(lasting.any(axis=0))
    is_link, begun, until = isinstance(fault, LinkFault), bool(len(steps)), None
    if begun and steps[-1] + 1 < lasting.shape[1]:
        until = int(steps[-1]) + 1
    work_ns = 0.0
    if begun:
        work_ns = (
            fault.share * simulation.work_ns
            if isinstance(fault, LinkFault)
            else float(effect.work_ns[lasting].mean())
        )
    found = {rank for each in named for rank in (*each.ranks, *each.slow_too)}
    missed = () if is_link and named else tuple(rank for rank in members if rank not in found)
    why = ""
    if missed and is_hidden:
        why = (
            "a larger fault makes the same rank slow at the same time, and one verdict counts for"
            " one fault"
        )
    elif missed:
        why = _reason_not_found(fault, simulation, lasting, effect, work_ns, compared, at_fault)
    return PlantedFault(
        fault=text,
        ranks=members,
        phase=("communication" if is_link else getattr(fault, "phase", None)) if members else None,
        since_step=int(steps[0]) if begun else None,
        until_step=until,
        work_s_per_step=work_ns / 1e9,
        cost_s_per_step=float(effect.cost_ns[steps].mean()) / 1e9 if begun else 0.0,
        found=len(missed) < len(members) if members else None,
        missed_ranks=missed,
        named_by=tuple(named),
        why_not=why,
    )


def _fault_ranks(
    fault: Fault, simulation: Simulation, lasting: npt.NDArray[np.bool_]
) -> tuple[int, ...]:
    """Return the ranks of a fault; () if no rank is at fault.

    A fault that does not begin within the run has ranks as well.
    """
    if isinstance(fault, LinkFault):
        return tuple(simulation.topology.group_ranks(fault.dimension, fault.rank))
    if lasting.any():
        return tuple(np.flatnonzero(lasting.any(axis=1)).tolist())
    return tuple(sorted(fault.slow_ranks(getattr(fault, "since", 0), simulation.topology)))


def _reason_not_found(
    fault: Fault, simulation: Simulation, lasting: npt.NDArray[np.bool_], effect: FaultEffect, work_ns: float,
    compared: ReportedVerdicts, at_fault: npt.NDArray[np.bool_],
) -> str:  # fmt: skip
    """Return the reason why the fault was not found; "" if unknown."""
    count, total = int(lasting.any(axis=0).sum()), lasting.shape[1]
    if not count:
        return f"it does not begin within the {total} steps"
    if isinstance(fault, LinkFault):
        return _reason_link_not_found(fault, simulation, compared.undecided_links)
    topology, detectable_s = simulation.topology, compared.detectable_s
    if topology.dp * topology.tp < 2:
        return "not compared: no other rank does the same work"
    if detectable_s is None:
        return f"not compared: {total} steps are too few"
    alike, smallest = (
        topology.dp * topology.tp,
        f"the smallest detectable slowdown is {format_duration(detectable_s)} a step",
    )
    reasons = []
    if work_ns / 1e9 < detectable_s:
        reasons.append(f"too small: {format_duration(work_ns / 1e9)} a step, and {smallest}")
    slow = at_fault.reshape(topology.pp, alike, total).sum(axis=1).max()
    if 2 * slow >= alike:
        reasons.append(
            f"{slow} of the {alike} ranks that do the same work are slow, so the others are no"
            " clear majority"
        )
    if reasons:
        return "; ".join(reasons)
    struck = int((effect.work_ns > 0).any(axis=0).sum())
    if struck < _RARE * count:
        rows = (
            ""
            if compared.undecided_links is not None
            else ", and --rows has no verdicts on long steps"
        )
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
        return f"not compared: {undecided.removesuffix('.')}"
    ratio = 1 + fault.share / simulation.transfer_share(fault.dimension)
    if ratio < MIN_RATIO:
        return (
            f"too small: transfers take {ratio:.2g} times as long, and a slow link is named from"
            f" {MIN_RATIO:g} on"
        )
    return ""
