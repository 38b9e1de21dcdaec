"""Verdicts on slow ranks, with their sentences: rank, phase, first step, cost and next action."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Literal, NamedTuple

from msgspec import structs

from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.run.rank_ranges import format_ranges, format_rank_list
from torchlens_perf.verdicts.causes.rules import WAITS_FOR_CPU
from torchlens_perf.verdicts.causes.straggler_groups import MAX_MODULES, MIN_IMBALANCE
from torchlens_perf.verdicts.kinds import SHORT_STRAGGLER, past_kind
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import (
    MORE_WORK,
    Diagnosis,
    Findings,
    StragglerGroup,
    UsualTimes,
    cause_class,
)
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.stragglers.placement import BY_DEVICE
from torchlens_perf.verdicts.verdict import WORTH_A_LINE, Evidence, Period, RunLength, Verdict
from torchlens_perf.verdicts.words.causes import describe_cause, describe_diagnosis
from torchlens_perf.verdicts.words.evidence import (
    ImbalanceEvidence,
    LargestGap,
    NoSlowRankEvidence,
    NotComparedEvidence,
    SampledLines,
)
from torchlens_perf.verdicts.words.host_code import find_lines, find_longer_gap
from torchlens_perf.verdicts.words.phases import phase_name
from torchlens_perf.verdicts.words.report import Collective, Facts, Module, Rank

MAX_NAMED = 4
# The advice is to run at least this many steps. Short steps are averaged before they are compared,
# so more of them are needed.
_MIN_STEPS = 40
# Only this many ended episodes have a verdict, beginning with the newest.
MAX_PAST = 64
# An ended episode of at most this many steps is transient.
_SHORT_STEPS = 30
# A rank is intermittently slow if less than this share of its steps is slow.
_INTERMITTENT = 0.6
# A verdict is in doubt if another rank arrived last in at least this share of the collectives.
_LAST_IN_MOST = 0.6
_MIN_JOINED = 20
# Ranks have too much work if the other ranks wait for at least this share of the difference.
_WAITS_FOR_IT = 0.5
_COMPUTING = ("forward", "recompute", "backward", "compute", "optimizer")
# For an ended episode, the cost of all ranks that were slow together is reported if it is at least
# this many times the cost of the single rank.
_MIN_SHARED_RATIO = 2.0
# Times of modules are from typical steps, and include lack of a CPU. The excess of a phase is from
# slow steps, and excludes lack of a CPU. If the modules' excess is more than this many times the
# phase's excess, only the names of the modules are shown.
_MAX_MODULE_RATIO = 1.1
# A gain below this share of the excess is called nothing.
_GAIN = 0.01
# A module explains the excess if at least this share of its own excess is above nearly all other ranks.
_ABOVE_OTHERS, _NEARLY_ALL = 0.5, 0.9
# The excess is between the modules if all of them explain less than this share of it.
_FEW = 0.25
ModuleTimes = Literal["by_rank", "backward_by_rank", "device_own_by_rank"]
# For each slow phase, the times of modules that are compared, by the host's clock and by the
# device's clock. Devices do not time modules in the backward pass.
_BY_RANK: dict[str, tuple[ModuleTimes, ...]] = {
    "forward": ("by_rank",), "backward": ("backward_by_rank",), "compute": ("by_rank", "backward_by_rank"),
}  # fmt: skip
_ON_DEVICE: dict[str, tuple[ModuleTimes, ...]] = {"forward": ("device_own_by_rank",)}


class SlownessEvidence(Evidence, frozen=True, kw_only=True):
    """Evidence on slow ranks, now or before. Seconds are per step, and those of the slowest rank."""

    from_start: bool
    """True if the rank may have been slow before the first judged step."""
    excess_s: float
    share_of_steps: float
    """Share of the steps in which the slowest rank is slow."""
    excess_when_slow_s: float
    more_workload: float
    """Additional workload of the slowest rank, as a share of the other ranks' workload."""
    together_since: int | None
    """The first step in which all ranks were slow whose cost this is; None for one rank's cost."""
    lone_cost_s: float
    """The cost before that step, in which this rank was slow without the others."""

    def compute_lost_s(self, verdict: Verdict, run: RunLength) -> float | None:
        lost_s, since = super().compute_lost_s(verdict, run), verdict.since_step
        if lost_s is None or since is None or self.together_since is None:
            return lost_s
        before = min(max(0, self.together_since - since), run.steps)
        return lost_s - before * ((verdict.cost_s_per_step or 0.0) - self.lone_cost_s)

    def describe_pattern(self) -> str:
        """Return clauses on when and why the rank is slow, which may be ""."""
        text = ""
        if self.share_of_steps < _INTERMITTENT:
            more = format_duration(self.excess_when_slow_s)
            text = f"; it comes and goes: +{more} in {format_percent(self.share_of_steps)} of steps"
        if self.more_workload > MORE_WORK:
            more = format_percent(self.more_workload)
            text += f"; its workload is {more} larger than the others'"
        return text


class StragglerEvidence(SlownessEvidence, frozen=True, kw_only=True, tag="straggler"):
    """Evidence on ranks that are slow now."""

    name: str
    """The host, or the position such as "ep 3"; "" for a single rank."""
    host: str
    location: str
    """The location of the host in the data center, in words."""
    compared: int
    """Number of compared ranks."""
    by_host: bool
    """True if the device waits for the host in the slow phase."""
    work_s: float
    others_work_s: float
    """Work of the other ranks."""
    phase_excess_s: float
    module_excess_s: float
    between_modules: bool
    """True if the modules were timed and explain little of the excess in the slow phase."""
    gap: LargestGap | None
    """Where host code has most of the excess, of which `of_s` is the whole; None if not known."""
    lines: SampledLines | None
    """Lines of most of the slow phase; None if not known."""

    def describe(self, verdict: Verdict) -> list[str]:
        cost = "Its cost to the job is not known"
        if verdict.cost_s_per_step is not None and verdict.cost_share is not None:
            it = f"Together with {format_rank_list(self.slow_too)} it" if self.slow_too else "It"
            share = format_percent(verdict.cost_share)
            cost = f"{it} costs the job {format_duration(verdict.cost_s_per_step)} a step ({share})"
        since = "since the start" if self.from_start else f"since step {verdict.since_step}"
        it = "it" if self.scope == "rank" else f"rank {verdict.rank}"
        measured = f"{_compare_times(self, verdict.phase, it)}{self._describe_difference()}"
        found = f"{self._describe_ranks(verdict)} in {phase_name(verdict.phase or '')}: {measured}."
        causes = self.describe_causes(verdict)
        cause = f"Cause: {causes}" if causes else ""
        own = self._describe_own_cost().capitalize()
        lines = self.lines.text if self.lines else ""
        return [found, lines, f"{cost}, {since}.", own and f"{own}.", cause]

    def explain(self, verdict: Verdict) -> list[str]:
        times = _compare_times(self, verdict.phase, f"rank {verdict.rank}")
        measured = f"{times[0].upper()}{times[1:]}{self._describe_difference()}"
        found = "; ".join(filter(None, (measured, self._describe_own_cost()))) + "."
        return [found, self.lines.text if self.lines else ""]

    def _describe_own_cost(self) -> str:
        """Return a clause on the gain of repairing only this rank, node or position, next to a cost
        of others, too; else ""."""
        own_s = self.own_cost_s
        if own_s is None:
            return ""
        gains = f"{format_duration(own_s)} a step" if own_s >= _GAIN * self.excess_s else "nothing"
        return f"repairing only this {self.scope} gains {gains}"

    def describe_causes(self, verdict: Verdict) -> str:
        return describe_diagnosis(verdict.diagnosis, verdict.rank)

    def _describe_ranks(self, verdict: Verdict) -> str:
        at = f" ({self.location})" if self.location else ""
        most = f"({format_ranges(self.ranks)}), most of all rank {verdict.rank},"
        if self.scope == "node":
            return f"Node {self.name}{at} is slow (ranks {most[1:]}"
        if self.scope == "position":
            return f"The ranks at {self.name} are slow {most}"
        host = ", ".join(filter(None, (self.host, self.location)))
        return f"Rank {verdict.rank}{f' ({host})' if host else ''} is slow"

    def _describe_difference(self) -> str:
        """Return clauses on the modules that explain the excess, and on its pattern over time."""
        where = ""
        if self.modules:
            where = f"; most of the difference is in {', '.join(map(module_label, self.modules))}"
            if self.module_excess_s <= _MAX_MODULE_RATIO * self.phase_excess_s:
                where += f" (+{format_duration(self.module_excess_s)} a step)"
        elif self.between_modules:
            where = "; most of the difference is between modules"
        elif self.gap is not None:
            where = f"; most of the difference is {self.gap.place}"
        return f"{where}{self.describe_pattern()}"


class PastStragglerEvidence(SlownessEvidence, frozen=True, kw_only=True, tag="past_straggler"):
    """Evidence on a rank that is no longer slow."""

    kinds = SHORT_STRAGGLER, past_kind("straggler")
    until_step: int
    slow_too: tuple[int, ...]
    """Other ranks that were slow at the time, if they are included in the verdict's cost."""

    def describe(self, verdict: Verdict) -> list[str]:
        since = "from the start" if self.from_start else f"from step {verdict.since_step}"
        share = format_percent(verdict.cost_share or 0.0)
        is_joint = self.together_since is not None
        together = ", together with ranks slow at that time" if is_joint else ""
        found = [
            f"Rank {verdict.rank} was slow in {phase_name(verdict.phase or '')} {since} to step"
            f" {self.until_step - 1}: {format_duration(self.excess_s)} more a step{self.describe_pattern()},"
            f" which cost the job {format_duration(verdict.cost_s_per_step or 0.0)} a step"
            f" ({share}){together}.",
            "It is over: no action is needed unless it returns.",
        ]
        if verdict.diagnosis is not None and verdict.diagnosis.causes:
            seen = describe_cause(verdict.diagnosis.causes[0], verdict.rank)[0]
            found.append(f"Seen in these steps: {seen}.")
        return found


class SlowRankContext(NamedTuple):
    """Values of the report that sentences on slow ranks need."""

    modules: Sequence[Module] = ()
    device: str | None = None
    """See Run.device."""
    judged_by: str | None = None
    """See Run.judged_by."""
    last_arrival_shares: Mapping[int, float] = {}
    """Result of compute_last_arrival_shares()."""
    ranks: Sequence[Rank] = ()


def build_straggler_verdicts(
    context: SlowRankContext, findings: Findings
) -> tuple[list[Verdict], list[Verdict]]:
    """Return verdicts on ranks that are slow now, and verdicts on ranks that were slow before."""
    now = [build_slow_verdict(context, each, findings) for each in findings.groups[:MAX_NAMED]]
    # An excess that is small and might have been missed on another rank does not single out this one.
    least_ns = findings.detectable_ns or 0.0
    seen = [
        each
        for each in findings.slow_before
        if each.excess_ns >= least_ns or each.cost_ns >= WORTH_A_LINE * each.step_ns
    ]
    before = sorted(seen, key=lambda episode: -episode.since_step)
    past = [
        build_past_verdict(each, findings.diagnosis(each.key), findings.find_slow_with(each))
        for each in before[:MAX_PAST]
    ]
    return [*now, *build_imbalance_verdicts(findings)], past


def measure_slow_ranks(findings: Findings, run: RunLength) -> list[Verdict]:
    """Return the verdicts on ranks that are or were slow, in the report's order, with the time that
    they have cost. Their sentences lack the facts of other ranks.
    """
    now, past = build_straggler_verdicts(SlowRankContext(), findings)
    found = [
        structs.replace(each, lost_s=each.evidence.compute_lost_s(each, run))
        for each in (*now, *past)
    ]
    return sorted(found, key=lambda each: each.sort_key)


def build_slow_verdict(
    context: SlowRankContext, straggler: StragglerGroup, findings: Findings
) -> Verdict:
    """Return the verdict on ranks that are slow now, with any doubt from other measurements."""
    episode, diagnosis = straggler.lead, straggler.diagnosis
    causes = () if diagnosis is None else diagnosis.causes
    explained = [each for each in causes if each.explains is not None]
    modules, module_excess_s, between = _find_slower_modules(context, straggler)
    where = "the code between its modules" if between else "the model"
    where = module_label(modules[0]) if modules else where
    doubts = _find_doubts(context, straggler, findings)
    confidence = _compute_confidence(episode) / 2 ** len(doubts)
    if episode.by_windows:
        doubts.append("Found in statistics merged on devices; the rank's own records are missing.")
    gap, lines = _find_slow_code(context, straggler)
    cause = cause_class(episode) if straggler.kind != "position" else "imbalance"
    shared = episode.shared if straggler.is_shared else None
    return Verdict(
        kind="straggler",
        rank=episode.rank,
        phase=episode.phase,
        cost_s_per_step=None if straggler.cost_ns is None else straggler.cost_ns / 1e9,
        cost_share=straggler.cost_share,
        since_step=episode.since_step,
        confidence=confidence,
        action=describe_cause(explained[0], episode.rank)[1]
        if explained
        else _next_action(episode, where, straggler, lines or gap),
        diagnosis=diagnosis,
        notes=tuple(doubts),
        held=Period(since_step=episode.since_step, until_step=None),
        evidence=StragglerEvidence(
            cause=cause,
            scope=straggler.kind,
            name=straggler.name,
            host=straggler.host,
            location=straggler.location,
            ranks=straggler.ranks,
            slow_too=straggler.slow_too,
            own_cost_s=shared.gain_ns / 1e9 if shared and straggler.slow_too else None,
            compared=findings.compared,
            from_start=episode.from_start,
            by_host=episode.by_host,
            work_s=episode.work_ns / 1e9,
            others_work_s=episode.others_work_ns / 1e9,
            excess_s=episode.excess_ns / 1e9,
            phase_excess_s=episode.phase_excess_ns / 1e9,
            share_of_steps=episode.slow_share,
            excess_when_slow_s=episode.slow_excess_ns / 1e9,
            more_workload=episode.more_workload,
            together_since=shared.from_step if shared else None,
            lone_cost_s=shared.lone_ns / 1e9 if shared else 0.0,
            modules=tuple(modules),
            module_excess_s=module_excess_s,
            between_modules=between,
            gap=gap,
            lines=lines,
        ),
    )


def without_cpu_check(verdict: Verdict) -> Verdict:
    """Return the verdict on a slow rank for a report that names lack of CPUs: the verdict does not
    list it as ruled out."""
    diagnosis = verdict.diagnosis
    if diagnosis is None or diagnosis.causes:
        return verdict
    left = tuple(each for each in diagnosis.looked_at if each != WAITS_FOR_CPU)
    return structs.replace(verdict, diagnosis=dataclasses.replace(diagnosis, looked_at=left))


def _find_doubts(
    context: SlowRankContext, straggler: StragglerGroup, findings: Findings
) -> list[str]:
    """Return sentences on other measurements that do not confirm the finding."""
    lead, doubts = straggler.lead, list[str]()
    if lead.by_windows:
        return doubts
    if context.device is not None and context.judged_by != DEVICE:
        doubts.append("Compared by host time only, not by device time.")
    if lead.disputed:
        but = _unconfirmed_ranks_clause(findings)
        doubts.append(f"Statistics merged on devices do not confirm it{but}.")
    elif context.judged_by == DEVICE:
        doubts += filter(None, [_contradicting_last_arrivals(context, straggler)])
    return doubts


def compute_last_arrival_shares(rows: Sequence[Collective]) -> dict[int, float]:
    """Return the share of collectives in which each rank arrived last, by the times of kernels.

    rows: the report's collectives. Collectives over several nodes are ignored. The result is empty
    if too few collectives remain.
    """
    by_kernels = [
        row for row in rows if row["joined_whole"] and 0 < row["by_device"] == row["ended"]
    ]
    joined = sum(row["joined"] for row in by_kernels)
    if joined < _MIN_JOINED:
        return {}
    last: dict[int, float] = {}
    for row in by_kernels:
        for rank, values in row["by_rank"].items():
            last[int(rank)] = last.get(int(rank), 0.0) + values["last"] / joined
    return last


def _contradicting_last_arrivals(context: SlowRankContext, straggler: StragglerGroup) -> str:
    """Return a sentence if a rank that is not slow arrives last in most collectives; else ""."""
    others = {
        rank: share
        for rank, share in context.last_arrival_shares.items()
        if rank not in straggler.ranks
    }
    theirs = sum(
        share for rank, share in context.last_arrival_shares.items() if rank in straggler.ranks
    )
    latest = max(others, key=lambda rank: others[rank], default=None)
    if latest is None or others[latest] < _LAST_IN_MOST or theirs >= 1 - _LAST_IN_MOST:
        return ""
    return (
        f"The kernel times of collectives do not confirm it: rank {latest} arrived last in"
        f" {format_percent(others[latest])} of them, rank {straggler.lead.rank} in"
        f" {format_percent(context.last_arrival_shares.get(straggler.lead.rank, 0.0))}."
    )


def _unconfirmed_ranks_clause(findings: Findings) -> str:
    """Return a clause on ranks that only merged windows show as slow; "" without such ranks."""
    found = sorted(findings.unconfirmed, key=lambda each: -each.excess_ns)[:MAX_NAMED]
    each = ", ".join(
        f"rank {each.rank} (+{format_duration(each.excess_ns / 1e9)} a step, in {phase_name(each.phase)})"
        for each in found
    )
    return f", but show {each}" if each else ""


def module_label(name: str) -> str:
    """Return a module's name for a sentence. A number, as in nn.Sequential, becomes "module 1"."""
    return f"module {name}" if name.replace(".", "").isdigit() else name


def _compare_times(slow: StragglerEvidence, phase: str | None, it: str) -> str:
    """Return a clause that compares the times of the slow rank and of the other ranks.

    it: the phrase for the slow rank, such as "it" or "rank 3".
    """
    others = "the other rank" if slow.compared == 2 else "the other ranks"
    others = "the ranks that are not slow" if slow.slow_too else others
    others = "the median of the others" if slow.scope == "node" else others
    its = "its" if it == "it" else f"{it}'s"
    if phase == "cpu":
        more = format_duration(slow.excess_s)
        return f"{its} thread was runnable but had no CPU for {more} a step more than on {others}"
    mine, theirs = format_duration(slow.work_s), format_duration(slow.others_work_s)
    if slow.by_host:
        return (
            f"{its} host needs {mine} a step against {theirs} on {others}, and the device waits"
            " for it"
        )
    if phase in _COMPUTING:
        return f"{it} computes {mine} per step, {others} {theirs}"
    return f"{its} step without comm wait and CPU contention takes {mine}, on {others} {theirs}"


def _compute_confidence(episode: Episode) -> float:
    """Return 0.5 for an excess of five standard errors or less, and up to 1 for a larger one."""
    return 1 - 0.5 * min(1.0, (5.0 / max(episode.z_score, 1e-9)) ** 2)


def _find_slow_code(
    context: SlowRankContext, straggler: StragglerGroup
) -> tuple[LargestGap | None, SampledLines | None]:
    """Return place and lines with most of the excess of a rank that is slow outside of its model."""
    episode = straggler.lead
    if episode.phase not in ("host", "data", "gap") or episode.by_host:
        return None, None
    mine = [row for row in context.ranks if row["rank"] == episode.rank]
    slow = {*straggler.ranks, *straggler.slow_too}
    # Typical steps of the whole run show only part of the excess of a rank that became slow later.
    least_s = _FEW * episode.phase_excess_ns / 1e9
    gap = find_longer_gap(context.ranks, slow, episode.rank, least_s)
    return gap, find_lines(mine, "data" if episode.phase == "data" else "host")


def _next_action(
    episode: Episode, what: str, straggler: StragglerGroup, code: LargestGap | SampledLines | None
) -> str:
    """Return the action against a slow rank.

    what: the slow module, or another part of the model. code: see _find_slow_code().
    """
    rank = episode.rank
    if straggler.kind == "node":
        return (
            f"look at {straggler.name}: clocks, temperature, power cap, other jobs; then run"
            " without it."
        )
    if straggler.kind == "position":
        return (
            f"compare the work of the ranks at {straggler.name}: tokens per expert, or the split of"
            " the layers."
        )
    if episode.more_workload > MORE_WORK:
        return (
            f"balance the batches: rank {rank} gets longer sequences or more samples than the"
            " others."
        )
    if episode.by_host and episode.phase in _COMPUTING:
        return (
            f"compare the host of rank {rank}: its CPU's clock, what else runs there, and what its"
            f" Python code does in {phase_name(episode.phase)}."
        )
    if code is not None:
        return f"on rank {rank}, {code.action}"
    compare = (
        f"compare the input sizes of {what} on rank {rank} with other ranks', then the clock speed"
        " and other processes of its host."
    )
    actions = {
        "data": (
            f"look at rank {rank}'s loader: its workers, its storage, and the size of its batches."
        ),
        **dict.fromkeys(("forward", "backward", "compute"), compare),
        "recompute": (
            f"compare the input sizes and the clock speed of rank {rank} with other ranks'."
        ),
        "optimizer": f"see whether rank {rank} holds more parameters or offloads them.",
        "host": (
            f"look for what only rank {rank} does between the phases: logging, checkpoints,"
            " .item(), garbage collection."
        ),
        "gap": (
            f"look for what rank {rank} does between the phases: its loader first, then logging,"
            " checkpoints and .item()."
        ),
        "cpu": (
            f"see what else runs on rank {rank}'s CPUs, how many threads it has, and how it is"
            " pinned."
        ),
    }
    return actions[episode.phase]


def _find_slower_modules(
    context: SlowRankContext, straggler: StragglerGroup
) -> tuple[list[str], float, bool]:
    """Return up to three modules that explain most of the excess in the slow phase, their excess,
    and whether the excess is between the modules.

    Modules whose times differ as much between other ranks are left out. Times are by the clock by
    which the rank is judged. If nodes do not share a disk, the report may have no times of the rank.
    The excess that the detector's node has received is then used. On a device, no modules are
    returned if they would be more than half of all modules, or if one of them is a whole model.
    """
    episode = straggler.lead
    on_device = context.judged_by == DEVICE and not episode.by_host
    excesses = []
    timed_s: dict[str, float] = {}
    phase_s = episode.phase_excess_ns / 1e9
    slow = set(map(str, (*straggler.ranks, *straggler.slow_too)))
    for module in context.modules:
        excess_s = above_s = 0.0
        for table in (_ON_DEVICE if on_device else _BY_RANK).get(episode.phase, ()):
            mine = module[table].get(str(episode.rank))
            others = sorted(value for rank, value in module[table].items() if rank not in slow)
            if mine is not None and others:
                timed_s[module["name"]] = timed_s.get(module["name"], 0.0) + mine
                excess_s += mine - sum(others) / len(others)
                above_s += mine - others[math.ceil(_NEARLY_ALL * (len(others) - 1))]
        if above_s > 0 and above_s >= _ABOVE_OTHERS * excess_s:
            excesses.append((excess_s, module["name"]))
    explained_s = sum(excess_s for excess_s, _ in excesses)
    between = (
        sum(timed_s.values()) >= phase_s
        and explained_s < _FEW * phase_s
        # Modules are timed in typical steps of the whole run, which must show the excess.
        and episode.slow_share >= _INTERMITTENT
        and 2 * episode.judged_from_step <= episode.last_step
        and not (on_device or episode.by_host)
    )
    if not timed_s and episode.phase == "forward" and not on_device:
        excesses = [
            (excess_ns / 1e9, name) for name, excess_ns in straggler.slower_modules_ns.items()
        ]
    names: list[str] = []
    total_s = 0.0
    for excess_s, name in sorted(excesses, reverse=True)[:MAX_MODULES]:
        names.append(name)
        total_s += excess_s
        if total_s >= 0.6 * phase_s:
            roots = {
                module["name"] for module in context.modules if on_device and module["is_root"]
            }
            if on_device and (roots & {*names} or 2 * len(names) > len(timed_s.keys() - roots)):
                break
            return names, total_s, False
    return [], 0.0, between


def build_past_verdict(
    episode: Episode, diagnosis: Diagnosis | None = None, others: Sequence[Episode] = ()
) -> Verdict:
    """Return the verdict on a rank that is no longer slow. others: ranks that were slow meanwhile."""
    assert episode.until_step is not None
    is_short = episode.until_step - episode.since_step <= _SHORT_STEPS
    shared = episode.shared
    if shared is not None and shared.cost_ns < max(1.0, _MIN_SHARED_RATIO * episode.cost_ns):
        shared = None
    cost_ns = shared.cost_ns if shared else episode.cost_ns
    return Verdict(
        kind=SHORT_STRAGGLER if is_short else past_kind("straggler"),
        rank=episode.rank,
        phase=episode.phase,
        cost_s_per_step=cost_ns / 1e9,
        cost_share=cost_ns / episode.step_ns if episode.step_ns else 0.0,
        since_step=episode.since_step,
        confidence=_compute_confidence(episode),
        diagnosis=diagnosis,
        held=Period(since_step=episode.since_step, until_step=episode.until_step),
        evidence=PastStragglerEvidence(
            cause=cause_class(episode),
            until_step=episode.until_step,
            from_start=episode.from_start,
            excess_s=episode.excess_ns / 1e9,
            share_of_steps=episode.slow_share,
            excess_when_slow_s=episode.slow_excess_ns / 1e9,
            more_workload=episode.more_workload,
            together_since=shared.from_step if shared else None,
            lone_cost_s=shared.lone_ns / 1e9 if shared else 0.0,
            slow_too=tuple(sorted({each.rank for each in others})) if shared else (),
        ),
    )


def build_imbalance_verdicts(findings: Findings) -> list[Verdict]:
    """Return a verdict if a pipeline stage has more work than the others; else []."""
    found = findings.imbalance
    if found is None:
        return []
    return [
        Verdict(
            kind="imbalance",
            cost_s_per_step=found.cost_ns / 1e9,
            cost_share=found.cost_ns / findings.step_ns,
            confidence=0.9,
            action=f"move layers out of stage {found.stage}.",
            evidence=ImbalanceEvidence(
                found.stage,
                found.work_ns / 1e9,
                found.others_work_ns / 1e9,
                ranks=found.ranks,
                scope="stage",
                cause="imbalance",
            ),
        )
    ]


def find_unequal_work(findings: Findings) -> tuple[UsualTimes, ...]:
    """Return the usual times by model, the most work first, if ranks with one model have more work
    than ranks with other models, as in a pipeline; else ().

    Such ranks are not called slow, because it is not known how much work they should have.
    """
    parts = sorted(findings.usual, key=lambda part: -part.work_ns)
    if len(parts) < 2 or len({part.population.endswith(BY_DEVICE) for part in parts}) > 1:
        # Host times cannot be compared with device times.
        return ()
    more_ns = parts[0].work_ns - mean(part.work_ns for part in parts[1:])
    wait_ns = mean(part.wait_ns for part in parts[1:])
    if more_ns < max(MIN_IMBALANCE * findings.step_ns, 1.0) or wait_ns < _WAITS_FOR_IT * more_ns:
        return ()
    return tuple(dataclasses.replace(part, own=None) for part in parts)


def build_no_straggler_verdict(report: Facts, findings: Findings, since_step: int = 0) -> Verdict:
    """Return the verdict that no rank is slow, or that ranks were not compared.

    since_step: the first step after the last slow rank; 0 if there was none.
    """
    run, count, why = report["run"], report["steps"]["count"], _why_not_compared(report, findings)
    if why or not findings.compared or findings.detectable_ns is None:
        untimed = tuple(
            rank["rank"]
            for rank in report["ranks"]
            if not (rank["device"] and rank["device"]["parts"])
        )
        evidence = NotComparedEvidence(
            why or "few_steps",
            count,
            _steps_needed(findings),
            run["world_size"],
            run["device"],
            untimed if len(untimed) < len(report["ranks"]) else (),
            find_unequal_work(findings),
        )
        return Verdict(
            kind="not_compared" if why else "none",
            cost_s_per_step=0.0,
            cost_share=0.0,
            confidence=0.0,
            action=evidence.explain_and_advise()[1],
            is_undecided=True,
            evidence=evidence,
        )
    by_both = any(each.own and each.own.is_hidden for each in findings.usual)
    clocks = ("host and device" if by_both else DEVICE) if run["judged_by"] == DEVICE else "host"
    rather = _unconfirmed_ranks_clause(findings)
    return Verdict(
        kind="none",
        cost_s_per_step=0.0,
        cost_share=0.0,
        confidence=0.45 if rather else 0.9,
        notes=(f"Statistics merged on devices do not confirm this{rather}.",) if rather else (),
        evidence=NoSlowRankEvidence(
            findings.detectable_ns / 1e9,
            findings.compared,
            count,
            findings.step_ns / 1e9,
            clocks,
            since_step,
        ),
    )


def _steps_needed(findings: Findings) -> int:
    return max(_MIN_STEPS, findings.steps_needed)


def _why_not_compared(report: Facts, findings: Findings) -> str:
    """Return why ranks were not compared, as NotComparedEvidence.reason; "" if they were or will be."""
    run = report["run"]
    if run["ranks_seen"] == 1 and not run["live"] and findings.compared < 2:
        return "one_rank"
    if run["device"] is not None and run["judged_by"] != DEVICE:
        return "untimed_device"
    if findings.compared or report["steps"]["count"] < _steps_needed(findings):
        return ""
    return "unequal_work" if find_unequal_work(findings) else "different_work"
