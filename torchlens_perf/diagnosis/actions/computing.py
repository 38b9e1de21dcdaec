"""Actions on optimizers, kernels and recomputation. Pure."""

from __future__ import annotations

from torchlens_perf.analysis.statistics.quantities import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
)
from torchlens_perf.diagnosis.actions.job import Job, Proposal, rule
from torchlens_perf.verdicts.words.device_pace import LaunchBoundEvidence

_OPTIM = "https://docs.pytorch.org/docs/stable/optim.html"
_TUNING = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
_COMPILE = "https://docs.pytorch.org/docs/stable/generated/torch.compile.html"
_OPTIMIZER = "its steps take"
# On a CPU, a fused SGD may be slower.
_FUSED = {"cuda": ("Adam", "AdamW", "SGD", "Adagrad"), "cpu": ("Adam", "AdamW")}
_MIN_OPTIMIZER, _MOSTLY = 0.1, 0.5


@rule("fused-optimizer", f"{_OPTIM}#algorithms")
def fuse_optimizer(job: Job) -> Proposal | None:
    """The optimizer has a fused form for its device and parameters that is not used. On a GPU, its
    steps take at least 10 % of the step."""
    found = job.settings.optimizer
    if found is None or found.fused or not found.can_fuse:
        return None
    if found.kind not in _FUSED.get(found.device, ()):
        return None
    if found.device == "cuda" and job.share("optimizer") < _MIN_OPTIMIZER:
        return None
    return Proposal(
        f"{found.kind} updates {format_count(found.tensors, 'tensor')} without its fused form;"
        f" {job.describe(_OPTIMIZER, 'optimizer')}.",
        f"Use torch.optim.{found.kind}(fused=True).",
        # 600 tensors of 64 bytes and 100 of 147 kB took 13 % and 33 % of their time on a CPU. On an
        # H200, 149 tensors that were updated one by one took 8 %.
        "optimizer x0.25" if found.device == "cpu" or found.foreach is False else None,
    )


@rule("foreach-optimizer", f"{_OPTIM}#algorithms")
def group_tensors(job: Job) -> Proposal | None:
    """The optimizer updates tensors on a GPU one by one, has no fused form, and its steps take at
    least 10 % of the step."""
    found = job.settings.optimizer
    if found is None or found.foreach is not False or found.fused or found.device != "cuda":
        return None
    if found.kind in _FUSED["cuda"] or job.share("optimizer") < _MIN_OPTIMIZER:
        return None
    return Proposal(
        f"{found.kind} updates {format_count(found.tensors, 'tensor')} one by one (foreach=False);"
        f" {job.describe(_OPTIMIZER, 'optimizer')}.",
        "Remove foreach=False.",
    )


@rule("compile", _COMPILE)
def compile_model(job: Job) -> Proposal | None:
    """The model is not compiled, and a GPU waits for its kernels: it has no work left at the end of at
    least 75 % of the passes, and the driver does not report it busy for more than 75 % of the time."""
    if job.settings.compiled is not False or job.host_pace is None:
        return None
    action = "Issue fewer and larger kernels: model = torch.compile(model)."
    return Proposal(_describe_launches(job.host_pace), action)


@rule("cuda-graphs", _COMPILE)
def use_cuda_graphs(job: Job) -> Proposal | None:
    """The model is compiled without CUDA graphs, but a GPU waits for its kernels, as for
    `compile`."""
    settings = job.settings
    if not settings.compiled or settings.cuda_graphs is not False or job.host_pace is None:
        return None
    action = 'Issue all kernels at once: torch.compile(model, mode="reduce-overhead").'
    return Proposal(_describe_launches(job.host_pace), action)


def _describe_launches(pace: LaunchBoundEvidence) -> str:
    if pace.busy is not None:
        return f"The GPU is busy for {format_percent(pace.busy)} of a typical second."
    if pace.idle_s is not None:
        return f"The GPU waits for kernels for at least {format_duration(pace.idle_s)} of a step."
    return f"The GPU has no work left at the end of {format_percent(pace.caught_up)} of the passes."


@rule("needless-checkpointing", "https://docs.pytorch.org/docs/stable/checkpoint.html")
def keep_activations(job: Job) -> Proposal | None:
    """Activations are recomputed although at most half of the memory is used: of the device, or on a
    CPU of what is available."""
    if not job.seconds("recompute"):
        return None
    used = job.used_memory
    if job.report["run"]["device"] is None:
        resident = max(
            (rank["memory"]["max_bytes"] or 0 for rank in job.report["ranks"]), default=0
        )
        free = (job.settings.free_memory_bytes or 0) // job.ranks_per_host
        if not resident or free < 2 * resident:
            return None
        memory = (
            f"a rank uses {format_bytes(resident, 'B')} of memory while {format_bytes(free, 'B')} per"
            " rank are available"
        )
    elif used is None or used > _MOSTLY:
        return None
    else:
        memory = f"{format_percent(1 - used)} of the device's memory are free"
    return Proposal(
        f"{job.describe('Recomputing activations takes', 'recompute')}, and {memory}.",
        "Checkpoint fewer modules, or none.",
        "recompute=0",
    )


@rule("larger-micro-batch", f"{_TUNING}#gpu-specific-optimizations")
def enlarge_micro_batch(job: Job) -> Proposal | None:
    """A step accumulates several backward passes, at most 45 % of the device's memory are used, and
    the device waits for its kernels, as for `compile`."""
    passes, used, pace = job.report["steps"]["micro_steps"], job.used_memory, job.host_pace
    if passes < 2 or used is None or used > 0.45 or pace is None:
        return None
    return Proposal(
        f"A step accumulates {passes} backward passes while {format_percent(1 - used)} of the memory"
        f" are free. {_describe_launches(pace)}",
        f"Use micro-batches of twice the size, and accumulate {(passes + 1) // 2} passes.",
    )
