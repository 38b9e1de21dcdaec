"""Graph captures on another thread while a watch records device marks.

A device query in the wrong mode would make a capture fail.
"""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import AbstractContextManager, nullcontext

import torch

import torchlens_perf as perf
from benchmarks.gpu_check.gpt import trainer
from benchmarks.gpu_check.lines import Checks

# In this time the watch reads both clocks and reduces windows several times, as it does once a
# second.
SECONDS = 3.0
# This number of operations makes a capture last some milliseconds.
_OPERATIONS, LEAST = 100, 30


class Capturing(threading.Thread):
    """Captures a small graph repeatedly in the strictest mode, and compares the results of its
    replays.
    """

    def __init__(self) -> None:
        super().__init__(name="captures", daemon=True)
        self.captured = self.wrong = 0
        self.lost: list[str] = []
        self.stop = False

    def run(self) -> None:
        """Capture until the thread is stopped."""
        stream = torch.cuda.Stream()
        x = torch.ones(1024, device="cuda")
        while not self.stop:
            graph = torch.cuda.CUDAGraph()
            try:
                # torch.cuda.graph() would wait for the whole device and empty the cache first.
                with torch.cuda.stream(stream):
                    graph.capture_begin(capture_error_mode="global")
                    y = x
                    for _ in range(_OPERATIONS):
                        y = y + 1
                    graph.capture_end()
                    graph.replay()
                stream.synchronize()
            except RuntimeError as error:
                self.lost.append(str(error).splitlines()[0])
                if len(self.lost) > 3:
                    return
            else:
                self.captured += 1
                self.wrong += y[0].item() != 1 + _OPERATIONS
            time.sleep(0.002)


def beside(checks: Checks) -> None:
    """Train on this thread and capture on another one, without a watch and with every hook."""
    model, step = trainer(batch=1, length=128, layers=4)
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    perf.device_section("step")
    lost_without = 0
    for watched in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            watch: AbstractContextManager[object] = nullcontext()
            if watched:
                watch = perf.watch(model, dir=folder, sidecar=False, report="off", modules="all")
            with watch:
                steps, raised, thread = 0, "", Capturing()
                thread.start()
                stop_s = time.monotonic() + SECONDS
                try:
                    while time.monotonic() < stop_s and thread.is_alive():
                        with perf.device_section("step") if watched else nullcontext():
                            step()
                        steps += 1
                except RuntimeError as error:
                    raised = str(error).splitlines()[0]
                thread.stop = True
                thread.join(20)
                if not raised:
                    torch.cuda.synchronize()
        if not watched:
            lost_without = len(thread.lost) + bool(raised)
        judge_captures(checks, thread, steps, raised, watched=watched, lost_without=lost_without)


def judge_captures(
    checks: Checks, thread: Capturing, steps: int, raised: str, *, watched: bool, lost_without: int
) -> None:
    """Expect captures without a loss. raised: what the training thread raised, or ""."""
    value = (
        f"{thread.captured} captured, {len(thread.lost)} lost, {thread.wrong} wrong, {steps} steps"
    )
    value += "".join(f"; {words[:100]}" for words in [*thread.lost[:1], raised] if words)
    what = f"captures on another thread, {'with' if watched else 'without'} a watch"
    if not watched:
        checks.value("captures-on-thread", what, value)
    elif lost_without:
        checks.missing("captures-on-thread", what, f"lost without one, too; {value}")
    else:
        met = not thread.lost and not raised and not thread.wrong and thread.captured >= LEAST
        checks.bar("captures-on-thread", what, value, f"at least {LEAST}, none lost or wrong", met)
