"""Actions on DistributedDataParallel. Pure."""

from __future__ import annotations

import math

from torchlens_perf.analysis.statistics.quantities import format_bytes, format_count
from torchlens_perf.diagnosis.actions.job import Job, Proposal, rule
from torchlens_perf.diagnosis.lost_time import sum_transfers
from torchlens_perf.run.training_settings import DdpSettings

_DDP = (
    "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
)
_NOTE = "https://docs.pytorch.org/docs/stable/notes/ddp.html"
_EXPOSED = "communication that nothing overlaps takes"
_MIN_EXPOSED = 0.1
_IMBALANCE = "waiting for the rank with the most work takes"
_MIN_CORRELATION = 0.7
_MAX_BUFFER = 8 << 20
"""Reductions of DDP's maps of used parameters are far smaller than gradients."""


@rule("ddp-bucket-size", _DDP)
def resize_buckets(job: Job) -> Proposal | None:
    """The gradients of DDP are in one bucket, or in eight or more buckets below the default of 25
    MB, and exposed communication takes at least 10 % of the step."""
    ddp = job.settings.ddp
    if ddp is None or job.share("communication") < _MIN_EXPOSED:
        return None
    buckets = math.ceil(ddp.gradient_bytes / max(1, ddp.bucket_bytes))
    if buckets == 1 and ddp.gradient_bytes >= 8 << 20:
        size_mb = max(1, ddp.gradient_bytes >> 22)
        action = f"Let reductions begin during the backward pass: bucket_cap_mb={size_mb}."
    elif buckets >= 8 and ddp.bucket_bytes < 25 << 20:
        action = "Use larger buckets, whose transfers are more efficient: bucket_cap_mb=25."
    else:
        return None
    return Proposal(
        f"{format_bytes(ddp.gradient_bytes, 'B')} of gradients are in"
        f" {format_count(buckets, 'bucket')} of DDP, and {job.describe(_EXPOSED, 'communication')}.",
        action,
    )


@rule("ddp-unused-parameters", f"{_NOTE}#internal-design")
def do_not_search_unused(job: Job) -> Proposal | None:
    """DDP searches for unused parameters in each step, all parameters had new gradients in one step,
    and the reductions of the search take at least 2 % of the step."""
    ddp = _find_searching_ddp(job)
    cost_s = _map_reduction_s(job)
    # Gradients that are kept do not show which parameters a step uses.
    if ddp is None or cost_s is None or ddp.unused or job.settings.zeroes_gradients:
        return None
    return Proposal(
        "DDP searches for unused parameters, and found none in the step that was looked at. The"
        f" reductions of the search take {job.describe_seconds('', cost_s).strip()}.",
        "Remove find_unused_parameters=True if each step uses all parameters.",
        gain_s=cost_s,
    )


@rule("ddp-static-graph", _DDP)
def declare_static_graph(job: Job) -> Proposal | None:
    """DDP searches for unused parameters in each step, some have no gradients, and the reductions
    of the search take at least 2 % of the step."""
    ddp = _find_searching_ddp(job)
    cost_s = _map_reduction_s(job)
    if ddp is None or cost_s is None or not ddp.unused:
        return None
    return Proposal(
        f"DDP finds {format_count(ddp.unused, 'unused parameter')} in each step. The reductions of"
        f" the search take {job.describe_seconds('', cost_s).strip()}.",
        "If they are the same in each step, search once: DistributedDataParallel(static_graph=True).",
        gain_s=cost_s,
    )


def _find_searching_ddp(job: Job) -> DdpSettings | None:
    """Return the settings of DDP if it searches for unused parameters in each step."""
    ddp = job.settings.ddp
    searches = ddp is not None and ddp.find_unused_parameters and not ddp.static_graph
    return ddp if searches else None


def _map_reduction_s(job: Job) -> float | None:
    """Return the exposed time per step of DDP's reductions of its map of used parameters, which are
    32-bit integers; None if not measured."""
    maps = [
        row
        for row in job.report["collectives"]
        if row["operation"] == "allreduce" and row["dtype"] == "int32" and row["count"]
        and row["bytes"] / row["count"] < _MAX_BUFFER
    ]  # fmt: skip
    transfer_s = sum_transfers(job.report, maps)
    return None if transfer_s is None else min(transfer_s, job.seconds("communication"))


@rule("ddp-no-sync", f"{_DDP}#torch.nn.parallel.DistributedDataParallel.no_sync")
def reduce_once_per_step(job: Job) -> Proposal | None:
    """DDP reduces the gradients after each micro-batch of a step."""
    ddp, passes = job.settings.ddp, job.report["steps"]["micro_steps"]
    if ddp is None or passes < 2 or not ddp.gradient_bytes:
        return None
    floats = [row for row in job.report["collectives"] if row["operation"] == "allreduce"]
    steps = max(1, job.report["steps"]["count"]) * max(1, len(job.report["ranks"]))
    times = sum(row["bytes"] for row in floats) / steps / ddp.gradient_bytes
    if times < 0.75 * passes:
        return None
    return Proposal(
        f"A step accumulates {passes} backward passes and reduces {times:.1f} times the size of its"
        f" gradients; {job.describe(_EXPOSED, 'communication')}.",
        "Reduce once per step: run all backward passes but the last one in model.no_sync().",
        f"communication x{1 / passes:.2f}",
    )


@rule("accumulate-gradients", f"{_DDP}#torch.nn.parallel.DistributedDataParallel.no_sync")
def accumulate_gradients(job: Job) -> Proposal | None:
    """DDP reduces the gradients of each backward pass, all-reduces send most of the bytes, and exposed
    communication takes at least 30 % of the step."""
    if job.settings.ddp is None or job.report["steps"]["micro_steps"] > 1:
        return None
    rows = job.report["collectives"]
    reduced = sum(row["bytes"] for row in rows if row["operation"] == "allreduce")
    if job.share("communication") < 0.3 or 2 * reduced <= sum(row["bytes"] for row in rows):
        return None
    return Proposal(
        f"With one backward pass per step, {job.describe(_EXPOSED, 'communication')}.",
        "Use a larger batch, or accumulate two backward passes per step, the first one in"
        " model.no_sync(). This changes the batch size of the optimizer.",
        "communication x0.5",
    )


@rule(
    "uneven-lengths",
    "https://docs.pytorch.org/docs/stable/data.html#loading-batched-and-non-batched-data",
)
def balance_lengths(job: Job) -> Proposal | None:
    """Within steps, ranks take longer for larger batches: the correlation is at least 0.7."""
    correlation = job.length_correlation
    if correlation is None or correlation < _MIN_CORRELATION:
        return None
    return Proposal(
        f"Ranks with larger batches take longer (correlation {correlation:.2f}):"
        f" {job.describe(_IMBALANCE, 'imbalance')}.",
        "Give all ranks batches of the same size: a batch sampler that groups similar lengths, or"
        " a fixed number of tokens per batch.",
        "rank=all@median",
    )
