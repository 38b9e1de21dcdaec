"""Draw the faults of a run in the fault campaign from the run's seed: the ground truth for
verdicts.

A fault is real work or a real wait in one rank's training loop. Kind and seed determine the fault,
so a run can be repeated under another tool, and no judge can be tuned to one draw.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

RANKS, STEPS = 4, 180
# Range of the first step of a fault.
FIRST_STEPS = (20, 60)
DELAYS_MS = (20, 40)
MOVING_DELAY_MS, MOVES_AFTER_STEPS = 30, (40, 60)
INTERMITTENT_MS, SLOW_STEPS, OF_STEPS = 20, 2, 7
LONG_BACKWARD_MS = 200
COMPUTE_SHARE = 0.25

FAULTY = ("compute", "data", "backward", "host", "moving", "backward_200ms", "intermittent")
HEALTHY = ("clean", "variable_length")
KINDS = (*FAULTY, *HEALTHY)
# Ways in which a pause spends its time: wait as for storage, compute in native code, collect
# garbage, or write a file.
_WAYS = {
    "data": ("sleep", "work"),
    "forward": ("sleep", "work"),
    "backward": ("sleep", "work"),
    "host": ("sleep", "collect", "write"),
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """One rank's fault in one phase, in the steps [first_step, last_step]."""

    rank: int
    phase: str
    """data, forward, backward, host, or compute (forward and backward)."""
    first_step: int
    last_step: int | None
    """None: until the run ends."""
    ms: float | None
    """Wall time that the fault adds to a slow step.

    None for compute, which does `share` more work instead.
    """
    way: str
    share: float | None = None
    slow_of: tuple[int, tuple[int, ...]] | None = None
    """(n, slots): only these steps of every n are slow. None: all steps."""

    def slows(self, step: int) -> bool:
        """Return True if the fault slows this step."""
        if step < self.first_step or (self.last_step is not None and step > self.last_step):
            return False
        return self.slow_of is None or (step - self.first_step) % self.slow_of[0] in self.slow_of[1]


@dataclasses.dataclass(frozen=True)
class Truth:
    """The planted faults of one run.

    Step k (from 0 on) lasts from the end of optimizer step k-1 to the end of optimizer step k.
    """

    kind: str
    seed: int
    ranks: int
    steps: int
    faults: tuple[Fault, ...]

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.kind}-{self.seed:04d}"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, path: Path) -> Truth:
        """Read a truth from a file with the JSON of to_json()."""
        value = json.loads(path.read_text())
        faults = []
        for fault in value["faults"]:
            slow_of = fault["slow_of"]
            fault["slow_of"] = slow_of and (slow_of[0], tuple(slow_of[1]))
            faults.append(Fault(**fault))
        return cls(value["kind"], value["seed"], value["ranks"], value["steps"], tuple(faults))


def plant(kind: str, seed: int, ranks: int = RANKS, steps: int = STEPS) -> Truth:
    """Draw a run's faults. Raises ValueError for an unknown kind."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; there are {', '.join(KINDS)}")
    # The seed alone would give all kinds the same ranks and steps.
    draw = random.Random(f"{kind}/{seed}")
    faults: tuple[Fault, ...] = ()
    if kind in FAULTY:
        rank, first = draw.randrange(ranks), draw.randint(*FIRST_STEPS)
        if kind == "moving":
            to = draw.choice([other for other in range(ranks) if other != rank])
            moves = first + draw.randint(*MOVES_AFTER_STEPS)
            stays = (
                _compute(rank, first)
                if draw.random() < 0.5
                else _pause(draw, rank, "forward", first, MOVING_DELAY_MS)
            )
            faults = (
                dataclasses.replace(stays, last_step=moves - 1),
                dataclasses.replace(stays, rank=to, first_step=moves),
            )
        elif kind == "intermittent":
            pause = _pause(
                draw, rank, draw.choice(("forward", "host", "data")), first, INTERMITTENT_MS
            )
            slots = tuple(sorted(draw.sample(range(OF_STEPS), SLOW_STEPS)))
            faults = (dataclasses.replace(pause, slow_of=(OF_STEPS, slots)),)
        elif kind == "compute":
            faults = (_compute(rank, first),)
        elif kind == "backward_200ms":
            faults = (_pause(draw, rank, "backward", first, LONG_BACKWARD_MS),)
        else:
            faults = (_pause(draw, rank, kind, first, draw.randint(*DELAYS_MS)),)
    return Truth(kind, seed, ranks, steps, faults)


def _pause(draw: random.Random, rank: int, phase: str, first_step: int, ms: int) -> Fault:
    return Fault(rank, phase, first_step, None, ms, draw.choice(_WAYS[phase]))


def _compute(rank: int, first_step: int) -> Fault:
    return Fault(rank, "compute", first_step, None, None, "work", share=COMPUTE_SHARE)
