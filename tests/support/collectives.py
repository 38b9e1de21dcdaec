"""Collective records made by hand, as ranks write them into their rings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from torchlens_perf.analysis.collectives.join import CollectiveJoin
from torchlens_perf.run.ring import Flag, Kind, record_dtype

US = 1000


class Issued(NamedTuple):
    """One collective operation of one rank."""

    name: str
    sequence: int
    duration_ns: int
    bytes: int = 1 << 20
    flags: int = int(Flag.COMPLETED)
    start_ns: int = 0


def world(ranks: int) -> dict[str, dict[str, str]]:
    """Return the groups that ranks publish, which is only the default group."""
    return {"0": {"ranks": f"0-{ranks - 1}", "description": "default_pg"}}


def records(
    issued: Sequence[Issued], names: list[str] | None = None
) -> tuple[np.ndarray, list[str]]:
    """Return ring records of the operations and the list of names.

    The function appends new names to `names`.
    """
    names = list(dict.fromkeys([*(names or ["(other)"]), *(each.name for each in issued)]))
    made = np.zeros(len(issued), record_dtype())
    for record, each in zip(made, issued, strict=True):
        record["kind"], record["name_id"], record["flags"] = (
            Kind.COLLECTIVE,
            names.index(each.name),
            each.flags,
        )
        record["duration_ns"], record["nested_ns"] = each.duration_ns, 5 * US
        record["start_ns"] = each.start_ns
        record["value0"], record["value1"] = each.bytes, each.sequence & 0xFFFFFFFF | 7 << 32
    return made, names


def pending_operations(join: CollectiveJoin) -> int:
    """Return the number of operations that still lack the record of a rank."""
    return sum(channel.pending_operations for channel in join._channels)


def joined(
    by_rank: Mapping[int, Sequence[Issued]],
    groups: Mapping[str, Mapping[str, str]] | None = None,
    generation: int = 0,
) -> CollectiveJoin:
    """Return a join that received all records in one round."""
    join = CollectiveJoin()
    add(join, by_rank, groups if groups is not None else world(len(by_rank)), generation)
    return join


def add(
    join: CollectiveJoin,
    by_rank: Mapping[int, Sequence[Issued]],
    groups: Mapping[str, Mapping[str, str]],
    generation: int = 0,
) -> None:
    """Add the new records of all ranks to a join in one round.

    A rank must be given the same list `names` in every round.
    """
    join.set_ranks(by_rank, generation)
    for rank, issued in by_rank.items():
        join.add_records(rank, *records(issued), groups, generation)
    join.join()
