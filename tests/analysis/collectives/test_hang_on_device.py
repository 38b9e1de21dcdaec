"""Hangs in which one device is behind although all hosts have issued the same work."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.hangs import hang_text
from tests.support.progress import USUAL_S, WORLD, behind, every, found, job, named, rank
from torchlens_perf.analysis.collectives.device_progress import (
    LastDeviceMark,
    RankProgress,
    waits_for_device,
)
from torchlens_perf.analysis.collectives.hang import Collective
from torchlens_perf.run.clock import DeviceMark
from torchlens_perf.run.ring import Kind
from torchlens_perf.verdicts.words.hang import device_place_from_mark

FORWARD, BACKWARD = "the beginning of the forward pass", "the beginning of the backward pass"
ITEM = "`loss.item()`, train (gpt.py:31)"


def at(
    number: int, place: int, mark: str = "", step: int = 99, stood_s: float = 1.0, **changed: Any
) -> RankProgress:
    """Return a rank whose device had reached the given mark when the device was last polled."""
    return rank(number, device=LastDeviceMark(step, place, mark, stood_s), **changed)


def test_rank_whose_kernel_has_not_started_is_blamed() -> None:
    """All ranks have issued allreduce 57.

    NCCL reports its kernel on all ranks except rank 3, whose device runs an earlier kernel.
    """
    ranks = [rank(number, began={WORLD: 57}) for number in range(3)]
    hang = found(*ranks, rank(3, began={WORLD: 56}))
    assert (hang.kind, named(hang), hang.waiting, hang.needs_action) == (
        "device",
        [3],
        (0, 1, 2),
        True,
    )
    assert hang.collective == Collective(WORLD, 57, "allreduce")
    assert (
        "Ranks 0-3 have entered allreduce 57 of group 0, but on the device of rank 3 (node-b) the"
        " operation's kernel has not begun, although it has on ranks 0-2: an earlier kernel does"
        " not end there. Next: look for the kernel that does not end on rank 3 on node-b: dmesg"
        " (Xid)" in hang_text(hang)
    )


def test_rank_behind_in_one_group_and_ahead_in_no_other_is_blamed() -> None:
    """Rank 1 is behind in group b because it waits in group a.

    Rank 0 has not started the kernel in group a.
    """
    issued = {"a": 5, "b": 8}
    hang = found(
        rank(0, issued=issued, began={"a": 4, "b": 8}, operations={}),
        rank(1, issued=issued, began={"a": 5, "b": 7}, operations={}),
        count=2,
    )
    assert hang.kind == "together", "each waits for the other: not told apart"
    hang = found(
        rank(0, issued=issued, began={"a": 4, "b": 8}, operations={}),
        rank(1, issued=issued, began={"a": 5, "b": 8}, operations={}),
        count=2,
    )
    assert (hang.kind, named(hang), hang.collective) == ("device", [0], Collective("a", 5))


@pytest.mark.parametrize("missing", [{}, {"b": 3}], ids=["no plugin", "of another group"])
def test_no_rank_is_blamed_if_one_ranks_kernels_are_not_reported(missing: dict[str, int]) -> None:
    """The rank without reported kernels may be the cause."""
    ranks = [rank(number, began={WORLD: 57}) for number in range(2)]
    assert found(*ranks, rank(2, began={WORLD: 56}), rank(3, began=missing)).kind == "together"


def test_device_stuck_at_an_earlier_mark_is_blamed() -> None:
    """Rank 3's device has made no progress for a second.

    When other devices were last polled, they had made more progress.
    """
    others = [at(number, 3, BACKWARD, stood_s=0.0) for number in range(3)]
    hang = found(*others, at(3, 1, FORWARD))
    assert (hang.kind, named(hang), hang.waiting, hang.look_at) == ("device", [3], (0, 1, 2), (3,))
    assert (
        "Ranks 0-3 have entered allreduce 57 of group 0, but the device of rank 3 (node-b) is in"
        " step 99 after the beginning of the forward pass, while the furthest device of ranks 0-2"
        " is in step 99 after the beginning of the backward pass. Next: look for the kernel"
        in hang_text(hang)
    )


def test_device_at_a_mark_of_an_earlier_step_is_behind() -> None:
    """Marks are compared by step first, then by their order in the step."""
    others = [at(number, 0, step=100) for number in range(2)]
    assert named(found(*others, at(2, 7, step=99), at(3, 7, step=99))) == [2, 3]


def test_device_with_too_few_polls_is_not_stuck() -> None:
    """The device was polled once, or for less than two usual steps, before the thread was
    blocked.
    """
    others = [at(number, 3, stood_s=0.0) for number in range(3)]
    for stood_s in (0.0, 1.9 * USUAL_S):
        hang = found(*others, at(3, 1, stood_s=stood_s))
        assert (hang.kind, named(hang)) == ("together", [])
        assert (
            "It is not known which device is behind: the training threads were blocked"
            in hang_text(hang)
        )
    assert named(found(*others, at(3, 1, stood_s=2.1 * USUAL_S))) == [3]


def test_device_is_not_stuck_if_the_usual_step_time_is_unknown() -> None:
    ranks = [
        at(number, 3, usual_step_s=0.0, since_step_s=400.0, since_mark_s=400.0)
        for number in range(3)
    ]
    assert (
        found(*ranks, at(3, 1, usual_step_s=0.0, since_step_s=400.0, since_mark_s=400.0)).kind
        == "together"
    )


def test_no_rank_is_blamed_if_the_mark_of_one_is_unknown() -> None:
    """The rank whose device has an unknown mark may be on another node."""
    assert found(*(at(number, 3) for number in range(2)), at(2, 1), rank(3)).kind == "together"


def test_all_devices_stuck_at_one_mark_are_a_hang_and_no_pause() -> None:
    """The devices have unfinished work, wherever the hosts are."""
    hang = found(*(at(number, 3, BACKWARD) for number in range(4)))
    assert (hang.kind, named(hang)) == ("together", [])
    assert (
        "Their devices are at the same place, in step 99 after the beginning of the backward pass"
        in hang_text(hang)
    )
    hosts = [at(number, 3, BACKWARD, inside=()) for number in range(4)]
    assert found(*hosts).kind == "together"
    assert job(*every(4, inside=())) is None or not found(*every(4, inside=())).needs_action


def test_hosts_blocked_outside_spans_are_no_pause_if_a_device_is_behind() -> None:
    """loss.item() waits for the device outside any span."""
    others = [at(number, 3, inside=()) for number in range(3)]
    hang = found(*others, at(3, 1, inside=()))
    assert (hang.kind, named(hang), hang.needs_action) == ("device", [3], True)


def test_hosts_that_wait_for_devices_without_marks_are_a_hang_without_blame() -> None:
    """The training loop waits for its loss in each step."""
    hosts = [
        at(number, 7, step=98, stood_s=0.0, inside=(), waits_in=ITEM if number < 2 else None)
        for number in range(4)
    ]
    hang = found(*hosts)
    assert (hang.kind, named(hang), hang.waiting, hang.needs_action) == (
        "blocked",
        [],
        (0, 1, 2, 3),
        True,
    )
    assert (
        "No step for 12.0 s (usually 62.0 ms). The training threads wait for their devices, in"
        " `loss.item()`, train (gpt.py:31), by the"
        " stacks of ranks 0-1. It is not known what the devices execute: the threads last"
        " checked them before they began to wait. One device may be stuck in a kernel of its own"
        " while the others wait for it in a collective, or all devices may execute long work. The"
        " records cannot distinguish these cases. Next: see which kernel runs on each rank's device"
        " (cuda-gdb: info cuda kernels)" in hang_text(hang)
    )
    assert "by the stack of rank 0." in hang_text(
        found(at(0, 7, inside=(), stood_s=0.0, waits_in=ITEM), *every(4, inside=())[1:])
    )


@pytest.mark.parametrize(
    "waits_in", [(None, None), ("", ""), (ITEM, ""), (ITEM, "`x.item()`, other (gpt.py:40)")],
    ids=["not asked", "none waits", "one waits", "in two places"],
)  # fmt: skip
def test_busy_hosts_on_stuck_devices_are_a_pause(
    waits_in: tuple[str | None, str | None],
) -> None:
    """The hosts are busy, as in a checkpoint or an evaluation.

    Missing polls of the devices do not prove a hang.
    """
    hosts = [
        at(number, 7, inside=(), stood_s=0.0, waits_in=waits_in[number]) for number in range(2)
    ]
    hang = found(*hosts, count=2)
    assert (hang.kind, hang.waiting, hang.needs_action) == ("pause", (), False)


def test_rank_that_waits_for_its_device_before_a_collective_is_blamed() -> None:
    """Only rank 0 reads its loss.

    Rank 0 is behind, but its device may wait for another rank's device.
    """
    hang = found(behind(0, inside=(), device=LastDeviceMark(99, 7, "", 0.0), waits_in=ITEM))
    assert (hang.kind, named(hang)) == ("missing", [0])
    assert (
        "rank 0 (node-a) did not enter it, last in code outside all phases and sections, waiting for its device"
        " in `loss.item()`, train (gpt.py:31). Next: see which kernel runs on the device of rank 0"
        " on node-a (cuda-gdb: info cuda kernels): a kernel that does not end, or a collective's"
        " kernel that waits for another rank's device." in hang_text(hang)
    )


def test_rank_with_a_stuck_device_is_blamed_if_all_stacks_wait_for_devices() -> None:
    others = [at(number, 3, inside=(), stood_s=0.0, waits_in=ITEM) for number in range(3)]
    assert named(found(*others, at(3, 1, inside=(), waits_in=ITEM))) == [3]


@pytest.mark.parametrize(
    ("source", "waits"),
    [
        ("return loss.item()", True),
        ("losses += loss.detach().tolist()", True),
        ("torch.cuda.synchronize()", True),
        ("print(step, float(loss))", True),
        ("if bool(torch.isnan(loss)):", True),
        ("torch.save(model.state_dict(), path)", False),
        ("state = {name: value.cpu() for name, value in state.items()}", False),
        ("items(loss)", False),
        ("x = x.float()", False),
        ("time.sleep(60)", False),
        ("", False),
    ],
)
def test_stack_lines_that_wait_for_a_device_are_recognized(source: str, waits: bool) -> None:
    """A process with a device may wait for seconds in one of these source lines."""
    assert waits_for_device(source) is waits


def test_text_does_not_mention_devices_in_a_job_on_cpus() -> None:
    assert "device is behind" not in hang_text(found())


@pytest.mark.parametrize(
    ("place", "kind", "is_end", "words"),
    [
        (0, 0, False, "its beginning"),
        (4, Kind.FORWARD, True, "the end of the forward pass"),
        (5, Kind.MODULE, False, "the beginning of module blocks.3"),
        (6, Kind.MODULE_BACKWARD, True, "the end of the backward pass of module blocks.3"),
        (7, Kind.SECTION, True, "the end of section blocks.3"),
        (8, 0, False, ""),
    ],
)
def test_mark_is_described_by_its_phase_or_module(
    place: int, kind: int, is_end: bool, words: str
) -> None:
    found_place = device_place_from_mark(
        DeviceMark(12, place, kind, 3, is_end, 5_000_000_000, 7_500_000_000), "blocks.3"
    )
    assert found_place == LastDeviceMark(12, place, words, 2.5, kind, is_end)
