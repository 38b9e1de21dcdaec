"""Measure where a script's time goes without torchlens_perf: by py-spy and by the kernel.

py-spy samples the stack of the training thread 50 times per second, also while the thread sleeps.
Functions of torch in a stack show the phase. The kernel counts the time in which the thread ran,
and in which it was runnable but had no CPU.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RATE_HZ, _KERNEL_INTERVAL_S = 50, 0.1
_START_TIMEOUT_S = 60
_DATA = re.compile(r"torch/utils/data/dataloader\.py$")
# Outside of a DataLoader, the innermost function that matches decides the phase: file and function.
_PHASES = (
    ("communication", re.compile(r"torch/distributed/distributed_c10d\.py$"), re.compile("")),
    ("backward", re.compile(r"torch/autograd/(__init__|graph)\.py$"),
     re.compile(r"backward$|grad$|_engine_run_backward$")),
    ("optimizer", re.compile(r"torch/optim/(?!lr_scheduler)\w+\.py$"),
     re.compile(r"(?!zero_grad|add_param_group|__|<|state_dict|load_state)")),
    ("forward", re.compile(r"torch/nn/modules/module\.py$"),
     re.compile(r"_call_impl$|_wrapped_call_impl$")),
)  # fmt: skip
_TRAINING = ("forward", "backward", "optimizer")


class Frame(NamedTuple):
    """A function on the stack."""

    name: str
    """Name without the class or the function that contains it."""
    file: str


class Interval(NamedTuple):
    """An interval in which the stack did not change. Times are in seconds since py-spy's start."""

    start_s: float
    end_s: float
    stack: tuple[Frame, ...]


class Truth(NamedTuple):
    """The time of one process's training loop by use, as shares of the loop.

    The loop begins with the backward pass after this tool's start in the first step of an optimizer,
    because this step is not recorded. It ends with the last step.
    """

    loop_s: float
    phases: dict[str, float]
    """Shares of the phases, of "tool" (torchlens_perf, also while it starts), and of "host", which is
    all other code. They add up to 1."""
    passes: float
    """Share of functions that only evaluate, sample or generate. It is contained in `phases`."""
    cpu_wait: float | None
    """Share in which the main thread was runnable and had no CPU."""
    running: float | None
    """Share in which the main thread ran."""
    functions: list[tuple[str, float]]
    """Most frequent innermost functions outside of torch, with their shares."""


class Sampler:
    """Samples a process from its start to its end."""

    def __init__(self, pid: int, output: Path) -> None:
        self._pid, self._output = pid, output
        self._kernel: list[tuple[float, int, int]] = []
        self._started_s = 0.0
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the end of the process, and save the kernel's counters next to the stacks."""
        self._thread.join()
        kernel = [
            (at_s - self._started_s, ran_ns, waited_ns) for at_s, ran_ns, waited_ns in self._kernel
        ]
        _kernel_path(self._output).write_text(json.dumps(kernel))

    def _sample(self) -> None:
        spy = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or "py-spy"
        command = [spy, "record", "--pid", str(self._pid), "--idle", "--nonblocking"]
        command += ["--full-filenames"]
        command += ["--rate", str(RATE_HZ), "--duration", "unlimited", "--format", "chrometrace"]
        command += ["--output", str(self._output)]
        # py-spy fails while the interpreter starts.
        for _ in range(_START_TIMEOUT_S):
            self._started_s = time.monotonic()
            with subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ) as sampling:
                while sampling.poll() is None:
                    self._read_kernel()
                    time.sleep(_KERNEL_INTERVAL_S)
            if sampling.returncode == 0 or not Path(f"/proc/{self._pid}").exists():
                return
            time.sleep(1)

    def _read_kernel(self) -> None:
        try:
            text = Path(f"/proc/{self._pid}/task/{self._pid}/schedstat").read_text()
        except OSError:
            return
        ran, waited, _ = map(int, text.split())
        self._kernel.append((time.monotonic(), ran, waited))


def _kernel_path(stacks: Path) -> Path:
    return stacks.with_name(stacks.name.replace("stacks", "kernel"))


def read_truth(stacks: Path, passes: str) -> Truth | None:
    """Return the truth that a sampler has saved; None if the process did not train.

    passes: see Script.passes.
    """
    return find_truth(read_intervals(stacks), json.loads(_kernel_path(stacks).read_text()), passes)


def read_intervals(path: Path) -> list[Interval]:
    """Return the intervals of the thread that trains, from a trace in Chrome's format."""
    open_frames: dict[int, list[Frame]] = defaultdict(list)
    since_us: dict[int, float] = {}
    found: dict[int, list[Interval]] = defaultdict(list)
    for event in json.loads(path.read_text()):
        if event["ph"] not in "BE":
            continue
        thread, at_us = event["tid"], event["ts"]
        stack = open_frames[thread]
        begun_us = since_us.get(thread, at_us)
        if at_us > begun_us and stack:
            found[thread].append(Interval(begun_us / 1e6, at_us / 1e6, tuple(stack)))
        since_us[thread] = at_us
        if event["ph"] == "B":
            name = event["name"].rpartition(".")[2]
            stack.append(Frame(name, event["args"]["filename"]))
        elif stack:
            stack.pop()

    def trained_s(thread: int) -> float:
        training = (each for each in found[thread] if find_phase(each.stack) in _TRAINING)
        return sum(each.end_s - each.start_s for each in training)

    return found[max(found, key=trained_s)] if found else []


def find_phase(stack: Sequence[Frame]) -> str:
    """Return the phase to which a stack belongs. Frames are ordered from the outermost one."""
    if any(_DATA.search(frame.file) for frame in stack):
        return "data"
    for place in reversed(range(len(stack))):
        name, file = stack[place]
        if "/torchlens_perf/" in file:
            # The wrapper of an optimizer's closure is around the script's own code.
            return "host" if name == "__call__" and place < len(stack) - 1 else "tool"
        for phase, files, names in _PHASES:
            if files.search(file) and names.match(name):
                if phase == "forward" and _is_in(stack[:place], "backward"):
                    return "recompute"
                return phase
    return "host"


def _is_in(stack: Iterable[Frame], phase: str) -> bool:
    files, names = next(each[1:] for each in _PHASES if each[0] == phase)
    return any(files.search(frame.file) and names.match(frame.name) for frame in stack)


def find_truth(
    intervals: Sequence[Interval], kernel: Sequence[tuple[float, int, int]], passes: str
) -> Truth | None:
    """Return the shares of the training loop.

    kernel: times in seconds since py-spy's start, with ns for which the thread ran and waited.
    passes: see Script.passes. Return None without a training loop.
    """
    phases = [find_phase(each.stack) for each in intervals]
    bounds = _find_loop(phases, intervals)
    if bounds is None:
        return None
    first, last = bounds
    start_s, end_s = intervals[first].start_s, intervals[last].end_s
    loop_s = sum(each.end_s - each.start_s for each in intervals[first : last + 1])
    shares: dict[str, float] = defaultdict(float)
    functions: dict[str, float] = defaultdict(float)
    only, in_passes = re.compile(passes), 0.0
    for interval, phase in zip(intervals[first : last + 1], phases[first : last + 1], strict=True):
        share = (interval.end_s - interval.start_s) / loop_s
        shares[phase] += share
        in_passes += share * any(only.match(frame.name) for frame in interval.stack)
        own = [frame for frame in interval.stack if "/torch/" not in frame.file]
        if own:
            functions[f"{own[-1].name} ({Path(own[-1].file).name})"] += share
    inside = [each for each in kernel if start_s <= each[0] <= end_s]
    running = cpu_wait = None
    if len(inside) > 1:
        (from_s, ran, waited), (to_s, ran_after, waited_after) = inside[0], inside[-1]
        whole_ns = 1e9 * (to_s - from_s)
        running, cpu_wait = (ran_after - ran) / whole_ns, (waited_after - waited) / whole_ns
    top = sorted(functions.items(), key=lambda item: -item[1])[:8]
    return Truth(loop_s, dict(shares), in_passes, cpu_wait, running, top)


def _find_loop(phases: Sequence[str], intervals: Sequence[Interval]) -> tuple[int, int] | None:
    """Return the places of the first and the last interval of the training loop; None without one.

    An optimizer's step is often too short to be sampled. This tool's start in the first one is not,
    unless the sampler itself started later.
    """
    if "backward" not in phases:
        return None
    last = max(place for place, phase in enumerate(phases) if phase in ("backward", "optimizer"))
    starts = (
        place
        for place, (phase, interval) in enumerate(zip(phases, intervals, strict=True))
        if phase == "tool" and _is_in(interval.stack, "optimizer")
    )
    started = next(starts, 0)
    backward = (place for place in range(started, last + 1) if phases[place] == "backward")
    return next(backward, started), last


def find_rank_processes(root: int, ranks: int) -> Iterator[int]:
    """Yield the processes of the ranks below `root`, once all of them have started."""
    if ranks == 1:
        yield root
        return
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        found = {rank: pid for pid in _descendants(root) for rank in _rank_of(pid)}
        if len(found) == ranks:
            yield from (found[rank] for rank in sorted(found))
            return
        time.sleep(0.2)


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [each for child in map(int, children) for each in (child, *_descendants(child))]


def _rank_of(pid: int) -> list[str]:
    """Return the rank of a process that torchrun started; [] for other processes."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
    values: dict[str, Any] = dict(
        each.decode(errors="replace").split("=", 1) for each in variables if b"=" in each
    )
    return [values["RANK"]] if "RANK" in values and "LOCAL_RANK" in values else []
