"""Tests of the tournament and of the verdicts on links, in a simulated network."""

from __future__ import annotations

import itertools

import pytest

from tests.check.simulated_network import Network
from tests.check.test_judge import subjects
from torchlens_perf.check.figures import RankFigures
from torchlens_perf.check.links import Rates, judge_links
from torchlens_perf.check.tournament import Transfer, make_circle


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 33])
def test_each_player_meets_each_other_once_and_one_at_a_time(count: int) -> None:
    rounds = make_circle(count)
    met = [tuple(sorted(pair)) for pairs in rounds for pair in pairs]

    assert sorted(met) == list(itertools.combinations(range(count), 2))
    for pairs in rounds:
        players = [player for pair in pairs for player in pair]
        assert len(players) == len(set(players))


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 8, 40])
def test_good_network_has_no_verdict(nodes: int) -> None:
    assert Network(nodes, noise=0.15, seconds=2.0).judge() == []


@pytest.mark.parametrize("nodes", [3, 4, 8, 40])
def test_bad_port_is_named(nodes: int) -> None:
    network = Network(nodes, sends={2: 0.4}, receives={2: 0.4}, seconds=2.0)

    assert subjects(network.judge()) == ["the port of node n2"]


@pytest.mark.parametrize("nodes", [4, 8, 40])
def test_port_that_is_bad_in_one_direction_is_named_with_it(nodes: int) -> None:
    network = Network(nodes, sends={2: 0.4}, seconds=2.0)

    assert subjects(network.judge()) == ["the port of node n2, sending only"]


def test_port_that_loses_segments_is_named_with_the_share() -> None:
    slower = {1: 0.5}
    network = Network(4, sends=slower, receives=slower, loses={1: 0.05}, seconds=2.0)
    (found,) = network.judge()

    assert found.text.startswith("The port of node n1: ")
    assert found.text.endswith("TCP sent 5.0% of the segments again.")


def test_link_that_loses_segments_and_is_as_fast_as_others_has_no_verdict() -> None:
    slower = dict.fromkeys(itertools.permutations([0, 2, 3], 2), 0.9)
    network = Network(4, links=slower, loses={1: 0.05}, seconds=2.0)

    assert network.judge() == []


@pytest.mark.parametrize(("rate", "is_bad"), [(0.48, False), (0.4, True)])
def test_link_that_loses_segments_is_bad_if_it_is_slower_than_links_without_losses(
    rate: float, is_bad: bool
) -> None:
    """On a busy node, links without losses are as slow."""
    rates = [1.0] * 15 + [0.45] * 4
    rows = [Transfer(0, at, each, 0.0) for at, each in enumerate(rates, 1)]
    lossy = Transfer(0, 20, rate, 0.015)

    assert Rates([*rows, lossy] * 3, 3.0).bad == ({(0, 20)} if is_bad else set())


@pytest.mark.parametrize("nodes", [3, 4, 8, 40])
def test_single_link_is_named_with_its_direction(nodes: int) -> None:
    one_way = Network(nodes, links={(0, 2): 0.3}, seconds=2.0).judge()
    both = Network(nodes, links={(0, 2): 0.3, (2, 0): 0.3}, seconds=2.0).judge()

    assert subjects(one_way) == ["the link from rank 0 (n0) to rank 2 (n2)"]
    assert subjects(both) == ["the link between rank 0 (n0) and rank 2 (n2)"]


def test_two_nodes_have_a_link_in_one_direction() -> None:
    (found,) = Network(2, links={(1, 0): 0.3}, seconds=2.0).judge()

    assert found.evidence.ranks == (1, 0)


@pytest.mark.parametrize(("device", "named"), [("a GPU", ["the port of rank 2 (n0)"]), ("CPU", [])])
def test_slow_gpu_link_inside_of_a_node_is_named(device: str, named: list[str]) -> None:
    """Ranks on CPUs of one node have no link between them: other programs make transfers slow."""
    network = Network(4, sends={2: 0.4}, receives={2: 0.4})
    ranks = [RankFigures(rank, f"n0/{rank}", "n0", device, "a CPU") for rank in range(4)]
    pairs = itertools.permutations(range(4), 2)

    assert subjects(judge_links([network.transfer(*pair) for pair in pairs], ranks)) == named


@pytest.mark.parametrize("nodes", [16, 64])
def test_switch_is_told_from_ports(nodes: int) -> None:
    network = Network(nodes, per_switch=4, switches={2: 0.4}, seconds=2.0)

    assert subjects(network.judge()) == ["switch leaf2 of nodes n8, n9, n10, n11"]


@pytest.mark.parametrize("nodes", [256, pytest.param(1024, marks=pytest.mark.long)])
def test_three_bad_parts_of_many_nodes_are_found_in_a_second(nodes: int) -> None:
    """A port, a direction and a switch are seen by all of their pairs, in about log2(n) rounds."""
    network = Network(
        nodes, sends={100: 0.5, 200: 0.5}, receives={100: 0.5}, switches={4: 0.5}, seconds=0.4
    )
    found = subjects(network.judge())

    assert sorted(each[:24] for each in found) == [
        "switch leaf4 of nodes n1", "the port of node n100", "the port of node n200, s",
    ]  # fmt: skip
    assert network.spent_s < 1.0


@pytest.mark.long
def test_three_bad_pairs_of_half_a_million_are_found_in_a_minute() -> None:
    links = {(5, 900): 0.3, (77, 312): 0.3, (312, 77): 0.3, (1000, 3): 0.3}
    network = Network(1024, links=links)

    assert subjects(network.judge()) == [
        "the link from rank 5 (n5) to rank 900 (n900)",
        "the link between rank 77 (n77) and rank 312 (n312)",
        "the link from rank 1000 (n1000) to rank 3 (n3)",
    ]
    assert network.spent_s <= 60.0
