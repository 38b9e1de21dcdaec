"""Fuzz the native recorder: `python fuzz_recorder.py SEED CALLS` ends regularly or crashes.

A call may raise only the listed Python errors, which a caller's mistake can cause.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchlens_perf import _native
from torchlens_perf.run.ring import RingFile, RingReader

CAPACITY = 64
EXPECTED = (
    TypeError,
    ValueError,
    OverflowError,
    ReferenceError,
    RuntimeError,
    BufferError,
    AttributeError,
)


class Hostile:
    """An argument that runs code when it is evaluated."""

    def __init__(self, fuzz: Fuzz) -> None:
        self._fuzz = fuzz

    def __index__(self) -> int:
        return self._fuzz.act()

    __int__ = __index__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fuzz.act()


class Fuzz:
    """One recorder at a time on a small ring, with objects made from it."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self._folder = folder
        self._files = 0
        self._depth = 0
        self._issued: list[Any] = [b"", None]
        self._modules: list[Any] = []
        self._names = [f"name {number}" for number in range(300)]
        self.closed = 0
        self._open()

    def _open(self) -> None:
        self._files += 1
        self.ring = RingFile(self._folder / str(self._files), CAPACITY)
        self.recorder = _native.Recorder(self.ring.buffer, self._intern)
        if self.random.random() < 0.5:
            self.recorder.start_collectives(self.ring.intern("wait"))
        self.recorder.activate()

    def _intern(self, name: str) -> Any:
        self.act()
        if self.random.random() < 0.05:
            return self.random.choice([None, -1, 1 << 70, "x"])
        return self.ring.intern(name) if not self.ring.buffer.closed else 0

    def act(self) -> int:
        """Run random Python code inside a recording call: other calls, the end of the watch, an
        error, or nothing.
        """
        self._depth += 1
        try:
            choice = self.random.random()
            if choice < 0.2 and self._depth < 6:
                self.call()
            elif choice < 0.23:
                self.recorder.close()
            elif choice < 0.25:
                raise ValueError("planted")
        finally:
            self._depth -= 1
        return self.number()

    def _device_clock(self) -> Any:
        """Return a clock of events in Python that run random code."""
        fuzz, events = self, SimpleNamespace(idle_stream=0)

        def record(event: Any, stream: int) -> int:
            return fuzz.act()

        event = SimpleNamespace(
            query=lambda: fuzz.act() and fuzz.random.random() < 0.7,
            elapsed_time=lambda later: float(fuzz.act()),
        )
        events.create_event, events.record = lambda: event, record
        return _native.DeviceClock(
            events, (), lambda index: fuzz.random.randrange(3), 0, 0, None, 50
        )

    def number(self) -> int:
        return self.random.choice(
            [
                0,
                1,
                2,
                3,
                4,
                5,
                6,
                7,
                8,
                16,
                18,
                63,
                64,
                255,
                1 << 31,
                1 << 32,
                (1 << 63) - 1,
                -1,
                -(1 << 63),
            ]
        )

    def argument(self) -> Any:
        if self.random.random() < 0.9:
            return self.number()
        return self.random.choice(
            [None, "x", b"", 1.5, 1 << 64, -(1 << 70), [], Hostile(self), self.recorder, True]
        )

    def function(self) -> Any:
        return self.random.choice(
            [None, Hostile(self), len, lambda *args, **kwargs: 1, "no function"]
        )

    def call(self) -> None:
        """Make one random call with random arguments."""
        number, recorder = self.random.random(), self.recorder
        try:
            if number < 0.6:
                self._mark(recorder)
            elif number < 0.75:
                self._section()
            elif number < 0.85:
                self._module(recorder)
            else:
                self._rare(recorder)
        except EXPECTED:
            pass

    def _mark(self, recorder: Any) -> None:
        name = self.random.choice(
            ["begin", "end", "drop", "record_span", "next_step", "add_overhead", "issue",
             "claim", "part_over", "begin_wait", "end_wait", "record_completed", "pause_own_work",
             "end_step_by_hand", "now_ns", "start_thread_time", "computes_backward", "start_collectives"]
        )  # fmt: skip
        usual = {"begin": 2, "end": 3, "drop": 2, "record_span": 4, "issue": 5,
                 "pause_own_work": 1, "end_step_by_hand": 1}  # fmt: skip
        count = usual.get(name, 0) if self.random.random() < 0.8 else self.random.randrange(12)
        result = getattr(recorder, name)(*(self.argument() for _ in range(count)))
        if name == "issue":
            self._issued[self.random.randrange(2)] = result
        if self.random.random() < 0.1:
            recorder.returned(
                self.random.choice(self._issued),
                self.random.randrange(-1, 6),
                *[1][: number_of(self)],
            )

    def _section(self) -> None:
        name = self.random.choice(self._names)
        section = _native.section(
            name if self.random.random() < 0.99 else self.random.choice([None, 3, b"x"])
        )
        choice = self.random.random()
        if choice < 0.5:
            with section:
                self.act()
        elif choice < 0.75:
            section.__enter__()
        else:
            section.__exit__(*(self.argument() for _ in range(self.random.randrange(4))))
        repr(section)

    def _module(self, recorder: Any) -> None:
        if len(self._modules) < 50:
            observers = {
                key: self.function()
                for key in ("before", "after", "forward")
                if self.random.random() < 0.3
            }
            self._modules.append(
                _native.ModuleCall(recorder, self.argument(), self.function(), **observers)
            )
        else:
            self._modules.pop(self.random.randrange(50))
        if self._modules:
            self.random.choice(self._modules)(*range(self.random.randrange(10)), key=1)

    def _rare(self, recorder: Any) -> None:
        choice = self.random.randrange(11)
        if choice == 0:
            recorder.set_nvtx(self.function(), self.function(), ["step"] * self.random.randrange(3))
        elif choice == 1:
            clock = self.random.choice([None, self._device_clock(), 3])
            recorder.set_device_clock(
                clock, *(self.function() for _ in range(self.random.randrange(4)))
            )
            recorder.end_device_step()
            recorder.read_last_device_times()
            recorder.queue_device_span(*(self.random.randrange(-1, 9) for _ in range(4)))
        elif choice == 2:
            recorder.sampled = self.random.choice([0, 1, -1, 1 << 40, "x"])
        elif choice == 3:
            _ = (
                recorder.step,
                recorder.written,
                recorder.tool_ns,
                recorder.waited_ns,
                recorder.lost_ends,
                recorder.closed,
            )
        elif choice == 4:
            recorder.intern(self.random.choice([*self._names[:3], None, 3]))
        elif choice == 5:
            self.random.choice([recorder.activate, recorder.deactivate])()
        elif choice == 6 and self.random.random() < 0.1:
            self.random.choice([recorder.close, recorder.abandon])()
        elif choice == 7:
            bare = self.random.choice(
                [_native.Recorder, _native.ModuleCall, _native.Section, type(_native.section("x"))]
            )
            made = bare.__new__(bare)
            for name in (
                "now_ns",
                "close",
                "begin_wait",
                "activate",
                "__call__",
                "step",
                "written",
            ):
                getattr(made, name, lambda: None)()
        elif choice == 8:
            _native.Recorder(
                bytearray(self.random.randbytes(self.random.randrange(0, 5000))), self._intern
            )
        elif choice == 9:
            _native.timed_wait(self.function())(self.argument())
        elif choice == 10:
            recorder.__init__(self.ring.buffer, self._intern)

    def renew(self) -> None:
        """Read the ring and start another recorder, if the current one is closed, or at random."""
        if self.recorder.closed or self.random.random() < 0.001:
            self.recorder.close()
            self.closed += 1
            reader = RingReader(self.ring.path)
            reader.read_records(final=True)
            reader.read_open_spans()
            reader.read_group_progress()
            reader.close()
            self.ring.close()
            self.ring.path.unlink()
            self._modules.clear()
            self._open()


def number_of(fuzz: Fuzz) -> int:
    return fuzz.random.randrange(2)


def main(seed: int, calls: int) -> None:
    sys.unraisablehook = lambda raised: None
    os.environ.pop("TORCHLENS_PERF_RAISE", None)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        fuzz = Fuzz(seed, Path(folder))
        for _ in range(calls):
            fuzz.call()
            fuzz.renew()
        fuzz.recorder.close()
        fuzz.ring.close()
    print(calls, fuzz.closed)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
