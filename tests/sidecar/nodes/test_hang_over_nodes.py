"""Tests that node 0 finds the cause of a hang on another node from that node's summaries."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.hangs import hang_text
from tests.support.progress import WORLD, found, named, rank
from torchlens_perf.analysis.collectives.device_progress import RankProgress
from torchlens_perf.analysis.collectives.hang import Hang
from torchlens_perf.run.clock import DeviceMark
from torchlens_perf.run.ring import Kind
from torchlens_perf.sidecar.nodes import summary
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.words.hang import device_place_from_mark

MS = 1_000_000


def at(number: int, place: int, kind: Kind, stood_ms: int, **changed: object) -> RankProgress:
    """Return the progress of a rank whose device mark is outside all spans."""
    mark = DeviceMark(99, place, int(kind), 3, False, 0, stood_ms * MS)
    return rank(number, inside=(), device=device_place_from_mark(mark, "blocks.3"), **changed)


def found_over_nodes(*ranks: RankProgress) -> Hang:
    """Return the hang that node 0 finds if ranks 2 and 3 are on another node."""
    payloads = [summary.pack_summary(each, Placement(), 4) for each in ranks[2:]]
    others = summary.unpack_progress(
        summary.unpack_summaries(payloads), [each.host for each in ranks[2:]], [0.5, 0.5]
    )
    return found(*ranks[:2], *others)


@pytest.mark.parametrize("stuck", range(4))
def test_stuck_device_on_another_node_is_found(stuck: int) -> None:
    """Rank and text are the same as on one node. Only the module's name is missing."""
    ranks = [
        at(number, 1, Kind.MODULE, 1000) if number == stuck else at(number, 3, Kind.BACKWARD, 0)
        for number in range(4)
    ]
    hang = found_over_nodes(*ranks)
    assert (hang.kind, named(hang), hang.needs_action) == ("device", [stuck], True)
    where = "module blocks.3" if stuck < 2 else "a module"
    assert (
        f"is in step 99 after the beginning of {where}, while the furthest device of ranks"
        in hang_text(hang)
    )
    assert "is in step 99 after the beginning of the backward pass." in hang_text(hang)


def test_remote_device_is_not_reported_as_stuck_after_one_sample_of_its_marks() -> None:
    """A summary also contains how long the mark has not changed."""
    ranks = [
        at(number, 3 if number < 3 else 1, Kind.BACKWARD, 0, report_age_s=0.0)
        for number in range(4)
    ]
    assert found_over_nodes(*ranks).kind != "device"


@pytest.mark.parametrize("stuck", range(4))
def test_missing_kernel_on_another_node_is_found(stuck: int) -> None:
    """NCCL's thread reports kernels to the sidecar of its node."""
    ranks = [rank(number, began={WORLD: 57 - (number == stuck)}) for number in range(4)]
    hang = found_over_nodes(*(dataclasses.replace(each, operations={}) for each in ranks))
    assert (hang.kind, named(hang)) == ("device", [stuck])
    assert f"on the device of rank {stuck}" in hang_text(hang)


def test_other_operation_on_another_node_is_a_mismatch() -> None:
    """Rank 2 calls a barrier. The other ranks issue two buckets of DDP in advance."""
    loop = dict.fromkeys(range(30, 59), "allreduce")
    ranks = [rank(n, issued={WORLD: 58}, operations={WORLD: loop}) for n in range(4)]
    calls = {WORLD: {**dict.fromkeys(range(30, 57), "allreduce"), 57: "barrier"}}
    ranks[2] = rank(2, operations=calls)
    hang = found_over_nodes(*ranks)

    assert (hang.kind, named(hang)) == ("mismatch", [])
    assert "rank 2 called barrier as collective 57 of group 0: the calls differ." in hang_text(hang)
