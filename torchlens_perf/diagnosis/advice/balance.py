"""Advice on work that is not spread equally over the ranks. Pure."""

from __future__ import annotations

from torchlens_perf.analysis.statistics.quantities import format_percent
from torchlens_perf.diagnosis.advice.rule import Job, Proposal, capitalize, rule
from torchlens_perf.run.verdicts import remove_action
from torchlens_perf.verdicts.words.evidence import ImbalanceEvidence

_IMBALANCE = "waiting for the rank with the most work takes"
_MIN_CORRELATION = 0.7


@rule(
    "uneven-lengths",
    "https://docs.pytorch.org/docs/stable/data.html#loading-batched-and-non-batched-data",
)
def balance_lengths(job: Job) -> Proposal | None:
    """Within steps, ranks take longer for larger batches: the correlation is at least 0.7."""
    correlation = job.length_correlation
    if correlation is None or correlation < _MIN_CORRELATION or _has_experts(job):
        return None
    return Proposal(
        f"Ranks with larger batches take longer (correlation {correlation:.2f}):"
        f" {job.describe(_IMBALANCE, 'imbalance')}.",
        "Give all ranks batches of the same size: a batch sampler that groups similar lengths, or"
        " a fixed number of tokens per batch.",
        "rank=all@median",
    )


@rule("stage-balance", "https://docs.pytorch.org/docs/stable/distributed.pipelining.html")
def balance_stages(job: Job) -> Proposal | None:
    """One stage of a pipeline has more work than the others."""
    for row in job.report["verdicts"]:
        if isinstance(row["evidence"], ImbalanceEvidence) and not row["is_over"]:
            finding = remove_action(row["text"], row["action"])
            return Proposal(finding, capitalize(row["action"]), gain_s=row["cost_s_per_step"])
    return None


@rule(
    "expert-balance",
    "https://docs.nvidia.com/megatron-core/developer-guide/latest/user-guide/features/moe.html",
)
def balance_experts(job: Job) -> Proposal | None:
    """Ranks exchange data with experts by all_to_all, and in each step another rank has the most
    work: no rank is slow."""
    slow = any(row["kind"] == "straggler" and not row["is_over"] for row in job.report["verdicts"])
    if slow or not _has_experts(job):
        return None
    share = format_percent(job.share("imbalance"))
    return Proposal(
        f"Ranks exchange tokens of experts, and unequal work takes {share} of a step.",
        "Spread tokens equally: an auxiliary loss or bias of the router, or a capacity per expert.",
        "rank=all@median",
    )


def _has_experts(job: Job) -> bool:
    return any(
        "all_to_all" in row["operation"] or "alltoall" in row["operation"]
        for row in job.report["collectives"]
    )


RULES = (balance_lengths, balance_stages, balance_experts)
