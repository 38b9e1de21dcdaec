"""A verdict: what is concluded, about which ranks and steps, at what cost, why, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from msgspec import Struct, field
from msgspec.structs import force_setattr

from torchlens_perf.run.failure import Failure
from torchlens_perf.verdicts.kinds import KINDS, OTHER, VerdictKind
from torchlens_perf.verdicts.long_steps import LongSteps
from torchlens_perf.verdicts.stragglers.findings import Diagnosis

WORTH_A_LINE = 0.05
"""An ended hang is still listed with current verdicts if it took at least this share of all step time,
and a small past excess of a rank is listed if it cost this share of its steps."""
_NEXT = " Next: "


class RankStack(Struct, frozen=True):
    """A rank's Python stack with the innermost line last, or the reason why it is missing."""

    lines: tuple[str, ...]
    reason: str


class Period(Struct, frozen=True, kw_only=True):
    """The period in which a verdict is true. For a slow rank, it is the rank's episode."""

    since_step: int | None
    until_step: int | None
    """The first step in which the verdict is no longer true; None while it is true."""
    windows_held: int | None = None
    """Number of windows between these steps in which the verdict is true."""
    windows_judged: int | None = None
    """Number of windows that show whether the verdict is true; None without windows."""
    window_steps: int | None = None
    """Number of steps in a window."""
    since: str | None = None
    """Time at which since_step began, in UTC. Within a window, it is interpolated from the usual
    duration of a step."""
    until: str | None = None


class NamedUse(Struct, frozen=True):
    """A use of a step's time that a sentence names, such as data loading."""

    kind: str
    """A kind of verdicts, such as "data_bound"."""
    what: str
    seconds: float
    lack_s: float = 0.0
    """The part of it in which the thread waited for a CPU; 0 if such waits are a use of their own."""


class RunLength(NamedTuple):
    """Numbers of steps of a run, from which the lost time of a verdict is computed."""

    steps: int
    typical: int
    """Number of typical steps."""
    last_step: int | None


class Evidence(Struct, frozen=True, kw_only=True, tag_field="type"):
    """The basis of a verdict. There is a class for each kind of evidence."""

    kinds: ClassVar[tuple[str, ...]] = ()
    """The kinds of verdicts that rest on it; () if that is only the kind with its tag."""
    is_of_run: ClassVar[bool] = False
    """True for the verdict on the typical step of the whole run."""

    is_factor: ClassVar[bool] = False
    """True if the time is part of what another current verdict names, which is listed before it."""
    paid_once_of: ClassVar[str] = ""
    """For a cost that is paid once, the time of which it is a share; "" for a cost per step."""

    ranks: tuple[int, ...] = ()
    """All ranks that the verdict is about; () for the rank of the verdict alone."""
    scope: str = ""
    """The unit that is slow: rank (a single rank), node, position or stage; "" if the verdict is not
    about slow ranks."""
    modules: tuple[str, ...] = ()
    """Modules that explain the finding."""
    slow_too: tuple[int, ...] = ()
    """Other slow ranks that do the same work. They are included in the verdict's cost."""
    own_cost_s: float | None = None
    """With `slow_too`, the gain of repairing only the ranks of the verdict; else None."""
    cause: str = field(default="", name="class")
    """Class of the cause, for slow ranks slow_compute, slow_data, slow_host, more_work or imbalance; ""
    if there are no classes."""

    def find_large_uses(self, verdict: Verdict) -> set[str]:
        """Kinds of large uses of the typical step's time."""
        return set()

    @property
    def subjects(self) -> set[str]:
        """Names of the links at fault. A verdict on links is updated with each new one."""
        return set()

    @property
    def long(self) -> LongSteps | None:
        """The class of steps that a verdict on long steps is about; None for other verdicts."""
        return None

    @property
    def failed_at(self) -> tuple[int, int] | None:
        """The step and the time (nanoseconds in UTC) of an error that ended a rank, or None."""
        return None

    @property
    def failure(self) -> Failure | None:
        """The exception that ended the run; None for other verdicts."""
        return None

    @property
    def work_s(self) -> float | None:
        """Work of a rank that is slow now, per step; None for other verdicts."""
        return None

    @property
    def share_of_steps(self) -> float | None:
        """Share of the steps in which a slow rank is slow; None for other verdicts."""
        return None

    @property
    def stacks(self) -> Mapping[int, RankStack]:
        """Python stacks that were read while the job hung, by rank."""
        return {}

    @property
    def places(self) -> tuple[str, ...]:
        """The call and the line of code of each group of ranks in a hang, as texts."""
        return ()

    @property
    def nccl_status(self) -> str:
        """The answer of NCCL's RAS service while the job hung; "" without one."""
        return ""

    @property
    def stops_run(self) -> bool:
        """True if the run did not recover from it."""
        return False

    def describe(self, verdict: Verdict) -> list[str]:
        """Return the finding in sentences with its numbers. The first one is enough for a short
        form, and others may be ""."""
        return []

    def explain(self, verdict: Verdict) -> list[str]:
        """Return the measurement in sentences, if place, cost, time and cause, which are in other
        fields, are also in those of describe(); else none."""
        return []

    def describe_causes(self, verdict: Verdict) -> str:
        """Return the causes of a rank's slowness, or the causes that were ruled out."""
        return ""

    def compute_lost_s(self, verdict: Verdict, run: RunLength) -> float | None:
        """Return the seconds of job time that the cause has cost so far; None if not known."""
        cost_s, held = verdict.cost_s_per_step, verdict.held
        if cost_s is None or verdict.since_step is None or held is None:
            return None if cost_s is None else cost_s * run.steps
        until = held.until_step
        if until is None:
            until = verdict.since_step + 1 if run.last_step is None else run.last_step + 1
        return cost_s * max(0, min(until - (held.since_step or 0), run.steps))


class Verdict(Struct, frozen=True, kw_only=True):
    """One conclusion. A row of the report's `verdicts`."""

    kind: str
    rank: int | None = None
    phase: str | None = None
    cost_s_per_step: float | None = None
    """Seconds per step that the job would save without the problem."""
    cost_share: float | None = None
    since_step: int | None = None
    confidence: float
    lost_s: float | None = None
    """Seconds of job time that the cause has cost so far; None if not known."""
    text: str = ""
    """The finding in sentences, with its numbers."""
    advice: str = ""
    """Key of the general action, by which a more precise one is chosen; "" without one."""
    action: str = ""
    """The action to take; "" if not applicable."""
    because: str = ""
    """The figures of the run that justify the action; "" for a general action."""
    explanation: str = ""
    """The measurement. Place, cost, time, cause and action are in other fields."""
    cause: str = ""
    """The cause of a rank's slowness, or the causes that were ruled out; "" without a diagnosis."""
    uses: tuple[NamedUse, ...] = ()
    """The limit of the typical step, and other large uses of its time."""
    diagnosis: Diagnosis | None = None
    """Causes of the slowness of a rank; None if no diagnosis was made."""
    notes: tuple[str, ...] = ()
    """Further sentences, for example on measurements that do not confirm the finding."""
    is_undecided: bool = False
    """True if the ranks were not compared, so that none is known to be slow or not."""
    where: dict[str, str] | None = None
    """Names for the rank's location: host, scheduler, container, cloud."""
    held: Period | None = None
    """None if the period is not known."""
    is_over: bool = False
    """True if the verdict is only about an earlier part of the run."""
    evidence: Evidence
    """The type of the evidence depends on `kind`."""

    def __post_init__(self) -> None:
        # The sentences are made of the other fields, also after one of these was replaced.
        text = self.evidence.describe(self)
        explanation = self.evidence.explain(self) or text
        force_setattr(self, "text", " ".join(filter(None, (*text, *self.notes))))
        force_setattr(self, "explanation", " ".join(filter(None, (*explanation, *self.notes))))
        force_setattr(self, "cause", self.evidence.describe_causes(self))

    @property
    def sentence(self) -> str:
        """The finding and the action to take, as one text."""
        return f"{self.text}{_NEXT}{self.action}" if self.action else self.text

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that the verdict is about; () for a verdict on the whole job."""
        return self.evidence.ranks or (() if self.rank is None else (self.rank,))

    @property
    def has_ended(self) -> bool:
        """True if the period of the verdict is known to have ended."""
        return self.held is not None and self.held.until_step is not None

    @property
    def traits(self) -> VerdictKind:
        """The facts that all verdicts of this kind share."""
        return KINDS.get(self.kind, OTHER)

    @property
    def sort_key(self) -> tuple[int, bool, bool, float]:
        """Verdicts on what stops the job are first, then current verdicts, then past verdicts. Within
        each group, the costliest verdict is first, and a factor of others after all with a cost."""
        lost_s, is_factor = self.lost_s or 0.0, self.evidence.is_factor
        if self.evidence.own_cost_s is not None and self.cost_s_per_step:
            # Of ranks that are slow together, the one whose repair gains most is first.
            lost_s *= self.evidence.own_cost_s / self.cost_s_per_step
        if self.traits.stops_job or self.evidence.stops_run:
            # Hangs are listed before deaths. Processes of a job that hangs are often killed, and
            # the verdict on a hang names ranks that died before it.
            return 0, self.kind == "died", is_factor, 0.0
        return 2 if self.is_over else 1, not lost_s, is_factor, -lost_s

    def judge_is_over(self) -> bool:
        """Return True if the verdict is only about an earlier part of the run.

        An ended hang is like a long step: if it took at least the share WORTH_A_LINE of all step
        time, return False.
        """
        if self.evidence.stops_run:
            return False
        is_costly = self.traits.name == "hang" and (self.cost_share or 0.0) >= WORTH_A_LINE
        is_past = self.traits.is_past and not is_costly
        return is_past or (self.evidence.is_of_run and self.has_ended)
