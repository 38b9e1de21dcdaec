"""Device memory in the report: table, advice, and the verdict on a rank that ran out of memory."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_report import WORK, report_on
from tests.support.device.fake_allocator import GB
from tests.support.in_memory import InMemoryExporter
from tests.support.ranks import HOST, Rank, make_run
from torchlens_perf.analysis.statistics.memory import MemoryReading
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.oom_table import LiveMemoryRow, LiveMemoryTable, OutOfMemory
from torchlens_perf.run.ring import Kind
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.sidecar.replay import replay
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.words.oom import build_next_action
from torchlens_perf.view.terminal import print_report


def live_row(
    module: str,
    stack: list[str],
    bytes_: int,
    blocks: int,
    largest_bytes: int,
    new_blocks: int | None,
) -> LiveMemoryRow:
    return {
        "module": module, "stack": stack, "bytes": bytes_, "blocks": blocks, "largest_bytes": largest_bytes,
        "new_blocks": new_blocks,
    }  # fmt: skip


ROW = live_row(
    "Net > Block > Mlp", ["train.py:12 forward", "train.py:40 main"], 40 * GB, 96, GB, 96
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path)


def table(**changed: Any) -> LiveMemoryTable:
    values: dict[str, Any] = {
        "rows": [ROW, live_row("", [], 10 * GB, 5, 2 * GB, 0)], "other_bytes": 0, "other_blocks": 0,
        "allocated_bytes": 70 * GB, "reserved_bytes": 75 * GB,
        "inactive_bytes": 5 * GB, "largest_inactive_bytes": GB, "segments": 20, "expandable": False,
        "history_events": 500, "history_s": 1.5,
    }  # fmt: skip
    return {**values, **changed}


def oom(**changed: Any) -> OutOfMemory:
    values: dict[str, Any] = {
        "schema": 1, "process": "", "rank": 1, "host": HOST, "step": 40, "time_unix_ns": 5, "device": 0,
        "asked_bytes": 6 * GB, "limit_bytes": 80 * GB, "free_bytes": 2 * GB, "module": "Net", "stack": ["train.py:9 f"],
        "inside": ["forward Net", "blocks.3"], "untold": 0, "table": table(), "took_s": 0.1,
    }  # fmt: skip
    return {**values, **changed}


# Even without fragmentation, 6 GB would not fit.
FRAGMENTED = table(reserved_bytes=40 * GB, inactive_bytes=5 * GB)
BRIEF = {"table": None, "earlier": "oom/rank00000-3.json", "untold": 2, "stack": [], "module": ""}
SHARE = {
    "limit_bytes": 40 * GB, "device_bytes": 80 * GB,
    "table": table(reserved_bytes=38 * GB, inactive_bytes=GB, allocated_bytes=37 * GB),
}  # fmt: skip


def ran_out(run: RunDirectory, rank: Rank, **changed: Any) -> None:
    """Write the file that the process of a rank leaves when it runs out of memory."""
    run.oom.mkdir(exist_ok=True)
    value = oom(process=rank.identity.key, rank=rank.identity.rank, **changed)
    run.oom_table_path(rank.identity.rank, value["step"]).write_text(json.dumps(value))


def mark_memory(rank: Rank, **values: int | tuple[int, int]) -> None:
    """Record one memory reading in the same way as cuda/memory.py."""
    start_ns = rank.session.recorder.now_ns()
    for name, value in values.items():
        now, most = value if isinstance(value, tuple) else (value, 0)
        rank.session.recorder.record_span(
            int(Kind.MEMORY), rank.session.intern(name), start_ns, 0, 0, now, most
        )


def shown(report: dict[str, Any]) -> str:
    file = io.StringIO()
    print_report(report, file, "runs/x", whole=True)
    return file.getvalue()


def with_readings(run: RunDirectory, retries: int = 0, leak: int = 0) -> dict[str, Any]:
    rank = Rank(run, 0, 1, ring_records=16384)
    for i in range(60):
        bytes_now = 20 * GB + i * leak
        mark_memory(
            rank, allocated=(bytes_now, 30 * GB), reserved=(40 * GB, 41 * GB), inactive=(10 * GB, 10 * GB),
            alloc_retries=i * retries, ooms=0, limit=80 * GB,
        )  # fmt: skip
        rank.steps(16, **WORK)
    return report_on(run, [rank])


def test_memory_table_without_problems_has_no_notes(run: RunDirectory) -> None:
    report = with_readings(run)
    memory = report["ranks"][0]["memory"]

    assert memory["device"]["reserved_bytes"] == 40 * GB
    assert memory["device"]["peak_allocated_bytes"] == 30 * GB
    assert memory["device"]["peak_reserved_bytes"] == 41 * GB
    assert memory["device"]["fragmentation"] == 0.25
    assert memory["device"]["age_steps"] == 15
    assert (memory["growth"], memory["device"]["retries_in"]) == (None, None)
    text = shown(report)
    assert "  Device memory" in text
    assert "21.5 GB" in text
    assert "25%" in text
    assert not [note for note in report["quality"]["notes"] if "retries" in note or "grows" in note]


def test_allocator_retries_are_noted_with_number_cost_and_advice(run: RunDirectory) -> None:
    """The note also has the number of steps."""
    (note,) = [
        note for note in with_readings(run, retries=2)["quality"]["notes"] if "cudaMalloc" in note
    ]
    assert "rank 0: 118 cudaMalloc retries in the last 944 steps" in note
    assert "expandable_segments:True" in note


def test_memory_growth_is_noted_with_the_step_of_a_full_device(run: RunDirectory) -> None:
    """The note also has the rate and the first step."""
    report = with_readings(run, leak=GB // 4)
    growth = report["ranks"][0]["memory"]["growth"]
    (note,) = [note for note in report["quality"]["notes"] if "allocated memory grows" in note]
    assert growth["bytes_per_step"] == pytest.approx(GB / 64)
    assert f"would fill the device at step {growth['full_at_step']}" in note
    assert growth["full_at_step"] == pytest.approx(60 * 64, rel=0.02)


def test_report_on_a_cpu_job_has_no_device_memory(run: RunDirectory) -> None:
    rank = Rank(run, 0, 1)
    rank.steps(40, **WORK)
    report = report_on(run, [rank])
    assert report["ranks"][0]["memory"]["device"] is None
    assert report["ranks"][0]["out_of_memory"] is None
    assert "Device memory" not in shown(report)


def test_rank_that_ran_out_of_memory_is_the_first_verdict(run: RunDirectory) -> None:
    """The straggler verdict caused by the lack of memory comes second.

    The verdict has rank, time, request, memory use and action.
    """
    ranks = [Rank(run, rank) for rank in range(2)]
    ranks[0].steps(40, **WORK)
    ranks[1].steps(40, **{**WORK, "forward": 20})
    ran_out(run, ranks[1])
    report = report_on(run, ranks)
    verdict = report["verdicts"][0]

    assert (verdict.kind, verdict.rank, verdict.since_step) == ("out_of_memory", 1, 40)
    assert (
        f"Rank 1 ({HOST}) ran out of device memory in step 40, in forward Net > blocks.3: it"
        in verdict.sentence
    )
    assert "42.9 GB in 96 allocations, Net > Block > Mlp, train.py:12 forward" in verdict.sentence
    assert "Next: checkpoint the activations of Mlp" in verdict.sentence
    assert verdict.evidence.oom["file"] == "oom/rank00001-40.json"
    assert len(report["verdicts"]) > 1
    text = shown(report)
    assert "Memory of rank 1 when it ran out" in text
    lines = (run.oom / "rank00001-40.txt").read_text().splitlines()
    assert [line.strip() for line in lines if "Mlp" in line] == [
        "42.9 GB  96 blocks, 96 of them new  Net > Block > Mlp"
    ]
    assert "            train.py:40 main" in lines


def test_out_of_memory_in_the_first_step_is_the_verdict(run: RunDirectory) -> None:
    """Memory often runs out in the first step. The missing steps are then not the main problem."""
    rank = Rank(run, 0, 1)
    rank.session.recorder.record_span(Kind.SECTION, rank.session.intern("x"), 0, 5)
    ran_out(run, rank, step=0)
    (verdict,) = report_on(run, [rank])["verdicts"]
    assert verdict.kind == "out_of_memory"


def test_first_of_several_ranks_out_of_memory_is_reported(run: RunDirectory) -> None:
    """The verdict also has the number of other ranks."""
    ranks = [Rank(run, rank, 3) for rank in range(3)]
    for rank, time_unix_ns in zip(ranks, (30, 10, 20), strict=True):
        rank.steps(40, **WORK)
        ran_out(run, rank, time_unix_ns=time_unix_ns)
    verdict = report_on(run, ranks)["verdicts"][0]
    assert verdict.rank == 1
    assert "So did 2 other ranks." in verdict.sentence
    assert verdict.evidence.ranks == (1, 0, 2)


def test_out_of_memory_error_that_was_caught_is_only_a_note(run: RunDirectory) -> None:
    """The rank continued."""
    rank = Rank(run, 0, 1)
    rank.steps(60, **WORK)
    ran_out(run, rank)
    report = report_on(run, [rank])
    assert report["verdicts"][0].kind != "out_of_memory"
    (note,) = [note for note in report["quality"]["notes"] if "ran out of device memory" in note]
    assert "rank 0 ran out of device memory in step 40" in note
    assert "and went on: see oom/rank00000-40.json" in note


def test_out_of_memory_error_after_the_last_step_is_a_verdict_if_the_run_died(
    run: RunDirectory,
) -> None:
    """If the run ended normally, the error was caught and is only a note."""
    for caught in (True, False):
        rank = Rank(run, 0, 1)
        rank.steps(40, **WORK)
        ran_out(run, rank, step=40, caught=caught)
        report = report_on(run, [rank])
        assert (report["verdicts"][0].kind == "out_of_memory") is not caught
        notes = [
            note
            for note in report["quality"]["notes"]
            if "and ended without an error: see oom" in note
        ]
        assert len(notes) == caught


def test_out_of_memory_error_without_a_table_refers_to_the_earlier_table(run: RunDirectory) -> None:
    """The error followed shortly after an error that the user's code had caught."""
    rank = Rank(run, 0, 1)
    rank.steps(40, **WORK)
    ran_out(run, rank, step=3, time_unix_ns=1)
    ran_out(run, rank, **BRIEF)
    report = report_on(run, [rank])
    verdict = report["verdicts"][0]

    assert (verdict.kind, verdict.since_step) == ("out_of_memory", 40)
    assert (
        "No table was written, because memory had run out shortly before: see oom/rank00000-3.json"
        in verdict.sentence
    )
    assert "errors without a table: 2" in (run.oom / "rank00000-40.txt").read_text()
    assert "when it ran out" not in shown(report)


def test_process_limit_and_free_device_memory_are_both_in_the_verdict(run: RunDirectory) -> None:
    rank = Rank(run, 0, 1)
    rank.steps(40, **WORK)
    ran_out(run, rank, free_bytes=38 * GB, **SHARE)
    text = report_on(run, [rank])["verdicts"][0].sentence
    assert (
        "it requested 6.4 GB, but may only use 42.9 GB of the device's 85.9 GB, of which it had"
        " reserved 40.8 GB; 40.8 GB of the device were free" in text
    )


def test_memory_readings_are_exported_live_and_in_a_replay(run: RunDirectory) -> None:
    """Steps have the newest reading, traces have no span of it, and the state has all readings."""
    rank = Rank(run, 0, 1)
    for retries in range(3):
        mark_memory(rank, allocated=(GB, GB), reserved=(2 * GB, 2 * GB), alloc_retries=retries)
        rank.steps(16, **WORK)
    live, replayed = InMemoryExporter(), InMemoryExporter()
    rank.close()
    sidecar = Sidecar(run, HOST, live, lambda run, asked: None)
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.export_results()
    sidecar.save_records()
    sidecar.close()
    (state,) = node_state.load_all(run)
    replay(run, replayed)

    wanted = MemoryReading(32, GB, 2 * GB, None, GB, None, 2, None)
    for exporter in (live, replayed):
        assert exporter.batches[-1].memory == wanted
        assert {span.kind for trace in exporter.traces for span in trace.spans} == {
            "data", "forward", "wait", "backward",
        }  # fmt: skip
    assert [
        reading.step for reading in next(iter(state.processes.values())).statistics.memory.readings
    ] == [0, 16, 32]
    assert (
        build_report(run.run_id, [state])["ranks"][0]["memory"]["device"]["fragmentation"] is None
    )


def test_newest_memory_table_is_kept_over_a_sidecar_restart(run: RunDirectory) -> None:
    """A second sidecar keeps the first one's findings and adds new ones.

    The second sidecar ignores findings of other nodes.
    """
    rank, elsewhere = Rank(run, 0), Rank(run, 1, identity={"host": "node-b"}, registered=False)
    rank.steps(50, **WORK)
    ran_out(run, rank, step=30, time_unix_ns=1)
    ran_out(run, elsewhere)
    first = Sidecar(run, HOST, None, lambda run, asked: None)
    first.read_rings()
    first.count_records()
    first.save_records()
    first.close()
    loaded = node_state.load(run.node_state_path(HOST))
    assert [
        process.out_of_memory and process.out_of_memory["step"]
        for process in loaded.processes.values()
    ] == [30]

    ran_out(run, rank, step=50, time_unix_ns=2)
    second = Sidecar(run, HOST, None, lambda run, asked: None)
    second.read_rings()
    second.count_records()
    assert build_report(run.run_id, [second.state])["verdicts"][0].since_step == 50
    second.close()
    assert sorted(path.name for path in run.oom.glob("*.txt")) == [
        "rank00000-30.txt",
        "rank00000-50.txt",
    ]
    rank.close()
    elsewhere.close()


GROWTH = {
    "bytes_per_step": 8e6,
    "since_step": 10,
    "until_step": 90,
    "above_bytes": 0,
    "full_at_step": 999,
}
NO_STACKS = [live_row("", [], 60 * GB, 5, 12 * GB, None)]
SMALL = [live_row("", ["train.py:3 <module>"], GB, 5, GB, None)]


@pytest.mark.parametrize(
    ("changed", "growth", "words"),
    [
        ({"table": table(reserved_bytes=40 * GB)}, None, "look for other processes"),
        ({"table": table(inactive_bytes=15 * GB)}, None, "expandable_segments:True"),
        (
            {"table": table(inactive_bytes=15 * GB, expandable=True)},
            None,
            "checkpoint the activations of Mlp",
        ),
        (
            {"table": table(inactive_bytes=9 * GB), "asked_bytes": 12 * GB},
            None,
            "checkpoint the activations of Mlp",
        ),
        ({}, GROWTH, "grown by 8.0 MB a step over steps 10 to 90"),
        ({"asked_bytes": 30 * GB}, None, "one request at train.py:9 f needs 38%"),
        ({"asked_bytes": 30 * GB, "stack": []}, None, "one request needs 38%"),
        ({"table": table(rows=NO_STACKS)}, None, "TORCHLENS_PERF_MEMORY=history"),
        ({"table": table(rows=SMALL)}, None, "the table shows what holds"),
        ({"table": table(rows=())}, None, "TORCHLENS_PERF_MEMORY=history"),
        (
            {**SHARE, "free_bytes": 38 * GB},
            None,
            "the process's share of it is full: 50%",
        ),
        ({**SHARE, "free_bytes": GB}, None, "look for other processes"),
        (
            {**SHARE, "free_bytes": 38 * GB, "table": FRAGMENTED},
            None,
            "the process's share of it is full",
        ),
        (BRIEF, None, "see oom/rank00000-3.json; use a smaller batch"),
        (BRIEF, GROWTH, "grown by 8.0 MB a step over steps 10 to 90"),
    ],
)
def test_each_kind_of_memory_shortage_has_different_advice(
    changed: dict[str, Any], growth: dict[str, Any] | None, words: str
) -> None:
    assert words in build_next_action(json.loads(json.dumps(oom(**changed))), growth)
