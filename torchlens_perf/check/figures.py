"""Quantities that are measured, and the values that each rank measured. Pure."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct, field


class Quantity(NamedTuple):
    """One quantity, and how values of equal machines are compared."""

    unit: str
    """B/s, FLOP/s, B or s. Less is better only for seconds."""
    floor: float
    """Least factor between a value and that of its peers that is reported."""
    action: str

    @property
    def is_exact(self) -> bool:
        """True if one reading is enough, as for a size."""
        return self.unit == "B"


TRANSFERS = "transfers"
_COMPUTE = "run a longer test of {subject}, look at its clocks, limits and other programs."
_CPU = "look for other programs and CPU limits (cgroups, affinity) on {subject}."
_DISK = "look at the disk of TMPDIR on {subject}: limits, other programs, remaining space."
_MEMORY = "look for programs that use the memory of {subject}, and at its memory modules."
QUANTITIES = {
    "matmul": Quantity("FLOP/s", 1.5, _COMPUTE),
    "memory bandwidth": Quantity("B/s", 1.5, _MEMORY),
    "copy to the device": Quantity("B/s", 1.2, "look at the PCIe link of {subject}."),
    "copy from the device": Quantity("B/s", 1.2, "look at the PCIe link of {subject}."),
    "kernel launch": Quantity("s", 1.5, _CPU),
    "one CPU thread": Quantity("s", 1.6, _CPU),
    "all CPU threads": Quantity("FLOP/s", 1.6, _CPU),
    "Python import": Quantity("s", 2.5, "move the Python environment of {subject} to a local disk."),
    "disk write": Quantity("B/s", 2.5, _DISK),
    "disk read": Quantity("B/s", 2.5, _DISK),
    "shared memory": Quantity("B", 1.2, "mount a larger /dev/shm (docker run --shm-size)."),
    "free memory": Quantity("B", 1.5, _MEMORY),
    TRANSFERS: Quantity("B/s", 1.6, "test cables, NICs and switch ports of {subject}."),
    "MTU": Quantity("B", 1.01, "set the same MTU on {subject} as on the other nodes."),
}  # fmt: skip
"""Quantities by the first words of their names, such as "matmul" of "matmul bfloat16"."""
ON_DEVICE = ("matmul", "memory bandwidth", "copy to the device", "copy from the device")
"""Quantities with a small spread on a GPU, where `DEVICE_FLOOR` replaces the floor."""
DEVICE_FLOOR = 1.08


def find_quantity(name: str) -> Quantity:
    """Return the quantity with this full name."""
    return next(each for start, each in QUANTITIES.items() if name.startswith(start))


class GroupTime(Struct, frozen=True, array_like=True):
    """Time of one collective operation in a process group, in seconds, one value per round."""

    mesh: str
    """Name of the dimension of the mesh, or "world"."""
    ranks: tuple[int, ...]
    operation: str
    bytes: int
    """Size by nccl-tests, from which the bus bandwidth is computed."""
    seconds: list[float]


class RankFigures(Struct, frozen=True):
    """The measurements of one rank."""

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
    groups: list[GroupTime] = field(default_factory=list)
    not_measured: dict[str, str] = field(default_factory=dict)
    """Reasons, by quantity."""

    @property
    def place(self) -> str:
        """The name of the rank's place, which stays the same if a later job orders ranks anew."""
        return f"{self.host}/{self.local_rank}"
