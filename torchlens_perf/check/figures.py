"""Quantities of a check, and the values that each rank measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

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


class RankFigures(Struct, frozen=True):
    """Values that one rank measured."""

    rank: int
    local_rank: int
    host: str
    device: str
    """Model of the GPU, or of the CPU."""
    machine: str
    """Model and number of the CPUs. Only equal machines are compared."""
    switch: str = ""
    of_rank: dict[str, list[float]] = field(default_factory=dict)
    """Values by quantity, one per round."""
    of_node: dict[str, list[float]] = field(default_factory=dict)
    """The same for the whole node. Only its first rank measures them."""
    of_group: dict[str, tuple[tuple[int, ...], list[float]]] = field(default_factory=dict)
    """The ranks and the bus bandwidths of process groups, by operation, size and group."""
    not_measured: dict[str, str] = field(default_factory=dict)
    """Reasons, by quantity."""

    @property
    def place(self) -> str:
        """The name of the rank's place, which stays the same if a later job orders ranks anew."""
        return f"{self.host}/{self.local_rank}"


def collect(everyone: Iterable[RankFigures]) -> dict[str, dict[str, list[float]]]:
    """Return the values of all ranks, nodes and groups, by quantity and place, one per round.

    A place is HOST/LOCAL_RANK, a host, or the places of all ranks of a group.
    """
    places, found = (
        {each.rank: each.place for each in everyone},
        dict[str, dict[str, list[float]]](),
    )
    for each in everyone:
        measured = [(name, each.place, values) for name, values in each.of_rank.items()]
        measured += [(name, each.host, values) for name, values in each.of_node.items()]
        measured += [
            (name, " ".join(places[rank] for rank in ranks), values)
            for name, (ranks, values) in each.of_group.items()
        ]
        for name, place, values in measured:
            found.setdefault(name, {})[place] = values
    return found
