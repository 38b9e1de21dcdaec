"""Advice on host code, CPUs, memory of the allocator, and work that only some steps do. Pure."""

from __future__ import annotations

from torchlens_perf.analysis.statistics.quantities import format_count
from torchlens_perf.diagnosis.advice.rule import (
    ALLOCATOR_VARIABLES,
    Job,
    Proposal,
    capitalize,
    rule,
)
from torchlens_perf.verdicts.words.bottleneck import ACTIONS_ON_KINDS

_TUNING = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
_CONTENTION = "waiting for a CPU takes"
_EVALUATION = ("evaluation", "forward passes without gradients")


@rule("synchronization", f"{_TUNING}#avoid-unnecessary-cpu-gpu-synchronization")
def do_not_synchronize(job: Job) -> Proposal | None:
    """The host is ahead of a GPU in at least half of the passes, but the GPU has no work between the
    phases, as after .item() in each step."""
    caught_up = job.caught_up
    if not job.is_cuda or caught_up is None or caught_up > 0.5 or job.host_pace is not None:
        return None
    if not job.seconds("host"):
        return None
    return Proposal(
        "The host issues kernels ahead of the GPU, yet"
        f" {job.describe('between the phases the GPU is without work for', 'host')}: something in"
        " each step waits for the GPU.",
        "Read results on the host less often: .item(), .cpu(), print(loss), torch.cuda.synchronize().",
        "host=0",
    )


@rule("garbage-collection", "https://docs.python.org/3/library/gc.html#gc.freeze")
def freeze_objects(job: Job) -> Proposal | None:
    """Steps collect garbage."""
    rows = job.long_steps("garbage collection")
    if not rows:
        return None
    action = "call gc.collect() at times that you choose."
    if not job.settings.gc_frozen:
        action = ACTIONS_ON_KINDS["garbage collection"]
    return Proposal(
        job.describe_long_steps(rows, "collected garbage"),
        capitalize(action),
        "gc=0",
    )


@rule("cpu-threads", "https://docs.pytorch.org/docs/stable/threading_environment_variables.html")
def use_fewer_threads(job: Job) -> Proposal | None:
    """Ranks wait for CPUs, and torch uses more threads per rank than the rank has CPUs."""
    cpus, threads = job.cpus_per_rank, job.threads
    if cpus is None or threads is None or threads <= max(1, cpus) or not job.seconds("cpu"):
        return None
    return Proposal(
        f"torch uses {threads} threads per rank, which has"
        f" {format_count(max(1, cpus), 'CPU')}; {job.describe(_CONTENTION, 'cpu')}.",
        f"Set OMP_NUM_THREADS={max(1, cpus)}.",
        "contention=0",
    )


@rule("cpu-binding", "https://docs.pytorch.org/docs/stable/elastic/run.html")
def bind_ranks(job: Job) -> Proposal | None:
    """Ranks share all CPUs of a host that has enough of them, no other program uses them, and waiting
    for a CPU takes at least 5 % of the step."""
    cpus, threads, loader = job.cpus_per_rank, job.threads, job.settings.loader
    if cpus is None or threads is None or job.ranks_per_cpus < 2:
        return None
    known = [rank["cpu"]["others_share"] for rank in job.report["ranks"] if rank["cpu"]]
    others = max((each for each in known if each is not None), default=1.0)
    needed = threads + (loader.workers if loader else 0)
    if needed > cpus or others >= 0.1 or job.share("cpu") < 0.05:
        return None
    return Proposal(
        f"Each of {job.ranks_per_cpus} ranks may use all CPUs of its host, which has"
        f" {cpus} per rank; {job.describe(_CONTENTION, 'cpu')}.",
        "Give each rank CPUs of its own: torchrun --numa-binding=exclusive, or taskset.",
    )


@rule(
    "expandable-segments",
    "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf",
)
def expand_segments(job: Job) -> Proposal | None:
    """The allocator of a GPU had to free its cache and retry in the last 1000 steps, and segments
    cannot expand."""
    found = [rank["memory"]["device"] for rank in job.report["ranks"]]
    retries = [each["retries_in"] for each in found if each and each["retries_in"]]
    if not retries or "expandable_segments:True" in job.variable(*ALLOCATOR_VARIABLES):
        return None
    most = max(retries, key=lambda each: each["count"])
    before = job.variable(*ALLOCATOR_VARIABLES)
    value = f"{before},expandable_segments:True".removeprefix(",")
    return Proposal(
        f"The allocator retried {format_count(most['count'], 'cudaMalloc call')} in {most['steps']}"
        " steps, each after it had freed its cache and waited for the GPU.",
        f"Set PYTORCH_ALLOC_CONF={value}.",
    )


@rule("asynchronous-saving", "https://docs.pytorch.org/docs/stable/distributed.checkpoint.html")
def save_asynchronously(job: Job) -> Proposal | None:
    """Steps wait until a checkpoint is saved."""
    rows = job.long_steps("saving")
    if not rows:
        return None
    return Proposal(
        job.describe_long_steps(rows, "saved a checkpoint"),
        capitalize(ACTIONS_ON_KINDS["saving"]),
        "saving=0",
    )


@rule(
    "evaluation",
    "https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad_mode.inference_mode.html",
)
def evaluate_less(job: Job) -> Proposal | None:
    """Forward passes without gradients take at least 10 % of the time."""
    rows = job.long_steps(*_EVALUATION)
    cost_s = job.per_step(rows)
    if cost_s < 0.1 * job.lost["step_s"]:
        return None
    # Rollouts and sampling are passes without gradients, too, and no evaluation.
    known = all("evaluation" in row["kinds"] for row in rows)
    did = "made forward passes without gradients (evaluation, rollouts or sampling)"
    action = ACTIONS_ON_KINDS["evaluation"]
    return Proposal(
        job.describe_long_steps(rows, "evaluated" if known else did),
        f"{capitalize(action) if known else f'If these passes evaluate, {action}'}"
        " The gain is that of half as many.",
        "evaluation x0.5",
    )


RULES = (
    do_not_synchronize, freeze_objects, use_fewer_threads, bind_ranks, expand_segments, save_asynchronously,
    evaluate_less,
)  # fmt: skip
