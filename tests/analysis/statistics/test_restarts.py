"""Processes of a node that belong to one generation: restarts, new members and children."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import identity_of, make_run
from torchlens_perf.analysis.statistics.restarts import UNRELATED, GenerationNumbers
from torchlens_perf.run.identity import Identity


class Node:
    """A node whose processes are started one after the other."""

    def __init__(self, folder: Path) -> None:
        self._run = make_run(folder)
        self._pid = 1000
        self.generations = GenerationNumbers()

    def process(self, rank: int, world_size: int, **changed: Any) -> Identity:
        self._pid += 1
        return identity_of(
            self._run, rank, world_size, **{"pid": self._pid, "elastic": True, **changed}
        )

    def begins(self, rank: int, world_size: int, **changed: Any) -> int:
        return self.generations.generation_of(self.process(rank, world_size, **changed))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_ranks_of_one_start_have_one_generation(node: Node) -> None:
    """A second query returns the same generation."""
    processes = [node.process(rank, 4) for rank in range(4)]
    assert [node.generations.generation_of(each) for each in processes * 2] == [0] * 8


def test_restarted_ranks_are_a_new_generation(node: Node) -> None:
    """Late processes of an earlier attempt have no generation."""
    assert [node.begins(rank, 2, attempt=attempt) for attempt in (0, 1) for rank in (0, 1)] == [
        0,
        0,
        1,
        1,
    ]
    assert node.begins(0, 2, attempt=0) == UNRELATED


def test_second_start_of_the_same_ranks_is_a_new_generation(node: Node) -> None:
    """Another node was replaced, so this node's agent starts its ranks again."""
    assert [node.begins(rank, 4) for rank in (0, 1, 1, 0)] == [0, 0, 1, 1]


def test_changed_ranks_are_a_new_generation(node: Node) -> None:
    """The agent's position among the nodes, and with it the ranks, have changed."""
    ranks = [(2, 0), (3, 1), (0, 0), (1, 1)]
    assert [
        node.begins(rank, 4, local_rank=local, local_world_size=2) for rank, local in ranks
    ] == [0, 0, 1, 1]


def test_changed_world_size_is_a_new_generation(node: Node) -> None:
    """The world has become smaller, and this agent has none of its earlier ranks."""
    assert [
        node.begins(0, 4),
        node.begins(1, 2, launcher_pid=7),
        node.begins(0, 2, launcher_pid=7),
    ] == [0, 1, 1]


def test_restart_by_two_agents_on_one_host_is_one_generation(node: Node) -> None:
    """Each agent starts its own workers."""
    places = [(0, 7), (1, 8), (0, 7), (1, 8)]
    assert [node.begins(rank, 2, local_rank=0, launcher_pid=agent) for rank, agent in places] == [
        0,
        0,
        1,
        1,
    ]


def test_ranks_that_all_have_local_rank_0_are_one_generation(node: Node) -> None:
    """Only torch's agents give their workers different local ranks."""
    assert {node.begins(rank, 4, local_rank=0, elastic=False) for rank in range(4)} == {0}


@pytest.mark.parametrize("world_size", [1, 2])
def test_child_process_of_a_rank_starts_no_new_generation(node: Node, world_size: int) -> None:
    """A child inherits its rank from the environment, or is in a world of its own.

    The other ranks continue.
    """
    parent = node.process(0, 2)
    assert node.generations.generation_of(parent) == 0
    assert node.begins(0, world_size, launcher_pid=parent.pid) == UNRELATED
    assert node.begins(1, 2) == 0


def test_second_start_of_ranks_by_one_process_is_a_new_generation(node: Node) -> None:
    """torch.multiprocessing.spawn starts ranks in this way."""
    parent = node.process(0, 1, elastic=False)
    assert node.generations.generation_of(parent) == 0
    assert [node.begins(rank, 2, launcher_pid=parent.pid, elastic=False) for rank in (1, 0)] == [
        1,
        1,
    ]
