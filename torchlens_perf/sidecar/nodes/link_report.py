"""Encode a node's statistics of collective operations. Node 0 uses them to find slow links.

Each report replaces the node's previous one. This module does no I/O.
"""

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
    """The job's attempt to which the node's processes belong."""
    rows: list[LinkStatistics]


_encode, _decoder = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(_LinkReport)


def encode_link_report(attempt: int, rows: Sequence[LinkStatistics]) -> tuple[bytes, int]:
    """Return an encoded report, and the number of rows that did not fit into it.

    Rows with too few operations are left out. Rows with the most time are included first.
    """
    ready = [each for each in rows if each.transfers >= MIN_OPERATIONS]
    ready.sort(key=lambda each: -each.joined * each.transfer_ns[1])
    kept = len(ready)
    while True:
        unpacked = _encode(_LinkReport(attempt, ready[:kept]))
        packed = zlib.compress(unpacked, 1)
        if len(packed) <= MAX_LINKS_BYTES and len(unpacked) <= _MAX_UNPACKED_BYTES:
            return packed, len(ready) - kept
        # Leave out a quarter of the rows until the report fits.
        kept = kept * 3 // 4


def decode_link_report(data: bytes, attempt: int, world_size: int) -> list[LinkStatistics]:
    """Return a node's rows, or [] for another attempt. Raises ValueError for invalid data."""
    try:
        # Limit the size, because a small message could decompress to a large amount of memory.
        report = _decoder.decode(zlib.decompressobj().decompress(data, _MAX_UNPACKED_BYTES))
    except (zlib.error, msgspec.MsgspecError, UnicodeError) as error:
        raise ValueError(f"invalid link report: {error}") from error
    if report.attempt != attempt:
        return []
    for row in report.rows:
        times = (row.wait_ns, *row.transfer_ns, row.joined, row.bytes, row.waits, row.transfers)
        valid = (
            _are_valid_ranks(row.key.pair, world_size)
            if row.key.pair
            else _is_valid_group(row.key.ranges, world_size)
        )
        if not valid or not 0 <= row.key.octave <= 64:
            raise ValueError("invalid link report: ranks or sizes are out of range")
        if not all(math.isfinite(each) and each >= 0 for each in times):
            raise ValueError("invalid link report: times or counts are negative or not finite")
    return report.rows


# Cached because thousands of nodes report the same groups.
@functools.lru_cache(4096)
def _is_valid_group(ranges: str, world_size: int) -> bool:
    return _are_valid_ranks(parse_ranges(ranges), world_size)


def _are_valid_ranks(ranks: tuple[int, ...], world_size: int) -> bool:
    return bool(ranks) and min(ranks) >= 0 and max(ranks) < world_size
