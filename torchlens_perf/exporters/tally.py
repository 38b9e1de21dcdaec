"""What a node's ranks did, as it is handed on to node 0's sidecar, which adds up what all nodes hand on.

Counts are cumulative from the sidecar's start, so a lost message needs no retransmission. A message has some pieces of
some series, as all buckets of one may not fit into it. A sidecar that is started again counts from zero, under another
number of its own.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from torchlens_perf.exporters import MAX_TALLY_BYTES, TALLY_MARK, semantics
from torchlens_perf.run.sketch import BUCKETS, Sketch

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.exporters.series import Histogram, Meter, Number

logger = logging.getLogger("torchlens_perf.sidecar")

EVERY_S = 5.0
_EARLIER_S = 30.0
"""A node that has counted for so much longer than node 0's sidecar has posted to an earlier one, which has sent its
counts. For as long again, pieces that come for the first time only say where to count from."""
_PIECE = 64
"""Buckets: of any counts, a piece of so many fits into a message."""
_MAX_NODES = 16384

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]


class _Piece(msgspec.Struct, array_like=True, frozen=True):
    """Some buckets of a series of a histogram, and what is known of all of it."""

    metric: Annotated[int, msgspec.Meta(ge=0, le=255)]
    phase: Annotated[str, msgspec.Meta(max_length=32)]
    sum_ns: _Count
    min_ns: _Count
    max_ns: _Count
    first: Annotated[int, msgspec.Meta(ge=0, lt=BUCKETS)]
    """The first of these buckets."""
    counts: list[_Count]
    """From there on, at most to the next multiple of _PIECE."""

    def __post_init__(self) -> None:
        if self.first % _PIECE + len(self.counts) > _PIECE:
            raise ValueError(f"{len(self.counts)} buckets from number {self.first} on are no piece")


class _Message(msgspec.Struct, array_like=True, frozen=True):
    instance: int
    age_s: float
    """For so long this sidecar has counted."""
    memory_bytes: _Count
    """Of its fullest rank."""
    numbers: Annotated[list[float], msgspec.Meta(max_length=16)]
    explicit_bounds: bool
    """Whether the buckets are those of Meter(explicit_bounds=True)."""
    pieces: Annotated[list[_Piece], msgspec.Meta(max_length=64)]


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
        self._next = 0  # piece, in turn

    def next(self, memory_bytes: int) -> bytes:
        """The next message; b"" while none is due."""
        now_s = self._clock()
        if now_s < self._due_s:
            return b""
        pieces = [
            piece
            for metric, histogram in enumerate(self._histograms)
            for attributes, sketch in histogram.sketches()
            for piece in _pieces(metric, str(attributes.get(semantics.PHASE, "")), sketch)
        ]
        if not pieces:
            return b""
        numbers, explicit = [float(counter.total()) for counter in self._counters], self._meter.bounds is not None
        chosen: list[_Piece] = []
        data = b""
        for offset in range(len(pieces)):
            chosen.append(pieces[(self._next + offset) % len(pieces)])
            message = _Message(self._instance, now_s - self._began_s, memory_bytes, numbers, explicit, chosen)
            longer = TALLY_MARK + _encode(message)
            if len(longer) > MAX_TALLY_BYTES:
                chosen.pop()
                break
            data = longer
        self._next += len(chosen)
        # The rest follows at once: what a message holds is as old as the last one that had it.
        self._due_s = now_s + EVERY_S * len(chosen) / len(pieces)
        return data


def _pieces(metric: int, phase: str, sketch: Sketch) -> list[_Piece]:
    """Split a series; pieces without a count are left out."""
    first, counts = sketch.used
    of_all, found = (sketch.sum_ns, sketch.min_ns, sketch.max_ns), []
    for place in range(first // _PIECE * _PIECE, first + len(counts), _PIECE):
        these = counts[max(0, place - first) : place - first + _PIECE]
        if these.any():
            found.append(_Piece(metric, phase, *of_all, max(place, first), these.tolist()))
    return found


@dataclasses.dataclass
class _Counted:
    """What a sidecar of another node has counted."""

    instance: int
    others_until_s: float
    """Until then, what comes for the first time may be in the counts of an earlier sidecar of node 0."""
    memory_bytes: int = 0
    numbers: list[float] | None = None
    sums_ns: dict[tuple[int, str], int] = dataclasses.field(default_factory=dict)
    pieces: dict[tuple[int, str, int], npt.NDArray[np.int64]] = dataclasses.field(default_factory=dict)


class HandedOn:
    """What other nodes have handed on: adds what is new of it to the series that are sent."""

    def __init__(
        self, meter: Meter, histograms: Sequence[Histogram], counters: Sequence[Number],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._meter, self._histograms, self._counters, self._clock = meter, histograms, counters, clock
        self._began_s = clock()
        self._nodes: dict[str, _Counted] = {}

    @property
    def memory_bytes(self) -> int:
        """Of the fullest rank of those nodes; 0 where nobody knows."""
        return max((each.memory_bytes for each in self._nodes.values()), default=0)

    def take(self, node: str, data: bytes) -> None:
        """Decode one node's message. Invalid messages are logged and dropped."""
        try:
            message = _decoder.decode(data[len(TALLY_MARK) :])
        except msgspec.MsgspecError as error:
            logger.warning("what node %s hands on cannot be read: %s", node, error)
            return
        counted, now_s = self._nodes.get(node), self._clock()
        if counted is None and len(self._nodes) >= _MAX_NODES:
            return
        if counted is None or counted.instance != message.instance:  # a sidecar that is started again counts from zero
            is_earlier = counted is None and message.age_s > now_s - self._began_s + _EARLIER_S
            counted = _Counted(message.instance, now_s + _EARLIER_S if is_earlier else float("-inf"))
            self._nodes[node] = counted
        counted.memory_bytes = message.memory_bytes
        others, before = now_s < counted.others_until_s, counted.numbers
        if before is not None or not others:
            for counter, now, then in zip(
                self._counters, message.numbers, before or [0.0] * len(message.numbers), strict=False
            ):
                if now > then:
                    counter.add(int(now - then), {})
        counted.numbers = message.numbers
        for each in message.pieces:
            if each.metric < len(self._histograms) and message.explicit_bounds == (self._meter.bounds is not None):
                self._add(counted, each, others=others)

    def _add(self, counted: _Counted, piece: _Piece, *, others: bool) -> None:
        """others: if the piece comes for the first time, its counts are those of an earlier sidecar of node 0."""
        series, place, first = (piece.metric, piece.phase), piece.first // _PIECE, piece.first % _PIECE
        counts = np.zeros(_PIECE, np.int64)
        counts[first : first + len(piece.counts)] = piece.counts
        before = counted.pieces.get((*series, place))
        counted.pieces[(*series, place)] = counts
        if before is None and others:
            counted.sums_ns[series] = piece.sum_ns
            return
        grown = counts if before is None else np.maximum(counts - before, 0)
        used = grown.nonzero()[0]
        if not len(used):
            return
        sum_ns = max(0, piece.sum_ns - counted.sums_ns.get(series, 0))
        counted.sums_ns[series] = piece.sum_ns
        # The extremes stay those of all. Sums of squares are not sent: nothing that is exported needs them.
        grown = grown[used[0] : used[-1] + 1]
        numbers = [sum_ns, 0, piece.min_ns, piece.max_ns, place * _PIECE + int(used[0]), *grown.tolist()]
        attributes: dict[str, Any] = {semantics.PHASE: piece.phase} if piece.phase else {}
        self._histograms[piece.metric].merge(Sketch.from_numbers(numbers), attributes)
