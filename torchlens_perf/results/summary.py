"""w.summary(): the verdicts and the few numbers that a program wants of a run."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torchlens_perf.results.ask import results

if TYPE_CHECKING:
    from torchlens_perf.results.ask import Recorded


@dataclasses.dataclass(frozen=True)
class Verdict:
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

    def __str__(self) -> str:
        """The verdicts, then the numbers in a line."""
        if self.missing:
            return f"torchlens_perf: {self.missing}"
        lines = [f"{each.text} Next: {each.next}" if each.next else each.text for each in self.verdicts]
        times = [
            f"{name} {1e3 * value:.4g} ms"
            for name, value in (("p50", self.step_p50_s), ("p95", self.step_p95_s), ("max", self.step_max_s))
            if value is not None
        ]
        cost = "not measured" if self.overhead_share is None else f"{self.overhead_share:.2%} of the steps' time"
        lines.append(
            f"{self.steps} step{'s' * (self.steps != 1)}{': ' * bool(times)}{', '.join(times)}; this tool cost {cost}"
        )
        return "\n".join(lines)


def summary(recorded: Recorded) -> Summary:
    """See Watch.summary()."""
    found = results(recorded)
    if not found.summary:
        return Summary(missing=found.missing)
    known: dict[str, Any] = {field.name: found.summary.get(field.name) for field in dataclasses.fields(Summary)}
    rows = known.pop("verdicts") or ()
    names = [field.name for field in dataclasses.fields(Verdict)]
    verdicts = tuple(Verdict(**{name: row.get(name) for name in names}) for row in rows)
    return Summary(verdicts, **{**known, "missing": ""})
