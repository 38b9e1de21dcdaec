"""Parts of the check, which start in this order: the most important to users first."""

from __future__ import annotations

from typing import NamedTuple

CUDA, ASYNC = "cuda", "asyncdev"
# Each module is followed by a spin, as on CUDA.
MODULES = "asyncdev_modules"
ANY = (CUDA, ASYNC, MODULES)
LIMIT_S = 20.0
# The tests' devices compute on processors, which the machine's other programs use, too.
SLOWER = {ASYNC: 1.5, MODULES: 1.5}
_HERE = "benchmarks.gpu_check"


class Part(NamedTuple):
    """A function that takes Checks and runs in a separate process."""

    name: str
    target: str
    """module:function, or module:function:argument"""
    alone: bool = False
    """True for a part that measures time, which no other part may disturb."""
    devices: tuple[str, ...] = (CUDA,)
    """Devices on which the part is meaningful."""
    limit_s: float = LIMIT_S
    """Time limit, after which the part is ended with a FAIL."""


def _planted(*kinds: str) -> tuple[Part, ...]:
    """Return one part for each planted fault: benchmarks/gpu_check/planted.py."""
    return tuple(
        Part(f"planted-{kind}", f"{_HERE}.planted:planted:{kind}", alone=True, devices=ANY)
        for kind in kinds
    )


def _loops(*kinds: str) -> tuple[Part, ...]:
    return tuple(Part(f"loop-{kind}", f"{_HERE}.loops:loop:{kind}", devices=ANY) for kind in kinds)


def _peers(*tools: str) -> tuple[Part, ...]:
    return tuple(
        Part(f"peer-{tool}", f"{_HERE}.peers:peer:{tool}", alone=True, devices=ANY)
        for tool in tools
    )


# Neighbours that do not measure time run side by side.
PARTS = (
    Part("overhead", f"{_HERE}.cost:overhead:launch", alone=True),
    Part("overhead-device", f"{_HERE}.cost:overhead:device", alone=True),
    Part("busy", f"{_HERE}.busy:busy", alone=True),
    *_planted("ddp-backward", "ddp-clean", "launch-forward"),
    *_loops("plain", "launch", "data", "item", "accumulation", "checkpoint"),
    # A hang is reported when no step has ended for ten seconds.
    Part("hang", f"{_HERE}.sharded:hang", devices=ANY, limit_s=1.5 * LIMIT_S),
    Part("fsdp", f"{_HERE}.sharded:sharded:fsdp", devices=ANY),
    Part("tensor", f"{_HERE}.sharded:sharded:tensor", devices=ANY),
    Part("waits", f"{_HERE}.waits:waits"),
    Part("synchronizations", f"{_HERE}.cost:synchronizations"),
    Part("captures-on-thread", f"{_HERE}.beside:beside"),
    Part("nccl2", f"{_HERE}.nccl:nccl2"),
    Part("nccl1", f"{_HERE}.nccl:nccl1"),
    Part("graphs", f"{_HERE}.graphs:graphs"),
    Part("kernels", f"{_HERE}.kernel_checks:equality"),
    Part("merging", f"{_HERE}.merging:merging"),
    Part("nvtx", f"{_HERE}.tools:nvtx"),
    Part("allocator", f"{_HERE}.allocator:allocator"),
    Part("capture", f"{_HERE}.captures:capture", alone=True),
    *_peers("torchlens_perf", "torch.profiler", "TraceML", "nvidia-resiliency-ext"),
    Part("accuracy", f"{_HERE}.accuracy:accuracy", alone=True),
    Part("clock", f"{_HERE}.accuracy:clock", alone=True),
    Part("memory", f"{_HERE}.cost:memory", alone=True),
    Part("nvml", f"{_HERE}.telemetry:nvml", alone=True),
    Part("gaps", f"{_HERE}.cost:gaps", alone=True),
    *_planted("mixed-forward", "ddp-slow_device", "ddp-data", "ahead-backward", "launch-clean"),
    *_planted("ddp-item", "ddp-clean_item"),
    Part("floors", f"{_HERE}.kernel_checks:floors", alone=True),
    Part("crossover", f"{_HERE}.kernel_checks:crossover", alone=True),
    Part("every_module", f"{_HERE}.cost:every_module", alone=True),
    Part("nccl_cost", f"{_HERE}.nccl:nccl_cost", alone=True),
    Part("nccl_room", f"{_HERE}.nccl:nccl_room"),
    Part("memcheck", f"{_HERE}.tools:sanitizer:memcheck"),
    Part("racecheck", f"{_HERE}.tools:sanitizer:racecheck"),
)
