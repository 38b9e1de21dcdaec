"""Tests of what is said of devices that wait for hosts, replay graphs, or serve other processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.report.test_schema import node
from tests.support.reports import checked
from tests.support.tables import MS, mixed_table
from tests.support.telemetry import gpu_sample
from torchlens_perf.analysis.statistics.hardware import GpuTotals, HardwareTotals
from torchlens_perf.analysis.statistics.quantities import format_duration
from torchlens_perf.report.build import build_report
from torchlens_perf.run.sketch import Sketch
from torchlens_perf.verdicts.words.device_pace import find_host_pace, replays_graphs
from torchlens_perf.view.tables import build_host_gap_table

UUID = "GPU-0"
LAUNCHES = {"forward": 6.0, "backward": 12.0, "host": 2.0}
GRAPH = {"forward": 0.1, "host": 40.0}


def used_gpu(*busy: float, others: float | None = None, pid: int | None = None) -> Any:
    """Return the totals of a GPU with these busy shares in its seconds."""
    totals = GpuTotals()
    for second, share in enumerate(busy):
        totals.add_sample(
            gpu_sample(
                UUID,
                second,
                second,
                interval_ns=10**9,
                busy=share,
                others_busy=others,
                other_pid=pid,
            )
        )
    return HardwareTotals(gpus={UUID: totals})


def report_on(
    device_ms: dict[str, float], telemetry: Any = None, caught_up: int = 0, **changed: Any
) -> dict[str, Any]:
    """Return the report on a rank with these parts of a step by its device's clock."""
    changed |= {} if telemetry is None else {"telemetry": telemetry}
    gpus = [{"uuid": UUID, "name": "NVIDIA H200", "index": 0}]
    state = node(device_ms=device_ms, caught_up=caught_up, gpus=gpus, **changed)
    return checked(build_report("run", [state]))


def test_idle_share_of_the_samples_is_the_cost_of_launches() -> None:
    """The first sample of a run has no interval, and one second was spent in an evaluation."""
    telemetry = used_gpu(0.3, 0.3, 1.0, 0.3)
    telemetry.gpus[UUID].add_sample(gpu_sample(UUID, 9, 9, busy=0.9))
    report = report_on(LAUNCHES, telemetry, caught_up=9)
    verdict = report["verdicts"][0]

    assert (verdict.kind, verdict.phase) == ("host_bound", "host")
    assert verdict.cost_s_per_step == pytest.approx(0.7 * 0.020)
    assert verdict.cost_share == pytest.approx(0.7)
    assert "The GPU is busy for 30% of a typical second." in verdict.sentence


@pytest.mark.parametrize(
    ("device_ms", "busy", "caught_up"),
    [
        (LAUNCHES, (0.96,), 10),  # Above 95 %, hosts never limit a step.
        (LAUNCHES, (0.8,), 10),  # The device has little idle time that a faster host could fill.
        (LAUNCHES, (0.3,), 7),  # Idle, but the host was ahead at the ends of some passes.
        (LAUNCHES, (), 7),
        ({**LAUNCHES, "data": 60.0}, (0.2,), 10),  # It is idle while it waits for data.
        ({**LAUNCHES, "communication": 60.0}, (0.2,), 10),
    ],
)
def test_devices_do_not_wait_for_kernels_unless_all_measurements_agree(
    device_ms: dict[str, float], busy: tuple[float, ...], caught_up: int
) -> None:
    report = report_on(device_ms, used_gpu(*busy) if busy else None, caught_up)

    assert find_host_pace(report) is None  # type: ignore[arg-type]
    assert "host_bound" not in {each.kind for each in report["verdicts"]}


def test_wait_for_data_is_named_before_a_shorter_wait_for_kernels() -> None:
    report = report_on({**LAUNCHES, "data": 30.0}, used_gpu(0.05), caught_up=10)

    assert find_host_pace(report).idle_s == pytest.approx(0.95 * 0.050 - 0.030)  # type: ignore
    assert report["verdicts"][0].kind == "data_bound"


def test_idle_time_that_was_not_measured_has_no_cost() -> None:
    verdict = report_on(LAUNCHES, caught_up=8)["verdicts"][0]

    assert (verdict.kind, verdict.cost_s_per_step) == ("host_bound", None)
    assert verdict.evidence.busy is None
    assert verdict.evidence.idle_s is None
    assert "was not measured" in verdict.sentence


HOST_GAPS = {"host": 30.0, "forward": 20.0, "backward": 30.0}


def set_host_gaps(state: Any, gaps_ms: dict[str, float]) -> None:
    """Set the host code of the typical steps by the host's clock, by its place."""
    for process in state.processes.values():
        for sums in process.statistics.by_length.values():
            sums.gaps = {gap: round(ms * MS) * sums.steps for gap, ms in gaps_ms.items()}


@pytest.mark.parametrize(
    ("gaps_ms", "named"),
    [
        ({"backward>optimizer": 20.0, "start>data": 8.0}, True),
        ({"backward>optimizer": 8.0, "start>data": 7.0, "data>forward": 7.0, "optimizer>end": 7.0}, True),
        ({"backward>optimizer": 60.0, "start>data": 8.0}, False),  # It waits for the device there.
        ({f"{a}>{b}": 6.0 for a in ("start", "data", "backward") for b in ("forward", "end")}, False),
        ({"start>end": 30.0}, False),  # No phase is known.
        ({}, False),
    ],
)  # fmt: skip
def test_place_of_most_host_code_is_in_the_sentence_and_the_action(
    gaps_ms: dict[str, float], named: bool
) -> None:
    state = node(device_ms=HOST_GAPS, compute_device="cuda")
    set_host_gaps(state, gaps_ms)
    report = checked(build_report("run", [state]))
    verdict, gap = report["verdicts"][0], report["verdicts"][0].evidence.gap

    assert verdict.kind == "host_bound"
    assert (gap is not None) is named
    assert (
        "look at what runs between the backward pass and the optimizer" in verdict.action
    ) is named
    if named:
        of_s = sum(gaps_ms.values()) / 1e3
        assert (gap.s, gap.of_s) == pytest.approx((gaps_ms[gap.at] / 1e3, of_s), abs=1e-6)
        own, whole = format_duration(gap.s), format_duration(gap.of_s)
        assert (
            f"Of {whole} of host code per step, with waits for a CPU, {own} are between"
            in verdict.text
        )
        table = build_host_gap_table(report)  # type: ignore[arg-type]
        assert table is not None
        assert (table.columns[0].values[0], table.columns[1].values[0]) == ("backward", "optimizer")
        assert table.columns[2].values[0] == gap.s


@pytest.mark.parametrize(
    ("gap_ms", "named", "first"),
    [
        (2.0, False, "issue fewer"),
        (4.0, True, "issue fewer"),
        (9.0, True, "look at what runs between"),
    ],
)
def test_place_with_much_of_a_device_s_idle_time_is_named(
    gap_ms: float, named: bool, first: str
) -> None:
    """The device is idle for 14 ms of a step, most of it inside of the passes or in one place."""
    gpus = [{"uuid": UUID, "name": "NVIDIA H200", "index": 0}]
    state = node(device_ms=LAUNCHES, caught_up=10, gpus=gpus, telemetry=used_gpu(0.3))
    set_host_gaps(state, {"data>forward": gap_ms, "start>data": 1.0})
    verdict = checked(build_report("run", [state]))["verdicts"][0]

    assert verdict.kind == "host_bound"
    assert (verdict.evidence.gap is not None) is named
    assert ("between data loading and the forward pass" in verdict.text) is named
    assert verdict.action.startswith(first)


def test_compiled_loop_is_not_advised_to_compile() -> None:
    report = report_on(LAUNCHES, used_gpu(0.1), caught_up=10, process_began_ns=1, compile_s=19.0)
    verdict = next(each for each in report["verdicts"] if each.kind == "host_bound")

    assert "torch.compile" not in verdict.action


def add_device_section(state: Any, calls: int) -> None:
    for process in state.processes.values():
        sketch = process.statistics.device.stamped["step"] = Sketch()
        sketch.add(np.full(calls, 5 * MS, np.int64))


@pytest.mark.parametrize("section", [False, True])
def test_loop_that_replays_a_graph_has_no_host_code(section: bool) -> None:
    """With a section in the graph, its replays are known even if the watch began after the
    capture."""
    state = node(device_ms=GRAPH, device={} if section else {"captured": 4})
    if section:
        add_device_section(state, calls=60)
    report = checked(build_report("run", [state]))
    (verdict,) = report["verdicts"]

    assert replays_graphs(report)  # type: ignore[arg-type]
    assert (verdict.kind, verdict.cost_s_per_step) == ("not_known", None)
    assert verdict.evidence.step_s == pytest.approx(0.0401)
    assert list(verdict.evidence.sections_s) == ["step"] * section


def test_graph_that_was_captured_before_the_watch_is_not_called_host_code() -> None:
    """Nothing shows whether host code or a graph is outside of the phases."""
    (verdict,) = report_on(GRAPH)["verdicts"]

    assert verdict.kind == "not_known"
    assert ".item()" not in verdict.sentence


def test_graphed_parts_of_a_model_are_phases() -> None:
    """A model of make_graphed_callables() is captured, and its phases are timed."""
    report = report_on({"forward": 4.0, "host": 30.0}, device={"captured": 4})

    assert not replays_graphs(report)  # type: ignore[arg-type]
    assert report["verdicts"][0].kind == "host_bound"


@pytest.mark.parametrize(
    ("others", "pid", "named"),
    [(0.4, 4711, True), (0.04, 4711, False), (0.0, None, False)],
)
def test_processes_on_the_gpu_are_named_with_their_use(
    others: float, pid: int | None, named: bool
) -> None:
    report = report_on(LAUNCHES, used_gpu(0.99, 0.99, others=others, pid=pid))
    text = report["verdicts"][0].sentence

    assert ("pid 4711" in text) is named
    assert ("used the GPU for 40% of the time" in text) is named
    assert report["gpus"][0]["others_busy"] == pytest.approx(others)


@pytest.mark.parametrize(
    ("others", "first"),
    [
        (0.3, "see what the other processes do on the GPU"),
        (0.0, "see what differs"),
        (None, "see whether other programs used the GPU"),
    ],
)
def test_other_processes_are_looked_for_before_batches(others: float | None, first: str) -> None:
    """Ten of sixty steps have a backward pass of three times the usual length."""
    telemetry = used_gpu(0.99, 0.99, others=others, pid=4711)
    state = node(device_ms=LAUNCHES, telemetry=telemetry, compute_device="cuda",
                 gpus=[{"uuid": UUID, "name": "NVIDIA H200", "index": 0}])  # fmt: skip
    add_long_steps(state, {**LAUNCHES, "backward": 36.0}, count=5)
    report = checked(build_report("run", [state]))
    long = next(each for each in report["verdicts"] if each.kind == "long_steps")

    assert long.action.startswith(first)
    assert ("used the GPU for 30% of the time" in long.sentence) is bool(others)


def add_long_steps(state: Any, device_ms: dict[str, float], count: int) -> None:
    for process in state.processes.values():
        process.statistics.device_mix.add_steps(mixed_table([device_ms] * count))
