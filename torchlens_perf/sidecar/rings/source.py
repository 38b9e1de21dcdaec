"""Track how far one ring file has been read, counted and saved, and buffer incomplete steps."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.run import ring
from torchlens_perf.run.failure import ProcessActivity
from torchlens_perf.run.processes import process_start_ticks
from torchlens_perf.run.ring import Flag, Kind, RingReader, State
from torchlens_perf.sidecar.stops import SHORTEST_NS, Stop
from torchlens_perf.store.segments import RecordOrigin

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.analysis.statistics.stack_samples import StackSample
    from torchlens_perf.run.records import StepTable
    from torchlens_perf.sidecar.rings.waiting import RingProgress
    from torchlens_perf.verdicts.node_state import ProcessState
    from torchlens_perf.verdicts.stragglers.judged_steps import JudgedSteps

# A step with a timed device waits this long for the device's times.
HOLD_S = 2.0
# Number of steps from which a rank's usual step time is computed.
USUAL_STEPS = 32
# Records stay in the ring until they are counted, or until they fill this share of the ring.
MAX_UNREAD_SHARE = 1 / 4
# A process that was seen to run within this time before its end was found has just ended.
_MAX_ROUND_NS = 60_000_000_000


@dataclasses.dataclass
class RingSource:
    """A ring file being read."""

    path: Path
    reader: RingReader
    state: ProcessState
    kept: int  # sequence number of the last saved record
    generation: int  # the node's process generation, see analysis/statistics/restarts.py
    judged: JudgedSteps
    progress: RingProgress
    waiting: list[tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]] = dataclasses.field(
        default_factory=list
    )
    # True once all records are read and the process has ended. The saved state cannot provide this
    # flag: records that an earlier sidecar had read but not saved must be read again.
    read_to_end: bool = False
    settled: bool = False  # the ring is read to its end, and all records are counted
    ended_monotonic_s: float = 0.0
    folder: str = ""  # folder of a program that runs or has just ended
    joins: bool = False  # True once the process takes part in the join of collectives
    delayed_until: int = -1  # last step that a capture delayed
    durations_ns: deque[int] = dataclasses.field(default_factory=lambda: deque(maxlen=USUAL_STEPS))
    head: int = -1  # number of records at the last poll; -1 before the first one
    samples: list[StackSample] = dataclasses.field(default_factory=list)  # of steps not yet counted
    _moved: bool = False  # True if there were new records at the last poll

    def find_delayed_steps(self, steps: StepTable) -> npt.NDArray[np.int64]:
        """Return the numbers of the steps that a capture has delayed. steps: complete steps.

        A capture also delays the next step: in its first collective, other ranks wait while the
        captured rank writes its files.
        """
        captured = steps.step[steps.flags & Flag.CAPTURED != 0]
        delayed = np.unique([*captured, *(captured + 1), self.delayed_until])
        self.delayed_until = int(delayed.max())
        return delayed

    def flag_stopped_steps(self, records: npt.NDArray[np.void], stops: Sequence[Stop]) -> None:
        """Flag the steps that took longer because the process was stopped.

        records: records of complete steps. stops: stops of this sidecar, which ran meanwhile only
        if the process was stopped alone. Then the process made steps.
        """
        rows = np.flatnonzero(records["kind"] == Kind.STEP)
        begin_ns, duration_ns = records["start_ns"][rows], records["duration_ns"][rows]
        usual_ns = np.median(self.durations_ns) if self.durations_ns else 0
        for stop in (*self.progress.observer.stops, *stops):
            stopped_ns = np.minimum(begin_ns + duration_ns, stop[1]) - np.maximum(begin_ns, stop[0])
            is_cause = (stopped_ns >= SHORTEST_NS) & (2 * stopped_ns >= duration_ns - usual_ns)
            records["flags"][rows[is_cause]] |= np.uint16(Flag.STOPPED)

    def peek(self, now_s: float) -> tuple[int, float, float]:
        """Return the ring's state, the share of the ring that is new since the last poll, and the
        time until the next peek is due because the process is stopped.

        now_s: the monotonic clock.
        """
        head, step, state = self.reader.read_progress()
        moves = self.progress.update(step, head, now_s)
        due_s = (
            float("inf") if self.state.facts.simulated else self.progress.observer.poll(moves=moves)
        )
        return state, (head - max(0, self.head)) / self.reader.capacity, due_s

    def poll_progress(self, now_s: float) -> tuple[str, float]:
        """Return the state of poll_end_state(), and the share of the ring that is new.

        now_s: the monotonic clock.
        """
        self.progress.end_observer.poll(now_s)
        before, (self.head, step, state) = self.head, self.reader.read_progress()
        self.progress.update(step, self.head, now_s)
        self._moved = 0 <= before != self.head
        new = self.head - (before if before >= 0 else self.reader.cursor)
        return self.poll_end_state(state), new / self.reader.capacity

    def poll_end_state(self, state: int) -> str:
        """Return "closed" or "died" if the process has ended, or "" while it runs.

        state: STATE in the ring's header.
        """
        if state == State.CLOSED:
            return "closed"
        if self._moved:
            return ""  # A process that writes records runs.
        identity = self.state.identity
        # The process may have closed the ring and ended between the two checks.
        if process_start_ticks(identity.pid) != identity.process_started:
            return "closed" if self.reader.read_counter(ring.STATE) == State.CLOSED else "died"
        return ""

    def note_if_running(self, end_state: str, now_ns: int) -> None:
        """Note that the process runs, or that it has just ended. end_state: poll_end_state()."""
        is_new = 0 <= now_ns - self.state.seen_ns < _MAX_ROUND_NS
        if not self.state.facts.simulated and (is_new or not end_state):
            self.state.seen_ns = now_ns

    def current_activity(self, now_ns: int) -> ProcessActivity | None:
        """Return the current step and open spans, or None if the process has ended or is simulated.

        now_ns: CLOCK_MONOTONIC.
        """
        if self.read_to_end or self.state.facts.simulated:
            return None
        step, spans = self.reader.read_counter(ring.STEP), self.reader.read_open_spans()
        if not spans:
            return None  # Recording has not begun.
        for_s = [max(0.0, (now_ns - span.start_ns) / 1e9) for span in spans]
        inside = tuple(span.name for span in spans[1:])
        return ProcessActivity(step, for_s[0], inside, for_s[-1] if inside else None)

    def take_whole_steps(self, now_s: float) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
        """Remove and return the records of complete steps, and their sequence numbers.

        At the end of the ring, all records are returned. If a device is timed, the last complete
        step is kept for the next call, because the device's times arrive one step later. If the
        step in progress takes long, the last complete step is returned too.

        now_s: the monotonic clock.
        """
        if not self.waiting:
            return np.zeros(0, ring.record_dtype()), np.zeros(0, np.int64)
        records = np.concatenate([records for records, _ in self.waiting])
        sequences = np.concatenate([sequences for _, sequences in self.waiting])
        ends = np.flatnonzero(records["kind"] == Kind.STEP)
        held = 1 if self.state.facts.device and now_s - self.progress.step_s < HOLD_S else 0
        cut = (
            len(records)
            if self.read_to_end
            else (int(ends[-1 - held]) + 1 if len(ends) > held else 0)
        )
        self.waiting = [(records[cut:], sequences[cut:])] if cut < len(records) else []
        return records[:cut], sequences[:cut]

    def advance_counted(self, last: int, counted: int) -> int:
        """Set the number of the last counted record to `last`. Return the number of lost records.

        counted: the number of records that were counted now. Records that were counted before a
        restart do not count as lost.
        """
        lost = max(0, last - self.state.counted - counted)
        self.state.counted = max(self.state.counted, last)
        return lost

    def drop_oldest_waiting(self, most: int) -> int:
        """Drop the oldest records of incomplete steps. Return the number of lost records.

        most: number of the newest records to keep.
        """
        surplus = sum(len(records) for records, _ in self.waiting) - most
        if surplus <= 0:
            return 0
        ((records, sequences),) = self.waiting
        self.waiting = [(records[surplus:].copy(), sequences[surplus:].copy())]
        return self.advance_counted(int(sequences[surplus - 1]), 0)

    @property
    def unsaved_share(self) -> float:
        """Records that are not in a segment yet, as a share of the ring's capacity."""
        newest = max(self.head, self.reader.cursor) - 1
        return (newest - self.kept) / self.reader.capacity

    @property
    def origin(self) -> RecordOrigin:
        identity = self.state.identity
        return RecordOrigin(
            identity.key, identity.rank, identity.attempt, identity.host, self.state.anchor
        )
