"""Messages that carry a node's metric sums to the sidecar of node 0, which adds up all nodes.

Counts are cumulative from the sidecar's start, so a lost message needs no retransmission. The
buckets of a series may not fit into one message, so a message contains pieces of series. A
restarted sidecar counts from zero and uses a new instance number.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from torchlens_perf.exporters import MAX_TALLY_BYTES, TALLY_MARK, semantics
from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.run.sketch import BUCKETS, Sketch

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.exporters.series import ArrayHistogram, ArrayMeter, NumberInstrument


EVERY_S = 5.0
_PREDECESSOR_MARGIN_S = 30.0
"""If a node's sidecar is older than node 0's by at least this time, an earlier sidecar of node 0
has already exported the node's counts. For this time, the first piece of each series is therefore
only a baseline.
"""
_PIECE_BUCKETS = 64
"""Number of buckets that always fit into a message."""
_MAX_NODES = 16384

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]


class _HistogramPiece(msgspec.Struct, array_like=True, frozen=True):
    """Some buckets of one series of a histogram. Sum and extremes are those of the whole series."""

    metric: Annotated[int, msgspec.Meta(ge=0, le=255)]
    phase: Annotated[str, msgspec.Meta(max_length=32)]
    sum_ns: _Count
    min_ns: _Count
    max_ns: _Count
    first: Annotated[int, msgspec.Meta(ge=0, lt=BUCKETS)]
    """Index of the first bucket."""
    counts: list[_Count]
    """Counts of buckets from `first` on, within one multiple of _PIECE_BUCKETS."""

    def __post_init__(self) -> None:
        if self.first % _PIECE_BUCKETS + len(self.counts) > _PIECE_BUCKETS:
            raise ValueError(
                f"a piece of {len(self.counts)} buckets cannot begin at bucket {self.first}"
            )


class _SnapshotMessage(msgspec.Struct, array_like=True, frozen=True):
    instance: int
    age_s: float
    """Seconds since the sending sidecar started to count."""
    memory_bytes: _Count
    """Memory of the node's rank that uses most."""
    numbers: Annotated[list[float], msgspec.Meta(max_length=16)]
    explicit_bounds: bool
    """True if the buckets are those of Meter(explicit_bounds=True)."""
    pieces: Annotated[list[_HistogramPiece], msgspec.Meta(max_length=64)]


_encode, _decoder = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(_SnapshotMessage)


class SnapshotEncoder:
    """Encodes this node's series as messages. Use it on the sidecar's thread only."""

    def __init__(
        self,
        meter: ArrayMeter,
        histograms: Sequence[ArrayHistogram],
        counters: Sequence[NumberInstrument],
        clock: Callable[[], float],
    ) -> None:
        """meter: meter of the instruments, which is not exported itself. clock: returns seconds."""
        self._meter, self._clock = meter, clock
        self._histograms, self._counters = histograms, counters
        self._instance = secrets.randbits(32)
        self._began_s = clock()
        self._due_s = float("-inf")
        self._next_piece = 0

    def next_message(self, memory_bytes: int) -> bytes:
        """Return the next message; b"" if none is due."""
        now_s = self._clock()
        if now_s < self._due_s:
            return b""
        pieces = [
            piece
            for metric, histogram in enumerate(self._histograms)
            for attributes, sketch in histogram.sketches()
            for piece in _split_series(metric, str(attributes.get(semantics.PHASE, "")), sketch)
        ]
        if not pieces:
            return b""
        chosen, data = list[_HistogramPiece](), b""
        message = _SnapshotMessage(
            self._instance,
            now_s - self._began_s,
            memory_bytes,
            [float(counter.sum_of_values()) for counter in self._counters],
            self._meter.bounds is not None,
            chosen,
        )
        for offset in range(len(pieces)):
            chosen.append(pieces[(self._next_piece + offset) % len(pieces)])
            longer = TALLY_MARK + _encode(message)
            if len(longer) > MAX_TALLY_BYTES:
                chosen.pop()
                break
            data = longer
        self._next_piece += len(chosen)
        # Space the messages in proportion to their number of pieces, which sends each piece every
        # EVERY_S seconds.
        self._due_s = now_s + EVERY_S * len(chosen) / len(pieces)
        return data


def _split_series(metric: int, phase: str, sketch: Sketch) -> list[_HistogramPiece]:
    """Split the buckets of a series into pieces. Empty pieces are left out."""
    first, counts = sketch.stored_buckets
    of_all, found = (sketch.sum_ns, sketch.min_ns, sketch.max_ns), []
    for place in range(
        first // _PIECE_BUCKETS * _PIECE_BUCKETS, first + len(counts), _PIECE_BUCKETS
    ):
        these = counts[max(0, place - first) : place - first + _PIECE_BUCKETS]
        if these.any():
            found.append(_HistogramPiece(metric, phase, *of_all, max(place, first), these.tolist()))
    return found


@dataclasses.dataclass
class _NodeCounts:
    """The newest counts received from the sidecar of another node."""

    instance: int
    others_until_s: float
    """Time until which an earlier sidecar of node 0 may have exported a series' first piece."""
    memory_bytes: int = 0
    numbers: list[float] | None = None
    sums_ns: dict[tuple[int, str], int] = dataclasses.field(default_factory=dict)
    pieces: dict[tuple[int, str, int], npt.NDArray[np.int64]] = dataclasses.field(
        default_factory=dict
    )


class SnapshotAggregator:
    """Receives the messages of other nodes and adds their increments to the exported series."""

    def __init__(
        self, meter: ArrayMeter, histograms: Sequence[ArrayHistogram], counters: Sequence[NumberInstrument],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._meter, self._clock = meter, clock
        self._histograms, self._counters = histograms, counters
        self._began_s = clock()
        self._nodes: dict[str, _NodeCounts] = {}

    @property
    def memory_bytes(self) -> int:
        """Memory of the rank, of all other nodes, that uses most; 0 if unknown."""
        return max((each.memory_bytes for each in self._nodes.values()), default=0)

    def add_message(self, node: str, data: bytes) -> None:
        """Decode one node's message. Invalid messages are logged and dropped."""
        try:
            message = _decoder.decode(data[len(TALLY_MARK) :])
        except msgspec.MsgspecError as error:
            logger.warning("cannot decode the metrics that node %s forwards: %s", node, error)
            return
        counted, now_s = self._nodes.get(node), self._clock()
        if counted is None and len(self._nodes) >= _MAX_NODES:
            return
        if counted is None or counted.instance != message.instance:
            # A restarted sidecar counts from zero.
            is_earlier = (
                counted is None and message.age_s > now_s - self._began_s + _PREDECESSOR_MARGIN_S
            )
            counted = _NodeCounts(
                message.instance, now_s + _PREDECESSOR_MARGIN_S if is_earlier else float("-inf")
            )
            self._nodes[node] = counted
        counted.memory_bytes = message.memory_bytes
        others = now_s < counted.others_until_s
        if counted.numbers is None:
            counted.numbers = message.numbers if others else [0.0] * len(message.numbers)
        for counter, now, then in zip(
            self._counters, message.numbers, counted.numbers, strict=False
        ):
            if now > then:
                counter.add(int(now - then), {})
        counted.numbers = message.numbers
        for each in message.pieces:
            if each.metric < len(self._histograms) and message.explicit_bounds == (
                self._meter.bounds is not None
            ):
                self._add_piece(counted, each, others=others)

    def _add_piece(self, counted: _NodeCounts, piece: _HistogramPiece, *, others: bool) -> None:
        """Add the increments in a piece.

        others: True if an earlier sidecar of node 0 may have exported the first piece of a series.
        """
        series = piece.metric, piece.phase
        place, first = divmod(piece.first, _PIECE_BUCKETS)
        counts = np.zeros(_PIECE_BUCKETS, np.int64)
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
        # The extremes are those of the whole series. Metrics do not use the sum of squares, which
        # is 0 here.
        grown = grown[used[0] : used[-1] + 1]
        numbers = [
            sum_ns,
            0,
            piece.min_ns,
            piece.max_ns,
            place * _PIECE_BUCKETS + int(used[0]),
            *grown.tolist(),
        ]
        attributes: dict[str, Any] = {semantics.PHASE: piece.phase} if piece.phase else {}
        self._histograms[piece.metric].merge_sketch(Sketch.from_numbers(numbers), attributes)
