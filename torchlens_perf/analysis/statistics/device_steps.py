"""Steps by the device's clock: its work in each step, by part, without what its compute stream waited. Pure.

On a device the host only issues work, so its times equalise between ranks and say nothing of who is slow. What the
device did is known from spans on its own line: the step, its phases, and its stalls (a stall is bracketed by two marks
around a wait of the compute stream). What lies in no phase and no stall is the gap. The host's phases say what the
device waited for there: a device that has work is not held up by a slow loader, and then they do not overlap the gap.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchlens_perf.analysis.statistics.step_bins import concatenate
from torchlens_perf.run.device.step_parts import PART_OF_SPAN, outer_spans
from torchlens_perf.run.records import PARTS, StepTable
from torchlens_perf.run.ring import Flag, Kind

if TYPE_CHECKING:
    import numpy.typing as npt

    Integers = npt.NDArray[np.int64]

_LONG_NS = np.int64(1) << 62
MAX_BEHIND_STEPS = 512  # after so many steps, the device's time of one is not waited for any more
_STALL = PARTS.index("communication")
_PART_OF_SPAN = {kind: PARTS.index(part) for kind, part in PART_OF_SPAN.items()}
_STEP = int(Kind.STEP)
_SPANS = (_STEP, *_PART_OF_SPAN)
_DATA, _HOST = PARTS.index("data"), PARTS.index("host")
_IN_GAP = np.isin(np.arange(len(PARTS)), (_DATA, _HOST))
_PHASES = (int(Kind.FORWARD), int(Kind.BACKWARD), int(Kind.OPTIMIZER))
_PART_OF_GAP = {int(Kind.DATA): _DATA, int(Kind.WAIT): _STALL}


class _Spans(NamedTuple):
    """Intervals on the host's time line, each of a step. Columns of equal length."""

    step: Integers
    kind: Integers
    start_ns: Integers
    duration_ns: Integers

    def where(self, chosen: npt.NDArray[np.bool_] | Integers) -> _Spans:
        return _Spans(*(column[chosen] for column in self))

    def and_then(self, later: _Spans) -> _Spans:
        return _Spans(*(np.concatenate(columns) for columns in zip(self, later, strict=True)))


def _spans(records: npt.NDArray[np.void], kind: npt.NDArray[np.uint64]) -> _Spans:
    columns = (records["step"], kind, records["start_ns"], records["duration_ns"])
    return _Spans(*(column.astype(np.int64) for column in columns))


_NONE = _Spans(*(np.zeros(0, np.int64) for _ in _Spans._fields))


class DeviceSteps:
    """Joins what the device's clock reports of a step, which comes late, with the host's records of it. One process."""

    def __init__(self) -> None:
        self._hosts: list[StepTable] = []  # steps whose device time has not come
        self._on_host = _NONE  # the host's waits and phases in those
        self._device = _NONE  # the device's spans of steps that are not whole
        self._newest = 0  # of the host's steps

    def add(self, records: npt.NDArray[np.void], steps: StepTable) -> StepTable:
        """Records in their order, and the host's steps that they make. Returns the steps that are known by now.

        Of these, durations and parts are the device's, `communication` its stalls. The rest is as the host has it.
        """
        on_device = records[records["kind"] == Kind.DEVICE]
        on_device = on_device[np.isin(on_device["value0"], _SPANS)]
        on_host = np.isin(records["kind"], (*_PART_OF_GAP, *_PHASES)) & ((records["flags"] & Flag.OTHER_THREAD) == 0)
        self._hosts.append(steps)
        self._on_host = self._on_host.and_then(_spans(records[on_host], records["kind"][on_host]))
        self._device = self._device.and_then(_spans(on_device, on_device["value0"]))
        host = concatenate(self._hosts)
        whole = self._device.step[self._device.kind == _STEP]
        known = np.isin(host.step, whole)
        self._newest = int(host.step.max(initial=self._newest))
        oldest = self._newest - MAX_BEHIND_STEPS
        done, newest = host.where(known), host.step[known].max(initial=-1)
        table = device_table(done, self._device, self._on_host)
        self._hosts = [host.where(~known & (host.step > oldest))]
        # Times come in the order of steps: of a step before a known one nothing more is to come.
        self._device = self._device.where(self._device.step > max(newest, oldest))
        waiting = np.isin(self._on_host.step, self._hosts[0].step) & (self._on_host.step > newest)
        self._on_host = self._on_host.where(waiting)
        return table


def device_table(host: StepTable, device: _Spans, on_host: _Spans) -> StepTable:
    """The steps of `host` by the device's clock, which has reported all their spans. on_host: its waits and phases."""
    order = np.argsort(host.step, kind="stable")
    numbers = host.step[order]

    def row_of(spans: _Spans) -> tuple[_Spans, Integers]:
        """Those of these steps, and the rows of the table that they belong to."""
        at = np.searchsorted(numbers, spans.step)
        there = np.flatnonzero((at < len(numbers)) & (numbers[np.minimum(at, len(numbers) - 1)] == spans.step))
        return spans.where(there), order[at[there]]

    parts_ns = np.zeros((len(host), len(PARTS)), np.int64)
    if not len(host):
        return host
    steps, rows = row_of(device.where(device.kind == _STEP))
    start_ns, duration_ns = np.zeros((2, len(host)), np.int64)
    start_ns[rows], duration_ns[rows] = steps.start_ns, steps.duration_ns
    spans, rows = row_of(device.where(device.kind != _STEP))
    outermost, own_ns = _nesting(spans, rows)
    np.add.at(parts_ns, (rows, _parts(spans.kind, _PART_OF_SPAN)), np.maximum(own_ns, 0))
    outer, outer_rows = spans.where(outermost), rows[outermost]
    gap_ns = duration_ns.copy()
    np.subtract.at(gap_ns, outer_rows, outer.duration_ns)
    gap_ns = np.maximum(gap_ns, 0)

    ahead_ns = _ahead_ns((spans, rows), row_of(on_host), len(host))
    waits, rows = row_of(on_host.where(np.isin(on_host.kind, list(_PART_OF_GAP))))
    ends = waits.start_ns + waits.duration_ns
    in_gap_ns = np.minimum(ends, (start_ns + duration_ns)[rows]) - np.maximum(waits.start_ns, start_ns[rows])
    in_gap_ns = np.maximum(in_gap_ns, 0)
    first, second = _pairs(rows, outer_rows)
    both_ns = np.minimum(ends[first], (outer.start_ns + outer.duration_ns)[second])
    both_ns -= np.maximum(waits.start_ns[first], outer.start_ns[second])
    np.subtract.at(in_gap_ns, first, np.maximum(both_ns, 0))
    waited_ns = np.zeros_like(parts_ns)
    np.add.at(waited_ns, (rows, _parts(waits.kind, _PART_OF_GAP)), np.maximum(in_gap_ns, 0))
    for part in (_STALL, _DATA):  # a blocking collective inside the loader is a wait for the others
        taken_ns = np.minimum(waited_ns[:, part], gap_ns)
        parts_ns[:, part] += taken_ns
        gap_ns -= taken_ns
    parts_ns[:, _HOST] = gap_ns
    # Lack of a CPU holds up the device where that has nothing to do: in the gap, and in a phase in which the host was
    # not as far ahead.
    ready_ns = np.where(host.ready_ns >= 0, np.maximum(host.ready_ns - ahead_ns, 0), -1)
    return dataclasses.replace(host, start_ns=start_ns, duration_ns=duration_ns, parts_ns=parts_ns, ready_ns=ready_ns)


def _ahead_ns(
    on_device: tuple[_Spans, Integers], on_host: tuple[_Spans, Integers], count: int
) -> npt.NDArray[np.int64]:
    """Shape [steps, parts]: how long before the device the host began each phase. 0 in the gap; where a phase is not
    known, so long that the host cannot have been late.
    """
    ahead_ns = np.where(_IN_GAP, 0, np.full((count, len(PARTS)), _LONG_NS))
    for kind in _PHASES:
        begins = []
        for spans, rows in (on_device, on_host):
            first_ns = np.full(count, _LONG_NS)
            np.minimum.at(first_ns, rows[spans.kind == kind], spans.start_ns[spans.kind == kind])
            begins.append(first_ns)
        known = np.maximum(*begins) < _LONG_NS
        ahead_ns[known, _PART_OF_SPAN[kind]] = np.maximum(begins[0] - begins[1], 0)[known]
    return ahead_ns


def _nesting(spans: _Spans, rows: Integers) -> tuple[npt.NDArray[np.bool_], Integers]:
    """Which spans are inside of no other, and the time of each that is in none inside of it."""
    outer = np.full(len(rows), -1)
    order = np.argsort(rows, kind="stable")
    for indices in np.split(order, np.flatnonzero(np.diff(rows[order])) + 1):
        found = np.array(outer_spans(spans.start_ns[indices].tolist(), spans.duration_ns[indices].tolist()), np.int64)
        outer[indices] = np.where(found < 0, -1, indices[found])
    inner = np.flatnonzero(outer >= 0)
    own_ns = spans.duration_ns.copy()
    np.subtract.at(own_ns, outer[inner], spans.duration_ns[inner])
    return outer < 0, own_ns


def _pairs(first: Integers, second: Integers) -> tuple[Integers, Integers]:
    """The indices of all pairs with equal values."""
    order = np.argsort(second, kind="stable")
    begin, end = (np.searchsorted(second[order], first, side) for side in ("left", "right"))
    counts = end - begin
    left = np.repeat(np.arange(len(first)), counts)
    offsets = np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts)
    return left, order[np.repeat(begin, counts) + offsets]


def _parts(kinds: Integers, part_of: dict[int, int]) -> Integers:
    lookup = np.zeros(max(part_of) + 1, np.int64)
    for kind, part in part_of.items():
        lookup[kind] = part
    return lookup[kinds]
