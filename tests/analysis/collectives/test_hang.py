"""The ranks that are blamed for a hang, and the texts about it.

The tests define each rank's state.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from tests.support.hangs import hang_text
from tests.support.progress import (
    USUAL_S,
    WORLD,
    behind,
    every,
    found,
    job,
    named,
    on_silent_node,
    rank,
)
from torchlens_perf.analysis.collectives.hang import (
    FACTOR,
    FIRST_STEPS_S,
    MIN_S,
    Collective,
    find_hang,
    hang_limit_s,
)
from torchlens_perf.run.ring import CAPTURING, Kind, record_dtype
from torchlens_perf.sidecar.progress import count_passes

# -- when a hang is reported


@pytest.mark.parametrize(
    ("usual_s", "limit"),
    [(USUAL_S, MIN_S), (1.9, MIN_S), (30.0, FACTOR * 30.0), (0.0, FIRST_STEPS_S)],
)
def test_no_hang_is_reported_before_the_time_limit(usual_s: float, limit: float) -> None:
    """The limit is the larger of 10 s and a multiple of the usual step.

    First steps have their own limit.
    """
    early = [behind(2), *(rank(number) for number in (0, 1, 3))]
    for since_s, expected in ((limit, False), (limit + 0.1, True)):
        at = {"usual_step_s": usual_s, "since_step_s": since_s, "since_mark_s": since_s}
        hang = job(*(dataclasses.replace(each, **at) for each in early))
        assert (hang is not None) is expected
    assert hang_limit_s(early, factor=1000.0) == 1000 * USUAL_S


def test_time_limit_is_computed_from_the_slowest_ranks_usual_step() -> None:
    assert (
        hang_limit_s([rank(0), rank(1, usual_step_s=40.0), rank(2, usual_step_s=0.0)])
        == FACTOR * 40
    )


@pytest.mark.parametrize("state", ["stopped", "traced", "dead"])
def test_dead_or_stopped_process_in_the_first_steps_is_reported_after_10_s(state: str) -> None:
    """First steps have a longer limit, but a dead or stopped rank cannot continue."""
    waiting = [rank(number, usual_step_s=0.0) for number in (0, 1, 3)]

    assert job(*waiting, behind(2, usual_step_s=0.0)) is None
    assert named(found(*waiting, behind(2, usual_step_s=0.0, state=state))) == [2]


def test_rank_that_writes_records_in_a_long_step_is_no_hang() -> None:
    """A rank that writes records is working, however long its step takes."""
    assert job(*(rank(number, since_step_s=900.0, since_mark_s=0.1) for number in range(4))) is None


def test_hang_is_judged_by_steps_if_times_of_records_are_unknown() -> None:
    assert (
        found(behind(2, since_mark_s=None), *(rank(n, since_mark_s=None) for n in (0, 1, 3))).kind
        == "missing"
    )


def test_no_hang_is_reported_if_no_rank_is_alive() -> None:
    assert find_hang({}, {}) is None
    assert job(*every(4, state="closed")) is None
    assert job(*every(4, state="dead")) is None
    assert job(*every(4, report_age_s=100.0)) is None


# -- a rank has not entered a collective


def test_rank_that_has_not_entered_a_collective_is_blamed() -> None:
    """The text has the first collective that the rank has not entered, and the rank's open span and
    host.
    """
    hang = found(behind(2))

    assert (hang.kind, named(hang), hang.waiting) == ("missing", [2], (0, 1, 3))
    assert hang.collective == Collective(WORLD, 57, "allreduce")
    assert hang.blocking[0].missing == hang.collective
    assert hang.needs_action
    assert hang.look_at == (2,)
    assert (
        hang_text(hang)
        == "No step for 12.0 s (usually 62.0 ms). 3 ranks wait in allreduce 57 of group 0; rank 2"
        " (node-b) did not enter it, last inside forward GPT > blocks.3. Next: look at the"
        " Python stack of rank 2 on node-b.\nrank 2: inside forward GPT > blocks.3"
        "\nranks 0-1,3: allreduce 57 of group 0, inside backward"
    )
    assert "find out what data.py:12 in load waits for on rank 2 on node-b." in hang_text(
        hang, {2: "data.py:12 in load"}
    )


def test_ranks_that_are_ahead_wait_in_the_first_incomplete_collective() -> None:
    """Some ranks have issued more collectives asynchronously."""
    hang = found(behind(2), rank(0, issued={WORLD: 90}, operations={WORLD: {90: "allgather"}}))

    assert (hang.collective, hang.waiting) == (Collective(WORLD, 57, "allreduce"), (0, 1, 3))


def test_incomplete_collective_of_unknown_operation_has_only_its_number() -> None:
    """The name of another collective must not be shown."""
    hang = found(
        behind(2), *(rank(n, issued={WORLD: 58}, operations={WORLD: {58: "x"}}) for n in (0, 1, 3))
    )

    assert hang.collective == Collective(WORLD, 57, "")
    assert "3 ranks wait in collective 57 of group 0;" in hang_text(hang)


def test_only_the_rank_furthest_behind_is_blamed() -> None:
    """All other ranks that are behind are blocked by the rank furthest behind."""
    hang = found(behind(1, issued={WORLD: 55}), behind(2), behind(3))

    assert (named(hang), hang.waiting, hang.collective) == (
        [1],
        (0, 2, 3),
        Collective(WORLD, 56, "allreduce"),
    )


def test_several_missing_ranks_are_blamed_together() -> None:
    """The text shortens a long list of ranks."""
    groups = {WORLD: tuple(range(16))}
    hang = found(*(behind(n, host="node-a") for n in (3, 4)), count=16, groups=groups)
    many = found(*(behind(n, host="node-a") for n in range(6)), count=16, groups=groups)

    assert (
        "14 ranks wait in allreduce 57 of group 0; ranks 3 (node-a) and 4 (node-a) did not enter"
        " it, last inside forward GPT > blocks.3. Next:" in hang_text(hang)
    )
    assert (
        "; ranks 0 (node-a), 1 (node-a), 2 (node-a), 3 (node-a) and 2 more did not enter it"
        in hang_text(many)
    )


def test_only_rank_that_entered_a_collective_may_be_the_faulty_one() -> None:
    """The text mentions that one rank may issue a collective by mistake."""
    hang = found(*(behind(number) for number in (1, 2, 3)))

    assert named(hang) == [1, 2, 3]
    assert hang_text(hang).count("Or only rank 0 should not have entered it.") == 1
    assert "should not have" not in hang_text(found(behind(2)))


def test_rank_that_never_used_its_group_is_blamed() -> None:
    """A known member of a group that is not in `issued` has issued no collective."""
    never = behind(2, issued={}, operations={})

    assert named(found(never, groups={WORLD: (0, 1, 2, 3)})) == [2]
    assert found(never).kind == "apart"


def test_rank_with_a_full_table_of_groups_is_not_blamed_for_other_groups() -> None:
    """The rank cannot report its operations in further groups."""
    never = behind(2, issued={}, operations={}, all_groups=False)

    assert named(found(never, groups={WORLD: (0, 1, 2, 3)})) == []
    assert named(found(behind(2, all_groups=False))) == [2]


def test_blocking_rank_is_found_through_several_groups() -> None:
    """A rank that its tensor-parallel neighbor blocks is not to blame for waits in its other
    groups.
    """
    groups = {"tp0": (0, 1), "tp1": (2, 3), "dp0": (0, 2), "dp1": (1, 3)}
    ranks = [
        rank(0, issued={"tp0": 9, "dp0": 5}, operations={"dp0": {5: "allreduce"}}),
        rank(1, issued={"tp0": 9, "dp1": 5}, operations={}),
        rank(2, issued={"tp1": 9, "dp0": 4}, operations={"tp1": {9: "allgather"}}),
        behind(3, issued={"tp1": 8, "dp1": 4}, operations={}),
    ]
    hang = found(*ranks, groups=groups)

    assert (hang.kind, named(hang)) == ("missing", [3])
    # One rank waits in dp1 and one in tp1. The first group by name is shown.
    assert (hang.collective, hang.waiting) == (Collective("tp1", 9, "allgather"), (2,))


def test_blocking_ranks_of_different_groups_are_all_blamed() -> None:
    """The text has the collective that each blocking rank has not entered.

    The rank with most waiting ranks comes first.
    """
    ranks = [
        rank(0, issued={"z": 3}, operations={"z": {3: "allreduce"}}),
        behind(1, issued={"z": 2}),
        *(rank(n, issued={"b": 8}, operations={"b": {8: "broadcast"}}) for n in (2, 3)),
        behind(4, issued={"b": 7}),
    ]
    hang = found(*ranks, count=5)

    assert (named(hang), hang.collective) == ([1, 4], Collective("b", 8, "broadcast"))
    assert "2 ranks wait in broadcast 8 of group b;" in hang_text(hang)
    assert "rank 1 (node-a) did not enter allreduce 3 of group z, last inside" in hang_text(hang)
    assert "rank 4 (node-c) did not enter it, last inside" in hang_text(hang)


def test_advice_on_a_blocking_rank_that_waits_is_about_network_and_device() -> None:
    """All ranks have entered the collective in which the blocking rank waits."""
    hang = found(behind(2, inside=("backward", "wait")))

    assert named(hang) == [2]
    assert (
        "did not enter it, last inside backward, waiting in an operation that all ranks have"
        " entered." in hang_text(hang)
    )
    assert "Next: look at the network and the device of rank 2 on node-b" in hang_text(hang)


def test_process_state_of_a_rank_in_uninterruptible_sleep_is_shown() -> None:
    """The advice mentions state D if the blocking rank is in this state."""
    hang = found(behind(2, state="uninterruptible", inside=("data",)))

    assert hang.asleep == (2,)
    assert "Asleep in the kernel (process state D: storage or a driver): rank 2." in hang_text(hang)
    assert "Next: look at dmesg on node-b" in hang_text(hang)


def test_rank_stuck_in_the_data_phase_points_to_its_dataloader() -> None:
    assert "Next: look at the loader of rank 2 on node-b" in hang_text(
        found(behind(2, inside=("data",)))
    )


def test_blocking_rank_that_writes_records_is_no_hang() -> None:
    """A rank that writes records is working, even if others wait for it."""
    hang = found(behind(2, since_mark_s=0.2, inside=("evaluate",)))

    assert (hang.kind, named(hang), hang.waiting, hang.needs_action) == (
        "busy",
        [2],
        (0, 1, 3),
        False,
    )
    assert (
        "rank 2 (node-b) did not enter it: running inside evaluate, last recorded event 200 ms ago."
        in hang_text(hang)
    )


# -- a process cannot continue


@pytest.mark.parametrize(
    ("state", "words", "action"),
    [
        ("stopped", "stopped by a signal (process state T)", "send SIGCONT to rank 2 on node-b"),
        (
            "traced",
            "held by a debugger (process state t)",
            "detach the debugger from rank 2 on node-b",
        ),
    ],
)
def test_stopped_rank_is_blamed_with_its_process_state(state: str, words: str, action: str) -> None:
    """The text also has the rank's open span and advice."""
    hang = found(behind(2, state=state))

    assert (hang.kind, named(hang), hang.waiting) == ("stopped", [2], (0, 1, 3))
    assert f"did not enter it: {words} inside forward GPT > blocks.3. Next: {action}," in hang_text(
        hang
    )
    assert hang.look_at == (2,)


def test_stopped_rank_is_blamed_even_if_it_has_entered_all_collectives() -> None:
    """A rank that stopped after it issued its last collective also blocks the other ranks."""
    hang = found(rank(2, state="stopped"))

    assert (hang.kind, named(hang), hang.waiting, hang.collective) == (
        "stopped",
        [2],
        (0, 1, 3),
        None,
    )
    assert hang.blocking[0].missing is None
    assert (
        "3 ranks wait; rank 2 (node-b) entered every collective that others have: stopped by a"
        " signal" in hang_text(hang)
    )


def test_ranks_that_wait_for_a_stopped_one_are_not_blamed() -> None:
    groups = {"tp": (2, 3), "dp": (0, 1, 2)}
    ranks = [
        *(rank(number, issued={"dp": 5}, operations={}) for number in (0, 1)),
        rank(2, issued={"dp": 4, "tp": 9}, operations={}),
        rank(3, issued={"tp": 9}, operations={}, state="stopped"),
    ]

    hang = found(*ranks, groups=groups)

    # Collectives in which ranks wait for a rank that is itself waiting are not shown either.
    assert (named(hang), hang.collective, hang.waiting) == ([3], None, (0, 1, 2))


def test_dead_rank_is_listed_before_a_stopped_rank_and_a_silent_node() -> None:
    silent, stopped = on_silent_node(1, 12.3, issued={WORLD: 56}), behind(2, state="stopped")
    with_dead = hang_text(found(silent, stopped, behind(3, state="dead")))
    without = hang_text(found(silent, stopped))

    assert re.search(
        "; rank 3 .* died .*; rank 1 .*; rank 2 .* Next: read the end of the log of rank 3",
        with_dead,
    )
    assert re.search("; rank 2 .* stopped .*; rank 1 .* Next: send SIGCONT to rank 2", without)


def test_dead_rank_is_blamed_with_its_open_spans() -> None:
    """A dead process has no stack to look at."""
    hang = found(behind(2, state="dead", since_mark_s=None))

    assert (hang.kind, named(hang), hang.ended, hang.look_at) == ("dead", [2], (2,), ())
    assert (
        "rank 2 (node-b) died inside forward GPT > blocks.3, and did not enter it. Next: read"
        " the end" in hang_text(hang)
    )


def test_rank_that_died_long_before_the_hang_is_not_blamed() -> None:
    """The job continued for an hour after the death of the rank."""
    hang = found(behind(2), rank(3, state="dead", since_step_s=3600.0, issued={WORLD: 3}))

    assert (hang.kind, named(hang), hang.waiting, hang.unheard) == ("missing", [2], (0, 1), ())


# -- some ranks have ended


def test_rank_that_ended_after_fewer_steps_is_blamed() -> None:
    """Other ranks wait for a rank that ended normally but too early."""
    hang = found(behind(1, state="closed", step=99, inside=()))

    assert (hang.kind, named(hang), hang.waiting) == ("uneven", [1], (0, 2, 3))
    assert (
        "rank 1 (node-a) did not enter it: recording ended normally there after 99 steps."
        in hang_text(hang)
    )
    assert "Next: give all ranks the same number of steps" in hang_text(hang)


def test_ended_rank_that_entered_all_collectives_is_not_blamed() -> None:
    hang = found(rank(1, state="closed"), behind(2))

    assert (hang.kind, named(hang)) == ("missing", [2])


def test_ended_rank_is_missing_and_makes_no_other_rank_missing() -> None:
    """Collectives that the ended rank issued before its end do not matter."""
    ranks = [
        rank(0, issued={"a": 3}, operations={}),
        rank(1, issued={"a": 2, "b": 9}, operations={}, state="closed"),
        rank(2, issued={"b": 8}, operations={}),
    ]
    hang = found(*ranks, count=3)

    assert (hang.kind, named(hang), hang.waiting) == ("uneven", [1], (0,))
    assert found(*ranks[1:], count=0).kind == "alone"


def test_last_living_rank_outside_collectives_is_blamed() -> None:
    """All other ranks have ended."""
    hang = found(rank(1, inside=("save",)), *(rank(number, state="closed") for number in (0, 2, 3)))

    assert (hang.kind, named(hang), hang.waiting, hang.ended) == ("alone", [1], (), (0, 2, 3))
    assert (
        "Rank 1 (node-a) is inside save, and no rank waits for it. 3 ranks have ended. Next: look"
        " at the Python stack of rank 1 on node-a." in hang_text(hang)
    )


# -- a node is silent


def test_node_that_became_silent_with_the_last_step_is_blamed() -> None:
    """The ranks and the sidecar of the node became silent together, so the whole node has
    failed.
    """
    hang = found(*(on_silent_node(n, 12.3, issued={WORLD: 40}, inside=("data",)) for n in (2, 3)))

    assert (hang.kind, named(hang), hang.waiting) == ("silent", [2, 3], (0, 1))
    assert hang.look_at == ()
    assert (
        "ranks 2 (node-b) and 3 (node-b) stopped reporting when the steps ended, 12.3 s ago, as did"
        " the sidecar of that node; last reported inside data, and did not enter it. Next: see"
        " whether node-b can be reached" in hang_text(hang)
    )


def test_silent_node_is_blamed_even_if_its_ranks_have_entered_the_collective() -> None:
    """A node may fail while its ranks are inside a collective."""
    hang = found(*(on_silent_node(n, 12.3) for n in (2, 3)))

    assert (hang.kind, named(hang)) == ("silent", [2, 3])
    assert "and entered every collective that others have" in hang_text(hang)


def test_node_that_became_silent_long_before_the_hang_is_not_blamed() -> None:
    """The node's reports are outdated, because the job continued without the node for a minute."""
    stale = on_silent_node(3, report_age_s=70.0, issued={WORLD: 3})
    hang = found(behind(2), stale)

    assert (hang.kind, named(hang), hang.waiting, hang.unheard) == ("missing", [2], (0, 1), (3,))
    assert "No reports from rank 3." in hang_text(hang)


def test_network_is_not_blamed_if_some_ranks_do_not_report() -> None:
    """All reporting ranks have entered the collective. The cause may be on ranks without reports."""
    for stale in ({3: on_silent_node(3, report_age_s=70.0)}, {}):
        progress = {number: rank(number) for number in range(3)} | stale
        hang = find_hang(progress, {WORLD: (0, 1, 2, 3)})

        assert hang is not None
        assert (hang.kind, named(hang), hang.unheard) == ("unheard", [], (3,))
        assert (
            "3 ranks wait in allreduce 57 of group 0 or a later operation; the cause is on the"
            " ranks without reports" in hang_text(hang)
        )


def test_only_reporting_rank_is_not_called_the_last_living_one() -> None:
    """Ranks that do not report may still be running."""
    hang = found(*(on_silent_node(number, report_age_s=70.0) for number in (1, 2, 3)))

    assert (hang.kind, named(hang), hang.waiting, hang.unheard) == ("unheard", [], (0,), (1, 2, 3))


def test_reporting_ranks_in_one_section_are_no_pause_if_others_are_silent() -> None:
    """The silent ranks may be outside the section."""
    hang = found(
        *every(3, inside=("save",)), on_silent_node(3, report_age_s=70.0, inside=("save",))
    )

    assert (hang.kind, hang.needs_action, hang.unheard) == ("apart", True, (3,))
    assert "No reports from rank 3. Next:" in hang_text(hang)
    assert hang_text(hang).endswith("\nranks 0-2: inside save")


def test_node_that_became_silent_during_the_hang_is_still_judged() -> None:
    """A rank that was stuck in its last report is still blamed, and its node does not count as
    silent.
    """
    hang = found(
        behind(2, since_step_s=30.0, report_age_s=20.0),
        *(rank(n, since_step_s=50.0) for n in (0, 1, 3)),
    )

    assert (hang.kind, named(hang)) == ("missing", [2])
    assert (
        "did not enter it, last inside forward GPT > blocks.3, as reported 20.0 s ago."
        in hang_text(hang)
    )


def test_writing_a_capture_is_a_hang_only_after_minutes() -> None:
    """All ranks wait while a rank writes its capture."""
    writing = {"inside": (CAPTURING,), "issued": {WORLD: 56}}
    for_minutes = {"since_step_s": 150.0, "since_mark_s": 150.0}

    assert named(found(behind(2))) == [2]
    assert job(behind(2, **writing)) is None
    assert named(found(behind(2, state="dead", **writing))) == [2]
    assert named(found(*every(2, **for_minutes), behind(2, **writing, **for_minutes), count=3)) == [
        2
    ]


@pytest.mark.parametrize("since_mark_s", [0.1, 11.9])
def test_evaluation_of_one_rank_is_told_from_training(since_mark_s: float) -> None:
    """The other ranks wait in a collective of the next training step."""
    text = hang_text(found(behind(2, passes=57, since_mark_s=since_mark_s)))
    training = hang_text(found(behind(2, passes=1, since_mark_s=since_mark_s)))

    assert "rank 2 (node-b) did not enter it: it made 57 forward passes without a back" in text
    assert "Next: let all ranks evaluate a part of the data" in text
    assert "evaluat" not in training


def test_forward_passes_count_until_a_backward_pass() -> None:
    def count(*kinds: Kind) -> int:
        records = np.zeros(len(kinds), record_dtype())
        records["kind"] = kinds
        return count_passes([(records[:2], records[:2]), (records[2:], records[2:])])

    forward = Kind.FORWARD
    assert count(forward, Kind.STEP, forward, Kind.DATA, forward) == 2
    assert count(Kind.STEP, forward, forward, Kind.BACKWARD) == 0
    assert count(Kind.BACKWARD, Kind.STEP, Kind.DATA) == count_passes([]) == 0


def test_save_of_one_rank_points_to_its_storage() -> None:
    """The other ranks wait in a collective that the saving rank has not entered."""
    text = hang_text(found(behind(2, inside=("torch.save",))))

    assert (
        "rank 2 (node-b) did not enter it: it saves a checkpoint, last inside torch.save. Next:"
        in text
    )
    assert "look at the storage to which rank 2 on node-b saves" in text
