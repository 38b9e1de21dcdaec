"""A verdict, and the numbers behind its sentence: a type for each kind of evidence, as `report --json` has it.

Names end in their units: `_s` seconds, `_bytes`. A share is between 0 and 1. A Struct is used where JSON has a field
`class`, which no dataclass can have, and so for all that are made here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, final

from msgspec import Struct, field

from torchlens_perf.analysis.collectives.slow_link import LinkFindings
from torchlens_perf.run.oom_table import OutOfMemory
from torchlens_perf.run.verdicts import Verdict, sentence_and_action
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import Diagnosis
from torchlens_perf.verdicts.words.hang import HangEvidence, RankStack

SLOW_COMMUNICATION = "slow_communication"


class StragglerEvidence(Struct, frozen=True):
    """Of ranks that are slow now. Seconds are those of a step of the slowest one."""

    cause: str = field(name="class")
    """slow_compute, slow_data, slow_host, more_work, or imbalance for a position in the mesh."""
    scope: str
    """rank, node or position."""
    ranks: tuple[int, ...]
    slow_too: tuple[int, ...]
    """Other slow ranks that do the same work. The verdict's cost is that of all of them together."""
    work_s: float
    others_work_s: float
    excess_s: float
    phase_excess_s: float
    share_of_steps: float
    """In how many of the steps it is slow."""
    excess_when_slow_s: float
    standard_errors: float
    """How far the excess is beyond what chance gives."""
    named_at_step: int
    more_workload: float
    """Share that it has more to do than the others."""
    modules: tuple[str, ...]
    """Those that explain most of the phase's excess."""
    module_excess_s: float
    diagnosis: Diagnosis | None


class PastStragglerEvidence(Struct, frozen=True):
    """Of a rank that was slow, and no longer is."""

    cause: str = field(name="class")
    until_step: int
    excess_s: float
    diagnosis: Diagnosis | None


class ImbalanceEvidence(Struct, frozen=True):
    """Of a pipeline stage that has more work than the others."""

    cause: str = field(name="class")
    scope: str
    ranks: tuple[int, ...]


class SlowLinkEvidence(LinkFindings, frozen=True, tag_field="class", tag=SLOW_COMMUNICATION):
    """Of slow links, the costliest first."""


@final
class OutOfMemoryEvidence(OutOfMemory):
    """Of the rank that was first to run out of its device's memory."""

    ranks: list[int]
    """That one, and then the others that ran out."""


@final
class LongSteps(TypedDict):
    """A class of steps that take longer than the typical step, or shorter."""

    kinds: list[str]
    """What else they do; for longer steps, as far as it may be why."""
    part: str
    """The part of the step that makes most of the difference."""
    count: int
    steps: list[int]
    waited_for: int | None
    """The rank that all others waited for in each of them; None where that is not one and the same, or not known."""
    period: int | None
    mean_s: float
    """Their mean duration."""
    more_s: float
    total_s: float
    share: float


def joined(classes: Sequence[LongSteps]) -> LongSteps:
    """Return several classes as one, named as the first: sums, and means by count."""
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
    """What a typical step is spent on, by the hosts' clocks: the mean over the ranks."""

    typical_step_s: float
    uses_s: dict[str, float]
    """By the kind of verdict that it would be."""


class DeviceStepEvidence(Struct, frozen=True):
    """Shares of a step by the devices' clocks, as means over the ranks."""

    device_parts_s: dict[str, float]
    """They add up to the step: phases; communication, that the compute stream waited for; data and host, that the
    device waited for between the phases."""


class StretchEvidence(Struct, frozen=True):
    """Of a part of the run in which something else took the step's time than in the rest. Seconds are those of a step,
    by windows: the mean over the ranks."""

    step_s: float
    spent_s: float
    """What it took in a step meanwhile."""
    rest_s: float
    """The same in the rest of the run."""


class PastEvidence(Struct, frozen=True):
    """Of what was found while the run went on, and is over."""

    ranks: tuple[int, ...]
    duration_s: float | None
    """Of a hang, for how long no step was made."""
    went_on: bool | None
    """Of a hang, whether steps were made afterwards."""
    stacks: Mapping[int, RankStack]
    """Of a hang, the Python stacks that were read meanwhile, by rank."""


class CaughtUpEvidence(Struct, frozen=True):
    """Of devices that wait for the host."""

    caught_up: float
    """Share of the forward and backward passes at whose end a device had no work left."""
    launch_share: float | None
    """Share of a step's work in which the devices wait for their hosts to issue it; None: not known."""


class SampledEvidence(Struct, frozen=True):
    """Of a lack of CPUs that the sidecar has seen, where steps are too short to record it."""

    sampled: float
    """Share of the samples in which a main thread was ready and had no CPU."""


class NotKnownEvidence(Struct, frozen=True):
    """Of work on a device, of which only host time was recorded."""

    device: str


class TooDeepEvidence(Struct, frozen=True):
    """Of steps with spans that were nested too deep to be recorded: their time counts as host code."""

    too_deep: int
    """How many such spans there were."""


class OtherThreadsEvidence(Struct, frozen=True):
    """Of steps in which threads that are not recorded do the work. Seconds per step, the mean over ranks."""

    step_s: float
    outside_s: float
    """What the recorded thread spends outside of its phases."""
    other_threads_s: dict[str, float]
    """By phase, what other threads spend meanwhile."""


class NobodySlowEvidence(Struct, frozen=True):
    """Of ranks of which none stands out."""

    rows: int
    """Windows of steps that were compared."""
    detectable_s: float
    """What a rank would have needed more a step to be named."""
    compared: int
    """Ranks that were compared."""


class NotComparedEvidence(Struct, frozen=True):
    """Of ranks that were not compared, or not yet."""

    rows: int


class NoStepsEvidence(Struct, frozen=True):
    """Of a run without steps."""

    records: int


class DiedEvidence(Struct, frozen=True):
    """Of ranks whose processes ended without closing their watch."""

    ranks: tuple[int, ...]
    last_step: int | None
    """The last whole step of the rank that made the fewest; None: it made none."""
    inside: tuple[str, ...]
    """The spans that this rank was inside of."""


class StartupEvidence(Struct, frozen=True):
    """Of a run whose start takes much of it."""

    before_first_step_s: float
    warm_up_more_s: float
    """How much longer the warm-up steps took than as many usual ones."""
    compile_s: float | None
    """How long torch.compile took in the process; None where it was not measured."""
    cpu_wait_s: float | None
    """How long the main thread was runnable without a CPU meanwhile; None where it was not measured."""
    whole_s: float
    """From the start of the process to the end of its last step."""


class GrowthEvidence(Struct, frozen=True):
    """Of steps that take longer and longer. Medians of the windows of all ranks."""

    first_third_s: float
    last_third_s: float
    later_is_slower: float
    """Share of all pairs of windows of which the later one is slower."""


class WarmUpEvidence(Struct, frozen=True, forbid_unknown_fields=True):
    """Of a run whose steps were all warm-up: there is none."""


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
"""How the kinds of verdicts end that no longer hold."""
WASTE = ("data_bound", "communication_bound", "host_bound", "lack_of_cpu")
"""What a step's time may go to besides computing."""

# All kinds of verdicts, and which evidence each may have. The JSON schema is made from it.
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
    # What is over; slow ranks have kinds of their own above.
    **dict.fromkeys((f"{kind}{OVER}" for kind in ("hang", "slow_link", "imbalance")), (PastEvidence,)),
    **dict.fromkeys((f"{kind}{OVER}" for kind in WASTE), (StretchEvidence,)),
}


@dataclasses.dataclass(frozen=True)
class JudgedVerdict(Verdict):
    """A verdict with the numbers behind its sentence; one row of the report's `verdicts`.

    The cost of a slow rank is that of all of `evidence.slow_too` as well.
    """

    confidence: float
    evidence: Evidence
    episode: Episode | None = dataclasses.field(default=None, compare=False)
    """The time in which its rank is, or was, slow; None for other kinds. It is in no report."""
    explanation: str = ""
    """What was measured, without place, cost, time and cause, which fields have; "" where that is the whole text."""
    cause: str = ""
    """Why a rank is slow, or what was checked in vain; "" where no cause was looked for."""

    def facts(self) -> dict[str, Any]:
        """Return the fields that a report has."""
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
    """Return a verdict. kind: one of EVIDENCE. sentence: with what to do after "Next: "."""
    said = sentence_and_action(sentence)
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
