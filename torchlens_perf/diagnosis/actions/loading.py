"""Actions on the DataLoader. Pure."""

from __future__ import annotations

import math

from torchlens_perf.analysis.statistics.quantities import format_count
from torchlens_perf.diagnosis.actions.job import Job, Proposal, rule
from torchlens_perf.run.training_settings import LoaderSettings
from torchlens_perf.verdicts.words.report import mean_per_step

_LOADER = "https://docs.pytorch.org/docs/stable/data.html"
_WAITING = "data loading takes"
# The training thread takes a batch of a worker out of a pipe: 1.0 to 1.4 ms of CPU time on a CPU.
_HANDOVER_S = 0.001


@rule("loader-workers", f"{_LOADER}#single-and-multi-process-data-loading")
def use_workers(job: Job) -> Proposal | None:
    """The DataLoader of a dataset with an index has no workers, steps wait for data, and CPUs are
    spare."""
    loader = _find_waiting_loader(job)
    if loader is None or loader.workers:
        return None
    workers, change = _plan_workers(job, job.seconds("data"))
    return Proposal(
        f"The DataLoader has no workers (num_workers=0), and {job.describe(_WAITING, 'data')}.",
        f"Load batches while the model computes: DataLoader(num_workers={workers}).",
        change,
    )


@rule("more-loader-workers", f"{_LOADER}#multi-process-data-loading")
def add_workers(job: Job) -> Proposal | None:
    """Steps wait for the workers of the DataLoader of a dataset with an index, and CPUs are spare."""
    loader = _find_waiting_loader(job)
    if loader is None or not loader.workers:
        return None
    # The workers return a batch in each step, so one worker needs this long for a batch.
    workers, change = _plan_workers(job, loader.workers * job.lost.step_s, loader.workers)
    return Proposal(
        f"{format_count(loader.workers, 'DataLoader worker')} cannot keep up:"
        f" {job.describe(_WAITING, 'data')}.",
        f"Start more workers: DataLoader(num_workers={workers}).",
        change,
    )


def _find_waiting_loader(job: Job) -> LoaderSettings | None:
    """Return the settings of the DataLoader if steps wait for it and it may have more workers."""
    loader = job.settings.loader
    if loader is None or loader.is_iterable or not job.spare_cpus or not job.seconds("data"):
        return None
    return loader


def _plan_workers(job: Job, batch_s: float, present: int = 0) -> tuple[int, str]:
    """Return a number of workers, and the change of the wait. batch_s: time to load a batch."""
    wait_s = job.seconds("data")
    rest_s = max(job.lost.step_s - wait_s, 1e-9)
    workers = min(present + job.spare_cpus, math.ceil(batch_s / rest_s))
    left = min(1.0, max(_HANDOVER_S, batch_s / workers - rest_s) / wait_s)
    return workers, f"data x{left:.2f}"


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
