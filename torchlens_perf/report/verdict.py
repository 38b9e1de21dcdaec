"""The verdict in words: who or what, what it costs, since when, and what to do next."""

from __future__ import annotations

from typing import Any

from torchlens_perf.records import Verdict
from torchlens_perf.straggler import Comparison, Straggler

# Shares of the step from which a part is worth naming when no rank stands out.
_DATA_SHARE, _HOST_SHARE, _COMMUNICATION_SHARE = 0.15, 0.25, 0.30


def verdicts(report: dict[str, Any], comparison: Comparison) -> list[Verdict]:
    """The report's verdicts, the most important first. Never empty."""
    if not report["steps"]["count"]:
        return [_no_steps(report)]
    if report["steps"]["p50_s"] is None:
        return [_only_warm_up(report)]
    if comparison.straggler is not None:
        # First things first: while one rank holds up the others, their waiting is its doing and shares mislead.
        return [_straggler(report, comparison.straggler)]
    found = []
    if len(report["ranks"]) > 1:
        found.append(_no_straggler(report, comparison))
    return [*found, _bottleneck(report)]


def duration(seconds: float) -> str:
    """A duration for people: three figures and a unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= scale:
            value = seconds / scale
            digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
            return f"{value:.{digits}f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def percent(share: float) -> str:
    """A share for people."""
    return f"{share:.0%}" if abs(share) >= 0.1 else f"{share:.1%}"


def _no_steps(report: dict[str, Any]) -> Verdict:
    text = (
        "No step was seen. A step ends with an optimizer's step, a forward pass without gradients of the watched "
        "model, or w.step(). Next: pass the model to watch(), or call w.step() at the end of your loop."
    )
    return Verdict("no_steps", None, None, 0.0, 0.0, None, 1.0, text, {"records": report["quality"]["records"]})


def _only_warm_up(report: dict[str, Any]) -> Verdict:
    text = f"Only {report['steps']['count']} steps so far, all of them warm-up. Next: run at least 40 steps."
    return Verdict("none", None, None, 0.0, 0.0, None, 0.0, text, {})


def _straggler(report: dict[str, Any], found: Straggler) -> Verdict:
    ranks = {rank["rank"]: rank for rank in report["ranks"]}
    cost_s, step_s = found.excess_ns / 1e9, found.step_ns / 1e9
    share = cost_s / step_s if step_s else 0.0
    host = ranks[found.rank]["host"]
    since = "since the start" if found.since_step == 0 else f"since step {found.since_step}"
    modules, module_excess_s = _modules_of(report, found)
    where = f", most of it in {', '.join(modules)} (+{duration(module_excess_s)} a step)" if modules else ""
    others = "the other rank" if len(ranks) == 2 else "the other ranks"
    mine, theirs = duration(found.own_ns / 1e9), duration(found.others_own_ns / 1e9)
    text = (
        f"Rank {found.rank} ({host}) is slow in {_phase_name(found.phase)}: {mine} of own time a step against "
        f"{theirs} on {others}{where}. It costs the job {duration(cost_s)} a step ({percent(share)}), {since}. "
        f"Next: {_next_action(found.phase, found.rank, modules)}"
    )
    evidence = {
        "own_s": found.own_ns / 1e9,
        "others_own_s": found.others_own_ns / 1e9,
        "phase_excess_s": found.phase_excess_ns / 1e9,
        "modules": modules,
        "module_excess_s": module_excess_s,
        "windows": found.windows,
        "share_of_windows": found.blame,
    }
    return Verdict(
        "straggler", found.rank, found.phase, cost_s, share, found.since_step, _confidence(found), text, evidence
    )


def _confidence(found: Straggler) -> float:
    """The share of windows that agree, less for few windows (rule of succession)."""
    return (found.blame * found.windows + 1) / (found.windows + 2)


def _phase_name(phase: str) -> str:
    return {
        "data": "data loading",
        "forward": "the forward pass",
        "recompute": "recomputing activations",
        "backward": "the backward pass",
        "optimizer": "the optimizer",
        "host": "host code between the phases",
    }[phase]


def _next_action(phase: str, rank: int, modules: list[str]) -> str:
    what = modules[0] if modules else "the model"
    actions = {
        "data": f"look at rank {rank}'s loader: its workers, its storage, and the size of its batches.",
        "forward": f"compare {what} on rank {rank}: its input sizes, then clocks and neighbours on that machine.",
        "recompute": f"compare rank {rank}'s input sizes and its machine's clocks with the others'.",
        "backward": f"compare {what} on rank {rank}: its input sizes, then clocks and neighbours on that machine.",
        "optimizer": f"see whether rank {rank} holds more parameters or offloads them.",
        "host": f"look for what only rank {rank} does between the phases: logging, checkpoints, .item(), garbage "
        "collection.",
    }
    return actions[phase]


def _modules_of(report: dict[str, Any], found: Straggler) -> tuple[list[str], float]:
    """The fewest modules, at most three, that together explain most of the phase's excess, and by how much."""
    table = {"forward": "by_rank", "backward": "backward_by_rank"}.get(found.phase)
    if table is None:
        return [], 0.0
    excesses = []
    for module in report["modules"]:
        mine = module[table].get(str(found.rank))
        others = [value for rank, value in module[table].items() if rank != str(found.rank)]
        if mine is not None and others:
            excesses.append((mine - sum(others) / len(others), module["name"]))
    names: list[str] = []
    total_s = 0.0
    for excess_s, name in sorted(excesses, reverse=True)[:3]:
        names.append(name)
        total_s += excess_s
        if total_s >= 0.6 * found.phase_excess_ns / 1e9:
            return names, total_s
    return [], 0.0


def _no_straggler(report: dict[str, Any], comparison: Comparison) -> Verdict:
    if comparison.windows < 3:
        text = (
            f"Too few steps to compare the ranks ({report['steps']['count']}): a slow rank cannot be told from noise "
            "yet. Next: run at least 40 steps."
        )
        return Verdict("none", None, None, 0.0, 0.0, None, 0.0, text, {"windows": comparison.windows})
    seen_s = comparison.detectable_ns / 1e9
    share = comparison.detectable_ns / comparison.step_ns if comparison.step_ns else 0.0
    text = (
        f"No rank stands out over {report['steps']['count']} steps. One slower by {duration(seen_s)} a step "
        f"({percent(share)}) in most windows would have been named."
    )
    evidence = {"windows": comparison.windows, "detectable_s": seen_s}
    return Verdict("none", None, None, 0.0, 0.0, None, 0.9, text, evidence)


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
        "compute_bound": f"is {_phase_name(phase)}" if kind == "compute_bound" else "",
    }[kind]
    sentence = f"{percent(share)} of each step ({duration(share * step_s)} of {duration(step_s)}) {what}. Next: {text}"
    waste = 0.0 if kind == "compute_bound" else share  # computing is what the job is for
    return Verdict(kind, None, phase, waste * step_s, waste, None, 0.9, sentence, {"shares": shares})
