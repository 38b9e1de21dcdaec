"""Find slow links by comparing groups, and pairs of ranks, that do the same communication. Pure.

The transfer time of an operation starts when its last rank has arrived, so a slow rank does not
make a link look slow. A group is slow if its transfers take far longer than those of its peers:
groups with the same description, size, number of nodes, operation and similar bytes. Ranks or nodes
that all slow groups have in common are reported. A single group of all ranks has no peers, so a
slow link cannot be distinguished from a slow network.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from msgspec import Struct

from torchlens_perf.analysis.collectives.semantics import (
    WaitRelation,
    bus_bandwidth,
    semantics_of,
)
from torchlens_perf.analysis.collectives.statistics import OperationStatistics
from torchlens_perf.analysis.statistics.robust import robust_standard_deviation
from torchlens_perf.run.grouping import group_values
from torchlens_perf.run.rank_ranges import parse_ranges
from torchlens_perf.run.sketch import Sketch

_T = TypeVar("_T")

# Smallest number of operations that a group needs to be compared.
MIN_OPERATIONS = 32
MIN_PEERS = 2
MIN_RATIO = 1.5
# Smallest excess over the peers' median, as a multiple of the spread of the peers' medians.
SPREAD_FACTOR = 4.0

# Cached, because many rows of a large job have the same ranks.
_members = functools.lru_cache(4096)(parse_ranges)
_ONE_GROUP = (
    "all communication goes through one group: a slow link cannot be distinguished from a slow"
    " network; sub-groups, as in a 2D mesh, or messages between pairs of ranks would show the"
    " difference"
)
_FEW_PEERS = (
    f"no group has {MIN_PEERS} others that do the same: a slow link cannot be distinguished from a"
    " longer path"
)
_FEW_OPERATIONS = f"no group has {MIN_OPERATIONS} joined operations of one kind yet"


@dataclasses.dataclass(frozen=True)
class SlowLink:
    """A group, or a pair of ranks, whose transfers take longer than its peers'.

    Bandwidths are in bytes per second.
    """

    group: str
    description: str
    ranks: tuple[int, ...]
    pair: bool
    """True if `ranks` are a sender and a receiver."""
    operation: str
    dtype: str
    bytes: float
    """Mean size of the operations in bytes."""
    operations: int
    transfer_ns: float
    """Median transfer time."""
    peers_transfer_ns: float
    """Median of the peers' median transfer times."""
    busbw: float | None
    """Bus bandwidth; None for a barrier."""
    peers_busbw: float | None
    peers: int
    excess_ns: float
    """Difference between `transfer_ns` and `peers_transfer_ns`."""
    cost_ns: float
    """Sum of the excess over all operations of the link. It is an upper bound of the lost time,
    because operations may overlap with other work.
    """
    overlapped: bool
    """True for an asynchronous operation: other work may have hidden some of the cost."""


class LinkFindings(Struct, frozen=True):
    """The slow links, most expensive first, and what they have in common."""

    links: tuple[SlowLink, ...]
    shared_ranks: tuple[int, ...]
    """Ranks that all slow links have in common."""
    shared_nodes: tuple[str, ...]
    """Nodes that all slow links have in common, if they have no rank in common."""
    compared: int
    """Number of groups and pairs with enough operations and peers."""
    undecided: str
    """Why no groups could be compared; "" if some could."""


class LinkKey(Struct, array_like=True, frozen=True):
    """One operation on one group or pair, with sizes in one octave (a factor of two)."""

    operation: str
    dtype: str
    group: str
    ranges: str
    """Member ranks of the group, such as "0-7"."""
    description: str
    pair: tuple[int, int] | None
    octave: int

    @property
    def group_or_pair(self) -> tuple[str, str, tuple[int, int] | None]:
        """Identity of the group or pair, without the operation."""
        return self.group, self.ranges, self.pair


class LinkStatistics(Struct, array_like=True, frozen=True):
    """The statistics of one kind of operation on one link that find_slow_links() needs.

    Nodes send these statistics to each other, so they are small. Times are in ns.
    """

    key: LinkKey
    joined: int
    """Number of joined operations."""
    bytes: int
    waits: int
    """Number of waits, whose median is `wait_ns`."""
    wait_ns: float
    transfers: int
    """Number of transfers, whose quartiles are `transfer_ns`."""
    transfer_ns: tuple[float, float, float]
    asynchronous: bool

    @property
    def members(self) -> tuple[int, ...]:
        return self.key.pair or _members(self.key.ranges)

    @property
    def mean_bytes(self) -> float:
        return self.bytes / self.joined if self.joined else 0.0

    @property
    def busbw(self) -> float | None:
        """Bus bandwidth of the median transfer, see bus_bandwidth()."""
        return bus_bandwidth(
            self.key.operation, len(self.members), self.mean_bytes, self.transfer_ns[1]
        )

    def merged_with(self, other: LinkStatistics) -> LinkStatistics:
        """Return these statistics combined with another node's on the same operations."""
        more, waits = max(self, other, key=lambda each: each.joined), self.waits + other.waits
        # Each node's transfer time is an upper bound, so the smaller one is more exact.
        transfer = (
            other if other.transfers and not other.transfer_ns[1] >= self.transfer_ns[1] else self
        )
        return LinkStatistics(
            self.key,
            more.joined,
            more.bytes,
            waits,
            (self.wait_ns * self.waits + other.wait_ns * other.waits) / max(1, waits),
            transfer.transfers,
            transfer.transfer_ns,
            self.asynchronous or other.asynchronous,
        )


def build_link_statistics(operations: Iterable[OperationStatistics]) -> list[LinkStatistics]:
    """Return the statistics of those operations whose transfers can be compared."""
    found = []
    for row in operations:
        key = row.key
        if not key.members or semantics_of(key.operation).waits not in (
            WaitRelation.ALL,
            WaitRelation.PAIR,
        ):
            continue
        group = key.group
        for octave, size in row.sizes.items():
            link = LinkKey(
                key.operation,
                key.dtype,
                group.name,
                group.ranges,
                group.description,
                key.pair,
                octave,
            )
            low_ns, median_ns, high_ns = (_quantile_ns(size.transfer, q) for q in (0.25, 0.5, 0.75))
            wait_ns = _quantile_ns(size.wait, 0.5)
            found.append(
                LinkStatistics(
                    link, size.joined, size.bytes, size.wait.count, wait_ns,
                    size.transfer.count, (low_ns, median_ns, high_ns), row.asynchronous > 0,
                )
            )  # fmt: skip
    return found


def _quantile_ns(sketch: Sketch, q: float) -> float:
    return sketch.quantile_ns(q) if sketch.count else 0.0


def merge_links(nodes: Iterable[Iterable[LinkStatistics]]) -> list[LinkStatistics]:
    """Concatenate the rows of several nodes, and merge rows with the same key."""
    alike = group_values((each.key, each) for each in itertools.chain.from_iterable(nodes))
    return [functools.reduce(LinkStatistics.merged_with, rows) for rows in alike.values()]


def find_slow_links(
    rows: Iterable[LinkStatistics], hosts: Mapping[int, str] | None = None
) -> LinkFindings:
    """Find the slow links.

    rows: rows of all nodes, see merge_links(). hosts: node of each rank. All ranks that are not in
    `hosts` count as being on one node.
    """
    hosts = hosts or {}
    # Rows by the properties that peers must share.
    kinds: dict[tuple[object, ...], list[LinkStatistics]] = {}
    groups, few = set(), False
    for row in rows:
        if row.transfers < MIN_OPERATIONS:
            few = True
            continue
        key, members = row.key, row.members
        nodes = len({hosts.get(rank, "") for rank in members})
        groups.add(key.group_or_pair)
        kind = key.operation, key.dtype, key.description, len(members), nodes, key.octave
        kinds.setdefault(kind, []).append(row)
    compared = [alike for alike in kinds.values() if len(alike) > MIN_PEERS]
    if not compared:
        undecided = (
            _FEW_OPERATIONS
            if few and not groups
            else _ONE_GROUP
            if len(groups) == 1
            else _FEW_PEERS
        )
        return LinkFindings((), (), (), 0, undecided if groups or few else "")
    found: dict[tuple[str, tuple[int, ...]], SlowLink] = {}
    slow: set[LinkKey] = set()
    for alike in compared:
        # This lower bound of the median over any candidate's peers excludes most of the candidates
        # fast, which matters with thousands of groups.
        usual_ns = sorted(each.transfer_ns[1] for each in alike)[len(alike) // 2 - 1]
        for index, each in enumerate(alike):
            if each.transfer_ns[1] < MIN_RATIO * usual_ns:
                continue
            link = _judge_candidate(each, [*alike[:index], *alike[index + 1 :]])
            if link is not None:
                slow.add(each.key)
                known = found.get((link.group, link.ranks))
                if known is not None:
                    cost_ns = known.cost_ns + link.cost_ns
                    link = dataclasses.replace(
                        max(known, link, key=lambda each: each.cost_ns), cost_ns=cost_ns
                    )
                found[link.group, link.ranks] = link
    links = tuple(sorted(found.values(), key=lambda link: -link.cost_ns))
    judged = {each.key.group_or_pair for alike in compared for each in alike}
    alike_slow = [alike for alike in compared if any(each.key in slow for each in alike)]
    peers = [each.members for alike in alike_slow for each in alike if each.key not in slow]
    return LinkFindings(links, *_find_shared_ranks_or_nodes(links, peers, hosts), len(judged), "")


def _judge_candidate(each: LinkStatistics, peers: Sequence[LinkStatistics]) -> SlowLink | None:
    """Return a SlowLink if a link is significantly slower than its peers, else None."""
    low_ns, transfer_ns, _ = each.transfer_ns
    medians = np.array([peer.transfer_ns[1] for peer in peers])
    usual_ns = float(np.median(medians))
    excess_ns = transfer_ns - usual_ns
    # Sizes in an octave differ by up to a factor of two, so the time per byte must exceed that of
    # the peers, too.
    bytes_of_peers = np.array([peer.mean_bytes for peer in peers])
    by_bytes = 1.0
    if each.mean_bytes > 0 and (bytes_of_peers > 0).all():
        by_bytes = (
            float(np.median(medians / bytes_of_peers)) * each.mean_bytes / usual_ns
            if usual_ns
            else 1.0
        )
    if transfer_ns < MIN_RATIO * usual_ns * max(1.0, by_bytes):
        return None
    if excess_ns <= SPREAD_FACTOR * robust_standard_deviation(medians):
        return None
    if low_ns <= np.median([peer.transfer_ns[2] for peer in peers]):
        return None
    # If ranks arrive at different times, the link may not be the cause, because busy ranks may
    # delay the transfer.
    if each.wait_ns > max(
        excess_ns, MIN_RATIO * float(np.median([peer.wait_ns for peer in peers]))
    ):
        return None
    known = [busbw for peer in peers if (busbw := peer.busbw) is not None]
    return SlowLink(
        group=each.key.group,
        description=each.key.description,
        ranks=each.members,
        pair=each.key.pair is not None,
        operation=each.key.operation,
        dtype=each.key.dtype,
        bytes=each.mean_bytes,
        operations=each.joined,
        transfer_ns=transfer_ns,
        peers_transfer_ns=usual_ns,
        busbw=each.busbw,
        peers_busbw=float(np.median(known)) if known else None,
        peers=len(peers),
        excess_ns=excess_ns,
        cost_ns=excess_ns * each.joined,
        overlapped=each.asynchronous,
    )


def _find_shared_ranks_or_nodes(
    links: Sequence[SlowLink],
    peers: Sequence[tuple[int, ...]],
    hosts: Mapping[int, str],
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the ranks, or else the nodes, that only the slow links have in common.

    peers: members of the links of the same kinds that are not slow.
    """
    if len(links) < 2:
        return (), ()
    slow = [link.ranks for link in links]
    ranks = _elements_only_in_slow([set(each) for each in slow], [set(each) for each in peers])
    if ranks:
        return tuple(sorted(ranks)), ()
    nodes = _elements_only_in_slow(
        [_nodes_of_ranks(each, hosts) for each in slow],
        [_nodes_of_ranks(each, hosts) for each in peers],
    )
    return (), tuple(sorted(nodes))


def _nodes_of_ranks(ranks: Iterable[int], hosts: Mapping[int, str]) -> set[str]:
    return {hosts[rank] for rank in ranks if rank in hosts}


def _elements_only_in_slow(slow: list[set[_T]], fast: list[set[_T]]) -> set[_T]:
    """Return the elements that are in every slow set, but not in every fast set."""
    usual = set[_T]().union(*fast[:1]).intersection(*fast)
    return slow[0].intersection(*slow) - usual
