"""Hangs without a blamed rank, hangs of only some ranks, keys of findings, and long texts."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.hangs import hang_text
from tests.support.progress import WORLD, behind, every, found, job, named, rank
from torchlens_perf.analysis.collectives.hang import Collective, Hang

# -- no rank is behind


def test_groups_used_in_different_order_are_shown_as_a_cycle() -> None:
    """The text shows in which collective each rank waits. No rank is blamed."""
    ranks = [
        rank(0, issued={"a": 5, "b": 7}, operations={"a": {5: "allreduce"}}),
        rank(1, issued={"a": 4, "b": 8}, operations={"b": {8: "allgather"}}),
    ]
    hang = found(*ranks, count=2)

    assert (hang.kind, named(hang), hang.waiting, hang.look_at) == ("mismatch", [], (0, 1), (0, 1))
    assert hang.cycle == (
        (0, Collective("a", 5, "allreduce")),
        (1, Collective("b", 8, "allgather")),
    )
    assert (
        "Ranks wait for each other in a cycle: rank 0 waits in allreduce 5 of group a for rank 1,"
        " rank 1 waits in allgather 8 of group b for rank 0. Next: let all ranks call"
        in hang_text(hang)
    )


def test_cycle_excludes_ranks_that_only_wait_for_it() -> None:
    """A rank that waits for ranks of the cycle is not in the cycle if no rank waits for it."""
    ranks = [
        rank(0, issued={"a": 5}, operations={}),
        rank(1, issued={"a": 4, "b": 8}, operations={}),
        rank(2, issued={"b": 7, "a": 5}, operations={}),
        # Rank 3 became silent after it had waited for 12 s.
        rank(3, issued={"a": 5}, operations={}, report_age_s=20.0),
    ]
    ranks[:3] = [
        dataclasses.replace(each, since_step_s=32.0, since_mark_s=32.0) for each in ranks[:3]
    ]
    hang = found(*ranks)

    assert hang.kind == "mismatch"
    assert sorted(number for number, _ in hang.cycle) == [1, 2]
    assert hang.waiting == (0, 1, 2)


def test_different_operations_with_one_number_are_shown_as_a_mismatch() -> None:
    """Ranks issued different collectives at the same position, and the text shows both."""
    hang = found(rank(2, operations={WORLD: {57: "broadcast"}}))

    assert (hang.kind, named(hang)) == ("mismatch", [])
    assert hang.operations == {"allreduce": (0, 1, 3), "broadcast": (2,)}
    assert (
        "Ranks 0-1,3 called allreduce, rank 2 called broadcast as collective 57 of group 0: the calls"
        " differ. Next: let all ranks call the same operations" in hang_text(hang)
    )
    lines = {0: "train.py:57 in main", 1: "train.py:57 in main", 2: "train.py:65 in main"}
    assert hang_text(hang, lines).splitlines()[1:] == [
        "rank 2: broadcast, inside backward, train.py:65 in main",
        "rank 3: allreduce, inside backward",
        "ranks 0-1: allreduce, inside backward, train.py:57 in main",
    ]
    assert hang.look_at == (2, 0)


def test_operations_of_another_order_are_shown_in_their_orders() -> None:
    """Rank 2 issued both operations before it began to wait."""
    last = {55: "allreduce", 56: "allgather", 57: "allreduce"}
    swapped = {55: "allreduce", 56: "allreduce", 57: "allgather"}
    others = [rank(number, operations={WORLD: last}) for number in (0, 1, 3)]
    hang = found(rank(2, operations={WORLD: swapped}), *others)

    assert (hang.kind, hang.difference, hang.collective) == (
        "mismatch",
        "order",
        Collective(WORLD, 56),
    )
    assert (
        "Ranks 0-1,3 called allgather, then allreduce, rank 2 called allreduce, then allgather as"
        " collective 56 of group 0: the order differs." in hang_text(hang)
    )


def test_different_sizes_of_the_same_operation_are_a_mismatch() -> None:
    ranks = [rank(n, sizes={WORLD: 4096 if n == 2 else 1024}) for n in range(4)]
    hang = found(*ranks)

    assert (hang.kind, hang.difference, named(hang)) == ("mismatch", "sizes", [])
    assert (
        "Ranks 0-1,3 called allreduce of 1024 bytes, rank 2 called allreduce of 4096 bytes as"
        " collective 57 of group 0: the sizes differ. Next: let all ranks call the same operations"
        " in the same order, with the same sizes" in hang_text(hang)
    )


@pytest.mark.parametrize("operation", ["alltoall_base", "gather", "barrier", "reduce_scatter"])
def test_sizes_that_may_differ_are_no_mismatch(operation: str) -> None:
    names = {WORLD: {57: operation}}
    ranks = [rank(n, operations=names, sizes={WORLD: 1024 * n}) for n in range(4)]

    assert found(*ranks).kind == "together"


@pytest.mark.parametrize(
    ("operation", "sizes", "calls"),
    [
        ("allreduce", (1024, 1024), "allreduce of float32, rank 2 called allreduce of int32"),
        ("broadcast", (1024, 1024), "broadcast of float32, rank 2 called broadcast of int32"),
        (
            "alltoall_base",
            (10, 40),
            "alltoall_base of float32, rank 2 called alltoall_base of int32",
        ),
        (
            "reduce_scatter_base",
            (1024, 2048),
            "reduce_scatter_base of 1024 bytes of float32, rank 2 called reduce_scatter_base of 2048"
            " bytes of int32",
        ),
    ],
)
def test_different_data_types_of_the_same_operation_are_a_mismatch(
    operation: str, sizes: tuple[int, int], calls: str
) -> None:
    names = {WORLD: {57: operation}}
    hang = found(
        *(
            rank(
                n, operations=names, sizes={WORLD: sizes[n == 2]},
                dtypes={WORLD: "int32" if n == 2 else "float32"},
            )
            for n in range(4)
        )
    )  # fmt: skip

    assert (hang.kind, hang.difference, named(hang)) == ("mismatch", "dtypes", [])
    assert f"Ranks 0-1,3 called {calls} as collective 57 of group 0: the data" in hang_text(hang)
    assert "in the same order, with the same data types" in hang_text(hang)


@pytest.mark.parametrize("operation", ["gather", "unknown", "allreduce"])
def test_data_types_that_may_differ_or_are_not_known_are_no_mismatch(operation: str) -> None:
    """Only the root of a gather has output tensors."""
    dtypes = ["float32", "" if operation == "allreduce" else "int32"]
    ranks = [
        rank(
            n, operations={WORLD: {57: operation}}, sizes={WORLD: 8}, dtypes={WORLD: dtypes[n > 0]}
        )
        for n in range(4)
    ]

    assert found(*ranks).kind == "together"


def test_sizes_of_different_operations_of_a_group_are_not_compared() -> None:
    """Rank 2 has issued an operation less, of another size."""
    ranks = [rank(n, sizes={WORLD: 1024}) for n in range(4)]
    ranks[2] = behind(2, sizes={WORLD: 4096})

    assert found(*ranks).kind == "missing"


def test_numbers_that_began_at_different_operations_are_no_mismatch() -> None:
    """Point-to-point messages count on some backends, so rank 2 is one number ahead."""
    loop = {n: "allgather" if n % 2 else "allreduce" for n in range(40, 58)}
    shifted = {n + 1: name for n, name in loop.items()}
    others = [rank(number, operations={WORLD: loop}) for number in (0, 1, 3)]
    hang = found(rank(2, issued={WORLD: 58}, operations={WORLD: shifted}), *others)

    assert not hang.operations


def test_operations_of_another_group_with_the_same_name_are_not_compared() -> None:
    """Groups that one split creates share a name. The members are those of ranks 0 and 1."""
    ranks = [
        rank(n, issued={"tp": 9}, operations={"tp": {9: "allreduce" if n < 2 else "broadcast"}})
        for n in range(4)
    ]

    assert not found(*ranks, groups={"tp": (0, 1)}).operations


def test_mismatch_of_a_subgroup_leaves_out_the_other_ranks() -> None:
    """Ranks 2 and 3 wait in a collective of their own group, and have not entered this one."""
    ranks = [
        rank(0, issued={"tp": 9}, operations={"tp": {9: "barrier"}}),
        rank(1, issued={"tp": 9}, operations={"tp": {9: "allreduce"}}),
        *(rank(n, issued={"pp": 4}, operations={"pp": {4: "broadcast"}}) for n in (2, 3)),
    ]
    hang = found(*ranks, groups={"tp": (0, 1), "pp": (2, 3)})

    assert hang.operations == {"barrier": (0,), "allreduce": (1,)}
    assert "Rank 0 called barrier, rank 1 called allreduce as collective 9" in hang_text(hang)


def test_mismatched_operations_are_shown_although_a_rank_is_behind() -> None:
    """A rank on another code path may be behind or ahead later, so the first different number is
    shown.
    """
    usual = {56: "allreduce", 57: "allreduce", 58: "allreduce"}
    others = [rank(number, issued={WORLD: 58}, operations={WORLD: usual}) for number in (0, 1, 3)]
    hang = found(
        rank(2, issued={WORLD: 60}, operations={WORLD: {**usual, 57: "broadcast", 58: "x"}}),
        *others,
    )

    assert (hang.kind, hang.collective) == ("mismatch", Collective(WORLD, 57))


def test_no_rank_is_blamed_if_all_are_in_the_same_collective() -> None:
    """The text refers to the network and the devices."""
    hang = found()

    assert (hang.kind, named(hang), hang.waiting, hang.needs_action) == (
        "together",
        [],
        (0, 1, 2, 3),
        True,
    )
    assert hang.collective == Collective(WORLD, 57, "allreduce")
    assert (
        "All 4 ranks have entered allreduce 57 of group 0: no rank keeps the others waiting. Next:"
        " look at the network and the devices" in hang_text(hang)
    )


def test_rank_inside_ddps_reducer_counts_as_waiting() -> None:
    """DDP waits in C++ inside the backward pass, where no wait in Python is open."""
    assert found(*every(2, inside=("backward",)), count=2).kind == "together"


def test_no_collective_is_shown_if_waiting_ranks_have_none_in_common() -> None:
    hang = found(*every(2, issued={}, operations={}), count=2)

    assert (hang.kind, hang.collective) == ("together", None)
    assert "Both ranks wait, but no record shows for what." in hang_text(hang)


def test_all_ranks_in_the_same_section_are_a_pause_and_no_alarm() -> None:
    """The section may be a checkpoint."""
    hang = found(*every(4, inside=("torch.save", "write")), rank(3, inside=("torch.save",)))

    assert (hang.kind, named(hang), hang.waiting, hang.needs_action) == ("pause", [], (), False)
    assert ". No rank waits for another: a checkpoint" in (text := hang_text(hang))
    assert text.endswith("\nrank 3: inside torch.save\nranks 0-2: inside torch.save > write")


def test_all_ranks_outside_spans_are_a_pause_and_no_alarm() -> None:
    """The ranks are in code that is not timed."""
    assert hang_text(found(*every(4, inside=()))).endswith(
        "\nranks 0-3: in code outside all phases and sections"
    )


def test_pause_of_a_single_rank_is_shown_with_its_open_span() -> None:
    hang = found(*every(1, inside=("data",)), count=1)

    assert (hang.kind, named(hang)) == ("pause", [])
    assert hang_text(hang).endswith("\nrank 0: inside data")


def test_span_with_the_fewest_ranks_is_first_if_no_collective_is_recorded() -> None:
    """Users should first look at ranks that do not wait."""
    ranks = [
        *(rank(n, issued={}, operations={}) for n in (0, 1, 3)),
        behind(2, issued={}, operations={}),
    ]
    hang = found(*ranks)

    assert (hang.kind, named(hang), hang.waiting, hang.look_at[0]) == ("apart", [], (0, 1, 3), 2)
    assert (
        "No recorded collective shows which rank waits for which. Next: look at the Python stack of"
        " rank 2 first" in (text := hang_text(hang))
    )
    assert text.endswith("\nrank 2: inside forward GPT > blocks.3\nranks 0-1,3: inside backward")


def test_single_waiting_rank_is_not_the_first_to_look_at() -> None:
    """Several other ranks do not wait, so one of them is more likely the cause."""
    ranks = [
        rank(0, issued={}, operations={}),
        *(behind(n, issued={}, operations={}) for n in (1, 2)),
    ]

    assert found(*ranks, count=3).look_at == (1, 2, 0)


# -- other ranks make progress


def test_stuck_rank_is_blamed_while_independent_ranks_make_steps() -> None:
    """The text says that no rank waits for the stuck one."""
    going_on = [rank(number, since_step_s=0.03, since_mark_s=0.0) for number in (0, 1, 3)]
    hang = found(behind(2), *going_on)

    assert (hang.kind, named(hang), hang.moving) == ("alone", [2], (0, 1, 3))
    assert (
        "on rank 2, while 3 other ranks make steps. Rank 2 (node-b) is inside forward GPT >"
        " blocks.3, and" in hang_text(hang)
    )


def test_idle_server_rank_is_a_hang_only_if_its_process_is_stopped() -> None:
    """A server's rank without a request has no open span."""
    going_on = [rank(number, since_step_s=0.03, since_mark_s=0.0) for number in (0, 1, 3)]

    assert job(behind(2, inside=()), *going_on) is None
    hang = found(behind(2, inside=(), state="stopped"), *going_on)
    assert named(hang) == [2]
    assert "stopped by a signal" in hang_text(hang)


def test_no_hang_is_reported_while_other_ranks_almost_reach_the_limit() -> None:
    """The first rank may reach the time limit a moment before the others."""
    others = [rank(number, since_step_s=9.9, since_mark_s=9.8) for number in (0, 1, 3)]

    assert job(behind(2), *others) is None


def test_hang_in_one_of_two_independent_halves_of_a_job_is_found() -> None:
    """Only the half that hangs is judged."""
    going_on = [
        rank(number, since_step_s=0.03, issued={"b": 900}, operations={}) for number in (4, 5, 6, 7)
    ]
    hang = found(behind(2), *going_on, count=8)

    assert (hang.kind, named(hang), hang.waiting, hang.moving) == (
        "missing",
        [2],
        (0, 1, 3),
        (4, 5, 6, 7),
    )
    assert hang.unheard == ()
    assert hang_text(hang).startswith(
        "No step for 12.0 s (usually 62.0 ms) on ranks 0-3, while 4 other ranks make steps. "
    )


# -- each finding is reported once


def test_hang_keeps_its_key_until_a_step_ends_or_another_rank_blocks() -> None:
    """A longer duration does not change the key."""
    first = found(behind(2))
    long = {"since_step_s": 500.0, "since_mark_s": 499.0}
    later = found(behind(2, **long), *(rank(number, **long) for number in (0, 1, 3)))
    after_step = found(behind(2, step=101), *(rank(n, step=101) for n in (0, 1, 3)))

    assert first.key == later.key
    assert (
        len(
            {first.key, after_step.key, found(behind(3)).key, found(behind(2, state="stopped")).key}
        )
        == 4
    )


@pytest.mark.parametrize("busy", [False, True])
def test_pause_ten_times_as_long_has_a_new_key(busy: bool) -> None:
    """If a checkpoint follows every thousand steps, only the first one is reported.

    A much longer checkpoint is reported again.
    """

    def at(step: int, since_s: float) -> Hang:
        if busy:
            late = [
                rank(n, step=step, since_step_s=since_s, since_mark_s=since_s) for n in (0, 1, 3)
            ]
            return found(behind(2, step=step, since_step_s=since_s, since_mark_s=0.1), *late)
        return found(
            *every(4, step=step, since_step_s=since_s, since_mark_s=since_s, inside=("save",))
        )

    assert at(1000, 15.0).key == at(2000, 16.0).key
    assert at(1000, 40.0).key == at(2000, 45.0).key
    assert len({at(1000, since_s).key for since_s in (15.0, 30.0, 45.0, 100.0)}) == 4


# -- numbers and long lists


def test_times_and_step_of_a_hang_cover_all_ranks() -> None:
    """The duration is the time since any rank finished a step.

    The usual step time is the slowest rank's, and the step number the highest.
    """
    hang = found(
        rank(0, since_step_s=30.0, usual_step_s=0.5),
        rank(1, step=103),
        behind(2, since_step_s=11.0),
    )

    assert (hang.since_s, hang.usual_s, hang.step) == (11.0, 0.5, 103)


def test_collective_of_the_group_with_most_ranks_is_shown() -> None:
    """The group is the one that most ranks use or wait in."""
    small = {"z": 3}
    both = found(*(rank(number, issued={WORLD: 57, **small}) for number in (0, 1)))
    missed = found(
        behind(2, issued={WORLD: 56, "z": 2}),
        rank(0, issued={WORLD: 57, "z": 3}, operations={}),
        groups={"z": (0, 2)},
    )

    assert both.collective == Collective(WORLD, 57, "allreduce")
    assert missed.collective == missed.blocking[0].missing == Collective(WORLD, 57, "allreduce")


def test_operation_is_not_shown_if_ranks_report_different_ones() -> None:
    hang = found(behind(2, state="stopped"), rank(0, operations={WORLD: {57: "broadcast"}}))

    assert (hang.kind, hang.collective) == ("stopped", Collective(WORLD, 57, ""))


def test_text_has_six_places_with_short_names_and_the_number_of_others() -> None:
    """Nested spans are shown by the names of the outermost and the innermost one."""
    deep = tuple(f"m{i}" for i in range(9))
    line = hang_text(
        found(
            *(rank(n, inside=(f"p{n}", *deep), issued={}, operations={}) for n in range(8)), count=8
        )
    )

    assert "\nrank 0: inside p0 > m0 > ... > m6 > m7 > m8\nrank 1" in line
    assert line.endswith("\nrank 5: inside p5 > m0 > ... > m6 > m7 > m8\n2 more places")


def test_text_has_four_blocking_ranks_and_the_number_of_others() -> None:
    line = hang_text(found(*(behind(n, inside=(f"p{n}",)) for n in range(6)), count=8))

    assert "rank 3 (node-b) did not enter it, last inside p3; 2 more ranks are missing." in line


def test_text_of_a_long_cycle_shows_its_start_and_end() -> None:
    # Each rank waits for the next one.
    ring = [rank(n, issued={f"g{n}": 5, f"g{(n + 5) % 6}": 4}, operations={}) for n in range(6)]
    hang = found(*ring, count=6)

    assert len(hang.cycle) == 6
    assert (
        "cycle: rank 0 waits in collective 5 of group g0 for rank 1, rank 1 waits in collective 5"
        " of group g1 for rank 2, rank 2 waits in collective 5 of group g2 for rank 3, ..., rank 5"
        " waits in collective 5 of group g5 for rank 0. Next:" in hang_text(hang)
    )
