"""Each part of the GPU check reports a wrong result that is planted in it as FAIL.

The parts' measurements need a GPU, so the results here are made by hand or by other programs. Parts
that run on the tests' devices are run by test_gpu_check.py.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu_check import (
    accuracy,
    allocator,
    beside,
    busy,
    captures,
    cost,
    graphs,
    kernel_checks,
    loops,
    merging,
    nccl,
    peers,
    planted,
    sharded,
    telemetry,
    tools,
    waits,
)
from benchmarks.gpu_check.lines import FAIL, NOT_RUN, PASS, Checks, Line
from benchmarks.planted_truth import Fault, Truth
from benchmarks.planted_verdicts import Suspect
from tests.support.long import long
from tests.support.telemetry import gpu_sample
from torchlens_perf.hooks.collectives.nccl_plugin import GiveUpCause
from torchlens_perf.run.hardware_samples import Sample

MS = 1_000_000


class Collected:
    """The lines that a function of a part reports."""

    def __init__(self, report: Callable[[Checks], object]) -> None:
        self.lines: list[Line] = []
        report(Checks(self.lines.append))

    @property
    def results(self) -> list[str]:
        """Results of the lines that have a bar or could not run."""
        return [line.result for line in self.lines if line.result]


def results(report: Callable[[Checks], object]) -> list[str]:
    return Collected(report).results


def times_of(phase: str) -> dict[int, list[float]]:
    """Return the times of a phase in three steps with two calls each."""
    ms = {"step": 100.0, "forward": 30.0, "backward": 60.0, "optimizer": 10.0}[phase]
    return {step: [ms + step, ms + 0.5] for step in range(10, 13)}


def compared_loop(**changed: dict[int, list[float]]) -> list[str]:
    ours = {phase: times_of(phase) for phase in loops.PHASES} | changed
    bounds = {
        phase: {
            step: [(ms - 0.1, ms + 0.1) for ms in calls] for step, calls in times_of(phase).items()
        }
        for phase in loops.PHASES
    }
    return results(lambda checks: loops.compare(checks, "loop", ours, bounds))


@pytest.mark.parametrize("phase", list(loops.PHASES))
def test_loop_fails_if_a_device_time_is_wrong_or_missing(phase: str) -> None:
    right = times_of(phase)
    assert compared_loop() == [PASS] * 4
    for wrong in (
        {},
        right | {11: [right[11][0] + 0.2, right[11][1]]},
        right | {11: [right[11][0], right[11][1] - 0.2]},
        right | {11: right[11][:1]},
    ):
        assert compared_loop(**{phase: wrong}).count(FAIL) == 1


def test_loop_passes_if_the_budget_leaves_all_phases_of_a_step_out() -> None:
    assert (
        compared_loop(forward={step: times_of("forward")[step] for step in (10, 12)}) == [PASS] * 4
    )


def test_loop_fails_if_recording_takes_more_than_half_a_percent() -> None:
    assert results(lambda checks: loops.judge_account(checks, "", 0.004, limited=True)) == [PASS]
    assert results(lambda checks: loops.judge_account(checks, "", 0.03, limited=True)) == [FAIL]


@pytest.mark.parametrize(
    ("share", "kind", "text", "result"),
    [
        (0.65, "host_bound", "The GPU waits for its host in 93% of a step's work (32.0 ms).", FAIL),
        (0.65, "host_bound", "The GPU waits for its host in 35% of the time (12 ms).", PASS),
        (0.99, "host_bound", "The GPU waits for its host in 5% of a step.", FAIL),
        (0.99, "device_bound", "The GPU computes in 99% of a step.", PASS),
        (0.04, "host_bound", "The GPU waits for its host in 90% of a step's work (17.7 ms).", PASS),
        (0.26, "data_bound", "Data loading takes 68% (66.2 ms) of a step.", PASS),
        (0.04, "balanced", "computing 97% (20 ms) of a step.", FAIL),
        (0.60, "data_bound", "Data loading takes 68% (66.2 ms) of a step.", FAIL),
    ],
)
def test_busy_fails_if_the_first_sentence_contradicts_kineto(
    share: float, kind: str, text: str, result: str
) -> None:
    verdict = {"kind": kind, "text": text}
    assert results(lambda checks: busy.judge(checks, "a model", share, verdict)) == [result]


def test_time_of_overlapping_kernels_is_counted_once() -> None:
    assert busy.union_ns([(10, 20), (0, 5), (12, 15), (18, 30), (30, 31)]) == 26
    assert busy.union_ns([]) == 0


def test_overhead_fails_above_its_limit_and_after_too_few_rounds() -> None:
    size = cost.SIZES["device"]

    def judged(*added: float) -> list[str]:
        return results(lambda checks: cost.judge_overhead(checks, "overhead", size, added))

    assert judged(*[0.1, 0.05, 0.12] * 3) == [PASS]
    assert judged(*[0.5, 0.4, 0.52] * 3) == [FAIL]
    assert judged(0.0, 0.0) == [FAIL]


def test_cost_of_an_arm_is_relative_to_both_blocks_without_hooks() -> None:
    times = {"nothing": [10.0, 20.0], "nothing again": [12.0, 20.0], "watch": [11.0, 22.0]}
    nothing = ("nothing", "nothing again")
    assert cost._added(times, "watch", nothing) == pytest.approx([0.0, 10.0])
    assert cost._added(times, "nothing again", nothing) == pytest.approx([20.0, 0.0])


def truth(*faults: Fault) -> Truth:
    return Truth("ddp-backward" if faults else "ddp-clean", 1, 2, 90, faults)


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (Suspect(1, "backward"), PASS), (Suspect(0, "backward"), FAIL), (Suspect(1, "forward"), FAIL), (None, FAIL),
    ],
)  # fmt: skip
def test_planted_fails_if_another_rank_or_phase_is_named(
    answer: Suspect | None, result: str
) -> None:
    fault = Fault(1, "backward", 20, None, 12.0, "spin")
    assert results(lambda checks: planted.judge(checks, truth(fault), answer)) == [result]
    clean = [PASS] if answer is None else [FAIL]
    assert results(lambda checks: planted.judge(checks, truth(), answer)) == clean


def ranks(**second: Any) -> list[dict[str, Any]]:
    rank = {
        "with": "a",
        "without": "a",
        "forward_ms": (20.0, 20.0),
        "work_ms": 50.0,
    }
    return [rank, {**rank, "work_ms": 60.0, **second}]


@pytest.mark.parametrize(
    ("second", "failed"),
    [
        ({}, 0),
        ({"with": "b"}, 1),
        ({"forward_ms": (26.0, 20.0)}, 1),
        ({"forward_ms": None}, 1),
        ({"work_ms": 52.0}, 1),
        ({"work_ms": 40.0}, 1),
    ],
)
@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
def test_sharded_fails_if_bits_times_or_the_slow_rank_are_wrong(
    kind: str, second: dict[str, Any], failed: int
) -> None:
    found = results(lambda checks: sharded.judge_sharded(checks, kind, ranks(**second)))
    assert len(found) == 4
    assert found.count(FAIL) == failed


def test_hang_fails_if_another_rank_or_nobody_is_named() -> None:
    def judged(*named: int) -> list[str]:
        verdict = {"explanation": "No step for 10 s.", "evidence": {"ranks": list(named)}}
        return results(lambda checks: sharded.judge_hang(checks, verdict if named else None))

    assert judged(1) == [PASS]
    assert judged(0) == judged() == judged(0, 1) == [FAIL]


def test_waits_fails_if_a_watch_adds_a_call_of_any_kind() -> None:
    for kind in waits.KINDS:
        added = Counter({f"{kind}: a function": 2})
        lines = Collected(lambda checks, added=added: waits.judge_added(checks, added, set())).lines
        assert [line.what.partition(":")[0] for line in lines if line.result == FAIL] == [kind]
    blind = set(waits.KINDS)
    found = results(lambda checks: waits.judge_added(checks, Counter({"module: x": 1}), blind))
    assert set(found) == {NOT_RUN}


def test_synchronizations_fails_if_a_watch_adds_a_wait() -> None:
    without, more = Counter({"cudaDeviceSynchronize": 2}), Counter({"Memcpy DtoH (Pageable)": 1})

    def judged(one: Counter[str], other: Counter[str]) -> list[str]:
        return results(lambda checks: cost.judge_waits(checks, one, other))

    assert judged(without, without) == [PASS]
    assert judged(without, without + more) == [FAIL]
    assert judged(Counter(), Counter()) == [NOT_RUN]


def test_memory_and_gaps_fail_beyond_their_limits() -> None:
    assert results(lambda checks: cost.judge_memory(checks, 32 << 20)) == [PASS]
    assert results(lambda checks: cost.judge_memory(checks, 33 << 20)) == [FAIL]
    right = {"launch-bound": 0.9, "GPT-2 small": 0.1}
    assert results(lambda checks: cost.judge_gaps(checks, dict(right))) == [PASS, PASS]
    for wrong in ({"launch-bound": 0.7}, {"GPT-2 small": 0.3}, {"GPT-2 small": None}):
        found = results(lambda checks, wrong=wrong: cost.judge_gaps(checks, {**right, **wrong}))
        assert sorted(found) == [FAIL, PASS]


@pytest.mark.parametrize(
    ("lost", "wrong", "raised", "captured", "result"),
    [
        ([], 0, "", 30, PASS),
        (["operation not permitted"], 0, "", 30, FAIL),
        ([], 1, "", 30, FAIL),
        ([], 0, "CUDA error", 30, FAIL),
        ([], 0, "", 29, FAIL),
    ],
)
def test_beside_fails_if_a_capture_is_lost_or_wrong(
    lost: list[str], wrong: int, raised: str, captured: int, result: str
) -> None:
    thread: Any = SimpleNamespace(captured=captured, lost=lost, wrong=wrong)

    def judged(lost_without: int) -> list[str]:
        return results(
            lambda checks: beside.judge_captures(
                checks, thread, 100, raised, watched=True, lost_without=lost_without
            )
        )

    assert judged(0) == [result]
    assert judged(1) == [NOT_RUN]


JOINED = {
    "joined": 20, "count": 20, "by_device": 20, "slowest_rank": 1, "transfer_s": {"p50_s": 1e-3},
    "by_rank": {"1": {"exposed_lag_s": 0.4}},
}  # fmt: skip


def test_nccl2_fails_if_another_rank_came_last_or_a_kernel_has_no_time() -> None:
    def judged(**row: Any) -> list[str]:
        return results(lambda checks: nccl.judge_joined(checks, {**JOINED, **row}))

    assert judged() == [PASS, PASS]
    assert judged(slowest_rank=0).count(FAIL) == 1
    assert judged(by_rank={"1": {"exposed_lag_s": 0.1}}).count(FAIL) == 1
    assert judged(by_device=19).count(FAIL) == 1
    assert judged(joined=0) == [FAIL]
    assert results(lambda checks: nccl.judge_joined(checks, None)) == [FAIL]


@pytest.mark.parametrize(
    ("version", "ended", "cause", "failed"),
    [
        ((2, 28, 9), 0, GiveUpCause.NOT_GIVEN_UP, 0),
        ((2, 28, 9), 0, GiveUpCause.SELF_COPY, 1),
        ((2, 28, 9), 3, GiveUpCause.NOT_GIVEN_UP, 1),
        ((2, 29, 7), 0, GiveUpCause.SELF_COPY, 0),
        ((2, 29, 7), 0, GiveUpCause.NO_ROOM, 1),
    ],
)
def test_nccl1_fails_if_a_lone_rank_has_times_or_another_reason(
    version: tuple[int, ...], ended: int, cause: GiveUpCause, failed: int
) -> None:
    found = results(lambda checks: nccl.judge_lone_rank(checks, version, ended, cause))
    assert found.count(FAIL) == failed


def test_nccl_cost_fails_if_communicators_are_not_destroyed_with_the_plugin() -> None:
    fields = {"threads": 9, "cpu_s": 6.85, "shared_mib": 0.0}

    def judged(destroy_s: float | None) -> list[str]:
        told = {"off": {**fields, "destroy_s": 0.1}, "on": {**fields, "destroy_s": destroy_s}}
        return results(lambda checks: nccl._costs(checks, "nccl_cost", "two hosts", told))

    assert judged(0.2) == [PASS]
    assert judged(11.0) == judged(None) == [FAIL]


def test_graphs_fails_if_a_replay_is_not_timed() -> None:
    def judged(**counts: int) -> list[str]:
        return results(lambda checks: graphs.judge_counts(checks, "a capture", counts, 3))

    assert judged(region=graphs.REPLAYS + 3) == [PASS]
    assert judged(region=graphs.REPLAYS + 2) == judged() == [FAIL]
    assert judged(region=graphs.REPLAYS + 3, other=1) == [FAIL]


def test_kernels_fails_if_one_bit_differs() -> None:
    ours, twin = np.arange(64), np.arange(64)
    twin[17] ^= 1
    judge = kernel_checks.judge_equal
    assert results(lambda checks: judge(checks, "a kernel", [ours], [ours.copy()])) == [PASS]
    assert results(lambda checks: judge(checks, "a kernel", [ours, ours], [ours, twin])) == [FAIL]


def test_floors_fails_if_a_kernel_is_slow() -> None:
    def judged(took_us: float) -> list[str]:
        return results(
            lambda checks: kernel_checks._against_floor(
                checks, "a kernel", took_us, 1 << 20, 3000, 2
            )
        )

    assert judged(kernel_checks.MOST_US) == [PASS]
    assert judged(kernel_checks.MOST_US + 1) == [FAIL]


def test_merging_fails_if_times_are_lost_or_wrong() -> None:
    steps = merging.MERGE_STEPS
    right: dict[str, Any] = {
        "window": {"count": steps, "p50_ns": 52_000.0}, "count": 3 * steps, "times_of_windows": [steps] * 3,
    }  # fmt: skip

    def judged(**wrong: Any) -> list[str]:
        return results(lambda checks: merging.judge_merged(checks, **{**right, **wrong}))

    assert judged() == [PASS] * 3
    assert judged(window={"count": steps - 1, "p50_ns": 52_000.0}).count(FAIL) == 1
    assert judged(window={"count": steps, "p50_ns": 70_000.0}).count(FAIL) == 1
    assert judged(count=3 * steps - 1).count(FAIL) == 1
    assert judged(times_of_windows=[steps] * 2).count(FAIL) == 1


def test_accuracy_and_clock_fail_if_a_time_is_off() -> None:
    def judged(measured_ns: float) -> list[str]:
        return results(lambda checks: accuracy.judge_spin(checks, "stamps", 1e6, measured_ns))

    assert judged(1.011e6) == [PASS]
    assert judged(1.013e6) == judged(0.98e6) == [FAIL]

    def clock(step_ns: int, *errors: float | None) -> list[str]:
        steps = np.array([32, step_ns])
        return results(lambda checks: accuracy.judge_clock(checks, steps, errors))

    assert clock(0, 20_000, 30_000) == [PASS, PASS]
    assert clock(-32, 20_000) == [FAIL, PASS]
    assert clock(0, 60_000) == clock(0, 20_000, None) == [PASS, FAIL]


def test_capture_fails_if_later_steps_are_slower_or_steps_are_missing() -> None:
    def judged(after_ms: float, steps: int) -> list[str]:
        before, after = [10.0] * 5, [after_ms] * 5
        return results(lambda checks: captures.judge_capture(checks, 1, before, after, steps))

    assert judged(10.05, captures.STEPS) == [PASS, PASS]
    assert judged(11.0, captures.STEPS) == [FAIL, PASS]
    assert judged(10.0, captures.STEPS - 1) == [PASS, FAIL]


def test_capture_fails_if_cupti_has_a_subscriber_left(cupti: Path) -> None:
    def judged() -> list[str]:
        return results(lambda checks: captures.check_detached(checks, str(cupti)))

    assert judged() == judged() == [PASS]
    with captures.Calls(str(cupti)):
        assert judged() == [FAIL]
    assert results(lambda checks: captures.check_detached(checks, "/nowhere.so")) == [FAIL]


@pytest.fixture
def cupti(tmp_path: Path) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")
    library = tmp_path / "libfake_cupti.so"
    source = Path(__file__).parents[1] / "support" / "fake_cupti.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return library


def table(**row: Any) -> dict[str, Any]:
    top = {
        "module": "Net > Keeper",
        "stack": ["forward (allocator.py:31)"],
        "blocks": 34,
        "new_blocks": 34,
    }
    top |= {"largest_bytes": 16 << 20, **row}
    return {"took_s": row.pop("took_s", 0.1), "module": "Net > Keeper", "table": {"rows": [top]}}


def test_allocator_fails_if_the_planted_leak_is_not_named() -> None:
    def judged(found: dict[str, Any] | None, **given: bool) -> list[str]:
        settings = {"raised": True, "history": True, "left_on": False, **given}
        return results(lambda checks: allocator.judge_table(checks, found, **settings))

    assert FAIL not in judged(table()) + judged(table(), history=False)
    assert judged(table(module="Net > Other")).count(FAIL) == 1
    assert judged(table(), raised=False).count(FAIL) == 1
    assert judged(table(), left_on=True).count(FAIL) == 1
    assert judged(table(took_s=2.0)).count(FAIL) == 1
    assert judged(None).count(FAIL) == 1
    assert judged(table(largest_bytes=8 << 20), history=False).count(FAIL) == 1


def samples(**values: float) -> list[Sample]:
    return [gpu_sample("GPU-0", n * 10**9, n * 10**9, **values) for n in range(4)]


def test_nvml_fails_if_load_does_not_show() -> None:
    idle = samples(power_w=100.0, busy=0.0, sm_active=0.0, tensor_active=0.0)
    load = {"power_w": 600.0, "busy": 0.99, "sm_active": 0.9, "tensor_active": 0.7}
    assert FAIL not in results(lambda checks: telemetry._load_shows(checks, idle, samples(**load)))
    for name in load:
        loaded = samples(**{**load, name: idle[0][name]})
        lines = Collected(
            lambda checks, loaded=loaded: telemetry._load_shows(checks, idle, loaded)
        ).lines
        assert [line.what.partition(",")[0] for line in lines if line.result == FAIL] == [name]


CPU_PROGRAM = tools.NVTX_PROGRAM.replace(".cuda()", "").replace(', device="cuda"', "")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
@pytest.mark.parametrize(("planted_name", "result"), [("mine", PASS), *long(("another", FAIL))])
def test_nvtx_fails_if_a_range_is_missing(planted_name: str, result: str) -> None:
    """The program runs on the CPU, and the counts are those of the real injection library."""
    pytest.importorskip("nvtx")
    program = CPU_PROGRAM.replace('"mine"', f'"{planted_name}"')
    assert results(lambda checks: tools.count_ranges(checks, program)) == [result]


@pytest.mark.parametrize("check", ["memcheck", "racecheck"])
@pytest.mark.parametrize(
    ("script", "result"),
    [
        ("echo '========= ERROR SUMMARY: 0 errors'", PASS),
        ("echo '========= ERROR SUMMARY: 2 errors'; exit 9", FAIL),
        ("exit 1", NOT_RUN),
    ],
)
def test_sanitizer_fails_if_it_finds_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: str, script: str, result: str
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert results(lambda checks: tools.sanitizer(checks, check)) == [result]


def test_peer_that_is_not_installed_is_not_run_with_the_reason() -> None:
    assert peers.find_obstacle(("torch",), "torch.profiler") == ""
    reason = peers.find_obstacle(("no-such-package",), "no such tool")
    assert reason == "no-such-package is not installed"


def test_cost_of_a_peer_has_an_interval() -> None:
    plain, under = [10.0, 10.1, 9.9] * 5, [12.0, 12.1, 11.9] * 5
    (line,) = Collected(lambda checks: peers.report_cost(checks, "peer-x", plain, under)).lines
    assert line.value.startswith("+20.0 % [")
    assert line.value.endswith("of 10.00 ms")
