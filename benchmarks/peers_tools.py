"""Tools that record training steps, each used as its documentation shows. Imported by workers in
the tools' own environments.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import struct
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

Section = Callable[[str], AbstractContextManager[Any]]


def no_section(name: str) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


class Tool:
    """No tool. Other tools replace what they do."""

    packages: tuple[str, ...] = ("torch",)
    records = ""
    """What the tool records in this benchmark, and where."""
    has_sections = True
    marks_modules = True
    """False if the tool does not time the calls of modules."""
    has_own_processes = False
    section: Section = staticmethod(no_section)
    """Marks a part of the script."""

    def __init__(self, every_module: bool) -> None:
        self.every_module = every_module

    @classmethod
    def is_idle(cls) -> bool:
        """Return True for marks without a listener."""
        return cls.records.startswith("nothing")

    def load(self) -> None:
        """Import the tool."""

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        """Start to record. Files go to `out`."""

    def step(self, model: nn.Module) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def phase(self, name: str) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def mark_modules(self, model: nn.Module) -> None:
        """Mark the calls of all modules, unless the tool has done so."""

    def end(self) -> None:
        """Stop to record, and write what the tool writes."""

    @staticmethod
    def count_steps(out: Path) -> int | None:
        """Return the number of steps in the tool's results, or None for a tool without results.

        This function runs in the benchmark's own environment after the job has ended.
        """
        return None


class MarkedByScript(Tool):
    """A tool that records sections. The script marks step, phases and modules."""

    def step(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self.section("step")

    def phase(self, name: str) -> AbstractContextManager[Any]:
        return self.section(name)

    def mark_modules(self, model: nn.Module) -> None:
        """Mark each module's forward call by hooks."""
        for name, module in model.named_modules():
            opened: list[AbstractContextManager[Any]] = []

            def enter(
                *_: Any, name: str = name, opened: list[AbstractContextManager[Any]] = opened
            ) -> None:
                opened.append(self.section(name))
                opened[-1].__enter__()

            def leave(*_: Any, opened: list[AbstractContextManager[Any]] = opened) -> None:
                opened.pop().__exit__(None, None, None)

            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)


class TorchlensPerf(Tool):
    packages = ("torchlens-perf",)
    records = (
        "step, data, forward, backward, optimizer, modules, collectives, memory; files of each"
        " step, a verdict and a report, by a process of its own"
    )
    has_own_processes = True

    def load(self) -> None:
        import torchlens_perf

        self._perf = torchlens_perf
        self.section = torchlens_perf.section

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        modules = "all" if self.every_module else "auto"
        self._watch = self._perf.watch(model, optimizer, dir=str(out), modules=modules).start()

    def end(self) -> None:
        self._watch.stop()

    @staticmethod
    def count_steps(out: Path) -> int | None:
        import pyarrow.dataset as ds

        (steps,) = out.glob("*/steps")
        table = ds.dataset(steps, format="parquet", partitioning="hive")
        return int(table.count_rows(filter=ds.field("rank") == 0))


class OpenTelemetry(MarkedByScript):
    """Spans of the SDK in batches. Nothing is sent: batches are encoded and written to a file."""

    packages = ("opentelemetry-sdk",)
    records = "marked parts as spans; batches go as OTLP to a file, by a thread"

    def load(self) -> None:
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
        from opentelemetry.sdk import trace
        from opentelemetry.sdk.trace import export

        class WriteFile(export.SpanExporter):
            def __init__(self, path: Path) -> None:
                self._file = path.open("wb")

            def export(self, spans: Any) -> Any:
                encoded = encode_spans(spans).SerializeToString()
                self._file.write(struct.pack("<I", len(encoded)) + encoded)
                return export.SpanExportResult.SUCCESS

            def shutdown(self) -> None:
                self._file.close()

        self._provider = trace.TracerProvider()
        self._make_processor = lambda path: export.BatchSpanProcessor(WriteFile(path))

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self._provider.add_span_processor(self._make_processor(out / f"spans-{rank()}"))
        self.section = self._provider.get_tracer("benchmark").start_as_current_span

    def end(self) -> None:
        self._provider.shutdown()

    @staticmethod
    def count_steps(out: Path) -> int | None:
        from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

        encoded, position, steps = (out / "spans-0").read_bytes(), 0, 0
        while position < len(encoded):
            (length,) = struct.unpack_from("<I", encoded, position)
            batch = TracesData.FromString(encoded[position + 4 : position + 4 + length])
            position += 4 + length
            steps += sum(
                span.name == "step"
                for resource in batch.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            )
        return steps


class RecordFunction(MarkedByScript):
    """Marks of torch while no profiler runs."""

    records = "nothing: the marks have no listener while no profiler runs"

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        from torch.profiler import record_function

        self.section = record_function


class TorchProfiler(RecordFunction):
    """The profiler of torch on all steps, with the activities of the CPU."""

    records = "every operator and the marked parts, of all steps in memory; a trace at the end"
    marks_modules = False

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        from torch.profiler import ProfilerActivity, profile

        super().begin(out, model, optimizer)
        self._trace = out / f"trace-{rank()}.json"
        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._profile.start()

    def end(self) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._trace))

    @staticmethod
    def count_steps(out: Path) -> int | None:
        return count_events(out / "trace-0.json")


class Nvtx(MarkedByScript):
    """Ranges of NVTX while no Nsight Systems runs."""

    packages = ("nvtx",)
    records = "nothing: the marks have no listener while Nsight Systems does not run"

    def load(self) -> None:
        import nvtx

        self.section = nvtx.annotate


class TraceML(Tool):
    """The recorder of the process, and an aggregator that the benchmark starts."""

    packages = ("traceml-ai",)
    records = (
        "step, data, forward, backward, optimizer, memory; a database and a summary, by a process of"
        " its own"
    )
    has_sections = marks_modules = False
    has_own_processes = True

    def load(self) -> None:
        import traceml_ai

        self._traceml = traceml_ai

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self._traceml.init(
            mode="auto", ui_mode="summary", logs_dir=str(out), session_id="run",
            aggregator_port=int(os.environ["PEER_PORT"]), on_missing_aggregator="raise",
        )  # fmt: skip

    def step(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._traceml.trace_step(model)

    @staticmethod
    def count_steps(out: Path) -> int | None:
        steps = set()
        for path in out.rglob("*"):
            if path.is_file() and path.read_bytes()[:6] == b"SQLite":
                with contextlib.closing(sqlite3.connect(path)) as database:
                    steps |= set(
                        database.execute("SELECT step FROM step_time_samples WHERE rank = 0")
                    )
        return len(steps)


class ResiliencyExt(MarkedByScript):
    """Sections of the straggler detector. Without CUDA, its CUPTI module is replaced, and no
    kernels are timed.
    """

    packages = ("nvidia-resiliency-ext",)
    records = "marked parts, the newest 8,192 durations in memory; without CUDA no kernels"
    marks_modules = False

    def load(self) -> None:
        import torch

        if not torch.cuda.is_available():
            replace_cupti()
        from nvidia_resiliency_ext.straggler import Detector

        self._detector = Detector

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self._out = out
        self._detector.initialize(gather_on_rank0=False)
        self.section = lambda name: self._detector.detection_section(name, profile_cuda=False)

    def end(self) -> None:
        durations = self._detector.custom_sections["step"].cpu_elapsed_times
        save_count(self._out, sum(each > 0 for each in durations))
        self._detector.shutdown()

    @staticmethod
    def count_steps(out: Path) -> int | None:
        return read_count(out)


def replace_cupti() -> None:
    """Let nvidia-resiliency-ext be imported without CUDA: its module of CUPTI does nothing."""
    module = types.ModuleType("nvrx_cupti_module")
    module.CuptiProfiler = _NoCupti  # type: ignore[attr-defined]
    sys.modules["nvrx_cupti_module"] = module


class _NoCupti:
    def __init__(self, **settings: Any) -> None:
        pass

    def initialize(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class Lightning(MarkedByScript):
    """The profiler that Lightning's Trainer uses with `profiler="simple"`."""

    packages = ("lightning",)
    records = "marked parts, all durations in memory; a table of sums at the end"

    def load(self) -> None:
        from lightning.pytorch.profilers import SimpleProfiler

        self._class = SimpleProfiler

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self._profiler = self._class(dirpath=out, filename=f"profile-{rank()}")
        self.section = self._profiler.profile

    def end(self) -> None:
        self._profiler.describe()

    @staticmethod
    def count_steps(out: Path) -> int | None:
        (path,) = out.glob("*profile-0.txt")
        (found,) = re.findall(r"^\|\s+step\s+\|[^|]+\|\s+(\d+)", path.read_text(), re.MULTILINE)
        return int(found)


class VizTracer(MarkedByScript):
    """Every Python call. The newest million events are kept."""

    packages = ("viztracer",)
    records = (
        "every Python call and the marked parts, the newest million in memory; a trace at the end"
    )

    def load(self) -> None:
        import viztracer

        self._viztracer = viztracer

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self._tracer = self._viztracer.VizTracer(
            output_file=str(out / f"trace-{rank()}.json"), verbose=0
        )
        self._tracer.start()
        self.section = self._tracer.log_event

    def mark_modules(self, model: nn.Module) -> None:
        """Each module's call is a Python call."""

    def end(self) -> None:
        self._tracer.stop()
        self._tracer.save()

    @staticmethod
    def count_steps(out: Path) -> int | None:
        return count_events(out / "trace-0.json")


class DeepSpeedTimers(MarkedByScript):
    """Timers of DeepSpeed, which its engine starts and stops around each phase."""

    packages = ("deepspeed",)
    records = "marked parts; each duration is read once, as for the engine's log, and dropped"
    marks_modules = False

    def load(self) -> None:
        from deepspeed.utils.timer import SynchronizedWallClockTimer

        self._timers = SynchronizedWallClockTimer()
        self.section = self._section
        self._steps = 0

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self._out = out

    @contextlib.contextmanager
    def _section(self, name: str) -> Any:
        timer = self._timers(name)
        timer.start()
        yield
        timer.stop()
        duration_ms = timer.elapsed(reset=True)
        if name == "step":
            self._steps += duration_ms > 0

    def end(self) -> None:
        save_count(self._out, self._steps)

    @staticmethod
    def count_steps(out: Path) -> int | None:
        return read_count(out)


def rank() -> str:
    return os.environ.get("RANK", "0")


def count_events(path: Path) -> int:
    """Return the number of marked steps in a trace of Chrome's format."""
    # VizTracer adds the place in the script: `step (FILE:LINE)`.
    return len(re.findall(rb'"name": ?"step[" ]', path.read_bytes()))


def save_count(out: Path, steps: int) -> None:
    """Save the count of a tool that writes nothing, outside of the folder for its files."""
    (out.parent / "count").write_text(json.dumps(steps))


def read_count(out: Path) -> int:
    return int(json.loads((out.parent / "count").read_text()))


CONTROL = "none, again (control)"
# Name, class, environment.
TOOLS: dict[str, tuple[type[Tool], str]] = {
    "none": (Tool, "torch"),
    CONTROL: (Tool, "torch"),
    "torchlens_perf": (TorchlensPerf, "torchlens_perf"),
    "OpenTelemetry SDK": (OpenTelemetry, "opentelemetry"),
    "torch.profiler": (TorchProfiler, "torch"),
    "record_function": (RecordFunction, "torch"),
    "NVTX": (Nvtx, "nvtx"),
    "TraceML": (TraceML, "traceml"),
    "nvidia-resiliency-ext": (ResiliencyExt, "nvidia-resiliency-ext"),
    "Lightning profiler": (Lightning, "lightning"),
    "VizTracer": (VizTracer, "viztracer"),
    "DeepSpeed timers": (DeepSpeedTimers, "deepspeed"),
}
