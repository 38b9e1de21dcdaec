"""A type for each kind of evidence of a verdict.

Names end in their units: `_s` seconds, `_bytes`. A share is between 0 and 1. In JSON, the field
`type` names the type.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from torchlens_perf.analysis.statistics.host_gaps import split_gap
from torchlens_perf.analysis.statistics.quantities import format_count, format_duration
from torchlens_perf.run.ring import MAX_FRAMES
from torchlens_perf.verdicts.verdict import NOT_COMPUTING_KINDS, OVER, Evidence, RunLength, Verdict
from torchlens_perf.verdicts.words.hang import RankStack
from torchlens_perf.verdicts.words.phases import format_phases, format_share, phase_name

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


class ImbalanceEvidence(Evidence, frozen=True, tag="imbalance"):
    """Evidence on a pipeline stage that has more work than the others."""

    cause: str = field(name="class")
    scope: str
    ranks: tuple[int, ...]


class PastEvidence(Evidence, frozen=True, tag="past"):
    """Evidence on a finding from an earlier part of the run that has ended."""

    kinds = tuple(f"{kind}{OVER}" for kind in ("hang", "slow_link", "imbalance"))
    paid_once_of = "all step time"
    ranks: tuple[int, ...]
    duration_s: float | None
    """For a hang, the time without a finished step."""
    went_on: bool | None
    """For a hang, true if later steps were finished."""
    stacks: Mapping[int, RankStack]
    """For a hang, the Python stacks that were read during the hang, by rank."""

    @property
    def stops_run(self) -> bool:
        return self.went_on is False

    def compute_lost_s(self, verdict: Verdict, run: RunLength) -> float | None:
        cost_s = verdict.cost_s_per_step
        return None if cost_s is None else cost_s * run.steps


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
        whole = f"Of {format_duration(self.of_s)} of host code by the host's clock"
        return f"{whole}, {format_duration(self.s)} are {self.place}."

    @property
    def action(self) -> str:
        usual = _USUAL.get(self.at, "logging, .item(), zero_grad, Python")
        return f"look at what runs {self.place} ({usual}): wrap parts in perf.section()."


class GraphReplayEvidence(Evidence, frozen=True, tag="graph_replay"):
    """Evidence on steps that replay a CUDA graph. Times are seconds per step."""

    kinds = ("not_known",)
    step_s: float
    """Duration of a step by the device's clock."""
    sections_s: dict[str, float]
    """Median time of each device section inside the graph, the longest first."""
    device: str

    def describe(self, verdict: Verdict) -> str:
        each = (f"{name} {format_duration(s)}" for name, s in self.sections_s.items())
        shown = f" Device sections in a step: {', '.join(each)}." if self.sections_s else ""
        return (
            f"The loop replays a CUDA graph: a step takes {format_duration(self.step_s)} on the"
            f" {self.device}, and the phases inside of the graph are not timed.{shown}"
        )


class UntimedDeviceEvidence(Evidence, frozen=True, tag="untimed_device"):
    """Evidence on work on a device whose device times were not recorded, or are of no phase."""

    kinds = ("not_known",)
    device: str
    step_s: float
    """Duration of a typical step, by the device's clock if that has times."""
    has_device_times: bool

    def describe(self, verdict: Verdict) -> str:
        use = verdict.uses[0]
        share = format_share(use.seconds, self.step_s)
        if self.has_device_times:
            return (
                f"What limits the step is not known: {share} of a step on the {self.device}"
                f" ({format_duration(self.step_s)}) is outside of the phases. It is host code, or work"
                " that is no phase, such as a CUDA graph."
            )
        return (
            f"What limits the step is not known: the work is on a device ({self.device}), and only host"
            f" time was recorded. {use.what} takes {share} of a typical step on the host, which may be"
            " waiting for the device."
        )


class DeepSpansEvidence(Evidence, frozen=True, tag="deep_spans"):
    """Evidence on spans nested too deep to be recorded, whose time counts as host code."""

    kinds = ("not_known",)
    too_deep: int
    """Number of these spans."""

    def describe(self, verdict: Verdict) -> str:
        return (
            f"It is not known where the step's time goes: {format_count(self.too_deep, 'span')} nested"
            f" deeper than {MAX_FRAMES} levels were not recorded. They may include phases of the step,"
            " which are counted as host code here."
        )


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

    def describe(self, verdict: Verdict) -> str:
        return (
            "What limits the step is not known: threads that are not recorded do part of the work"
            f" ({format_phases(self.other_threads_s)} a step). The recorded thread spends"
            f" {format_share(self.outside_s, self.step_s)} of a step outside its own phases, where it"
            f" may be waiting for these threads."
        )


class NoSlowRankEvidence(Evidence, frozen=True, tag="no_slow_rank"):
    """Evidence that no compared rank is slow."""

    kinds = ("none",)
    rows: int
    """Number of compared windows of steps."""
    detectable_s: float
    """The smallest excess per step that would have been detected."""
    compared: int
    """Number of compared ranks."""


class NotComparedEvidence(Evidence, frozen=True, tag="not_compared"):
    """Evidence on ranks that were not compared, or have not been compared yet."""

    kinds = ("none", "not_compared")
    rows: int


class NoStepsEvidence(Evidence, frozen=True, tag="no_steps"):
    """Evidence on a run without steps."""

    records: int


class WarmUpEvidence(Evidence, frozen=True, tag="warm_up", forbid_unknown_fields=True):
    """Evidence on a run with warm-up steps only. It has no fields."""

    kinds = ("none",)
