"""Parts of the check, which run in this order: the most important to users first."""

from __future__ import annotations

from typing import NamedTuple

CUDA, ASYNC = "cuda", "asyncdev"
# Each module is followed by a spin, as on CUDA.
MODULES = "asyncdev_modules"
_HERE = "benchmarks.gpu_check"


class Part(NamedTuple):
    """A function that takes Checks and runs in a separate process."""

    name: str
    target: str
    """module:function"""
    limit_s: float
    """Time limit, after which the part is ended with a FAIL.

    Several times the usual time, as it only catches hangs.
    """
    devices: tuple[str, ...] = (CUDA,)
    """Devices on which the part is meaningful."""


PARTS = (
    Part("planted", f"{_HERE}.planted:planted", 240, (CUDA, ASYNC, MODULES)),
    Part("overhead", f"{_HERE}.cost:overhead", 180),
    Part("waits", f"{_HERE}.waits:waits", 60),
    Part("synchronizations", f"{_HERE}.cost:synchronizations", 60),
    Part("beside", f"{_HERE}.beside:beside", 60),
    Part("nccl2", f"{_HERE}.nccl:nccl2", 120),
    Part("nccl1", f"{_HERE}.nccl:nccl1", 60),
    Part("nccl_room", f"{_HERE}.nccl:nccl_room", 180),
    Part("floors", f"{_HERE}.kernel_checks:floors", 60),
    Part("memory", f"{_HERE}.cost:memory", 45),
    Part("accuracy", f"{_HERE}.accuracy:accuracy", 45),
    Part("clock", f"{_HERE}.accuracy:clock", 30),
    Part("kernels", f"{_HERE}.kernel_checks:equality", 60),
    Part("graphs", f"{_HERE}.graphs:graphs", 120),
    Part("gaps", f"{_HERE}.cost:gaps", 45),
    Part("allocator", f"{_HERE}.allocator:allocator", 60),
    Part("merging", f"{_HERE}.merging:merging", 45),
    Part("nvml", f"{_HERE}.telemetry:nvml", 60),
    Part("capture", f"{_HERE}.captures:capture", 90),
    Part("crossover", f"{_HERE}.kernel_checks:crossover", 60),
    Part("every_module", f"{_HERE}.cost:every_module", 90),
    Part("nvtx", f"{_HERE}.tools:nvtx", 60),
    Part("sanitizer", f"{_HERE}.tools:sanitizer", 210),
)
