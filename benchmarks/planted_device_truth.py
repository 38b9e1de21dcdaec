"""Draw the fault of a run on an asynchronous device from the run's seed, as the truth for verdicts.

A kind is a way to train and a fault, for example "ddp-backward". Either the device is slow (one
kernel or all kernels), or the host is slow enough to make the device wait for the host.

In the ways `ddp`, `fsdp` and `tensor` the host waits for its device once a step, in a blocking
copy. In the other ways, the loops, the host runs ahead of its device (Pace).
"""

from __future__ import annotations

import dataclasses
import random

from benchmarks.planted_truth import Fault, Truth

RANKS, STEPS = 4, 170
# With this kernel time, a step takes about 50 ms, and the host runs ahead during most of the step.
KERNEL_MS = 0.3
DELAYS_MS = (9, 14)
# A delay that is shorter than the time by which the host runs ahead is hidden and costs nothing.
HOST_DELAYS_MS = (90, 120)
FIRST_STEPS = (12, 40)
SLOWNESS = 1.2
INTERMITTENT_MS, SLOW_STEPS, OF_STEPS = 24, 2, 7
WAYS = ("ddp", "fsdp", "tensor")
# For each fault, the phases in which it may occur.
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
LOOP_BLOCKS, LOOP_KERNEL_MS, LOOP_S, LOOP_STEPS = 2, 0.01, 8.0, (150, 1200)
# Time in which the host issues a loop's step on 2 shared cores.
LOOP_ISSUE_MS = 3.0
STEPS_MS = (3, 5, 8, 15, 30, 60)
# Share of a step that a fault adds.
LOOP_SHARE = 0.1
# For each loop, the phases that may be slow, by a sleep of the host or a spin of the device.
LOOPS = {
    "launch": {"forward": "sleep", "backward": "sleep", "host": "sleep"},
    "mixed": {"forward": "sleep", "backward": "spin"},
    "ahead": {"forward": "spin", "backward": "spin", "optimizer": "spin"},
}
# A slow host that delays no other rank, because its loop is limited by the device.
HIDDEN = "hidden_host"
KINDS = (
    *(f"{way}-{fault}" for way in WAYS for fault in (*FAULTS, *CLEAN)),
    *(f"{loop}-{fault}" for loop, faults in LOOPS.items() for fault in (*faults, "clean")), f"ahead-{HIDDEN}",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pace:
    """Planned times of the host and the device in a loop's step, by phase, in ms. Kernels take 10
    us, and copies do not block.
    """

    host_ms: dict[str, float]
    device_ms: dict[str, float]
    item: bool
    """Whether the host waits for its device at the end of each step. In other loops it never
    does.
    """

    @property
    def step_ms(self) -> float:
        """Return the planned time of a step: the sum of host and device time if the host waits in
        each step, else the longer of the two.
        """
        host_ms, device_ms = (
            LOOP_ISSUE_MS + sum(self.host_ms.values()),
            sum(self.device_ms.values()),
        )
        return host_ms + device_ms if self.item else max(host_ms, device_ms)


def pace(kind: str, seed: int) -> Pace | None:
    """Return how long the phases of a loop take, or None for the other ways to train.

    launch: the host's code takes all of the step. mixed: the device waits for the host's code in
    the forward pass, and the host waits for the device at the step's end. ahead: the device's work
    takes all of the step, and the host runs ahead until the queue is full.
    """
    way = kind.partition("-")[0]
    if way not in LOOPS:
        return None
    step_ms = random.Random(f"{kind}/{seed}/pace").choice(STEPS_MS)
    if way == "launch":
        return Pace(
            {"forward": 0.5 * step_ms, "backward": 0.3 * step_ms, "host": 0.2 * step_ms}, {}, False
        )
    if way == "mixed":
        return Pace({"forward": 0.5 * step_ms}, {"backward": 0.5 * step_ms}, True)
    # The device needs more time than the host.
    device_ms = step_ms + 2 * LOOP_ISSUE_MS
    return Pace(
        {"forward": 0.2 * step_ms},
        {"forward": 0.5 * device_ms, "backward": 0.3 * device_ms, "optimizer": 0.2 * device_ms},
        False,
    )


def plant(
    kind: str,
    seed: int,
    ranks: int = RANKS,
    steps: int = STEPS,
    slowness: float = SLOWNESS,
    host_delays_ms: tuple[int, int] = HOST_DELAYS_MS,
) -> Truth:
    """Draw a run's fault.

    `slowness` is the slow device's factor, `host_delays_ms` the slow host's delay.

    Raises ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; there are {', '.join(KINDS)}")
    what = kind.partition("-")[2]
    draw = random.Random(f"{kind}/{seed}")
    if paced := pace(kind, seed):
        return _plant_in_loop(kind, seed, ranks, paced, draw)
    if what in CLEAN:
        return Truth(kind, seed, ranks, steps, ())
    rank, first, phase = (
        draw.randrange(ranks),
        draw.randint(*FIRST_STEPS),
        draw.choice(FAULTS[what]),
    )
    delays_ms = host_delays_ms if phase in ("data", "host") else DELAYS_MS
    fault = Fault(rank, phase, first, None, draw.randint(*delays_ms), "spin")
    if what == "slow_device":
        fault = Fault(rank, phase, first, None, None, "slow", share=slowness - 1)
    elif what == "intermittent":
        slots = tuple(sorted(draw.sample(range(OF_STEPS), SLOW_STEPS)))
        fault = Fault(rank, phase, first, None, INTERMITTENT_MS, "spin", slow_of=(OF_STEPS, slots))
    return Truth(kind, seed, ranks, steps, (fault,))


def _plant_in_loop(kind: str, seed: int, ranks: int, paced: Pace, draw: random.Random) -> Truth:
    loop, _, what = kind.partition("-")
    least, most = LOOP_STEPS
    steps = min(max(round(LOOP_S * 1e3 / paced.step_ms), least), most)
    if what == "clean":
        return Truth(kind, seed, ranks, steps, ())
    rank, first = draw.randrange(ranks), draw.randint(FIRST_STEPS[0], steps // 4)
    phase, way = ("forward", "sleep") if what == HIDDEN else (what, LOOPS[loop][what])
    return Truth(
        kind,
        seed,
        ranks,
        steps,
        (Fault(rank, phase, first, None, LOOP_SHARE * paced.step_ms, way),),
    )
