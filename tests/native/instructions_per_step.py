"""Run the marks of training steps on stand-ins for torch's objects, for test_instructions.py.

usage: instructions_per_step.py RING STEPS

torch is not imported, because valgrind takes minutes to load it. The stand-ins are builtin
functions, so most of the executed instructions are the recorder's.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from pathlib import Path

from torchlens_perf import _native
from torchlens_perf.run.ring import RingFile

MODULES = 16


class Tensor(str):
    """Stand-in for a tensor without a gradient. Its elements are characters."""

    grad = None
    numel = str.__len__


class Optimizer:
    """Stand-in for an optimizer."""


class Layer:
    """Stand-in for a module that calls other modules."""

    def __init__(self, calls: list[_native.ModuleCall]) -> None:
        self._calls = calls

    def __call__(self, batch: list[Tensor]) -> None:
        for call in self._calls:
            call(batch)


def unexpected(*arguments: object) -> None:
    raise AssertionError(f"Python was called with {arguments}")


def main(ring_path: str, steps: int) -> None:
    ring = RingFile(Path(ring_path), 1024)
    recorder = _native.Recorder(ring.buffer, ring.intern, None)
    recorder.activate()
    optimizer, parameter, answers = Optimizer(), Tensor(), iter([True])
    recorder.use_torch(
        [], list, "".format, Tensor, Tensor, "a".isalpha, threading.local(),
    )  # fmt: skip
    recorder.settle(
        weakref.ref(optimizer), 1, ((id(optimizer), 1),), weakref.ref(parameter), (0, 0, 0), 0
    )
    recorder.due_ns = recorder.due_step = 1 << 62
    recorder.workload = -1
    inner = [_native.ModuleCall(recorder, 10 + each, len) for each in range(MODULES)]
    # The first call asks the observer, which answers that only counting is left.
    model = _native.ModuleCall(recorder, 2, Layer(inner), None, None, lambda result: next(answers))
    begin = _native.native_hook("optimizer_begins", unexpected)
    end = _native.native_hook("optimizer_ended", unexpected)
    backward = _native.native_hook("backward", unexpected, recorder, list, 3, unexpected)
    data = _native.native_hook("next_batch", unexpected, recorder, next, 4, unexpected)
    loader, positional, named = itertools.repeat([Tensor("batch")]), (optimizer,), {}
    for _ in range(steps):
        model(data(loader))
        backward()
        begin(optimizer, positional, named)
        end(optimizer, positional, named)
    assert recorder.step == recorder.quiet_steps == steps, (recorder.step, recorder.quiet_steps)
    assert recorder.written == steps * (MODULES + 5), recorder.written
    recorder.close()
    ring.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
