"""The file in which one process writes its events, and which the node's sidecar reads.

The file is in shared memory, preallocated, mapped, and never grows. The newest event overwrites the
oldest, so a writer never waits. Each event has a sequence number, so a reader can count the events
that it missed, and a checksum, so a reader can detect an event that is being written.

::

    0     magic, checksum and length of the JSON object, the JSON object: role and name of the
          process, and of others that it has events of
    4096  events, 128 bytes each
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import struct
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlens_perf.errors import RunStoreError
from torchlens_perf.run import ownership
from torchlens_perf.run.rings import memory

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ROLES = ("trainer", "rollout", "tool", "reward", "other")
EVENTS = (
    "sample_sent", "generation_begin", "generation_end", "tool_begin", "tool_end", "reward_begin",
    "reward_end", "batch_complete", "steps_begin", "steps_end", "weights_publish_begin",
    "weights_publish_end", "weights_take_begin", "weights_take_end",
    "logprobs_begin", "logprobs_end",
)  # fmt: skip
"""Names of events. An event in a file has the index of its name."""
CODES = {name: code for code, name in enumerate(EVENTS)}
FOLDER = "events"
"""Folder of the run directory with the table of events."""
LOCK = "events.lock"
"""Lock, in the run's folder of a node, of the process that reads the events of a node without a trainer."""
UNTIL = ".until"
"""Suffix of a file in FOLDER with the time until which the events of a node are written. It is removed when
all are written."""
CAPACITY = 8192
NOT_GIVEN = -1
"""Number of tokens of an event without one."""

_MAGIC = b"TLPEVNT1"
_HEADER = struct.Struct("<8sII")
_EVENTS_OFFSET, _EVENT_BYTES = 4096, 128
_SIZE = _EVENTS_OFFSET + CAPACITY * _EVENT_BYTES
_BODY = struct.Struct("<QqBB2xii48s48s")
_LONGEST_ID = 48
_MOST_OTHERS, _LONGEST_OTHER = 30, 60
_FEW_EVENTS = 1024
"""A reader first reads this many events, because most rounds of a sidecar find fewer."""


class EventFile:
    """The event file of this process. Any thread may write to it."""

    def __init__(self, path: Path) -> None:
        """Create the file with mode 0600. Raise OSError if there is not enough space."""
        self.path = path
        self.pid = os.getpid()
        self._buffer = memory.reserve_file(path, _SIZE)
        # next() is atomic, so that threads get different numbers without a lock.
        self._sequences = itertools.count(1)
        self._description: dict[str, Any] = {"others": []}

    def describe_process(self, role: str, name: str, *, detected: bool = False) -> None:
        """Store role and name of the process, which replace earlier ones.

        detected: True if the process has not set its role.
        """
        self._describe(role=role, name=name, detected=detected)

    def number_of_other(self, role: str, name: str) -> int:
        """Return the number of another process, or of a function, that this process has events of.

        Such as a server without events of its own. Only one thread at a time may call this.
        """
        others = self._description["others"]
        other = [role, name.encode("ascii", "replace").decode()[:_LONGEST_OTHER]]
        if other not in others and len(others) >= _MOST_OTHERS:
            other = ["other", "further processes"]
        if other not in others:
            others = [*others, other]
            self._describe(others=others)
        return others.index(other) + 1

    def _describe(self, **values: Any) -> None:
        self._description |= values
        text = json.dumps(self._description).encode()
        header = _HEADER.pack(_MAGIC, zlib.crc32(text), len(text))
        self._buffer[: len(header) + len(text)] = header + text

    def write(
        self,
        code: int,
        sample: object,
        batch: object,
        tokens_in: int,
        tokens_out: int,
        other: int = 0,
        time_ns: int = 0,
    ) -> None:
        """Write an event. other: see number_of_other(). time_ns: 0 for the present time."""
        sequence = next(self._sequences)
        body = _BODY.pack(
            sequence,
            time_ns or time.monotonic_ns(),
            code,
            other,
            tokens_in,
            tokens_out,
            encode_id(sample),
            encode_id(batch),
        )
        at = _EVENTS_OFFSET + sequence % CAPACITY * _EVENT_BYTES
        self._buffer[at : at + _EVENT_BYTES] = body + zlib.crc32(body).to_bytes(4, "little")


def encode_id(value: object) -> bytes:
    """Return an id as bytes. The end of a long id becomes a digest, so different ids stay so."""
    text = str(value).encode("utf-8", "backslashreplace")
    if len(text) > _LONGEST_ID:
        text = text[:31] + b"~" + hashlib.sha256(text).hexdigest()[:16].encode()
    return text


class NewEvents(NamedTuple):
    """Events of one process that were not read before."""

    role: str
    name: str
    detected: bool
    """True if the process has not set its role."""
    others: list[tuple[str, str]]
    """Roles and names of other processes that events are of. They count from 1 in events."""
    events: npt.NDArray[np.void]
    """In the order of their sequence numbers; the fields are those of event_dtype()."""
    lost: int
    """Number of events before the last one that were overwritten."""


@functools.cache
def event_dtype() -> np.dtype[np.void]:
    """Return the NumPy structure of an event. Times are nanoseconds of CLOCK_MONOTONIC."""
    import numpy as np

    return np.dtype(
        [
            ("sequence", "<u8"), ("time_ns", "<i8"), ("code", "u1"), ("other", "u1"), ("unused", "V2"),
            ("tokens_in", "<i4"), ("tokens_out", "<i4"), ("id", "S48"), ("batch", "S48"), ("checksum", "<u4"),
        ]
    )  # fmt: skip


def read_new_events(path: Path, after: int, *, ended: bool) -> NewEvents:
    """Return the events of a file after a sequence number.

    ended: True if its process writes no more. Otherwise, reading stops before an event that a
    thread has begun to write. Raise OSError, or RunStoreError if the file is no event file.
    """
    import numpy as np

    with open(ownership.open_to_read(path), "rb", buffering=0) as file:
        header = os.pread(file.fileno(), _EVENTS_OFFSET, 0)
        if not header.startswith(_MAGIC) or os.fstat(file.fileno()).st_size < _SIZE:
            raise RunStoreError(f"{path} is not a file of events")
        first = (after + 1) % CAPACITY
        found = _read_slots(file.fileno(), first, min(_FEW_EVENTS, CAPACITY - first))
        if (found["sequence"] > after).all() or found["sequence"][0] > after + 1:
            found = _read_slots(file.fileno(), 0, CAPACITY)
    described = _read_description(header)
    found = found[found["sequence"] > after]
    found = found[np.argsort(found["sequence"])]
    whole = np.array(
        [zlib.crc32(each.tobytes()[:-4]) == each["checksum"] for each in found], np.bool_
    )
    found = found[whole]
    if not ended and len(found):
        # Numbers below this one are overwritten, not about to be written.
        oldest = max(after, int(found["sequence"][-1]) - CAPACITY) + 1
        gaps = np.diff(found["sequence"].astype(np.int64), prepend=oldest - 1) > 1
        if gaps.any() and int(found["sequence"][0]) >= oldest:
            found = found[: int(gaps.argmax())]
    last = int(found["sequence"][-1]) if len(found) else after
    others = [(str(role), str(name)) for role, name in described["others"]]
    return NewEvents(
        str(described["role"]), str(described["name"]), bool(described["detected"]), others, found,
        last - after - len(found),
    )  # fmt: skip


def _read_slots(descriptor: int, first: int, count: int) -> npt.NDArray[np.void]:
    import numpy as np

    content = os.pread(descriptor, count * _EVENT_BYTES, _EVENTS_OFFSET + first * _EVENT_BYTES)
    return np.frombuffer(content, event_dtype())


def _read_description(content: bytes) -> dict[str, Any]:
    """Return the description of the process; that of an unknown one while it is being written."""
    _, checksum, length = _HEADER.unpack_from(content)
    text = content[_HEADER.size : _HEADER.size + min(length, _EVENTS_OFFSET)]
    unknown = {"role": "other", "name": "", "detected": False, "others": []}
    return {**unknown, **(json.loads(text) if text and zlib.crc32(text) == checksum else {})}
