"""Standing still with no rank to blame, or with a part of the ranks; what is reported again, and long lists."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.progress import WORLD, behind, every, found, job, named, rank
from torchlens_perf.analysis.collectives.hang import Collective, Hang
from torchlens_perf.analysis.collectives.semantics import sole_operations
from torchlens_perf.verdicts.words.hang import text

# -- nobody is behind


def test_order_that_does_not_match_is_shown_as_a_cycle() -> None:
    """Ranks that wait for each other are all named with what each waits in, and none is blamed."""
    ranks = [
        rank(0, issued={"a": 5, "b": 7}, operations={"a": {5: "allreduce"}}),
        rank(1, issued={"a": 4, "b": 8}, operations={"b": {8: "allgather"}}),
    ]
    hang = found(*ranks, count=2)

    assert (hang.kind, named(hang), hang.waiting, hang.look_at) == ("mismatch", [], (0, 1), (0, 1))
    assert hang.cycle == ((0, Collective("a", 5, "allreduce")), (1, Collective("b", 8, "allgather")))
    assert (
        "Ranks wait for each other in a cycle: rank 0 waits in allreduce 5 of group a for rank 1, rank 1 waits in "
        "allgather 8 of group b for rank 0. Next: make all ranks issue" in text(hang)
    )


def test_cycle_leaves_out_who_only_waits_for_it() -> None:
    """A rank that waits for a cycle without being waited for is no part of it."""
    ranks = [
        rank(0, issued={"a": 5}, operations={}),
        rank(1, issued={"a": 4, "b": 8}, operations={}),
        rank(2, issued={"b": 7, "a": 5}, operations={}),
        rank(3, issued={"a": 5}, operations={}, report_age_s=20.0),  # fell silent when it had waited for 12 s
    ]
    ranks[:3] = [dataclasses.replace(each, since_step_s=32.0, since_mark_s=32.0) for each in ranks[:3]]
    hang = found(*ranks)

    assert hang.kind == "mismatch"
    assert sorted(number for number, _ in hang.cycle) == [1, 2]
    assert hang.waiting == (0, 1, 2)


def test_different_operations_under_one_number() -> None:
    """Ranks that issued different collectives at the same place in the order are told apart by them."""
    hang = found(rank(2, operations={WORLD: {57: "broadcast"}}))

    assert (hang.kind, named(hang)) == ("mismatch", [])
    assert hang.operations == {"allreduce": (0, 1, 3), "broadcast": (2,)}
    assert (
        "Collective 57 of group 0 is not the same everywhere: allreduce on ranks 0-1,3, broadcast on rank 2. Next: "
        in text(hang)
    )
    assert hang.look_at == (2, 0)


def test_different_operations_come_before_who_is_behind() -> None:
    """A rank that took another path may look behind or ahead later: the first number that differs is told."""
    usual = {56: "allreduce", 57: "allreduce", 58: "allreduce"}
    others = [rank(number, issued={WORLD: 58}, operations={WORLD: usual}) for number in (0, 1, 3)]
    hang = found(rank(2, issued={WORLD: 60}, operations={WORLD: {**usual, 57: "broadcast", 58: "x"}}), *others)

    assert (hang.kind, hang.collective) == ("mismatch", Collective(WORLD, 57))


def test_all_in_the_same_collective_is_nobodys_fault() -> None:
    """If all have entered and wait, the network or a device is what to look at."""
    hang = found()

    assert (hang.kind, named(hang), hang.waiting, hang.alarm) == ("together", [], (0, 1, 2, 3), True)
    assert hang.collective == Collective(WORLD, 57, "allreduce")
    assert (
        "All 4 ranks have entered allreduce 57 of group 0: none keeps the others waiting. Ranks 0-3 are inside "
        "backward. Next: look at the network and the devices" in text(hang)
    )


def test_waiting_inside_a_reducer_is_waiting() -> None:
    """DDP waits in C++ inside the backward pass, where no wait of Python's is open."""
    assert found(*every(2, inside=("backward",)), count=2).kind == "together"


def test_waiting_for_what_is_not_numbered() -> None:
    """Ranks that all wait and have no collective in common: told without the name of one."""
    hang = found(*every(2, issued={}, operations={}), count=2)

    assert (hang.kind, hang.collective) == ("together", None)
    assert "Both ranks wait, and nothing tells for what." in text(hang)


def test_pause_of_all_ranks_is_no_alarm() -> None:
    """All ranks are in the same section: a checkpoint, perhaps; no rank is blamed."""
    hang = found(*every(4, inside=("torch.save", "write")), rank(3, inside=("torch.save",)))

    assert (hang.kind, named(hang), hang.waiting, hang.alarm) == ("pause", [], (), False)
    assert (
        "Rank 3 is inside torch.save; ranks 0-2 are inside torch.save > write. No rank waits for another: a checkpoint"
        in text(hang)
    )


def test_pause_outside_of_all_spans() -> None:
    """All ranks are in code that is not timed: no alarm either."""
    assert "are outside of all that is timed. No rank waits" in text(found(*every(4, inside=())))


def test_job_of_one_rank_pauses() -> None:
    """A single rank that makes no step is told with its place."""
    hang = found(*every(1, inside=("data",)), count=1)

    assert (hang.kind, named(hang)) == ("pause", [])
    assert "Rank 0 is inside data." in text(hang)


def test_different_places_without_a_collective() -> None:
    """Where no collective tells, the places are told, the rarest first, and who does not wait is looked at first."""
    ranks = [*(rank(n, issued={}, operations={}) for n in (0, 1, 3)), behind(2, issued={}, operations={})]
    hang = found(*ranks)

    assert (hang.kind, named(hang), hang.waiting, hang.look_at[0]) == ("apart", [], (0, 1, 3), 2)
    assert (
        "No collective tells who waits for whom. Rank 2 is inside forward GPT > blocks.3; ranks 0-1,3 are inside "
        "backward. Next: look at the Python stack of rank 2 first" in text(hang)
    )


def test_one_that_waits_is_not_the_odd_one() -> None:
    """A single rank that waits among more that do not is no reason to look at it first."""
    ranks = [rank(0, issued={}, operations={}), *(behind(n, issued={}, operations={}) for n in (1, 2))]

    assert found(*ranks, count=3).look_at == (1, 2, 0)


# -- others go on


def test_stuck_rank_beside_ranks_that_go_on() -> None:
    """Independent ranks make steps; one that is stuck at something is named, and that nobody waits for it."""
    going_on = [rank(number, since_step_s=0.03, since_mark_s=0.0) for number in (0, 1, 3)]
    hang = found(behind(2), *going_on)

    assert (hang.kind, named(hang), hang.moving) == ("alone", [2], (0, 1, 3))
    assert "on rank 2, while 3 other ranks make steps. Rank 2 (node-b) is inside forward GPT > blocks.3, and" in text(
        hang
    )


def test_rank_without_work_beside_others_is_not_stuck() -> None:
    """A server's rank that has no request is inside of nothing, and no hang; stopped, it is one."""
    going_on = [rank(number, since_step_s=0.03, since_mark_s=0.0) for number in (0, 1, 3)]

    assert job(behind(2, inside=()), *going_on) is None
    hang = found(behind(2, inside=(), state="stopped"), *going_on)
    assert named(hang) == [2]
    assert "stopped by a signal" in text(hang)


def test_ranks_about_to_stand_still_are_waited_for() -> None:
    """When the first rank reaches the limit, the others may be a moment behind: then nothing is said yet."""
    others = [rank(number, since_step_s=9.9, since_mark_s=9.8) for number in (0, 1, 3)]

    assert job(behind(2), *others) is None


def test_half_of_the_job_hangs_while_the_other_half_goes_on() -> None:
    """Two islands that do not depend on each other: the one that hangs is judged by itself."""
    going_on = [rank(number, since_step_s=0.03, issued={"b": 900}, operations={}) for number in (4, 5, 6, 7)]
    hang = found(behind(2), *going_on, count=8)

    assert (hang.kind, named(hang), hang.waiting, hang.moving) == ("missing", [2], (0, 1, 3), (4, 5, 6, 7))
    assert hang.unheard == ()
    assert text(hang).startswith("No step for 12.0 s (usually 62.0 ms) on ranks 0-3, while 4 other ranks make steps. ")


# -- reported once


def test_hang_has_one_key_until_a_step_is_made() -> None:
    """However long it lasts, a hang is one; after a step it is another one, and so it is with another blocking rank."""
    first = found(behind(2))
    long = {"since_step_s": 500.0, "since_mark_s": 499.0}
    later = found(behind(2, **long), *(rank(number, **long) for number in (0, 1, 3)))
    after_step = found(behind(2, step=101), *(rank(n, step=101) for n in (0, 1, 3)))

    assert first.key == later.key
    assert len({first.key, after_step.key, found(behind(3)).key, found(behind(2, state="stopped")).key}) == 4


@pytest.mark.parametrize("busy", [False, True])
def test_usual_pause_has_one_key_and_a_longer_one_another(busy: bool) -> None:
    """The checkpoint of each thousand steps is reported the first time; one that takes ten times as long again."""

    def at(step: int, since_s: float) -> Hang:
        if busy:
            late = [rank(n, step=step, since_step_s=since_s, since_mark_s=since_s) for n in (0, 1, 3)]
            return found(behind(2, step=step, since_step_s=since_s, since_mark_s=0.1), *late)
        return found(*every(4, step=step, since_step_s=since_s, since_mark_s=since_s, inside=("save",)))

    assert at(1000, 15.0).key == at(2000, 16.0).key
    assert at(1000, 40.0).key == at(2000, 45.0).key
    assert len({at(1000, since_s).key for since_s in (15.0, 30.0, 45.0, 100.0)}) == 4


# -- figures and long lists


def test_figures_are_those_of_all_ranks() -> None:
    """So long has no rank made a step; the usual time is the slowest rank's, the step the furthest one's."""
    hang = found(rank(0, since_step_s=30.0, usual_step_s=0.5), rank(1, step=103), behind(2, since_step_s=11.0))

    assert (hang.since_s, hang.usual_s, hang.step) == (11.0, 0.5, 103)


def test_largest_group_stands_for_all() -> None:
    """The collective told is the one of the group that most ranks use, or wait in."""
    small = {"z": 3}
    both = found(*(rank(number, issued={WORLD: 57, **small}) for number in (0, 1)))
    missed = found(
        behind(2, issued={WORLD: 56, "z": 2}), rank(0, issued={WORLD: 57, "z": 3}, operations={}), groups={"z": (0, 2)}
    )

    assert both.collective == Collective(WORLD, 57, "allreduce")
    assert missed.collective == missed.blocking[0].missing == Collective(WORLD, 57, "allreduce")


def test_operation_that_ranks_disagree_on_is_not_told() -> None:
    """What waiting ranks call otherwise has no name."""
    hang = found(behind(2, state="stopped"), rank(0, operations={WORLD: {57: "broadcast"}}))

    assert (hang.kind, hang.collective) == ("stopped", Collective(WORLD, 57, ""))


def test_operation_is_known_where_a_group_has_but_one_kind() -> None:
    """A group of one kind of collective tells what its last one is; a group of several does not, nor do peers."""
    names = [
        "(other)", "forward GPT", "allreduce group=0 dtype=float32", "allreduce group=0 dtype=bfloat16",
        "broadcast group=7 dtype=int64 root=0", "allreduce group=7", "send group=8 dtype=float16 peer=1",
        "barrier group=9",
    ]  # fmt: skip

    assert sole_operations({"0": 57, "7": 3, "8": 2}, names) == {"0": {57: "allreduce"}}


def test_many_places_and_deep_ones_are_cut() -> None:
    """Places beyond the fourth are counted; of a deep one the outermost and innermost names are shown."""
    deep = tuple(f"m{i}" for i in range(9))
    line = text(found(*(rank(n, inside=(f"p{n}", *deep), issued={}, operations={}) for n in range(6)), count=6))

    assert "Rank 0 is inside p0 > m0 > ... > m6 > m7 > m8; rank 1" in line
    assert "rank 3 is inside p3 > m0 > ... > m6 > m7 > m8; and 2 more places. Next:" in line


def test_many_clauses_are_cut() -> None:
    """Culprits in more than four ways are counted."""
    line = text(found(*(behind(n, inside=(f"p{n}",)) for n in range(6)), count=8))

    assert "rank 3 (node-b) did not enter it, last inside p3; 2 more ranks are missing." in line


def test_long_cycle_is_cut() -> None:
    """Of a long cycle the beginning is shown, and how it closes."""
    # Each waits for the next one.
    ring = [rank(n, issued={f"g{n}": 5, f"g{(n + 5) % 6}": 4}, operations={}) for n in range(6)]
    hang = found(*ring, count=6)

    assert len(hang.cycle) == 6
    assert (
        "cycle: rank 0 waits in collective 5 of group g0 for rank 1, rank 1 waits in collective 5 of group g1 for rank "
        "2, rank 2 waits in collective 5 of group g2 for rank 3, ..., rank 5 waits in collective 5 of group g5 for "
        "rank 0. Next:" in text(hang)
    )
