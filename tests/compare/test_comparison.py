"""Comparisons of simulated runs: the command's results, exit codes and forms."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.simulated_runs import simulate_run
from torchlens_perf.commands.cli import main
from torchlens_perf.compare.changes import Outcome
from torchlens_perf.compare.comparison import build_comparison, compare_runs
from torchlens_perf.compare.measures import (
    PEAK_MEMORY,
    STEP,
    Kind,
    Measure,
    compute_by_rank,
    list_differences,
)
from torchlens_perf.compare.page import build_body
from torchlens_perf.compare.screens import build_headline, build_notes, build_tables
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.view.markup import to_html
from torchlens_perf.view.rank_tables import build_rank_table

SLOWER = ("--fault", "constant:rank=1,share=0.4,phase=forward,since=0")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with four runs of each side, in folders `before`, `again` and `after`."""
    folder = tmp_path_factory.mktemp("compared")
    for side, options in (("before", ()), ("again", ()), ("after", SLOWER)):
        (folder / side).mkdir()
        for number in range(4):
            seed = number + (100 if side == "again" else 200 if side == "after" else 0)
            path = folder / side / f"run-{number}"
            simulate_run(path, "--noise", "0.03", *options, seed=seed)
    return folder


def side(folder: Path, name: str) -> Sequence[Path]:
    return sorted((folder / name).iterdir())


def test_equal_sides_are_the_same(runs: Path) -> None:
    compared = compare_runs(side(runs, "before"), side(runs, "again"))
    assert not compared.list_changed(*Kind)
    assert compared.step is not None
    assert compared.step.outcome is Outcome.SAME


def test_slower_forward_pass_is_the_change(runs: Path) -> None:
    compared = compare_runs(side(runs, "before"), side(runs, "after"))
    assert compared.step is not None
    assert compared.step.outcome is Outcome.CHANGED
    forward = compared.changes[Measure(Kind.PART, "forward")]
    assert forward.outcome is Outcome.CHANGED
    # One of two ranks is slower by 0.4 of its work, more than its forward pass; parts are means.
    assert 0.4 < forward.share < 0.7
    assert forward.low < forward.difference < forward.high
    assert compared.changes[Measure(Kind.PART, "optimizer")].outcome is not Outcome.CHANGED


def test_parts_add_up_to_the_step(runs: Path) -> None:
    compared = compare_runs(side(runs, "before"), side(runs, "after"))
    parts = [change for measure, change in compared.changes.items() if measure.kind is Kind.PART]
    step = compared.changes[STEP]
    assert sum(each.before for each in parts) == pytest.approx(step.before, rel=0.01)
    assert sum(each.difference for each in parts) == pytest.approx(step.difference, rel=0.05)


def test_one_run_of_each_side_has_one_note(runs: Path) -> None:
    compared = compare_runs(side(runs, "before")[:1], side(runs, "again")[:1])
    assert sum("how much equal runs differ is not measured" in note for note in compared.notes) == 1
    assert any(note.startswith("one run before and one run after: ") for note in compared.notes)
    assert not compared.list_changed(*Kind)


def test_one_run_of_each_side_says_once_that_noise_is_not_known(runs: Path) -> None:
    compared = compare_runs(side(runs, "before")[:1], side(runs, "after")[:1])
    unknown = replace(compared.step, outcome=Outcome.UNKNOWN)
    head = build_headline(replace(compared, changes={STEP: unknown}))
    assert head.status == "CHANGED"
    assert head.sentence.endswith(
        " Whether it changed is not known: one run of each side does not show how much runs differ."
    )
    assert head.action.startswith("record 5 runs of each side, alternating")
    titles = [each.title for each in build_tables(compared)[1].columns]
    assert titles == ["measure", "before", "after", "change"]
    several = replace(compared, before=compared.before * 2, changes={STEP: unknown})
    assert build_tables(several)[1].columns[-1].title == "result"
    assert "Whether it changed is not known" in build_headline(several).sentence


def test_equal_notes_are_shown_once(runs: Path) -> None:
    compared = compare_runs(side(runs, "before"), side(runs, "again"))
    notes = build_notes(replace(compared, notes=["a", "b", "a"]))
    assert notes[:2] == ["a", "b"]
    assert notes.count("a") == 1


def test_difference_that_rounds_to_zero_has_no_minus(runs: Path) -> None:
    compared = compare_runs(side(runs, "before"), side(runs, "again"))
    tiny = replace(compared.step, low=-2e-9, high=-3e-10)
    step = build_tables(replace(compared, changes={STEP: tiny}))[1]
    assert {each.title: each.texts() for each in step.columns}["95 % interval"] == [
        "-2 ns to +0 ns"
    ]


@pytest.mark.parametrize(
    ("before", "after", "what", "count"),
    [("before", "after", "new", (0, 4)), ("after", "before", "gone", (4, 0))],
)
def test_slow_rank_of_one_side_is_the_first_thing_said(
    runs: Path, before: str, after: str, what: str, count: tuple[int, int]
) -> None:
    compared = compare_runs(side(runs, before), side(runs, after))
    first = compared.verdicts[0]
    assert (first.what, first.is_certain) == (what, True)
    assert "SLOW RANK rank 1" in first.text
    assert (first.before, first.after) == count
    sentence = build_headline(compared).sentence
    assert sentence.startswith(f"{what}: SLOW RANK rank 1")
    assert sentence.index("SLOW RANK") < sentence.index(" ms")


def test_slow_rank_that_another_one_follows_is_a_changed_verdict(
    runs: Path, tmp_path: Path
) -> None:
    fault = "constant:rank=0,share=0.4,phase=forward,since=0"
    other = simulate_run(tmp_path / "other", "--noise", "0.03", "--fault", fault, seed=7)
    found = compare_runs(side(runs, "after"), [other]).verdicts
    changed = next(each for each in found if each.what == "changed")
    assert "rank 1" in changed.text.partition(" became ")[0]
    assert "rank 0" in changed.text.partition(" became ")[2]
    assert (changed.before, changed.after) == (4, 1)


def test_verdict_makes_a_change_where_times_cannot_tell(runs: Path) -> None:
    compared = compare_runs(side(runs, "before")[:1], side(runs, "after")[:1])
    unknown = {
        each: replace(change, outcome=Outcome.UNKNOWN) for each, change in compared.changes.items()
    }
    assert build_headline(replace(compared, changes=unknown)).status == "CHANGED"
    silent = replace(compared, changes=unknown, verdicts=())
    assert build_headline(silent).status == "CANNOT SAY"


def test_equal_sides_have_no_other_verdicts_on_ranks(runs: Path) -> None:
    compared = compare_runs(side(runs, "before"), side(runs, "again"))
    assert not [each for each in compared.verdicts if each.is_certain]


def test_result_that_is_not_known_comes_with_the_runs_that_would_tell(runs: Path) -> None:
    compared = compare_runs(side(runs, "before"), side(runs, "again"))
    step = replace(compared.step, outcome=Outcome.UNKNOWN)
    few, many = (
        build_headline(
            replace(compared, changes={**compared.changes, STEP: replace(step, spread=spread)})
        ).action
        for spread in (0.005 * step.before, 0.2 * step.before)
    )
    assert "runs of each side, alternating" in few
    assert "runs of one side differ by 0.5%" in few
    alone = replace(compared, changes={**compared.changes, STEP: step}, before=compared.before[:1])
    assert "because one run does not show how much runs differ" in build_headline(alone).action
    assert "not show a change below" in many


@pytest.mark.parametrize(
    ("measure", "before", "after", "outcome"),
    [
        (Measure(Kind.COLLECTIVE, "allreduce"), 60e-9, 61.5e-9, Outcome.SAME),
        (Measure(Kind.COLLECTIVE, "allreduce"), 60e-9, 80e-9, Outcome.CHANGED),
        (PEAK_MEMORY, 1.01e9, 1.04e9, Outcome.SAME),
        (PEAK_MEMORY, 1.01e9, 1.2e9, Outcome.CHANGED),
    ],
    ids=["below the clock's resolution", "above it", "shown as equal", "shown as larger"],
)
def test_change_that_cannot_be_seen_is_none(
    runs: Path, measure: Measure, before: float, after: float, outcome: Outcome
) -> None:
    """All runs of a side have the same value. Any difference is therefore above their noise."""
    compared = compare_runs(side(runs, "before"), side(runs, "again"))
    sides = [
        [replace(run, values={**run.values, measure: value}, noise={}) for run in each]
        for each, value in ((compared.before, before), (compared.after, after))
    ]

    assert build_comparison(*sides).changes[measure].outcome is outcome


def test_missing_module_is_listed_and_not_compared(runs: Path) -> None:
    compared = compare_runs(side(runs, "before"), side(runs, "after"))
    lacking = compared.before[0]
    module = next(each for each in lacking.values if each.kind is Kind.MODULE)
    values = {each: value for each, value in lacking.values.items() if each != module}
    without = [replace(lacking, values=values), *compared.before[1:]]
    found = build_comparison(without, compared.after)
    assert module in found.only_after
    assert module not in found.changes


@pytest.mark.parametrize(
    ("after", "budget", "code"),
    [
        ("after", "2%", 1),
        ("after", "step=2%,forward=5%", 1),
        ("after", "90%", 0),
        ("again", "5%", 0),
        ("again", "0%", 3),
        ("again", "recompute=5%", 3),
    ],
)
def test_exit_code_follows_the_budget(
    runs: Path, after: str, budget: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["compare", str(runs / "before"), str(runs / after), "--fail-on", budget]
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert ("exceeded step" in error) is (code == 1)
    assert ("cannot tell" in error) is (code == 3)


def test_text_has_result_tables_and_notes(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs / "before"), str(runs / "after")]) == 0
    text = capsys.readouterr().out
    assert "SLOWER" in text
    assert "typical step" in text
    assert "torchlens-perf report" in text
    assert text.index("run-0") < text.index("typical step  ")
    assert "Compute time of each rank" in text


def test_json_has_all_changes(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs / "before"), str(runs / "after"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "SLOWER"
    assert [len(found[each]) for each in ("before", "after")] == [4, 4]
    step = next(each for each in found["changes"] if each["name"] == "typical step")
    assert step["unit"] == "s"
    assert step["outcome"] == "changed"
    assert step["low"] <= step["difference"] <= step["high"]


def test_markdown_is_a_table_with_the_result(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(runs / "before"), str(runs / "after"), "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("**SLOWER** new: SLOW RANK rank 1")
    tables = [each.splitlines()[1:] for each in "\n".join(lines).split("\n\n") if "\n|" in each]
    assert len(tables) == 4
    for table in tables:
        assert len({line.replace("\\|", "").count("|") for line in table if line[:1] == "|"}) == 1


def test_page_has_no_script(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "compared.html"
    arguments = ["compare", str(runs / "before"), str(runs / "after"), "--html", str(page)]
    assert main([*arguments, "--quiet"]) == 0
    text = page.read_text()
    assert "<script" not in text
    assert "typical step" in text
    assert text.index("NEW</b> <span>SLOW RANK rank 1") < text.index("A typical step took")
    chart = text.partition('id="over-time"')[2].partition("</section>")[0]
    labels = re.findall(r"<text [^>]*>([^<]*)", chart)
    assert labels[0] == "0 ms"
    assert 3 <= sum(each.endswith(" ms") for each in labels) <= 4
    assert labels[labels.index("step") + 1 :] == ["0", "20", "40", "60"]
    assert re.findall(r"</svg>([^<]+)</li>", chart) == [
        "before (dashed): run-0",
        "after (solid): run-0",
    ]
    assert chart.count("<polyline ") == 4  # Two lines, and their samples in the legend.
    assert re.search(r'aria-label="Step times of two runs, 0 to [\d.]+ ms, over 64 steps"', text)
    assert text.count(">simulation<") == 8


def test_chart_of_a_long_run_has_plain_step_numbers(runs: Path) -> None:
    compared = compare_runs(side(runs, "before")[:1], side(runs, "again")[:1])
    history = compared.before[0].report["history"]
    assert history is not None
    steps = [each * 100_000 for each in history["first_steps"]]
    long = {**compared.before[0].report, "history": {**history, "first_steps": steps}}
    body = to_html(build_body(replace(compared, before=[replace(compared.before[0], report=long)])))
    assert re.findall(r">(\d000000)</text>", body) == ["2000000", "4000000"]
    assert "e+06" not in body


def test_framework_of_a_run_that_records_none_is_not_an_unset_setting(runs: Path) -> None:
    one, other = (
        load_report(RunDirectory(path), lost_time=False) for path in side(runs, "before")[:2]
    )
    one["run"]["settings"] = {"python": "3.12"}
    other["run"]["settings"] = {"python": "3.12", "framework": "none"}
    assert list_differences(one, other) == ["framework not recorded -> none"]


def test_compute_time_of_ranks_is_that_of_the_report(runs: Path) -> None:
    """A comparison shows the same number as the report's table of ranks."""
    report = load_report(RunDirectory(runs / "after" / "run-0"), lost_time=False)
    table = build_rank_table(report)
    assert table is not None
    shown = {each.title: each.values for each in table.columns}
    found = compute_by_rank(report)
    assert found == pytest.approx(dict(zip(shown["rank"], shown["compute"], strict=True)))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["one"],
        ["one", "two", "three"],
        ["--before", "one"],
        ["--run", "true"],
        ["one", "two", "--fail-on", "forwards=2%"],
        ["one", "two", "--fail-on", "fast"],
    ],
)
def test_mistake_ends_with_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *arguments]) == 2
    assert capsys.readouterr().err.startswith("torchlens-perf: ")
