"""Device times in the report, verdicts and OTLP, from records like those of a run on a GPU."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.support.in_memory import InMemoryExporter
from tests.support.otlp_collector import Collector, exporter_to
from tests.support.ranks import Rank, identity_of, make_run
from tests.support.recording import encode_window
from tests.support.reports import checked
from tests.support.saved import save_and_load
from tests.support.tables import MS, step_table
from torchlens_perf.analysis.statistics.device import (
    CAUGHT_UP_NS,
    DeviceStatistics,
    phase_durations_ns,
)
from torchlens_perf.exporters import ExportBatch, semantics
from torchlens_perf.exporters.otlp_spans import find_parents
from torchlens_perf.report.build import build_report
from torchlens_perf.run.clock import HostClock
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.rank_facts import DeviceClockQuality
from torchlens_perf.run.records import Span, StepTrace
from torchlens_perf.run.ring import Flag, Kind, record_dtype
from torchlens_perf.run.sketch import Sketch, WindowSketch
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.sidecar.rings.source import HOLD_S
from torchlens_perf.verdicts import node_state
from torchlens_perf.view.tables import build_tables
from torchlens_perf.view.terminal import render_full

HOST = {"forward": 1.0, "backward": 1.0, "optimizer": 0.5}
DEVICE = {Kind.FORWARD: 10 * MS, Kind.BACKWARD: 20 * MS, Kind.OPTIMIZER: 2 * MS, Kind.STEP: 33 * MS}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Return an empty run."""
    return make_run(tmp_path)


class Gpu(Rank):
    """A rank whose device takes longer than its host.

    The rank's device times arrive one step later.
    """

    def timed_steps(self, count: int, behind_ns: int, scale: float = 1.0) -> None:
        """Record steps with device times that end behind_ns after the host's steps."""
        for _ in range(count):
            step = self.session.recorder.step
            self.steps(1, **HOST)
            self.device_step(step, behind_ns, scale)

    def device_step(
        self,
        step: int,
        behind_ns: int,
        scale: float = 1.0,
        *,
        began_ns: int | None = None,
        idle_ns: int = 0,
        step_ns: int = DEVICE[Kind.STEP],
    ) -> None:
        """Record the phases of a step one after the other, after some idle time, and the step
        around them.

        `began_ns` is when the step began on the device; by default when the host had ended it.
        """
        later_ns = 0 if began_ns is None else began_ns - self.clock.now_ns
        after_ns = idle_ns
        for kind, usual_ns in DEVICE.items():
            duration_ns = round(scale * (step_ns if kind == Kind.STEP else usual_ns))
            start_ns = 0 if kind == Kind.STEP else after_ns
            self.late(kind, kind.name.lower(), step, duration_ns, behind_ns, later_ns + start_ns)
            after_ns += duration_ns

    def late(
        self, kind: Kind, name: str, step: int, duration_ns: int, behind_ns: int, start_ns: int = 0
    ) -> None:
        """Record a span by the device's clock.

        `start_ns` is the span's start, counted from now.
        """
        name_id = self.session.intern(name)
        self.session.recorder.record_completed(
            int(Kind.DEVICE),
            name_id,
            step,
            self.clock.now_ns + start_ns,
            duration_ns,
            0,
            int(kind),
            behind_ns,
        )

    def stamped(self, name: str, durations_ns: list[int], lost: int = 0) -> None:
        """Record a window of a device section."""
        sketch = Sketch()
        sketch.add(np.array(durations_ns, np.int64))
        recorder, name_id = self.session.recorder, self.session.intern(name)
        for place, words in enumerate(
            encode_window(WindowSketch(sketch, lost, durations_ns[0], 0))
        ):
            start, duration, nested, phase, value0, value1 = words
            recorder.record_completed(
                int(Kind.SKETCH),
                name_id,
                recorder.step,
                start,
                duration,
                place,
                value0,
                value1,
                nested,
                phase,
            )


def report_on(run: RunDirectory, ranks: list[Gpu]) -> dict[str, Any]:
    """Return the sidecar's report on ended ranks after checking it against the schema."""
    for rank in ranks:
        rank.close()
    sidecar = Sidecar(run, ranks[0].identity.host, None, lambda run, asked: None)
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.judge_ranks(1e6, final=True)
    sidecar.save_records()
    sidecar.close()
    return checked(build_report(run.run_id, node_state.load_all(run)))


def text_of(report: dict[str, Any]) -> str:
    return render_full(report, "runs/x", columns=140, color=False)


def test_report_has_device_times_of_each_rank_and_their_quality(run: RunDirectory) -> None:
    """Times are per step and phase. Notes list missing ones."""
    ranks = [Gpu(run, rank) for rank in range(2)]
    for rank, scale in zip(ranks, (1.0, 1.5), strict=True):
        rank.session.facts.device = DeviceClockQuality(
            clock="CUDA events",
            error_ns=4000,
            captured=3,
            skipped=0,
            crowded=5,
            aside=6,
            open_ended=7,
            unread=2,
        )
        rank.session.publish()
        rank.timed_steps(40, behind_ns=30 * MS, scale=scale)
    report = report_on(run, ranks)
    first, second = (rank["device"] for rank in report["ranks"])
    # The 3 warm-up steps do not count.
    assert first["steps"] == 40 - 3
    assert first["step_s"]["p50_s"] == pytest.approx(0.033, rel=0.02)
    assert first["phases"]["backward"]["s_per_step"] == pytest.approx(0.020)
    assert second["phases"]["backward"]["s_per_step"] == pytest.approx(0.030)
    assert set(first["phases"]) == {"forward", "backward", "optimizer"}
    assert first["error_s"] == 4e-6
    assert first["caught_up"] == 0.0
    assert report["ranks"][0]["phases"]["backward"]["p50_s"] == pytest.approx(0.001, rel=0.02), (
        "the host's stays"
    )
    notes = " ".join(report["quality"]["notes"])
    assert "3 device marks were left out while a CUDA graph was captured" in notes
    assert "2 device times were still unknown" in notes
    assert "5 device marks were left out, because too many earlier marks" in notes
    assert (
        "6 steps are not judged by device time, because their forward or backward pass ran and"
        " waited on another" in notes
    )
    assert "7 device stalls are unknown" in notes
    assert "too far behind" not in notes
    text = text_of(report)
    assert "Typical step of each rank, device clock, ms" in text
    assert "20.0" in text
    assert "30.0" in text
    assert "Measured by CUDA events." in text


@pytest.mark.parametrize("told", [True, False], ids=["device times", "no device times"])
def test_occasional_wait_for_the_device_makes_no_long_steps(told: bool, run: RunDirectory) -> None:
    """The host issues nine steps at once and waits in the tenth to print the loss.

    By the device's clock no step is long. Without device times, long steps are not reported.
    """
    rank = Gpu(run, 0, 1)
    rank.session.facts.device = {"clock": "CUDA events", "error_ns": 4000} if told else {}
    rank.session.publish()
    rank.session.metadata.add_modules({"0": False}, device="cuda", all_levels=True, unopened=[])
    for step in range(200):
        waits = step % 10 == 9
        rank.steps(1, **HOST, host=300.0 if waits else 0.0)
        if told:
            rank.device_step(step, 30 * MS)
    report = report_on(run, [rank])
    text = text_of(report)

    assert report["steps"]["by"] == ("device" if told else "host")
    assert [verdict["kind"] for verdict in report["verdicts"] if verdict.kind == "long_steps"] == []
    (line,) = [line for line in text.splitlines() if "p50" in line and "steps/s" in line]
    assert ("33.0 ms" in line, "device clock" in line) == (told, told)


def test_two_kinds_of_steps_are_found_by_the_device_clock(run: RunDirectory) -> None:
    """The parts describe the typical step by the device's clock, and a sentence has the other
    kind.
    """
    rank = Gpu(run, 0, 1)
    rank.session.facts.device = {"clock": "CUDA events", "error_ns": 4000}
    rank.session.publish()
    rank.session.metadata.add_modules({"0": False}, device="cuda", all_levels=True, unopened=[])
    for step in range(200):
        rank.steps(1, **HOST)
        rank.device_step(step, 30 * MS, 1.0 if step % 5 else 3.0)
    report = report_on(run, [rank])
    steps, (device,) = report["steps"], [each["device"] for each in report["ranks"]]
    (long,) = steps["long"]

    assert sum(device["parts"].values()) == pytest.approx(0.033, rel=0.02)
    assert long["period"] == 5
    text = " ".join(each.sentence for each in report["verdicts"])
    assert (
        f"Two kinds of steps: {steps['alike']} take 33.0 ms, {long['count']} take 99.0 ms." in text
    )


@pytest.mark.parametrize(
    ("behind_ns", "waits"),
    [(20_000, True), (CAUGHT_UP_NS - 1, True), (CAUGHT_UP_NS, False), (30 * MS, False)],
)
def test_launch_bound_device_has_a_verdict_without_a_cost(
    run: RunDirectory, behind_ns: int, waits: bool
) -> None:
    """The device is idle whenever it has done all work that the host has issued.

    The verdict has an action.
    """
    rank = Gpu(run, 0, world_size=1)
    rank.timed_steps(40, behind_ns)
    report = report_on(run, [rank])
    verdict = report["verdicts"][-1]
    assert report["ranks"][0]["device"]["caught_up"] == float(waits)
    assert (verdict.kind == "host_bound") is waits
    if waits:
        assert "no work left at the end of 100% of the forward" in verdict.sentence
        assert "issue fewer and larger kernels" in verdict.sentence
        assert verdict.cost_s_per_step is None


def test_tables_have_device_times_of_modules_and_sections(run: RunDirectory) -> None:
    """Device times are next to host times. Missing ones are dashes."""
    rank = Gpu(run, 0, world_size=1)
    rank.timed_steps(40, 30 * MS)
    for name in ("block", "head"):
        rank.session.recorder.record_span(Kind.MODULE, rank.session.intern(name), 0, 5)
    rank.session.recorder.record_span(Kind.SECTION, rank.session.intern("augment"), 0, 5)
    rank.late(Kind.MODULE, "block", 40, 7 * MS, 0)
    rank.late(Kind.SECTION, "augment", 40, 3 * MS, 0)
    rank.timed_steps(1, 30 * MS)
    report = report_on(run, [rank])
    devices = {row["name"]: row["device_s"] for row in report["modules"]}
    assert devices["block"]["p50_s"] == pytest.approx(0.007, rel=0.02)
    assert devices["head"] is None
    assert report["sections"][0]["device_s"]["p50_s"] == pytest.approx(0.003, rel=0.02)
    assert "device p50" in text_of(report)


def test_device_sections_have_quantiles_over_all_ranks(run: RunDirectory) -> None:
    """The report also has the number of sections, the slowest rank, and lost records."""
    ranks = [Gpu(run, rank) for rank in range(2)]
    for rank, duration_ns in zip(ranks, (MS, 3 * MS), strict=True):
        rank.timed_steps(10, 30 * MS)
        rank.stamped("decode", [duration_ns] * 500)
        rank.timed_steps(10, 30 * MS)
        rank.stamped("decode", [duration_ns] * 500, lost=7 * rank.identity.rank)
        rank.timed_steps(1, 30 * MS)
    report = report_on(run, ranks)
    (row,) = report["device_sections"]
    assert (row["name"], row["calls"]) == ("decode", 2000)
    assert row["by_rank"] == {"0": pytest.approx(0.001), "1": pytest.approx(0.003)}
    assert any(
        "rank 1: 7 times of device sections were overwritten" in note
        for note in report["quality"]["notes"]
    )
    text = text_of(report)
    row_line = text.partition("Device sections, ms")[2].splitlines()[2]
    assert row_line.split()[-2:] == ["1", "3.00"]


def test_report_on_a_job_without_a_device_has_no_device_tables(run: RunDirectory) -> None:
    rank = Gpu(run, 0, world_size=1)
    rank.steps(20, **HOST)
    report = report_on(run, [rank])
    assert report["ranks"][0]["device"] is None
    assert report["device_sections"] == []
    assert "device" not in text_of(report)


def test_device_statistics_continue_after_a_json_round_trip() -> None:
    records = np.zeros(4, record_dtype())
    records["kind"] = int(Kind.DEVICE)
    records["value0"] = [int(Kind.FORWARD), int(Kind.BACKWARD), int(Kind.MODULE), int(Kind.STEP)]
    records["duration_ns"], records["value1"] = [1000, 2000, 3000, 4000], [10, CAUGHT_UP_NS, 0, 0]
    statistics = DeviceStatistics()
    statistics.add_records(records, ["layer"])
    loaded = save_and_load(statistics)
    loaded.add_records(records, ["layer"])
    assert loaded.phases["forward"].count == 2
    assert loaded.modules["layer"].sum_ns == 6000
    assert (loaded.behind.count, loaded.caught_up) == (4, 2)
    assert loaded.caught_up_share == 0.5
    assert {phase: times.tolist() for phase, times in phase_durations_ns(records).items()} == {
        "forward": [1000], "backward": [2000], "step": [4000],
    }  # fmt: skip


def test_device_spans_are_children_of_device_spans_only(run: RunDirectory) -> None:
    """A host span that happens to contain a device span is not its parent."""

    def span(
        kind: str, name: str, start_ns: int, duration_ns: int, value0: int = 0, flags: int = 0
    ) -> Span:
        return Span(kind, name, 0, start_ns, duration_ns, 1, flags, value0, 0)

    spans = [
        span("backward", "backward", 0, 100),
        span("device", "forward GPT", 10, 50, int(Kind.FORWARD)),
        span("device", "layer", 20, 10, int(Kind.MODULE)),
        span("section", "in backward", 25, 3),
        span("collective", "issued", 30, 1),
        span("collective", "kernel", 35, 90, 4096, int(Flag.DEVICE)),
    ]
    nested = find_parents(spans)
    parents = {
        each.name: None if parent is None else nested[parent][0].name for each, parent in nested
    }
    assert parents == {
        "backward": None, "forward GPT": None, "layer": "forward GPT", "in backward": "backward", "issued": "backward",
        "kernel": "forward GPT",
    }  # fmt: skip
    endpoint = Collector("traces")
    exporter = exporter_to({"traces": endpoint})
    exporter.export(
        ExportBatch(
            identity_of(run, 0),
            HostClock().anchor(),
            step_table([{}]),
            (StepTrace(0, 0, 200, 0, tuple(spans)),),
        )
    )
    exporter.shutdown(10)
    sent = {each.name: each.attributes for each in endpoint.spans()}
    assert (sent["forward GPT"][semantics.SPAN_KIND], sent["forward GPT"][semantics.ON_DEVICE]) == (
        "forward",
        True,
    )
    assert sent["kernel"][semantics.ON_DEVICE] is True
    assert semantics.ON_DEVICE not in sent["issued"]


def test_waiting_for_the_device_is_not_blamed_on_host_code(run: RunDirectory) -> None:
    """loss.item() takes most of the host's step, but the device is the bottleneck."""
    rank = Gpu(run, 0, world_size=1)
    for _ in range(40):
        step = rank.session.recorder.step
        rank.steps(1, **HOST, host=30.0)
        rank.device_step(step, 28 * MS)
    verdict = report_on(run, [rank])["verdicts"][-1]
    assert verdict.kind == "compute_bound"
    assert verdict.sentence.startswith(
        "Computing takes 97% of a step of 33.0 ms (the backward pass 20.0 ms, the forward pass 10.0 ms,"
        " the optimizer 2.00 ms), by the GPU's clock. The host is ahead, and waits for the GPU. Next: "
    )


def test_verdict_on_an_idle_device_has_the_host_code_that_it_waits_for(run: RunDirectory) -> None:
    """The cost is the idle time of the device, not the duration of the host code."""
    rank = Gpu(run, 0, world_size=1)
    for _ in range(40):
        step = rank.session.recorder.step
        began_ns = rank.clock.now_ns
        rank.steps(1, **HOST, data=60.0)
        # The device finishes the previous step while the loader is working.
        idle_ns = 30 * MS
        rank.device_step(
            step, 20 * MS, began_ns=began_ns + 30 * MS, idle_ns=idle_ns, step_ns=64 * MS
        )
    verdict = report_on(run, [rank])["verdicts"][-1]
    assert verdict.kind == "data_bound"
    assert verdict.sentence.startswith(
        "Data loading takes 47% (30.0 ms) of a step of 64.0 ms, by the GPU's clock; computing 50% (32.0"
        " ms). Next: see what takes the time of a batch"
    )


def test_slow_rank_is_found_by_its_device_times(run: RunDirectory) -> None:
    """Host times of all ranks are equal."""
    ranks = [Gpu(run, rank) for rank in range(2)]
    for rank, scale in zip(ranks, (1.0, 1.5), strict=True):
        rank.timed_steps(200, 30 * MS, scale)
    report = report_on(run, ranks)
    verdict = report["verdicts"][0]
    assert (verdict.kind, verdict.rank, verdict.phase) == ("straggler", 1, "compute")
    assert "host time" not in verdict.sentence
    assert report["run"]["judged_by"] == "device"


@pytest.mark.parametrize("timed", [(), (0,)])
def test_ranks_on_devices_without_device_times_are_not_compared(
    run: RunDirectory, timed: tuple[int, ...]
) -> None:
    """Host times of the ranks are equal, because each rank waits for its device."""
    ranks = [Gpu(run, rank) for rank in range(2)]
    for number, rank in enumerate(ranks):
        rank.session.metadata.add_modules(
            {"layer": False}, device="cuda", all_levels=True, unopened=[]
        )
        if number in timed:
            rank.timed_steps(80, 30 * MS)
        else:
            rank.steps(80, **HOST)
    verdict = report_on(run, ranks)["verdicts"][0]
    why = "device times of rank 1 are missing" if timed else "only host time is known"
    assert verdict.kind == "not_compared"
    assert verdict.sentence.startswith(
        f"The ranks were not compared: their work is on a device (GPU), and {why}. Next: "
    )


def test_modules_are_sorted_by_own_device_time(run: RunDirectory) -> None:
    """The time to issue a module's work makes no difference."""
    rank = Gpu(run, 0, world_size=1)
    intern, recorder = rank.session.intern, rank.session.recorder
    times = {"embed": (3 * MS, 1 * MS), "layer": (1 * MS, 9 * MS), "layer.norm": (1 * MS, 1 * MS)}
    for _ in range(20):
        recorder.begin(Kind.FORWARD, intern("forward Net"))
        for name, (issuing_ns, _) in times.items():
            recorder.begin(Kind.MODULE, intern(name))
            rank.clock.advance(issuing_ns)
            recorder.end(Kind.MODULE, intern(name))
        recorder.end(Kind.FORWARD, intern("forward Net"))
        step = recorder.step
        recorder.next_step()
        for name, (_, device_ns) in times.items():
            rank.late(Kind.MODULE, name, step, device_ns, 30 * MS)
        rank.late(Kind.STEP, "step", step, 12 * MS, 30 * MS)
    report = report_on(run, [rank])
    shown = [(row["name"], row["device_own_s_per_step"]) for row in report["modules"]]
    assert shown[:3] == [
        ("layer", pytest.approx(0.008)),
        ("embed", pytest.approx(0.001)),
        ("layer.norm", pytest.approx(0.001)),
    ]
    (table,) = [each for each in build_tables(cast("Any", report)) if each.key == "modules"]
    assert table.columns[0].values[0] == "layer"
    assert table.columns[1].title == "device per step"


def test_device_table_omits_columns_in_a_narrow_terminal(run: RunDirectory) -> None:
    """The column of the step is always shown."""
    rank = Gpu(run, 0, world_size=1)
    rank.timed_steps(20, 0)
    report = report_on(run, [rank])
    text = render_full(report, "x", columns=44, color=False)
    header = text[text.index("device clock, ms") :].splitlines()[1]
    assert "step" in header
    assert "starved passes" not in header
    assert "starved passes" in text_of(report)


def test_late_device_spans_are_in_the_trace_of_their_step(run: RunDirectory) -> None:
    """Device times arrive one step later.

    A sidecar waits for device times that have not arrived, and loses no step at the end.
    """
    exporter = InMemoryExporter()
    rank = Gpu(run, 0, world_size=1)
    rank.session.facts.device = {"clock": "CUDA events", "error_ns": 4000}
    rank.session.publish()
    rank.session.publish()
    sidecar = Sidecar(run, rank.identity.host, exporter, lambda run, asked: None)
    for step in range(4):
        rank.steps(1, **HOST)
        sidecar.read_rings()
        sidecar.count_records()
        sidecar.judge_ranks(time.monotonic())
        sidecar.export_results()
        for kind, duration_ns in DEVICE.items():
            rank.late(kind, kind.name.lower(), step, duration_ns, 0)
    rank.close()
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.export_results()
    sidecar.close()
    assert [step for batch in exporter.batches for step in batch.steps.step.tolist()] == [
        0,
        1,
        2,
        3,
    ]
    traces = {trace.step: trace for trace in exporter.traces}
    assert set(traces) >= {0, 1, 2}
    for trace in traces.values():
        assert Counter(span.value0 for span in trace.spans if span.kind == "device") == Counter(
            map(int, DEVICE)
        )


def test_last_ended_step_is_counted_during_a_long_one(run: RunDirectory) -> None:
    """The next step may take seconds: an evaluation, a checkpoint or a hang."""
    rank = Gpu(run, 0, world_size=1)
    rank.session.facts.device = {"clock": "CUDA events", "error_ns": 4000}
    rank.session.publish()
    rank.session.publish()
    sidecar = Sidecar(run, rank.identity.host, None, lambda run, asked: None)
    rank.timed_steps(5, 30 * MS)
    sidecar.read_rings()
    sidecar.count_records()
    (process,) = sidecar.state.processes.values()
    assert process.statistics.counted_steps == 4
    (source,) = sidecar.sources
    source.progress.step_s -= 2 * HOLD_S
    sidecar.count_records()
    assert process.statistics.counted_steps == 5
    rank.close()
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.close()
