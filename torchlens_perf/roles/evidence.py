"""The verdict on slow iterations of a job with several roles, and its sentences. Pure."""

from __future__ import annotations

from torchlens_perf.analysis.statistics.quantities import (
    format_count,
    format_duration,
    format_percent,
    format_rounded,
)
from torchlens_perf.roles import causes
from torchlens_perf.roles.causes import Cause
from torchlens_perf.roles.facts import PARTS, find_iterations
from torchlens_perf.roles.iterations import OTHER
from torchlens_perf.verdicts.verdict import Evidence, Verdict
from torchlens_perf.verdicts.words.report import Report

KIND = "slow_iteration"
_ACTIONS = {
    causes.LONG_SAMPLES: (
        "limit the tokens of a sample, continue long samples in a later iteration, or send more"
        " samples than a batch needs and take the first."
    ),
    causes.SLOW_ENGINE: (
        "look at the machine of {subject}: other programs, clocks, and its settings against those of"
        " the other engines."
    ),
    causes.LOADED_ENGINE: (
        "send each sample to the engine with the fewest tokens in progress, and check that the"
        " number of samples at once is the same on all engines."
    ),
    causes.SLOW_TOOL: (
        "run more processes of the tool, keep its answers, or give its calls a time limit."
    ),
    causes.SLOW_REWARD: (
        "run more processes of the reward, or compute rewards while other samples are generated."
    ),
    causes.SLOW_WEIGHTS: (
        "send weights to all engines at once, by the network of the devices, or while the next"
        " samples are prepared."
    ),
    causes.SLOW_RANK: "look for the cause in the table of ranks, and at the machine of {subject}.",
    causes.IDLE_ENGINES: (
        "generate the samples of the next iteration while the trainer steps, or move devices from"
        " the engines to the trainer."
    ),
}


class SlowIterationEvidence(Evidence, frozen=True, tag="slow_iteration"):
    """Evidence on a cause of slow iterations: of how many, of which mean duration, and the cause."""

    paid_once_of = "the iterations"
    iterations: int
    iteration_s: float
    found: Cause

    def describe(self, verdict: Verdict) -> list[str]:
        return [*_describe(self.found, self.iterations), self._describe_gain()]

    def _describe_gain(self) -> str:
        found, of = self.found, format_duration(self.iteration_s)
        at_most = "at most " if found.is_bound else ""
        text = f"Without this cause, an iteration of {of} would be {at_most}{self._format(found.seconds)} shorter"
        if not found.is_bound:
            low, high = (
                format_duration(each / self.iterations) for each in (found.low_s, found.high_s)
            )
            text += f" (between {low} and {high})" if found.low_s else f" (up to {high})"
        if found.together_s is None:
            return f"{text}."
        every = "Both" if len(found.others) == 1 else f"All {len(found.others) + 1}"
        others = ", ".join(each.replace("_", " ") for each in found.others)
        return f"{text}. {every} (with {others}): at most {self._format(found.together_s)}."

    def _format(self, seconds: float) -> str:
        """Return seconds of all iterations as those of one, with their share."""
        share = format_percent(seconds / self.iterations / self.iteration_s)
        return f"{format_duration(seconds / self.iterations)} ({share})"


def build_verdict(cause: Cause, iterations: int, iteration_s: float, steps: int) -> Verdict:
    """Return the verdict on a cause. steps: number of steps of the run."""
    return Verdict(
        kind=KIND,
        cost_s_per_step=cause.seconds / max(1, steps),
        cost_share=cause.share,
        lost_s=cause.seconds,
        confidence=0.7 if cause.is_bound else 0.8,
        action=_ACTIONS[cause.kind].format(subject=cause.subject),
        evidence=SlowIterationEvidence(iterations, iteration_s, cause, cause=cause.kind),
    )


def describe_iterations(report: Report) -> list[str]:
    """Return a line on the mean iteration, the longest wait in it, and the largest cause."""
    found = find_iterations(report)
    if found is None:
        return []
    wait = max((each for each in found.parts if each != OTHER), key=lambda each: found.parts[each])
    mean, longest_s = format_duration(found.mean_s), found.parts[wait]
    return [
        f"iteration of {mean} (mean of {found.count}), longest part: {PARTS[wait]}"
        f" {format_duration(longest_s)} ({format_percent(longest_s / found.mean_s)})",
        *(
            f"largest cause: {each.kind.replace('_', ' ')} {each.subject}".rstrip()
            + f", {'at most ' * each.is_bound}{format_duration(each.seconds / found.count)}"
            f" ({format_percent(each.share)})"
            for each in found.causes[:1]
        ),
    ]


def _describe(cause: Cause, iterations: int) -> list[str]:
    value, usual = cause.value or 0.0, cause.usual or 0.0
    times = f"{value / usual:.1f} times" if usual else ""
    if cause.kind == causes.LONG_SAMPLES:
        long = ", ".join(
            f"{each.id} on {each.engine} ({each.tokens} tokens, median {each.median_tokens:.0f})"
            for each in cause.samples
        )
        of = format_count(iterations, "iteration")
        return [
            f"The trainer waited for one long sample in {cause.iterations} of {of}.",
            f"Longest: {long}.",
        ]
    if cause.kind == causes.SLOW_ENGINE:
        return [
            f"{cause.subject} takes {format_duration(value)} per token, {times} as long as the other"
            f" engines ({format_duration(usual)})."
        ]
    if cause.kind == causes.LOADED_ENGINE:
        return [
            f"{cause.subject} generates {format_rounded(value)} tokens per iteration, {times} as many"
            f" as the other engines ({format_rounded(usual)}), so its samples wait for it."
        ]
    if cause.kind in (causes.SLOW_TOOL, causes.SLOW_REWARD):
        what = "tool" if cause.kind == causes.SLOW_TOOL else "reward"
        return [
            f"The trainer waits for the {what}: a call takes {format_duration(usual)} in the median,"
            f" the longest {format_duration(value)}."
        ]
    if cause.kind == causes.SLOW_WEIGHTS:
        slowest = (
            f", of which {cause.subject} takes {format_duration(value)}" if cause.subject else ""
        )
        sending = format_duration(cause.seconds / iterations)
        return [f"Sending the weights to the engines takes {sending} per iteration{slowest}."]
    if cause.kind == causes.SLOW_RANK:
        return [
            f"The other trainer ranks wait for {cause.subject}: its own part of a step takes"
            f" {format_duration(value)}, {times} as long as that of the others"
            f" ({format_duration(usual)})."
        ]
    return [
        f"The engines are idle while the trainer makes its optimizer steps: {format_duration(value)}"
        f" per iteration, against {format_duration(usual)} of waiting for samples."
    ]
