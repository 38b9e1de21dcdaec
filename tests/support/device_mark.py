"""Write a device's progress into a ring file, as the native recorder does."""

from __future__ import annotations

import struct

from torchlens_perf.run.clock import DeviceMark
from torchlens_perf.run.ring import DEVICE_MARK, RingFile


def write_device_mark(ring: RingFile, mark: DeviceMark) -> None:
    words = (
        mark.since_ns,
        (mark.step + 1) | mark.place << 32,
        mark.kind | mark.is_end << 8 | mark.name_id << 32,
        mark.looked_ns,
    )
    for at, word in zip(DEVICE_MARK, words, strict=True):
        struct.pack_into("<Q", ring.buffer, 8 * at, word)
