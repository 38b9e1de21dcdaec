"""Naming a slow link among groups that do the same: planted ones are found, and clean jobs have none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from tests.support.collectives import US, Issued, joined
from tests.support.saved import saved
from torchlens_perf.analysis.collectives.slow_link import (
    MIN_OPERATIONS,
    LinkStatistics,
    SlowLink,
    link_statistics,
    slow_links,
)
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.words.verdict import slow_link_text

TRANSFER_US = 400
SEEDS = 40
# Ranks of a 4 x 4 mesh: rows are tensor-parallel groups on one node, columns data-parallel ones across the nodes.
ROWS = [tuple(range(4 * row, 4 * row + 4)) for row in range(4)]
COLUMNS = [tuple(range(column, 16, 4)) for column in range(4)]
HOSTS = {rank: f"node{rank // 4}" for rank in range(16)}


def job(
    groups: Mapping[str, Sequence[tuple[int, ...]]],
    slow: Mapping[tuple[int, ...], float] | None = None,
    *,
    operations: int = 100,
    noise: float = 0.15,
    seed: int = 0,
    late: int | None = None,
    sizes: Mapping[tuple[int, ...], int] | None = None,
    flags: int = int(Flag.COMPLETED),
) -> list[LinkStatistics]:
    """All-reduces on each group, by description. slow: by group, the factor on its transfers. late: that rank comes
    last everywhere, so that its groups wait for it."""
    random = np.random.default_rng(seed)
    by_rank: dict[int, list[Issued]] = {}
    published = {}
    names = iter(range(1, 1000))
    for description, alike in groups.items():
        for members in alike:
            name = str(next(names))
            size = (sizes or {}).get(members, 1_000_000)
            published[name] = {"ranks": ",".join(map(str, members)), "description": description}
            for sequence in range(operations):
                transfer = TRANSFER_US * (slow or {}).get(members, 1.0) * size / 1e6 * random.lognormal(0, noise)
                early = random.exponential(0.1 * TRANSFER_US, len(members)) + 5 * TRANSFER_US * (late in members)
                early[members.index(late) if late in members else early.argmin()] = 0
                for rank, wait in zip(members, early.tolist(), strict=True):
                    duration_ns = round(US * (transfer + wait))
                    issued = Issued(f"allreduce group={name} dtype=float32", sequence, duration_ns, size, flags)
                    by_rank.setdefault(rank, []).append(issued)
    return link_statistics(joined(by_rank, published).operations())


@pytest.mark.parametrize("seed", range(8))
def test_slow_group(seed: int) -> None:
    """One column of the mesh at half its bandwidth is named, with both bandwidths and what it costs."""
    found = slow_links(job({"mesh_tp": ROWS, "mesh_dp": COLUMNS}, {COLUMNS[2]: 2.0}, seed=seed), HOSTS)

    (link,) = found.links
    assert (link.ranks, link.description, link.operation, link.pair) == (COLUMNS[2], "mesh_dp", "allreduce", False)
    usual = 1.5 * 1_000_000 / (TRANSFER_US * 1e-6)
    assert link.peers_busbw == pytest.approx(usual, rel=0.15)
    assert link.busbw == pytest.approx(usual / 2, rel=0.15)
    assert link.excess_ns == pytest.approx(TRANSFER_US * US, rel=0.3)
    assert link.cost_ns == pytest.approx(100 * link.excess_ns)
    assert (found.compared, found.shared_ranks, found.undecided) == (8, (), "")


def test_clean_jobs() -> None:
    """Over many seeds, few and many operations, and noise that is larger than usual, nobody is named."""
    for seed in range(SEEDS):
        for noise, operations in ((0.05, MIN_OPERATIONS), (0.3, 40), (0.6, MIN_OPERATIONS)):
            rows = job({"mesh_tp": ROWS, "mesh_dp": COLUMNS}, seed=seed, noise=noise, operations=operations)
            found = slow_links(rows, HOSTS)

            assert found.links == (), (seed, noise)
            assert found.compared == 8


@pytest.mark.parametrize("seed", range(8))
def test_rank_that_all_slow_groups_have(seed: int) -> None:
    """A row and a column are slow: what they share is one rank."""
    found = slow_links(job({"mesh_tp": ROWS, "mesh_dp": COLUMNS}, {ROWS[1]: 2.5, COLUMNS[2]: 2.5}, seed=seed), HOSTS)

    assert {link.ranks for link in found.links} == {ROWS[1], COLUMNS[2]}
    assert found.shared_ranks == (6,)
    assert "all of them have rank 6" in slow_link_text(found)


def test_node_that_all_slow_groups_reach() -> None:
    """Pairs between nodes, slow wherever one node is: that node is named."""
    pairs = [(a, b) for a in range(16) for b in (a + 4, a + 8) if b < 16]
    slow = {pair: 3.0 for pair in pairs if any(HOSTS[rank] == "node1" for rank in pair)}
    found = slow_links(job({"mesh_dp": pairs}, dict(list(slow.items())[:8])), HOSTS)

    assert len(found.links) == 8
    assert (found.shared_ranks, found.shared_nodes) == ((), ("node1",))


def test_what_all_groups_have_is_not_named() -> None:
    """Where every group reaches both nodes, that slow ones do is no news."""
    pairs = [(rank, rank + 4) for rank in range(4)] + [(rank, 4 + (rank + 1) % 4) for rank in range(4)]
    found = slow_links(job({"x": pairs}, {pairs[0]: 3.0, pairs[2]: 3.0}), HOSTS)

    assert len(found.links) == 2
    assert (found.shared_ranks, found.shared_nodes) == ((), ())


def test_peers_that_differ_anyway() -> None:
    """Where groups that do the same have bandwidths far apart, one more is no outlier."""
    factors = dict(zip(COLUMNS, (0.6, 1.0, 1.5, 2.3), strict=True))

    assert slow_links(job({"x": COLUMNS}, factors, noise=0.02), HOSTS).links == ()
    assert slow_links(job({"x": COLUMNS}, {COLUMNS[3]: 2.3}, noise=0.02), HOSTS).links


def messages(slow: Mapping[tuple[int, int], float], ranks: int = 6) -> list[LinkStatistics]:
    """Each rank of a pipeline sends to the next one, by rendezvous."""
    random = np.random.default_rng(0)
    by_rank: dict[int, list[Issued]] = {rank: [] for rank in range(ranks)}
    for sender in range(ranks - 1):
        for sequence in range(60):
            us = 200 * slow.get((sender, sender + 1), 1.0) * random.lognormal(0, 0.1)
            for rank, text in ((sender, f"send group=0 dtype=int8 peer={sender + 1}"),
                               (sender + 1, f"recv group=0 dtype=int8 peer={sender}")):  # fmt: skip
                by_rank[rank].append(Issued(text, sequence, round(us * US * random.uniform(1, 1.1))))
    return link_statistics(joined(by_rank).operations())


def test_slow_pair() -> None:
    """Among the messages of a pipeline, the slow link is named by its two ranks, in their direction."""
    (link,) = slow_links(messages({(2, 3): 2.0})).links

    assert (link.ranks, link.pair, link.peers) == ((2, 3), True, 4)
    assert link.busbw is not None
    assert link.peers_busbw == pytest.approx(2 * link.busbw, rel=0.2)


def test_slow_pairs_share_a_rank() -> None:
    """To and from one rank: it is the rank, not two links."""
    assert slow_links(messages({(2, 3): 2.5, (3, 4): 2.5}, ranks=8)).shared_ranks == (3,)


def test_late_rank_is_no_slow_link() -> None:
    """Groups that wait for a slow rank have long operations and usual transfers."""
    for seed in range(8):
        assert slow_links(job({"mesh_tp": ROWS, "mesh_dp": COLUMNS}, late=6, seed=seed), HOSTS).links == ()


def test_ranks_that_do_not_come_together() -> None:
    """A longer transfer in a group whose ranks come far apart is not put down to its link."""
    rows = {"mesh_dp": COLUMNS}
    assert slow_links(job(rows, {COLUMNS[2]: 2.0}), HOSTS).links
    assert slow_links(job(rows, {COLUMNS[2]: 2.0}, late=6), HOSTS).links == ()


def test_more_bytes_are_no_slow_link() -> None:
    """Within one octave of sizes, the group with more to move takes longer, and is not slow."""
    sizes = {columns: 1_050_000 if columns != COLUMNS[2] else 2_000_000 for columns in COLUMNS}

    assert slow_links(job({"mesh_dp": COLUMNS}, sizes=sizes), HOSTS).links == ()
    assert slow_links(job({"mesh_dp": COLUMNS}, {COLUMNS[2]: 2.0}, sizes=sizes), HOSTS).links


def test_groups_across_nodes_are_no_peers_of_those_within() -> None:
    """Between nodes the way is longer: that is no fault."""
    groups = [*ROWS, COLUMNS[0]]

    assert slow_links(job({"x": groups}, {COLUMNS[0]: 3.0}), HOSTS).links == ()
    assert slow_links(job({"x": groups}, {COLUMNS[0]: 3.0})).links  # as nothing is known of nodes


def test_nothing_to_compare_with_is_said() -> None:
    """One group of all, two alike, too few operations: each is said, and nothing is said where there is nothing."""
    one = slow_links(job({"default_pg": [tuple(range(8))]}, {tuple(range(8)): 9.0}))
    assert (one.links, one.compared) == ((), 0)
    assert "cannot be distinguished from a slow network" in one.undecided
    assert "no group has 2 others" in slow_links(job({"x": ROWS[:2]}, {ROWS[0]: 9.0})).undecided
    assert "operations of one kind yet" in slow_links(job({"x": ROWS}, operations=MIN_OPERATIONS - 1)).undecided
    assert slow_links([]).undecided == ""


def test_findings_survive_json() -> None:
    """As everything that nodes keep."""
    found = slow_links(job({"mesh_dp": COLUMNS}, {COLUMNS[1]: 3.0}), HOSTS)

    assert saved(found) == found
    assert isinstance(found.links[0], SlowLink)


def test_words() -> None:
    """The verdict says which link, how slow against whom, and what it cost; "at most" where it was overlapped."""
    found = slow_links(job({"mesh_dp": COLUMNS}, {COLUMNS[1]: 3.0}, noise=0.01), HOSTS)
    text = slow_link_text(found)
    assert text.startswith("the communication of ranks 1-13/4 is slow: allreduce of 1.0 MB takes 1.2")
    assert "on its 3 peers" in text
    assert "at most" not in text

    flags = int(Flag.COMPLETED | Flag.ASYNC)
    assert "cost at most" in slow_link_text(slow_links(job({"x": COLUMNS}, {COLUMNS[1]: 3.0}, flags=flags), HOSTS))
    assert "the link from rank 2 to 3" in slow_link_text(slow_links(messages({(2, 3): 2.0})))
