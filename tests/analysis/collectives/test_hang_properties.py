"""Properties of any hang: no rank is blamed for what others did, and rank numbers do not matter."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.hangs import hang_text
from tests.support.progress import FORWARD, SINCE_S, WORLD, named, rank
from torchlens_perf.analysis.collectives.device_progress import RankProgress
from torchlens_perf.analysis.collectives.hang import MIN_S, SILENT_S, find_hang

STATES = ["running", "stopped", "traced", "uninterruptible", "dead", "closed", "unknown"]
PLACES: list[tuple[str, ...]] = [
    (),
    ("data",),
    FORWARD,
    ("backward",),
    ("backward", "wait"),
    ("wait",),
]
TIMES = st.sampled_from([0.0, 0.05, 3.0, 6.0, 9.0, 12.0, 14.0, 30.0, 3600.0])


@st.composite
def jobs(
    draw: st.DrawFn,
    states: list[str] = STATES,
    told: st.SearchStrategy[float] = TIMES,
    names: bool = True,
) -> tuple[dict[int, RankProgress], dict[str, tuple[int, ...]]]:
    """Draw ranks in any state. The members of some groups are known."""
    ranks = range(draw(st.integers(1, 6)))
    some_ranks = st.lists(st.sampled_from(ranks), unique=True, min_size=1)
    members = draw(st.dictionaries(st.sampled_from("abc"), some_ranks))
    progress = {}
    for number in ranks:
        issued = {
            name: draw(st.integers(-1, 3)) for name, group in members.items() if number in group
        }
        progress[number] = RankProgress(
            rank=number,
            host=f"node-{number // 2}",
            step=draw(st.integers(0, 2)),
            since_step_s=draw(TIMES),
            report_age_s=draw(told),
            usual_step_s=draw(st.sampled_from([0.0, 0.05, 4.0])),
            issued=issued,
            inside=draw(st.sampled_from(PLACES)),
            state=draw(st.sampled_from(states)),
            operations={
                name: {last: draw(st.sampled_from("xy" if names else "x"))}
                for name, last in issued.items()
            },
            since_mark_s=draw(st.one_of(st.none(), TIMES)),
        )
    known = draw(st.sets(st.sampled_from(sorted(members)))) if members else set()
    return progress, {name: tuple(sorted(members[name])) for name in known}


def standing_still(
    states: list[str],
) -> st.SearchStrategy[tuple[dict[int, RankProgress], dict[str, tuple[int, ...]]]]:
    """Draw jobs with complete data in which no rank has made progress for 12 s."""
    return jobs(states=states, told=st.just(0.0), names=False).map(
        lambda job: (
            {
                number: dataclasses.replace(
                    each, since_step_s=SINCE_S, since_mark_s=SINCE_S, usual_step_s=0.05
                )
                for number, each in job[0].items()
            },
            job[1],
        )
    )


def levels(
    progress: Mapping[int, RankProgress], groups: Mapping[str, tuple[int, ...]]
) -> dict[str, dict[int, int]]:
    """Return the last issued collective by group and member."""
    names = {name for each in progress.values() for name in each.issued} | groups.keys()
    users = {
        name: [r for r, each in progress.items() if each.issued.get(name, -1) >= 0]
        for name in names
    }
    return {
        name: {
            r: progress[r].issued.get(name, -1)
            for r in groups.get(name, users[name])
            if r in progress
        }
        for name in names
    }


@given(jobs())
def test_random_job_gives_no_hang_or_a_consistent_one(
    job: tuple[dict[int, RankProgress], dict[str, tuple[int, ...]]],
) -> None:
    """A hang has consistent fields and a text in one line."""
    progress, groups = job
    hang = find_hang(progress, groups)
    if hang is None:
        return
    line, *_ = hang_text(hang).splitlines()
    told = {
        r
        for r, each in progress.items()
        if each.report_age_s <= SILENT_S and each.state not in ("dead", "closed")
    }

    assert re.fullmatch(r"No step for [\d.]+ (s|ms) .+\. Next: .+\.", line), line
    assert "  " not in line
    assert hang.since_s > MIN_S
    assert set(hang.look_at) | set(hang.waiting) | set(hang.asleep) | set(hang.moving) <= told
    assert not set(named(hang)) & (set(hang.waiting) | set(hang.moving) | set(hang.unheard))
    assert {r for ranks in hang.places.values() for r in ranks} == told - set(hang.moving)
    assert hash(hang.key) == hash(find_hang(progress, groups).key)  # type: ignore[union-attr]
    for blocking in hang.blocking if len(hang.blocking) <= 4 else ():
        assert f"{blocking.progress.rank} ({blocking.progress.host})" in line


@given(standing_still(["running", "uninterruptible", "unknown", "closed"]))
def test_blamed_ranks_are_those_that_others_wait_for_and_that_do_not_wait(
    job: tuple[dict[int, RankProgress], dict[str, tuple[int, ...]]],
) -> None:
    """The blamed ranks are exactly those that other ranks wait for and that do not wait themselves.

    Ended ranks do not wait.
    """
    progress, groups = job
    hang = find_hang(progress, groups)
    if hang is None or hang.kind == "alone":
        return
    by_group = levels(progress, groups)
    last, waits = set(), set()
    for table in by_group.values():
        further = {
            r
            for r, level in table.items()
            if level > min(table.values()) and progress[r].state != "closed"
        }
        waits |= further
        last |= {r for r, level in table.items() if level == min(table.values()) and further}

    assert set(named(hang)) == last - waits
    for blocking in hang.blocking:
        assert blocking.missing is not None
        table = by_group[blocking.missing.group]
        assert table[blocking.progress.rank] < blocking.missing.sequence <= max(table.values())


@given(standing_still(["running"]))
def test_each_rank_of_a_cycle_blocks_the_previous_one(
    job: tuple[dict[int, RankProgress], dict[str, tuple[int, ...]]],
) -> None:
    """Each rank of a cycle has entered a collective that the next one has not entered."""
    progress, groups = job
    hang = find_hang(progress, groups)
    if hang is None or not hang.cycle:
        return
    by_group = levels(progress, groups)
    following = [*hang.cycle[1:], hang.cycle[0]]

    assert len(hang.cycle) >= 2
    for (number, collective), (other, _) in zip(hang.cycle, following, strict=True):
        table = by_group[collective.group]
        assert table[other] < collective.sequence <= table[number]


@given(jobs(), st.randoms(use_true_random=False))
def test_renumbering_the_ranks_blames_the_same_processes(
    job: tuple[dict[int, RankProgress], dict[str, tuple[int, ...]]], shuffled: random.Random
) -> None:
    progress, groups = job
    numbers = list(progress)
    shuffled.shuffle(numbers)
    new = dict(zip(progress, (10 * number + 3 for number in numbers), strict=True))
    hang = find_hang(progress, groups)
    other = find_hang(
        {new[r]: dataclasses.replace(each, rank=new[r]) for r, each in progress.items()},
        {name: tuple(new[r] for r in members) for name, members in groups.items()},
    )

    assert (hang is None) == (other is None)
    if hang is not None and other is not None:
        assert (hang.kind, hang.since_s, hang.step, hang.collective) == (
            other.kind, other.since_s, other.step, other.collective,
        )  # fmt: skip
        for ranks, others in (
            (named(hang), named(other)), (hang.waiting, other.waiting), (hang.moving, other.moving),
            (hang.unheard, other.unheard), (hang.ended, other.ended),
        ):  # fmt: skip
            assert sorted(new[r] for r in ranks) == sorted(others)


@given(jobs(), st.integers(0, 5), TIMES)
def test_rank_with_an_outdated_report_is_not_blamed(
    job: tuple[dict[int, RankProgress], dict[str, tuple[int, ...]]],
    number: int,
    report_age_s: float,
) -> None:
    """The rank's last report is from long before the last step."""
    progress, groups = job
    if number not in progress:
        return
    stale = dataclasses.replace(
        progress[number], report_age_s=7200.0 + report_age_s, state="running"
    )
    hang = find_hang({**progress, number: stale}, groups)

    assert hang is None or number not in named(hang) or hang.since_s >= 3600


@pytest.mark.parametrize("missing", [0, 2500, 9999])
def test_missing_rank_of_ten_thousand_is_blamed_in_a_short_text(missing: int) -> None:
    """The rank is missing in its groups of both dimensions of a mesh."""
    count, width = 10_000, 8
    groups = {f"tp{i}": tuple(range(i * width, (i + 1) * width)) for i in range(count // width)}
    groups |= {f"dp{i}": tuple(range(i, count, width)) for i in range(width)}
    groups[WORLD] = tuple(range(count))
    progress = {}
    for number in range(count):
        tensor, data = f"tp{number // width}", f"dp{number % width}"
        # The rank's neighbors in tp wait for it and have not reached dp either.
        late = number // width == missing // width
        issued = {WORLD: 3, tensor: 40 - (number == missing), data: 6 if late else 7}
        progress[number] = rank(0, rank=number, issued=issued, operations={})
    progress[missing] = dataclasses.replace(progress[missing], inside=FORWARD)
    hang = find_hang(progress, groups)

    assert hang is not None
    assert (hang.kind, named(hang)) == ("missing", [missing])
    assert len(hang_text(hang)) < 600
