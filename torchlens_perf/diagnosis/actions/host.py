"""Actions on host code between the phases. Pure."""

from __future__ import annotations

from torchlens_perf.diagnosis.actions.job import Job, Proposal, rule

_TUNING = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"


@rule("synchronization", f"{_TUNING}#avoid-unnecessary-cpu-gpu-synchronization")
def do_not_synchronize(job: Job) -> Proposal | None:
    """The host is ahead of a GPU in at least half of the passes, but the GPU has no work between the
    phases, as after .item() in each step."""
    caught_up = job.caught_up
    is_ahead = job.is_cuda and caught_up is not None and caught_up <= 0.5
    if not is_ahead or job.host_pace is not None or not job.seconds("host"):
        return None
    return Proposal(
        "The host issues kernels ahead of the GPU, yet"
        f" {job.describe('between the phases the GPU is without work for', 'host')}: something in"
        " each step waits for the GPU.",
        "Read results on the host less often: .item(), .cpu(), print(loss), torch.cuda.synchronize().",
        "host=0",
    )


@rule(
    "zero-grad-to-none",
    "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",
)
def set_gradients_to_none(job: Job) -> Proposal | None:
    """Gradients are not set to None between steps, no CUDA graph needs that, and host code
    takes at least 5 % of the step."""
    settings, passes = job.settings, job.report["steps"]["micro_steps"]
    ddp = settings.ddp
    if not settings.zeroes_gradients or settings.compiled or (ddp and ddp.gradient_as_bucket_view):
        return None
    if passes > 1 or job.share("host") < 0.05:
        return None
    return Proposal(
        f"Gradients are kept between steps, and {job.describe('host code takes', 'host')}.",
        "Set gradients to None between steps: zero_grad() without set_to_none=False.",
    )
