"""Which communication link is slow: groups, and pairs of ranks, that do the same are held against each other. Pure.

The transfer is what an operation took once its last rank had come, so that a slow rank does not make it longer. A group
is slow when its transfers take far longer than those of its peers: groups of the same description, size and number of
nodes, in the same operation with similar bytes. Where slow groups have a rank or a node in common, that is named. One
group of all ranks has no peers: there a slow link cannot be distinguished from a slow network.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from msgspec import Struct

from torchlens_perf.analysis.collectives.semantics import Waits, bus_factor, semantics_of
from torchlens_perf.analysis.collectives.statistics import OperationStatistics
from torchlens_perf.analysis.statistics.robust import spread
from torchlens_perf.run.rank_ranges import parse_ranges
from torchlens_perf.run.sketch import Sketch

_T = TypeVar("_T")

MIN_OPERATIONS = 32  # of a group that is judged, and of each peer
MIN_PEERS = 2
MIN_RATIO = 1.5
SPREAD_FACTOR = 4.0  # times the spread of the peers' medians

_members = functools.lru_cache(4096)(parse_ranges)  # a large job has many rows of few groups
_ONE_GROUP = (
    "all communication goes through one group: a slow link cannot be distinguished from a slow network; "
    "sub-groups, as in a 2D mesh, or messages between pairs of ranks would show the difference"
)
_FEW_PEERS = f"no group has {MIN_PEERS} others that do the same: a slow link cannot be distinguished from a longer path"
_FEW_OPERATIONS = f"no group has {MIN_OPERATIONS} joined operations of one kind yet"


@dataclasses.dataclass(frozen=True)
class SlowLink:
    """A group, or a pair of ranks, whose transfers take longer than its peers'. Bandwidths in bytes per second."""

    group: str
    description: str
    ranks: tuple[int, ...]
    pair: bool
    """Whether `ranks` are a sender and a receiver."""
    operation: str
    dtype: str
    bytes: float
    """Mean size of one operation."""
    operations: int
    transfer_ns: float
    """Median."""
    peers_transfer_ns: float
    """Median of the peers' medians."""
    busbw: float | None
    """None for a barrier."""
    peers_busbw: float | None
    peers: int
    excess_ns: float
    """What an operation takes longer than its peers'."""
    cost_ns: float
    """The excess of all of the group's slow operations: at most what the job lost, where they were not overlapped."""
    overlapped: bool
    """Whether the operation was asynchronous, so that some of that was hidden."""


class LinkFindings(Struct, frozen=True):
    """The slow links, the costliest first, and what they have in common."""

    links: tuple[SlowLink, ...]
    shared_ranks: tuple[int, ...]
    """Ranks that all of several slow links have in common."""
    shared_nodes: tuple[str, ...]
    """Nodes that all of several slow links reach, if they have no rank in common."""
    compared: int
    """Groups and pairs that had enough operations and peers."""
    undecided: str
    """Why nothing could be compared; "" if something was."""


class LinkKey(Struct, array_like=True, frozen=True):
    """One operation on one group, or between a pair of ranks, with sizes in one octave."""

    operation: str
    dtype: str
    group: str
    ranges: str
    """The group's members, as "0-7"."""
    description: str
    pair: tuple[int, int] | None
    octave: int

    @property
    def place(self) -> tuple[str, str, tuple[int, int] | None]:
        """The group or the pair."""
        return self.group, self.ranges, self.pair


class LinkStatistics(Struct, array_like=True, frozen=True):
    """What the judgement needs of a row of the join: small, so that nodes can report it. Times in ns."""

    key: LinkKey
    joined: int
    """Operations."""
    bytes: int
    waits: int
    """Number of waits, of which `wait_ns` is the median."""
    wait_ns: float
    transfers: int
    """Number of transfers, of which these are the quartiles."""
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
        """In bytes per second, from the median transfer; None if nothing moves."""
        factor, median_ns = bus_factor(self.key.operation, len(self.members)), self.transfer_ns[1]
        if factor is None or not self.bytes or not median_ns > 0:
            return None
        return self.mean_bytes / median_ns * 1e9 * factor

    def merged(self, other: LinkStatistics) -> LinkStatistics:
        """With what another node saw of the same operations, through its own ranks."""
        more, waits = max(self, other, key=lambda each: each.joined), self.waits + other.waits
        # Each node's shortest is at least the transfer: the smaller one is nearer to it.
        transfer = other if other.transfers and not other.transfer_ns[1] >= self.transfer_ns[1] else self
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


def link_statistics(operations: Iterable[OperationStatistics]) -> list[LinkStatistics]:
    """Those of the operations whose transfers can be compared."""
    found = []
    for row in operations:
        key = row.key
        if not key.members or semantics_of(key.operation).waits not in (Waits.ALL, Waits.PAIR):
            continue
        group = key.group
        for octave, size in row.sizes.items():
            link = LinkKey(key.operation, key.dtype, group.name, group.ranges, group.description, key.pair, octave)
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


def merged_links(nodes: Iterable[Iterable[LinkStatistics]]) -> list[LinkStatistics]:
    """The rows of several nodes as one list; those of one group that spans nodes become one."""
    found: dict[LinkKey, LinkStatistics] = {}
    for node in nodes:
        for each in node:
            known = found.get(each.key)
            found[each.key] = each if known is None else known.merged(each)
    return list(found.values())


@dataclasses.dataclass
class _Candidate:
    row: LinkStatistics
    members: tuple[int, ...]
    slow: bool = False


def slow_links(rows: Iterable[LinkStatistics], hosts: Mapping[int, str] | None = None) -> LinkFindings:
    """The links that are slow.

    rows: those of all nodes, merged_links(). hosts: by rank, the node that it is on; for those that are not there, all
    groups are taken to span as many nodes.
    """
    hosts = hosts or {}
    kinds: dict[tuple[object, ...], list[_Candidate]] = {}  # by what peers have in common
    groups, few = set(), False
    for row in rows:
        if row.transfers < MIN_OPERATIONS:
            few = True
            continue
        key, members = row.key, row.members
        nodes = len({hosts.get(rank, "") for rank in members})
        groups.add(key.place)
        kind = key.operation, key.dtype, key.description, len(members), nodes, key.octave
        kinds.setdefault(kind, []).append(_Candidate(row, members))
    compared = [alike for alike in kinds.values() if len(alike) > MIN_PEERS]
    if not compared:
        undecided = _FEW_OPERATIONS if few and not groups else _ONE_GROUP if len(groups) == 1 else _FEW_PEERS
        return LinkFindings((), (), (), 0, undecided if groups or few else "")
    found: dict[tuple[str, tuple[int, ...]], SlowLink] = {}
    for alike in compared:
        # The median of any candidate's peers is at least this: of thousands of groups, most are ruled out by it.
        usual_ns = sorted(each.row.transfer_ns[1] for each in alike)[len(alike) // 2 - 1]
        for index, each in enumerate(alike):
            if each.row.transfer_ns[1] < MIN_RATIO * usual_ns:
                continue
            link = _judge(each, [peer.row for peer in (*alike[:index], *alike[index + 1 :])])
            if link is not None:
                each.slow = True
                known = found.get((link.group, link.ranks))
                if known is not None:
                    cost_ns = known.cost_ns + link.cost_ns
                    link = dataclasses.replace(max(known, link, key=lambda each: each.cost_ns), cost_ns=cost_ns)
                found[link.group, link.ranks] = link
    links = tuple(sorted(found.values(), key=lambda link: -link.cost_ns))
    judged = {each.row.key.place for alike in compared for each in alike}
    return LinkFindings(links, *_shared(links, compared, hosts), len(judged), "")


def _judge(candidate: _Candidate, peers: Sequence[LinkStatistics]) -> SlowLink | None:
    """The candidate as a slow link, if it is slower than its peers by more than they and it vary."""
    each = candidate.row
    low_ns, transfer_ns, _ = each.transfer_ns
    medians = np.array([peer.transfer_ns[1] for peer in peers])
    usual_ns = float(np.median(medians))
    excess_ns = transfer_ns - usual_ns
    # Sizes of one octave differ by up to a factor of two: it must be slow by the byte as well.
    bytes_of_peers = np.array([peer.mean_bytes for peer in peers])
    by_bytes = 1.0
    if each.mean_bytes > 0 and (bytes_of_peers > 0).all():
        by_bytes = float(np.median(medians / bytes_of_peers)) * each.mean_bytes / usual_ns if usual_ns else 1.0
    if transfer_ns < MIN_RATIO * usual_ns * max(1.0, by_bytes):
        return None
    if excess_ns <= SPREAD_FACTOR * spread(medians):
        return None
    if low_ns <= np.median([peer.transfer_ns[2] for peer in peers]):
        return None
    # Ranks that do not come together are another finding, and may be too busy to carry the transfer on.
    if each.wait_ns > max(excess_ns, MIN_RATIO * float(np.median([peer.wait_ns for peer in peers]))):
        return None
    known = [busbw for peer in peers if (busbw := peer.busbw) is not None]
    return SlowLink(
        group=each.key.group,
        description=each.key.description,
        ranks=candidate.members,
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


def _shared(
    links: Sequence[SlowLink], compared: Sequence[Sequence[_Candidate]], hosts: Mapping[int, str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Ranks, else nodes, that all of several slow links have in common, but not all of their other peers too."""
    if len(links) < 2:
        return (), ()
    with_slow = [alike for alike in compared if any(each.slow for each in alike)]
    peers = [each.members for alike in with_slow for each in alike if not each.slow]
    slow = [link.ranks for link in links]
    ranks = _common([set(each) for each in slow], [set(each) for each in peers])
    if ranks:
        return tuple(sorted(ranks)), ()
    nodes = _common([_nodes(each, hosts) for each in slow], [_nodes(each, hosts) for each in peers])
    return (), tuple(sorted(nodes))


def _nodes(ranks: Iterable[int], hosts: Mapping[int, str]) -> set[str]:
    return {hosts[rank] for rank in ranks if rank in hosts}


def _common(slow: list[set[_T]], fast: list[set[_T]]) -> set[_T]:
    """What is in all slow ones, and not in all others too."""
    usual = set[_T]().union(*fast[:1]).intersection(*fast)
    return slow[0].intersection(*slow) - usual
