"""Verdicts on how steps spend their time, as means over all ranks. Shares are of a typical step, or
of all steps.

The purpose of a job is computing. Computing is therefore named first, unless a wait or host code
takes a quarter of the step, or more time than computing. Other large parts follow. For work on a
device, only the device's clock shows the limit. Without device times, the verdict is that the limit
is not known.

What ran is the cause, and waits for a CPU are a factor of it. CPU contention is the cause only if no
wait or host code takes more of the step, with its waits for a CPU, than all waits for a CPU, or half
of the step. Computing is what CPUs are for, so its waits for a CPU are CPU contention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from msgspec import structs

from torchlens_perf.analysis.statistics.quantities import (
    format_count,
    format_duration,
    format_percent,
)
from torchlens_perf.analysis.statistics.step_mix import (
    LACK_OF_CPU,
    find_lasting_period,
)
from torchlens_perf.analysis.statistics.time_account import CPU, TimeAccount, mean_by_part
from torchlens_perf.run.grouping import group_values
from torchlens_perf.run.loader_period import COMMUNICATION, DATA, hidden_data_wait
from torchlens_perf.run.records import OWN_PARTS, PASSES, WITHOUT_GRADIENTS
from torchlens_perf.verdicts.long_steps import LongSteps, join_long_steps
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.verdict import Evidence, NamedUse, RunLength, Verdict
from torchlens_perf.verdicts.words.cpu import cpu_action
from torchlens_perf.verdicts.words.device_pace import (
    COMPUTE,
    LaunchBoundEvidence,
    describe_busy,
    describe_other_processes,
    find_busy_share,
    find_host_pace,
    lacks_phases,
    mean_parts,
    replays_graphs,
    timed_devices,
)
from torchlens_perf.verdicts.words.evidence import (
    LIMITS,
    GraphReplayEvidence,
    LargestGap,
    OtherThreadsEvidence,
    SampledLines,
    UntimedDeviceEvidence,
)
from torchlens_perf.verdicts.words.host_code import (
    NEARLY,
    divide_host_code,
    find_largest_gap,
    find_lines,
)
from torchlens_perf.verdicts.words.long_steps import build_long_verdict, find_stalling_rank
from torchlens_perf.verdicts.words.modules import computing_action
from torchlens_perf.verdicts.words.phases import (
    format_phases,
    format_share,
    phase_name,
    within_sentence,
)
from torchlens_perf.verdicts.words.report import DeviceTimes, Facts, TypicalStep

# The smallest shares of a typical step for which a wait is named, is the subject of the advice, and
# is named before computing.
_WORTH_NAMING, _WORTH_DOING, _WASTE_FIRST = 0.1, 0.15, 0.25
# The smallest share of all step time for which a class of long steps is named. The share is lower
# if all other ranks waited for one known rank.
_LONG_WORTH_NAMING = 0.05
_STALL_WORTH_NAMING = 0.015
# Shares of a step's host code for which one section is named as most or as some of it.
_MOST, _SOME = 0.5, 0.25
# Share of a use of time from which a sentence names its waits for a CPU, which tables do not have in
# it; shares of samples without a CPU from which lack of CPUs is mentioned, and is the limit.
_NAMED_LACK, _SOME_LACK, _SAMPLED_LACK = 0.02, 0.05, 0.25
_MAX_LONG = 2
# The smallest number of steps that counts as a kind of steps.
_FEWEST = 5
_NOT_A_CAUSE = ("sampled backward pass",)
"""Kinds of long steps that are not reported while a rank is slow. (The cost of garbage collections is
not in that of the rank, which is that of usual steps.)"""
_GAP = ("data", "host")
# A device that is behind its host by this share of a step, at the ends of passes, has work queued
# until the next pass is issued.
_FAR_AHEAD = 0.5
# A sentence lists at most this many device sections.
_MAX_SECTIONS = 4
# From this number of forward passes without gradients for each backward pass, a sentence names what
# makes many. A reference network makes one or two.
_MANY_PASSES = 4


class StepEvidence(Evidence, frozen=True, kw_only=True):
    """The use of time in a typical step of the whole run, as means over the ranks."""

    kinds = LIMITS
    is_of_run = True
    gap: LargestGap | None = None
    """The place of most of the host code that is to be made shorter; None if not known."""
    lines: SampledLines | None = None
    """The lines of most of the time that is to be made shorter; None if not known."""

    def join(
        self, found: str, others: Sequence[NamedUse], step_s: float, without: str = ""
    ) -> list[str]:
        """Return the sentences on the limit, with the other uses of a step.

        without: a phrase before them, on what their times do not contain.
        """
        also = [f"{within_sentence(each.what)} {_format_use(each, step_s)}" for each in others]
        places = (each.text for each in (self.gap, self.lines) if each is not None)
        return [f"{found}{f'; {without}' * bool(also)}{'; '.join(also)}.", *places]


class TypicalStepEvidence(StepEvidence, frozen=True, kw_only=True, tag="typical_step"):
    """The use of time by the hosts' clocks."""

    typical_step_s: float
    uses_s: dict[str, float]
    """Seconds of each use of the time, which add up to the step. Keys are kinds of verdicts, such as
    "data_bound". If the limit has `lack_s`, waits for a CPU are in the other uses."""

    def find_large_uses(self, verdict: Verdict) -> set[str]:
        least_s = _WORTH_NAMING * self.typical_step_s
        lack_s = sum(each.lack_s for each in verdict.uses)
        uses_s = {_LACK.kind: lack_s, **self.uses_s}
        return {kind for kind, seconds in uses_s.items() if seconds >= least_s}

    def describe(self, verdict: Verdict) -> list[str]:
        (first, *others), step_s = verdict.uses, self.typical_step_s
        takes = f"{first.what} takes {_format_use(first, step_s)}"
        found = f"{takes} of a typical step of {format_duration(step_s)}"
        return self.join(found, others, step_s, "apart from it, " * (first.kind == _LACK.kind))

    def compute_lost_s(self, verdict: Verdict, run: RunLength) -> float | None:
        cost_s = verdict.cost_s_per_step
        return None if cost_s is None else cost_s * run.typical


class DeviceStepEvidence(StepEvidence, frozen=True, kw_only=True, tag="device_step"):
    """The use of time by the devices' clocks."""

    device: str
    step_s: float
    device_parts_s: dict[str, float]
    """Parts that add up to the step: the phases, communication for which the compute stream waited,
    and data and host code for which the device waited between the phases."""

    def find_large_uses(self, verdict: Verdict) -> set[str]:
        parts_s = self.device_parts_s
        least_s = _WORTH_NAMING * sum(parts_s.values())
        return {each.kind for each in _WAITS if parts_s.get(each.phase, 0.0) >= least_s}

    def describe(self, verdict: Verdict) -> list[str]:
        (first, *others), step = verdict.uses, format_duration(self.step_s)
        takes = f"{first.what} takes {format_share(first.seconds, self.step_s)}"
        if first.kind == "compute_bound":
            takes = f"{first.what} {format_percent(first.seconds / self.step_s)}"
            phases = {
                part: self.device_parts_s[part] for part in COMPUTE if part in self.device_parts_s
            }
            step += f" ({format_phases(_largest_first(phases))})"
        return self.join(
            f"{takes} of a step of {step}, by the {self.device}'s clock", others, self.step_s
        )


class SecondLimitEvidence(Evidence, frozen=True, kw_only=True, tag="second_limit"):
    """Evidence on a second limit of the typical step: waits for a CPU that are part of data loading
    or host code, or data loading or host code next to CPU contention. Its time may be part of the
    first limit's."""

    kinds = ("lack_of_cpu", "data_bound", "host_bound")
    is_factor = True
    typical_step_s: float
    lack_by_part_s: dict[str, float]
    """Waits for a CPU by the part of the step, the longest first."""

    def describe(self, verdict: Verdict) -> list[str]:
        (use,), (part, most_s) = verdict.uses, next(iter(self.lack_by_part_s.items()))
        where = f": {format_percent(most_s / use.seconds)} of it in {phase_name(part)}"
        return [
            f"{use.what} takes {_format_use(use, self.typical_step_s)} of a typical step of"
            f" {format_duration(self.typical_step_s)}{where * (use.kind == _LACK.kind)}."
        ]


class SampledCpuLackEvidence(Evidence, frozen=True, tag="sampled_cpu_lack"):
    """Evidence on lack of CPUs from samples, for steps that are too short to record it."""

    kinds = ("lack_of_cpu",)
    sampled: float
    """Share of the samples in which a main thread was runnable but had no CPU."""

    def describe(self, verdict: Verdict) -> list[str]:
        return [
            f"In {format_percent(self.sampled)} of one-second samples, a rank's main thread was ready to"
            " run but had no CPU (CPU contention).",
            "In which part of the step was not measured.",
        ]


def _format_use(use: NamedUse, step_s: float) -> str:
    if use.lack_s < _NAMED_LACK * use.seconds:
        return format_share(use.seconds, step_s)
    took, lacked = format_duration(use.seconds), format_percent(use.lack_s / use.seconds)
    share = format_percent(use.seconds / step_s)
    return f"{share} ({took}, of which {lacked} waited for a CPU)"


def add_note(verdict: Verdict, note: str) -> Verdict:
    """Return the verdict with another sentence, which may be ""."""
    return structs.replace(verdict, notes=(*verdict.notes, note)) if note else verdict


def without_wait(verdict: Verdict, kind: str) -> Verdict:
    """Return the verdict on the typical step without one kind of wait, which another verdict names."""
    others = (each for each in verdict.uses[1:] if each.kind != kind)
    return structs.replace(verdict, uses=(*verdict.uses[:1], *others))


def _name_uses(*uses: TimeShare) -> tuple[NamedUse, ...]:
    return tuple(NamedUse(each.kind, each.what, each.seconds, each.lack_s) for each in uses)


@dataclasses.dataclass(frozen=True)
class TimeShare:
    """One use of a step's time, such as data loading. Seconds are means over the ranks."""

    kind: str
    phase: str
    seconds: float
    what: str
    advice: str
    """The key of the general action against it."""
    action: str = ""
    """A more precise action; "" for the general one."""
    lack_s: float = 0.0
    """See NamedUse.lack_s."""
    code: str = ""
    """The part of the report's `lines` that has its lines; "" if they are not known."""


@dataclasses.dataclass(frozen=True)
class StepBreakdown:
    """The use of time in a step of `step_s` seconds.

    The parts add up to the step, except for the overhead of recording. If `is_explained`, the waits
    for a CPU are in the parts in which they happened, and are listed in addition.
    """

    step_s: float
    account: TimeAccount
    computing: TimeShare
    waits: list[TimeShare]
    """All other parts, the largest first."""
    is_explained: bool = False
    """True if a wait or host code takes more of the step than CPU contention explains."""
    passes_s: float = 0.0
    """Time of forward passes without gradients, which is part of the forward pass."""

    @property
    def limit(self) -> TimeShare:
        """The part that is named first: computing, unless a wait takes a quarter of the step, or
        more time than computing."""
        most = self.separate_waits[0]
        return most if most.seconds >= self._min_limit_s else self.computing

    def is_limited_by(self, kind: str) -> bool:
        """Return True if this kind of time limits the step.

        Two waits that take nearly the same time both limit the step.
        """
        if kind == self.computing.kind:
            return self.limit is self.computing
        waits = self.separate_waits
        least_s = max(self._min_limit_s, NEARLY * waits[0].seconds)
        return any(each.kind == kind and each.seconds >= least_s for each in waits)

    @property
    def separate_waits(self) -> list[TimeShare]:
        """The waits without those that are in other parts."""
        return self.without_wait(_LACK.kind).waits if self.is_explained else self.waits

    @property
    def _min_limit_s(self) -> float:
        return min(_WASTE_FIRST * self.step_s, self.computing.seconds)

    def wait_of_kind(self, kind: str) -> TimeShare:
        """Return the wait of a kind."""
        return next(each for each in self.waits if each.kind == kind)

    def without_wait(self, kind: str) -> StepBreakdown:
        """Return the step without one kind of wait, because another verdict explains it."""
        return dataclasses.replace(self, waits=[each for each in self.waits if each.kind != kind])

    @property
    def lack_by_part_s(self) -> dict[str, float]:
        """Waits for a CPU by part, the longest first."""
        return _largest_first(
            {part: self.account.sum_ns([part], [CPU]) / 1e9 for part in OWN_PARTS}
        )

    @property
    def large_waits(self) -> list[TimeShare]:
        return [each for each in self.separate_waits if each.seconds >= _WORTH_NAMING * self.step_s]


def break_down_step(
    account: TimeAccount, *, on_device: bool = False, passes_s: float = 0.0
) -> StepBreakdown:
    """Return how a step spends its time. passes_s: see StepBreakdown.passes_s.

    on_device: True for times by a device's clock, which has waits for a CPU only between the phases.
    """
    step_s, lack_s = account.wall_ns / 1e9, account.sum_ns(OWN_PARTS, [CPU]) / 1e9
    most_s = max(account.sum_ns([part]) for part in _GAP) / 1e9
    is_explained = not on_device and most_s >= max(
        min(lack_s, _MOST * step_s), _WASTE_FIRST * step_s
    )
    left_s = {
        part: part_ns / 1e9 for part, part_ns in account.uses_ns(divided=not is_explained).items()
    }
    computing = {part: left_s[part] for part in COMPUTE if left_s[part] > 0}
    largest = max(computing, key=lambda part: computing[part], default="forward")
    # Tables show the phases without their waits for a CPU, too.
    named = {part: ns / 1e9 for part, ns in account.uses_ns().items() if part in computing}
    if passes_s >= _LONG_WORTH_NAMING * step_s:
        named[WITHOUT_GRADIENTS] = min(passes_s, named.get("forward", 0.0))
        named["forward"] = named.get("forward", 0.0) - named[WITHOUT_GRADIENTS]
    shown = format_phases(_largest_first(named))
    what = f"Computing ({shown})" if shown and lack_s < _WORTH_NAMING * step_s else "Computing"
    waits = [dataclasses.replace(_LACK, seconds=lack_s)]
    waits += [dataclasses.replace(each, seconds=left_s[each.phase]) for each in _WAITS]
    use = TimeShare("compute_bound", largest, sum(computing.values()), what, "computing")
    if is_explained:
        waits = [_add_lack(each, account, [each.phase]) for each in waits]
        use = _add_lack(use, account, COMPUTE)
    # Ranks wait for others that wait for a CPU, so contention explains waits that are nearly as long.
    nearly = 1.0 if is_explained or on_device else NEARLY
    waits.sort(key=lambda use: -use.seconds * (nearly if use.phase == "communication" else 1.0))
    return StepBreakdown(step_s, account, use, waits, is_explained, passes_s)


def _add_lack(use: TimeShare, account: TimeAccount, parts: Sequence[str]) -> TimeShare:
    """Return the use, whose time has waits for a CPU, with these waits."""
    lack_s = account.sum_ns(parts, [CPU]) / 1e9
    # A thread that needs a CPU does not only wait for data, and workers would need CPUs, too.
    is_starved = use.kind == "data_bound" and lack_s >= _WORTH_NAMING * use.seconds
    return dataclasses.replace(use, lack_s=lack_s, action=_CHEAPER_LOADING if is_starved else "")


def build_step_verdicts(report: Facts, *, waits_explained: bool = False) -> list[Verdict]:
    """Return the verdict on the typical step, on its second limit, and on costly classes of long steps.

    waits_explained: True if another verdict names a rank for which other ranks wait. Waits in
    communication are then left out.
    """
    typical = _build_typical_step_verdict(report, waits_explained=waits_explained)
    classes = report["steps"]["long"]
    # With fewer typical steps, the usual duration is not known.
    if report["steps"]["alike"] < _FEWEST:
        classes = [each for each in classes if each["kinds"] or each["waited_for"] is not None]
    second = _build_second_verdicts(report, typical)
    if "lack_of_cpu" in {each.kind for each in (typical, *second)}:
        # This verdict also explains steps that differ only by a longer lack of a CPU.
        lacking = [each for each in classes if not each["kinds"] and each["part"] == LACK_OF_CPU]
        classes = [each for each in classes if each not in lacking]
        typical = add_note(typical, _longer_waits_text(lacking))
    if waits_explained:
        classes = [each for each in classes if set(each["kinds"]).difference(_NOT_A_CAUSE)]
    if report["run"]["device"] is not None and report["steps"]["by"] != DEVICE:
        # The host waits for the device in some steps, for example to print a loss. In such a step,
        # the device takes as long as usual.
        classes = [each for each in classes if each["kinds"]]
    last = max((rank["last_step"] or 0 for rank in report["ranks"]), default=0)
    worth = [
        each
        for each in _join_classes_by_kind(classes, last)
        if each["share"]
        >= (_STALL_WORTH_NAMING if find_stalling_rank(each) is not None else _LONG_WORTH_NAMING)
    ]
    short_of_cpus = "lack_of_cpu" in named_kinds(typical)
    # Where waits for a CPU were measured, these steps do other work.
    is_known = _is_lack_measured(report)
    long = [
        build_long_verdict(
            report,
            each,
            short_of_cpus=(
                short_of_cpus if not is_known and _may_be_cpu_waits(report, each) else None
            ),
        )
        for each in worth[:_MAX_LONG]
    ]
    return [typical, *second, *long]


def _join_classes_by_kind(classes: Sequence[LongSteps], last: int) -> list[LongSteps]:
    """Return the classes, the costliest first, with those of the same known kind joined.

    For example, evaluations of two lengths are joined. Classes of unknown kinds are not joined,
    because steps of different lengths may do different work. last: the newest step of the run.
    """
    found = group_values(
        ((*each["kinds"], each["waited_for"]) if each["kinds"] else (id(each),), each)
        for each in classes
    )
    of_kinds: list[LongSteps] = [
        each[0] if len(each) == 1 else _join_classes(each, last) for each in found.values()
    ]
    return sorted(of_kinds, key=lambda each: -each["total_s"])


def _join_classes(classes: Sequence[LongSteps], last: int) -> LongSteps:
    joined = join_long_steps(classes)
    # Each class lists only its newest steps if it has many.
    complete = len(joined["steps"]) >= joined["count"]
    first = 0 if complete else max(each["steps"][0] for each in classes)
    known = [step for step in joined["steps"] if step >= first]
    return {**joined, "period": find_lasting_period(known, last)}


def _longer_waits_text(lacking: list[LongSteps]) -> str:
    """Return a sentence on steps that lack a CPU for longer than the typical step, or ""."""
    count = sum(each["count"] for each in lacking)
    total_s = sum(each["total_s"] for each in lacking)
    if sum(each["share"] for each in lacking) < _LONG_WORTH_NAMING:
        return ""
    more = (
        f"{format_duration(total_s / count)} more{' on average' * (count > 1)} than a typical step"
    )
    return (
        f"{format_count(count, 'longer step')} {'waits' if count == 1 else 'wait'} for a CPU"
        f" {more}: {format_duration(total_s)} in total."
    )


def named_kinds(verdict: Verdict) -> set[str]:
    """Return the kinds of time that the verdict on the typical step names."""
    return {verdict.kind, *verdict.evidence.find_large_uses(verdict)}


def _build_typical_step_verdict(report: Facts, *, waits_explained: bool) -> Verdict:
    """Return the verdict on the typical step."""
    device = report["run"]["device"]
    if device is not None:
        return _build_device_verdict(report, device, waits_explained=waits_explained)
    sampled = report["steps"]["sampled_lack_of_cpu"]
    everything = _break_down_host_step(report)
    found = everything.without_wait("communication_bound") if waits_explained else everything
    step_s, computing = found.step_s, found.computing
    first, worth = found.limit, found.large_waits
    if sampled is not None and sampled >= _SAMPLED_LACK and not _is_lack_measured(report):
        return Verdict(
            kind="lack_of_cpu",
            phase="cpu",
            cost_s_per_step=sampled * step_s,
            cost_share=sampled,
            confidence=0.8,
            action=cpu_action(report),
            evidence=SampledCpuLackEvidence(sampled),
        )
    unrecorded = _build_other_threads_verdict(report, found)
    if unrecorded is not None:
        return unrecorded
    others = [each for each in worth if each is not first]
    first, *rest = _split_host_code_by_section(report, first, step_s)
    worth = [new for old in others for new in _split_host_code_by_section(report, old, step_s)]
    worth += rest
    if first is not computing and computing.seconds:
        worth = [*worth, computing]
    following = _choose_following(found, worth) if first is computing else first
    gap = _find_gap(report, following, step_s)
    lines = find_lines(report["ranks"], following.code)
    cost_s = 0.0 if following is computing else following.seconds
    waits_s = [each["parts"].get("communication", 0.0) for each in _collect_typical_steps(report)]
    notes = [
        _describe_starved_part(everything) if first.kind == _LACK.kind else "",
        _describe_passes(report, step_s),
        _hidden_data_wait_text(report, found),
        _equal_waits_caveat(first, waits_s),
        _describe_kinds_of_steps(report),
    ]
    if sampled is not None and sampled >= _SOME_LACK and not _is_lack_measured(report):
        notes.append(
            "These figures include CPU contention, which was not measured per step: one-second"
            f" samples show {format_percent(sampled)} of the time."
        )
    waits, is_measured = everything.separate_waits, _is_lack_measured(report)
    known = [use for use in waits if use.kind != _LACK.kind or is_measured]
    uses_s = {use.kind: use.seconds for use in (computing, *known)}
    return Verdict(
        kind=first.kind,
        phase=first.phase,
        cost_s_per_step=cost_s,
        cost_share=cost_s / step_s,
        confidence=0.9,
        advice=following.advice,
        action=action_against(following, report, lines or gap),
        uses=_name_uses(first, *worth),
        notes=tuple(filter(None, notes)),
        evidence=TypicalStepEvidence(typical_step_s=step_s, uses_s=uses_s, gap=gap, lines=lines),
    )


def _describe_passes(report: Facts, step_s: float) -> str:
    """Return a sentence on the forward passes without gradients of a typical step, or ""."""
    passes_s, calls = _sum_passes(report)
    if passes_s < _LONG_WORTH_NAMING * step_s:
        return ""
    each, few = calls / report["steps"]["micro_steps"], ": a reference, teacher or EMA network"
    many = f", {each:.0f} for each backward pass: generation"
    return (
        f"Forward {PASSES} take {format_share(passes_s, step_s)} of the step"
        f"{many if each >= _MANY_PASSES else few}, sampling or an evaluation."
    )


def _sum_passes(report: Facts) -> tuple[float, float]:
    """Return time and number of the forward passes without gradients of a typical step."""
    rows = [row for row in report["modules"] if row["name"] == PASSES]
    return sum(row["own_s_per_step"] for row in rows), sum(row["calls_per_step"] for row in rows)


def _choose_following(found: StepBreakdown, worth: Sequence[TimeShare]) -> TimeShare:
    """Return the use of the time to act on: the limit or, next to computing, the largest wait."""
    is_worth = bool(worth) and worth[0].seconds >= _WORTH_DOING * found.step_s
    return worth[0] if found.limit is found.computing and is_worth else found.limit


def _find_gap(report: Facts, use: TimeShare, step_s: float) -> LargestGap | None:
    """Return the place with most of a step's host code; None if a section of the user names it.

    Where a host waits for its device between the phases, the hosts' clocks show another time there
    than the devices' clocks. Then the place is not known.
    """
    gap = find_largest_gap(report["steps"]["host_gaps"], _SOME * use.seconds)
    if use.advice != "host" or gap is None or gap.s < _WORTH_NAMING * step_s:
        return None
    smaller_s, larger_s = sorted((gap.of_s, use.seconds))
    return gap if smaller_s >= NEARLY * larger_s else None


def _build_second_verdicts(report: Facts, typical: Verdict) -> list[Verdict]:
    """Return verdicts on what takes much of the step next to its limit: waits for a CPU in data
    loading or host code, or data loading or host code, with their waits, next to CPU contention."""
    if (
        report["run"]["device"] is not None
        or not typical.uses
        or typical.phase not in (*_GAP, _LACK.phase)
    ):
        return []
    found = _break_down_host_step(report)
    step_s, account = found.step_s, found.account
    least, uses = _WASTE_FIRST, [found.wait_of_kind(_LACK.kind)]
    if typical.kind == _LACK.kind:
        least, uses = (
            _WORTH_DOING,
            [
                _add_lack(
                    dataclasses.replace(each, seconds=account.sum_ns([each.phase]) / 1e9),
                    account,
                    [each.phase],
                )
                for each in _WAITS
                if each.phase in _GAP
            ],
        )
    return [
        Verdict(
            kind=use.kind,
            phase=use.phase,
            cost_s_per_step=use.seconds,
            cost_share=use.seconds / step_s,
            confidence=0.9,
            action=action_against(use, report),
            uses=_name_uses(use),
            evidence=SecondLimitEvidence(
                typical_step_s=step_s, lack_by_part_s=found.lack_by_part_s
            ),
        )
        for whole in uses
        if whole.seconds >= least * step_s
        for use in _split_host_code_by_section(report, whole, step_s)[:1]
    ]


def _build_other_threads_verdict(report: Facts, found: StepBreakdown) -> Verdict | None:
    """Return a verdict if host code limits the step while other threads work; else None."""
    outside, others = found.limit, _other_threads_s(report)
    if outside.kind != "host_bound" or sum(others.values()) < _WASTE_FIRST * outside.seconds:
        return None
    action = "enter watch() on the thread that trains."
    if others.keys() == {"data"}:
        action = "see whether the loop waits for the batches that another thread loads."
    return Verdict(
        kind="not_known",
        confidence=0.0,
        action=action,
        evidence=OtherThreadsEvidence(found.step_s, outside.seconds, others),
    )


def other_threads_note(report: Facts) -> str:
    """Return a note on work of threads other than the recorded one; "" without such work."""
    others = _other_threads_s(report)
    if not others:
        return ""
    return (
        f"other threads also worked ({format_phases(others)} a step); this work is not part of the"
        " step times"
    )


def _other_threads_s(report: Facts) -> dict[str, float]:
    """Return seconds per step of each phase on other threads, as means over the ranks."""
    by_rank = [rank["other_threads"] for rank in report["ranks"]]
    return _largest_first(
        {
            phase: sum(each.get(phase, 0.0) for each in by_rank) / len(by_rank)
            for phase in set[str]().union(*by_rank)
        }
    )


def _equal_waits_caveat(limit: TimeShare, waits_s: Sequence[float]) -> str:
    """Return a caveat if equal waits in communication on all ranks limit the step; else "".

    waits_s: wait of each rank. All ranks leave a collective together, so one slow sender makes all
    ranks wait equally long.
    """
    if (
        limit.kind != "communication_bound"
        or limit.what == _FOR_RANKS.what
        or len(waits_s) < 2
        or min(waits_s) < NEARLY * max(waits_s)
    ):
        return ""
    return "All ranks wait about equally long. A slow link of one rank would look the same."


def _describe_kinds_of_steps(report: Facts) -> str:
    """Return a sentence if there are several frequent kinds of steps; else ""."""
    steps = report["steps"]
    others = [*steps["long"], *steps["short"]]
    total = steps["alike"] + sum(each["count"] for each in others)
    # Steps that wait for a CPU do the same work as other steps, and are not a kind. If waits for a
    # CPU are not measured, they may explain why some steps are longer. Such steps count as a kind
    # only if they are the majority.
    of_other_kinds = [each for each in others if each["kinds"] or each["part"] != LACK_OF_CPU]
    doubtful = (
        []
        if _is_lack_measured(report)
        else [each for each in steps["long"] if _may_be_cpu_waits(report, each)]
    )
    kinds = [(steps["alike"], steps["alike_mean_s"] or 0.0)]
    kinds += [
        (each["count"], each["mean_s"])
        for each in of_other_kinds
        if each["count"] >= (_MOST if each in doubtful else _WORTH_NAMING) * total
    ]
    found = sorted((each for each in kinds if each[0] >= _FEWEST), key=lambda each: -each[0])
    if len(found) < 2:
        return ""
    words = ", ".join(f"{count} take {format_duration(mean_s)}" for count, mean_s in found)
    number = {2: "Two", 3: "Three"}.get(len(found), "Several")
    return f"{number} kinds of steps: {words}."


def _is_lack_measured(report: Facts) -> bool:
    """Return True if the typical step of any rank is long enough to record waits for a CPU."""
    return any(typical["lack_of_cpu"] is not None for typical in _collect_typical_steps(report))


def _collect_typical_steps(report: Facts) -> list[TypicalStep]:
    """Return the typical steps of all ranks that have one."""
    return [rank["typical"] for rank in report["ranks"] if rank["typical"] is not None]


def _may_be_cpu_waits(report: Facts, long: LongSteps) -> bool:
    """Return True if these steps may be longer only because they waited for a CPU.

    Return False if the steps recur regularly, or if their additional work is known. The times of a
    device contain waits for a CPU only between the phases.
    """
    parts = _GAP if report["steps"]["by"] == DEVICE else OWN_PARTS
    return not long["kinds"] and not long["period"] and long["part"] in parts


def _describe_starved_part(found: StepBreakdown) -> str:
    """Return a sentence on the longest part, with its waits for a CPU; "" if all are short."""
    parts_s = {part: found.account.sum_ns([part]) / 1e9 for part in OWN_PARTS}
    part = max(parts_s, key=lambda part: parts_s[part])
    if parts_s[part] < _WASTE_FIRST * found.step_s:
        return ""
    is_generation = part == "forward" and found.passes_s >= _MOST * parts_s[part]
    where = (
        ", mostly without gradients," if is_generation else " between the phases" * (part == "host")
    )
    name = f"{phase_name(part)}{where}"
    waits = format_percent(found.lack_by_part_s[part] / parts_s[part])
    takes = f"takes {format_duration(parts_s[part])}, {format_percent(parts_s[part] / found.step_s)} of the step"
    return f"{name[0].upper()}{name[1:]} {takes}; for {waits} of that time, it waited for a CPU."


def _break_down_host_step(report: Facts) -> StepBreakdown:
    """Return how a typical step spends its time by the hosts' clocks.

    The wait for data includes what waits for other ranks hide of it.
    """
    steps = _collect_typical_steps(report)
    hidden_s = _hidden_data_wait_s(report, steps)
    parts_s = mean_by_part(step["parts"] for step in steps)
    parts_s[DATA] += hidden_s
    parts_s[COMMUNICATION] -= hidden_s
    lack_s = mean_by_part(step["lack_of_cpu"] or {} for step in steps)
    account = TimeAccount.from_parts(1e9 * parts_s, 1e9 * lack_s)
    passes_s, _ = _sum_passes(report)
    return _name_waiting_for_ranks(report, break_down_step(account, passes_s=passes_s))


def _hidden_data_wait_s(report: Facts, steps: Sequence[TypicalStep]) -> float:
    """Return the wait for data per typical step that waits for other ranks hide, as a mean."""
    waits_s = [step["parts"].get("communication", 0.0) for step in steps]
    periods_s = [
        rank["loader_period_s"] or 0.0 for rank in report["ranks"] if rank["typical"] is not None
    ]
    own_s = [sum(step["parts"].get(part, 0.0) for part in OWN_PARTS) for step in steps]
    hidden_s = [
        hidden_data_wait(own, wait - min(waits_s), period)
        for own, wait, period in zip(own_s, waits_s, periods_s, strict=True)
    ]
    return sum(map(float, hidden_s)) / len(hidden_s)


def _hidden_data_wait_text(report: Facts, found: StepBreakdown) -> str:
    """Return a sentence on the hidden wait for data; "" if it is small, or if the wait is."""
    periods_s = [rank["loader_period_s"] for rank in report["ranks"] if rank["loader_period_s"]]
    steps = _collect_typical_steps(report)
    hidden_s = _hidden_data_wait_s(report, steps)
    waits_s = sum(step["parts"].get("data", 0.0) for step in steps) / len(steps)
    if (
        hidden_s < _SOME * (hidden_s + waits_s)
        or found.wait_of_kind("data_bound") not in found.large_waits
    ):
        return ""
    return (
        f"Of this wait for data, {format_duration(hidden_s)} is spent in communication with a rank"
        f" that waits for data: the loaders take {format_duration(max(periods_s))} for a batch."
    )


_ADVICE = {
    "data": "see what takes the time of a batch: storage, decoding, augmentation or collation.",
    "communication": (
        "see in which operations ranks wait (the table of collectives in `report --all`); send less in them, or start"
        " them earlier."
    ),
    "ranks": (
        "see what ranks do differently in the same step: batch sizes, sequence lengths, work that one"
        " rank does alone, other programs on their CPUs."
    ),
    "host": (
        "look at what runs between the phases (logging, .item(), zero_grad, Python): time parts of it"
        ' with torchlens_perf.section("name").'
    ),
    "launches": "issue fewer and larger kernels: torchlens-perf capture shows the small ones.",
    "compiled_launches": (
        "run less Python between the compiled parts: torchlens-perf capture shows it."
    ),
}
_CHEAPER_LOADING = (
    "make loading cheaper: cache its results, decode less, or move work out of the loader. The CPUs"
    " are busy, so more workers would also wait for them."
)
_LACK = TimeShare("lack_of_cpu", "cpu", 0.0, "CPU contention", "cpu")
_WAITS = (
    TimeShare("data_bound", "data", 0.0, "Data loading", "data", code="data"),
    TimeShare("communication_bound", "communication", 0.0, "Comm wait", "communication"),
    TimeShare("host_bound", "host", 0.0, "Host code between the phases", "host", code="host"),
)
_FOR_RANKS = TimeShare(
    "communication_bound", "communication", 0.0, "Waiting for other ranks", "ranks"
)


def general_action(advice: str, report: Facts) -> str:
    """Return the general action with this key."""
    if advice == "cpu":
        return cpu_action(report)
    return computing_action(report) if advice == "computing" else _ADVICE[advice]


def action_against(
    use: TimeShare, report: Facts, place: LargestGap | SampledLines | None = None
) -> str:
    return use.action or (place.action if place else general_action(use.advice, report))


def _name_waiting_for_ranks(report: Facts, found: StepBreakdown) -> StepBreakdown:
    """Return the step with another name for communication in which ranks hardly transfer data."""
    wait_s = transfer_s = 0.0
    for row in report["collectives"]:
        wait, transfer = row["wait_s"]["mean_s"], row["transfer_s"]["mean_s"]
        if wait is not None and transfer is not None:
            wait_s = wait_s + row["joined"] * wait
            transfer_s = transfer_s + row["joined"] * transfer
    if wait_s == 0.0 or wait_s < NEARLY * (wait_s + transfer_s):
        return found
    waits = [
        dataclasses.replace(_FOR_RANKS, seconds=each.seconds)
        if each.kind == _FOR_RANKS.kind
        else each
        for each in found.waits
    ]
    return dataclasses.replace(found, waits=waits)


def _split_host_code_by_section(report: Facts, use: TimeShare, step_s: float) -> list[TimeShare]:
    """Return host code as two parts: the section that takes most of its time, and the rest.

    A small remaining part is left out. For nested sections, the innermost section that takes most
    of the time is named. Parts other than host code are returned unchanged.
    """
    whole_s = sum(step["parts"].get("host", 0.0) for step in _collect_typical_steps(report)) / len(
        _collect_typical_steps(report)
    )
    sections = divide_host_code(report["sections"], whole_s)
    name, seconds = next(iter(sections.items()), ("", 0.0))
    if use.kind != "host_bound" or seconds < _SOME * whole_s:
        return [use]
    named = dataclasses.replace(
        use,
        advice="",
        code=f'section "{name}"',
        action=f'make section "{name}" cheaper: cache its results, or do it in fewer steps.',
    )
    if seconds <= _MOST * whole_s:
        some = [
            f'"{each}" ({format_duration(its_s)})'
            for each, its_s in sections.items()
            if its_s >= _SOME * whole_s
        ]
        what = f"{use.what}, with the section{'s' * (len(some) > 1)} {' and '.join(some[:2])},"
        return [dataclasses.replace(named, what=what, code=use.code)]
    if use.seconds < NEARLY * whole_s:
        # The section's time contains waits for a CPU, but `use` does not. It is not shown.
        return [dataclasses.replace(named, what=f'{use.what}, most of it in section "{name}",')]
    seconds = min(seconds, use.seconds)
    found = [dataclasses.replace(named, seconds=seconds, lack_s=0.0, what=f'Section "{name}"')]
    rest_s = use.seconds - seconds
    if rest_s >= _WORTH_NAMING * step_s:
        what = "Other host code"
        found.append(dataclasses.replace(use, seconds=rest_s, lack_s=0.0, what=what, code=""))
    return found


# -- on a device

_SECTION_ACTION = (
    'time parts of the step on the device: wrap them in perf.device_section("name"), also inside of a'
    " captured graph."
)


def _build_device_verdict(report: Facts, device: str, *, waits_explained: bool) -> Verdict:
    """Return the verdict on a typical step with work on a device, by the device's clock."""
    timed = timed_devices(report)
    if not timed:
        found = _break_down_host_step(report)
        return Verdict(
            kind="not_known",
            confidence=0.0,
            action=(
                'record device times (device_times="on"), or look at a trace of some steps:'
                " torchlens-perf capture."
            ),
            uses=_name_uses(max((found.computing, *found.waits), key=lambda use: use.seconds)),
            evidence=UntimedDeviceEvidence(device, found.step_s, has_device_times=False),
        )
    if replays_graphs(report):
        return _build_graph_verdict(report, device)
    parts = _device_parts(report, timed)
    found = _break_down_device_step(report, parts)
    found = found.without_wait("communication_bound") if waits_explained else found
    unrecorded = _build_other_threads_verdict(report, found)
    if unrecorded is not None:
        return unrecorded
    first, pace = found.limit, find_host_pace(report)
    if first.kind == "host_bound" and lacks_phases(timed):
        # All work on the device is outside of the phases.
        return Verdict(
            kind="not_known",
            confidence=0.0,
            action=_SECTION_ACTION,
            uses=_name_uses(first),
            evidence=UntimedDeviceEvidence(device, found.step_s, has_device_times=True),
        )
    if pace is not None:
        inside_s = (pace.idle_s or 0.0) - found.wait_of_kind("host_bound").seconds
        if first is found.computing or inside_s > first.seconds:
            return _build_launch_verdict(report, structs.replace(pace, step_s=found.step_s))
    worth = [each for each in found.large_waits if each is not first]
    following = _choose_following(found, worth)
    cost_s = 0.0 if following is found.computing else following.seconds
    # Hosts that are so far ahead always have work for the devices.
    lags_s = [each["behind_s"]["p50_s"] or 0.0 for each in timed]
    is_ahead = min(lags_s) >= _FAR_AHEAD * found.step_s
    ahead = f"The host is ahead, and waits for the {device}." if is_ahead else ""
    if first is found.computing:
        what = "Computing takes" if ahead else "Forward, backward and optimizer take"
        named = [dataclasses.replace(first, what=what), *worth]
        notes = [
            ahead or describe_busy(device, find_busy_share(report)),
            describe_other_processes(report),
        ]
    else:
        named = [first, *worth]
        notes = [
            _equal_waits_caveat(first, [each["parts"].get("communication", 0.0) for each in timed])
        ]
        if found.computing.seconds:
            named.append(dataclasses.replace(found.computing, what="Computing"))
    notes.append(_describe_kinds_of_steps(report) if report["steps"]["by"] == DEVICE else "")
    gap = _find_gap(report, following, found.step_s)
    # Without a gap, host code may be a wait for the device.
    is_wait = following.code == "host" and gap is None
    lines = None if is_wait else find_lines(report["ranks"], following.code)
    return Verdict(
        kind=first.kind,
        phase=first.phase,
        cost_s_per_step=cost_s,
        cost_share=cost_s / found.step_s,
        confidence=0.8,
        advice=following.advice,
        action=action_against(following, report, lines or gap),
        uses=_name_uses(*named),
        notes=tuple(filter(None, notes)),
        evidence=DeviceStepEvidence(
            device=device,
            step_s=found.step_s,
            device_parts_s={part: s for part, s in parts.items() if s},
            gap=gap,
            lines=lines,
        ),
    )


def _device_parts(report: Facts, timed: Sequence[DeviceTimes]) -> dict[str, float]:
    """Return the seconds of each part of a step by the devices' clocks, as means over the ranks."""
    parts, own = mean_parts(timed), report["steps"]["own_time"]
    if own is None or not own["is_hidden"]:
        return parts
    # Most devices wait for one rank, so their clocks do not show how long its work takes.
    wait_s = max(0.0, sum(parts.values()) - sum(own["parts"].values()))
    return {**parts, **own["parts"], "communication": wait_s}


def _break_down_device_step(report: Facts, parts: Mapping[str, float]) -> StepBreakdown:
    """Return how a step spends its time by the devices' clocks.

    Lack of a CPU counts only between the phases, where a device waits for its host.
    """
    lacks = [typical["lack_of_cpu"] or {} for typical in _collect_typical_steps(report)]
    in_gap = [{part: lack.get(part, 0.0) for part in _GAP} for lack in lacks]
    account = TimeAccount.from_parts(1e9 * mean_by_part([parts]), 1e9 * mean_by_part(in_gap))
    return _name_waiting_for_ranks(report, break_down_step(account, on_device=True))


def _build_launch_verdict(report: Facts, pace: LaunchBoundEvidence) -> Verdict:
    """Return the verdict that hosts limit the step, because devices wait for their kernels."""
    idle_s = pace.idle_s or pace.step_s
    gap = find_largest_gap(report["steps"]["host_gaps"], _SOME * idle_s)
    startup = report["run"]["startup"]
    compiled = startup is not None and bool(startup["compile_s"])
    advice = "compiled_launches" if compiled else "launches"
    if gap is not None and gap.s >= _MOST * idle_s:
        advice = "host"
    # A bound is no cost: it may not be compared with costs of other verdicts.
    cost_s = None if pace.is_hidden else pace.idle_s
    return Verdict(
        kind="host_bound",
        phase="host",
        cost_s_per_step=cost_s,
        cost_share=None if cost_s is None else cost_s / pace.step_s,
        confidence=0.8,
        advice=advice,
        action=gap.action if gap and advice == "host" else general_action(advice, report),
        notes=_name_other_processes(report),
        evidence=structs.replace(pace, gap=gap),
    )


def _name_other_processes(report: Facts) -> tuple[str, ...]:
    return tuple(filter(None, [describe_other_processes(report)]))


def _largest_first(parts_s: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(parts_s.items(), key=lambda item: (item[1], item[0]), reverse=True))


def _build_graph_verdict(report: Facts, device: str) -> Verdict:
    """Return the verdict on steps that replay a CUDA graph. Device sections show their parts."""
    timed, steps = timed_devices(report), max(1, report["steps"]["count"])
    step_s = sum(mean_parts(timed).values())
    sections_s = {
        row["name"]: (row["device_s"]["p50_s"] or 0.0) * row["calls"] / steps / len(timed)
        for row in report["device_sections"]
    }
    longest = dict(sorted(sections_s.items(), key=lambda item: -item[1])[:_MAX_SECTIONS])
    action = (
        f'look first at device section "{next(iter(longest))}".' if longest else _SECTION_ACTION
    )
    return Verdict(
        kind="not_known",
        confidence=0.8,
        action=action,
        notes=_name_other_processes(report),
        evidence=GraphReplayEvidence(step_s, longest, device),
    )
