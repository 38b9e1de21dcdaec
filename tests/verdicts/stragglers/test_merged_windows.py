"""Slow ranks found in windows that devices have merged, and their effect on the detector's
findings.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.findings import episode, findings
from torchlens_perf.run.device.merged_rows import STANDS_OUT, MergedRow, pack_row
from torchlens_perf.run.device.step_parts import ROW_NAMES, StepPart
from torchlens_perf.run.ring import Kind, record_dtype
from torchlens_perf.verdicts.causes.straggler_groups import add_straggler_groups
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings, UsualTimes
from torchlens_perf.verdicts.stragglers.merged_windows import (
    GAP,
    MIN_WINDOWS,
    MergedWindows,
    combine_with_windows,
    remove_window_findings,
)
from torchlens_perf.verdicts.stragglers.placement import BY_DEVICE, Placement
from torchlens_perf.verdicts.stragglers.resume import EarlierEpisodes
from torchlens_perf.verdicts.words.stragglers import (
    SlowRankContext,
    build_no_straggler_verdict,
    build_straggler_verdicts,
)

MS, STEPS = 1_000_000, 64
USUAL_MS = {
    StepPart.FORWARD: 20,
    StepPart.RECOMPUTE: 0,
    StepPart.BACKWARD: 40,
    StepPart.OPTIMIZER: 5,
    StepPart.GAP: 1,
    StepPart.STALL: 4,
}
FIELDS = ("start_ns", "duration_ns", "flags", "value0", "value1", "nested_ns", "phase_ns")
ALL = {rank: Placement("node-a", f"model{BY_DEVICE}") for rank in range(8)}
NODE = {rank: ALL[rank] for rank in range(2)}
Slow = dict[int, dict[StepPart, float]]


def window(
    number: int,
    slow: Slow,
    *,
    ranks: int = 8,
    steps: int = STEPS,
    scale: float = 1.0,
    stall_ms: int = 4,
) -> npt.NDArray[np.void]:
    """Return the records of a window, which was merged in the last of its 64 steps.

    `slow` has additional ms by rank and part.
    """
    usual = {
        row: round(scale * ms * MS) for row, ms in {**USUAL_MS, StepPart.STALL: stall_ms}.items()
    }
    usual[StepPart.WORK] = sum(usual.values()) - usual[StepPart.STALL]
    usual[StepPart.STEP] = usual[StepPart.WORK] + usual[StepPart.STALL]
    excess = {
        rank: {**more, StepPart.WORK: sum(more.values()) - more.get(StepPart.STALL, 0)}
        for rank, more in slow.items()
    }
    made = []
    for row in StepPart:
        spread_ns = 0.01 * max(usual[row], 1)
        of = {
            rank: round(more.get(row, 0) * MS)
            for rank, more in excess.items()
            if more.get(row, 0) > 0
        }
        count = sum(ns >= STANDS_OUT * spread_ns for ns in of.values())
        for rank, ns in sorted(of.items(), key=lambda each: -each[1])[:8] or [(-1, 0)]:
            told = MergedRow(
                ROW_NAMES[row],
                ranks * steps,
                1,
                1,
                1,
                usual[row],
                0,
                rank,
                ns / spread_ns,
                ns,
                int(row),
                count,
            )
            record = np.zeros(1, record_dtype())
            record["kind"], record["step"] = Kind.MERGED, (number + 1) * STEPS - 1
            for field, value in zip(FIELDS, pack_row(told), strict=True):
                record[field] = value
            made.append(record)
    return np.concatenate(made)


def seen(*slow: Slow, ranks: int = 8, **given: Any) -> MergedWindows:
    windows = MergedWindows()
    for number, each in enumerate(slow):
        windows.add_records(window(number, each, ranks=ranks, **given), ranks)
    return windows


FORWARD: Slow = {3: {StepPart.FORWARD: 9}}
CLEAN: Slow = {5: {StepPart.GAP: 0.2}}


def test_rank_is_reported_after_three_slow_windows() -> None:
    """The episode has its part and excess, and begins with the first slow window.

    The episode ends after two healthy windows.
    """
    windows = seen(CLEAN, CLEAN, FORWARD, FORWARD)
    assert windows.episodes() == []
    windows.add_records(window(4, FORWARD), 8)
    (found,) = windows.episodes()
    assert (found.rank, found.phase, found.by_windows, found.from_start) == (
        3,
        "forward",
        True,
        False,
    )
    assert (found.since_step, found.named_step, found.last_step, found.until_step) == (
        128,
        319,
        319,
        None,
    )
    assert found.excess_ns == found.cost_ns == found.phase_excess_ns == pytest.approx(9 * MS)
    assert (found.others_work_ns, found.work_ns, found.step_ns) == pytest.approx(
        (66 * MS, 75 * MS, 70 * MS)
    )
    windows.add_records(window(5, CLEAN), 8)
    assert windows.episodes()[0].until_step is None
    windows.add_records(window(6, CLEAN), 8)
    (found,) = windows.episodes()
    assert (found.until_step, found.slow_share, found.key) == (320, 1.0, (3, 319))


@pytest.mark.parametrize(
    ("more", "phase"),
    [
        ({StepPart.BACKWARD: 9}, "backward"),
        ({StepPart.FORWARD: 6, StepPart.BACKWARD: 12}, "compute"),
        ({StepPart.OPTIMIZER: 9}, "optimizer"),
        ({StepPart.GAP: 9}, GAP),
        ({StepPart.FORWARD: 0.5, StepPart.GAP: 9, StepPart.OPTIMIZER: 1}, GAP),
    ],
)
def test_episode_found_in_windows_has_the_slow_part(
    more: dict[StepPart, float], phase: str
) -> None:
    (found,) = seen(*[{2: more}] * MIN_WINDOWS).episodes()
    assert (found.phase, found.from_start) == (phase, True)
    named = add_straggler_groups(
        dataclasses.replace(NOTHING, episodes=(found,), step_ns=70 * MS, compared=8), {}
    )
    (verdict,), _ = build_straggler_verdicts(SlowRankContext([], "cuda", None), named)
    assert "Rank 2 is slow" in verdict.sentence
    assert "Found in statistics merged on devices" in verdict.sentence
    assert "By host time" not in verdict.sentence


def test_cost_of_two_slow_ranks_is_that_of_the_slower_one() -> None:
    both: Slow = {3: {StepPart.FORWARD: 9}, 6: {StepPart.FORWARD: 14}}
    found = {each.rank: each for each in seen(*[both] * 3).episodes()}
    assert {rank: each.excess_ns / MS for rank, each in found.items()} == pytest.approx(
        {3: 9, 6: 14}
    )
    assert {rank: each.cost_ns / MS for rank, each in found.items()} == pytest.approx({3: 0, 6: 5})
    assert [each.shared and each.shared[:2] for each in found.values()] == [
        pytest.approx((14 * MS, each.cost_ns)) for each in found.values()
    ]
    assert [each.shared for each in seen(*[FORWARD] * 3).episodes()] == [None]


@pytest.mark.parametrize(
    "windows",
    [
        pytest.param(seen(*[CLEAN] * 9), id="clean"),
        pytest.param(seen(*[FORWARD, FORWARD, CLEAN] * 4), id="it comes and goes"),
        pytest.param(seen(*[{3: {StepPart.FORWARD: 2}}] * 9), id="within what ranks differ"),
        pytest.param(seen(*[{3: {StepPart.FORWARD: 4}}] * 9, stall_ms=200), id="not worth naming"),
        pytest.param(
            seen(*[{rank: {StepPart.FORWARD: 9.0} for rank in range(3)}] * 9),
            id="many stand out: other work",
        ),
        pytest.param(seen(*[FORWARD] * 9, steps=8), id="too few steps are known"),
        pytest.param(
            seen(*[{3: {StepPart.FORWARD: 0.05}}] * 9, scale=0.01), id="for too short a time"
        ),
        pytest.param(seen(*[{0: {StepPart.STALL: 9}}] * 9), id="it waits for others"),
    ],
)
def test_no_rank_is_reported_without_a_lasting_large_excess(windows: MergedWindows) -> None:
    assert windows.episodes() == []


def judged(*episodes: Any, ranks: int, **changed: Any) -> Findings:
    """Return findings of a detector that compares the given number of ranks."""
    usual = (UsualTimes("model", f"0-{ranks - 1}", 66 * MS, 4 * MS),)
    return findings(*episodes, usual=usual, compared=ranks, **changed)


def test_slow_ranks_unknown_to_the_detector_are_added() -> None:
    """The detector's own findings stay unchanged."""
    own = episode(rank=1)
    found = combine_with_windows(
        judged(own, ranks=2),
        seen(*[{3: {StepPart.FORWARD: 9}, 1: {StepPart.BACKWARD: 20}}] * 3),
        NODE,
    )
    assert [(each.rank, each.by_windows) for each in found.episodes] == [(1, False), (3, True)]
    assert found.episodes[0] == own
    assert (found.compared, found.unconfirmed) == (8, ())
    clean = combine_with_windows(
        dataclasses.replace(NOTHING, usual=(UsualTimes("", "0-0", 1, 1),)), seen(*[CLEAN] * 3), {}
    )
    assert (clean.episodes, clean.compared, clean.rows) == ((), 8, 3)
    assert clean.detectable_ns == pytest.approx(5 * 0.66 * MS)
    few = judged(ranks=2)
    assert combine_with_windows(few, seen(*[FORWARD] * 2), NODE) is few


def test_slow_rank_that_only_windows_show_is_unconfirmed() -> None:
    """The rank is not reported as slow, but mentioned.

    If windows and detector agree, nothing changes.
    """
    agreed = judged(episode(rank=3, since=0), ranks=8)
    assert combine_with_windows(agreed, seen(*[FORWARD] * 3), ALL) == agreed
    nobody = combine_with_windows(judged(ranks=8), seen(*[FORWARD] * 3), ALL)
    assert nobody.episodes == ()
    assert [each.rank for each in nobody.unconfirmed] == [3]
    run = {"judged_by": "device", "device": "cuda", "ranks_seen": 8, "live": False}
    facts: Any = {"steps": {"count": 200}, "run": run}
    verdict, quiet = (
        build_no_straggler_verdict(facts, nobody),
        build_no_straggler_verdict(facts, judged(ranks=8)),
    )
    assert verdict.confidence == quiet.confidence / 2
    assert (
        "do not confirm this, but show rank 3 (+9.00 ms a step, in the forward pass)"
        in verdict.sentence
    )
    too_little = judged(ranks=8, detectable_ns=20 * MS)
    assert combine_with_windows(too_little, seen(*[FORWARD] * 3), ALL) == too_little, (
        "the judge could not have seen it yet"
    )


def test_episode_that_windows_should_show_but_do_not_is_disputed() -> None:
    """The verdict has the ranks that the windows show instead."""
    windows = seen(*[FORWARD] * 5)
    found = combine_with_windows(judged(episode(rank=6, since=64), ranks=8), windows, ALL)
    assert [(each.rank, each.disputed) for each in found.episodes] == [(6, True)]
    context = SlowRankContext([], "cuda", "device")
    (verdict,), _ = build_straggler_verdicts(context, add_straggler_groups(found, ALL))
    undisputed = remove_window_findings(found)
    (before,), _ = build_straggler_verdicts(context, add_straggler_groups(undisputed, ALL))
    assert verdict.confidence == before.confidence / 2
    assert (
        "do not confirm it, but show rank 3 (+9.00 ms a step, in the forward pass). Next: "
        in verdict.sentence
    )
    for other in (
        episode(rank=6, since=150),  # Fewer than three windows follow this first step.
        episode(rank=6, since=0, slow_share=0.4),
        episode(rank=6, since=0, phase="cpu"),
        episode(rank=6, since=0, excess_ns=4 * MS),
        episode(rank=6, since=0, until=200),
        episode(rank=3, since=0),
    ):
        assert not any(
            each.disputed
            for each in combine_with_windows(judged(other, ranks=8), windows, ALL).episodes
        )
    by_host = {rank: Placement("node-a", "model") for rank in range(8)}
    on_host = combine_with_windows(judged(episode(rank=6, since=64), ranks=8), windows, by_host)
    assert not on_host.episodes[0].disputed, "what the hosts did is another question"


@pytest.mark.parametrize(
    "places",
    [
        {0: Placement("a", "model", {"pp": 0}), 1: Placement("a", "model", {"pp": 0})},
        {0: Placement("a", "model"), 1: Placement("a", "other")},
    ],
)
def test_windows_of_ranks_with_different_work_are_ignored(places: dict[int, Placement]) -> None:
    found = judged(ranks=2)
    assert combine_with_windows(found, seen(*[FORWARD] * 4), places) is found


def test_restarted_sidecar_drops_episodes_found_in_windows() -> None:
    """The detector may find the episode again, but without new windows no episode stays open."""
    found = combine_with_windows(judged(episode(rank=1), ranks=2), seen(*[FORWARD] * 3), NODE)
    assert [each.rank for each in EarlierEpisodes(found).merge_into(judged(ranks=2)).episodes] == [
        1
    ]


def test_rank_missing_in_a_full_window_is_neither_disputed_nor_ended() -> None:
    """A window has room for eight outliers, but twelve of 64 ranks are slow."""
    ranks = 64
    places = {rank: Placement(f"node-{rank // 8}", f"model{BY_DEVICE}") for rank in range(ranks)}
    slow: Slow = {rank: {StepPart.FORWARD: 20.0 + rank} for rank in range(12)}
    judged_episodes = [
        episode(rank=rank, since=STEPS, excess_ns=(20 + rank) * MS) for rank in range(12)
    ]
    found = combine_with_windows(
        judged(*judged_episodes, ranks=ranks), seen(*[slow] * 5, ranks=ranks), places
    )
    overtaken: Slow = {
        11: {StepPart.FORWARD: 20},
        **{rank: {StepPart.FORWARD: 40.0 + rank} for rank in range(20, 29)},
    }
    windows = seen(*[{11: {StepPart.FORWARD: 20}}] * 4, *[overtaken] * 3, ranks=ranks)

    assert [each.rank for each in found.episodes if each.disputed] == []
    assert [each.until_step for each in windows.episodes() if each.rank == 11] == [None]
