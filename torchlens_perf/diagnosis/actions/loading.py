"""Actions on the DataLoader. Pure."""

from __future__ import annotations

import math

from torchlens_perf.analysis.statistics.quantities import format_count, format_duration
from torchlens_perf.diagnosis.actions.job import Job, Proposal, rule
from torchlens_perf.verdicts.words.report import mean_per_step

_LOADER = "https://docs.pytorch.org/docs/stable/data.html"
# The training thread takes a batch of a worker out of a pipe: 1.0 to 1.4 ms of CPU time on a CPU.
_HANDOVER_S = 0.001


@rule("loader-workers", f"{_LOADER}#multi-process-data-loading")
def add_workers(job: Job) -> Proposal | None:
    """Steps wait for the DataLoader of a dataset with an index, and CPUs are spare."""
    loader, wait_s = job.settings.loader, job.seconds("data")
    if loader is None or loader.is_iterable or not job.spare_cpus or not wait_s:
        return None
    # Workers return a batch in each step, so one worker needs this long for a batch.
    batch_s = loader.workers * job.lost.step_s or wait_s
    rest_s = max(job.lost.step_s - wait_s, 1e-9)
    workers = min(loader.workers + job.spare_cpus, math.ceil(batch_s / rest_s))
    few = format_count(loader.workers, "DataLoader worker") if loader.workers else "num_workers=0"
    if loader.worker_ns:
        total, on_cpu, collating = (format_duration(each / 1e9) for each in loader.worker_ns)
        few = f"{few} ({total} per batch: {on_cpu} on a CPU, {collating} collating)"
    return Proposal(
        f"{few} cannot keep up: {job.describe('data loading takes', 'data')}.",
        f"Load batches in more processes: DataLoader(num_workers={workers}).",
        f"data x{min(1.0, max(_HANDOVER_S, batch_s / workers - rest_s) / wait_s):.2f}",
    )


@rule("persistent-workers", f"{_LOADER}#torch.utils.data.DataLoader")
def keep_workers(job: Job) -> Proposal | None:
    """The same DataLoader is iterated again at least three times, each time with new workers, whose
    starts take at least 2 % of the step."""
    loader = job.settings.loader
    if loader is None or not loader.workers or loader.persistent_workers or loader.restarts < 3:
        return None
    cost_s = mean_per_step(loader.restart_ns / 1e9, job.report["steps"])
    return Proposal(
        f"The loop has called DataLoader.__iter__ {loader.restarts} more times, and"
        f" {job.describe_seconds('starting workers in it takes', cost_s)}.",
        "Keep the workers for the next epoch: DataLoader(persistent_workers=True).",
        gain_s=cost_s,
    )


@rule("pin-memory", f"{_LOADER}#memory-pinning")
def pin_memory(job: Job) -> Proposal | None:
    """Batches for a GPU are not pinned, and the GPU is without work between the phases for at least
    10 % of the step."""
    loader = job.settings.loader
    if not job.is_cuda or loader is None or loader.pin_memory or job.share("data", "host") < 0.1:
        return None
    return Proposal(
        "The DataLoader returns memory that is not pinned, and without work the GPU spends"
        f" {job.describe_seconds('', job.seconds('data', 'host')).strip()}.",
        "Set DataLoader(pin_memory=True), and copy with tensor.to(device, non_blocking=True).",
    )
