"""Tests of `torchlens-perf capture` on live two-rank runs.

The tests cover the files, their cost, and a capture triggered by a verdict.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.live_ranks import LiveRanks
from tests.support.processes import SCRIPTS, wait_for_sidecar
from torchlens_perf.commands.cli import main
from torchlens_perf.report.captures import capture_rows
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run import captures as capture_files
from torchlens_perf.run.captures import BY_USER, FLIGHT_RECORDER, STACKS, TRACE, Request
from torchlens_perf.view.terminal import render_full

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STARTED_S = 90.0
# Steps of each run of train_twice.py.
STEPS = 60


def wait(wanted: Callable[[], Any], timeout_s: float = 60) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while not (answer := wanted()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return answer


def torchlens_perf(*arguments: object) -> tuple[int, str, str]:
    """Return a command's exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(each) for each in arguments])
    return code, out.getvalue(), err.getvalue()


def traced_steps(trace: Path) -> set[int]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {each["name"] for each in events if each["name"].startswith("ProfilerStep#")}
    return {int(name.partition("#")[2]) for name in names}


def test_capture_changes_neither_results_nor_threads_nor_step_time(tmp_path: Path) -> None:
    """Compare with the same training without a capture: bits, Python threads, sockets and step
    time.

    The shortest later step may need up to 1.5 times the processor time. benchmarks/capture_cost.py
    measures smaller slowdowns.

    torch's profiler library Kineto keeps a native thread, which Python does not count.
    """
    request = Request("one", BY_USER, time.time(), 0, (1,), from_step=STEPS + 20, steps=3)
    with LiveRanks(tmp_path, 2, script=str(SCRIPTS / "train_twice.py")) as job:
        run = job.run_directory()
        job.wait_for(lambda report: len(report["ranks"]) == 2, STARTED_S)
        capture_files.submit_request(run.captures, request)
        folder = capture_files.rank_folder(run.captures, "one", 1)
        wait(folder.exists)
        (tmp_path / "go").touch()
        told = {
            rank: json.loads(path.read_text())
            for rank in (0, 1)
            if wait((path := tmp_path / f"{rank}.json").exists)
        }
        wait_for_sidecar(run)
        code, _, error = torchlens_perf("capture", run.path, "--rank", 1)

    (row,) = capture_rows(run)
    assert (row["rank"], row["first_step"], row["last_step"], row["ended"]) == (
        1,
        STEPS + 20,
        STEPS + 22,
        "",
    )
    assert {TRACE, FLIGHT_RECORDER, STACKS} == set(row["files"])
    assert traced_steps(folder / TRACE) == {STEPS + 20, STEPS + 21, STEPS + 22}
    assert not (run.captures / "one" / "rank00000").exists()
    for plain, captured in told.values():
        assert captured["parameters"] == plain["parameters"]
        assert captured["threads"] == plain["threads"]
        assert captured["sockets"] == plain["sockets"]
        # Other programs can make steps longer, so use the shortest step.
        before, after = (min(captured["seconds"][part]) for part in (slice(2, 19), slice(23, None)))
        assert after < 1.5 * before
    assert (code, error) == (
        2,
        f"torchlens-perf: run {run.run_id} has ended: a capture needs a live run\n",
    )


@pytest.mark.long
def test_verdict_captures_the_slow_rank_once_and_a_command_another_rank(tmp_path: Path) -> None:
    """The verdict captures the slow rank together with a healthy one.

    A command captures another rank later.
    """
    with LiveRanks(
        tmp_path, 2, SLOW_RANK="1", SLOW_FROM="20", TORCHLENS_PERF_CAPTURE="verdict"
    ) as job:
        run = job.run_directory()
        # On a busy machine another verdict may be first, because CPU contention of all ranks may
        # cost more.
        job.wait_for(
            lambda report: "straggler" in [each["kind"] for each in report["verdicts"]], STARTED_S
        )
        wait(lambda: len(capture_rows(run)) == 2)
        unknown = torchlens_perf("capture", run.path, "--rank", "0,7")
        too_many = torchlens_perf("capture", run.path, "--rank", 0, "--steps", 21)
        asked = torchlens_perf("capture", run.path, "--rank", 0, "--steps", 2, "--no-wait")
        busy = torchlens_perf("capture", run.path, "--rank", 1)
        wait(lambda: len(capture_rows(run)) == 3)
        told = torchlens_perf("capture", run.path, "--rank", 0, "--steps", 2)
        rows = capture_rows(run)
        report = job.report()

    assert [(row["asked_by"], row["rank"]) for row in rows] == [
        ("verdict", 1), ("verdict", 0), ("user", 0), ("user", 0),
    ]  # fmt: skip
    assert rows[0]["first_step"] == rows[1]["first_step"]
    for row in rows:
        assert traced_steps(run.path / row["files"][TRACE]["path"]) == set(
            range(row["first_step"], row["last_step"] + 1)
        )
    assert [
        verdict["rank"] for verdict in report["verdicts"] if verdict["kind"] == "straggler"
    ] == [1]
    assert (unknown[0], too_many[0], asked[0], busy[0], told[0]) == (2, 2, 0, 2, 0)
    assert "rank 7 does not run here. Running ranks: 0-1." in unknown[2]
    assert "--steps 21: must be from 1 to 20" in too_many[2]
    assert "another capture is in progress" in busy[2]
    assert (
        f"captured: rank 0, steps {rows[3]['first_step']}-{rows[3]['last_step']}:"
        f" {run.path}/captures/" in told[1]
    )
    shown = load_report(run, lost_time=False)
    assert "  Profiles" in render_full(shown, str(run.path), columns=118, color=False)
