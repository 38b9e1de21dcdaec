"""One ring file as the sidecar reads it: how far it is read, counted and kept, and what waits for its step's end."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.run import ring
from torchlens_perf.run.processes import process_started
from torchlens_perf.run.ring import Flag, Kind, Reader, State
from torchlens_perf.store.segments import Origin
from torchlens_perf.verdicts.node_state import Whereabouts

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.sidecar.rings.waiting import WaitingRing
    from torchlens_perf.verdicts.node_state import ProcessState
    from torchlens_perf.verdicts.stragglers.judged_steps import JudgedSteps

HOLD_S = 2.0  # for so long a step of a timed device waits for the device's times
USUAL_STEPS = 32  # from which a rank's usual step time is taken


@dataclasses.dataclass
class RingSource:
    """A ring file being read."""

    path: Path
    reader: Reader
    state: ProcessState
    settings: dict[str, Any]
    kept: int  # sequence number of the last record in a segment
    generation: int  # of the node's processes, see analysis/statistics/restarts.py
    judged: JudgedSteps
    waiting: list[tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]] = dataclasses.field(default_factory=list)
    # Read to its end, after which nothing more comes. Never taken from the saved state: it says that the process
    # has ended, but what an earlier sidecar had read of it was lost with that sidecar.
    read_to_end: bool = False
    settled: bool = False  # read to its end, and all of it is accounted for
    ended_monotonic_s: float = 0.0
    job_store: tuple[str, int] | None = None
    stack_file: str = ""
    simulated: bool = False  # if so, the kernel's figures are those of the process that writes it, not of the rank
    joins: bool = False  # whether it was added to the join of collectives
    delayed_until: int = -1  # the last step that a capture held up
    durations_ns: deque[int] = dataclasses.field(default_factory=lambda: deque(maxlen=USUAL_STEPS))
    step_s: float = dataclasses.field(default_factory=time.monotonic)  # when the step in progress was first seen
    mark_s: float = 0.0  # when something was last seen to be recorded
    _step: int = -1
    _head: int = -1

    def seen(self, step: int, head: int, now_s: float) -> None:
        if step != self._step:
            self._step, self.step_s = step, now_s
        if head != self._head:
            self._head, self.mark_s = head, now_s

    def waited(self, ring: WaitingRing) -> None:
        """How far the ring was, and since when, while nobody read it."""
        self._step, self.step_s, self._head, self.mark_s = ring.step, ring.step_s, ring.head, ring.mark_s

    def delayed_by_capture(self, records: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """By record of whole steps, whether a capture held it up: the others wait for its writing in the first
        collective of the step after it."""
        captured = (records["kind"] == Kind.STEP) & (records["flags"] & Flag.CAPTURED != 0)
        steps = records["step"][captured].astype(np.int64)
        steps = np.unique([*steps, *(steps + 1), self.delayed_until])
        self.delayed_until = int(steps.max())
        return np.isin(records["step"], steps)

    def has_ended(self) -> str:
        """How the process has ended: "closed" or "died"; "" while it runs."""
        if self.reader.counter(ring.STATE) == State.CLOSED:
            return "closed"
        identity = self.state.identity
        # A ring that was closed between the two checks is closed, not dead.
        if process_started(identity.pid) != identity.process_started:
            return "closed" if self.reader.counter(ring.STATE) == State.CLOSED else "died"
        return ""

    def whereabouts(self, now_ns: int) -> Whereabouts | None:
        """What the process is doing just now; None where it has ended, or its clock is none of this node's.

        now_ns: CLOCK_MONOTONIC.
        """
        if self.read_to_end or self.simulated:
            return None
        step, spans = self.reader.counter(ring.STEP), self.reader.open_spans()
        if not spans:
            return None  # recording has not begun
        for_s = [max(0.0, (now_ns - span.start_ns) / 1e9) for span in spans]
        inside = tuple(span.name for span in spans[1:])
        return Whereabouts(step, for_s[0], inside, for_s[-1] if inside else None)

    def whole_steps(self, now_s: float) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
        """Takes out the records of whole steps, and their sequence numbers; all of them, once it is read to its end.

        If a device is timed, the last step stays for the next call: the device's times arrive one step later. It does
        not stay once the step in progress takes long, because that step may never end. now_s: the monotonic clock.
        """
        if not self.waiting:
            return np.zeros(0, ring.record_dtype()), np.zeros(0, np.int64)
        records = np.concatenate([records for records, _ in self.waiting])
        sequences = np.concatenate([sequences for _, sequences in self.waiting])
        ends = np.flatnonzero(records["kind"] == Kind.STEP)
        held = 1 if self.state.device and now_s - self.step_s < HOLD_S else 0
        cut = len(records) if self.read_to_end else (int(ends[-1 - held]) + 1 if len(ends) > held else 0)
        self.waiting = [(records[cut:], sequences[cut:])] if cut < len(records) else []
        return records[:cut], sequences[:cut]

    def later_records(self) -> npt.NDArray[np.void]:
        """Those that wait for their step's end: some may be about steps that were taken out."""
        return self.waiting[0][0] if self.waiting else np.zeros(0, ring.record_dtype())

    def count_up_to(self, last: int, counted: int) -> int:
        """Moves on what the statistics know of: so many of the records up to number `last` were `counted` now.

        Returns how many were not, and are lost; the same whoever reads a part of the ring again.
        """
        lost = max(0, last - self.state.counted - counted)
        self.state.counted = max(self.state.counted, last)
        return lost

    def forget_oldest(self, most: int) -> int:
        """Lets go of what waits for its step's end, but for the newest. Returns how many records are lost by it."""
        surplus = sum(len(records) for records, _ in self.waiting) - most
        if surplus <= 0:
            return 0
        ((records, sequences),) = self.waiting
        self.waiting = [(records[surplus:].copy(), sequences[surplus:].copy())]
        return self.count_up_to(int(sequences[surplus - 1]), 0)

    @property
    def unkept_share(self) -> float:
        """How much of the ring the records would fill that are read and in no segment yet."""
        return (self.reader.cursor - 1 - self.kept) / self.reader.capacity

    @property
    def origin(self) -> Origin:
        identity = self.state.identity
        return Origin(identity.key, identity.rank, identity.attempt, identity.host, self.state.anchor)
