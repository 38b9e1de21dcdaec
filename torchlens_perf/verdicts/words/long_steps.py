"""Verdicts on classes of steps that are longer than the typical step, with their sentences. Pure."""

from __future__ import annotations

from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.analysis.statistics.step_mix import LACK_OF_CPU, STOPPED
from torchlens_perf.run.rank_ranges import format_rank_list
from torchlens_perf.run.records import WITHOUT_GRADIENTS
from torchlens_perf.verdicts.long_steps import LongSteps
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.verdict import Evidence, RunLength, Verdict
from torchlens_perf.verdicts.words.cpu import cpu_action
from torchlens_perf.verdicts.words.device_pace import COMPUTE, describe_other_processes
from torchlens_perf.verdicts.words.phases import phase_name
from torchlens_perf.verdicts.words.report import Facts, mean_per_step

# A sentence lists at most this many numbers of irregular steps.
_MAX_NUMBERS = 4
_OUTSIDE = ("host", "data", "communication")
_SHARED_PARTS = (*COMPUTE, "host", "")
_WHERE = {
    "": "the graph is not timed by phase",
    "communication": "most of it is comm wait",
    "tool": "most of it is work of torchlens_perf",
    LACK_OF_CPU: "most of it is CPU contention",
}
_KINDS = {
    "garbage collection": "Python's garbage collection",
    "saving": "saving a checkpoint",
    STOPPED: "stopped by SIGSTOP, a debugger, or a scheduler that suspends jobs",
    WITHOUT_GRADIENTS: f"{WITHOUT_GRADIENTS}: evaluation, rollouts or sampling",
}
"""Kinds of work whose names in sentences differ."""


class LongStepsEvidence(Evidence, frozen=True, tag="long_steps"):
    """Evidence on a class of steps that are longer than the typical step."""

    long: LongSteps
    steps: int
    """Number of all steps after the warm-up."""
    world_size: int
    short_of_cpus: bool | None
    """Whether a lack of CPUs limits the run, for steps that may only have waited for a CPU; None for
    other steps."""

    def compute_lost_s(self, verdict: Verdict, run: RunLength) -> float | None:
        return self.long["total_s"]

    def describe(self, verdict: Verdict) -> list[str]:
        more, total = format_duration(self.long["more_s"]), format_duration(self.long["total_s"])
        share = f"{format_percent(self.long['share'])} of all step time"
        several = len(self.long["steps"]) > 1
        share = f"{total} in total, {share}" if several else share
        if verdict.rank is not None:
            each, part = " each time" * several, self.long["part"]
            where = f", which was mostly in {phase_name(part)}" if part else ""
            who = f"{self._others} waited {more}{each} ({share}) for rank {verdict.rank}"
            return [f"{self._which_stalled}: {who}{where}."]
        takes = "takes" if self.long["period"] or self.long["count"] == 1 else "take"
        each = " on average" * (self.long["count"] > 1)
        return [f"{self._which} {takes} {more} longer{each} ({self._why}): {share}."]

    @property
    def _others(self) -> str:
        return "all other ranks" if self.world_size > 2 else "the other rank"

    @property
    def _which(self) -> str:
        """The number of these steps and, if they are few, their numbers.

        A number is listed if the step is long on any rank. The count is a mean over the ranks, and may
        therefore differ from the number of listed steps.
        """
        listed, count, period = self.long["steps"], self.long["count"], self.long["period"]
        if period:
            return f"One step in {period}"
        which = f"{count} of {self.steps} steps"
        if count > _MAX_NUMBERS:
            return which
        same = "which ones differs between ranks: " if len(listed) > count else ""
        some = "among them " if len(listed) < count else same
        numbers = ", ".join(map(str, listed[:_MAX_NUMBERS]))
        more = ", ..." if len(listed) > _MAX_NUMBERS else ""
        return f"{which} ({some}step{'s' * (len(listed) > 1)} {numbers}{more})"

    @property
    def _which_stalled(self) -> str:
        """The numbers of these steps; of many, only how many they are."""
        *others, last = map(str, self.long["steps"])
        if self.long["count"] > len(self.long["steps"]) or self.long["period"]:
            return self._which
        return f"Steps {', '.join(others)} and {last}" if others else f"Step {last}"

    @property
    def _why(self) -> str:
        kinds, part, ranks = self.long["kinds"], self.long["part"], self.long["ranks"]
        why = " and ".join(_KINDS.get(kind, kind) for kind in kinds) or _WHERE.get(part)
        why = why or f"most of it in {phase_name(part)}"
        if ranks and self.world_size > 1:
            everywhere = len(ranks) == self.world_size
            why += ", on all ranks" if everywhere else f", on {format_rank_list(ranks)}"
        if "garbage collection" in kinds or (kinds == [WITHOUT_GRADIENTS] and part in _OUTSIDE):
            why += f", mostly in {phase_name(part)}"
        if self.long["waited_for"] is not None:
            why += f"; {self._others} {'wait' if self.world_size > 2 else 'waits'}"
        if self.short_of_cpus:
            why += ", while there are too few CPUs"
        elif self.short_of_cpus is not None:
            they = "they" if len(self.long["steps"]) > 1 else "it"
            why += f"; whether {they} waited for a CPU is not measured"
        return why


def build_long_verdict(report: Facts, long: LongSteps, *, short_of_cpus: bool | None) -> Verdict:
    """Return the verdict on a class of long steps.

    short_of_cpus: True if the verdict on the typical step names lack of a CPU; None if waits for a CPU
    were measured, or cannot be the reason.
    """
    stalling = find_stalling_rank(long)
    others = _other_processes(report, long) if stalling is None else ""
    return Verdict(
        kind="long_steps",
        rank=stalling,
        phase=(long["part"] or None) if stalling is None else "communication",
        cost_s_per_step=mean_per_step(long["total_s"], report["steps"]),
        cost_share=long["share"],
        confidence=0.9,
        notes=(others,) if others else (),
        advice="" if long["kinds"] else long["part"],
        action=_choose_action(report, long, others, short_of_cpus),
        evidence=LongStepsEvidence(
            long, report["steps"]["count"], report["run"]["world_size"], short_of_cpus
        ),
    )


def find_stalling_rank(long: LongSteps) -> int | None:
    """Return the rank for which all other ranks waited, if the reason is not known; else None."""
    return None if long["kinds"] else long["waited_for"]


def _other_processes(report: Facts, long: LongSteps) -> str | None:
    """Return a sentence on other users of the GPU, if they may explain these steps.

    Return "" if they do not, and None if they were not measured. The times of a GPU's phases, and
    of its gaps, contain work of other processes.
    """
    by_gpu = report["run"]["device"] == "GPU" and report["steps"]["by"] == DEVICE
    explained = long["kinds"] or long["period"] or long["part"] not in _SHARED_PARTS
    return "" if explained or not by_gpu else describe_other_processes(report)


def _choose_action(
    report: Facts, long: LongSteps, others: str | None, short_of_cpus: bool | None
) -> str:
    """others: the result of _other_processes()."""
    several, action = len(long["steps"]) > 1, _action_on_long_steps(report, long)
    stalling, at = find_stalling_rank(long), _newest_step_numbers(long)
    if stalling is not None:
        return (
            f"see what rank {stalling} does in {'these steps' if several else 'this step'}: time parts"
            ' of it with torchlens_perf.section("name"), and look at the storage and the other programs'
            " of its host."
        )
    if others:
        return "see what the other processes do on the GPU: nvidia-smi pmon."
    if short_of_cpus is not None:
        action = f"see what the loop does in {at}, and what else kept the CPUs busy."
    if short_of_cpus:
        action = f"see whether {at} still take{'s' * (not several)} longer with enough CPUs."
    if others is None and long["part"] != "host":
        return f"see whether other programs used the GPU (nvidia-smi pmon); else {action}"
    return action


ACTIONS_ON_KINDS = {
    "evaluation": "evaluate less often, or on fewer batches.",
    "saving": "save less often, or asynchronously (torch.distributed.checkpoint.async_save).",
    "compilation": (
        "find what recompiles (TORCH_LOGS=recompiles), and mark varying dimensions as dynamic."
    ),
    "garbage collection": (
        "let collections visit fewer objects (gc.freeze() after the set-up), or collect less often."
    ),
    STOPPED: (
        "nothing if the stop was intended; else find what stops the process: a debugger, Ctrl-Z, a"
        " scheduler or a paused container."
    ),
    "capture": "nothing: a capture was requested.",
    "sampled backward pass": "nothing, or sample fewer backward passes (backward_every).",
}
"""Actions on long steps, by their kinds."""


def _action_on_long_steps(report: Facts, long: LongSteps) -> str:
    # The purpose of forward passes without gradients is not known.
    without_gradients = {
        "host": "look at these passes, and at what the loop does between them.",
        "data": "look at how these passes get their data.",
        "communication": "find the rank that does other work in these steps while the others wait.",
    }.get(long["part"], "make fewer of these passes, or use larger batches in them.")
    actions = {**ACTIONS_ON_KINDS, WITHOUT_GRADIENTS: without_gradients}
    for kind in long["kinds"]:
        if kind in actions:
            return actions[kind]
    at = _newest_step_numbers(long)
    by_part = {
        LACK_OF_CPU: cpu_action(report),
        "data": f"see what the loader does in {at}.",
        "communication": (
            f"see what differs in {at}: perhaps all ranks exchange data, or one rank does other work."
        ),
        "host": f'see what the loop does in {at}: time parts of it with torchlens_perf.section("name").',
        "": f"see what differs in {at}, and what else the loop does than to replay the graph.",
        "tool": (
            "if the loop requests results (w.summary(), w.step_table(), a display), do so less"
            " often."
        ),
    }
    if long["period"] and long["part"] not in ("data", "host", "tool"):
        other_work = "another backward pass, another optimizer, a larger batch, longer sequences"
        if long["part"] == "communication":
            other_work = "all ranks exchange data, or one rank does other work"
        return f"find out what only one step in {long['period']} does ({at}): perhaps {other_work}."
    return by_part.get(long["part"], f"see what differs in {at}: batch size, sequence length.")


def _newest_step_numbers(long: LongSteps) -> str:
    """Return a phrase with the numbers of the newest of these steps."""
    return (
        f"step{'s' * (len(long['steps']) > 1)} {', '.join(map(str, long['steps'][-_MAX_NUMBERS:]))}"
    )
