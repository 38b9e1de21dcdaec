"""Tests of moving events into the run directory, and of reading them again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.exporters.test_exporters import assessment_of, batch_of, identity
from torchlens_perf.exporters import Receiver
from torchlens_perf.roles import drain
from torchlens_perf.roles.drain import EventReader, read_events
from torchlens_perf.roles.event_file import CAPACITY, CODES, EventFile
from torchlens_perf.roles.table import read_iterations
from torchlens_perf.roles.traces import BATCH, PROCESS, IterationTraces
from torchlens_perf.run import directory
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.processes import process_start_ticks
from torchlens_perf.store.reader import ParquetFile, ParquetFolder

NODE = "host-abc123"
BEGIN, END = CODES["generation_begin"], CODES["generation_end"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Return a run directory whose node has its files in a folder of this test."""
    monkeypatch.setattr(directory, "_SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    (tmp_path / "run").mkdir()
    return RunDirectory(tmp_path / "run")


def open_file(run: RunDirectory, process: str, role: str, name: str = "") -> EventFile:
    made = directory.call_in_local_folder(
        run.run_id, lambda folder: EventFile(folder / f"{process}.events")
    )
    made.describe_process(role, name)
    return made


def rows(run: RunDirectory) -> list[dict[str, object]]:
    tables = ParquetFolder(run.path / "events").read_each(ParquetFile.read_table)
    return [
        {**row, "time": None}
        for table in tables
        for row in table.drop_columns(["time"]).to_pylist()
    ]


def test_events_of_all_processes_become_rows(run: RunDirectory) -> None:
    open_file(run, "rollout-1-1", "rollout", "engine-1").write(END, "a", 3, 10, 20)
    open_file(run, "tool-2-2", "tool").write(CODES["tool_end"], "a", "", -1, -1)
    read_events(run, NODE, None, disk_bytes=1 << 30, ended=True)

    found = rows(run)
    assert {each["process"]: (each["role"], each["name"], each["event"]) for each in found} == {
        "rollout-1-1": ("rollout", "engine-1", "generation_end"),
        "tool-2-2": ("tool", "", "tool_end"),
    }
    assert [(each["id"], each["batch"], each["tokens_out"]) for each in found] == [
        ("a", "3", 20), ("a", "", None),
    ]  # fmt: skip
    assert {each["host"] for each in found} == {"host"}


def test_next_sidecar_continues_after_the_last_event(run: RunDirectory) -> None:
    file = open_file(run, "rollout-1-1", "rollout")
    for sample in range(3):
        file.write(BEGIN, sample, "", -1, -1)
        reader = EventReader(run, NODE)
        reader.read()
        reader.write(1 << 30)

    assert [each["id"] for each in rows(run)] == ["0", "1", "2"]


def test_lost_events_are_in_the_footer(run: RunDirectory) -> None:
    """The process is running: the sidecar reads its file while events are written."""
    pid = 1
    file = open_file(run, f"rollout-{pid}-{process_start_ticks(pid)}", "rollout")
    for sample in range(CAPACITY + 7):
        file.write(BEGIN, sample, "", -1, -1)
    read_events(run, NODE, None, disk_bytes=1 << 30, ended=True)

    (footer,) = ParquetFolder(run.path / "events").read_each(lambda each: each.footer)
    assert footer == {file.path.stem: {"last_sequence": CAPACITY + 7, "lost": 7}}


def test_files_of_ended_processes_go_with_the_sidecar(run: RunDirectory) -> None:
    pid = 1
    running = open_file(run, f"tool-{pid}-{process_start_ticks(pid)}", "tool")
    ended = open_file(run, "rollout-1-1", "rollout")
    run.remove_local_leftovers()

    assert running.path.exists()
    assert not ended.path.exists()


def test_young_run_writes_no_file_for_each_round(run: RunDirectory) -> None:
    open_file(run, "rollout-1-1", "rollout").write(BEGIN, 1, "", -1, -1)
    reader = read_events(run, NODE, None, disk_bytes=1 << 30, ended=False)

    assert not (run.path / "events").exists()
    read_events(run, NODE, reader, disk_bytes=1 << 30, ended=True)
    assert len(rows(run)) == 1


def test_processes_have_the_same_names_in_traces_and_in_the_report(run: RunDirectory) -> None:
    """Two engines without names. The one that started first has the larger process id."""
    first, second = (
        open_file(run, process, "rollout") for process in ("rollout-9-1000", "rollout-90-900")
    )
    lead = open_file(run, "trainer-3-3", "trainer")
    for batch in range(3):
        at_ns = (10 + 10 * batch) * 10**9
        for edge, after_s in (("begin", 1), ("end", 2)):
            code, time_ns = CODES[f"generation_{edge}"], at_ns + after_s * 10**9
            first.write(code, f"{batch}-0", "", 1, 1, 0, time_ns)
            second.write(code, f"{batch}-1", "", 1, 1, 0, time_ns + (2 * batch - 1) * 10**8)
        for sample in range(2):
            lead.write(CODES["sample_sent"], f"{batch}-{sample}", batch, -1, -1, 0, at_ns)
        lead.write(CODES["batch_complete"], "", batch, -1, -1, 0, at_ns + 5 * 10**9)
    spans: list[Any] = []

    class Spans(Receiver):
        def send_spans(self, sent: Sequence[Any]) -> None:
            spans.extend(sent)

    receivers: list[Receiver] = [Spans()]
    receivers.append(traces := IterationTraces(receivers))
    traces.export(batch_of(identity(), [3]))
    read_events(run, NODE, None, receivers, disk_bytes=1 << 30, ended=True)
    for _ in range(2):
        traces.on_assessment(dataclasses.replace(assessment_of(), ended=True))

    sent = {
        each.attributes[BATCH]: each.attributes[PROCESS]
        for each in spans
        if each.name == "generation"
    }
    found = read_iterations(run, [])[1]
    assert sent == {"0": "rollout 1", "1": "rollout 0", "2": "rollout 0"}
    assert {each.batch: each.last_sample.engine for each in found} == {
        batch: name for batch, name in sent.items() if batch != "0"
    }


def test_sidecar_writes_its_events_when_another_node_asks(run: RunDirectory) -> None:
    """Until its end, a file says until when all events of the node are written."""
    folder = run.path / "events"
    folder.mkdir()
    open_file(run, "rollout-1-1", "rollout").write(BEGIN, 1, "", -1, -1)
    reader = read_events(run, NODE, None, disk_bytes=1 << 30, ended=False)
    assert not list(folder.iterdir())
    (folder / "request").touch()
    read_events(run, NODE, reader, disk_bytes=1 << 30, ended=False)
    assert len(rows(run)) == 1
    assert (folder / f"{NODE}.until").exists()
    read_events(run, NODE, reader, disk_bytes=1 << 30, ended=True)

    assert not (folder / f"{NODE}.until").exists()


def test_other_nodes_are_asked_once_for_a_rank_that_has_ended(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was restarted goes on with ranks that have not ended."""
    monkeypatch.setattr(drain, "_OTHER_NODES_TIMEOUT_S", 0.1)
    folder = run.path / "events"
    folder.mkdir()
    (folder / "other.until").write_text("0")
    events = open_file(run, "rollout-1-1", "rollout")
    reader, asked = None, []
    for ended_rings in (1, 1, 2):
        events.write(BEGIN, 1, "", -1, -1)
        read = {"disk_bytes": 1 << 30, "ended": False, "ended_rings": ended_rings}
        reader = read_events(run, NODE, reader, **read)  # type: ignore[arg-type]
        asked.append((folder / "request").stat().st_mtime_ns)

    assert asked[0] == asked[1] < asked[2]
    assert (folder / f"{NODE}.until").exists()
