"""`torchlens-perf simulate` lists the verdict that found a planted fault, or why it was missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.simulations import simulation
from torchlens_perf.commands.cli import _build_parser
from torchlens_perf.errors import ConfigError
from torchlens_perf.page.document.write import write_page
from torchlens_perf.run import open_files
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.simulate.planted import ReportedVerdicts, compare_faults
from torchlens_perf.simulate.simulation import Topology

QUIET = ("--noise", "0.03")


def simulate(*arguments: str) -> int:
    options = _build_parser().parse_args(["simulate", *arguments])
    code: int = options.command(options)
    return code


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs the command with its arguments and returns the printed JSON."""

    def run_simulate(*arguments: str) -> dict[str, Any]:
        assert simulate(*arguments, "--json") == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run_simulate


@pytest.mark.parametrize(
    ("fault", "ranks"),
    [
        ("constant:rank=3,share=0.2,phase=forward,since=32", {3}),
        ("drifting:rank=3,share=0.2,over=50", {3}),
        ("intermittent:rank=3,share=0.2,slow=1,of=2", {3}),
        ("moving:ranks=3+5,share=0.2,every=48", {3, 5}),
        ("node:node=1,share=0.1", {8, 9, 10, 11, 12, 13, 14, 15}),
    ],
)
def test_fault_of_ranks_is_found_by_a_straggler_verdict(
    fault: str,
    ranks: set[int],
    answer: Any,
) -> None:
    found = answer("--rows", "--ranks", "32", "--steps", "96", "--fault", fault, *QUIET)
    (planted,) = found["planted"]

    assert (planted["found"], planted["missed_ranks"], planted["why_not"]) == (True, [], "")
    assert (
        set(planted["ranks"])
        == ranks
        == {rank for each in planted["named_by"] for rank in each["ranks"]}
    )
    assert {each["kind"].partition("_")[0] for each in planted["named_by"]} == {"straggler"}
    assert {each["phase"] for each in planted["named_by"]} == {planted["phase"]}
    rows = [(row["kind"], row["since_step"], row["cost_s_per_step"]) for row in found["verdicts"]]
    assert all(
        (by["kind"], by["since_step"], by["cost_s_per_step"]) in rows for by in planted["named_by"]
    )
    assert not found["not_planted"]


@pytest.mark.parametrize(
    ("fault", "topology", "kind", "ranks"),
    [
        ("link:rank=3,share=0.2", "dp=4,tp=4", "slow_link", [3, 7, 11, 15]),
        ("stalls:rank=3,share=4,every=30", "dp=4", "long_steps", [3]),
        ("constant:rank=2,share=0.4", "dp=1,pp=3", "imbalance", [2]),
    ],
)
def test_fault_is_found_by_a_verdict_on_a_run_directory(
    fault: str, topology: str, kind: str, ranks: list[int], tmp_path: Path, answer: Any
) -> None:
    found = answer(
        "--topology",
        topology,
        "--steps",
        "96",
        "--fault",
        fault,
        "--out",
        str(tmp_path / "run"),
        *QUIET,
    )
    (planted,) = found["planted"]

    assert planted["found"]
    assert {each["kind"] for each in planted["named_by"]} == {kind}
    assert {tuple(each["ranks"]) for each in planted["named_by"]} == {tuple(ranks)}


@pytest.mark.parametrize(
    ("fault", "arguments", "why"),
    [
        (
            "constant:rank=3,share=0.002",
            ("--ranks", "8"),
            "too small: 400 us a step, and the smallest detectable slow",
        ),
        ("node:node=0,share=0.002", ("--ranks", "32"), "too small: 400 us a step"),
        ("drifting:rank=2,share=0.004", ("--ranks", "8"), "too small: 194 us a step"),
        (
            "stalls:rank=3,share=9,every=90",
            ("--ranks", "8"),
            "too rare: it makes 1 of 96 steps longer, and --rows has",
        ),
        (
            "constant:rank=3,share=0.2,since=93",
            ("--ranks", "8"),
            "too short: it lasts 3 of 96 steps",
        ),
        (
            "constant:rank=3,share=0.2,since=500",
            ("--ranks", "8"),
            "it does not begin within the 96 steps",
        ),
        (
            "constant:rank=0,share=0.05",
            ("--topology", "dp=1,pp=2"),
            "not compared: no other rank does the same work",
        ),
        (
            "node:node=0,share=0.1",
            ("--ranks", "12"),
            "8 of the 12 ranks that do the same work are slow",
        ),
        ("link:rank=5,share=0.2", ("--topology", "dp=4,tp=4"), "--rows holds no transfer times"),
        (
            "link:rank=5,share=0.2,since=500",
            ("--topology", "dp=4,tp=4"),
            "it does not begin within the 96 steps",
        ),
    ],
)
def test_missed_planted_fault_is_listed_with_a_reason(
    fault: str,
    arguments: tuple[str, ...],
    why: str,
    answer: Any,
) -> None:
    (planted,) = answer("--rows", "--steps", "96", "--fault", fault, *arguments, *QUIET)["planted"]

    assert planted["found"] is False
    assert planted["missed_ranks"] == planted["ranks"]
    assert why in planted["why_not"]


@pytest.mark.parametrize(
    ("fault", "topology", "why"),
    [
        (
            "link:rank=1,share=0.2",
            "dp=2,tp=2",
            "not compared: no group has 2 others that do the same",
        ),
        ("link:rank=1,share=0.01", "dp=4,tp=4", "too small: transfers take 1.3 times as long"),
    ],
)
def test_missed_slow_link_is_listed_with_a_reason(
    fault: str,
    topology: str,
    why: str,
    tmp_path: Path,
    answer: Any,
) -> None:
    arguments = (
        "--topology",
        topology,
        "--steps",
        "64",
        "--fault",
        fault,
        "--out",
        str(tmp_path / "run"),
    )
    (planted,) = answer(*arguments)["planted"]

    assert planted["found"] is False
    assert planted["why_not"].startswith(why)


def test_printed_text_lists_found_and_missed_faults(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--rows", "--ranks", "16", "--steps", "96", *QUIET)
    assert (
        simulate(
            *arguments,
            "--fault",
            "constant:rank=0,share=0.3",
            "--fault",
            "constant:rank=5,share=0.002",
        )
        == 0
    )
    printed = capsys.readouterr().out
    found, missed = (
        printed[printed.index("planted faults: 1 of 2 found\n") :]
        .strip()
        .split("\nconstant:rank=5")
    )

    assert (
        "constant:rank=0,share=0.3: found\n  planted    rank 0, compute, since step 0, +60.0 ms,"
        " costs 5" in found
    )
    assert "\n  found      rank 0, compute, since step 0, costs 5" in found
    assert missed.startswith(
        ",share=0.002: not found\n  planted    rank 5, compute, since step 0, +400 us, costs 0 ns"
    )
    assert (
        "\n  not found  too small: 400 us a step, and the smallest detectable slowdown is "
        in missed
    )


def test_one_verdict_finds_only_one_of_two_faults_of_a_rank(answer: Any) -> None:
    """A rank with two faults at a time has one verdict, which finds the fault in its phase.

    Faults of two different ranks are both found.
    """
    forward, backward = (
        "constant:rank=3,share=0.3,phase=forward",
        "constant:rank=3,share=0.1,phase=backward",
    )
    options = ("--rows", "--ranks", "16", "--steps", "96", *QUIET)
    both = answer(*options, "--fault", backward, "--fault", forward)

    assert [(each["phase"], each["found"]) for each in both["planted"]] == [
        ("backward", False),
        ("forward", True),
    ]
    assert (
        "a larger fault makes the same rank slow at the same time" in both["planted"][0]["why_not"]
    )
    assert not both["not_planted"]
    ranks = answer(
        *options, "--fault", "constant:rank=3,share=0.3", "--fault", "constant:rank=5,share=0.3"
    )
    assert [each["found"] for each in ranks["planted"]] == [True, True]


def test_fault_of_all_ranks_counts_neither_as_found_nor_as_missed(answer: Any) -> None:
    faults = ("--fault", "pauses:share=0.3", "--fault", "variable_length:spread=0.1")
    found = answer("--rows", "--steps", "64", *faults)

    assert [(each["found"], each["ranks"], each["missed_ranks"]) for each in found["planted"]] == [
        (None, [], [])
    ] * 2


def test_verdict_that_matches_no_fault_is_listed() -> None:
    """The verdict is on another rank, or on the right rank too early."""
    past = {
        "kind": "straggler_ended",
        "phase": "forward",
        "cost_s_per_step": 0.02,
        "evidence": {"until_step": 40},
    }
    rows = [{**past, "rank": 5, "since_step": 32}, {**past, "rank": 3, "since_step": 8}]
    fault = "constant:rank=3,share=0.2,since=48"
    found = compare_faults([fault], simulation(fault), 96, ReportedVerdicts(rows, 0.005, None))

    assert [each.ranks for each in found.unmatched] == [(5,), (3,)]
    assert found.planted[0].missed_ranks == (3,)
    assert (
        "not planted, but named: rank 5, forward, from step 32 to 39, costs 20.0 ms a step"
        in "\n".join(found.format_lines())
    )


def test_cost_of_a_fault_is_the_difference_to_the_run_without_it() -> None:
    # The stalls draw random numbers, which must not change the steps at the first fault.
    with_both = simulation(
        "intermittent:rank=1,share=0.3", "stalls:rank=2,share=2,every=5", topology=Topology(4)
    )
    first, second = with_both.fault_effects(40)
    alone = simulation("intermittent:rank=1,share=0.3", topology=Topology(4))
    expected = [
        both.duration_ns - one.duration_ns
        for both, one in zip(with_both.steps(40), alone.steps(40), strict=True)
    ]

    assert first.work_ns.shape == (4, 40)
    assert np.count_nonzero(first.work_ns[1] > 0) < 40
    assert set(np.round(first.work_ns[first.work_ns > 0] / 1e6).tolist()) == {60.0}
    assert not first.work_ns[[0, 2, 3]].any()
    assert second.cost_ns.tolist() == np.concatenate(expected).tolist()


@pytest.mark.long
@pytest.mark.slow
def test_page_and_top_show_the_slow_one_of_256_ranks(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The page's tables omit some of the 256 ranks.

    The page's texts mention ranks without verdicts.
    """
    out = tmp_path / "run"
    topology, fault = "dp=32,tp=8", "constant:rank=77,share=0.3"
    assert (
        simulate(
            "--topology", topology, "--steps", "24", "--fault", fault, "--out", str(out), *QUIET
        )
        == 0
    )
    assert "planted faults: 1 of 1 found" in capsys.readouterr().out

    size_bytes = write_page(RunDirectory(out), tmp_path / "page.html", 400_000)
    options = _build_parser().parse_args(["top", str(out), "--once"])
    assert options.command(options) == 0
    frame = capsys.readouterr().out

    assert size_bytes < 900_000
    assert "Rank 77" in (tmp_path / "page.html").read_text()
    assert "256 ranks" in frame
    assert "Rank 77" in frame


def test_low_limit_of_open_files_is_an_error_of_simulate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda kind: (256, 256))
    monkeypatch.setattr(open_files.resource, "setrlimit", lambda kind, limits: None)
    with pytest.raises(
        ConfigError, match=r"^640 files must be open at the same time, but the limit is 256: "
    ):
        simulate("--ranks", "256", "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
