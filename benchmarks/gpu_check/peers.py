"""Measure other tools on the launch-bound loop's steps, each tool in a process of its own.

Tools cannot be started again and again in one process: steps without the tool come first.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_check.lines import Checks
from benchmarks.gpu_check.loops import SHORT_KERNEL_S, Loop
from benchmarks.peers_tools import TOOLS, RecordFunction
from benchmarks.planted_on import DEVICES

_BLOCK, _PHASE_S, _LEAST = 20, 3.0, 4
_PROGRAM = "traceml"


class DeviceProfiler(RecordFunction):
    """torch.profiler with all of its activities, which include the device's kernels."""

    def begin(self, out: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().begin(out, model, optimizer)
        self._profile = torch.profiler.profile()
        self._profile.start()

    def end(self) -> None:
        self._profile.stop()


def peer(checks: Checks, name: str) -> None:
    """Measure one tool, or say why it is not here."""
    part, tool_class = (
        f"peer-{name}",
        DeviceProfiler if name == "torch.profiler" else TOOLS[name][0],
    )
    reason = find_obstacle(tool_class.packages, name)
    if reason:
        checks.missing(part, "cost of a step", reason)
        return
    on = DEVICES[os.environ["GPU_CHECK_DEVICE"]]()
    on.load(SHORT_KERNEL_S, 0)
    loop, wait = Loop("launch", on.name), torch.get_device_module(on.name).synchronize
    # Our report is not waited for.
    os.environ["TORCHLENS_PERF_EXIT_TIMEOUT_S"] = "0"
    tool = tool_class(False)
    plain_ms = _blocks(lambda: loop.step(_no_mark), wait)
    with tempfile.TemporaryDirectory() as folder, _helper(name, Path(folder)):
        tool.load()
        tool.begin(Path(folder), loop.model, loop.optimizer)

        def step() -> None:
            with tool.step(loop.model):
                loop.step(_no_mark)

        report_cost(checks, part, plain_ms, _blocks(step, wait))
        tool.end()


def find_obstacle(packages: Sequence[str], name: str) -> str:
    """Return why a tool cannot run here, or ""."""
    for package in packages:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package != "torchlens-perf":
                return f"{package} is not installed"
    if name == "TraceML" and _find_program() is None:
        return f"the command {_PROGRAM} is not on PATH"
    return ""


def report_cost(
    checks: Checks, part: str, plain_ms: Sequence[float], with_ms: Sequence[float]
) -> None:
    """Report what a tool adds to a step, with a 95 % interval of the ratio of medians."""
    draw = np.random.default_rng(1)
    plain, under = (
        np.median(draw.choice(np.asarray(times), (4000, len(times))), axis=1)
        for times in (plain_ms, with_ms)
    )
    low, high = np.quantile(100 * (under / plain - 1), (0.025, 0.975))
    median = 100 * (statistics.median(with_ms) / statistics.median(plain_ms) - 1)
    value = f"{median:+.1f} % [{low:+.1f}, {high:+.1f}] of {statistics.median(plain_ms):.2f} ms"
    checks.value(part, "cost of a step", value)


def _no_mark(phase: str, border: int) -> None:
    pass


def _blocks(step: Callable[[], None], wait: Callable[[], None]) -> list[float]:
    """Return the mean time of a step in ms in each block."""
    for _ in range(_BLOCK):
        step()
    wait()
    found, until_s = [], time.monotonic() + _PHASE_S
    while len(found) < _LEAST or time.monotonic() < until_s:
        begin_ns = time.perf_counter_ns()
        for _ in range(_BLOCK):
            step()
        wait()
        found.append((time.perf_counter_ns() - begin_ns) / _BLOCK / 1e6)
    return found


@contextlib.contextmanager
def _helper(name: str, folder: Path) -> Iterator[None]:
    """Run the process that TraceML needs in addition to the job."""
    program = _find_program()
    if name != "TraceML" or program is None:
        yield
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = os.environ["PEER_PORT"] = str(server.getsockname()[1])
    command = [
        program, "serve", "--mode", "summary", "--logs-dir", str(folder), "--run-name", "run", "--nnodes", "1",
        "--nproc-per-node", "1", "--aggregator-port", port,
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=folder, stdout=sys.stderr)
    try:
        _wait_for_port(int(port))
        yield
    finally:
        process.kill()
        process.wait()


def _wait_for_port(port: int, timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)


def _find_program() -> str | None:
    beside = shutil.which(_PROGRAM, path=str(Path(sys.executable).parent))
    return beside or shutil.which(_PROGRAM)
