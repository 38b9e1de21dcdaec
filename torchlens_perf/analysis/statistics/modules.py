"""Which modules take longer on one rank than on the others that have them, also on a rank of another node. Pure.

Names do not travel between nodes: ranks with the same digest have the same modules, in the order of their names.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_MODULES = 64
_SAMPLE = 256  # of many ranks, from which the usual times are taken


def reported_modules(names: Mapping[str, float]) -> list[str]:
    """The modules whose times are reported, in the order in which they are sent."""
    return sorted(names)[:MAX_MODULES]


def digest(names: list[str]) -> int:
    """32 bits for these names; 0 for none."""
    return zlib.crc32("\0".join(names).encode()) or 1 if names else 0


class ModuleTimes:
    """The newest mean times of all ranks: own forward time per step, in ns, over their run. One thread."""

    def __init__(self) -> None:
        self._names: dict[int, list[str]] = {}
        self._times: dict[int, tuple[int, npt.NDArray[np.floating[Any]]]] = {}

    def set_local(self, rank: int, modules_ns: Mapping[str, float]) -> None:
        """A rank of this node."""
        names = reported_modules(modules_ns)
        key = digest(names)
        self._names[key] = names
        self._times[rank] = (key, np.array([modules_ns[name] for name in names], np.float32))

    def set_remote(self, rank: int, key: int, times_ns: npt.NDArray[np.floating[Any]]) -> None:
        """A rank of another node. key: the digest of its names. times_ns: at least as many as those."""
        self._times[rank] = (key, times_ns.copy())  # not a view that keeps all that came with it

    def excess_ns(self, rank: int) -> dict[str, float]:
        """By module, how much longer it takes there than on the median of the others.

        Empty where nobody else has the same modules, or no rank of this node, which alone knows their names.
        """
        key, mine = self._times.get(rank, (0, None))
        names = self._names.get(key)
        if not names or mine is None:
            return {}
        others = [times for other, (theirs, times) in self._times.items() if theirs == key and other != rank]
        if not others:
            return {}
        sample = np.stack([times[: len(names)] for times in others[:: max(1, len(others) // _SAMPLE)]])
        excess = mine[: len(names)] - np.median(sample, axis=0)
        return dict(zip(names, excess.tolist(), strict=True))
