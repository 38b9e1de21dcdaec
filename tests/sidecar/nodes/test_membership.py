"""Which processes of several nodes belong together, whatever their launchers count; without any network."""

from __future__ import annotations

import json

import pytest

from torchlens_perf.sidecar.nodes.membership import (
    MAX_CONTROL_BYTES,
    MAX_GENERATIONS,
    ControlMessage,
    Membership,
    match_generations,
)
from torchlens_perf.sidecar.nodes.membership import ProcessGeneration as Generation


def node(run_id: str = "run", *sets: tuple[float, int], leads: bool = False, size: int = 4) -> Membership:
    """sets: when each began, and its launcher's count of restarts."""
    made = Membership(run_id)
    if leads:
        made.lead()
    for local, (started_s, restarts) in enumerate(sets):
        made.began(local, started_s, size, restarts=restarts)
    return made


def test_nearest_in_time() -> None:
    """A set belongs to the generation that began nearest to it, of as many ranks."""
    generations = [Generation(0, 0.0, 4), Generation(1, 100.0, 4), Generation(2, 200.0, 2)]
    assert match_generations([Generation(0, 1.0, 4), Generation(1, 98.0, 4), Generation(2, 203.0, 2)], generations) == {
        0: 0,
        1: 1,
        2: 2,
    }
    assert match_generations([Generation(0, 150.0, 2)], generations) == {0: 2}
    assert match_generations([Generation(0, 0.0, 8)], generations) == {}


def test_the_next_set_is_of_no_generation_yet() -> None:
    """A node's new processes are there before node 0's: they are not taken for those that they replace."""
    assert match_generations([Generation(0, 1.0, 4), Generation(1, 60.0, 4)], [Generation(0, 0.0, 4)]) == {0: 0}


def test_counts_of_agents_differ() -> None:
    """The failed node says 1, the other 0, and they agree on generation 1."""
    zero, other = node("a", (0.0, 0), (50.0, 0), leads=True), node("b", (0.5, 0), (50.4, 1))
    other.receive(zero.control(60.0), 60.0)

    assert [zero.number(local) for local in range(2)] == [other.number(local) for local in range(2)] == [0, 1]
    assert other.run_id == "a"
    assert zero.of_other("b", 1, 50.4, 4) == 1


def test_a_node_that_joins_later() -> None:
    """What is its first set is not the job's first."""
    zero, late = node("a", (0.0, 0), (50.0, 0), (90.0, 1), leads=True), node("b", (90.2, 0))
    assert late.number(0) == 0
    assert not late.is_known(0)
    late.receive(zero.control(95.0), 95.0)
    assert late.number(0) == 2
    assert late.is_known(0)
    late.began(1, 130.0, 4)
    assert late.number(1) == 3  # until node 0 says it


def test_a_set_that_node_0_has_not_heard_of() -> None:
    """The first processes of a node ended before they were heard of; the second set is placed by its age."""
    zero = node("a", (0.0, 0), (50.0, 0), leads=True)
    assert zero.of_other("b", 1, 51.0, 4) == 1
    early = node("a", (0.0, 0), leads=True)
    assert early.of_other("b", 1, 51.0, 4) == 0  # nothing else is known
    early.began(1, 50.0, 4)
    assert early.of_other("b", 1, 51.0, 4) == 1


def test_another_node_gets_rank_0() -> None:
    """It numbers on from what its predecessor has said."""
    zero, heir = node("a", (0.0, 0), (50.0, 1), leads=True), node("b", (50.1, 0))
    heir.receive(zero.control(60.0), 60.0)
    heir.lead()
    heir.began(1, 90.0, 2)
    assert (heir.number(0), heir.number(1), heir.run_id) == (1, 2, "a")


def test_numbers_are_never_below_the_launchers() -> None:
    """A restart before anything was recorded: one node alone counts as torchrun does."""
    assert node("a", (0.0, 2), (9.0, 3), leads=True).number(1) == 3


def test_a_sidecar_that_was_started_again() -> None:
    """It knows the numbers that its predecessor knew."""
    made = Membership("run")
    made.began(0, 0.0, 4, number=5)
    made.began(1, 10.0, 4)
    assert [made.number(0), made.number(1)] == [5, 6]


def test_clocks_that_differ() -> None:
    """Ages travel: on the other node's clock it is another time."""
    zero, other = node("a", (0.0, 0), (50.0, 0), leads=True), node("b", (7000.0, 0), (7050.0, 1))
    other.receive(ControlMessage.decode(zero.control(60.0).encode()), 7060.0)
    assert [other.number(0), other.number(1)] == [0, 1]


def test_control_message_is_small() -> None:
    """However often the job was restarted, and whatever it is called."""
    zero = node("é" * 1000, *((float(local), local) for local in range(200)), leads=True, size=1 << 20)
    data = zero.control(1e6).encode()
    assert len(data) <= MAX_CONTROL_BYTES
    assert [each.number for each in ControlMessage.decode(data).generations] == [*range(200 - MAX_GENERATIONS, 200)]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"1", json.dumps([2, "run", []]).encode(), json.dumps([1, 3, []]).encode(), b"[" * 2000,
             json.dumps([1, "run", [[0, "x", 1]]]).encode(), json.dumps([1, "run", [[0, 0, 1]] * 9]).encode(), b"\xff"],
)  # fmt: skip
def test_invalid_control_messages(data: bytes) -> None:
    """It comes over a network."""
    with pytest.raises(ValueError, match="not a control message of node 0"):
        ControlMessage.decode(data)
