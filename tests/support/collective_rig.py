"""A collective recorder for tests, with short methods for the calls that taps and timed waits make."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.recorders import Rig
from torchlens_perf.recorder.recorder import EndDetection
from torchlens_perf.run.ring import Kind

NAME = "allreduce group=0 dtype=float32"


class CollectiveRig(Rig):
    """A collective recorder, driven by short methods."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.recorder.start_collectives(self.ring.intern("wait"))

    def issue(
        self,
        sequence: int = 0,
        *,
        group: int = 0,
        name: str = NAME,
        flags: int = 0,
        size: int = 4096,
    ) -> Any:
        """Record that an operation is about to be issued."""
        return self.recorder.issue(self.ring.intern(name), group, sequence, flags, size)

    def call(self, sequence: int, end: EndDetection, *, call_ns: int = 5, **operation: Any) -> None:
        """Record an operation whose issuing call takes `call_ns`."""
        issued = self.issue(sequence, **operation)
        self.clock.advance(call_ns)
        self.recorder.returned(issued, int(end))

    def wait(self, nanoseconds: int) -> None:
        """Record a wait of the calling thread."""
        self.recorder.begin_wait()
        self.clock.advance(nanoseconds)
        self.recorder.end_wait()

    def collectives(self) -> list[dict[str, Any]]:
        """Return the collectives that were written since the last call."""
        return [each for each in self.records() if each["kind"] == Kind.COLLECTIVE]


def sequence(record: dict[str, Any]) -> int:
    return record["value1"] & 0xFFFFFFFF


def on_autograds_thread(function: Callable[..., Any], *args: Any) -> None:
    """Run the function on a thread named like autograd's device threads."""

    def named() -> None:
        Path("/proc/thread-self/comm").write_text("pt_autograd_0")
        function(*args)

    on_thread(named)


def on_thread(function: Callable[..., Any], *args: Any) -> None:
    """Run the function on a thread other than the recorder's owner."""
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()
