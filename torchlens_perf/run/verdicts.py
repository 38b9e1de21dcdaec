"""What a run's sidecar has found, as values that the training process gets too: alerts, and the summary of a report."""

from __future__ import annotations

import dataclasses

STARTED, UPDATED, ENDED = "started", "updated", "ended"
_ACTION = " Next: "


def sentence_and_action(text: str) -> tuple[str, str]:
    """Return what is so, and what to do; "" where there is nothing to do."""
    sentence, _, action = text.partition(_ACTION)
    return sentence, action


def overhead_words(share: float | None) -> str:
    """Return what this tool cost the training process; a measured cost is not shown as zero."""
    if share is None:
        return "not measured"
    return f"{share:.2%} of step time" if share >= 0.0001 or not share else "<0.01% of step time"


class _Sentence:
    text: str
    next: str

    @property
    def sentence(self) -> str:
        """The text and what to do, as one."""
        return f"{self.text}{_ACTION}{self.next}" if self.next else self.text


@dataclasses.dataclass(frozen=True)
class Alert(_Sentence):
    """Something began, is known better by now, or ended. None, () and "" stand for what does not apply."""

    id: str
    """32 hexadecimal digits; the same whoever raises the alert, and however often."""
    about: str
    """The same for all alerts about one thing."""
    kind: str
    """straggler, hang, imbalance or slow_link, as in the report."""
    change: str
    """started, updated or ended."""
    text: str
    """What is so, with its numbers."""
    next: str
    """What to do."""
    unix_ns: int
    """When it was found."""
    attempt: int
    """How often the job had been restarted."""
    since_step: int | None = None
    until_step: int | None = None
    """The step from which on it was over."""
    rank: int | None = None
    """The suspect; of several, the one to look at first."""
    ranks: tuple[int, ...] = ()
    """All suspects; of ranks that are slow together, all of them."""
    host: str = ""
    """The suspect's."""
    phase: str | None = None
    cause: str = ""
    """A straggler's class: slow_compute, slow_data, slow_host or more_work. A hang's kind: dead, missing and others."""
    because: tuple[str, ...] = ()
    """Kinds of what is behind a straggler, the likeliest first; none if none was found."""
    scope: str = ""
    """What is slow: "rank", "node" with all its ranks, or "position" in the mesh."""
    cost_s_per_step: float | None = None
    """Seconds that each step of the job would be shorter without all suspects; None where that is not known."""
    cost_share: float | None = None
    duration_s: float | None = None
    """For a hang: for how long no step has been made."""

    @property
    def found_unix_s(self) -> float:
        """When it was found."""
        return self.unix_ns / 1e9

    @property
    def urgent(self) -> bool:
        """Whether somebody should look: not for an end."""
        return self.change != ENDED

    def covers(self, step: int) -> bool:
        """Whether what it is about held in a step."""
        if self.since_step is None or step < self.since_step:
            return False
        return self.until_step is None or step < self.until_step


@dataclasses.dataclass(frozen=True)
class Verdict(_Sentence):
    """One conclusion of the report. None is what does not apply, or is not known."""

    kind: str
    """As in the report: straggler, hang, data, none, ..."""
    text: str
    """What is so, with its numbers."""
    next: str
    """What to do; "" where there is nothing to do."""
    rank: int | None
    phase: str | None
    cost_s_per_step: float | None
    """By how many seconds each step of the job would be shorter."""
    cost_share: float | None
    since_step: int | None


@dataclasses.dataclass(frozen=True)
class Summary:
    """A run at one moment. None is what was not measured, or is not known: never zero."""

    verdicts: tuple[Verdict, ...] = ()
    """The most important one first."""
    run_id: str | None = None
    run_dir: str | None = None
    running: bool | None = None
    ranks: int | None = None
    steps: int | None = None
    """That were counted; the times below are those of all ranks, without the warm-up."""
    step_p50_s: float | None = None
    step_p95_s: float | None = None
    step_p99_s: float | None = None
    step_max_s: float | None = None
    overhead_share: float | None = None
    """What this tool cost the training thread, as a share of the steps' time."""
    sidecar_cpu_s: float | None = None
    """Processor time of the sidecars, beside the job."""
    records_lost: int | None = None
    as_of: str | None = None
    """When these results were put together, UTC."""
    missing: str = ""
    """Why there is nothing; "" where there is something."""
    html: str = dataclasses.field(default="", repr=False, compare=False)
    """The same as a notebook shows it."""

    def _repr_html_(self) -> str | None:
        return self.html or None

    def __str__(self) -> str:
        """The verdicts, then the numbers in a line."""
        if self.missing:
            return f"torchlens_perf: {self.missing}"
        steps_s = {"p50": self.step_p50_s, "p95": self.step_p95_s, "max": self.step_max_s}
        times = ", ".join(f"{name} {1e3 * value:.4g} ms" for name, value in steps_s.items() if value is not None)
        lines = [each.sentence for each in self.verdicts]
        steps = f"{self.steps} step{'s' * (self.steps != 1)}{': ' * bool(times)}{times}"
        return "\n".join([*lines, f"{steps}; overhead {overhead_words(self.overhead_share)}"])
