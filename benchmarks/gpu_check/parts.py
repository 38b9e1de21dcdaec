"""The parts of the check in the order in which they run: what matters most to a user comes first."""

from __future__ import annotations

from typing import NamedTuple

CUDA, ASYNC = "cuda", "asyncdev"
MODULES = "asyncdev_modules"  # with a spin for each module, as on CUDA
_HERE = "benchmarks.gpu_check"


class Part(NamedTuple):
    """A function that takes Checks, which runs in a process of its own."""

    name: str
    target: str
    """module:function"""
    limit_s: float
    """Then it is ended, which is a FAIL. Several times what it should take: it is there for what hangs."""
    devices: tuple[str, ...] = (CUDA,)
    """On which it says something."""


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
