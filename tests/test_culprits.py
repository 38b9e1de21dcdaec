"""What slow ranks have in common, and pipeline stages out of balance."""

from __future__ import annotations

import json

from tests.findings import episode as made_episode
from torchlens_perf.culprits import Named, name
from torchlens_perf.episodes import Episode
from torchlens_perf.straggler import NOTHING, Findings, Place, Usual


def slow(rank: int, excess_ns: float = 1e6) -> Episode:
    """An episode that goes on."""
    import dataclasses

    return dataclasses.replace(made_episode(rank), rank=rank, excess_ns=excess_ns, cost_ns=excess_ns, until_step=None)


def named(ranks: list[int], places: dict[int, Place]) -> Named:
    import dataclasses

    return name(dataclasses.replace(NOTHING, episodes=tuple(slow(rank, 1e6 + rank) for rank in ranks)), places)


def test_one_rank() -> None:
    """One slow rank is named alone, with its host."""
    places = {rank: Place(f"node-{rank // 4}") for rank in range(8)}
    (culprit,) = named([5], places).culprits
    assert (culprit.kind, culprit.ranks, culprit.host) == ("rank", (5,), "node-1")


def test_a_whole_node() -> None:
    """Where most ranks of a node are slow, the node is named, its slowest rank first; not where all nodes are."""
    places = {rank: Place(f"node-{rank // 4}") for rank in range(8)}
    (culprit,) = named([4, 5, 7], places).culprits
    assert (culprit.kind, culprit.name, culprit.ranks, culprit.lead.rank) == ("node", "node-1", (4, 5, 7), 7)
    assert [each.kind for each in named([4, 5], places).culprits] == ["rank", "rank"]
    one_node = {rank: Place("node-0") for rank in range(4)}
    assert {each.kind for each in named([0, 1, 2], one_node).culprits} == {"rank"}


def test_a_position() -> None:
    """Ranks that are slow at one position of a mesh dimension, on several nodes, are an imbalance there."""
    places = {rank: Place(f"node-{rank // 4}", coordinates={"ep": rank % 4}) for rank in range(16)}
    (culprit,) = named([2, 6, 10, 14], places).culprits
    assert (culprit.kind, culprit.name) == ("position", "ep 2")


def test_stage_imbalance() -> None:
    """The stage with clearly more work than the others is named; stages that are nearly alike are not."""
    places = {rank: Place("h", f"p{rank // 2}", {"pp": rank // 2}) for rank in range(6)}

    def findings(works: tuple[float, ...]) -> Findings:
        usual = tuple(Usual(f"p{i}", f"{2 * i}-{2 * i + 1}", work, 0.0) for i, work in enumerate(works))
        return Findings((), 64, 100e6, 1e6, 6, 63, usual)

    found = name(findings((40e6, 40e6, 60e6)), places).imbalance
    assert found is not None
    assert (found.stage, found.ranks, found.work_ns, found.others_work_ns) == ("pp 2", (4, 5), 60e6, 40e6)
    assert name(findings((40e6, 40e6, 45e6)), places).imbalance is None


def test_json() -> None:
    """Whom it names survives the node's state file."""
    places = {rank: Place(f"node-{rank // 4}") for rank in range(8)}
    before = named([4, 5, 7], places)
    assert Named.from_json(json.loads(json.dumps(before.to_json()))) == before
