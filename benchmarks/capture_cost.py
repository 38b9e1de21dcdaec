"""Cost of a capture: the captured steps, the pauses at its start and end, and the steps after it.

The steps after a capture are compared with those of processes that were never captured. All
processes alternate, one block of steps at a time.
"""

from __future__ import annotations

import gzip
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

import torchlens_perf as perf
from benchmarks.gpt import GPT
from benchmarks.measure import Table, ratio_interval
from torchlens_perf.run import captures
from torchlens_perf.run.captures import BY_USER, RAW_TRACE, Outcome, Request

STEPS, CAPTURES, AROUND = 3, 15, 30
ROUNDS, BLOCK = 300, 16
SIZES = {
    "all dispatch": {"width": 32, "context": 8},
    "width 256, 128 tokens": {"width": 256, "context": 128},
}


def main() -> int:
    """Print the tables. Return the number of missed bars."""
    torch.set_num_threads(1)
    table = Table(
        "a GPT of 84 modules", "a step ms", "captured ms", "begin ms", "end and writing ms", "of 3 steps: events", "MB",
        "compressed KB",
    )  # fmt: skip
    for size, arguments in SIZES.items():
        for python in (False, True):
            table.row(f"{size}{', Python frames' if python else ''}", *captured(arguments, python))
    print()
    lasting = Table(
        "after five captures, compared with a process that is never captured",
        "before 1",
        "bar (upper end)",
        "",
    )
    before, after = lasting_ratios()
    middle, low, high = ratio_interval(after, before)
    lasting.row(
        "a step", f"{middle:.4f} [{low:.4f}, {high:.4f}]", "at most 1.01", lasting.bar(high <= 1.01)
    )
    missing = Path("/dev/shm/torchlens-perf-benchmark.capture")
    begin = time.perf_counter_ns()
    for _ in range(10_000):
        os.path.exists(missing)
    lasting.row(
        "check for a capture request, once in 50 ms",
        f"{(time.perf_counter_ns() - begin) / 1e7:.1f} us",
        "",
        "",
    )
    return table.missed + lasting.missed


def stepper(width: int, context: int) -> Callable[[], None]:
    """Return a function that makes one training step."""
    model = GPT(width=width, context=context)
    optimizer = torch.optim.AdamW(model.parameters())
    ids, targets = torch.randint(0, 256, (1, context)), torch.randint(0, 256, (context,))

    def step() -> None:
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def captured(arguments: dict[str, int], python: bool) -> list[str]:
    """Return the cells of one row."""
    step = stepper(**arguments)
    plain_ms, captured_ms, begin_ms, end_ms = [], [], [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        perf.watch(sidecar=False, report="off", dir=folder) as watch,
    ):
        for _ in range(CAPTURES):
            asking = Asking(watch, Path(folder), python)
            times_ms: list[float] = []
            for number in range(AROUND + 2 + STEPS + 1):
                begin = time.perf_counter_ns()
                step()
                times_ms.append((time.perf_counter_ns() - begin) / 1e6)
                if number == AROUND:
                    asking.ask()
            # The capture starts at the end of step AROUND + 1 and is written at the end of the last
            # captured step.
            usual_ms = statistics.median(times_ms[:AROUND])
            middle_ms = statistics.median(times_ms[AROUND + 2 : AROUND + 1 + STEPS])
            plain_ms.append(usual_ms)
            captured_ms.append(middle_ms)
            begin_ms.append(times_ms[AROUND + 1] - usual_ms)
            end_ms.append(times_ms[AROUND + 1 + STEPS] - middle_ms)
            assert asking.outcome().steps == STEPS
    trace = asking.trace
    return [
        *(f"{statistics.median(each):.2f}" for each in (plain_ms, captured_ms, begin_ms, end_ms)),
        str(trace.count(b'"ph": ')), f"{len(trace) / 1e6:.1f}", f"{len(gzip.compress(trace, 1)) / 1e3:.0f}",
    ]  # fmt: skip


class Asking:
    """Requests a capture of this process in the same way as its sidecar."""

    def __init__(self, watch: perf.Watch, folder: Path, python: bool) -> None:
        session = watch._session
        assert session is not None
        self._session = session
        self._folder = folder / "files"
        now_s = time.time()
        self._request = Request(
            "one", BY_USER, now_s, 0, (0,), 0, STEPS, python=python, folder=str(self._folder)
        )
        self.trace = b""

    def ask(self) -> None:
        """Request a capture, which the end of the next step starts."""
        captures.write_capture_file(
            captures.ring_request_path(self._session.ring_path), self._request
        )
        self._session.recorder.due_ns = 0

    def outcome(self) -> Outcome:
        """Return the outcome of the capture, and remove the capture's files."""
        answer = captures.ring_outcome_path(self._session.ring_path)
        outcome = captures.read_capture_file(answer, Outcome)
        answer.unlink()
        self.trace = (self._folder / RAW_TRACE).read_bytes()
        (self._folder / RAW_TRACE).unlink()
        return outcome


def lasting_ratios() -> tuple[list[float], list[float]]:
    """Return the step times of a captured process relative to those of an uncaptured one, by round,
    before and after captures.

    Two processes can differ by a percent for their whole life. Ratios before and after captures are
    therefore compared; a ratio excludes changes that slow both processes.
    """
    draw = random.Random(1)
    with Trainer() as never, Trainer() as captured:

        def ratios() -> list[float]:
            found = []
            for _ in range(ROUNDS):
                times = {
                    trainer: trainer.ask("block") for trainer in draw.sample([never, captured], 2)
                }
                found.append(times[captured] / times[never])
            return found

        before = ratios()
        captured.ask("capture")
        return before, ratios()


class Trainer:
    """A child process that trains under a watch, one block at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def __enter__(self) -> Trainer:
        self.ask("block")
        return self

    def ask(self, what: str) -> float:
        """Run a block of steps, or five captures. Return ns per step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(what, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def __exit__(self, *error: object) -> None:
        self._process.communicate()


def train() -> None:
    """Execute the command on each line of stdin."""
    torch.manual_seed(0)
    step = stepper(**SIZES["all dispatch"])
    with (
        tempfile.TemporaryDirectory() as folder,
        perf.watch(sidecar=False, report="off", dir=folder) as watch,
    ):
        for _ in range(20):
            step()
        for line in sys.stdin:
            begin = time.perf_counter_ns()
            if line == "block\n":
                for _ in range(BLOCK):
                    step()
            else:
                for _ in range(5):
                    asking = Asking(watch, Path(folder), python=False)
                    asking.ask()
                    for _ in range(STEPS + 2):
                        step()
                    asking.outcome()
            print((time.perf_counter_ns() - begin) / BLOCK, flush=True)


if __name__ == "__main__":
    train()
