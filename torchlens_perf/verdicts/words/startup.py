"""Sentences on the startup of a run: the time before the first recorded step, and torch.compile."""

from __future__ import annotations

from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.verdicts.verdict import Evidence, Verdict
from torchlens_perf.verdicts.words.cpu import cpu_action
from torchlens_perf.verdicts.words.report import Facts, Run

_MIN_START_S = 60.0
"""A shorter startup has no verdict. Importing torch may take tens of seconds."""
_WORTH_NAMING = 0.25
"""Startup has a verdict if it takes at least this share of the run."""
_COMPILES_MUCH = 0.25
"""The advice is about torch.compile if it takes at least this share of the startup."""
_WAITS_MUCH = 0.25
"""The advice is about CPUs if CPU contention takes at least this share of the startup."""


class StartupEvidence(Evidence, frozen=True, tag="startup"):
    """Evidence on a run whose start takes a large share of its time."""

    paid_once_of = "the run"
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

    @property
    def lost_s(self) -> float:
        return self.before_first_step_s + self.warm_up_more_s

    def describe(self, verdict: Verdict) -> list[str]:
        parts = f"{format_duration(self.before_first_step_s)} before the first recorded step"
        if self.warm_up_more_s >= _WORTH_NAMING * self.lost_s:
            more = format_duration(self.warm_up_more_s)
            parts += f", and {more} more than usual in the warm-up steps"
        if (self.cpu_wait_s or 0.0) >= 1.0:
            waited = format_duration(self.cpu_wait_s or 0.0)
            parts += f"; the main thread waited {waited} of that for a CPU"
        if self.compile_s:
            parts += f"; torch.compile took {format_duration(self.compile_s)} in this process"
        lost, whole = format_duration(self.lost_s), format_duration(self.whole_s)
        share = format_percent(self.lost_s / self.whole_s)
        return [f"The start takes {share} of the run ({lost} of {whole}): {parts}."]


def describe_startup(run: Run) -> str:
    """Return a line on the startup of the run; "" if not known."""
    start = run["startup"]
    if start is None:
        return ""
    rank = f" of rank {start['rank']}" if run["world_size"] > 1 else ""
    warm_up = (
        f"; then {format_duration(start['warm_up_s'])} of warm-up steps"
        if start["warm_up_s"]
        else ""
    )
    compiling = (
        f"; torch.compile took {format_duration(start['compile_s'])} of the run"
        if start["compile_s"]
        else ""
    )
    since = (
        "from the start of the kernel or the interpreter"
        if start["interactive"]
        else f"from the start of the process{rank}"
    )
    return (
        f"{format_duration(start['before_first_step_s'])} {since} to its first recorded step"
        f"{warm_up}{compiling}"
    )


def build_startup_verdicts(report: Facts) -> list[Verdict]:
    """Return a verdict if the startup of an ended run took a long time and a large share of it.

    Without steps after the warm-up, the usual duration of a step is not known. Return [] then.
    """
    start, steps, run = report["run"]["startup"], report["steps"], report["run"]
    if start is None or start["interactive"] or run["live"] or steps["p50_s"] is None:
        return []
    usual_s = steps["p50_s"] * min(steps["count"], WARM_UP_STEPS)
    warm_up_s = max(0.0, start["warm_up_s"] - usual_s)
    lost_s = start["before_first_step_s"] + warm_up_s
    whole_s = start["before_first_step_s"] + start["warm_up_s"] + steps["total_s"]
    if lost_s < _MIN_START_S or lost_s < _WORTH_NAMING * whole_s:
        return []
    found = StartupEvidence(
        start["before_first_step_s"], warm_up_s, start["compile_s"], start["cpu_wait_s"], whole_s
    )
    action = (
        "look at imports, loading of data and checkpoints, and process groups: py-spy record shows"
        " the code."
    )
    if (start["cpu_wait_s"] or 0.0) >= _WAITS_MUCH * lost_s:
        action = cpu_action(report)
    elif (start["compile_s"] or 0.0) >= _COMPILES_MUCH * lost_s:
        action = (
            "keep compiled code between runs (TORCHINDUCTOR_CACHE_DIR on a disk that stays),"
            " compile fewer or regional parts (torch.compile of the repeated block), or train"
            " longer for each start."
        )
    return [
        Verdict(
            kind="startup",
            cost_s_per_step=lost_s / steps["count"],
            cost_share=lost_s / whole_s,
            confidence=0.9,
            action=action,
            evidence=found,
        )
    ]
