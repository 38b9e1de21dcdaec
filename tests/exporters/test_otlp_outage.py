"""A long outage of an OTLP endpoint during a job: everything is delivered once afterwards."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.endpoints import refusing
from tests.support.figures import note, share
from tests.support.long import long
from tests.support.otlp_environment import exporter_for
from tests.support.otlp_receiver import MISSING, PROGRAM, Receiver
from tests.support.processes import SCRIPTS
from tests.support.recorded_run import Sidecar, environment, spans_of, wait_for_sidecar
from tests.support.servers import free_port, wait_for
from tests.support.warm_python import WarmPython
from torchlens_perf.exporters import Assessment, semantics
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.verdicts import Alert
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.stragglers.findings import NOTHING

OUTAGE_S = 600
TRACE_EVERY = 50


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seconds", [8, *long(OUTAGE_S)])
def test_spans_lost_in_an_outage_are_counted_and_delivered_by_a_replay(
    seconds: int, tmp_path: Path, receiver: Receiver
) -> None:
    """The report counts undelivered spans.

    After the outage, a replay delivers all spans and reports that.
    """
    began_s, away_s = time.monotonic(), seconds if seconds < OUTAGE_S else share(OUTAGE_S)
    stop = tmp_path / "stop"
    with refusing() as address:
        told = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_EXPORTER_OTLP_TIMEOUT": "3",
            "TORCHLENS_PERF_TRACE_EVERY": str(TRACE_EVERY), "TORCHLENS_PERF_TRACE_SLOW": "0",
            "TORCHLENS_PERF_EXPORT_LIMIT": "0",
        }  # fmt: skip
        trainer = WarmPython(
            [sys.executable, str(SCRIPTS / "train_until_told.py"), str(tmp_path / "runs"), str(stop)],
            env=environment(tmp_path / "runs", told), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(away_s)
        stop.touch()
        assert trainer.wait(120) == 0
        (path,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
        run = RunDirectory(path)
        wait_for_sidecar(run, 120)
    count = spans_of(run, TRACE_EVERY)
    undelivered = run.report.read_text()
    replayed = Sidecar(
        run, tmp_path, {**told, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint("http/protobuf")}
    )
    spans, points = receiver.spans(), receiver.points()
    (node,) = node_state.load_all(run)
    (process,) = node.processes.values()
    steps = process.statistics.step.count + process.statistics.warm_up.count

    assert f"OTLP: {count} of {count} spans were not delivered" in undelivered
    assert replayed.returncode == 0, replayed.log
    assert count == len(spans) == len({(span.trace_id, span.span_id) for span in spans})
    assert steps == max(point.count for point in points if point.metric == semantics.STEP_DURATION)
    assert not any("not delivered" in each for each in node.notes)
    if seconds == OUTAGE_S:
        counted = (
            f"{len(spans):,} of {count:,} spans, metrics of {steps:,} of {steps:,} steps delivered"
            " afterwards"
        )
        note(
            "seconds without the OTLP endpoint",
            away_s,
            OUTAGE_S,
            counted,
            time.monotonic() - began_s,
        )


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seconds", "queue"), [(2, 16384), *long((6, 200), (OUTAGE_S, 16384))])
def test_everything_is_delivered_once_if_the_endpoint_recovers_during_the_job(
    seconds: int, queue: int, tmp_path: Path
) -> None:
    """The delivery is automatic, and the report has no notes.

    If the queue is too small for the outage, spans are built again from the run directory.
    """
    if not PROGRAM.exists():
        pytest.skip(MISSING)
    began_s, away_s = time.monotonic(), seconds if seconds < OUTAGE_S else share(OUTAGE_S)
    stop, port = tmp_path / "stop", free_port()
    told = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_EXPORTER_OTLP_TIMEOUT": "3",
        "TORCHLENS_PERF_TRACE_EVERY": str(TRACE_EVERY), "TORCHLENS_PERF_TRACE_SLOW": "0",
        "TORCHLENS_PERF_EXPORT_LIMIT": "0", "OTEL_BSP_MAX_QUEUE_SIZE": str(queue),
    }  # fmt: skip
    trainer = WarmPython(
        [sys.executable, str(SCRIPTS / "train_until_told.py"), str(tmp_path / "runs"), str(stop)],
        env=environment(tmp_path / "runs", told), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    time.sleep(away_s)
    receiver = Receiver(tmp_path, http_port=port)
    try:
        # The longest pause before a retry is a minute.
        assert wait_for(
            lambda: {span.attributes[semantics.STEP] for span in receiver.spans()} >= {0, 1, 2}, 90
        )
        assert trainer.poll() is None
        stop.touch()
        assert trainer.wait(120) == 0
        (path,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
        run = RunDirectory(path)
        wait_for_sidecar(run, 120)
        spans = receiver.spans()
    finally:
        stop.touch()
        receiver.close()
    count = spans_of(run, TRACE_EVERY)
    assert count == len(spans) == len({(span.trace_id, span.span_id) for span in spans})
    assert "OTLP" not in run.report.read_text()
    if seconds == OUTAGE_S:
        counted = f"{len(spans):,} of {count:,} spans delivered by themselves, none twice"
        note(
            "seconds until the OTLP endpoint came back",
            away_s,
            OUTAGE_S,
            counted,
            time.monotonic() - began_s,
        )


@pytest.mark.distributed
def test_next_sidecar_delivers_what_a_killed_one_could_not(
    sidecar: Callable[..., Sidecar], receiver: Receiver
) -> None:
    """The node's state lists the steps and alerts. A replay sends spans with the same ids."""
    with refusing() as address:
        run = sidecar(OTEL_EXPORTER_OTLP_ENDPOINT=address).run
    (node,) = node_state.load_all(run)
    alert = Alert("0" * 32, "1" * 32, "straggler", "started", "Rank 1 is slow.", "", 1, 0)
    node.undelivered.alerts = [alert]
    node.save(run)
    (process, *_) = node.processes.values()
    endpoint = receiver.endpoint("http/protobuf")
    exporter = exporter_for({"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}, run, node.host)
    waiting = exporter.find_undelivered()
    exporter.on_assessment(Assessment(process.identity, NOTHING, None, ()))
    assert exporter.shutdown(20) == []
    left = exporter.find_undelivered()
    assert waiting is not None
    assert left is not None
    assert (waiting.steps, waiting.alerts) == (node.undelivered.steps, [alert])
    assert not left.signals
    spans = [(span.trace_id, span.span_id) for span in receiver.spans()]
    assert len(spans) == len(set(spans)) == sum(each.spans for each in waiting.steps)
    assert [event.attributes["log.record.uid"] for event in receiver.events()] == [alert.id]

    receiver.clear()
    replayed = sidecar(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    again = [(span.trace_id, span.span_id) for span in receiver.spans()]
    assert (replayed.returncode, replayed.stdout.count("OTLP")) == (0, 0)
    # The replay also sends the span of the run.
    assert len(again) == len(set(again)) == len(spans) + 1
    assert set(again) > set(spans)
    assert [event.attributes["log.record.uid"] for event in receiver.events()] == [alert.id]
    assert not node_state.load_all(run)[0].undelivered.signals


@pytest.mark.long
@pytest.mark.distributed
def test_steps_without_records_are_counted_as_lost(
    sidecar: Callable[..., Sidecar], receiver: Receiver
) -> None:
    """The segments were deleted to save space, so a replay cannot build the spans."""
    with refusing() as address:
        run = sidecar(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=address).run
    (node,) = node_state.load_all(run)
    steps = node.undelivered.steps
    gone = dataclasses.replace(steps[-1], step=9999)
    node.undelivered.steps = [steps[0], gone]
    node.undelivered.whole_run = []
    node.save(run)
    told = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{receiver.endpoint('http/protobuf')}/v1/traces"}
    exporter = exporter_for(told, run, node.host)
    notes = exporter.shutdown(20)
    replayed = sidecar(**told)

    assert (
        notes[0] == f"OTLP: {gone.spans} of {steps[0].spans + gone.spans} spans were not delivered"
    )
    assert "records are no longer in the run directory" in notes[1]
    assert "the spans of 1 traced steps are lost" in replayed.stdout
    assert replayed.returncode == 1
    assert not node_state.load_all(run)[0].undelivered.signals
