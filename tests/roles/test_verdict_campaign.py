"""Campaigns of jobs with faults are continued, not repeated (benchmarks/rl_verdicts.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rl_verdicts import main


def test_campaign_continues_after_its_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run: list[tuple[str, int, float]] = []

    def run_case(
        folder: Path, fault: str, seed: int, strength: float, further: Sequence[str]
    ) -> dict[str, Any]:
        run.append((fault, seed, strength))
        if len(run) == 2:
            raise RuntimeError("the job has failed")
        return {"fault": fault, "seed": seed, "right": fault != "slow_tool", "accurate": True}

    def start(*further: str) -> None:
        given = ["--faults", "slow_engine", "slow_tool", "--pairs", "--seeds", "1", "--clean", "2"]
        out = ["--out", str(tmp_path / "runs.jsonl"), *further]
        monkeypatch.setattr("sys.argv", ["rl_verdicts", *given, *out])
        main(run_case)

    start("--minutes", "0")
    assert not run
    start()
    cases = [("slow_engine", 0), ("slow_tool", 0), ("slow_engine+slow_tool", 0), ("", 0), ("", 1)]
    assert run == [(fault, seed, 1.0) for fault, seed in cases]
    start()
    # Only the run whose job has failed is repeated.
    assert run[len(cases) :] == [("slow_tool", 0, 1.0)]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("right: 2 of 3 planted; named in 0 of 2 clean runs")
    start("--strength", "0.5")
    assert {strength for *_, strength in run[6:]} == {0.5}
