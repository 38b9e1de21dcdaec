"""Align the clocks of several nodes by collectives: a blocking collective ends at about the same
time on all ranks.

Ranks of one node share a clock. Wall clocks of different nodes can differ by milliseconds, which is
longer than many spans. The ends of collectives that two nodes share reveal the offset between their
clocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.collectives.semantics import (
    CollectiveName,
    ends_after_all_started,
    parse_collective_name,
)
from torchlens_perf.run.rank_facts import ProcessGroup
from torchlens_perf.run.ring import Flag, Kind
from torchlens_perf.store.segments import ProcessRecords

# The lower 32 bits of a collective record's value1 are its sequence number.
SEQUENCE_MASK = 0xFFFFFFFF
# Two nodes' clocks can be aligned if the nodes share at least this many collectives.
MIN_ENDS = 3
# Only the collectives nearest in time are used, since clocks drift.
_MAX_ENDS = 9
# If the offsets deviate more than this, the alignment is too inaccurate to be useful.
_MAX_SPREAD_NS = 5_000_000


class RankRecords(NamedTuple):
    """One rank's records of one step."""

    rank: int
    node: str
    unix_offset_ns: int
    """Offset from the times in the records to the wall clock of the node."""
    groups: Mapping[str, ProcessGroup]
    records: ProcessRecords

    def iterate_collectives(self) -> Iterator[tuple[CollectiveName, int, np.void]]:
        """Yield operation, sequence number and record of each collective."""
        records, names = self.records
        operations = [parse_collective_name(name) for name in names]
        for record in records[records["kind"] == Kind.COLLECTIVE]:
            operation = operations[record["name_id"]]
            if operation is not None:
                yield operation, int(record["value1"]) & SEQUENCE_MASK, record


class CommonClock(NamedTuple):
    """Offsets from each rank's times to a common clock.

    Ranks whose clocks cannot be aligned are missing.
    """

    offset_ns: dict[int, int]
    words: str


class NodeClocks:
    """Offsets between the nodes' wall clocks, measured in the steps that were read."""

    def __init__(
        self, steps: Iterable[Collection[RankRecords]], uncomparable: Collection[str]
    ) -> None:
        """uncomparable: names of groups whose sequence numbers differ between ranks."""
        ends: dict[tuple[str, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for step in steps:
            if len({each.node for each in step}) > 1:
                for each in step:
                    for key, end_ns in _collective_ends(each, uncomparable):
                        ends[key][each.node].append(end_ns + each.unix_offset_ns)
        self._ends = [
            {node: float(np.median(times)) for node, times in of.items()}
            for of in ends.values()
            if len(of) > 1
        ]

    def common_clock(self, ranks: Collection[RankRecords]) -> CommonClock:
        """Return the common clock for one step of these ranks."""
        first, *others = dict.fromkeys(each.node for each in ranks)
        at_ns = min(
            int(each.records.records["start_ns"].min(initial=1 << 62)) + each.unix_offset_ns
            for each in ranks
        )
        shift_ns, spread_ns, fewest = {first: 0}, 0.0, _MAX_ENDS
        for node in others:
            apart = self._clock_offsets_ns(first, node, at_ns)
            if len(apart) >= MIN_ENDS:
                middle = float(np.median(apart))
                deviation = float(np.median(np.abs(apart - middle)))
                if deviation <= _MAX_SPREAD_NS:
                    shift_ns[node], spread_ns = -round(middle), max(spread_ns, deviation)
                    fewest = min(fewest, len(apart))
        aligned = (
            f"The clocks of {len(shift_ns)} nodes are aligned by the ends of {fewest} or more"
            f" collectives, to within about {max(spread_ns / 1e6, 0.001):.3f} ms."
        )
        left = len(others) + 1 - len(shift_ns)
        words = [aligned] if len(shift_ns) > 1 else []
        if left:
            which = f"{left} other" if words else f"{left + 1}"
            words.append(f"The clocks of {which} nodes cannot be compared.")
        offset_ns = {
            each.rank: each.unix_offset_ns + shift_ns[each.node]
            for each in ranks
            if each.node in shift_ns
        }
        return CommonClock(offset_ns, " ".join(words))

    def _clock_offsets_ns(self, one: str, other: str, at_ns: int) -> npt.NDArray[np.float64]:
        """Return the offset of the other node's clock, measured at the collectives around this
        time.
        """
        shared = [each for each in self._ends if one in each and other in each]
        shared.sort(key=lambda each: abs(each[one] - at_ns))
        return np.array([each[other] - each[one] for each in shared[:_MAX_ENDS]])


def _collective_ends(
    each: RankRecords, uncomparable: Collection[str]
) -> list[tuple[tuple[str, int], int]]:
    """Return name, sequence number and end of the collectives that end together on all ranks."""
    found = []
    for operation, number, record in each.iterate_collectives():
        if (
            record["flags"] & Flag.COMPLETED
            and operation.group not in uncomparable
            and ends_after_all_started(operation.operation)
        ):
            group = each.groups.get(operation.group)
            name = each.records.names[record["name_id"]]
            key = f"{name} {group['ranks'] if group is not None else ''}"
            found.append(((key, number), int(record["start_ns"] + record["duration_ns"])))
    return found
