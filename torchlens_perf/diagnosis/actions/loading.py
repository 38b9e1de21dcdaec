"""Actions on the DataLoader. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import format_count
from torchlens_perf.diagnosis.actions.job import Job, Proposal, rule
from torchlens_perf.verdicts.words.report import mean_per_step

if TYPE_CHECKING:
    from torchlens_perf.run.training_settings import LoaderSettings

_LOADER = "https://docs.pytorch.org/docs/stable/data.html"
_TUNING = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
_WAITING = "waiting for data takes"
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


@rule("prefetch-factor", f"{_LOADER}#torch.utils.data.DataLoader")
def prefetch_more(job: Job) -> Proposal | None:
    """Few batches are prefetched, and at least 5 % of the time is waiting for single slow batches,
    while usual steps hardly wait."""
    loader = job.settings.loader
    if loader is None or not loader.workers or (loader.prefetch_factor or 2) > 2:
        return None
    steps = job.report["steps"]
    unknown = [row for row in steps["long"] if not row["kinds"] and row["waited_for"] is None]
    slow = [row for row in unknown if row["part"] == "data" and not row["period"]]
    cost_s = mean_per_step(sum(row["total_s"] for row in slow), steps)
    if cost_s < 0.05 * job.lost.step_s or job.share("data") - cost_s / job.lost.step_s > 0.02:
        return None
    return Proposal(
        f"{format_count(sum(row['count'] for row in slow), 'step')} waited for a slow batch, which"
        f" is {job.describe_seconds('on average', cost_s)}.",
        "Let batches be ready earlier: DataLoader(prefetch_factor=8).",
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


@rule("tokenize-before-training", f"{_TUNING}#enable-asynchronous-data-loading-and-augmentation")
def tokenize_before(job: Job) -> Proposal | None:
    """A section named after tokenizing runs in each step, or the dataset has a tokenizer and steps
    wait for data."""
    sections = [row for row in job.report["sections"] if "tokeniz" in row["name"].lower()]
    row = max(sections, key=lambda each: each["host_s_per_typical_step"] or 0.0, default=None)
    action = "Tokenize the data set once before training, and load the numbers."
    if row is not None and row["host_s_per_typical_step"]:
        took = job.describe_seconds("takes", row["host_s_per_typical_step"])
        return Proposal(f'Section "{row["name"]}" {took}.', action, f"section:{row['name']}=0")
    if job.settings.loader is None or not job.settings.loader.has_tokenizer:
        return None
    wait = job.describe(_WAITING, "data")
    action = "If batches are tokenized while they are loaded, tokenize once before training."
    return Proposal(f"The dataset has a tokenizer, and {wait}.", action, "data=0")
