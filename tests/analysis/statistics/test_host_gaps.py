"""The host code of a step is found between the right phases, and its gaps add up to it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.report.test_report import report_on
from tests.support.ranks import Rank, make_run
from tests.support.tables import MS
from torchlens_perf.analysis.statistics.host_gaps import find_host_gaps, name_gap
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.run.ring import Flag, Kind, record_dtype
from torchlens_perf.view.terminal import render_full

# Kind, begin and end in ms of a step, the innermost spans first. Each step lasts 100 ms.
Spans = list[tuple[Kind, int, int]]
TRAINER: Spans = [
    (Kind.DATA, 9, 10), (Kind.DATA, 18, 19), (Kind.FORWARD, 20, 30), (Kind.BACKWARD, 31, 45),
    (Kind.FORWARD, 53, 60), (Kind.BACKWARD, 60, 80), (Kind.OPTIMIZER, 91, 99),
]  # fmt: skip


def gaps_of(*steps: Spans, flags: int = 0) -> list[dict[str, int]]:
    """Return the gaps in ms of steps one after the other, the first at 1 s."""
    rows = [
        (kind, number, 1000 + 100 * number + begin, end - begin)
        for number, spans in enumerate(steps)
        for kind, begin, end in [*spans, (Kind.STEP, 0, 100)]
    ]
    records = np.zeros(len(rows), record_dtype())
    for record, (kind, step, begin, duration) in zip(records, rows, strict=True):
        record["kind"], record["step"] = int(kind), step
        record["start_ns"], record["duration_ns"] = begin * MS, duration * MS
        record["flags"] = flags * (kind != Kind.STEP)
    found = find_host_gaps(records, records["kind"], assemble_steps(records))
    sums: list[dict[str, int]] = [Counter() for _ in steps]
    for at, key, _, duration_ns in zip(*(each.tolist() for each in found), strict=True):
        sums[at][name_gap(key)] += duration_ns // MS
    return [{gap: ms for gap, ms in each.items() if ms} for each in sums]


def test_gaps_of_two_micro_steps_are_told_apart() -> None:
    expected = {
        "start>data": 9, "data>data": 8, "data>forward": 1, "forward>backward": 1, "backward>forward": 8,
        "backward>optimizer": 11, "optimizer>end": 1,
    }  # fmt: skip

    assert gaps_of(TRAINER, TRAINER) == [expected, expected]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], {"start>end": 100}),
        (
            [(Kind.RECOMPUTE, 30, 40), (Kind.WAIT, 45, 50), (Kind.BACKWARD, 20, 60)],
            {"start>backward": 20, "backward>end": 40},
        ),
        ([(Kind.WAIT, 0, 25), (Kind.FORWARD, 30, 100)], {"communication>forward": 5}),
        ([(Kind.DATA, -20, 10), (Kind.FORWARD, 10, 60)], {"forward>end": 40}),
        ([(Kind.FORWARD, 10, 50), (Kind.CLOSURE, 5, 60), (Kind.OPTIMIZER, 0, 90)], {}),
    ],
    ids=["no phase", "nested phases", "no host code", "across the step's begin", "closure"],
)
def test_gaps_around_unusual_phases(spans: Spans, expected: dict[str, int]) -> None:
    assert gaps_of(spans, TRAINER)[0] == expected
    assert gaps_of(TRAINER, spans)[0] == gaps_of(TRAINER)[0]


def test_phases_of_other_threads_do_not_divide_the_host_code() -> None:
    assert gaps_of(TRAINER, flags=int(Flag.OTHER_THREAD)) == [{"start>end": 100}]


def test_gaps_add_up_to_the_host_code_of_random_steps() -> None:
    rng, steps = np.random.default_rng(1), []
    for _ in range(50):
        borders = sorted(rng.choice(100, 2 * int(rng.integers(1, 9)), replace=False).tolist())
        kinds = rng.choice([Kind.DATA, Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER], len(borders))
        steps.append(
            [
                (Kind(kind), a, b)
                for kind, a, b in zip(kinds, borders[::2], borders[1::2], strict=False)
            ]
        )
    found = gaps_of(*steps)

    for spans, gaps in zip(steps, found, strict=True):
        assert sum(gaps.values()) == 100 - sum(end - begin for _, begin, end in spans)


def test_report_lists_the_largest_gaps_of_a_typical_step(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    rank = Rank(run, 0, 1)
    for _ in range(30):
        for part, host_ms in (("data", 1), ("forward", 2), ("backward", 30)):
            rank.begin(getattr(Kind, part.upper()), part)
            rank.clock.advance(20 * MS)
            rank.session.recorder.end(getattr(Kind, part.upper()), rank.session.intern(part))
            rank.clock.advance(host_ms * MS)
        rank.steps(1, optimizer=5.0)
    report = report_on(run, [rank])

    gaps = report["steps"]["host_gaps"]
    assert [*gaps][:3] == ["backward>optimizer", "forward>backward", "data>forward"]
    assert gaps["backward>optimizer"] == pytest.approx(0.03)
    assert sum(gaps.values()) == pytest.approx(report["ranks"][0]["typical"]["parts"]["host"])
    text = render_full(report, "x", columns=120, color=False).partition("Host code by place")[2]
    assert text.splitlines()[2].split() == ["backward", "optimizer", "30.0", "31%"]


def test_report_lists_no_gaps_of_a_step_without_host_code(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    rank = Rank(run, 0, 1)
    rank.steps(30, data=1.0, forward=40.0, host=2.0, optimizer=5.0)

    assert "Host code by place" not in render_full(
        report_on(run, [rank]), "x", columns=120, color=False
    )
