"""Verdicts on a user's section that takes most of the step, with the figure of the sections'
table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import pytest

from tests.support.ranks import HOST, Rank
from tests.support.reports import checked
from tests.support.tables import MS
from torchlens_perf.analysis.statistics.quantities import format_duration
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Kind
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.view.tables import build_section_table

STEPS = 60


class Loop:
    """A rank whose steps are recorded by the test."""

    def __init__(self, run: RunDirectory, rank: int = 0, ranks: int = 1) -> None:
        self.rank = Rank(run, rank, ranks)

    def inside(self, kind: Kind, name: str, body: Callable[[], None] | float) -> None:
        recorder, name_id = self.rank.session.recorder, self.rank.session.intern(name)
        recorder.begin(kind, name_id)
        body() if callable(body) else self.wait(body)
        recorder.end(kind, name_id)

    def section(self, name: str, body: Callable[[], None] | float) -> None:
        self.inside(Kind.SECTION, name, body)

    def wait(self, milliseconds: float) -> None:
        self.rank.clock.advance(round(milliseconds * MS))

    def compute(self, milliseconds: float = 1.0) -> None:
        self.inside(Kind.FORWARD, "forward", milliseconds)

    def end_step(self) -> None:
        self.rank.session.recorder.next_step(0, 0, 1)


def report_on(run: RunDirectory, *ranks: Loop) -> dict[str, Any]:
    for each in ranks:
        each.rank.close()
    sidecar = Sidecar(run, HOST, None, lambda run, asked: None)
    sidecar.read_rings()
    sidecar.count_records()
    state = sidecar.state
    sidecar.close()
    return checked(build_report(run.run_id, [state]))


def first(report: dict[str, Any]) -> str:
    """Return the first verdict, after comparing its figure on a section with the table."""
    text = str(report["verdicts"][0].sentence)
    if text.startswith("Section "):
        columns = columns_of(report)
        sections = zip(columns["section"], columns["outside phases"], strict=True)
        (seconds,) = (each for name, each in sections if text.startswith(f'Section "{name}" '))
        assert f"% ({format_duration(seconds)})" in text, seconds
    return text


def columns_of(report: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the values of the table of sections, by the title of their column."""
    table = build_section_table(cast("Any", report))
    assert table is not None
    return {column.title: list(column.values) for column in table.columns}


def test_section_that_takes_most_of_the_step_is_the_verdict(run: RunDirectory) -> None:
    loop = Loop(run)
    for _ in range(STEPS):
        loop.section("tokenize", 43.4)
        loop.compute()
        loop.wait(0.6)
        loop.end_step()
    report = report_on(run, loop)
    (verdict,) = report["verdicts"]
    text = first(report)

    assert text.startswith('Section "tokenize" takes 96% (43.')
    assert (
        " of a typical step of 45.0 ms; computing (the forward pass 1.00 ms) 2.2% (1.00 ms)."
        in text
    )
    assert ' Next: make section "tokenize" cheaper' in text
    assert "wrap parts" not in text
    assert (verdict.kind, verdict.phase) == ("host_bound", "host")
    assert verdict.cost_s_per_step == pytest.approx(0.0434, rel=0.02)


def test_section_in_other_steps_takes_no_time_of_a_typical_step(run: RunDirectory) -> None:
    loop = Loop(run)
    for step in range(STEPS):
        loop.section("tokenize", 2.0)
        if step in (30, 50):
            loop.section("dump", 400.0)
        loop.compute(10.0)
        loop.end_step()
    columns = columns_of(report_on(run, loop))
    rows = dict(
        zip(
            columns["section"], zip(columns["calls"], columns["per step"], strict=True), strict=True
        )
    )

    assert rows["dump"] == (2, 0.0)
    assert rows["tokenize"][1] == pytest.approx(0.002)


@pytest.mark.parametrize(("inner", "named"), [(41.0, "tokenize"), (22.0, "prepare")])
def test_inner_section_is_in_the_verdict_if_it_has_most_of_the_time(
    run: RunDirectory, inner: float, named: str
) -> None:
    """If both sections have half of it, the outer one is in the verdict. No section counts twice."""
    loop = Loop(run)
    for _ in range(STEPS):
        loop.section(
            "prepare", lambda: (loop.wait(43.0 - inner), loop.section("tokenize", inner))[-1]
        )
        loop.compute()
        loop.end_step()

    assert first(report_on(run, loop)).startswith(f'Section "{named}" takes ')


def test_verdict_has_two_sections_that_share_the_step(run: RunDirectory) -> None:
    """The figure is that of all host code, because neither section has most of the step."""
    loop = Loop(run)
    for _ in range(STEPS):
        loop.section("load", 18.0)
        loop.section("log", 14.0)
        loop.wait(8.0)
        loop.compute()
        loop.end_step()
    text = first(report_on(run, loop))

    with_sections = r'with the sections "load" \(1[78]\.\d ms\) and "log" \(1[34]\.\d ms\),'
    assert re.match(rf"Host code between the phases, {with_sections} takes 98% ", text)
    assert 'Next: make section "load" cheaper' in text


def test_section_around_phases_counts_only_its_host_code(run: RunDirectory) -> None:
    """The section contains the whole step. The bottleneck is still the data loader."""
    loop = Loop(run)

    def step() -> None:
        loop.inside(Kind.DATA, "data", 30.0)
        loop.compute(10.0)
        loop.wait(2.0)

    for _ in range(STEPS):
        loop.section("step", step)
        loop.end_step()
    report = report_on(run, loop)

    assert first(report).startswith("Data loading takes 71% (30.0 ms)")
    assert report["sections"][0]["host_s_per_typical_step"] == pytest.approx(0.002, rel=0.05)


def test_section_inside_a_phase_does_not_count_as_host_code(run: RunDirectory) -> None:
    loop = Loop(run)
    for _ in range(STEPS):
        loop.inside(Kind.FORWARD, "forward", lambda: loop.section("attention", 8.0))
        loop.wait(12.0)
        loop.end_step()
    text = first(report_on(run, loop))

    assert text.startswith("Host code between the phases takes 60% (12.0 ms)")
    assert "attention" not in text


def test_section_in_few_steps_is_not_in_the_verdict(run: RunDirectory) -> None:
    """A section whose mean depends on a single call is not in the verdict either."""
    loop = Loop(run)
    for number in range(STEPS):
        if number == 30:
            loop.section("validate", 4_000.0)
        loop.wait(20.0)
        loop.compute()
        loop.end_step()

    assert "validate" not in first(report_on(run, loop)).partition("of a typical step")[0]


def test_section_that_continues_into_the_next_step_is_divided(run: RunDirectory) -> None:
    loop = Loop(run)
    for _ in range(STEPS):
        loop.section("all", lambda: (loop.wait(20.0), loop.compute(5.0), loop.end_step())[-1])
    report = report_on(run, loop)

    assert (
        report["sections"][0]["host_s_per_typical_step"]
        <= report["ranks"][0]["typical"]["parts"]["host"] * 1.02
    )


def test_host_code_outside_sections_is_in_the_verdict_too(run: RunDirectory) -> None:
    loop = Loop(run)
    for _ in range(STEPS):
        loop.section("tokenize", 24.0)
        loop.wait(15.0)
        loop.compute()
        loop.end_step()
    text = first(report_on(run, loop))

    assert re.match(r'Section "tokenize" takes 6\d% ', text)
    assert re.search(r"; other host code 3\d% \(1\d\.\d ms\)", text)
