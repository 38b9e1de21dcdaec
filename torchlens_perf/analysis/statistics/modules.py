"""Find modules that take longer on one rank than on other ranks. Pure.

Nodes send the times of modules without the names. Ranks with the same digest of names have the same
modules, and their times are sorted by name.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_MODULES = 64
# Approximate number of ranks from which the median is computed if there are many ranks.
_SAMPLE = 256


def select_reported_modules(names: Mapping[str, float]) -> list[str]:
    """Return the names of the modules whose times are sent, in the order of the times."""
    return sorted(names)[:MAX_MODULES]


def digest_names(names: list[str]) -> int:
    """Return a 32-bit digest of these names; 0 without names."""
    return zlib.crc32("\0".join(names).encode()) or 1 if names else 0


class ModuleTimes:
    """The newest mean times of the modules of all ranks. Use it from one thread only.

    Each time is the mean of a module's own forward time per step over the whole run, in ns.
    """

    def __init__(self) -> None:
        self._names: dict[int, list[str]] = {}
        self._times: dict[int, tuple[int, npt.NDArray[np.floating[Any]]]] = {}

    def set_times_of_local_rank(self, rank: int, modules_ns: Mapping[str, float]) -> None:
        """Set the times of a rank of this node."""
        names = select_reported_modules(modules_ns)
        key = digest_names(names)
        self._names[key] = names
        self._times[rank] = (key, np.array([modules_ns[name] for name in names], np.float32))

    def set_times_of_remote_rank(
        self, rank: int, key: int, times_ns: npt.NDArray[np.floating[Any]]
    ) -> None:
        """Set the times of a rank of another node.

        key: digest of the rank's module names. times_ns: time of each module. Additional values are
        ignored.
        """
        # Copy, because a view would keep the whole received message in memory.
        self._times[rank] = (key, times_ns.copy())

    def excess_over_median_ns(self, rank: int) -> dict[str, float]:
        """Return for each module of a rank the excess in ns over the median of the other ranks.

        The result is empty if no other rank has the same modules, or if this node does not know the
        modules' names, because none of its ranks has these modules.
        """
        key, mine = self._times.get(rank, (0, None))
        names = self._names.get(key)
        if not names or mine is None:
            return {}
        others = [
            times
            for other, (theirs, times) in self._times.items()
            if theirs == key and other != rank
        ]
        if not others:
            return {}
        sample = np.stack(
            [times[: len(names)] for times in others[:: max(1, len(others) // _SAMPLE)]]
        )
        excess = mine[: len(names)] - np.median(sample, axis=0)
        return dict(zip(names, excess.tolist(), strict=True))
