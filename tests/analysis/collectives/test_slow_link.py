"""Finding a slow link in simulated jobs by comparison of similar groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from tests.support.collectives import US, Issued, joined
from tests.support.long import long
from tests.support.saved import save_and_load
from torchlens_perf.analysis.collectives.slow_link import (
    MIN_OPERATIONS,
    LinkStatistics,
    SlowLink,
    build_link_statistics,
    find_slow_links,
)
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.slow_links import describe_slow_links

TRANSFER_US = 400
# Ranks of a 4 x 4 mesh: rows are tensor-parallel groups on one node, columns data-parallel groups
# across nodes.
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
    """Return statistics of all-reduces on the given groups, which are listed by their description.

    `slow` maps a group to a factor on its transfer times. `late` is a rank that arrives last
    everywhere, so that its groups wait for it.
    """
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
                transfer = (
                    TRANSFER_US
                    * (slow or {}).get(members, 1.0)
                    * size
                    / 1e6
                    * random.lognormal(0, noise)
                )
                early = random.exponential(0.1 * TRANSFER_US, len(members)) + 5 * TRANSFER_US * (
                    late in members
                )
                early[members.index(late) if late in members else early.argmin()] = 0
                for rank, wait in zip(members, early.tolist(), strict=True):
                    duration_ns = round(US * (transfer + wait))
                    issued = Issued(
                        f"allreduce group={name} dtype=float32", sequence, duration_ns, size, flags
                    )
                    by_rank.setdefault(rank, []).append(issued)
    return build_link_statistics(joined(by_rank, published).operations())


@pytest.mark.parametrize("seed", range(8))
def test_slow_group_is_found_with_its_bandwidth_and_cost(seed: int) -> None:
    """One column of the mesh has half of the bandwidth of others. Both bandwidths are reported."""
    found = find_slow_links(
        job({"mesh_tp": ROWS, "mesh_dp": COLUMNS}, {COLUMNS[2]: 2.0}, seed=seed), HOSTS
    )

    (link,) = found.links
    assert (link.ranks, link.description, link.operation, link.pair) == (
        COLUMNS[2],
        "mesh_dp",
        "allreduce",
        False,
    )
    usual = 1.5 * 1_000_000 / (TRANSFER_US * 1e-6)
    assert link.peers_busbw == pytest.approx(usual, rel=0.15)
    assert link.busbw == pytest.approx(usual / 2, rel=0.15)
    assert link.excess_ns == pytest.approx(TRANSFER_US * US, rel=0.3)
    assert link.cost_ns == pytest.approx(100 * link.excess_ns)
    assert (found.compared, found.shared_ranks, found.undecided) == (8, (), "")


@pytest.mark.parametrize("seeds", [2, *long(40)])
def test_healthy_job_has_no_slow_link(seeds: int) -> None:
    """The jobs differ in seeds, number of operations and noise, which may be larger than usual."""
    for seed in range(seeds):
        for noise, operations in ((0.05, MIN_OPERATIONS), (0.3, 40), (0.6, MIN_OPERATIONS)):
            rows = job(
                {"mesh_tp": ROWS, "mesh_dp": COLUMNS}, seed=seed, noise=noise, operations=operations
            )
            found = find_slow_links(rows, HOSTS)

            assert found.links == (), (seed, noise)
            assert found.compared == 8


@pytest.mark.parametrize("seed", range(8))
def test_rank_common_to_all_slow_groups_is_blamed(seed: int) -> None:
    """A row and a column of the mesh are slow and have one rank in common."""
    found = find_slow_links(
        job({"mesh_tp": ROWS, "mesh_dp": COLUMNS}, {ROWS[1]: 2.5, COLUMNS[2]: 2.5}, seed=seed),
        HOSTS,
    )

    assert {link.ranks for link in found.links} == {ROWS[1], COLUMNS[2]}
    assert found.shared_ranks == (6,)
    assert "all of them involve rank 6" in describe_slow_links(found)[1]


def test_node_common_to_all_slow_groups_is_blamed() -> None:
    """Pairs of nodes are slow if they include one node."""
    pairs = [(a, b) for a in range(16) for b in (a + 4, a + 8) if b < 16]
    slow = {pair: 3.0 for pair in pairs if any(HOSTS[rank] == "node1" for rank in pair)}
    found = find_slow_links(job({"mesh_dp": pairs}, dict(list(slow.items())[:8])), HOSTS)

    assert len(found.links) == 8
    assert (found.shared_ranks, found.shared_nodes) == ((), ("node1",))


def test_nodes_common_to_all_groups_are_not_blamed() -> None:
    """Nodes that all slow groups have in common are also used by fast groups."""
    pairs = [(rank, rank + 4) for rank in range(4)] + [
        (rank, 4 + (rank + 1) % 4) for rank in range(4)
    ]
    found = find_slow_links(job({"x": pairs}, {pairs[0]: 3.0, pairs[2]: 3.0}), HOSTS)

    assert len(found.links) == 2
    assert (found.shared_ranks, found.shared_nodes) == ((), ())


def test_no_slow_link_is_found_if_peer_bandwidths_differ_a_lot() -> None:
    """Among very different bandwidths, a low one is no outlier."""
    factors = dict(zip(COLUMNS, (0.6, 1.0, 1.5, 2.3), strict=True))

    assert find_slow_links(job({"x": COLUMNS}, factors, noise=0.02), HOSTS).links == ()
    assert find_slow_links(job({"x": COLUMNS}, {COLUMNS[3]: 2.3}, noise=0.02), HOSTS).links


def messages(slow: Mapping[tuple[int, int], float], ranks: int = 6) -> list[LinkStatistics]:
    """Return sends of each pipeline rank to the next one, which last as long as their receives."""
    random = np.random.default_rng(0)
    by_rank: dict[int, list[Issued]] = {rank: [] for rank in range(ranks)}
    for sender in range(ranks - 1):
        for sequence in range(60):
            us = 200 * slow.get((sender, sender + 1), 1.0) * random.lognormal(0, 0.1)
            for rank, text in ((sender, f"send group=0 dtype=int8 peer={sender + 1}"),
                               (sender + 1, f"recv group=0 dtype=int8 peer={sender}")):  # fmt: skip
                by_rank[rank].append(
                    Issued(text, sequence, round(us * US * random.uniform(1, 1.1)))
                )
    return build_link_statistics(joined(by_rank).operations())


def test_slow_link_of_a_pipeline_is_found_with_its_direction() -> None:
    """The link is described by its sender and its receiver."""
    (link,) = find_slow_links(messages({(2, 3): 2.0})).links

    assert (link.ranks, link.pair, link.peers) == ((2, 3), True, 4)
    assert link.busbw is not None
    assert link.peers_busbw == pytest.approx(2 * link.busbw, rel=0.2)


def test_rank_common_to_slow_messages_is_blamed() -> None:
    """Slow messages to and from one rank point to the rank, not to two links."""
    assert find_slow_links(messages({(2, 3): 2.5, (3, 4): 2.5}, ranks=8)).shared_ranks == (3,)


def test_group_that_waits_for_a_late_rank_is_no_slow_link() -> None:
    """The group's operations are long, but its transfers are as short as usual."""
    for seed in range(8):
        assert (
            find_slow_links(
                job({"mesh_tp": ROWS, "mesh_dp": COLUMNS}, late=6, seed=seed), HOSTS
            ).links
            == ()
        )


def test_group_whose_ranks_arrive_apart_is_no_slow_link() -> None:
    """If a group's ranks arrive at very different times, its link is not the reason for a longer
    transfer.
    """
    rows = {"mesh_dp": COLUMNS}
    assert find_slow_links(job(rows, {COLUMNS[2]: 2.0}), HOSTS).links
    assert find_slow_links(job(rows, {COLUMNS[2]: 2.0}, late=6), HOSTS).links == ()


def test_group_with_more_bytes_in_the_same_size_class_is_no_slow_link() -> None:
    """Sizes in one class differ by up to a factor of two."""
    sizes = {columns: 1_050_000 if columns != COLUMNS[2] else 2_000_000 for columns in COLUMNS}

    assert find_slow_links(job({"mesh_dp": COLUMNS}, sizes=sizes), HOSTS).links == ()
    assert find_slow_links(job({"mesh_dp": COLUMNS}, {COLUMNS[2]: 2.0}, sizes=sizes), HOSTS).links


def test_groups_across_nodes_are_not_compared_with_groups_within_nodes() -> None:
    """Transfers between nodes normally take longer."""
    groups = [*ROWS, COLUMNS[0]]

    assert find_slow_links(job({"x": groups}, {COLUMNS[0]: 3.0}), HOSTS).links == ()
    # If the nodes are unknown, the groups are compared.
    assert find_slow_links(job({"x": groups}, {COLUMNS[0]: 3.0})).links


def test_missing_comparison_of_links_is_explained() -> None:
    """No link is judged for one group of all ranks, two similar groups, or too few operations."""
    one = find_slow_links(job({"default_pg": [tuple(range(8))]}, {tuple(range(8)): 9.0}))
    assert (one.links, one.compared) == ((), 0)
    assert "cannot be distinguished from a slow network" in one.undecided
    assert (
        "no group has 2 others" in find_slow_links(job({"x": ROWS[:2]}, {ROWS[0]: 9.0})).undecided
    )
    assert (
        "operations of one kind yet"
        in find_slow_links(job({"x": ROWS}, operations=MIN_OPERATIONS - 1)).undecided
    )
    assert find_slow_links([]).undecided == ""


def test_slow_links_are_unchanged_by_a_json_round_trip() -> None:
    found = find_slow_links(job({"mesh_dp": COLUMNS}, {COLUMNS[1]: 3.0}), HOSTS)

    assert save_and_load(found) == found
    assert isinstance(found.links[0], SlowLink)


def test_text_of_a_slow_link_has_bandwidths_and_cost() -> None:
    """The text has the link, its bandwidth, its peers' bandwidth, and the cost ("at most" if
    communication was overlapped).
    """
    found = find_slow_links(job({"mesh_dp": COLUMNS}, {COLUMNS[1]: 3.0}, noise=0.01), HOSTS)
    text, _ = describe_slow_links(found)
    assert text.startswith("Communication of ranks 1,5,9,13 is slow: allreduce of 1.0 MB takes 1.2")
    assert "in 3 other groups of this kind" in text
    assert "at most" not in text

    flags = int(Flag.COMPLETED | Flag.ASYNC)
    by_wait = find_slow_links(job({"x": COLUMNS}, {COLUMNS[1]: 3.0}, flags=flags), HOSTS)
    assert "cost the job at most" in describe_slow_links(by_wait)[0]
    between_two = find_slow_links(messages({(2, 3): 2.0}))
    assert "The link from rank 2 to 3" in describe_slow_links(between_two)[0]
