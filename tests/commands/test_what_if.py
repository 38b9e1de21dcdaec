"""The command `what-if` on simulated runs: gains, forms and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tests.support.simulated_runs import simulate_run
from torchlens_perf.commands.cli import main
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("what-if") / "run"
    return simulate_run(
        folder, "--ranks", "8", "--fault", "constant:rank=3,share=0.25,phase=forward"
    )


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulate_run(tmp_path_factory.mktemp("what-if") / "healthy", "--ranks", "8")


def predict(run: Path, *changes: str, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    assert main(["what-if", str(run), *changes, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["changes"]
    return found  # type: ignore[no-any-return]


def test_gain_without_the_slow_rank_is_the_step_of_a_run_without_it(
    run: Path, healthy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, usual = (load_report(RunDirectory(each))["lost_time"] for each in (run, healthy))
    assert steps is not None
    assert usual is not None
    found = predict(run, "rank=3@median", capsys=capsys)
    assert {each.change: msgspec.to_builtins(each) for each in steps.changes}[
        "rank=3@median"
    ] == found
    measured_s = steps.step_s - usual.step_s
    assert found["low_s"] < measured_s < found["high_s"]
    assert found["gain_s"] == pytest.approx(measured_s, rel=0.1)


def test_report_shows_the_class_and_the_gain_of_a_slow_rank_with_the_cost_of_its_verdict(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = load_report(RunDirectory(run))
    lost = report["lost_time"]
    assert lost is not None
    (cost_s,) = [row.cost_s_per_step for row in report["verdicts"] if row.kind == "straggler"]
    gains = {each.change: each.gain_s for each in lost.changes}
    classes = {each.name: each for each in lost.classes}
    assert gains["rank=3@median"] == classes["slow rank"].s_per_step == cost_s
    assert sum(each.s_per_step for each in lost.classes) == pytest.approx(lost.step_s)
    assert main(["report", "--all", str(run)]) == 0
    text = capsys.readouterr().out
    assert "slow rank 3" in text
    assert "rank=3@median" in text


def test_largest_class_of_a_healthy_job_is_computing(healthy: Path) -> None:
    lost = load_report(RunDirectory(healthy))["lost_time"]
    assert lost is not None
    assert lost.classes[0].name == "backward"


def test_answer_is_a_sentence_with_the_step_before_and_after(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures are those of the verdict, in one unit."""
    (verdict,) = (
        row for row in load_report(RunDirectory(run))["verdicts"] if row.kind == "straggler"
    )
    assert main(["what-if", str(run), "rank=3@median"]) == 0
    sentence, drift = capsys.readouterr().out.splitlines()
    step_s = verdict.cost_s_per_step / verdict.cost_share
    assert sentence.startswith(
        "If rank 3 computed as fast as the median rank, a step would take"
        f" {1e3 * (step_s - verdict.cost_s_per_step):.0f} ms instead of {1e3 * step_s:.0f} ms:"
        f" {1e3 * verdict.cost_s_per_step:.1f} ms less ({verdict.cost_share:.0%}; at least "
    )
    assert drift == "A replay without any change differs from the recorded steps by 0.0%."


@pytest.mark.parametrize(
    ("changes", "clause"),
    [
        (["rank=3@median", "forward x0.5"], "rank 3 computed as fast as the median rank and the forward pass took 50%"),
        (["rank=all@median"], "each slower rank computed as fast as the median rank,"),
        (["data=0"], "data loading took no time,"),
        (["forward x2"], "the forward pass took 200% of its time, a step would take "),
        (["contention=0", "gc=0"], "waiting for a CPU took no time and garbage collection took no time,"),
        (["overlap=all"], "communication overlapped with computing as far as it fits,"),
    ],
)  # fmt: skip
def test_changes_are_said_in_words(
    changes: list[str], clause: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["what-if", str(run), *changes]) == 0
    assert capsys.readouterr().out.startswith(f"If {clause}")


def test_most_valuable_changes_are_a_table_in_the_unit_of_the_step(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["what-if", str(run)]) == 0
    text = capsys.readouterr().out
    sentence, _, title, *_, note, _ = text.splitlines()
    assert sentence.startswith("If ")
    assert title.strip() == "Predicted gains of changes, ms"
    assert note.strip() == "Each change alone: gains may overlap, so they do not add up."


def test_mistakes_are_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for change in ("faster", "section=0", "forwrad x0.5"):
        assert main(["what-if", str(run), change]) == 2
        assert capsys.readouterr().err.startswith(
            f"torchlens-perf: {change!r} is not a change. Changes: rank=3@median, "
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("module:x=0", "has no timed module x. Known: "),
        ("section:x=0", "has no section x. Known: none"),
        ("rank=9@median", "has no rank 9. Known: 0-7"),
        ("bandwidth:x x2", "has no measured transfers x. Known: "),
    ],
)
def test_error_on_an_unknown_name_lists_those_of_the_run(
    change: str, message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["what-if", str(run), change]) == 2
    assert message in capsys.readouterr().err


def test_too_few_steps_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = simulate_run(tmp_path / "short", "--ranks", "2", "--steps", "6")
    assert main(["what-if", str(short), "data=0"]) == 2
    assert "fewer than 8 usual steps" in capsys.readouterr().err
