"""Quantities of a check, and the values that each rank measured. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from msgspec import Struct, field


class Quantity(NamedTuple):
    """One quantity, and how values of equal machines are compared."""

    unit: str
    """B/s, FLOP/s, B, s, or share: of CPU periods that were not throttled. Only fewer seconds are better."""
    floor: float
    """Least factor between a value and that of its peers that is reported."""
    action: str


TRANSFERS = "transfers"
COLLECTIVES = "allreduce", "allgather_base", "reduce_scatter_base", "alltoall_base", "broadcast"
_CPU = "look for other programs and CPU limits (cgroups, affinity) on {subject}."
_DISK = "look at the disk of TMPDIR on {subject}: limits, other programs, remaining space."
_MEMORY = "look for programs that use the memory of {subject}, and at its memory modules."
QUANTITIES = {
    "matmul": Quantity("FLOP/s", 1.5, "run a longer test of {subject}, look at its clocks, limits and other programs."),
    "memory bandwidth": Quantity("B/s", 1.5, _MEMORY),
    "copy to the device": Quantity("B/s", 1.2, "look at the PCIe link of {subject}."),
    "copy from the device": Quantity("B/s", 1.2, "look at the PCIe link of {subject}."),
    "kernel launch": Quantity("s", 1.5, _CPU),
    "one CPU thread": Quantity("s", 1.6, _CPU),
    "CPU quota": Quantity("share", 1.25, "raise the CPU limit (cgroup quota) of {subject}."),
    "all CPU threads": Quantity("FLOP/s", 1.6, _CPU),
    "Python import": Quantity("s", 2.5, "move the Python environment of {subject} to a local disk."),
    "disk write": Quantity("B/s", 2.5, _DISK),
    "disk read": Quantity("B/s", 2.5, _DISK),
    "shared memory": Quantity("B", 1.2, "mount a larger /dev/shm (docker run --shm-size)."),
    "free memory": Quantity("B", 1.5, _MEMORY),
    **dict.fromkeys(COLLECTIVES, Quantity("B/s", 2.0, "test the network of {subject}.")),
    TRANSFERS: Quantity("B/s", 2.0, "test cables, NICs and switch ports of {subject}."),
    "MTU": Quantity("B", 1.01, "set the same MTU on {subject} as on the other nodes."),
}  # fmt: skip
"""Quantities by the first words of their names, such as "matmul" of "matmul bfloat16"."""
CPU_TIME = "one CPU", "CPU quota", "all CPU"
"""First words of quantities that are worse on a rank without CPU time."""
DEVICE_FLOORS = {
    "matmul": 1.08,
    "memory bandwidth": 1.08,
    "copy": 1.15,
    TRANSFERS: 1.3,
    **dict.fromkeys(COLLECTIVES, 1.3),
}
"""Floors of ranks with a GPU, whose values vary less."""


def find_quantity(name: str) -> Quantity:
    """Return the quantity with this full name."""
    return next(each for start, each in QUANTITIES.items() if name.startswith(start))


Values: TypeAlias = dict[str, dict[str, list[float]]]
"""Values by quantity and place, one per round.

A place is HOST/LOCAL_RANK, a host, or the places of all ranks of a group.
"""


class RankFigures(Struct, frozen=True):
    """Values that one rank measured."""

    rank: int
    place: str
    """HOST/LOCAL_RANK, which stays the same if a later job orders ranks anew."""
    host: str
    device: str
    """Model of the GPU, or of the CPU."""
    machine: str
    """Model and number of the CPUs. Only equal machines are compared."""
    switch: str = ""
    values: Values = field(default_factory=dict)
    """Values of the rank, of the node if this is its first rank, and of the rank's groups."""
    not_measured: dict[str, str] = field(default_factory=dict)
    """Reasons, by quantity."""


def collect(everyone: Iterable[RankFigures]) -> Values:
    """Return the values of all ranks, nodes and groups."""
    found: Values = {}
    for name, places in itertools.chain(*(each.values.items() for each in everyone)):
        found.setdefault(name, {}).update(places)
    return found
