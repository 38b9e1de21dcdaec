"""The verdict in words: who or what, what it costs, since when, and what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.analysis.causes.straggler_groups import StragglerSummary
from torchlens_perf.analysis.collectives.slow_link import LinkFindings, SlowLink
from torchlens_perf.analysis.statistics.quantities import amount, duration, printable
from torchlens_perf.analysis.stragglers.detector import Findings
from torchlens_perf.analysis.words.bottleneck import bottlenecks, lack_of_cpu
from torchlens_perf.analysis.words.evidence import NoStepsEvidence, SlowLinkEvidence, Verdict, WarmUpEvidence
from torchlens_perf.analysis.words.hang import HangEvidence, OpenHang
from torchlens_perf.analysis.words.oom import out_of_memory_verdicts
from torchlens_perf.analysis.words.stragglers import SlowRankContext, came_last, no_straggler, straggler_verdicts
from torchlens_perf.run.rank_ranges import ranges

if TYPE_CHECKING:
    from torchlens_perf.analysis.words.report import Facts


def verdicts(
    report: Facts,
    findings: Findings,
    named: StragglerSummary,
    hang: OpenHang | None,
    links: LinkFindings,
) -> list[Verdict]:
    """The report's verdicts, the most important first; those that are over come last. Never empty."""
    out_of_memory = out_of_memory_verdicts(report)  # first of all: the others hang because of it, or end
    if hang is not None:
        return [*out_of_memory, _hang(hang)]
    if not report["steps"]["count"]:
        return out_of_memory or [_no_steps(report)]
    if report["steps"]["p50_s"] is None:
        return [*out_of_memory, _only_warm_up(report)]
    run = report["run"]
    context = SlowRankContext(report["modules"], run["device"], run["judged_by"], came_last(report["collectives"]))
    now, before = straggler_verdicts(context, findings, named)
    if links.links:
        now.append(slow_link(report["steps"]["count"], report["steps"]["mean_s"], links))
    if now:
        # First things first: while one rank holds up the others, their waiting is its doing and shares mislead. But
        # where all of them lack a CPU for longer than that costs, it is what slows the job most.
        starved = lack_of_cpu(report)
        worse = starved is not None and (starved.cost_share or 0.0) > max((each.cost_share or 0.0) for each in now)
        return [*out_of_memory, *([starved] if starved is not None and worse else []), *now, *before]
    found = [no_straggler(report, findings)] if report["run"]["world_size"] > 1 else []
    rest = bottlenecks(report)
    if rest[0].kind == "lack_of_cpu":
        return [*out_of_memory, rest[0], *found, *rest[1:], *before]
    return [*out_of_memory, *found, *rest, *before]


def slow_link(steps: int, mean_s: float | None, links: LinkFindings) -> Verdict:
    """The slow links, of which there are some. steps: how many there were; mean_s: what one took."""
    worst = links.links[0]
    where = f"rank {links.shared_ranks[0]}" if links.shared_ranks else f"ranks {ranges(worst.ranks)}"
    action = f"test the network at {where} with nccl-tests, and look at the NICs and cables there."
    text = f"{slow_link_text(links)} Next: {action}"
    cost_s = worst.cost_ns / 1e9 / max(1, steps)
    share = cost_s / mean_s if mean_s else 0.0
    evidence = SlowLinkEvidence(links.links, links.shared_ranks, links.shared_nodes, links.compared, links.undecided)
    return Verdict("slow_link", None, "communication", cost_s, share, None, 0.8, text, evidence)


def _hang(hang: OpenHang) -> Verdict:
    rank = hang.ranks[0] if hang.ranks else None
    evidence = HangEvidence(hang.kind, hang.since_s, hang.step, hang.ranks, hang.waiting, hang.stacks)
    return Verdict("hang", rank, None, 0.0, 0.0, hang.step, 0.9, hang.text, evidence)


def _no_steps(report: Facts) -> Verdict:
    text = (
        "No step was seen. A step ends with an optimizer's step, a forward pass without gradients of the watched "
        "model, or w.step(). Next: pass the model to watch(), or call w.step() at the end of your loop."
    )
    evidence = NoStepsEvidence(report["quality"]["records"])
    return Verdict("no_steps", None, None, 0.0, 0.0, None, 1.0, text, evidence)


def _only_warm_up(report: Facts) -> Verdict:
    text = f"Only {report['steps']['count']} steps so far, all of them warm-up. Next: run at least 40 steps."
    return Verdict("none", None, None, 0.0, 0.0, None, 0.0, text, WarmUpEvidence())


def slow_link_text(findings: LinkFindings) -> str:
    """The slow links in words, for a verdict; why nothing could be decided, if so; "" if none is slow."""
    if not findings.links:
        return findings.undecided
    worst = findings.links[0]
    text = f"{_link(worst)} is slow: {worst.operation} of {amount(worst.bytes, 'B')} takes "
    text += f"{duration(worst.transfer_ns / 1e9)}, {duration(worst.peers_transfer_ns / 1e9)} on its {worst.peers} peers"
    if worst.busbw is not None and worst.peers_busbw is not None:
        text += f" ({amount(worst.busbw, 'B/s')} against {amount(worst.peers_busbw, 'B/s')} on the bus)"
    at_most = "at most " if worst.overlapped else ""
    text += f"; that cost {at_most}{duration(worst.cost_ns / 1e9)} in {worst.operations} operations."
    if len(findings.links) > 1:
        text += f" {len(findings.links)} links are slow"
        if findings.shared_ranks:
            text += f"; all of them have rank {ranges(findings.shared_ranks)}"
        elif findings.shared_nodes:
            text += f"; all of them reach node {', '.join(map(printable, findings.shared_nodes))}"
        text += "."
    return text


def _link(link: SlowLink) -> str:
    if link.pair:
        return f"the link from rank {link.ranks[0]} to {link.ranks[1]}"
    return f"the communication of ranks {ranges(link.ranks)}"
