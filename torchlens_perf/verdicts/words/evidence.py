"""Verdicts and their evidence: a type for each kind of evidence in `report --json`.

Names end in their units: `_s` seconds, `_bytes`. A share is between 0 and 1. Some evidence has a
field `class` in JSON, which a dataclass cannot have. All types defined here are therefore Structs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, final

from msgspec import Struct, field

from torchlens_perf.analysis.collectives.slow_link import LinkFindings
from torchlens_perf.run.oom_table import OutOfMemory
from torchlens_perf.run.verdicts import Verdict, split_sentence_and_action
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import Diagnosis
from torchlens_perf.verdicts.words.hang import HangEvidence, RankStack

SLOW_COMMUNICATION = "slow_communication"


class StragglerEvidence(Struct, frozen=True):
    """Evidence on ranks that are slow now. Seconds are per step of the slowest rank."""

    cause: str = field(name="class")
    """slow_compute, slow_data, slow_host, more_work, or imbalance for a position in the mesh."""
    scope: str
    """rank, node or position."""
    ranks: tuple[int, ...]
    slow_too: tuple[int, ...]
    """Other slow ranks that do the same work. The verdict's cost includes them."""
    work_s: float
    others_work_s: float
    excess_s: float
    phase_excess_s: float
    share_of_steps: float
    """Share of the steps in which it is slow."""
    excess_when_slow_s: float
    standard_errors: float
    """Standard errors of the mean excess above zero."""
    named_at_step: int
    more_workload: float
    """Share by which it has more workload than the others."""
    modules: tuple[str, ...]
    """Modules that explain most of the phase's excess."""
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
    """This rank, followed by the other ranks that ran out of memory."""


@final
class LongSteps(TypedDict):
    """A class of steps that are longer or shorter than the typical step."""

    kinds: list[str]
    """Additional work of these steps. For longer steps, only work that may be the cause."""
    part: str
    """The part of the step that makes most of the difference."""
    count: int
    steps: list[int]
    waited_for: int | None
    """The rank that all others waited for in each of these steps; None if it differs or is not
    known."""
    period: int | None
    mean_s: float
    """Their mean duration."""
    more_s: float
    total_s: float
    share: float


def joined(classes: Sequence[LongSteps]) -> LongSteps:
    """Return the union of several classes, with sums and weighted means."""
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
    """Uses of a typical step's time by the hosts' clocks, as means over the ranks."""

    typical_step_s: float
    uses_s: dict[str, float]
    """Seconds by the kind of verdict that each use would be."""


class DeviceStepEvidence(Struct, frozen=True):
    """Shares of a step by the devices' clocks, as means over the ranks."""

    device_parts_s: dict[str, float]
    """Parts that add up to the step: phases; communication, for which the compute stream waited;
    data and host, for
    which the device waited between the phases."""


class StretchEvidence(Struct, frozen=True):
    """Evidence on a part of the run that was limited by something else than the rest.

    Seconds are per step, from windows, as means over the ranks.
    """

    step_s: float
    spent_s: float
    """Seconds of a step that the limit took in this part of the run."""
    rest_s: float
    """The same in the rest of the run."""


class PastEvidence(Struct, frozen=True):
    """Evidence on a finding that was made during the run and is over."""

    ranks: tuple[int, ...]
    duration_s: float | None
    """For a hang, the time without a finished step."""
    went_on: bool | None
    """For a hang, true if steps were made afterwards."""
    stacks: Mapping[int, RankStack]
    """For a hang, the Python stacks that were read during it, by rank."""


class CaughtUpEvidence(Struct, frozen=True):
    """Evidence on devices that wait for their hosts."""

    caught_up: float
    """Share of the forward and backward passes at whose end a device had no work left."""
    launch_share: float | None
    """Share of a step's work in which the devices wait for their hosts to issue it; None if not
    known."""


class SampledEvidence(Struct, frozen=True):
    """Evidence on a lack of CPUs from the sidecar's samples, for steps too short to record it."""

    sampled: float
    """Share of the samples in which a main thread was runnable without a CPU."""


class NotKnownEvidence(Struct, frozen=True):
    """Evidence on work on a device of which only host time was recorded."""

    device: str


class TooDeepEvidence(Struct, frozen=True):
    """Evidence on steps with spans that were nested too deep to be recorded.

    Their time counts as host code.
    """

    too_deep: int
    """Number of such spans."""


class OtherThreadsEvidence(Struct, frozen=True):
    """Evidence on steps in which unrecorded threads do the work.

    Seconds are per step, as means over the ranks.
    """

    step_s: float
    outside_s: float
    """Time of the recorded thread outside of its phases."""
    other_threads_s: dict[str, float]
    """Time of other threads, by phase."""


class NobodySlowEvidence(Struct, frozen=True):
    """Evidence that no compared rank is slow."""

    rows: int
    """Number of compared windows of steps."""
    detectable_s: float
    """The smallest excess per step that would have been named."""
    compared: int
    """Number of compared ranks."""


class NotComparedEvidence(Struct, frozen=True):
    """Evidence on ranks that were not compared, or not yet."""

    rows: int


class NoStepsEvidence(Struct, frozen=True):
    """Evidence on a run without steps."""

    records: int


class DiedEvidence(Struct, frozen=True):
    """Evidence on ranks whose processes ended without closing their watch."""

    ranks: tuple[int, ...]
    last_step: int | None
    """The last finished step of the rank with the fewest steps; None if it finished no step."""
    inside: tuple[str, ...]
    """The spans that this rank was inside of when it died."""


class StartupEvidence(Struct, frozen=True):
    """Evidence on a run whose start takes a large share of its time."""

    before_first_step_s: float
    warm_up_more_s: float
    """Time of the warm-up steps beyond the time of as many usual steps."""
    compile_s: float | None
    """Time spent in torch.compile by the process; None if it was not measured."""
    cpu_wait_s: float | None
    """Time for which the main thread was runnable without a CPU during the start; None if it was
    not measured."""
    whole_s: float
    """From the start of the process to the end of its last step."""


class GrowthEvidence(Struct, frozen=True):
    """Evidence on steps that take longer and longer. Medians of the windows of all ranks."""

    first_third_s: float
    last_third_s: float
    later_is_slower: float
    """Share of all pairs of windows in which the later window is slower."""


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
    | StretchEvidence
    | PastEvidence
    | CaughtUpEvidence
    | SampledEvidence
    | NotKnownEvidence
    | TooDeepEvidence
    | OtherThreadsEvidence
    | NobodySlowEvidence
    | NotComparedEvidence
    | NoStepsEvidence
    | DiedEvidence
    | StartupEvidence
    | GrowthEvidence
    | WarmUpEvidence
)

_BY_STEP = (TypicalStepEvidence, DeviceStepEvidence, StretchEvidence)
OVER = "_ended"
"""Suffix of the kinds of verdicts that no longer hold."""
WASTE = ("data_bound", "communication_bound", "host_bound", "lack_of_cpu")
"""Kinds of verdicts on uses of a step's time other than computing."""

# All kinds of verdicts with their possible types of evidence. The JSON schema is made from it.
EVIDENCE: Mapping[str, tuple[type, ...]] = {
    "straggler": (StragglerEvidence,),
    "straggler_transient": (PastStragglerEvidence,),
    "straggler_ended": (PastStragglerEvidence,),
    "imbalance": (ImbalanceEvidence,),
    "slow_link": (SlowLinkEvidence,),
    "hang": (HangEvidence,),
    "out_of_memory": (OutOfMemoryEvidence,),
    "died": (DiedEvidence,),
    "startup": (StartupEvidence,),
    "growing_steps": (GrowthEvidence,),
    "compute_bound": _BY_STEP,
    "data_bound": _BY_STEP,
    "communication_bound": _BY_STEP,
    "host_bound": (*_BY_STEP, CaughtUpEvidence),
    "lack_of_cpu": (*_BY_STEP, SampledEvidence),
    "long_steps": (LongSteps,),
    "not_known": (NotKnownEvidence, TooDeepEvidence, OtherThreadsEvidence),
    "none": (NobodySlowEvidence, NotComparedEvidence, WarmUpEvidence),
    "not_compared": (NotComparedEvidence,),
    "no_steps": (NoStepsEvidence,),
    # Findings that are over. Slow ranks have kinds of their own above.
    **dict.fromkeys(
        (f"{kind}{OVER}" for kind in ("hang", "slow_link", "imbalance")), (PastEvidence,)
    ),
    **dict.fromkeys((f"{kind}{OVER}" for kind in WASTE), (StretchEvidence,)),
}


@dataclasses.dataclass(frozen=True)
class JudgedVerdict(Verdict):
    """A verdict with its evidence: one row of the report's `verdicts`.

    The cost of a slow rank includes the ranks in `evidence.slow_too`.
    """

    confidence: float
    evidence: Evidence
    episode: Episode | None = dataclasses.field(default=None, compare=False)
    """The episode of a slow rank; None for other kinds. Reports do not contain it."""
    explanation: str = ""
    """The measurement, without place, cost, time and cause, which are in other fields."""
    cause: str = ""
    """The cause of a rank's slowness, or the causes ruled out; "" without a diagnosis."""

    def facts(self) -> dict[str, Any]:
        """Return the fields of the report's row."""
        return {
            "kind": self.kind, "rank": self.rank, "phase": self.phase, "cost_s_per_step": self.cost_s_per_step,
            "cost_share": self.cost_share, "since_step": self.since_step, "confidence": self.confidence,
            "text": self.sentence, "explanation": self.explanation or self.text, "cause": self.cause,
            "evidence": self.evidence,
        }  # fmt: skip


def judged(
    kind: str, rank: int | None, phase: str | None, cost_s_per_step: float | None, cost_share: float | None,
    since_step: int | None, confidence: float, sentence: str, evidence: Evidence, episode: Episode | None = None,
    explanation: str = "", cause: str = "",
) -> JudgedVerdict:  # fmt: skip
    """Return a verdict.

    kind: a key of EVIDENCE. sentence: the text, with the action after "Next: ".
    """
    said = split_sentence_and_action(sentence)
    return JudgedVerdict(
        kind,
        *said,
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
