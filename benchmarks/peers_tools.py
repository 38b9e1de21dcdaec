"""Tools that record training steps, each used as its documentation shows. Imported by workers in
the tools' own environments.
"""

from __future__ import annotations

import contextlib
import os
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
    section: Section = staticmethod(no_section)
    """Marks a part of the script."""
    marks_phases = True
    """False if the tool finds forward, backward and optimizer by itself."""

    def __init__(self, every_module: bool) -> None:
        self.every_module = every_module

    def load(self) -> None:
        """Import the tool."""

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        """Start to record. Files go to `out`."""

    def step(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self.section("step") if self.marks_phases else contextlib.nullcontext()

    def phase(self, name: str) -> AbstractContextManager[Any]:
        return self.section(name) if self.marks_phases else contextlib.nullcontext()

    def mark_modules(self, model: nn.Module) -> None:
        """Mark each module's forward call by hooks, unless the tool does."""
        for name, module in model.named_modules() if self.marks_phases else ():
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

    def end(self) -> None:
        """Stop to record, and write what the tool writes."""


class TorchlensPerf(Tool):
    packages = ("torchlens-perf",)
    marks_phases = False

    def load(self) -> None:
        import torchlens_perf

        self._perf = torchlens_perf
        self.section = torchlens_perf.section

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        modules = "all" if self.every_module else "auto"
        self._watch = self._perf.watch(model, optimizer, dir=str(out), modules=modules).start()

    def end(self) -> None:
        self._watch.stop()


class OpenTelemetry(Tool):
    """Spans of the SDK in batches. The exporter drops them, so the cost of sending is missing."""

    packages = ("opentelemetry-sdk",)

    def load(self) -> None:
        from opentelemetry.sdk import trace
        from opentelemetry.sdk.trace import export

        class Drop(export.SpanExporter):
            def export(self, spans: Any) -> Any:
                return export.SpanExportResult.SUCCESS

        self._provider = trace.TracerProvider()
        self._processor = export.BatchSpanProcessor(Drop())

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self._provider.add_span_processor(self._processor)
        self.section = self._provider.get_tracer("benchmark").start_as_current_span

    def end(self) -> None:
        self._provider.shutdown()


class RecordFunction(Tool):
    """Marks of torch while no profiler runs."""

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        from torch.profiler import record_function

        self.section = record_function


class TorchProfiler(RecordFunction):
    """The profiler of torch on all steps, with the activities of the CPU."""

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        from torch.profiler import ProfilerActivity, profile

        super().begin(out, model, optimizer)
        self._trace = out / "trace.json"
        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._profile.start()

    def end(self) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._trace))


class Nvtx(Tool):
    """Ranges of NVTX while no Nsight Systems runs."""

    packages = ("nvtx",)

    def load(self) -> None:
        import nvtx

        self.section = nvtx.annotate


class TraceML(Tool):
    """The recorder of the process, and an aggregator that the benchmark starts."""

    packages = ("traceml-ai",)
    marks_phases = False

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


class ResiliencyExt(Tool):
    """Sections of the straggler detector. Without CUDA, its CUPTI module is replaced, and no
    kernels are timed.
    """

    packages = ("nvidia-resiliency-ext",)

    def load(self) -> None:
        import torch

        if not torch.cuda.is_available():
            module = types.ModuleType("nvrx_cupti_module")
            module.CuptiProfiler = _NoCupti  # type: ignore[attr-defined]
            sys.modules["nvrx_cupti_module"] = module
        from nvidia_resiliency_ext.straggler import Detector

        self._detector = Detector

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self._detector.initialize(gather_on_rank0=False)
        self.section = lambda name: self._detector.detection_section(name, profile_cuda=False)

    def end(self) -> None:
        self._detector.shutdown()


class _NoCupti:
    def __init__(self, **settings: Any) -> None:
        pass

    def initialize(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class Lightning(Tool):
    """The profiler that Lightning's Trainer uses with `profiler="simple"`."""

    packages = ("lightning",)

    def load(self) -> None:
        from lightning.pytorch.profilers import SimpleProfiler

        self._class = SimpleProfiler

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self._profiler = self._class(dirpath=out, filename="profile")
        self.section = self._profiler.profile

    def end(self) -> None:
        self._profiler.describe()


class VizTracer(Tool):
    """Every Python call. The newest million events are kept."""

    packages = ("viztracer",)

    def load(self) -> None:
        import viztracer

        self._viztracer = viztracer

    def begin(self, out: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self._tracer = self._viztracer.VizTracer(output_file=str(out / "trace.json"), verbose=0)
        self._tracer.start()
        self.section = self._tracer.log_event

    def mark_modules(self, model: nn.Module) -> None:
        """Each module's call is a Python call."""

    def end(self) -> None:
        self._tracer.stop()
        self._tracer.save()


class DeepSpeedTimers(Tool):
    """Timers of DeepSpeed, which its engine starts and stops around each phase."""

    packages = ("deepspeed",)

    def load(self) -> None:
        from deepspeed.utils.timer import SynchronizedWallClockTimer

        self._timers = SynchronizedWallClockTimer()
        self.section = self._section

    @contextlib.contextmanager
    def _section(self, name: str) -> Any:
        timer = self._timers(name)
        timer.start()
        yield
        timer.stop()
        timer.elapsed(reset=True)


# Name, class, environment.
TOOLS: dict[str, tuple[type[Tool], str]] = {
    "none": (Tool, "torch"),
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
# TraceML has neither sections nor times of modules. The timers of DeepSpeed time no module.
WITHOUT_SECTIONS = frozenset({"TraceML"})
WITHOUT_MODULES = frozenset(
    {"TraceML", "DeepSpeed timers", "nvidia-resiliency-ext", "torch.profiler"}
)
