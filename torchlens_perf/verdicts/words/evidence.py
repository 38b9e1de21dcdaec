"""A type for each kind of evidence of a verdict.

Names end in their units: `_s` seconds, `_bytes`. A share is between 0 and 1. In JSON, the field
`type` names the type.
"""

from __future__ import annotations

from statistics import mean

from msgspec import Struct

from torchlens_perf.analysis.statistics.host_gaps import split_gap
from torchlens_perf.analysis.statistics.quantities import (
    format_count,
    format_duration,
    format_percent,
    printable,
)
from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.run.failure import ProcessActivity
from torchlens_perf.run.rank_ranges import format_ranges, format_rank_list
from torchlens_perf.run.ring import MAX_FRAMES
from torchlens_perf.verdicts.kinds import NOT_COMPUTING_KINDS, past_kind
from torchlens_perf.verdicts.stragglers.findings import UsualTimes
from torchlens_perf.verdicts.verdict import Evidence, Verdict
from torchlens_perf.verdicts.words.phases import (
    format_phases,
    format_share,
    phase_name,
    within_sentence,
)

LIMITS = ("compute_bound", *NOT_COMPUTING_KINDS)
_NAMES = {
    "start": "the start of the step",
    "communication": "communication",
    "end": "the end of the step",
}
"""Names of the ends of a gap that differ from those in other sentences."""
_USUAL = {
    "backward>optimizer": "clipping of gradients, a GradScaler, logging, .item()",
    "data>forward": "copies to the device, preparation of the batch",
    "forward>backward": "computing the loss, logging, .item()",
}
"""Work that is often in a place."""
_CLOCKS = {
    "host": "",
    "device": ", by the devices' clocks",
    "host and device": ", by the clocks of hosts and devices",
}
_MAX_NAMES_LENGTH = 40
_MAX_WARM_UP_PARTS = 3


class ImbalanceEvidence(Evidence, frozen=True, tag="imbalance"):
    """Evidence on a pipeline stage that has more work than the others."""

    stage: str
    work_s: float
    """Work of a rank of the stage, per step."""
    others_work_s: float
    """Work of a rank of the other stages."""

    def describe(self, verdict: Verdict) -> list[str]:
        return [
            f"The pipeline is out of balance: stage {self.stage} (ranks {format_ranges(self.ranks)}) has"
            f" {format_duration(self.work_s)} of work a step, the other stages"
            f" {format_duration(self.others_work_s)}."
        ]


class PastEvidence(Evidence, frozen=True, tag="past"):
    """Evidence on slow links or an imbalance that have ended."""

    kinds = past_kind("slow_link"), past_kind("imbalance")
    alerted: str
    """The text of the newest alert on the finding."""

    def describe(self, verdict: Verdict) -> list[str]:
        return [f"This is over, and needs no action unless it returns: {self.alerted}"]


class LargestGap(Struct, frozen=True):
    """The place between two phases with most of the host code of a typical step.

    Times are by the hosts' clocks, with waits for a CPU and this tool's time, as means over the
    ranks.
    """

    at: str
    """A key of the report's `host_gaps`, such as "backward>optimizer"."""
    s: float
    of_s: float
    """Time of all places."""

    @property
    def place(self) -> str:
        before, after = split_gap(self.at)
        first, second = (_NAMES.get(each) or phase_name(each) for each in (before, after))
        return f"between {first} and {'the next one' if before == after else second}"

    @property
    def text(self) -> str:
        whole = f"Of {format_duration(self.of_s)} of host code per step, with waits for a CPU"
        return f"{whole}, {format_duration(self.s)} are {self.place}."

    @property
    def action(self) -> str:
        usual = _USUAL.get(self.at, "logging, .item(), zero_grad, Python")
        return (
            f"look at what runs {self.place} ({usual}): time parts of it with"
            ' torchlens_perf.section("name").'
        )


class SampledLines(Struct, frozen=True):
    """The lines of the user's code in which a rank spends most of a part of its typical steps."""

    part: str
    """A part in the report's `lines`, such as "host"."""
    rank: int
    samples: int
    """Number of stack samples in the part."""
    lines: dict[str, int]
    """Number of samples in the line with the most, or in two lines."""

    @property
    def text(self) -> str:
        what = {"host": "host code", "data": "data loading"}.get(self.part, self.part)
        each = (
            f"{n} of {self.samples} ({format_percent(n / self.samples)}) are at {line}"
            for line, n in self.lines.items()
        )
        return f"Of the stack samples of rank {self.rank} in {what}, {' and '.join(each)}."

    @property
    def action(self) -> str:
        return f"look at {next(iter(self.lines))}, where most of this time is spent."


class GraphReplayEvidence(Evidence, frozen=True, tag="graph_replay"):
    """Evidence on steps that replay a CUDA graph. Times are seconds per step."""

    kinds = ("not_known",)
    step_s: float
    """Duration of a step by the device's clock."""
    sections_s: dict[str, float]
    """Median time of each device section inside the graph, the longest first."""
    device: str

    def describe(self, verdict: Verdict) -> list[str]:
        each = (f"{name} {format_duration(s)}" for name, s in self.sections_s.items())
        return [
            f"The loop replays a CUDA graph: a step takes {format_duration(self.step_s)} on the"
            f" {self.device}, and the phases inside of the graph are not timed.",
            f"Device sections in a step: {', '.join(each)}." if self.sections_s else "",
        ]


class UntimedDeviceEvidence(Evidence, frozen=True, tag="untimed_device"):
    """Evidence on work on a device whose device times were not recorded, or are of no phase."""

    kinds = ("not_known",)
    device: str
    step_s: float
    """Duration of a typical step, by the device's clock if that has times."""
    has_device_times: bool

    def describe(self, verdict: Verdict) -> list[str]:
        use = verdict.uses[0]
        share = format_share(use.seconds, self.step_s)
        if self.has_device_times:
            return [
                f"What limits the step is not known: {share} of a step on the {self.device}"
                f" ({format_duration(self.step_s)}) is outside of the phases.",
                "It is host code, or work that is no phase, such as a CUDA graph.",
            ]
        return [
            f"What limits the step is not known: the work is on a device ({self.device}), and only host"
            " time was recorded.",
            f"By the host's clock, {within_sentence(use.what)} takes {share} of a typical step, but the host may"
            " be waiting for the device there.",
        ]


class DeepSpansEvidence(Evidence, frozen=True, tag="deep_spans"):
    """Evidence on spans nested too deep to be recorded, whose time counts as host code."""

    kinds = ("not_known",)
    too_deep: int
    """Number of these spans."""

    def describe(self, verdict: Verdict) -> list[str]:
        return [
            f"It is not known where the step's time goes: {format_count(self.too_deep, 'span')} nested"
            f" deeper than {MAX_FRAMES} levels were not recorded.",
            "They may include phases of the step, which are counted as host code here.",
        ]


class OtherThreadsEvidence(Evidence, frozen=True, tag="other_threads"):
    """Evidence on steps in which threads that are not recorded do the work.

    Times are seconds per step, as means over the ranks.
    """

    kinds = ("not_known",)
    step_s: float
    outside_s: float
    """Time of the recorded thread outside its phases."""
    other_threads_s: dict[str, float]
    """Time of other threads, by phase."""

    def describe(self, verdict: Verdict) -> list[str]:
        return [
            "What limits the step is not known: threads that are not recorded do part of the work"
            f" ({format_phases(self.other_threads_s)} a step).",
            f"The recorded thread spends {format_share(self.outside_s, self.step_s)} of a step outside"
            f" its own phases, where it may be waiting for these threads.",
        ]


class NoSlowRankEvidence(Evidence, frozen=True, tag="no_slow_rank"):
    """Evidence that no compared rank is slow."""

    kinds = ("none",)
    detectable_s: float
    """The smallest excess per step that would have been detected."""
    compared: int
    """Number of compared ranks."""
    steps: int
    step_s: float
    """Duration of a step."""
    by: str
    """The clocks by which ranks were compared: "host", "device", or "host and device"."""
    since_step: int = 0
    """The first step after the last slow rank; 0 if there was none."""

    def describe(self, verdict: Verdict) -> list[str]:
        share = format_percent(self.detectable_s / self.step_s if self.step_s else 0.0)
        share += f" of a step of {format_duration(self.step_s)}" if self.step_s else ""
        when = f"since step {self.since_step}" if self.since_step else f"in {self.steps} steps"
        return [
            f"No slow rank {when}{_CLOCKS[self.by]}.",
            f"The smallest detectable slowdown is {format_duration(self.detectable_s)} per step"
            f" ({share}).",
        ]


class NotComparedEvidence(Evidence, frozen=True, tag="not_compared"):
    """Evidence on ranks that were not compared, or have not been compared yet."""

    kinds = ("none", "not_compared")
    reason: str
    """few_steps (not yet), one_rank, untimed_device, unequal_work or different_work."""
    steps: int
    steps_needed: int
    world_size: int
    device: str | None
    """See Run.device."""
    untimed: tuple[int, ...]
    """Ranks without times of their devices; () if only the hosts' times of all ranks are known."""
    parts: tuple[UsualTimes, ...]
    """Usual times of ranks with equal models, the most work first; () without unequal work."""

    def describe(self, verdict: Verdict) -> list[str]:
        return self.explain_and_advise()[0]

    def explain_and_advise(self) -> tuple[list[str], str]:
        """Return why the ranks were not compared, and the action to take."""
        if self.reason == "one_rank":
            return (
                [f"Only 1 of {self.world_size} ranks was seen, so no ranks could be compared."],
                "unset RANK and WORLD_SIZE if the job has one process; else look for the logs of the"
                " other ranks.",
            )
        if self.reason == "untimed_device":
            missing = f"device times of {format_rank_list(self.untimed)} are missing"
            recorded = missing if self.untimed else "only host time is known"
            return (
                [
                    f"The ranks were not compared: their work is on a device ({self.device}), and"
                    f" {recorded}."
                ],
                "see `torchlens-perf doctor` for why, or compare traces of some ranks (torchlens-perf"
                " capture).",
            )
        if self.reason == "unequal_work":
            return self._explain_unequal_work()
        if self.reason == "different_work":
            return (
                [
                    "The ranks were not compared: they do different work, or were not recorded at the"
                    " same time."
                ],
                "nothing if the ranks are meant to differ; else start all ranks with the same script.",
            )
        return (
            [
                f"Too few steps to compare the ranks ({self.steps}): a slow rank cannot be"
                " distinguished from noise yet."
            ],
            f"run at least {self.steps_needed} steps.",
        )

    def _explain_unequal_work(self) -> tuple[list[str], str]:
        largest, *others = self.parts
        who, does = ("rank", "has") if largest.ranks.isdecimal() else ("ranks", "have")
        names = ", ".join(part.ranks for part in others)
        one = names.isdecimal()
        rest = f"rank{'s' * (not one)} {names}" if len(names) <= _MAX_NAMES_LENGTH else "the others"
        work_s, wait_s = (
            mean(each) / 1e9
            for each in zip(*((part.work_ns, part.wait_ns) for part in others), strict=True)
        )
        theirs = (
            f"{'has' if one else 'have'} {format_duration(work_s)} and wait{'s' * one}"
            f" {format_duration(wait_s)}"
        )
        return (
            [
                "The ranks were not compared, because they run different models.",
                f"{who.capitalize()} {largest.ranks} {does} {format_duration(largest.work_ns / 1e9)} of"
                f" work a step, {rest} {theirs}{', on average' * (len(others) > 1)}.",
            ],
            "if these are pipeline stages,"
            f" move layers away from {who} {largest.ranks}; otherwise, see the table of ranks for the"
            f" additional work of {who} {largest.ranks}.",
        )


class NoStepsEvidence(Evidence, frozen=True, tag="no_steps"):
    """Evidence on a run without steps."""

    records: int
    lost: int
    """Number of lost records."""
    made: int
    """Number of steps that ended without being measured."""
    unread: tuple[str, ...] | None
    """The reasons why no rank's records were read; None if records were read."""
    first: ProcessActivity | None
    """The longest first step of a rank of a running job; None without one."""

    def describe(self, verdict: Verdict) -> list[str]:
        return self.explain_and_advise()[0]

    def explain_and_advise(self) -> tuple[list[str], str]:
        """Return why no step was measured, and the action to take."""
        if self.unread is not None:
            why = "; ".join(map(printable, self.unread)) or "no ring file was found"
            return (
                [f"No rank's records were read: {why}."],
                "look for a program that removes files in /dev/shm or in the run directory.",
            )
        if self.lost:
            all_of = f"All records of {format_count(self.made, 'finished step')}"
            return (
                [
                    f"{all_of if self.made else 'Records'} were lost:"
                    f" {format_count(self.lost, 'record')} came faster than the sidecar could read,"
                    " and were overwritten."
                ],
                "record fewer sections or modules, or raise ring_records.",
            )
        if self.made:
            several = f"The {self.made} steps that ended are"
            return (
                [
                    f"{several if self.made > 1 else 'The only step that ended is'} not measured:"
                    " recording began after the first optimizer step, as the script has no watch()."
                ],
                "run more steps, or put `with perf.watch(model):` around the loop.",
            )
        if self.first is not None:
            return (
                [
                    "No step has ended yet: the first one has taken"
                    f" {format_duration(self.first.step_s)} so far, and is in"
                    f" {' > '.join(self.first.inside)}."
                ],
                "wait for its end.",
            )
        return (
            [
                "No step was seen.",
                "A step ends with an optimizer's step, a forward pass without gradients of the watched"
                " model, or w.step().",
            ],
            "pass the model to watch(), or call w.step() at the end of your loop.",
        )


class WarmUpEvidence(Evidence, frozen=True, tag="warm_up"):
    """Evidence on a run with warm-up steps only."""

    kinds = ("none",)
    steps: int
    is_live: bool
    longest_s: float | None
    """Duration of the longest step; None if not known."""
    parts: dict[str, float]
    """Share of each part in the time of these steps."""

    def describe(self, verdict: Verdict) -> list[str]:
        recorded = "have been recorded so far" if self.is_live else "were recorded"
        largest = list(self.parts.items())[:_MAX_WARM_UP_PARTS]
        shown = ", ".join(f"{phase_name(part)} {format_percent(share)}" for part, share in largest)
        took = "" if self.longest_s is None else format_duration(self.longest_s)
        return [
            f"Too few steps {recorded} ({self.steps}): the first {WARM_UP_STEPS} steps of each rank are warm-up,"
            " and are not judged.",
            f"The longest warm-up step took {took}." if took else "",
            f"Of all warm-up time: {shown}." if took and shown else "",
        ]
