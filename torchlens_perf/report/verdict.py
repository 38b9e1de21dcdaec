"""The verdict in words: who or what, what it costs, since when, and what to do next."""

from __future__ import annotations

from typing import Any

from torchlens_perf.culprits import Named
from torchlens_perf.rank_ranges import ranges
from torchlens_perf.records import Verdict
from torchlens_perf.report.bottleneck import bottlenecks, lack_of_cpu
from torchlens_perf.report.collective_table import slow_link_text
from torchlens_perf.report.oom_words import out_of_memory_verdicts
from torchlens_perf.report.straggler_words import no_straggler, straggler_verdicts
from torchlens_perf.slow_link import LinkFindings
from torchlens_perf.straggler import Findings


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
        # First things first: while one rank holds up the others, their waiting is its doing and shares mislead. But
        # where all of them lack a CPU for longer than that costs, it is what slows the job most.
        starved = lack_of_cpu(report)
        worse = starved is not None and (starved.cost_share or 0.0) > max((each.cost_share or 0.0) for each in now)
        return [*out_of_memory, *([starved] if starved is not None and worse else []), *now, *before]
    found = [no_straggler(report, findings)] if report["run"]["world_size"] > 1 else []
    rest = bottlenecks(report)
    if rest[0].kind == "lack_of_cpu":
        return [*out_of_memory, rest[0], *found, *before, *rest[1:]]
    return [*out_of_memory, *found, *before, *rest]


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
