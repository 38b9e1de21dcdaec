"""Tests of the comparison with the last check, and of its use in verdicts of a job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.check.test_judge import ranks_of, subjects
from torchlens_perf.check.baseline import (
    Baseline,
    build_baseline,
    exchange_baseline,
    judge_change,
)
from torchlens_perf.check.judge import CheckEvidence
from torchlens_perf.check.tournament import Transfer
from torchlens_perf.report.last_check import add_last_check
from torchlens_perf.verdicts.verdict import Verdict

MONDAY, TODAY = "2026-11-23", "2026-11-29"
HOSTS = ["node-0", "node-1", "node-2", "node-3"]
ROUNDS = range(3)


def checked(factors: dict[int, float], date: str = TODAY, *, passed: bool = True) -> Baseline:
    """Return the values of a check with factors on the values of ranks."""
    slow = {(rank, index): factor for rank, factor in factors.items() for index in ROUNDS}
    return build_baseline(ranks_of(slow), [Transfer(3, 7, 46e9)], date, passed=passed)


def test_rank_that_became_slower_is_named_with_the_date() -> None:
    (found,) = judge_change(checked({}, MONDAY), checked({5: 0.35}), ranks_of())

    assert (found.kind, found.rank) == ("unfit_rank", 5)
    assert found.text.endswith("1.0 GFLOP/s at the check of 2026-11-23.")


def test_small_changes_have_no_verdict() -> None:
    assert list(judge_change(checked({}, MONDAY), checked({5: 0.7}), ranks_of())) == []


def test_change_of_all_ranks_has_one_verdict() -> None:
    now = checked(dict.fromkeys(range(8), 0.35))

    assert subjects(list(judge_change(checked({}, MONDAY), now, ranks_of()))) == ["all nodes"]


def test_check_that_found_something_does_not_replace_one_that_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHLENS_PERF_DIR", str(tmp_path))
    good, bad = checked({}), checked({5: 0.3}, passed=False)

    assert exchange_baseline(bad, HOSTS) is None
    assert exchange_baseline(good, HOSTS[::-1]) == bad
    assert exchange_baseline(bad, HOSTS) == good
    assert exchange_baseline(good, HOSTS) == good
    assert exchange_baseline(good, HOSTS[1:]) is None


def verdict_on(kind: str, *ranks: int) -> Verdict:
    return Verdict(kind=kind, confidence=1.0, evidence=CheckEvidence(ranks=ranks, subject="a part"))


def test_verdicts_of_a_job_say_what_the_check_measured_at_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may order its ranks in another way, so places count."""
    monkeypatch.setenv("TORCHLENS_PERF_DIR", str(tmp_path))
    exchange_baseline(checked({5: 0.5}, MONDAY), HOSTS)
    found = [verdict_on("slow_link", 0, 1), verdict_on("straggler", 2), verdict_on("straggler", 3)]
    rows = [("node-1", 1), ("node-3", 1), ("node-2", 1), ("elsewhere", 0)]
    ranks = [
        {"rank": at, "host": host, "local_rank": local} for at, (host, local) in enumerate(rows)
    ]
    report: Any = {"ranks": ranks, "verdicts": found}
    add_last_check(tmp_path, report)
    link, slow, unknown = report["verdicts"]

    assert link.text.endswith("The check of 2026-11-23 measured 46.0 GB/s on this link.")
    assert "At the check of 2026-11-23, its matmul float32 reached 5" in slow.text
    assert unknown == verdict_on("straggler", 3)


@pytest.mark.parametrize("text", ["{}", '{"notes": {"node-1/0": 5}}', None])
def test_damaged_file_of_a_check_adds_nothing_and_hides_no_other(
    tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "check-00000000.json"
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text)
    rows = [{"rank": 0, "host": "node-1", "local_rank": 0}]
    report: Any = {"ranks": rows, "verdicts": [verdict_on("straggler", 0)]}
    add_last_check(tmp_path, report)

    assert report["verdicts"] == [verdict_on("straggler", 0)]
    later = tmp_path / "check-00000001.json"
    later.write_text('{"notes": {"node-1/0": "It was slow."}}')
    os.utime(path, (1, 1))
    add_last_check(tmp_path, report)
    assert report["verdicts"][0].notes == ("It was slow.",)
