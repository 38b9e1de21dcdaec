"""Finding out why no step is made, from values made by hand: who is named, and in which words."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.support.progress import USUAL_S, WORLD, behind, every, found, job, named, on_silent_node, rank
from torchlens_perf.analysis.collectives.hang import FACTOR, FIRST_STEPS_S, MIN_S, Collective, find_hang, limit_s
from torchlens_perf.run.ring import CAPTURING
from torchlens_perf.verdicts.words.hang import text

# -- when


@pytest.mark.parametrize(
    ("usual_s", "limit"), [(USUAL_S, MIN_S), (1.9, MIN_S), (30.0, FACTOR * 30.0), (0.0, FIRST_STEPS_S)]
)
def test_nothing_is_said_before_the_limit(usual_s: float, limit: float) -> None:
    """Up to max(10 s, factor times the usual step), or the limit of first steps, nothing is said; beyond it is."""
    early = [behind(2), *(rank(number) for number in (0, 1, 3))]
    for since_s, expected in ((limit, False), (limit + 0.1, True)):
        at = {"usual_step_s": usual_s, "since_step_s": since_s, "since_mark_s": since_s}
        hang = job(*(dataclasses.replace(each, **at) for each in early))
        assert (hang is not None) is expected
    assert limit_s(early, factor=1000.0) == 1000 * USUAL_S


def test_slowest_rank_sets_the_limit() -> None:
    """A rank whose usual step is long gives all the longer time; so does one that knows its usual time."""
    assert limit_s([rank(0), rank(1, usual_step_s=40.0), rank(2, usual_step_s=0.0)]) == FACTOR * 40


@pytest.mark.parametrize("state", ["stopped", "traced", "dead"])
def test_dead_or_stopped_process_needs_no_patience_in_first_steps(state: str) -> None:
    """While nobody knows a usual time, a rank that plainly cannot go on is named after 10 s all the same."""
    waiting = [rank(number, usual_step_s=0.0) for number in (0, 1, 3)]

    assert job(*waiting, behind(2, usual_step_s=0.0)) is None
    assert named(found(*waiting, behind(2, usual_step_s=0.0, state=state))) == [2]


def test_evaluation_is_no_hang() -> None:
    """Ranks that leave marks are at work, however long they make no step."""
    assert job(*(rank(number, since_step_s=900.0, since_mark_s=0.1) for number in range(4))) is None


def test_unknown_marks_count_for_nothing() -> None:
    """Where it is not known when a rank left its last mark, its steps alone tell."""
    assert found(behind(2, since_mark_s=None), *(rank(n, since_mark_s=None) for n in (0, 1, 3))).kind == "missing"


def test_no_rank_alive_is_no_hang() -> None:
    """A job whose ranks have all ended, or of which nothing is known, does not hang."""
    assert find_hang({}, {}) is None
    assert job(*every(4, state="closed")) is None
    assert job(*every(4, state="dead")) is None
    assert job(*every(4, report_age_s=100.0)) is None


# -- a rank that has not entered


def test_missing_rank_is_named_with_what_it_was_in() -> None:
    """The others wait in the first collective that a rank has not entered: named are it, its place and its host."""
    hang = found(behind(2))

    assert (hang.kind, named(hang), hang.waiting) == ("missing", [2], (0, 1, 3))
    assert hang.collective == Collective(WORLD, 57, "allreduce")
    assert hang.blocking[0].missing == hang.collective
    assert hang.alarm
    assert hang.look_at == (2,)
    assert text(hang) == (
        "No step for 12.0 s (usually 62.0 ms). 3 ranks wait in allreduce 57 of group 0; rank 2 (node-b) did not enter "
        "it, last inside forward GPT > blocks.3. Next: look at the Python stack of rank 2 on node-b."
    )


def test_ranks_that_ran_ahead_wait_in_the_first_one_all_the_same() -> None:
    """Asynchronous ranks have issued more; they too are held up by the first that is not complete."""
    hang = found(behind(2), rank(0, issued={WORLD: 90}, operations={WORLD: {90: "allgather"}}))

    assert (hang.collective, hang.waiting) == (Collective(WORLD, 57, "allreduce"), (0, 1, 3))


def test_operation_of_another_number_is_not_claimed() -> None:
    """If it is not known what that collective is, no other one's name is put in its place."""
    hang = found(behind(2), *(rank(n, issued={WORLD: 58}, operations={WORLD: {58: "x"}}) for n in (0, 1, 3)))

    assert hang.collective == Collective(WORLD, 57, "")
    assert "3 ranks wait in collective 57 of group 0;" in text(hang)


def test_furthest_behind_is_named_alone() -> None:
    """Among ranks that are behind, those that another one holds up are victims."""
    hang = found(behind(1, issued={WORLD: 55}), behind(2), behind(3))

    assert (named(hang), hang.waiting, hang.collective) == ([1], (0, 2, 3), Collective(WORLD, 56, "allreduce"))


def test_several_missing_ranks_are_named_together() -> None:
    """Ranks that miss the same are named in one clause; a long list is cut."""
    groups = {WORLD: tuple(range(16))}
    hang = found(*(behind(n, host="node-a") for n in (3, 4)), count=16, groups=groups)
    many = found(*(behind(n, host="node-a") for n in range(6)), count=16, groups=groups)

    assert (
        "14 ranks wait in allreduce 57 of group 0; ranks 3 (node-a) and 4 (node-a) did not enter it, last inside "
        "forward GPT > blocks.3. Next:" in text(hang)
    )
    assert "; ranks 0 (node-a), 1 (node-a), 2 (node-a), 3 (node-a) and 2 more did not enter it" in text(many)


def test_few_that_wait_for_many_may_be_the_odd_ones() -> None:
    """If one rank alone has entered a collective, the words say that it may be the one that is wrong."""
    hang = found(*(behind(number) for number in (1, 2, 3)))

    assert named(hang) == [1, 2, 3]
    assert text(hang).count("Or only rank 0 should not have entered it.") == 1
    assert "should not have" not in text(found(behind(2)))


def test_rank_that_never_used_a_group_is_missing_where_members_are_known() -> None:
    """Absent from `issued` counts as none issued, if it is known that the rank belongs to the group."""
    never = behind(2, issued={}, operations={})

    assert named(found(never, groups={WORLD: (0, 1, 2, 3)})) == [2]
    assert found(never).kind == "apart"


def test_full_table_of_groups_is_no_absence() -> None:
    """A rank that could not tell all of its groups is not missing in those that it did not tell."""
    never = behind(2, issued={}, operations={}, all_groups=False)

    assert named(found(never, groups={WORLD: (0, 1, 2, 3)})) == []
    assert named(found(behind(2, all_groups=False))) == [2]


def test_blocking_rank_is_found_through_several_groups() -> None:
    """A rank that its tensor-parallel neighbour holds up blocks none of those that wait for it elsewhere."""
    groups = {"tp0": (0, 1), "tp1": (2, 3), "dp0": (0, 2), "dp1": (1, 3)}
    ranks = [
        rank(0, issued={"tp0": 9, "dp0": 5}, operations={"dp0": {5: "allreduce"}}),
        rank(1, issued={"tp0": 9, "dp1": 5}, operations={}),
        rank(2, issued={"tp1": 9, "dp0": 4}, operations={"tp1": {9: "allgather"}}),
        behind(3, issued={"tp1": 8, "dp1": 4}, operations={}),
    ]
    hang = found(*ranks, groups=groups)

    assert (hang.kind, named(hang)) == ("missing", [3])
    # One rank waits in dp1, and one in tp1: the names decide which of the two is told.
    assert (hang.collective, hang.waiting) == (Collective("tp1", 9, "allgather"), (2,))


def test_blocking_ranks_of_different_groups_are_all_named() -> None:
    """Two ranks that hold up different groups are named with what each has not entered; most waiting is told first."""
    ranks = [
        rank(0, issued={"z": 3}, operations={"z": {3: "allreduce"}}),
        behind(1, issued={"z": 2}),
        *(rank(n, issued={"b": 8}, operations={"b": {8: "broadcast"}}) for n in (2, 3)),
        behind(4, issued={"b": 7}),
    ]
    hang = found(*ranks, count=5)

    assert (named(hang), hang.collective) == ([1, 4], Collective("b", 8, "broadcast"))
    assert "2 ranks wait in broadcast 8 of group b;" in text(hang)
    assert "rank 1 (node-a) did not enter allreduce 3 of group z, last inside" in text(hang)
    assert "rank 4 (node-c) did not enter it, last inside" in text(hang)


def test_rank_that_is_behind_and_waits_itself() -> None:
    """A blocking rank that waits, in what all have entered, points to its network and device, not to its code."""
    hang = found(behind(2, inside=("backward", "wait")))

    assert named(hang) == [2]
    assert "did not enter it, last inside backward, waiting for something that all have entered." in text(hang)
    assert "Next: look at the network and the device of rank 2 on node-b" in text(hang)


def test_rank_asleep_in_the_kernel() -> None:
    """State D is told, and where the blocking rank is in it, it is what to look at."""
    hang = found(behind(2, state="uninterruptible", inside=("data",)))

    assert hang.asleep == (2,)
    assert "Asleep in the kernel (process state D: storage or a driver): rank 2." in text(hang)
    assert "Next: look at dmesg on node-b" in text(hang)


def test_loader_is_what_to_look_at_in_the_data_phase() -> None:
    """A rank that is stuck for data sends to its loader."""
    assert "Next: look at the loader of rank 2 on node-b" in text(found(behind(2, inside=("data",))))


def test_busy_rank_is_no_alarm() -> None:
    """A rank that others wait for and that leaves marks is at work: told with what it does, and not as an alarm."""
    hang = found(behind(2, since_mark_s=0.2, inside=("evaluate",)))

    assert (hang.kind, named(hang), hang.waiting, hang.alarm) == ("busy", [2], (0, 1, 3), False)
    assert "rank 2 (node-b) did not enter it, at work inside evaluate, the last mark 200 ms ago." in text(hang)


# -- processes that cannot go on


@pytest.mark.parametrize(
    ("state", "words", "action"),
    [
        ("stopped", "stopped by a signal (process state T)", "send SIGCONT to rank 2 on node-b"),
        ("traced", "held by a debugger (process state t)", "detach the debugger from rank 2 on node-b"),
    ],
)
def test_stopped_rank_is_named_with_its_state(state: str, words: str, action: str) -> None:
    """A stopped process is named with its state, its place and what to do."""
    hang = found(behind(2, state=state))

    assert (hang.kind, named(hang), hang.waiting) == ("stopped", [2], (0, 1, 3))
    assert f"did not enter it: {words} inside forward GPT > blocks.3. Next: {action}," in text(hang)
    assert hang.look_at == (2,)


def test_stopped_rank_is_named_although_it_has_entered() -> None:
    """A rank that was stopped right after it issued its last collective holds up the others as well."""
    hang = found(rank(2, state="stopped"))

    assert (hang.kind, named(hang), hang.waiting, hang.collective) == ("stopped", [2], (0, 1, 3), None)
    assert hang.blocking[0].missing is None
    assert "3 ranks wait; rank 2 (node-b) entered all that others have: stopped by a signal" in text(hang)


def test_victims_of_a_stopped_rank_are_not_named() -> None:
    """What a rank does that waits for a stopped one is not held against it."""
    groups = {"tp": (2, 3), "dp": (0, 1, 2)}
    ranks = [
        *(rank(number, issued={"dp": 5}, operations={}) for number in (0, 1)),
        rank(2, issued={"dp": 4, "tp": 9}, operations={}),
        rank(3, issued={"tp": 9}, operations={}, state="stopped"),
    ]

    hang = found(*ranks, groups=groups)

    # Nor is it told what they wait for the victim in.
    assert (named(hang), hang.collective, hang.waiting) == ([3], None, (0, 1, 2))


def test_gravest_problem_is_told_and_acted_on_first() -> None:
    """Among ranks that cannot go on, a dead one comes before a stopped one, and that before a silent node."""
    silent, stopped = on_silent_node(1, 12.3, issued={WORLD: 56}), behind(2, state="stopped")
    with_dead = text(found(silent, stopped, behind(3, state="dead")))
    without = text(found(silent, stopped))

    assert re.search("; rank 3 .* died .*; rank 1 .*; rank 2 .* Next: read the end of the log of rank 3", with_dead)
    assert re.search("; rank 2 .* stopped .*; rank 1 .* Next: send SIGCONT to rank 2", without)


def test_dead_rank_is_named() -> None:
    """A process that died is named with what it was inside of; there is no stack of it to look at."""
    hang = found(behind(2, state="dead", since_mark_s=None))

    assert (hang.kind, named(hang), hang.ended, hang.look_at) == ("dead", [2], (2,), ())
    assert "rank 2 (node-b) died inside forward GPT > blocks.3, and did not enter it. Next: read the end" in text(hang)


def test_rank_that_died_long_before_is_not_named() -> None:
    """The job went on for an hour after that rank had died: this hang is not its doing."""
    hang = found(behind(2), rank(3, state="dead", since_step_s=3600.0, issued={WORLD: 3}))

    assert (hang.kind, named(hang), hang.waiting, hang.unheard) == ("missing", [2], (0, 1), ())


# -- ranks that ended


def test_uneven_step_counts() -> None:
    """Others wait for a rank that ended normally: its steps are fewer, and the words say so."""
    hang = found(behind(1, state="closed", step=99, inside=()))

    assert (hang.kind, named(hang), hang.waiting) == ("uneven", [1], (0, 2, 3))
    assert "rank 1 (node-a) did not enter it: recording ended normally there after 99 steps." in text(hang)
    assert "Next: give all ranks the same number of steps" in text(hang)


def test_ended_rank_that_nobody_waits_for_blocks_nobody() -> None:
    """A rank that entered all and ended is none of the trouble of those that are left."""
    hang = found(rank(1, state="closed"), behind(2))

    assert (hang.kind, named(hang)) == ("missing", [2])


def test_ended_rank_waits_for_nobody() -> None:
    """A rank that ended is missing, whatever else it has issued; and it does not make others miss that."""
    ranks = [
        rank(0, issued={"a": 3}, operations={}),
        rank(1, issued={"a": 2, "b": 9}, operations={}, state="closed"),
        rank(2, issued={"b": 8}, operations={}),
    ]
    hang = found(*ranks, count=3)

    assert (hang.kind, named(hang), hang.waiting) == ("uneven", [1], (0,))
    assert found(*ranks[1:], count=0).kind == "alone"


def test_last_rank_left() -> None:
    """One rank is stuck outside of any collective while all others have ended: it is named."""
    hang = found(rank(1, inside=("save",)), *(rank(number, state="closed") for number in (0, 2, 3)))

    assert (hang.kind, named(hang), hang.waiting, hang.ended) == ("alone", [1], (), (0, 2, 3))
    assert (
        "Rank 1 (node-a) is inside save, and nobody waits for it. 3 ranks have ended. Next: look at the Python stack "
        "of rank 1 on node-a." in text(hang)
    )


# -- silent nodes


def test_node_that_fell_silent_when_the_steps_ended_is_named() -> None:
    """A node whose ranks and sidecar fell silent together, when the steps ended, has failed as a whole."""
    hang = found(*(on_silent_node(n, 12.3, issued={WORLD: 40}, inside=("data",)) for n in (2, 3)))

    assert (hang.kind, named(hang), hang.waiting) == ("silent", [2, 3], (0, 1))
    assert hang.look_at == ()
    assert (
        "ranks 2 (node-b) and 3 (node-b) went silent when the steps ended, 12.3 s ago, like the sidecar of that node; "
        "when last heard of inside data, and did not enter it. Next: see whether node-b can be reached" in text(hang)
    )


def test_silent_node_is_named_although_its_ranks_had_entered() -> None:
    """A machine that fails inside a collective has entered it."""
    hang = found(*(on_silent_node(n, 12.3) for n in (2, 3)))

    assert (hang.kind, named(hang)) == ("silent", [2, 3])
    assert "and entered all that others have" in text(hang)


def test_node_whose_sidecar_died_long_before_is_not_named() -> None:
    """The job went on for a minute after the node fell silent: what it told is out of date, and judges nobody."""
    stale = on_silent_node(3, report_age_s=70.0, issued={WORLD: 3})
    hang = found(behind(2), stale)

    assert (hang.kind, named(hang), hang.waiting, hang.unheard) == ("missing", [2], (0, 1), (3,))
    assert "Nothing is known of rank 3." in text(hang)


def test_all_others_wait_and_the_rest_is_unheard_of() -> None:
    """If all that are heard of have entered, the cause lies where nothing is known; the network is not blamed."""
    for stale in ({3: on_silent_node(3, report_age_s=70.0)}, {}):
        progress = {number: rank(number) for number in range(3)} | stale
        hang = find_hang(progress, {WORLD: (0, 1, 2, 3)})

        assert hang is not None
        assert (hang.kind, named(hang), hang.unheard) == ("unheard", [], (3,))
        assert "3 ranks wait in allreduce 57 of group 0, or what follows it; the cause is where nothing" in text(hang)


def test_rank_that_nobody_else_is_heard_of_is_not_alone() -> None:
    """One rank waits, and of all others nothing is known: that is no sign that they have ended."""
    hang = found(*(on_silent_node(number, report_age_s=70.0) for number in (1, 2, 3)))

    assert (hang.kind, named(hang), hang.waiting, hang.unheard) == ("unheard", [], (0,), (1, 2, 3))


def test_same_place_is_no_pause_while_others_are_unheard_of() -> None:
    """Whether all ranks save is not known if some are not heard of."""
    hang = found(*every(3, inside=("save",)), on_silent_node(3, report_age_s=70.0, inside=("save",)))

    assert (hang.kind, hang.alarm, hang.unheard) == ("apart", True, (3,))
    assert "Ranks 0-2 are inside save. Nothing is known of rank 3. Next:" in text(hang)


def test_node_that_fell_silent_during_the_hang_stays_known() -> None:
    """A rank that was already standing still when last heard of keeps its part: behind, and no silent machine."""
    hang = found(behind(2, since_step_s=30.0, report_age_s=20.0), *(rank(n, since_step_s=50.0) for n in (0, 1, 3)))

    assert (hang.kind, named(hang)) == ("missing", [2])
    assert "did not enter it, last inside forward GPT > blocks.3 when last heard of 20.0 s ago." in text(hang)


def test_rank_that_writes_a_capture() -> None:
    """All wait for it; that is no hang, unless it takes minutes."""
    writing = {"inside": (CAPTURING,), "issued": {WORLD: 56}}
    for_minutes = {"since_step_s": 150.0, "since_mark_s": 150.0}

    assert named(found(behind(2))) == [2]
    assert job(behind(2, **writing)) is None
    assert named(found(behind(2, state="dead", **writing))) == [2]
    assert named(found(*every(2, **for_minutes), behind(2, **writing, **for_minutes), count=3)) == [2]
