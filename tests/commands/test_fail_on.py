"""`report --fail-on`: the exit code depends on the requested kinds of verdicts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.support.findings import findings, hang, hung
from tests.support.live_simulation import LiveSimulation
from tests.support.ranks import Rank, make_run, read_to_end
from torchlens_perf.commands.cli import main
from torchlens_perf.commands.fail_on import KINDS, choose_exit_code
from torchlens_perf.report.report_json import EVIDENCE, kinds_with
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts.node_state import NodeState
from torchlens_perf.verdicts.verdict import Evidence, Verdict

EVERY = ",".join(KINDS)
ENDED_FAULT = "constant:rank=2,share=0.3,since=32,until=96"


def simulated(folder: Path, *faults: str, ranks: int = 4, blocks: int = 6) -> Path:
    """Return the run directory of a finished run."""
    with LiveSimulation(folder / "run", ranks, *faults) as simulation:
        simulation.add_blocks(blocks)
        if not blocks:
            simulation.sidecar.read_rings()
    return simulation.run.path


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("clean"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("slow"), "constant:rank=2,share=0.3")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveSimulation]:
    """Return a run in progress in which rank 2 is slow."""
    with LiveSimulation(tmp_path / "run", 4, "constant:rank=2,share=0.3") as simulation:
        simulation.add_blocks(4)
        yield simulation


def test_fail_on_exits_with_0_without_verdicts(
    clean: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report is printed as usual."""
    assert main(["report", str(clean)]) == 0
    report = capsys.readouterr()
    assert (
        main(["report", str(clean), "--fail-on", "slow-rank,hang,crash,out-of-memory,imbalance"])
        == 0
    )
    assert capsys.readouterr() == report
    assert report.err == ""
    assert (
        main(["report", str(clean), "--fail-on", "slow-link"]) == 3
    )  # The ranks form only one group, so links are not compared.


def test_fail_on_exits_with_1_for_a_slow_rank_only_if_its_verdict_is_requested(
    slow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(slow)]) == 0
    report = capsys.readouterr()
    assert main(["report", str(slow), "--fail-on", "slow-rank,hang"]) == 1
    found = capsys.readouterr()
    assert found.out == report.out
    assert found.err == "torchlens-perf: --fail-on: found slow-rank\n"
    assert main(["report", str(slow), "--fail-on", "hang"]) == 0
    assert main(["report", str(slow), "--fail-on", "hang", "--fail-on", "slow-rank"]) == 1


def test_fail_on_writes_json_and_page_as_usual(
    slow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --quiet, the line about the verdicts is omitted."""
    assert main(["report", str(slow), "--fail-on", "slow-rank", "--json", "--quiet"]) == 1
    found = capsys.readouterr()
    assert (json.loads(found.out)["verdicts"][0]["kind"], found.err) == ("straggler", "")
    page = tmp_path / "page.html"
    assert (
        main(["report", str(slow), "--fail-on", "slow-rank", "--html", str(page), "--quiet"]) == 1
    )
    assert page.stat().st_size > 1000
    assert capsys.readouterr().out == ""


def test_fail_on_ignores_an_ended_straggler(tmp_path: Path) -> None:
    run = simulated(tmp_path, ENDED_FAULT, blocks=12)
    assert main(["report", str(run), "--fail-on", "slow-rank"]) == 0


def test_hanging_job_fails_on_hang_and_is_inconclusive_on_stragglers(
    live: LiveSimulation, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the job hangs, it is unknown whether a rank is slow."""
    assert main(["report", str(live.run.path), "--fail-on", "hang"]) == 0
    live.sidecar.state.hang = hang(live.steps)
    live.sidecar.save_state()
    capsys.readouterr()
    assert main(["report", str(live.run.path), "--fail-on", "slow-rank,hang"]) == 1
    assert capsys.readouterr().err == "torchlens-perf: --fail-on: found hang\n"
    assert main(["report", str(live.run.path), "--fail-on", "slow-rank"]) == 3
    assert capsys.readouterr().err.endswith(
        "not enough data for slow-rank: the job hangs, so this was not judged\n"
    )


@pytest.mark.parametrize(("over", "blocks", "code"), [(False, 0, 1), (True, 0, 1), (True, 32, 0)])
def test_fail_on_ignores_an_ended_hang_unless_costly_or_at_the_end(
    over: bool, blocks: int, code: int, live: LiveSimulation
) -> None:
    """A hang is costly if it took at least 5% of the run."""
    live.add_blocks(blocks)
    live.end_run()
    live.sidecar.state.records = hung(over=over)
    live.sidecar.state.save(live.run)
    assert main(["report", str(live.run.path), "--fail-on", "hang"]) == code


@pytest.mark.parametrize(("kind", "code"), [("none", 0), ("not_compared", 3)])
def test_stragglers_are_inconclusive_if_ranks_were_not_compared(kind: str, code: int) -> None:
    """A verdict of the kind `not_compared` states that the ranks were not compared."""
    undecided = kind == "not_compared"
    row = Verdict(kind=kind, confidence=0.9, is_undecided=undecided, evidence=Evidence())
    report: Any = {
        "verdicts": [row],
        "steps": {"count": 60, "p50_s": 0.1},
        "run": {"world_size": 8},
    }
    assert (
        choose_exit_code(["slow-rank"], report, [NodeState("node", findings=findings())])[0] == code
    )


def test_fail_on_finds_a_slow_rank_even_if_all_ranks_lack_cpus() -> None:
    """If all ranks lack CPUs and one rank lacks them more, both problems are one verdict."""
    row = Verdict(kind="lack_of_cpu", rank=2, confidence=0.9, evidence=Evidence())
    for changed, slow_rank, contention in (
        ({}, 1, 1),
        ({"rank": None}, 3, 1),
        ({"is_over": True}, 3, 3),
    ):
        report: Any = {
            "verdicts": [structs.replace(row, **changed)],
            "steps": {"count": 2, "p50_s": None},
        }
        assert choose_exit_code(["slow-rank"], report, [NodeState("node")])[0] == slow_rank
        assert choose_exit_code(["cpu-contention"], report, [NodeState("node")])[0] == contention


@pytest.mark.parametrize(
    ("ranks", "steps", "asked", "line"),
    [
        (1, 0, "hang", "hang: no step was recorded"),
        (1, 2, "data-bound", "data-bound: all steps are warm-up steps"),
        (1, 2, "hang", ""),
        (1, 60, "slow-rank", "slow-rank: only one rank"),
        (
            1,
            60,
            "slow-rank,slow-link",
            "slow-rank: only one rank; slow-link: no links were compared",
        ),
        (1, 12, "growing-steps", "growing-steps: too few steps"),
        (1, 60, "cpu-contention", "cpu-contention: CPU contention was not measured"),
        (2, 8, "slow-rank", "slow-rank: the ranks were not compared"),
    ],
)
def test_exit_code_is_3_if_a_requested_verdict_is_inconclusive(
    ranks: int,
    steps: int,
    asked: str,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = recorded(tmp_path, ranks, steps)
    code = main(["report", str(run.path), "--fail-on", asked])
    found = capsys.readouterr()
    assert (code, found.err) == (
        (3, f"torchlens-perf: --fail-on: not enough data for {line}\n") if line else (0, "")
    )
    assert found.out


def recorded(folder: Path, ranks: int, steps: int) -> RunDirectory:
    run = make_run(folder)
    for rank in (Rank(run, number, ranks) for number in range(ranks)):
        rank.steps(steps, data=1, forward=4, backward=6, host=1)
        rank.close()
    read_to_end(run)
    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--fail-on", "slow-rnak"],
            "unknown verdict 'slow-rnak': did you mean 'slow-rank'? Verdicts: slow-rank, ",
        ),
        (["--fail-on", "hang,"], "unknown verdict ''. Verdicts: "),
        (["--fail-on"], "argument --fail-on: expected one argument"),
        (["--fail-on", "hang", "--schema"], "--fail-on needs a run"),
    ],
)
def test_invalid_fail_on_argument_is_one_line_with_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "nowhere", *arguments]) == 2
    found = capsys.readouterr()
    assert (found.out, found.err.count("\n")) == ("", 1)
    assert message in found.err


def test_fail_on_a_missing_run_exits_with_2(tmp_path: Path) -> None:
    assert main(["report", str(tmp_path), "--fail-on", EVERY]) == 2


def test_every_name_accepted_by_fail_on_is_a_kind_of_verdict() -> None:
    assert {each.name for each in KINDS.values()} <= {
        kind for each in EVIDENCE for kind in kinds_with(each)
    }
    assert all(name == name.lower() and "_" not in name for name in KINDS)
