"""Tests that nodes agree on generations of processes, without a network."""

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


def node(
    run_id: str = "run", *sets: tuple[float, int], leads: bool = False, size: int = 4
) -> Membership:
    """Return a membership. sets: start time and the launcher's restart count of each
    process set.
    """
    made = Membership(run_id)
    if leads:
        made.set_leading(True)
    for local, (started_s, restarts) in enumerate(sets):
        made.add_set(local, started_s, size, restarts=restarts)
    return made


def test_process_set_joins_the_nearest_generation_of_its_size() -> None:
    generations = [Generation(0, 0.0, 4), Generation(1, 100.0, 4), Generation(2, 200.0, 2)]
    assert match_generations(
        [Generation(0, 1.0, 4), Generation(1, 98.0, 4), Generation(2, 203.0, 2)], generations
    ) == {
        0: 0,
        1: 1,
        2: 2,
    }
    assert match_generations([Generation(0, 150.0, 2)], generations) == {0: 2}
    assert match_generations([Generation(0, 0.0, 8)], generations) == {}


def test_new_process_set_does_not_join_the_generation_it_replaces() -> None:
    """New processes of a node may start before those of node 0."""
    assert match_generations(
        [Generation(0, 1.0, 4), Generation(1, 60.0, 4)], [Generation(0, 0.0, 4)]
    ) == {0: 0}


def test_nodes_with_different_restart_counts_agree_on_the_generation() -> None:
    """The failed node reports 1 restart, and the other node reports 0."""
    zero, other = node("a", (0.0, 0), (50.0, 0), leads=True), node("b", (0.5, 0), (50.4, 1))
    other.apply_control_message(zero.build_control_message(60.0), 60.0)

    assert (
        [zero.generation_number(local) for local in range(2)]
        == [other.generation_number(local) for local in range(2)]
        == [0, 1]
    )
    assert other.run_id == "a"
    assert zero.generation_of_remote_set("b", 1, 50.4, 4) == 1


def test_first_process_set_of_a_late_node_does_not_join_generation_0() -> None:
    zero, late = node("a", (0.0, 0), (50.0, 0), (90.0, 1), leads=True), node("b", (90.2, 0))
    assert late.generation_number(0) == 0
    assert not late.is_generation_number_known(0)
    late.apply_control_message(zero.build_control_message(95.0), 95.0)
    assert late.generation_number(0) == 2
    assert late.is_generation_number_known(0)
    late.add_set(1, 130.0, 4)
    assert late.generation_number(1) == 3  # The node guesses until node 0's message arrives.


def test_process_set_is_numbered_by_its_age_if_an_earlier_set_is_missing() -> None:
    """The first processes of a node ended before they were reported."""
    zero = node("a", (0.0, 0), (50.0, 0), leads=True)
    assert zero.generation_of_remote_set("b", 1, 51.0, 4) == 1
    early = node("a", (0.0, 0), leads=True)
    # The node knows no other generation at this point.
    assert early.generation_of_remote_set("b", 1, 51.0, 4) == 0
    early.add_set(1, 50.0, 4)
    assert early.generation_of_remote_set("b", 1, 51.0, 4) == 1


def test_new_node_0_continues_the_generation_numbers() -> None:
    zero, heir = node("a", (0.0, 0), (50.0, 1), leads=True), node("b", (50.1, 0))
    heir.apply_control_message(zero.build_control_message(60.0), 60.0)
    heir.set_leading(True)
    heir.add_set(1, 90.0, 2)
    assert (heir.generation_number(0), heir.generation_number(1), heir.run_id) == (1, 2, "a")


def test_generation_is_at_least_the_launchers_restart_count() -> None:
    """A restart may happen before any process records."""
    assert node("a", (0.0, 2), (9.0, 3), leads=True).generation_number(1) == 3


def test_restarted_sidecar_keeps_known_generation_numbers() -> None:
    made = Membership("run")
    made.add_set(0, 0.0, 4, number=5)
    made.add_set(1, 10.0, 4)
    assert [made.generation_number(0), made.generation_number(1)] == [5, 6]


def test_generations_agree_although_node_clocks_differ() -> None:
    """Messages contain ages instead of times."""
    zero, other = node("a", (0.0, 0), (50.0, 0), leads=True), node("b", (7000.0, 0), (7050.0, 1))
    other.apply_control_message(
        ControlMessage.decode(zero.build_control_message(60.0).encode()), 7060.0
    )
    assert [other.generation_number(0), other.generation_number(1)] == [0, 1]


def test_control_message_size_is_bounded_with_many_restarts() -> None:
    """The job also has a long id."""
    zero = node(
        "é" * 1000, *((float(local), local) for local in range(200)), leads=True, size=1 << 20
    )
    data = zero.build_control_message(1e6).encode()
    assert len(data) <= MAX_CONTROL_BYTES
    assert [each.number for each in ControlMessage.decode(data).generations] == [
        *range(200 - MAX_GENERATIONS, 200)
    ]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"1", json.dumps([2, "run", []]).encode(), json.dumps([1, 3, []]).encode(), b"[" * 2000,
             json.dumps([1, "run", [[0, "x", 1]]]).encode(), json.dumps([1, "run", [[0, 0, 1]] * 9]).encode(), b"\xff"],
)  # fmt: skip
def test_invalid_control_messages_raise_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a control message of node 0"):
        ControlMessage.decode(data)
