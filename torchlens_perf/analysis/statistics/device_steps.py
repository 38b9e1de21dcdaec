"""Compute the time of each step's parts by the device's clock. Pure.

With a device, the host only issues work, so host times are similar on all ranks and do not show
which rank is slow. The device's work is known from spans on the device's own timeline: the step,
its phases and its stalls. A stall is a wait of the compute stream, between two events recorded
around the wait. The rest of the step is called the gap. Phases of the host show what the device
waited for in the gap. A slow data loader only overlaps the gap if it delays the device.

A part's device time includes launch gaps, in which the device was idle because the host had not
issued work yet. A rank whose device waits in a collective has no launch gap afterwards, because the
host continues to issue work. Each part therefore also has the host's issue time, and the device's
lag behind the host at the start of the part. With these times, ranks are compared as if no rank had
waited (verdicts/stragglers/own_time.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchlens_perf.analysis.statistics.step_bins import concatenate_tables
from torchlens_perf.run.device.step_parts import PART_OF_SPAN, find_enclosing_spans
from torchlens_perf.run.records import PARTS, StepTable
from torchlens_perf.run.ring import Flag, Kind

if TYPE_CHECKING:
    import numpy.typing as npt

    Integers = npt.NDArray[np.int64]

_LONG_NS = np.int64(1) << 62
# A step is dropped if its device times have not arrived this number of steps later.
MAX_BEHIND_STEPS = 512
_STALL = PARTS.index("communication")
_PART_OF_SPAN = {kind: PARTS.index(part) for kind, part in PART_OF_SPAN.items()}
_STEP = int(Kind.STEP)
_SPANS = (_STEP, *_PART_OF_SPAN)
_DATA, _HOST = PARTS.index("data"), PARTS.index("host")
_IN_GAP = np.isin(np.arange(len(PARTS)), (_DATA, _HOST))
_PHASES = (int(Kind.FORWARD), int(Kind.BACKWARD), int(Kind.OPTIMIZER))
_FEW_STEPS, _WARM_UP_STEPS, _KEPT_TIMES = 8, 3, 32
# The queue of a device with a smaller lag is not full.
_QUEUED_NS = 500_000
_CLEARLY_LESS, _LITTLE = 0.8, 0.2
_PART_OF_GAP = {int(Kind.DATA): _DATA, int(Kind.WAIT): _STALL}


class _Spans(NamedTuple):
    """Columns of spans, by the host's clock."""

    step: Integers
    kind: Integers
    start_ns: Integers
    duration_ns: Integers

    def select(self, chosen: npt.NDArray[np.bool_] | Integers) -> _Spans:
        return _Spans(*(column[chosen] for column in self))

    def concatenated_with(self, later: _Spans) -> _Spans:
        return _Spans(*(np.concatenate(columns) for columns in zip(self, later, strict=True)))


def _spans_from_records(records: npt.NDArray[np.void], kind: npt.NDArray[np.uint64]) -> _Spans:
    columns = (records["step"], kind, records["start_ns"], records["duration_ns"])
    return _Spans(*(column.astype(np.int64) for column in columns))


_NONE = _Spans(*(np.zeros(0, np.int64) for _ in _Spans._fields))


class DeviceStepJoin:
    """Joins the device's times of each step, which arrive late, with the host's records of the
    step.

    For one process.
    """

    def __init__(self) -> None:
        # Steps whose device times have not arrived yet.
        self._hosts: list[StepTable] = []
        # Waits and phases of the host in the steps of _hosts.
        self._on_host = _NONE
        # Spans of the device in incomplete steps.
        self._device = _NONE
        # The host's newest step.
        self._newest = 0
        self._host_times = HostTimeEstimator()

    def add_records(self, records: npt.NDArray[np.void], steps: StepTable) -> StepTable:
        """Add records in the order of the ring, and the host's steps that these records contain.

        Return the steps whose device times are complete.

        In the returned table, durations and parts are by the device's clock, and the
        `communication` part is the device's stalls. All other columns are by the host's clock.
        """
        on_device = records[records["kind"] == Kind.DEVICE]
        on_device = on_device[np.isin(on_device["value0"], _SPANS)]
        # The time of a step whose phases were not timed cannot be divided into parts.
        is_partial = (on_device["value0"] == _STEP) & (
            (on_device["flags"] & Flag.WITHOUT_PHASES) != 0
        )
        partial = on_device["step"][is_partial].astype(np.int64)
        on_device = on_device[~is_partial]
        on_host = np.isin(records["kind"], (*_PART_OF_GAP, *_PHASES)) & (
            (records["flags"] & Flag.OTHER_THREAD) == 0
        )
        self._hosts.append(steps)
        self._on_host = self._on_host.concatenated_with(
            _spans_from_records(records[on_host], records["kind"][on_host])
        )
        self._device = self._device.concatenated_with(
            _spans_from_records(on_device, on_device["value0"])
        )
        host = concatenate_tables(self._hosts)
        whole = self._device.step[self._device.kind == _STEP]
        known = np.isin(host.step, whole)
        self._newest = int(host.step.max(initial=self._newest))
        oldest = self._newest - MAX_BEHIND_STEPS
        done, newest = host.select_rows(known), host.step[known].max(initial=-1)
        table = build_device_table(done, self._device, self._on_host, self._host_times)
        left_out = known | np.isin(host.step, partial)
        self._hosts = [host.select_rows(~left_out & (host.step > oldest))]
        # Device times arrive in the order of steps, so no more times arrive for steps before a
        # complete step.
        self._device = self._device.select(self._device.step > max(newest, oldest))
        waiting = np.isin(self._on_host.step, self._hosts[0].step) & (self._on_host.step > newest)
        self._on_host = self._on_host.select(waiting)
        return table


def build_device_table(
    host: StepTable, device: _Spans, on_host: _Spans, host_times: HostTimeEstimator
) -> StepTable:
    """Replace the host's times of steps by the device's.

    device: all device spans of these steps. on_host: waits and phases of the host. host_times:
    state from earlier steps.
    """
    order = np.argsort(host.step, kind="stable")
    numbers = host.step[order]

    def row_of(spans: _Spans) -> tuple[_Spans, Integers]:
        """Return the spans that belong to steps of the table, and the row of each span."""
        at = np.searchsorted(numbers, spans.step)
        there = np.flatnonzero(
            (at < len(numbers)) & (numbers[np.minimum(at, len(numbers) - 1)] == spans.step)
        )
        return spans.select(there), order[at[there]]

    parts_ns = np.zeros((len(host), len(PARTS)), np.int64)
    if not len(host):
        return host
    steps, rows = row_of(device.select(device.kind == _STEP))
    start_ns, duration_ns = np.zeros((2, len(host)), np.int64)
    start_ns[rows], duration_ns[rows] = steps.start_ns, steps.duration_ns
    spans, rows = row_of(device.select(device.kind != _STEP))
    outermost, own_ns = _outermost_and_own_ns(spans, rows)
    np.add.at(parts_ns, (rows, _parts_of_kinds(spans.kind, _PART_OF_SPAN)), np.maximum(own_ns, 0))
    outer, outer_rows = spans.select(outermost), rows[outermost]
    gap_ns = duration_ns.copy()
    np.subtract.at(gap_ns, outer_rows, outer.duration_ns)
    gap_ns = np.maximum(gap_ns, 0)

    phases = _MatchedPhases.from_spans((spans, rows), row_of(on_host), len(host))
    waits, rows = row_of(on_host.select(np.isin(on_host.kind, list(_PART_OF_GAP))))
    ends = waits.start_ns + waits.duration_ns
    in_gap_ns = np.minimum(ends, (start_ns + duration_ns)[rows]) - np.maximum(
        waits.start_ns, start_ns[rows]
    )
    in_gap_ns = np.maximum(in_gap_ns, 0)
    first, second = _indexes_of_equal_pairs(rows, outer_rows)
    both_ns = np.minimum(ends[first], (outer.start_ns + outer.duration_ns)[second])
    both_ns -= np.maximum(waits.start_ns[first], outer.start_ns[second])
    np.subtract.at(in_gap_ns, first, np.maximum(both_ns, 0))
    waited_ns = np.zeros_like(parts_ns)
    np.add.at(
        waited_ns, (rows, _parts_of_kinds(waits.kind, _PART_OF_GAP)), np.maximum(in_gap_ns, 0)
    )
    # Stalls are subtracted before data, because a blocking collective inside the data loader is a
    # wait for other ranks.
    for part in (_STALL, _DATA):
        taken_ns = np.minimum(waited_ns[:, part], gap_ns)
        parts_ns[:, part] += taken_ns
        gap_ns -= taken_ns
    parts_ns[:, _HOST] = gap_ns
    # A lack of CPU time only delays a device that runs out of work. A device runs out of work in
    # the gap, or in a phase that starts with less lag than the lack of CPU time.
    ready_ns = np.where(host.ready_ns >= 0, np.maximum(host.ready_ns - phases.lag_ns, 0), -1)
    issue_ns, lag_ns = _compute_issue_and_lag_ns(host, phases, start_ns, (waits, rows), host_times)
    return dataclasses.replace(
        host, start_ns=start_ns, duration_ns=duration_ns, parts_ns=parts_ns, ready_ns=ready_ns, issue_ns=issue_ns,
        issue_ready_ns=host.ready_ns, lag_ns=lag_ns,
    )  # fmt: skip


class _MatchedPhases(NamedTuple):
    """Phases that were timed on both host and device, sorted by table row and start on the host.
    An enclosing phase comes before the phases nested in it.

    All columns except `lag_ns` have one entry per phase.
    """

    row: Integers
    kind: Integers
    host_ns: npt.NDArray[np.int64]
    """Shape [phases, 2]: start and end on the host."""
    device_ns: npt.NDArray[np.int64]
    lag_ns: npt.NDArray[np.int64]
    """Shape [steps, parts]: sum of the device's lag behind the host at the start of each of the
    part's phases; _LONG_NS if not known.
    """

    @classmethod
    def from_spans(
        cls, on_device: tuple[_Spans, Integers], on_host: tuple[_Spans, Integers], count: int
    ) -> _MatchedPhases:
        """Match the phases of host and device by their order in the step.

        Phases of a kind are matched if host and device have the same number of them.
        """
        lag_ns = np.full((count, len(PARTS)), _LONG_NS)
        lag_ns[:, _IN_GAP] = 0
        found = []
        for kind in _PHASES:
            sides = []
            for spans, rows in (on_device, on_host):
                at = np.flatnonzero(spans.kind == kind)
                at = at[np.lexsort((spans.start_ns[at], rows[at]))]
                sides.append((spans.select(at), rows[at], np.bincount(rows[at], minlength=count)))
            same = (sides[0][2] == sides[1][2]) & (sides[0][2] > 0)
            (device, rows), (host, _) = (
                (spans.select(same[rows]), rows[same[rows]]) for spans, rows, _ in sides
            )
            lag_ns[same, _PART_OF_SPAN[kind]] = 0
            np.add.at(
                lag_ns, (rows, _PART_OF_SPAN[kind]), np.maximum(device.start_ns - host.start_ns, 0)
            )
            found.append((rows, host.kind, _start_and_end_ns(host), _start_and_end_ns(device)))
        row, kind_of, host_ns, device_ns = (
            np.concatenate(columns) for columns in zip(*found, strict=True)
        )
        order = np.lexsort((-host_ns[:, 1], host_ns[:, 0], row))
        return cls(row[order], kind_of[order], host_ns[order], device_ns[order], lag_ns)


def _start_and_end_ns(spans: _Spans) -> npt.NDArray[np.int64]:
    return np.stack([spans.start_ns, spans.start_ns + spans.duration_ns], axis=1)


class HostTimeEstimator:
    """Estimates the host's own time in each segment of a step, without time in which the device
    blocked it.

    For one process.

    The device blocks the host in two ways:

    - The host waits until the device has finished all work (a blocking copy, `.item()`). The wait
      is as long as the device's lag, so the host's time varies with the lag or is about equal to
      the lag. The lag is then subtracted from the host's time.
    - The host waits for room in the device's queue. The host only waits if the device lags behind
      at both ends of the segment, and makes progress in between. The segment's time is then
      replaced by times of recent steps without such a wait.
    """

    def __init__(self) -> None:
        # Times of the last step and their smoothed change between steps. Row 0: the host's time.
        # Row 1: the host's time minus the lag.
        self._last = self._variation = np.zeros((2, 0))
        # The newest times of the host while the queue was not full, and their number.
        self._free_ns, self._free = np.zeros((0, 0)), np.zeros(0, np.int64)
        self._steps = 0
        # Times at which the device started or ended spans.
        self._reached_ns = np.zeros(0, np.int64)

    def made_progress(
        self, reached_ns: Integers, begin_ns: Integers, end_ns: Integers
    ) -> npt.NDArray[np.bool_]:
        """Return for each interval whether the device started or ended a span in it.

        reached_ns: times of the newest starts and ends of spans.
        """
        self._reached_ns = np.sort(np.concatenate([self._reached_ns, reached_ns]))
        inside = np.searchsorted(self._reached_ns, end_ns) > np.searchsorted(
            self._reached_ns, begin_ns, "right"
        )
        self._reached_ns = self._reached_ns[
            np.searchsorted(self._reached_ns, begin_ns.min(initial=_LONG_NS)) :
        ]
        return inside

    def estimate_own_ns(
        self,
        taken_ns: Integers,
        lag_ns: Integers,
        at_end_ns: Integers,
        may_be_full: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.float64]:
        """Add the segments of the next step, and return the host's own time in each.

        - taken_ns: the host's time in each segment.
        - lag_ns: the device's lag at the start of each segment.
        - at_end_ns: the lag at the end of segments between phases; _LONG_NS for phases, which may
          take as long as the lag by chance.
        - may_be_full: True if the host may have waited for room in the queue.
        """
        now = np.stack([taken_ns, taken_ns - lag_ns]).astype(float)
        if now.shape != self._last.shape:
            self._last, self._variation, self._steps = now, np.zeros_like(now), 0
            self._free_ns = np.zeros((_KEPT_TIMES, len(taken_ns)))
            self._free = np.zeros(len(taken_ns), np.int64)
        change, self._last = np.abs(now - self._last), now
        # Limit the effect of a single long step.
        if self._steps > _FEW_STEPS:
            change = np.minimum(change, 4 * self._variation)
        self._variation += (change - self._variation) / min(max(self._steps, 1), 4 * _FEW_STEPS)
        self._steps += 1
        waits = (self._variation[1] < _CLEARLY_LESS * self._variation[0]) & (lag_ns <= taken_ns)
        # If the lag is steady, a segment in which the host waits takes about as long as the lag,
        # and the lag is gone at its end.
        about_as_long = (lag_ns > _QUEUED_NS) & (
            np.maximum(np.abs(now[1]), at_end_ns) < _LITTLE * lag_ns
        )
        own_ns = np.where(
            (waits & (self._steps > _FEW_STEPS)) | about_as_long, np.maximum(now[1], 0), now[0]
        )
        if self._steps > _WARM_UP_STEPS:
            free = np.flatnonzero(~may_be_full)
            self._free_ns[self._free[free] % _KEPT_TIMES, free] = own_ns[free]
            self._free[free] += 1
        known = np.clip(self._free, 1, _KEPT_TIMES)
        stands_in = self._free_ns[self._steps % known, np.arange(len(known))]
        return np.where(may_be_full & (self._free >= _FEW_STEPS), stands_in, own_ns)


def _compute_issue_and_lag_ns(
    host: StepTable,
    phases: _MatchedPhases,
    start_ns: Integers,
    waits: tuple[_Spans, Integers],
    host_times: HostTimeEstimator,
) -> tuple[Integers, Integers]:
    """Compute the host's issue time and the device's lag for each step and part.

    Both results have the shape [steps, parts]. The lag is measured at the start of the part.

    start_ns: starts of the steps on the device. waits: waits of the host, with the rows of their
    steps.
    """
    issue_ns, lag_ns = np.zeros_like(phases.lag_ns), phases.lag_ns.copy()
    # The marks of a step are its start, the start and end of each phase, and its end. A segment
    # lies between two marks and belongs to the innermost phase around it. Segments outside of all
    # phases belong to the host's part.
    of_row = np.bincount(phases.row, minlength=len(host))
    first = np.concatenate([[0], np.cumsum(2 * of_row + 2)])
    row_of = np.repeat(np.arange(len(host)), 2 * of_row + 2)
    order, part_after = _borders_of_phases(phases)
    at = np.arange(len(order)) + 2 * phases.row[order // 2] + 1
    # Row 0: on the host. Row 1: on the device.
    marks = np.zeros((2, first[-1]), np.int64)
    marks[:, first[:-1]] = host.start_ns, start_ns
    marks[0, first[1:] - 1] = host.start_ns + host.duration_ns
    marks[:, at] = phases.host_ns.ravel()[order], phases.device_ns.ravel()[order]
    part = np.full(first[-1], _HOST)
    part[at] = part_after
    places = row_of * len(PARTS) + part
    late_ns = np.maximum(marks[1] - marks[0], 0)
    taken_ns = np.append(np.diff(marks[0]), 0)

    # Subtract waits of the host for collectives, which are not own time, and for the data loader,
    # which are another part.
    spans, rows = waits
    within = _last_indexes_before(marks[0], row_of, spans.start_ns, rows)
    is_data = spans.kind == int(Kind.DATA)
    np.subtract.at(taken_ns, within, spans.duration_ns)
    np.add.at(issue_ns, (rows[is_data], _DATA), spans.duration_ns[is_data])
    # Time without a CPU is only known per part, so it is subtracted from the part's first segment.
    ready_ns = np.maximum(host.ready_ns, 0)
    issue_ns[:, _DATA] = np.maximum(issue_ns[:, _DATA] - ready_ns[:, _DATA], 0)
    _, firsts = np.unique(places, return_index=True)
    taken_ns[firsts] -= ready_ns[row_of[firsts], part[firsts]]
    taken_ns = np.maximum(taken_ns, 0)
    loader_late_ns = np.maximum(marks[1, within] - spans.start_ns, 0)
    np.add.at(lag_ns, (rows[is_data], _DATA), loader_late_ns[is_data])
    loaded_ns = np.zeros(first[-1], np.int64)
    np.add.at(loaded_ns, within[is_data], spans.duration_ns[is_data])
    late_ns = np.where(part == _HOST, np.maximum(late_ns - loaded_ns, 0), late_ns)

    ends, begins = marks[0, 1:], marks[0, :-1]
    may_be_full = np.append((np.minimum(late_ns[:-1], late_ns[1:]) > _QUEUED_NS), False)
    may_be_full[:-1] &= host_times.made_progress(marks[1, marks[1] > 0], begins, ends)
    at_end_ns = np.where(part[:-1] == _HOST, late_ns[1:], _LONG_NS)
    own_ns = np.zeros(first[-1])
    for begin, end in itertools.pairwise(first.tolist()):
        inside = slice(begin, end - 1)
        own_ns[inside] = host_times.estimate_own_ns(
            taken_ns[inside], late_ns[inside], at_end_ns[inside], may_be_full[inside]
        )
    late_ns[first[1:] - 1] = 0
    np.add.at(issue_ns, (row_of, part), np.maximum(own_ns, 0).astype(np.int64))
    # A part may have several segments, and the lag at the start of a segment hides at most the
    # segment's own time. The part's lag is the sum of these hidden times, plus the lag that remains
    # after its longest segment.
    longest = np.lexsort((own_ns, places))
    longest = longest[np.append(np.diff(places[longest]) > 0, True)]
    lag_ns[row_of[longest], part[longest]] = np.maximum(late_ns - own_ns, 0)[longest]
    np.add.at(lag_ns, (row_of, part), np.minimum(late_ns, own_ns).astype(np.int64))
    return issue_ns, lag_ns


def _borders_of_phases(phases: _MatchedPhases) -> tuple[Integers, Integers]:
    """Return the starts and ends of all phases in the order of the host, and the part after each.

    A border is 2 * index for the start of a phase, and 2 * index + 1 for its end. Phases may be
    nested: an optimizer's closure runs forward and backward passes.
    """
    rows, (starts_ns, ends_ns) = phases.row.tolist(), phases.host_ns.T.tolist()
    order: list[int] = []
    around: list[int] = []
    enclosing: list[int] = []
    for index, (row, start_ns) in enumerate(zip(rows, starts_ns, strict=True)):
        while around and (rows[around[-1]] != row or ends_ns[around[-1]] <= start_ns):
            order.append(2 * around.pop() + 1)
        enclosing.append(around[-1] if around else -1)
        order.append(2 * index)
        around.append(index)
    order.extend(2 * index + 1 for index in reversed(around))
    parts = np.append(_parts_of_kinds(phases.kind, _PART_OF_SPAN), _HOST)
    outer = np.array(enclosing, np.int64)
    borders = np.array(order, np.int64)
    after = np.where(borders % 2, parts[outer[borders // 2]], parts[borders // 2])
    return borders, after


def _last_indexes_before(
    times: Integers, rows: Integers, queries: Integers, query_rows: Integers
) -> Integers:
    """Return for each query the index of the latest time in the same row that is not after the
    query.

    The times of a row must ascend, and its first time must not be after any of its queries.
    """
    order = np.lexsort((np.concatenate([np.zeros(len(times)), np.ones(len(queries))]),
                        np.concatenate([times, queries]), np.concatenate([rows, query_rows])))  # fmt: skip
    latest = np.maximum.accumulate(np.where(order < len(times), order, 0))
    found = np.empty(len(order), np.int64)
    found[order] = latest
    return found[len(times) :]


def _outermost_and_own_ns(spans: _Spans, rows: Integers) -> tuple[npt.NDArray[np.bool_], Integers]:
    """Return for each span whether it is outermost, and its duration without nested spans."""
    outer = np.full(len(rows), -1)
    order = np.argsort(rows, kind="stable")
    for indices in np.split(order, np.flatnonzero(np.diff(rows[order])) + 1):
        found = np.array(
            find_enclosing_spans(
                spans.start_ns[indices].tolist(), spans.duration_ns[indices].tolist()
            ),
            np.int64,
        )
        outer[indices] = np.where(found < 0, -1, indices[found])
    inner = np.flatnonzero(outer >= 0)
    own_ns = spans.duration_ns.copy()
    np.subtract.at(own_ns, outer[inner], spans.duration_ns[inner])
    return outer < 0, own_ns


def _indexes_of_equal_pairs(first: Integers, second: Integers) -> tuple[Integers, Integers]:
    """Return the indexes of all pairs of equal values in `first` and `second`."""
    order = np.argsort(second, kind="stable")
    begin, end = (np.searchsorted(second[order], first, side) for side in ("left", "right"))
    counts = end - begin
    left = np.repeat(np.arange(len(first)), counts)
    offsets = np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts)
    return left, order[np.repeat(begin, counts) + offsets]


def _parts_of_kinds(kinds: Integers, part_of: dict[int, int]) -> Integers:
    lookup = np.zeros(max(part_of) + 1, np.int64)
    lookup[list(part_of)] = list(part_of.values())
    return lookup[kinds]
