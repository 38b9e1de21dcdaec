"""What goes wrong in a run on asynchronous devices, drawn from its seed: the truth that verdicts are held against.

A kind is a way to train and a fault: "ddp-backward". What is slow is the device (a kernel that takes longer, or all of
them), or the host in a way that the device has to wait for.
"""

from __future__ import annotations

import random

from benchmarks.planted_truth import Fault, Truth

RANKS, STEPS = 4, 170
KERNEL_MS = 0.3  # so that a step takes some 50 ms; the host is ahead of most of it
DELAYS_MS = (9, 14)
HOST_DELAYS_MS = (45, 60)  # more than the host is ahead: what it hides costs nothing, and nobody is to be named for it
FIRST_STEPS = (12, 40)
SLOWNESS = 1.2
INTERMITTENT_MS, SLOW_STEPS, OF_STEPS = 24, 2, 7
WAYS = ("ddp", "fsdp", "tensor")
# By fault, the phases in which it may be.
FAULTS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "optimizer": ("optimizer",),
    "data": ("data",),
    "host": ("host",),
    "slow_device": ("device",),
    "intermittent": ("forward", "backward"),
    "item": ("forward", "backward", "data"),
    "accumulation": ("forward", "backward"),
    "two_streams": ("forward", "backward"),
}
CLEAN = ("clean", "clean_item", "clean_accumulation")
KINDS = tuple(f"{way}-{fault}" for way in WAYS for fault in (*FAULTS, *CLEAN))


def plant(
    kind: str,
    seed: int,
    ranks: int = RANKS,
    steps: int = STEPS,
    slowness: float = SLOWNESS,
    host_delays_ms: tuple[int, int] = HOST_DELAYS_MS,
) -> Truth:
    """Draws a run's fault. slowness, host_delays_ms: of a slow device and a slow host. Raises ValueError for an unknown
    kind."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; there are {', '.join(KINDS)}")
    what = kind.partition("-")[2]
    if what in CLEAN:
        return Truth(kind, seed, ranks, steps, ())
    draw = random.Random(f"{kind}/{seed}")
    rank, first, phase = draw.randrange(ranks), draw.randint(*FIRST_STEPS), draw.choice(FAULTS[what])
    delays_ms = host_delays_ms if phase in ("data", "host") else DELAYS_MS
    fault = Fault(rank, phase, first, None, draw.randint(*delays_ms), "spin")
    if what == "slow_device":
        fault = Fault(rank, phase, first, None, None, "slow", share=slowness - 1)
    elif what == "intermittent":
        slots = tuple(sorted(draw.sample(range(OF_STEPS), SLOW_STEPS)))
        fault = Fault(rank, phase, first, None, INTERMITTENT_MS, "spin", slow_of=(OF_STEPS, slots))
    return Truth(kind, seed, ranks, steps, (fault,))
