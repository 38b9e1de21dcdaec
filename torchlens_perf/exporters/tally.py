"""What a node's ranks did, as it is handed on to node 0's sidecar, which adds up what all nodes hand on.

Counts go on from the sidecar's start, and each message has those of some series: one that is lost costs nothing, the
next has all of it. Where a sidecar is started again it counts from zero, under another number of its own.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from torchlens_perf.exporters import MAX_TALLY_BYTES, TALLY_MARK, semantics
from torchlens_perf.exporters.counts import NO_SCALE, Counts

if TYPE_CHECKING:
    from torchlens_perf.exporters.series import Histogram, Meter, Number

logger = logging.getLogger("torchlens_perf.sidecar")

EVERY_S = 5.0
_EARLIER_S = 30.0  # that a node has counted longer than node 0's sidecar: then an earlier one has sent some of it
_MAX_NODES = 16384

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]


class _Distribution(msgspec.Struct, array_like=True, frozen=True):
    """A series of a histogram."""

    metric: Annotated[int, msgspec.Meta(ge=0, le=255)]
    phase: Annotated[str, msgspec.Meta(max_length=32)]
    scale: Annotated[int, msgspec.Meta(ge=-20, le=20)]
    """NO_SCALE: by bounds."""
    zeros: _Count
    total: float
    smallest: float
    largest: float
    first: Annotated[int, msgspec.Meta(ge=-4096, le=4096)]
    counts: Annotated[list[_Count], msgspec.Meta(max_length=1024)]


class _Message(msgspec.Struct, array_like=True, frozen=True):
    instance: int
    age_s: float
    """For so long this sidecar has counted."""
    memory_bytes: _Count
    """Of its fullest rank."""
    numbers: Annotated[list[float], msgspec.Meta(max_length=16)]
    distributions: Annotated[list[_Distribution], msgspec.Meta(max_length=64)]


_encode, _decoder = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(_Message)


class Tally:
    """Hands this node's series on. Belongs to the sidecar's thread."""

    def __init__(
        self, meter: Meter, histograms: Sequence[Histogram], counters: Sequence[Number], clock: Callable[[], float]
    ) -> None:
        """Of a meter that is not sent. clock: seconds."""
        self._meter, self._histograms, self._counters, self._clock = meter, histograms, counters, clock
        self._instance = secrets.randbits(32)
        self._began_s = clock()
        self._due_s = float("-inf")
        self._next = 0  # series, in turn
        self._is_new = False

    def next(self, memory_bytes: int) -> bytes:
        """The next message; b"" while none is due."""
        now_s = self._clock()
        if now_s < self._due_s:
            return b""
        series = [
            (index, phase, counts)
            for index, histogram in enumerate(self._histograms)
            for phase, counts in _by_phase(histogram)
        ]
        if not series:
            return b""
        numbers = [float(counter.total()) for counter in self._counters]
        chosen: list[_Distribution] = []
        data = b""
        for offset in range(len(series)):
            index, phase, counts = series[(self._next + offset) % len(series)]
            entry = _fitting(index, phase, counts)
            message = _Message(self._instance, now_s - self._began_s, memory_bytes, numbers, [*chosen, entry])
            longer = TALLY_MARK + _encode(message)
            if len(longer) > MAX_TALLY_BYTES:
                break
            chosen.append(entry)
            data = longer
        self._next += len(chosen)
        # The rest follows at once: what a message holds is as old as the last one that had it.
        self._due_s = now_s + EVERY_S * len(chosen) / len(series)
        return data


def _by_phase(histogram: Histogram) -> list[tuple[str, Counts]]:
    return [(str(attributes.get(semantics.PHASE, "")), counts) for attributes, counts in histogram.counted()]


def _fitting(metric: int, phase: str, counts: Counts) -> _Distribution:
    """With fewer buckets an octave where it would not fit into a message by itself."""
    while True:
        first, dense = counts.dense()
        entry = _Distribution(
            metric, phase, counts.scale, counts.zeros, counts.total, counts.smallest, counts.largest, first, dense
        )
        if counts.scale == NO_SCALE or len(_encode(entry)) < MAX_TALLY_BYTES - 100 or counts.scale <= -10:
            return entry
        counts = counts.lowered(counts.scale - 1)


class HandedOn:
    """What other nodes have handed on: adds what is new of it to the series that are sent."""

    def __init__(
        self, meter: Meter, histograms: Sequence[Histogram], counters: Sequence[Number],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._meter, self._histograms, self._counters, self._clock = meter, histograms, counters, clock
        self._began_s = clock()
        self._instances: dict[str, int] = {}
        self._distributions: dict[tuple[str, int, str], Counts] = {}
        self._numbers: dict[str, list[float]] = {}
        self._earlier: set[str] = set()  # nodes that an earlier sidecar of node 0 has heard
        self._memory_bytes: dict[str, int] = {}

    @property
    def memory_bytes(self) -> int:
        """Of the fullest rank of those nodes; 0 where nobody knows."""
        return max(self._memory_bytes.values(), default=0)

    def take(self, node: str, data: bytes) -> None:
        """A message of a node. What is none is left out, with a line in the log."""
        try:
            message = _decoder.decode(data[len(TALLY_MARK) :])
        except msgspec.MsgspecError as error:
            logger.warning("what node %s hands on cannot be read: %s", node, error)
            return
        if node not in self._instances and len(self._instances) >= _MAX_NODES:
            return
        if self._instances.get(node) != message.instance:
            is_earlier = node not in self._instances and (message.age_s > self._clock() - self._began_s + _EARLIER_S)
            self._forget(node)
            self._instances[node] = message.instance
            if is_earlier:
                self._earlier.add(node)
        self._memory_bytes[node] = message.memory_bytes
        before = self._numbers.get(node)
        if before is not None or node not in self._earlier:
            for counter, now, then in zip(
                self._counters, message.numbers, before or [0.0] * len(message.numbers), strict=False
            ):
                if now > then:
                    counter.add(int(now - then), {})
        self._numbers[node] = message.numbers
        for each in message.distributions:
            self._add(node, each)

    def _add(self, node: str, entry: _Distribution) -> None:
        if entry.metric >= len(self._histograms):
            return
        counts = Counts(entry.scale, entry.zeros, entry.total, entry.smallest, entry.largest)
        counts.buckets = {entry.first + index: count for index, count in enumerate(entry.counts) if count}
        key = node, entry.metric, entry.phase
        before = self._distributions.get(key)
        self._distributions[key] = counts
        if before is None and node in self._earlier:
            return
        attributes: dict[str, Any] = {semantics.PHASE: entry.phase} if entry.phase else {}
        self._histograms[entry.metric].add_counts(counts if before is None else counts.since(before), attributes)

    def _forget(self, node: str) -> None:
        """Another sidecar of the node counts from zero."""
        self._earlier.discard(node)
        self._numbers.pop(node, None)
        for key in [key for key in self._distributions if key[0] == node]:
            del self._distributions[key]
