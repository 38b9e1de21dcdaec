"""Cost of a mark in a tight loop, as ratios to its lower bound and to the marks of other tools.

The lower bound is two clock reads and a store, in C. A tight loop makes the marks of every tool
look cheap. training_step.py measures marks in a real training step.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from torch import nn

from benchmarks.measure import Table, interleaved, per_operation_ns, ratio_interval
from tests.support.native_facts import measure_floor_ns
from torchlens_perf import _native
from torchlens_perf.run.ring import RingFile

ROUNDS = 40


class NullExporter(SpanExporter):
    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def section_variants() -> dict[str, Callable[[], float]]:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(NullExporter()))
    names = {
        "section": _native.section("a"),
        "perf": SimpleNamespace(section=_native.section),
        "record_function": torch.profiler.record_function,
        "tracer": provider.get_tracer("benchmark"),
    }
    return {
        "floor: two clock reads and a store in C": lambda: measure_floor_ns(20_000),
        "with section": per_operation_ns("with section: pass", names, 1000),
        "with perf.section(name)": per_operation_ns('with perf.section("a"): pass', names, 1000),
        "torch.profiler.record_function, idle": per_operation_ns(
            'with record_function("a"): pass', names, 20
        ),
        "OpenTelemetry SDK span": per_operation_ns(
            'with tracer.start_as_current_span("a"): pass', names, 10
        ),
    }


def module_variants(folder: Path) -> dict[str, Callable[[], float]]:
    """Return three empty modules: plain, with our mark, and with a pair of empty hooks."""
    ring = RingFile(folder / "modules", 65536)
    recorder = _native.Recorder(ring.buffer, ring.intern)
    plain, marked, hooked = nn.Identity(), nn.Identity(), nn.Identity()
    assert _native.route_calls(nn.Module.__call__)
    _native.set_module_call(
        id(marked), _native.ModuleCall(recorder, ring.intern("m"), nn.Module.__call__)
    )
    hooked.register_forward_pre_hook(lambda module, args: None)
    hooked.register_forward_hook(lambda module, args, result: None)
    recorder.begin(3, ring.intern("forward"))
    names = {"plain": plain, "marked": marked, "hooked": hooked, "x": torch.ones(1)}
    return {
        name: per_operation_ns(f"{name}(x)", names, 300) for name in ("plain", "marked", "hooked")
    }


def off_ns() -> float:
    """Return the ns of a section without a recorder, measured in a fresh process."""
    import subprocess

    program = (
        "import torchlens_perf as perf; from benchmarks.measure import per_operation_ns\n"
        "timed = per_operation_ns('with perf.section(\"a\"): pass', {'perf': perf}, 1000)\n"
        "import statistics; print(statistics.median(timed() for _ in range(60)))"
    )
    environ = {**os.environ, "TORCHLENS_PERF": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> int:
    """Print the tables. Return the number of missed bars."""
    table = Table("a section", "ns", "to the floor", "bar", "")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ring = RingFile(Path(folder) / "sections", 65536)
        recorder = _native.Recorder(ring.buffer, ring.intern)
        recorder.activate()
        values = interleaved(section_variants(), ROUNDS)
        assert recorder.written > ROUNDS
        modules = interleaved(module_variants(Path(folder)), ROUNDS)
    floor, section, _, record_function, span = values.values()
    bars = {
        "with section": ("at most 2.2 floors", ratio_interval(section, floor)[0] <= 2.2),
    }
    for name, nanoseconds in values.items():
        middle, low, high = ratio_interval(nanoseconds, floor)
        bar, met = bars.get(name, ("", None))
        verdict = "" if met is None else table.bar(met)
        table.row(
            name,
            f"{statistics.median(nanoseconds):.0f}",
            f"{middle:.2f} [{low:.2f}, {high:.2f}]",
            bar,
            verdict,
        )
    off = off_ns()
    table.row(
        "with perf.section(name), TORCHLENS_PERF=0",
        f"{off:.0f}",
        "",
        "at most 60 ns",
        table.bar(off <= 60),
    )

    print()
    ratios = Table("how many times cheaper", "ratio", "bar", "")
    for name, cheap, dear, least in (
        ("section than an OpenTelemetry span", section, span, 100),
        ("section than an idle record_function", section, record_function, 40),
    ):
        middle, low, high = ratio_interval(dear, cheap)
        ratios.row(
            name,
            f"{middle:.1f} [{low:.1f}, {high:.1f}]",
            f"at least {least}",
            ratios.bar(middle >= least),
        )
    mark = [
        marked - plain for marked, plain in zip(modules["marked"], modules["plain"], strict=True)
    ]
    pair = [
        hooked - plain for hooked, plain in zip(modules["hooked"], modules["plain"], strict=True)
    ]
    middle, low, high = ratio_interval(pair, mark)
    ratios.row(
        f"a module's forward mark ({statistics.median(mark):.0f} ns) than an empty public hook pair"
        f" ({statistics.median(pair):.0f} ns)",
        f"{middle:.1f} [{low:.1f}, {high:.1f}]",
        "at least 5",
        ratios.bar(middle >= 5),
    )
    return table.missed + ratios.missed
