"""The report's verdicts, with their sentences: cause, cost, first step and next action."""

from __future__ import annotations

from msgspec import structs

from torchlens_perf.analysis.collectives.slow_link import LinkFindings
from torchlens_perf.verdicts.kinds import GOOD, NOT_COMPUTING_KINDS
from torchlens_perf.verdicts.slow_links import build_link_verdict
from torchlens_perf.verdicts.stragglers.findings import Findings
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.bottleneck import add_note, build_step_verdicts, named_kinds
from torchlens_perf.verdicts.words.cpu import describe_cpu_users
from torchlens_perf.verdicts.words.evidence import (
    DeepSpansEvidence,
    NoStepsEvidence,
    WarmUpEvidence,
)
from torchlens_perf.verdicts.words.growth import build_growth_verdicts, is_explained_by_growth
from torchlens_perf.verdicts.words.hang import HangEvidence, build_hang_verdict
from torchlens_perf.verdicts.words.oom import build_out_of_memory_verdicts
from torchlens_perf.verdicts.words.report import Facts
from torchlens_perf.verdicts.words.run_state import build_crash_verdicts
from torchlens_perf.verdicts.words.startup import build_startup_verdicts
from torchlens_perf.verdicts.words.stragglers import (
    SlowRankContext,
    build_no_straggler_verdict,
    build_straggler_verdicts,
    compute_last_arrival_shares,
    find_unequal_work,
    without_cpu_check,
)

# A rank that was slow in at least this share of the steps explains the waits of the whole run.
_MOST_STEPS = 0.5
# A slow rank explains steps that are longer by up to this many times what it costs on average.
_TIMES_A_RANKS_COST = 2.0


def build_verdicts(
    report: Facts, findings: Findings, hang: HangEvidence | None, links: LinkFindings
) -> list[Verdict]:
    """Return the report's verdicts in any order. Each has a different cause.

    There is always at least one verdict.
    """
    found = _build_all_verdicts(report, findings, hang, links)
    if report["run"]["failed"] or report["run"]["died"]:
        # Nothing is OK in a run that failed.
        found = [each for each in found if each.traits.severity != GOOD]
    users = describe_cpu_users(report)
    return [add_note(each, users) if each.kind == "lack_of_cpu" else each for each in found]


def _build_all_verdicts(
    report: Facts, findings: Findings, hang: HangEvidence | None, links: LinkFindings
) -> list[Verdict]:
    out_of_memory = build_out_of_memory_verdicts(report["ranks"])
    if hang is not None:
        return [*out_of_memory, build_hang_verdict(hang)]
    out_of_memory += build_crash_verdicts(report["ranks"], report["run"]["world_size"])
    if not report["steps"]["count"]:
        return out_of_memory or [_build_no_steps_verdict(report)]
    start, run, steps = build_startup_verdicts(report), report["run"], report["steps"]
    if steps["p50_s"] is None:
        only_warm_up = Verdict(
            kind="none",
            cost_s_per_step=0.0,
            cost_share=0.0,
            confidence=0.0,
            action="run at least 40 steps.",
            is_undecided=True,
            evidence=WarmUpEvidence(
                steps["count"], run["live"], steps["warm_up_max_s"], steps["warm_up_parts"]
            ),
        )
        return [*out_of_memory, *start, only_warm_up]
    context = SlowRankContext(
        report["modules"],
        run["device"],
        run["judged_by"],
        compute_last_arrival_shares(report["collectives"]),
        report["ranks"],
    )
    now, before = build_straggler_verdicts(context, findings)
    if links.links:
        now.append(build_link_verdict(report["steps"]["count"], report["steps"]["mean_s"], links))
    # While one rank is slow, the other ranks wait for it. A rank that was slow in most steps
    # explains the waits of the whole run.
    lengths = (
        each.until_step - each.since_step for each in findings.slow_before if each.until_step
    )
    slow_before = max(lengths, default=0) >= _MOST_STEPS * max(1, report["steps"]["count"])
    explained = (
        bool(now) or slow_before or bool(not findings.compared and find_unequal_work(findings))
    )
    typical, *long = build_step_verdicts(report, waits_explained=explained)
    # A rank that becomes slow makes later steps longer, but the step time does not grow steadily.
    grows = (
        build_growth_verdicts(report, short_of_cpus="lack_of_cpu" in named_kinds(typical))
        if not now and not slow_before
        else []
    )
    slow = [each for each in (*now, *before) if each.traits.name == "straggler"]
    long = [
        each
        for each in long
        if not (grows and is_explained_by_growth(report, each))
        and not any(_is_of_slow_rank(each, one) for one in slow)
        and (each.evidence.long is not None or each.phase not in {one.phase for one in now})
    ]
    typical = _replace_if_spans_too_deep(report, typical)
    if now and "lack_of_cpu" in named_kinds(typical):
        now = [without_cpu_check(each) for each in now]
    if now:
        return [*out_of_memory, *start, *_merge_same_causes(now, typical), *grows, *long, *before]
    found: list[Verdict] = []
    if run["world_size"] > 1:
        ends = [each.held.until_step or 0 for each in before if each.held is not None]
        found = [build_no_straggler_verdict(report, findings, max(ends, default=0))]
    return [*out_of_memory, *start, *found, typical, *grows, *long, *before]


def _is_of_slow_rank(verdict: Verdict, slow: Verdict) -> bool:
    """Return True for long steps without another reason, in most of which a rank was slow that costs
    about as much."""
    long, held = verdict.evidence.long, slow.held
    if long is None or long["kinds"] or long["period"] or held is None or held.since_step is None:
        return False
    # The end is open if the rank is still slow.
    until = held.until_step or max(long["steps"], default=0) + 1
    inside = sum(held.since_step <= step < until for step in long["steps"])
    costs_s = _TIMES_A_RANKS_COST * (slow.cost_s_per_step or 0.0)
    return 2 * inside > len(long["steps"]) and long["more_s"] <= costs_s


def _merge_same_causes(slow: list[Verdict], typical: Verdict) -> list[Verdict]:
    """Return the verdicts on slow ranks and on the typical step, but only one for each cause.

    The typical step is a mean over all ranks, so it includes the excess of slow ranks. If both
    verdicts are about the same wait, only the costlier verdict is returned.
    """
    if typical.kind not in NOT_COMPUTING_KINDS or not typical.cost_s_per_step:
        return slow
    phases = ("data", "host", "gap") if typical.phase in ("data", "host") else (typical.phase,)
    same = [each for each in slow if each.kind == "straggler" and each.phase in phases]
    if any(
        each.cost_s_per_step is None or each.cost_s_per_step >= typical.cost_s_per_step
        for each in same
    ):
        return slow
    if typical.kind != "lack_of_cpu" or not same:
        return [*slow, typical]
    # All ranks lack CPUs, and the slow ranks lack them for longer than the others.
    ranks = ", ".join(str(each.rank) for each in same)
    most = f"Rank{'s' * (len(same) > 1)} {ranks} wait{'s' * (len(same) == 1)} longest."
    merged = structs.replace(add_note(typical, most), rank=same[0].rank)
    return [*(each for each in slow if each not in same), merged]


def _replace_if_spans_too_deep(report: Facts, verdict: Verdict) -> Verdict:
    """Return the verdict, or a verdict that the limit is not known.

    The limit is not known if it is host code, but spans that were nested too deep may be phases.
    """
    too_deep = report["quality"]["too_deep"]
    if verdict.kind != "host_bound" or not too_deep:
        return verdict
    return Verdict(
        kind="not_known",
        confidence=0.5,
        action="use fewer nested perf.section() blocks, counting those around the training loop.",
        evidence=DeepSpansEvidence(too_deep),
    )


def _build_no_steps_verdict(report: Facts) -> Verdict:
    quality = report["quality"]
    now = [each for rank in report["ranks"] if (each := rank["now"]) is not None and each.inside]
    evidence = NoStepsEvidence(
        quality["records"],
        quality["lost"],
        report["steps"]["made"],
        None if report["ranks"] else tuple(quality["notes"]),
        max(now, key=lambda each: each.step_s) if report["run"]["live"] and now else None,
    )
    return Verdict(
        kind="no_steps",
        cost_s_per_step=0.0,
        cost_share=0.0,
        confidence=1.0,
        action=evidence.explain_and_advise()[1],
        evidence=evidence,
    )
