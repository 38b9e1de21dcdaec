"""Write slices, counters and instants as Perfetto track events, with the official protobuf classes.

Names are interned, and a timestamp is the difference to that of the packet before, so an event takes
about 20 bytes. Both refer to earlier packets of the same sequence. Events that are read later and are
older begin a new sequence.

Texts are printable, because Perfetto's tools print them to terminals.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Mapping
from typing import IO, NamedTuple

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb  # type: ignore[import-untyped]

from torchlens_perf.errors import printable

# A clock of each sequence. Its timestamps are differences.
_CLOCK = 64
_PACKETS_AT_ONCE = 4096


class EventType(enum.IntEnum):
    """Types of events, with Perfetto's numbers."""

    BEGIN = pb.TrackEvent.TYPE_SLICE_BEGIN
    END = pb.TrackEvent.TYPE_SLICE_END
    INSTANT = pb.TrackEvent.TYPE_INSTANT
    COUNTER = pb.TrackEvent.TYPE_COUNTER


class Event(NamedTuple):
    """One event of a track."""

    time_ns: int
    type: EventType
    track: int
    name: str = ""
    category: str = ""
    flows: tuple[int, ...] = ()
    """Numbers that connect slices by arrows."""
    value: float = 0.0
    """Value of a counter."""
    annotations: Mapping[str, str | int | float] = {}


class TraceWriter:
    """Write tracks, then events in order of time."""

    def __init__(self, file: IO[bytes], begin_ns: int) -> None:
        """begin_ns: time of the trace's clock that no event precedes."""
        self._file = file
        self._sequence = 0
        self._tracks = itertools.count(1)
        self._trace = pb.Trace()
        self.begin_sequence(begin_ns)
        # Perfetto reads the order of processes from the root, which comes before them.
        root = self._trace.packet.add(trusted_packet_sequence_id=self._sequence).track_descriptor
        root.uuid = 0
        root.process_ordering = pb.TrackDescriptor.PROCESS_ORDERING_EXPLICIT
        root.child_ordering = pb.TrackDescriptor.EXPLICIT

    def begin_sequence(self, begin_ns: int) -> None:
        """Begin a sequence of events that are in order of time, but not later than the others."""
        self._sequence += 1
        self._time_ns = begin_ns
        self._names: dict[str, int] = {}
        self._categories: dict[str, int] = {}
        packet = self._trace.packet.add(trusted_packet_sequence_id=self._sequence)
        packet.sequence_flags = pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        packet.trace_packet_defaults.timestamp_clock_id = _CLOCK
        snapshot = self._trace.packet.add(trusted_packet_sequence_id=self._sequence).clock_snapshot
        snapshot.clocks.add(clock_id=_CLOCK, timestamp=0, is_incremental=True)
        boot = pb.BuiltinClock.BUILTIN_CLOCK_BOOTTIME
        snapshot.clocks.add(clock_id=boot, timestamp=begin_ns)
        real = pb.BuiltinClock.BUILTIN_CLOCK_REALTIME
        snapshot.clocks.add(clock_id=real, timestamp=begin_ns)

    def add_process(self, number: int, name: str, order: int) -> int:
        """Add a process, a group of tracks, and return the number of its track."""
        descriptor = self._add_descriptor()
        descriptor.process.pid = number
        descriptor.process.process_name = printable(name)
        descriptor.sibling_order_rank = order
        descriptor.child_ordering = pb.TrackDescriptor.EXPLICIT
        return int(descriptor.uuid)

    def add_track(self, name: str, parent: int | None, order: int) -> int:
        """Add a track for slices or instants and return its number."""
        descriptor = self._add_descriptor()
        descriptor.name = printable(name)
        descriptor.sibling_order_rank = order
        descriptor.sibling_merge_behavior = pb.TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE
        if parent is not None:
            descriptor.parent_uuid = parent
        return int(descriptor.uuid)

    def add_counter(self, name: str, unit: str, parent: int, order: int) -> int:
        """Add a track for a counter and return its number."""
        track = self.add_track(name, parent, order)
        counter = self._trace.packet[-1].track_descriptor.counter
        counter.unit_name = unit
        return track

    def write(self, events: Iterable[Event]) -> None:
        """Write events, which must be in order of time."""
        for event in events:
            self._add_event(event)
            if len(self._trace.packet) >= _PACKETS_AT_ONCE:
                self.flush()

    def flush(self) -> None:
        """Write the collected packets to the file."""
        self._file.write(self._trace.SerializeToString())
        self._trace.Clear()

    def _add_descriptor(self) -> pb.TrackDescriptor:
        packet = self._trace.packet.add(trusted_packet_sequence_id=self._sequence)
        packet.track_descriptor.uuid = next(self._tracks)
        return packet.track_descriptor

    def _add_event(self, event: Event) -> None:
        packet = self._trace.packet.add()
        packet.trusted_packet_sequence_id = self._sequence
        packet.sequence_flags = pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        # Clocks of two nodes may be corrected by different amounts from one batch to the next.
        packet.timestamp = max(0, event.time_ns - self._time_ns)
        self._time_ns = max(self._time_ns, event.time_ns)
        into = packet.track_event
        into.type = event.type
        into.track_uuid = event.track
        if event.name:
            into.name_iid = self._intern_text(self._names, event.name, packet, "event_names")
        if event.category:
            into.category_iids.append(
                self._intern_text(self._categories, event.category, packet, "event_categories")
            )
        into.flow_ids.extend(event.flows)
        if event.type is EventType.COUNTER:
            into.double_counter_value = event.value
        for name, value in event.annotations.items():
            annotation = into.debug_annotations.add(name=printable(name))
            if isinstance(value, str):
                annotation.string_value = printable(value)
            elif isinstance(value, int):
                annotation.int_value = value
            else:
                annotation.double_value = value

    @staticmethod
    def _intern_text(known: dict[str, int], text: str, packet: pb.TracePacket, field: str) -> int:
        """Return the number of a text. A text that is new is defined in this packet."""
        number = known.get(text)
        if number is None:
            number = known[text] = len(known) + 1
            getattr(packet.interned_data, field).add(iid=number, name=printable(text))
        return number
