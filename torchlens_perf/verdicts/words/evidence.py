"""Verdicts, and a type for each kind of evidence in `report --json`.

Names end in their units: `_s` seconds, `_bytes`. A share is between 0 and 1. Some types have a
field that is named `class` in JSON. Dataclasses do not support that, so the types are Structs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, final

from msgspec import Struct, field

from torchlens_perf.analysis.collectives.slow_link import LinkFindings
from torchlens_perf.run.failure import Failure
from torchlens_perf.run.oom_table import OutOfMemory
from torchlens_perf.run.verdicts import Verdict
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import Diagnosis
from torchlens_perf.verdicts.words.hang import HangEvidence, RankStack

SLOW_COMMUNICATION = "slow_communication"


class StragglerEvidence(Struct, frozen=True):
    """Evidence on ranks that are slow now. Seconds are per step. All times except `others_work_s`
    are those of the slowest rank."""

    cause: str = field(name="class")
    """slow_compute, slow_data, slow_host, more_work, or imbalance for a position in the mesh."""
    scope: str
    """What the ranks have in common: rank (a single rank), node or position."""
    ranks: tuple[int, ...]
    slow_too: tuple[int, ...]
    """Other slow ranks that do the same work. They are included in the verdict's cost."""
    work_s: float
    others_work_s: float
    excess_s: float
    phase_excess_s: float
    share_of_steps: float
    """Share of the steps in which the slowest rank is slow."""
    excess_when_slow_s: float
    standard_errors: float
    """Mean excess, in standard errors."""
    named_at_step: int
    more_workload: float
    """Additional workload of the slowest rank, as a share of the other ranks' workload."""
    modules: tuple[str, ...]
    """Modules that explain most of the excess in the slow phase."""
    module_excess_s: float
    diagnosis: Diagnosis | None


class PastStragglerEvidence(Struct, frozen=True):
    """Evidence on a rank that is no longer slow."""

    cause: str = field(name="class")
    until_step: int
    excess_s: float
    diagnosis: Diagnosis | None


class ImbalanceEvidence(Struct, frozen=True):
    """Evidence on a pipeline stage that has more work than the others."""

    cause: str = field(name="class")
    scope: str
    ranks: tuple[int, ...]


class SlowLinkEvidence(LinkFindings, frozen=True, tag_field="class", tag=SLOW_COMMUNICATION):
    """Evidence on slow links, the costliest first."""


@final
class OutOfMemoryEvidence(OutOfMemory):
    """Evidence on the first rank that ran out of its device's memory."""

    ranks: list[int]
    """The first rank, followed by the other ranks that ran out of memory."""


@final
class LongSteps(TypedDict):
    """A class of steps that are longer or shorter than the typical step."""

    kinds: list[str]
    """Additional work of these steps, such as evaluation. For longer steps, only work that may be
    the cause."""
    part: str
    """The part of the step with the largest difference."""
    count: int
    steps: list[int]
    waited_for: int | None
    """The rank for which all other ranks waited in each of these steps; None if it differs or is
    not known."""
    period: int | None
    mean_s: float
    """Mean duration of these steps."""
    more_s: float
    total_s: float
    share: float


def join_long_steps(classes: Sequence[LongSteps]) -> LongSteps:
    """Return several classes as one, with sums and weighted means."""
    count = sum(each["count"] for each in classes)
    return {
        **classes[0],
        "count": count,
        "steps": sorted({step for each in classes for step in each["steps"]}),
        "mean_s": sum(each["count"] * each["mean_s"] for each in classes) / count,
        "more_s": sum(each["count"] * each["more_s"] for each in classes) / count,
        "total_s": sum(each["total_s"] for each in classes),
        "share": sum(each["share"] for each in classes),
    }


class TypicalStepEvidence(Struct, frozen=True):
    """The use of time in a typical step by the hosts' clocks, as means over the ranks."""

    typical_step_s: float
    uses_s: dict[str, float]
    """Seconds of each use of the time. Keys are kinds of verdicts, such as "data_bound"."""


class DeviceStepEvidence(Struct, frozen=True):
    """The use of time in a step by the devices' clocks, as means over the ranks."""

    device_parts_s: dict[str, float]
    """Parts that add up to the step: the phases, communication for which the compute stream waited,
    and data and host code for which the device waited between the phases."""


class RunPartEvidence(Struct, frozen=True):
    """Evidence on a part of the run that was limited by something else than the rest.

    Times are seconds per step, as means over the ranks.
    """

    step_s: float
    spent_s: float
    """Time of the limit in this part of the run, such as waiting for data."""
    rest_s: float
    """Time of the limit in the rest of the run."""


class PastEvidence(Struct, frozen=True):
    """Evidence on a finding from an earlier part of the run that has ended."""

    ranks: tuple[int, ...]
    duration_s: float | None
    """For a hang, the time without a finished step."""
    went_on: bool | None
    """For a hang, true if later steps were finished."""
    stacks: Mapping[int, RankStack]
    """For a hang, the Python stacks that were read during the hang, by rank."""


class LaunchBoundEvidence(Struct, frozen=True):
    """Evidence on devices that wait for their hosts."""

    caught_up: float
    """Share of forward and backward passes at whose end the device had no work left."""
    busy: float | None
    """Share of a typical second in which the devices were busy; None if not measured."""
    idle_s: float | None
    """Least time of a step in which a device is idle for lack of kernels; None if not known."""


class GraphReplayEvidence(Struct, frozen=True):
    """Evidence on steps that replay a CUDA graph. Times are seconds per step."""

    step_s: float
    """Duration of a step by the device's clock."""
    sections_s: dict[str, float]
    """Median time of each device section inside the graph, the longest first."""


class SampledCpuLackEvidence(Struct, frozen=True):
    """Evidence on lack of CPUs from samples, for steps that are too short to record it."""

    sampled: float
    """Share of the samples in which a main thread was runnable but had no CPU."""


class UntimedDeviceEvidence(Struct, frozen=True):
    """Evidence on work on a device whose device times were not recorded."""

    device: str


class DeepSpansEvidence(Struct, frozen=True):
    """Evidence on spans nested too deep to be recorded, whose time counts as host code."""

    too_deep: int
    """Number of these spans."""


class OtherThreadsEvidence(Struct, frozen=True):
    """Evidence on steps in which threads that are not recorded do the work.

    Times are seconds per step, as means over the ranks.
    """

    step_s: float
    outside_s: float
    """Time of the recorded thread outside its phases."""
    other_threads_s: dict[str, float]
    """Time of other threads, by phase."""


class NoSlowRankEvidence(Struct, frozen=True):
    """Evidence that no compared rank is slow."""

    rows: int
    """Number of compared windows of steps."""
    detectable_s: float
    """The smallest excess per step that would have been detected."""
    compared: int
    """Number of compared ranks."""


class NotComparedEvidence(Struct, frozen=True):
    """Evidence on ranks that were not compared, or have not been compared yet."""

    rows: int


class NoStepsEvidence(Struct, frozen=True):
    """Evidence on a run without steps."""

    records: int


class UnevenStepsEvidence(Struct, frozen=True):
    """Evidence on ranks that ended normally after different numbers of steps."""

    ranks: tuple[int, ...]
    """The ranks with the fewest steps."""
    fewest: int
    most: int


class DiedEvidence(Struct, frozen=True):
    """Evidence on ranks whose processes ended before watch() was closed."""

    ranks: tuple[int, ...]
    last_step: int | None
    """The last finished step of the rank that died first; None if it finished no step."""
    inside: tuple[str, ...]
    """The open spans of this rank when it died."""


class FailedEvidence(Struct, frozen=True):
    """Evidence on the rank that failed first, and on ranks that ended afterwards."""

    failure: Failure
    failed_too: tuple[int, ...]
    """Other ranks that an exception of their own has ended."""
    lost_peers: tuple[int, ...]
    """Ranks that ended because their connection to another rank was lost."""
    closed: tuple[int, ...]
    """Ranks that ended without an exception, although other ranks lost their connection."""
    closed_by: tuple[str, ...]
    """How these ranks ended, such as "exit code 3" or "SIGSEGV"; () if not known."""
    died: tuple[int, ...]
    """Ranks whose processes ended without an exception before watch() was closed."""


class StartupEvidence(Struct, frozen=True):
    """Evidence on a run whose start takes a large share of its time."""

    before_first_step_s: float
    warm_up_more_s: float
    """Additional time of the warm-up steps, compared with as many usual steps."""
    compile_s: float | None
    """Time that the process spent in torch.compile; None if not measured."""
    cpu_wait_s: float | None
    """Time during the start in which the main thread was runnable but had no CPU; None if not
    measured."""
    whole_s: float
    """Time from the start of the process to the end of its last step."""


class GrowthEvidence(Struct, frozen=True):
    """Evidence on step times that grow over the run. Times are medians over windows."""

    first_third_s: float
    last_third_s: float
    later_is_slower: float
    """Share of all pairs of windows in which steps of the later window take longer."""


class WarmUpEvidence(Struct, frozen=True, forbid_unknown_fields=True):
    """Evidence on a run with warm-up steps only. It has no fields."""


Evidence = (
    StragglerEvidence
    | PastStragglerEvidence
    | ImbalanceEvidence
    | SlowLinkEvidence
    | HangEvidence
    | OutOfMemoryEvidence
    | LongSteps
    | TypicalStepEvidence
    | DeviceStepEvidence
    | RunPartEvidence
    | PastEvidence
    | LaunchBoundEvidence
    | GraphReplayEvidence
    | SampledCpuLackEvidence
    | UntimedDeviceEvidence
    | DeepSpansEvidence
    | OtherThreadsEvidence
    | NoSlowRankEvidence
    | NotComparedEvidence
    | NoStepsEvidence
    | UnevenStepsEvidence
    | DiedEvidence
    | FailedEvidence
    | StartupEvidence
    | GrowthEvidence
    | WarmUpEvidence
)

_BY_STEP = (TypicalStepEvidence, DeviceStepEvidence, RunPartEvidence)
OVER = "_ended"
"""Suffix of the kinds of verdicts that are no longer true."""
NOT_COMPUTING_KINDS = ("data_bound", "communication_bound", "host_bound", "lack_of_cpu")
"""Kinds of verdicts that something other than computing limits the step."""

# The types of evidence that each kind of verdict can have. The JSON schema is built from this
# mapping.
EVIDENCE: Mapping[str, tuple[type, ...]] = {
    "straggler": (StragglerEvidence,),
    "straggler_transient": (PastStragglerEvidence,),
    "straggler_ended": (PastStragglerEvidence,),
    "imbalance": (ImbalanceEvidence,),
    "slow_link": (SlowLinkEvidence,),
    "hang": (HangEvidence,),
    "out_of_memory": (OutOfMemoryEvidence,),
    "died": (DiedEvidence,),
    "failed": (FailedEvidence,),
    "startup": (StartupEvidence,),
    "growing_steps": (GrowthEvidence,),
    "uneven_steps": (UnevenStepsEvidence,),
    "compute_bound": _BY_STEP,
    "data_bound": _BY_STEP,
    "communication_bound": _BY_STEP,
    "host_bound": (*_BY_STEP, LaunchBoundEvidence),
    "lack_of_cpu": (*_BY_STEP, SampledCpuLackEvidence),
    "long_steps": (LongSteps,),
    "not_known": (
        UntimedDeviceEvidence,
        GraphReplayEvidence,
        DeepSpansEvidence,
        OtherThreadsEvidence,
    ),
    "none": (NoSlowRankEvidence, NotComparedEvidence, WarmUpEvidence),
    "not_compared": (NotComparedEvidence,),
    "no_steps": (NoStepsEvidence,),
    # Kinds for ended findings. The kinds for slow ranks are listed above.
    **dict.fromkeys(
        (f"{kind}{OVER}" for kind in ("hang", "slow_link", "imbalance")), (PastEvidence,)
    ),
    **dict.fromkeys((f"{kind}{OVER}" for kind in NOT_COMPUTING_KINDS), (RunPartEvidence,)),
}


@dataclasses.dataclass(frozen=True)
class JudgedVerdict(Verdict):
    """A verdict with its evidence: one row of the report's `verdicts`."""

    confidence: float
    evidence: Evidence
    episode: Episode | None = dataclasses.field(default=None, compare=False)
    """The episode of a slow rank; None for other kinds. It is not part of reports."""
    explanation: str = ""
    """The measurement. Place, cost, time and cause are in other fields."""
    cause: str = ""
    """The cause of a rank's slowness, or the causes that were ruled out; "" without a diagnosis."""

    def to_report_row(self) -> dict[str, Any]:
        """Return the verdict as a row of the report."""
        return {
            "kind": self.kind, "rank": self.rank, "phase": self.phase, "cost_s_per_step": self.cost_s_per_step,
            "cost_share": self.cost_share, "since_step": self.since_step, "confidence": self.confidence,
            "text": self.sentence, "action": self.next, "explanation": self.explanation or self.text,
            "cause": self.cause, "evidence": self.evidence,
        }  # fmt: skip


def make_verdict(
    kind: str, rank: int | None, phase: str | None, cost_s_per_step: float | None, cost_share: float | None,
    since_step: int | None, confidence: float, text: str, action: str, evidence: Evidence,
    episode: Episode | None = None, explanation: str = "", cause: str = "",
) -> JudgedVerdict:  # fmt: skip
    """Return a verdict.

    kind: a key of EVIDENCE. text: the finding in sentences. action: what to do; "" if nothing.
    """
    return JudgedVerdict(
        kind,
        text,
        action,
        rank,
        phase,
        cost_s_per_step,
        cost_share,
        since_step,
        confidence,
        evidence,
        episode,
        explanation,
        cause,
    )
