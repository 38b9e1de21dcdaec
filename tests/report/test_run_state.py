"""Sentences on a run as a whole: its end, missing ranks, a slow start, and few or lost steps."""

from __future__ import annotations

import datetime
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_memory import InMemoryExporter
from tests.support.ranks import HOST, Rank, make_run
from tests.support.reports import checked
from torchlens_perf.hooks.failure import describe_failure
from torchlens_perf.page import notebook
from torchlens_perf.page.document.html import build_document
from torchlens_perf.page.gather.run_contents import gather_contents
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Kind
from torchlens_perf.serve.run_list import read_lines
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.store.run_folders import find_runs
from torchlens_perf.top.live_runs import list_runs
from torchlens_perf.verdicts.node_state import NodeState
from torchlens_perf.verdicts.words.run_state import describe_ranks, describe_run_state
from torchlens_perf.verdicts.words.startup import describe_startup
from torchlens_perf.view.headline import build_headlines
from torchlens_perf.view.terminal import render_full, render_short

WORK = {"forward": 4, "backward": 6, "host": 1}
# This pid belongs to a process that started at boot.
_GONE: dict[str, Any] = {"pid": os.getpid(), "process_started": 1}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path)


def state_of(run: RunDirectory, ranks: list[Rank], closed: tuple[int, ...] = ()) -> NodeState:
    """Return the state that the sidecar saves for the given ranks.

    `closed` has the ranks that close their watch.
    """
    for rank in ranks:
        if rank.identity.rank in closed:
            rank.close()
    sidecar = Sidecar(run, HOST, None, lambda run, asked: None)
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.judge_ranks(1e6, final=True)
    sidecar.save_records()
    sidecar.close()
    return sidecar.state


def report_of(run: RunDirectory, state: NodeState) -> dict[str, Any]:
    return checked(build_report(run.run_id, [state]))


@pytest.mark.parametrize(
    ("size", "died", "words"),
    [
        (1, [], "1 rank, ended"),
        (1, [0], "1 rank, died"),
        (2, [1], "2 ranks, ended, rank 1 died"),
        (4, [1, 2, 3], "4 ranks, ended, ranks 1-3 died"),
        (3, [0, 1, 2], "3 ranks, all ranks died"),
    ],
)
def test_rank_that_died_is_in_the_title_of_every_screen(
    size: int, died: list[int], words: str, run: RunDirectory
) -> None:
    """The screens are the report, the short report, the page, a notebook cell, the list of runs,
    `top` and JSON.
    """
    ranks = [Rank(run, rank, size, identity=_GONE if rank in died else {}) for rank in range(size)]
    for rank in ranks:
        rank.steps(12, **WORK)
        rank.begin(Kind.FORWARD, "layer")
    report = report_of(run, state_of(run, ranks, tuple({*range(size)} - {*died})))
    (line,) = read_lines(str(run.path), find_runs(str(run.path)), 10.0)
    (row,) = list_runs(run.path.parent)

    for draw in (render_full, render_short):
        title = draw(report, "/r", columns=100, color=False).splitlines()[0]
        without_steps = re.sub(r" 12 steps( in [0-9.]+ m?s)?,| after [0-9.]+ m?s", "", title)
        assert without_steps.endswith(words.replace("of them", "ranks"))
    assert words in notebook.build_cell(report, "/r")
    head = build_document(gather_contents(run)).partition("</header>")[0]
    # The page says when the run has ended.
    assert words.partition(", ")[2] in re.sub(r"ended [0-9:]+ UTC", "ended", head)
    assert line.state == words.partition(", ")[2]
    assert (report["run"]["state"], report["run"]["died"]) == ("died" if died else "ended", died)
    assert row.state == report["run"]["state"]
    kinds = [verdict.kind for verdict in report["verdicts"]]
    assert ("died" in kinds) is bool(died)
    if died:
        assert kinds[0] == "died"
        assert "after step 11, in layer" in report["verdicts"][0].sentence
        assert report["verdicts"][0].evidence.ranks == tuple(died)
        assert "OK" not in [each.status for each in build_headlines(report)]


KILLED = {"signal": 9, "exit_code": None, "oom_kills": 1, "memory_limit_bytes": 2_000_000_000}


@pytest.mark.parametrize(
    ("ends", "rank", "words"),
    [
        (
            [{}, KILLED],
            1,
            "killed by the kernel: out of memory (cgroup limit 2.0 GB; the rank used up to 123 ",
        ),
        (
            [{}, {**KILLED, "memory_limit_bytes": None}],
            1,
            "out of memory (memory of the node; the rank used up to 123 ",
        ),
        ([{}, {**KILLED, "oom_kills": 0}], 1, "the process ended with SIGKILL. Rank 0 died, too"),
        # One of both was killed for lack of memory, and then the other one by the launcher.
        ([KILLED, KILLED], 0, "SIGKILL. The kernel's OOM killer ended 1 process of its control"),
        ([KILLED, {**KILLED, "oom_kills": 2}], 0, "the process ended with SIGKILL."),
        ([{**KILLED, "oom_kills": 2}, KILLED], 0, "killed by the kernel: out of memory"),
        (
            [{**KILLED, "signal": 15}, {**KILLED, "signal": 11}],
            1,
            ": the process ended with SIGSEGV.",
        ),
        (
            [{**KILLED, "signal": 15, "oom_kills": 0}],
            0,
            "ended with SIGTERM. Next: look for the reason",
        ),
        ([{**KILLED, "signal": 40, "oom_kills": 0}], 0, ": the process ended with signal 40."),
        ([{"signal": None, "exit_code": 7}], 0, "ended with exit code 7. Next: read the log"),
    ],
)
def test_death_is_described_as_the_kernel_shows_it(
    ends: list[dict[str, Any]], rank: int, words: str, run: RunDirectory
) -> None:
    ranks = [Rank(run, each, len(ends), identity=_GONE) for each in range(len(ends))]
    for each in ranks:
        each.steps(12, **WORK)
    state = state_of(run, ranks)
    for process, end in zip(state.processes.values(), ends, strict=True):
        process.end = {**KILLED, "signal": 15, "oom_kills": 0, **end}  # type: ignore[typeddict-item]
    first = report_of(run, state)["verdicts"][0]

    assert (first.kind, first.rank) == ("died", rank)
    assert words in first.sentence


@pytest.mark.parametrize(("identity", "crash"), [(_GONE, "died"), ({}, None)])
def test_exporters_receive_the_verdict_on_a_crash(
    identity: dict[str, Any], crash: str | None, run: RunDirectory
) -> None:
    rank, exporter = Rank(run, 0, 1, identity=identity), InMemoryExporter()
    rank.steps(12, **WORK)
    if not crash:
        rank.close()
    sidecar = Sidecar(run, HOST, exporter, lambda run, asked: None)
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.judge_ranks(1e6, final=True)
    sidecar.export_results(final=True)
    sidecar.close()

    assert exporter.assessment is not None
    found = exporter.assessment.crash
    assert (None if found is None else found.kind) == crash


def test_rank_that_died_is_in_the_title_while_others_run(run: RunDirectory) -> None:
    ranks = [Rank(run, 0), Rank(run, 1, identity=_GONE)]
    for rank in ranks:
        rank.steps(12, **WORK)
    report = report_of(run, state_of(run, ranks))
    # The job hangs, so its last step is older than its newest data.
    now = datetime.datetime.now(datetime.timezone.utc)
    started = now - datetime.timedelta(seconds=65)
    report["run"] |= {"started": started.isoformat(), "as_of": now.isoformat()}

    assert (
        "2 ranks, 12 steps, running for 1 min 05 s, rank 1 died"
        in render_full(report, "/r", columns=100, color=False).splitlines()[0]
    )
    assert report["run"]["state"] == "running"


@pytest.mark.parametrize(
    ("later_s", "words"),
    [(5, "running"), (200, "silent for 3 minutes"), (3 * 86_400, "silent for 3 days")],
)
def test_live_run_without_updates_is_called_silent(
    later_s: int, words: str, run: RunDirectory
) -> None:
    """If a node loses its power, no process can record that its ranks ended."""
    rank = Rank(run, 0, 1)
    rank.steps(12, **WORK)
    report = report_of(run, state_of(run, [rank]))
    written_s = datetime.datetime.fromisoformat(report["run"]["as_of"]).timestamp()

    assert describe_run_state(report["run"], written_s + later_s) == words


@pytest.mark.parametrize(
    ("size", "lost", "closed", "is_unseen"),
    [
        (4, [True, True], 0, True), (3, [True, True], 0, True), (4, [True], 0, True),
        (2, [True, True], 0, False), (4, [True, False], 0, False), (4, [True], 1, False),
    ],
)  # fmt: skip
def test_rank_that_lost_a_rank_of_another_node_is_not_blamed(
    size: int, lost: list[bool], closed: int, is_unseen: bool, run: RunDirectory
) -> None:
    """`lost`: for each seen rank that failed, whether it had lost a connection."""
    ranks = [Rank(run, rank, size) for rank in range(len(lost) + closed)]
    for rank in ranks:
        rank.steps(20, **WORK)
    for rank, is_lost in zip(ranks, lost, strict=False):
        failure = describe_failure(RuntimeError("Connection reset by peer"), 20)
        rank.session.close(None, {**failure, "lost_peer": is_lost})
    state = state_of(run, ranks, tuple(range(len(lost), len(ranks))))
    (verdict,) = (each for each in report_of(run, state)["verdicts"] if each.kind == "failed")

    assert ("Another rank ended before" in verdict.sentence) == is_unseen
    assert verdict.sentence.endswith("read the logs of the other ranks.") == is_unseen


@pytest.mark.parametrize(
    ("error", "words"),
    [(SystemExit(1), "last lines of rank 0"), (ValueError("bad batch"), "traceback of rank 0")],
)
def test_next_line_names_what_the_log_of_a_failed_rank_has(
    error: BaseException, words: str, run: RunDirectory
) -> None:
    """A program that calls sys.exit() prints no traceback."""
    rank = Rank(run, 0, 1)
    rank.steps(12, **WORK)
    rank.session.close(None, describe_failure(error, 12))

    (verdict, *_) = report_of(run, state_of(run, [rank], ()))["verdicts"]

    assert verdict.action == f"read the {words} in the job's log."


def test_ranks_that_were_never_seen_are_not_in_the_title(run: RunDirectory) -> None:
    """Another job may have left RANK and WORLD_SIZE in the environment."""
    rank = Rank(run, 0, 8)
    rank.steps(50, **WORK)
    report = report_of(run, state_of(run, [rank], (0,)))
    (line,) = read_lines(str(run.path), find_runs(str(run.path)), 10.0)

    assert describe_ranks(report["run"]) == "only 1 of 8 ranks seen"
    assert (
        "only 1 of 8 ranks seen, 50 steps, ended"
        in render_full(report, "/r", columns=100, color=False).splitlines()[0]
    )
    assert (
        "only 1 of 8 ranks seen" in build_document(gather_contents(run)).partition("</header>")[0]
    )
    assert (line.seen, line.ranks) == (1, 8)
    text = " ".join(verdict.sentence for verdict in report["verdicts"])
    assert "Only 1 of 8 ranks was seen" in text
    assert "The ranks were not compared: they do different work" not in text
    assert "No slow rank" not in text


# -- the start


@pytest.mark.parametrize(
    ("before_s", "compile_s", "interactive", "first", "words"),
    [
        (
            200.0,
            138.0,
            False,
            "startup",
            "200 s from the start of the process to its first recorded step; then",
        ),
        (
            200.0,
            0.0,
            False,
            "startup",
            "200 s from the start of the process to its first recorded step; then",
        ),
        (20.0, 15.0, False, "", "20.0 s from the start of the process to"),
        (9000.0, 0.0, True, "", "9000 s from the start of the kernel or the interpreter to"),
    ],
)
def test_long_start_of_a_job_is_a_verdict(
    before_s: float, compile_s: float, interactive: bool, first: str, words: str, run: RunDirectory
) -> None:
    """A short start and the idle time of a notebook kernel are no verdict.

    All reports have the line on the long start.
    """
    rank = Rank(run, 0, 1)
    rank.steps(60, **WORK)
    state = state_of(run, [rank], (0,))
    (process,) = state.processes.values()
    assert process.statistics.started_ns is not None
    process.facts.process_began_ns = process.statistics.started_ns - int(before_s * 1e9)
    process.facts.compile_s, process.facts.interactive = compile_s, interactive
    report = report_of(run, state)

    kinds = [verdict.kind for verdict in report["verdicts"]]
    assert ("startup" in kinds) is bool(first)
    line = describe_startup(report["run"])
    assert line.startswith(words)
    assert line in " ".join(render_full(report, "/r", columns=200, color=False).split())
    assert ("torch.compile took" in line) is bool(compile_s)
    if first:
        assert kinds[0] == "startup"
        text = report["verdicts"][0].sentence
        assert "The start takes 100% of the run (200 s of 201 s)" in text
        assert ("TORCHINDUCTOR_CACHE_DIR" in text) is bool(compile_s)
        # It is paid once, and no cost of a step.
        (head, *_) = build_headlines(report)
        assert head.cost == "200 s = 100% of the run"
        assert head.cost in render_full(report, "/r", columns=200, color=False)


@pytest.mark.parametrize(("waited_s", "advice"), [(150.0, "CPU"), (10.0, "look at imports")])
def test_start_that_lacked_cpus_is_not_blamed_on_imports(
    waited_s: float, advice: str, run: RunDirectory
) -> None:
    rank = Rank(run, 0, 1)
    rank.steps(60, **WORK)
    state = state_of(run, [rank], (0,))
    (process,) = state.processes.values()
    assert process.statistics.started_ns is not None
    process.facts.process_began_ns = process.statistics.started_ns - int(200e9)
    process.facts.start_cpu_wait_ns = int(waited_s * 1e9)
    text = report_of(run, state)["verdicts"][0].sentence

    assert f"the main thread waited {waited_s:.3g}" in text
    assert advice in text.partition(" Next: ")[2]
    assert ("imports" in text) is (waited_s < 50)


@pytest.mark.parametrize("steps", [1, 3])
def test_long_start_is_no_verdict_if_all_steps_are_warm_up(steps: int, run: RunDirectory) -> None:
    """One optimizer step may take a minute (L-BFGS). The usual step time is not yet known."""
    rank = Rank(run, 0, 1)
    rank.steps(steps, **{**WORK, "forward": 50_000.0})
    state = state_of(run, [rank], (0,))
    (process,) = state.processes.values()
    assert process.statistics.started_ns is not None
    process.facts.process_began_ns = process.statistics.started_ns - int(200e9)
    report = report_of(run, state)

    assert "startup" not in [verdict.kind for verdict in report["verdicts"]]
    assert "more than usual" not in render_full(report, "/r", columns=100, color=False)
    assert describe_startup(report["run"]).startswith("200 s from")


def test_start_with_simulated_clocks_is_unknown_and_not_zero(run: RunDirectory) -> None:
    rank = Rank(run, 0, 1)
    rank.steps(12, **WORK)
    report = report_of(run, state_of(run, [rank], (0,)))

    assert report["run"]["startup"] is None
    assert "before the first recorded step" not in render_full(
        report, "/r", columns=100, color=False
    )


# -- few steps, or none


@pytest.mark.parametrize(
    ("steps", "live", "words"),
    [
        (
            1,
            False,
            (
                "Too few steps were recorded (1): the first 3 steps of each rank are warm-up, and are"
                " not judged. The longest warm-up step took 11.0 ms. Of all warm-up time: the backward"
                " pass 55%"
            ),
        ),
        (
            1,
            True,
            "Too few steps have been recorded so far (1): the first 3 steps of each rank",
        ),
        (
            3,
            False,
            (
                "Too few steps were recorded (3): the first 3 steps of each rank are warm-up, and are"
                " not judged. The longest warm-up step took 11.0 ms. Of all warm-up time: the backward"
                " pass 55%"
            ),
        ),
    ],
)
def test_report_on_few_steps_shows_their_phases(
    steps: int, live: bool, words: str, run: RunDirectory
) -> None:
    rank = Rank(run, 0, 1)
    rank.steps(steps, **WORK)
    report = report_of(run, state_of(run, [rank], () if live else (0,)))
    text = render_full(report, "/r", columns=200, color=False)

    assert report["verdicts"][0].sentence.startswith(words)
    assert "1 steps" not in text
    # The table would contain only dashes.
    assert "Typical step" not in text


def test_run_without_steps_is_explained_by_lost_records(run: RunDirectory) -> None:
    """After 60 steps, more sections were recorded than fit into the ring.

    Advice on how to call watch() would be wrong.
    """
    rank = Rank(run, 0, 1)
    rank.steps(60, **WORK)
    for _ in range(10_000):
        rank.session.recorder.record_span(Kind.SECTION, 0, 0, 5)
    report = report_of(run, state_of(run, [rank], (0,)))

    (verdict,) = report["verdicts"]
    assert verdict.kind == "no_steps"
    assert verdict.sentence.startswith("All records of 60 finished steps were lost: ")
    assert "watch()" not in verdict.sentence


def test_single_step_before_recording_began_is_noted(run: RunDirectory) -> None:
    """With `TORCHLENS_PERF=1`, this happens to a script of one iteration."""
    rank = Rank(run, 0, 1, first_step=1)
    report = report_of(run, state_of(run, [rank], (0,)))

    (verdict,) = report["verdicts"]
    assert verdict.sentence.startswith(
        "The only step that ended is not measured: recording began after"
    )


def test_first_step_in_progress_is_not_reported_as_a_missing_watch(run: RunDirectory) -> None:
    rank = Rank(run, 0, 1)
    rank.begin(Kind.OPTIMIZER, "LBFGS.step")
    state = state_of(run, [rank])
    report = report_of(run, state)

    (verdict,) = report["verdicts"]
    assert verdict.sentence.startswith("No step has ended yet: the first one has taken ")
    assert "LBFGS.step" in verdict.sentence


@pytest.mark.parametrize("around", [70, 1000])
def test_phases_nested_deeper_than_the_limit_do_not_count_as_host_code(
    around: int, run: RunDirectory
) -> None:
    rank = Rank(run, 0, 1)
    section = Kind.SECTION
    for level in range(around):
        rank.begin(section, f"level {level}")
    rank.steps(60, **WORK)
    report = report_of(run, state_of(run, [rank], (0,)))

    text = report["verdicts"][0].sentence
    assert "Host code" not in text
    assert text.startswith("It is not known where the step's time goes: ")
    assert "nested deeper than 64 levels were not recorded" in text
