"""Accuracy of device times: the clock's resolution, and events and stamps compared with work of a
known duration.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check.checks import Spin, launch, new_ring, occupy, stream
from benchmarks.gpu_check.lines import Checks
from torchlens_perf.cuda.clock import create_clock
from torchlens_perf.cuda.driver import CudaDriver
from torchlens_perf.cuda.reduction import ExactColumn, SumColumn
from torchlens_perf.cuda.stamps import NO_SLOT
from torchlens_perf.recorder.devices import DeviceInUse

SPINS_NS = (10_000, 50_000, 200_000, 1_000_000, 10_000_000)
REPEATS = 40
_READINGS = 20_000
# This number is below the capacity of the device's queue.
_MARKS = 100


def clock(checks: Checks) -> None:
    """Check the device's clock, and the fit of its times to the host's clock."""
    times = torch.zeros(_READINGS, dtype=torch.int64, device="cuda")
    launch("read_clock", np.uint64(times.data_ptr()), np.int32(_READINGS))
    errors = [new_clock().error_ns for _ in range(20)]
    judge_clock(checks, np.diff(times.cpu().numpy()), errors)
    marked = new_clock()
    times_ns = []
    for _ in range(REPEATS):
        begin_ns = time.perf_counter_ns()
        for _ in range(_MARKS):
            marked.mark()
        times_ns.append((time.perf_counter_ns() - begin_ns) / _MARKS)
        torch.cuda.synchronize()
        marked.read_reached_marks()
        marked.read_reached_marks()
    checks.value("clock", "a mark takes of the host", f"{min(times_ns):.0f} ns")
    _parts_of_a_mark(checks)


def new_clock():
    """Return a clock of the current device, as training uses it."""
    return create_clock(DeviceInUse("cuda", torch.cuda.current_device()))


def judge_clock(
    checks: Checks, steps: np.ndarray[Any, Any], errors: Sequence[float | None]
) -> None:
    """Expect a clock that never steps back, and anchors within 50 us, in ns."""
    checks.bar(
        "clock",
        "globaltimer never steps back",
        f"{int(steps.min())} ns",
        ">= 0",
        bool(steps.min() >= 0),
    )
    checks.value("clock", "globaltimer's smallest step", f"{int(steps[steps > 0].min())} ns")
    known = [error for error in errors if error is not None]
    median = float(np.median(known)) if known else float("nan")
    met = len(known) == len(errors) and median <= 50_000
    checks.bar(
        "clock",
        "anchor of device times on the host's line",
        f"+- {median / 1e3:.1f} us",
        "<= 50 us",
        met,
    )


def _parts_of_a_mark(checks: Checks) -> None:
    """Measure the unavoidable parts of a mark."""
    driver, stream = CudaDriver(), torch.cuda.current_stream()
    event, index = torch.cuda.Event(enable_timing=True), torch.cuda.current_device()
    event.record()  # torch creates the event when it is first recorded.
    handles = event.cuda_event, stream.cuda_stream
    for name, function in (
        ("torch's record", lambda: event.record(stream)),
        ("cuEventRecord, called through ctypes", lambda: driver.record_event(*handles)),
        ("the handle of the current stream", lambda: torch._C._cuda_getCurrentRawStream(index)),
    ):
        times_ns = []
        for _ in range(REPEATS):
            begin_ns = time.perf_counter_ns()
            for _ in range(_MARKS):
                function()
            times_ns.append((time.perf_counter_ns() - begin_ns) / _MARKS)
            torch.cuda.synchronize()
        checks.value("clock", f"of it, {name}", f"{min(times_ns):.0f} ns")


def accuracy(checks: Checks) -> None:
    """Compare the times of planted spins, by events and by stamps, with the times of a spin of 0 s.

    The subtraction removes the start and end of the kernel itself, which are measured too but are
    not an error of the clock.
    """
    beyond = {}
    for kind, measure in MEASURES.items():
        spin = Spin()
        measured_ns = measure(lambda spin=spin: spin(0))
        beyond[kind] = measured_ns - float(np.median(spin.took_ns()))
        checks.value("accuracy", f"{kind} around a spin of no time", f"{measured_ns / 1e3:.2f} us")
    for planted_ns in SPINS_NS:
        for kind, measure in MEASURES.items():
            spin = Spin()
            measured_ns = measure(lambda spin=spin, planted_ns=planted_ns: spin(planted_ns))
            true_ns = float(np.median(spin.took_ns()))
            judge_spin(checks, kind, true_ns, measured_ns - beyond[kind])


def judge_spin(checks: Checks, kind: str, true_ns: float, measured_ns: float) -> None:
    """Compare the measured time of a spin with the one that the spin has stored itself."""
    off_ns = measured_ns - true_ns
    value = f"{measured_ns / 1e3:.2f} us, off by {off_ns / 1e3:+.2f} us"
    met = abs(off_ns) <= 2000 + 0.01 * true_ns
    what = f"{kind}, a spin of {true_ns / 1e3:.1f} us"
    checks.bar("accuracy", what, value, "2 us + 1 %", met)


def _by_events(work) -> float:
    """Return the median of REPEATS times, measured by the clock that training uses."""
    clock = new_clock()
    pairs = []
    occupy()
    for _ in range(REPEATS):
        begin = clock.mark()
        work()
        pairs.append((begin, clock.mark()))
    clock.read_reached_marks()
    torch.cuda.synchronize()
    clock.read_reached_marks()
    spans = [clock.span(begin, end) for begin, end in pairs]
    return float(np.median([duration_ns for _, duration_ns in spans]))


def _by_stamps(work) -> float:
    """Return the exact median of REPEATS times, as computed by the reduction kernel."""
    ring = new_ring(slots=1)
    slot = ring.assign_slot("planted")
    occupy()
    for _ in range(REPEATS):
        ring.enqueue_stamp(NO_SLOT, slot, stream())
        work()
        ring.enqueue_stamp(slot, NO_SLOT, stream())
    ring.enqueue_reduction(stream())
    torch.cuda.synchronize()
    reduced = ring.collect_result()
    assert reduced is not None
    assert reduced.sums[0, SumColumn.COUNT] == REPEATS
    return float(reduced.exact[0, ExactColumn.MEDIAN])


MEASURES = {"events": _by_events, "stamps": _by_stamps}
