"""Tests of the verdicts on ranks and nodes."""

from __future__ import annotations

import random

import pytest

from torchlens_perf.check.figures import RankFigures
from torchlens_perf.check.judge import CheckEvidence, judge_machines
from torchlens_perf.verdicts.verdict import Verdict

ROUNDS = 3


def ranks_of(
    of_rank: dict[tuple[int, int], float] | None = None,
    of_node: dict[str, float] | None = None,
    nodes: int = 4,
) -> list[RankFigures]:
    """Return two ranks on each node, with noise of 5 %. The arguments have factors on values of a
    rank and round, and of a node."""
    noise = random.Random(1)
    found = []
    for rank in range(2 * nodes):
        host = f"node-{rank // 2}"
        slow = [(of_rank or {}).get((rank, index), 1.0) for index in range(ROUNDS)]
        speeds = [1e9 * each * noise.uniform(0.95, 1.05) for each in slow]
        figures = RankFigures(rank, f"{host}/{rank % 2}", host, "CPU", "a CPU")
        figures.values["matmul float32"] = {figures.place: speeds}
        if rank % 2 == 0:
            figures.values["MTU of eth0"] = {host: [1500 * (of_node or {}).get(host, 1.0)]}
        found.append(figures)
    return found


def subjects(verdicts: list[Verdict]) -> list[str]:
    return [each.evidence.subject for each in verdicts if isinstance(each.evidence, CheckEvidence)]


def test_equal_ranks_have_no_verdict() -> None:
    assert judge_machines(ranks_of()) == []


def test_rank_that_is_slow_in_every_round_is_named_with_its_values() -> None:
    (found,) = judge_machines(ranks_of({(3, index): 0.5 for index in range(ROUNDS)}))

    assert (found.kind, found.rank) == ("unfit_rank", 3)
    assert found.text.startswith("Rank 3 (node-1): matmul float32: ")
    assert "50% of 1000 MFLOP/s in the median of 7 others." in found.text


@pytest.mark.parametrize("rounds", [(1,), (0, 2)])
def test_rank_that_is_slow_in_some_rounds_only_is_not_named(rounds: tuple[int, ...]) -> None:
    assert judge_machines(ranks_of({(3, index): 0.2 for index in rounds})) == []


def test_node_whose_ranks_are_all_slow_is_named_once() -> None:
    slow = {(rank, index): 0.5 for rank in (4, 5) for index in range(ROUNDS)}

    assert subjects(judge_machines(ranks_of(slow))) == ["node node-2"]


def test_node_with_another_mtu_is_named() -> None:
    (found,) = judge_machines(ranks_of(of_node={"node-1": 0.9}))

    assert (
        found.text == "Node node-1: MTU of eth0: 1,350 B, 90% of 1,500 B in the median of 3 others."
    )


def test_two_nodes_need_a_larger_difference() -> None:
    assert subjects(judge_machines(ranks_of(of_node={"node-1": 0.995}, nodes=2))) == []
    assert subjects(judge_machines(ranks_of(of_node={"node-1": 0.9}, nodes=2))) == ["node node-1"]
