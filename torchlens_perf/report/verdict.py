"""The verdict in words: who or what, what it costs, since when, and what to do next."""

from __future__ import annotations

from typing import Any

from torchlens_perf.culprits import Named
from torchlens_perf.rank_ranges import ranges
from torchlens_perf.records import Verdict
from torchlens_perf.report.collective_table import slow_link_text
from torchlens_perf.report.oom_words import out_of_memory_verdicts
from torchlens_perf.report.quantities import duration, percent
from torchlens_perf.report.straggler_words import no_straggler, phase_name, straggler_verdicts
from torchlens_perf.slow_link import LinkFindings
from torchlens_perf.straggler import Findings

# Shares of the step from which a part is worth naming when no rank stands out.
_DATA_SHARE, _HOST_SHARE, _COMMUNICATION_SHARE = 0.15, 0.25, 0.30
# Of forward and backward passes that a device ended as soon as the host had issued the last of them.
_LAUNCH_BOUND = 0.8


def verdicts(
    report: dict[str, Any], findings: Findings, named: Named, hang: dict[str, Any] | None, links: LinkFindings
) -> list[Verdict]:
    """The report's verdicts, the most important first. Never empty."""
    out_of_memory = out_of_memory_verdicts(report)  # first of all: the others hang because of it, or end
    if hang is not None:
        return [*out_of_memory, _hang(hang)]
    if not report["steps"]["count"]:
        return out_of_memory or [_no_steps(report)]
    if report["steps"]["p50_s"] is None:
        return [*out_of_memory, _only_warm_up(report)]
    now, before = straggler_verdicts(report, findings, named)
    if links.links:
        now.append(slow_link(report["steps"], links))
    if now:
        # First things first: while one rank holds up the others, their waiting is its doing and shares mislead.
        return [*out_of_memory, *now, *before]
    found = [no_straggler(report, findings)] if report["run"]["world_size"] > 1 else []
    return [*out_of_memory, *found, *before, _bottleneck(report)]


def slow_link(steps: dict[str, Any], links: LinkFindings) -> Verdict:
    """The slow links, of which there are some. steps: the report's."""
    worst = links.links[0]
    where = f"rank {links.shared_ranks[0]}" if links.shared_ranks else f"ranks {ranges(worst.ranks)}"
    action = f"test the network at {where} with nccl-tests, and look at the NICs and cables there."
    text = f"{slow_link_text(links)} Next: {action}"
    cost_s = worst.cost_ns / 1e9 / max(1, steps["count"])
    share = cost_s / steps["mean_s"] if steps["mean_s"] else 0.0
    evidence = {"class": "slow_communication", **links.to_json()}
    return Verdict("slow_link", None, "communication", cost_s, share, None, 0.8, text, evidence)


def _hang(hang: dict[str, Any]) -> Verdict:
    rank = hang["ranks"][0] if hang["ranks"] else None
    evidence = {field: value for field, value in hang.items() if field != "text"}
    return Verdict("hang", rank, None, 0.0, 0.0, hang["step"], 0.9, hang["text"], evidence)


def _no_steps(report: dict[str, Any]) -> Verdict:
    text = (
        "No step was seen. A step ends with an optimizer's step, a forward pass without gradients of the watched "
        "model, or w.step(). Next: pass the model to watch(), or call w.step() at the end of your loop."
    )
    return Verdict("no_steps", None, None, 0.0, 0.0, None, 1.0, text, {"records": report["quality"]["records"]})


def _only_warm_up(report: dict[str, Any]) -> Verdict:
    text = f"Only {report['steps']['count']} steps so far, all of them warm-up. Next: run at least 40 steps."
    return Verdict("none", None, None, 0.0, 0.0, None, 0.0, text, {})


def _bottleneck(report: dict[str, Any]) -> Verdict:
    """Where the steps' time goes, on all ranks together."""
    shares: dict[str, float] = {}
    for rank in report["ranks"]:
        for part, value in rank["phases"].items():
            shares[part] = shares.get(part, 0.0) + value["share"] / len(report["ranks"])
    step_s = report["steps"]["mean_s"]
    kind, phase, text = "compute_bound", "forward", ""
    if shares.get("data", 0) >= _DATA_SHARE:
        kind, phase = "data_bound", "data"
        text = (
            "raise the DataLoader's num_workers, set persistent_workers and pin_memory, or move work out of the loader."
        )
    elif (waits := _waits_for_launches(report)) is not None:
        return waits
    elif shares.get("communication", 0) >= _COMMUNICATION_SHARE:
        kind, phase = "communication_bound", "communication"
        text = "overlap or shrink communication: larger buckets, gradient accumulation, fewer waits."
    elif shares.get("host", 0) >= _HOST_SHARE:
        kind, phase = "host_bound", "host"
        text = (
            "look at what runs between the phases (logging, .item(), zero_grad, Python): wrap parts in perf.section()."
        )
    else:
        phase = max(("forward", "backward", "optimizer", "recompute"), key=lambda part: shares.get(part, 0.0))
        module = report["modules"][0]["name"] if report["modules"] else None
        text = f"start with {module}, the largest module by own time." if module else "time modules: watch(model)."
    share = shares.get(phase, 0.0)
    what = {
        "data_bound": "waits for data",
        "communication_bound": "is blocked in communication",
        "host_bound": "is host code outside the phases",
        "compute_bound": f"is {phase_name(phase)}" if kind == "compute_bound" else "",
    }[kind]
    sentence = f"{percent(share)} of each step ({duration(share * step_s)} of {duration(step_s)}) {what}. Next: {text}"
    waste = 0.0 if kind == "compute_bound" else share  # computing is what the job is for
    return Verdict(kind, None, phase, waste * step_s, waste, None, 0.9, sentence, {"shares": shares})


def _waits_for_launches(report: dict[str, Any]) -> Verdict | None:
    """Where devices have no work left each time that the host has issued all of a pass: they wait for its launches.

    What the job would gain is not known: how long a device idled between two kernels is not measured.
    """
    told = [rank["device"] for rank in report["ranks"] if rank["device"] and rank["device"]["caught_up"] is not None]
    if not told:
        return None
    share = sum(device["caught_up"] for device in told) / len(told)
    if share < _LAUNCH_BOUND:
        return None
    text = (
        f"The GPU waits for the host: it had no work left at the end of {percent(share)} of the forward and backward "
        "passes. Next: fewer and larger kernels: torch.compile, CUDA graphs (mode='reduce-overhead'), a larger batch, "
        "fused optimizers."
    )
    return Verdict("host_bound", None, "host", None, None, None, 0.8, text, {"caught_up": share})
