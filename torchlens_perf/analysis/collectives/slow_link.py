"""Which communication link is slow: groups, and pairs of ranks, that do the same are held against each other. Pure.

The transfer is what an operation took once its last rank had come, so that a slow rank does not make it longer. A group
is slow when its transfers take far longer than those of its peers: groups of the same description, size and number of
nodes, in the same operation with similar bytes. Where slow groups have a rank or a node in common, that is named. One
group of all ranks has no peers: there a slow link cannot be distinguished from a slow network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec import Struct

from torchlens_perf.analysis.collectives.semantics import OperationKey, Waits, semantics_of
from torchlens_perf.analysis.collectives.statistics import OperationStatistics, SizeStatistics
from torchlens_perf.analysis.statistics.robust import spread

_T = TypeVar("_T")

MIN_OPERATIONS = 32  # of a group that is judged, and of each peer
MIN_PEERS = 2
MIN_RATIO = 1.5
SPREAD_FACTOR = 4.0  # times the spread of the peers' medians

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


class _Kind(NamedTuple):
    """What peers have in common."""

    operation: str
    dtype: str
    description: str
    ranks: int
    nodes: int
    octave: int


@dataclasses.dataclass(frozen=True)
class _Candidate:
    row: OperationStatistics
    size: SizeStatistics
    transfer_ns: float
    slow: bool = False

    @property
    def key(self) -> OperationKey:
        return self.row.key


def slow_links(operations: Iterable[OperationStatistics], hosts: Mapping[int, str] | None = None) -> LinkFindings:
    """The links that are slow.

    operations: those of all nodes, merged_operations(). hosts: by rank, the node that it is on; for those that are not
    there, all groups are taken to span as many nodes.
    """
    hosts = hosts or {}
    kinds: dict[_Kind, list[_Candidate]] = {}
    groups, few = set(), False
    for row in operations:
        if not row.key.members or semantics_of(row.key.operation).waits not in (Waits.ALL, Waits.PAIR):
            continue
        for octave, size in row.sizes.items():
            if size.transfer.count < MIN_OPERATIONS:
                few = True
                continue
            key, nodes = row.key, len({hosts.get(rank, "") for rank in row.key.members})
            kind = _Kind(key.operation, key.dtype, key.group.description, len(key.members), nodes, octave)
            groups.add((key.group, key.pair))
            kinds.setdefault(kind, []).append(_Candidate(row, size, size.transfer.quantile_ns(0.5)))
    compared = [alike for alike in kinds.values() if len(alike) > MIN_PEERS]
    if not compared:
        undecided = _FEW_OPERATIONS if few and not groups else _ONE_GROUP if len(groups) == 1 else _FEW_PEERS
        return LinkFindings((), (), (), 0, undecided if groups or few else "")
    found: dict[tuple[str, tuple[int, ...]], SlowLink] = {}
    for alike in compared:
        for index, each in enumerate(alike):
            link = _judge(each, [*alike[:index], *alike[index + 1 :]])
            if link is not None:
                alike[index] = dataclasses.replace(each, slow=True)
                known = found.get((link.group, link.ranks))
                if known is not None:
                    cost_ns = known.cost_ns + link.cost_ns
                    link = dataclasses.replace(max(known, link, key=lambda each: each.cost_ns), cost_ns=cost_ns)
                found[link.group, link.ranks] = link
    links = tuple(sorted(found.values(), key=lambda link: -link.cost_ns))
    judged = {(each.key.group, each.key.pair) for alike in compared for each in alike}
    return LinkFindings(links, *_shared(links, compared, hosts), len(judged), "")


def _judge(each: _Candidate, peers: Sequence[_Candidate]) -> SlowLink | None:
    """The candidate as a slow link, if it is slower than its peers by more than they and it vary."""
    medians = np.array([peer.transfer_ns for peer in peers])
    usual_ns = float(np.median(medians))
    excess_ns = each.transfer_ns - usual_ns
    # Sizes of one octave differ by up to a factor of two: it must be slow by the byte as well.
    bytes_of_peers = np.array([peer.size.mean_bytes for peer in peers])
    by_bytes = 1.0
    if each.size.mean_bytes > 0 and (bytes_of_peers > 0).all():
        by_bytes = float(np.median(medians / bytes_of_peers)) * each.size.mean_bytes / usual_ns if usual_ns else 1.0
    if each.transfer_ns < MIN_RATIO * usual_ns * max(1.0, by_bytes):
        return None
    if excess_ns <= SPREAD_FACTOR * spread(medians):
        return None
    if each.size.transfer.quantile_ns(0.25) <= np.median([peer.size.transfer.quantile_ns(0.75) for peer in peers]):
        return None
    # Ranks that do not come together are another finding, and may be too busy to carry the transfer on.
    waits = [peer.size.wait.quantile_ns(0.5) for peer in peers]
    if each.size.wait.quantile_ns(0.5) > max(excess_ns, MIN_RATIO * float(np.median(waits))):
        return None
    bandwidths = [peer.row.bandwidth(peer.size) for peer in peers]
    known = [bandwidth[1] for bandwidth in bandwidths if bandwidth is not None]
    mine = each.row.bandwidth(each.size)
    key = each.key
    return SlowLink(
        group=key.group.name,
        description=key.group.description,
        ranks=key.members,
        pair=key.pair is not None,
        operation=key.operation,
        dtype=key.dtype,
        bytes=each.size.mean_bytes,
        operations=each.size.joined,
        transfer_ns=each.transfer_ns,
        peers_transfer_ns=usual_ns,
        busbw=None if mine is None else mine[1],
        peers_busbw=float(np.median(known)) if known else None,
        peers=len(peers),
        excess_ns=excess_ns,
        cost_ns=excess_ns * each.size.joined,
        overlapped=each.row.asynchronous > 0,
    )


def _shared(
    links: Sequence[SlowLink], compared: Sequence[Sequence[_Candidate]], hosts: Mapping[int, str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Ranks, else nodes, that all of several slow links have in common, but not all of their other peers too."""
    if len(links) < 2:
        return (), ()
    with_slow = [alike for alike in compared if any(each.slow for each in alike)]
    peers = [each.key.members for alike in with_slow for each in alike if not each.slow]
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
