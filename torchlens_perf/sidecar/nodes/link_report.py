"""What a node reports of its collectives, so that node 0 finds slow links: a blob that replaces the last one. Pure."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence

import msgspec

from torchlens_perf.analysis.collectives.slow_link import MIN_OPERATIONS, LinkStatistics
from torchlens_perf.run.rank_ranges import parse_ranges
from torchlens_perf.sidecar.nodes.messages import MAX_LINKS_BYTES

_MAX_UNPACKED_BYTES = 1 << 18


class _LinkReport(msgspec.Struct, array_like=True, frozen=True):
    attempt: int
    """The job's, of which the node's processes are."""
    rows: list[LinkStatistics]


_encode, _decoder = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(_LinkReport)


def encode(attempt: int, rows: Sequence[LinkStatistics]) -> tuple[bytes, int]:
    """The rows that can be judged, those with most time first, and the number of rows that do not fit."""
    ready = [each for each in rows if each.transfers >= MIN_OPERATIONS]
    ready.sort(key=lambda each: -each.joined * each.transfer_ns[1])
    kept = len(ready)
    while True:
        unpacked = _encode(_LinkReport(attempt, ready[:kept]))
        packed = zlib.compress(unpacked, 1)
        if len(packed) <= MAX_LINKS_BYTES and len(unpacked) <= _MAX_UNPACKED_BYTES:
            return packed, len(ready) - kept
        kept = kept * 3 // 4


def decode(data: bytes, attempt: int, world_size: int) -> list[LinkStatistics]:
    """The rows of a node; none if its processes are of another attempt. Raises ValueError for invalid data."""
    try:
        report = _decoder.decode(zlib.decompressobj().decompress(data, _MAX_UNPACKED_BYTES))
    except (zlib.error, msgspec.MsgspecError, UnicodeError) as error:
        raise ValueError(f"not a node's collectives: {error}") from error
    if report.attempt != attempt:
        return []
    for row in report.rows:
        times = (row.wait_ns, *row.transfer_ns, row.joined, row.bytes, row.waits, row.transfers)
        valid = _are_ranks(row.key.pair, world_size) if row.key.pair else _are_group(row.key.ranges, world_size)
        if not valid or not 0 <= row.key.octave <= 64:
            raise ValueError("a node's collectives have invalid ranks or sizes")
        if not all(math.isfinite(each) and each >= 0 for each in times):
            raise ValueError("a node's collectives have invalid numbers")
    return report.rows


@functools.lru_cache(4096)  # thousands of nodes report on the same groups
def _are_group(ranges: str, world_size: int) -> bool:
    return _are_ranks(parse_ranges(ranges), world_size)


def _are_ranks(ranks: tuple[int, ...], world_size: int) -> bool:
    return bool(ranks) and min(ranks) >= 0 and max(ranks) < world_size
