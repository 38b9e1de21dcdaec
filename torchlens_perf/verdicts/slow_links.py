"""The verdict on slow links, from the statistics of a job's collectives, and its sentences. Pure."""

from __future__ import annotations

from collections.abc import Collection

from torchlens_perf.analysis.collectives.slow_link import LinkFindings, SlowLink
from torchlens_perf.analysis.statistics.quantities import format_bytes, format_duration, printable
from torchlens_perf.analysis.statistics.rank import RankStatistics
from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.run.sketch import merge_sketches
from torchlens_perf.verdicts.verdict import Evidence, Verdict


class SlowLinkEvidence(Evidence, frozen=True, tag="slow_link"):
    """Evidence on slow links, the costliest first, and on the ranks that all of them share, or else
    the ranks of the worst link."""

    found: LinkFindings

    @property
    def subjects(self) -> set[str]:
        return {f"{link.group} {format_ranges(sorted(link.ranks))}" for link in self.found.links}

    def describe(self, verdict: Verdict) -> list[str]:
        return describe_slow_links(self.found)


def build_slow_link_verdict(
    found: LinkFindings, ranks: Collection[RankStatistics]
) -> Verdict | None:
    """Return the verdict on slow links; None if no link is slow.

    ranks: statistics of the ranks. The verdict's cost is a share of the steps of `ranks`.
    """
    if not found.links:
        return None
    steps = merge_sketches(each.step for each in ranks)
    counted = max((each.counted_steps for each in ranks), default=0)
    return build_link_verdict(counted, steps.mean_ns() / 1e9 if steps.count else None, found)


def build_link_verdict(steps: int, mean_s: float | None, links: LinkFindings) -> Verdict:
    """Return the verdict on slow links. links: findings with at least one slow link.

    steps: number of steps. mean_s: mean duration of a step.
    """
    worst = links.links[0]
    where = (
        f"rank {links.shared_ranks[0]}"
        if links.shared_ranks
        else f"ranks {format_ranges(worst.ranks)}"
    )
    cost_s = worst.cost_ns / 1e9 / max(1, steps)
    return Verdict(
        kind="slow_link",
        phase="communication",
        cost_s_per_step=cost_s,
        cost_share=cost_s / mean_s if mean_s else 0.0,
        confidence=0.8,
        action=(
            f"test the network at {where} with nccl-tests, and look at the NICs and cables there."
        ),
        evidence=SlowLinkEvidence(
            links, ranks=links.shared_ranks or worst.ranks, cause="slow_communication"
        ),
    )


def describe_slow_links(findings: LinkFindings) -> list[str]:
    """Return sentences on slow links, of which there is at least one."""
    worst, others = findings.links[0], ""
    text = (
        f"{_name_link(worst)} is slow: {worst.operation} of {format_bytes(worst.bytes, 'B')} takes"
        f" {format_duration(worst.transfer_ns / 1e9)}, but {format_duration(worst.peers_transfer_ns / 1e9)} in"
        f" {worst.peers} other {'link' if worst.pair else 'group'}{'s' * (worst.peers > 1)} of this kind"
    )
    if worst.busbw is not None and worst.peers_busbw is not None:
        text += f" ({format_bytes(worst.busbw, 'B/s')} against {format_bytes(worst.peers_busbw, 'B/s')} bus bandwidth)"
    cost = f"{'at most ' * worst.overlapped}{format_duration(worst.cost_ns / 1e9)}"
    text += f". All {worst.operations} of these operations together cost the job {cost}."
    if len(findings.links) > 1:
        others = f"{len(findings.links)} links are slow"
        if findings.shared_ranks:
            others += f"; all of them involve rank {format_ranges(findings.shared_ranks)}"
        elif findings.shared_nodes:
            others += f"; all of them reach node {', '.join(map(printable, findings.shared_nodes))}"
        others += "."
    return [text, others]


def _name_link(link: SlowLink) -> str:
    if link.pair:
        return f"The link from rank {link.ranks[0]} to {link.ranks[1]}"
    return f"Communication of ranks {format_ranges(link.ranks)}"
