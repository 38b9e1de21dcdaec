"""The ring file: fixed-size records that one process writes and another one reads, live or after its death.

A ring file is preallocated, mapped into memory and never grows. The writer overwrites the oldest record, so it never
waits for a reader; each record carries its sequence number, so a reader knows exactly how many it missed. A process
that is killed leaves its newest records behind, and the stack of spans that it had open.

::

    0      header   sizes, counters, the open spans of the training thread (native/layout.h has the same as C)
    4096   metadata one JSON object: rank, host, process, clock anchors
    12288  names    length-prefixed UTF-8; a record's name_id is the position in this list
    274432 records  64 bytes each

`recorder/recorder.py` writes records; this module makes the file, interns names and reads.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlens_perf.errors import RingError
from torchlens_perf.run.fitting import fitted
from torchlens_perf.run.rings import memory
from torchlens_perf.run.rings.kinds import Flag as Flag
from torchlens_perf.run.rings.kinds import Kind as Kind
from torchlens_perf.run.rings.kinds import State as State
from torchlens_perf.run.rings.kinds import kind_name as kind_name

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAGIC = b"TLPRING\0"
VERSION = 3
RECORD_BYTES = 64
MAX_FRAMES = 64
MAX_GROUPS = 48
FRAME_BYTES = 32
GROUP_WORDS = 3  # of a row in the table of groups: its name's id and begun, issued, ended
METADATA_OFFSET, METADATA_BYTES = 4096, 8192
NAMES_OFFSET, NAMES_BYTES = 12288, 262144
RECORDS_OFFSET = 274432
_MAPPED_AT_ONCE = 1 << 24  # the rest of a very long ring is mapped as it fills
LONGEST_NAME = 256
IN_FLIGHT = 64  # records that writers on several threads may have begun and not finished (the Python implementation)
# A STEP record's value1: micro-steps, and above them the workload plus 1 (0: not known).
WORKLOAD_SHIFT = 16
MICRO_STEPS_MASK = (1 << WORKLOAD_SHIFT) - 1
_LAST = 1 << 62  # no ring comes to so many records: more is damage
UNKNOWN_NS = (1 << 63) - 1  # a DEVICE record's value1, where the device's clock is not known well enough
MERGED_RANK_SHIFT = 44  # of a MERGED record's value0: above it, the slowest rank plus 1
CAPTURING = "perf capture"  # the section in which a rank begins or writes one; nodes tell each other 16 bytes of it
STACK_SIGNAL = signal.SIGUSR2  # upon which a process writes its stack into the file that its metadata name
OTHER_NAMES = "(other)"  # name 0: the step itself, and names beyond the table's space

# Header fields that change while the job runs: 64-bit words, by their index.
HEAD, STEP, UNBALANCED, TOO_DEEP, TOOL_NS, STATE, GC_NS = 8, 9, 10, 11, 12, 13, 14
NAMES_USED, NAMES_LOST, METADATA_REVISION, METADATA_USED, INTERNAL_ERRORS = 16, 17, 18, 19, 20
DEPTH, FRAMES, DEVICE_MARK = 24, 25, (15, 21, 22, 23)
GROUPS_USED, GROUPS = 281, 282
_FIXED = struct.Struct("<8sIIQQQQQQ")  # magic, version, record_bytes, capacity, then offset and size of each area


class RingFile:
    """The writer's side of a ring file: makes and maps it, interns names, publishes metadata.

    Any thread of the process that made it. Only what is rare takes the lock: a name's or group's first time, and new
    metadata. The lock is re-entrant: a signal's handler may run in the middle, and come back here.
    """

    def __init__(self, path: Path, capacity: int, first_step: int = 0, *, anonymous: bool = False) -> None:
        """Creates the file, mode 0600, with room for `capacity` records (a power of two).

        first_step: index of the step that the first records belong to. anonymous: in memory without a file, with a link
        at `path` (rings/memory.py). Raises OSError where there is no room. With any error there is no file.
        """
        self.path = path
        self.run_dir = ""  # that it belongs to, for who finds it when all who knew of it are dead
        self._descriptor: int | None = None  # of anonymous memory, which others reach by it
        size = RECORDS_OFFSET + capacity * RECORD_BYTES
        if anonymous:
            self.buffer, self._descriptor = memory.reserve_anonymous(str(path), size)
        else:
            self.buffer = memory.reserve_file(path, size)
        try:
            for page in range(0, min(size, _MAPPED_AT_ONCE), mmap.PAGESIZE):
                self.buffer[page] = 0  # mapped now: a page fault costs more than a mark
            self._lock = threading.RLock()
            self._names: dict[str, tuple[int, int]] = {}  # id, and where its text ends in the table
            self._groups: dict[str, int] = {}
            self._name_listener: Callable[[str], None] | None = None
            self._names_told = 1
            self._metadata = b""
            self._words = memoryview(self.buffer).cast("Q")
            _FIXED.pack_into(
                self.buffer, 0, MAGIC, VERSION, RECORD_BYTES, capacity,
                METADATA_OFFSET, METADATA_BYTES, NAMES_OFFSET, NAMES_BYTES, RECORDS_OFFSET,
            )  # fmt: skip
            self._words[STEP] = first_step
            self.intern(OTHER_NAMES)
        except BaseException:
            os.unlink(path)
            self.release()
            raise

    def intern(self, name: str) -> int:
        """Returns the id of `name`; 0, and counts it, once the table is full."""
        known = self._names.get(name)
        return self._intern_new(name) if known is None else known[0]

    def _intern_new(self, name: str) -> int:
        with self._lock:
            known = self._names.get(name)
            if known is not None:
                return known[0]
            text = name.encode("utf-8", "backslashreplace")[:LONGEST_NAME]
            used = next(reversed(self._names.values()))[1] if self._names else 0
            name_id, end = len(self._names), used + 2 + len(text)
            if end > NAMES_BYTES:
                self._words[NAMES_LOST] += 1
                return 0
            struct.pack_into(f"<H{len(text)}s", self.buffer, NAMES_OFFSET + used, len(text), text)
            try:
                self._names[name] = name_id, end  # at once: an exception by a signal leaves it known or unknown
            finally:
                self._words[NAMES_USED] = end if name in self._names else used
            self._tell_listener()
            return name_id

    def set_name_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with every name but the first, in the order of their ids; existing names at once."""
        with self._lock:
            self._name_listener = listener
            self._tell_listener()

    def _tell_listener(self) -> None:
        listener = self._name_listener
        if listener is None:
            return
        names = self.names()
        while self._names_told < len(names):
            self._names_told += 1  # first: a signal's handler may intern meanwhile
            listener(names[self._names_told - 1])

    def names(self) -> list[str]:
        """All names interned so far, by id."""
        return list(self._names)

    def inside(self) -> list[str]:
        """Names of the spans that the training thread is inside of, outermost first, without the step."""
        names, depth = self.names(), min(self._words[DEPTH], MAX_FRAMES)
        ids = [self._words[FRAMES + FRAME_BYTES // 8 * i + 3] & 0xFFFFFFFF for i in range(1, depth)]
        return [name_of(names, name_id) for name_id in ids]

    def add_group(self, name: str) -> int:
        """The row in the table that shows how far a process group is; MAX_GROUPS, without a row, once it is full."""
        with self._lock:
            slot = self._groups.get(name, len(self._groups))
            if slot < MAX_GROUPS and name not in self._groups:
                self._words[GROUPS + GROUP_WORDS * slot] = self.intern(name)
                self._groups[name] = slot
                self._words[GROUPS_USED] = slot + 1
            return slot

    def set_device_mark(self, words: Sequence[int]) -> None:
        """How far the device is; clock.py knows the words."""
        for index, word in zip(DEVICE_MARK, words, strict=True):
            self._words[index] = word

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replaces the metadata. A reader that sees an odd revision, or another checksum, tries again.

        What does not fit into METADATA_BYTES is left out, with a note that says so (fitting.py).
        """
        text = fitted(metadata, METADATA_BYTES)
        with self._lock:
            self._metadata = text
            try:
                self._store_metadata()
            except BaseException:
                self._store_metadata()  # a signal's handler has raised in the middle: a reader must not wait for ever
                raise

    def _store_metadata(self) -> None:
        text = b""
        while text is not self._metadata:  # a signal's handler may have replaced them meanwhile: the newest stay
            text = self._metadata
            self._words[METADATA_REVISION] |= 1
            self.buffer[METADATA_OFFSET : METADATA_OFFSET + len(text)] = text
            # With the checksum, as a signal's handler that publishes here makes the revision even in the middle.
            self._words[METADATA_USED] = zlib.crc32(text) << 32 | len(text)
            self._words[METADATA_REVISION] = (self._words[METADATA_REVISION] | 1) + 1

    def add_gc_ns(self, duration_ns: int) -> None:
        """Adds to the time in which Python has collected garbage. Closed, it adds nothing."""
        if not self.buffer.closed:
            self._words[GC_NS] += duration_ns

    def count_internal_error(self) -> None:
        """Counts an error of ours that was kept away from the training loop."""
        self._words[INTERNAL_ERRORS] += 1

    def close(self) -> None:
        """Marks the ring as ended by its writer and unmaps it; the recorder must be closed. Again is harmless."""
        if self.buffer.closed:
            return
        self._words[STATE] = State.CLOSED
        self._words.release()
        self.buffer.close()

    def release(self, timeout_s: float = 0.0) -> bool:
        """The process needs the ring no more, nor its files. Again is harmless.

        Anonymous memory is lost where nobody else has it open: waits for that, at most so long. Returns whether it is
        kept.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return True
        try:
            return memory.wait_until_held(str(self.path), descriptor, timeout_s)
        finally:
            os.close(descriptor)


class OpenSpan(NamedTuple):
    """A span that has begun and not ended."""

    kind: Kind
    name: str
    start_ns: int


class GroupProgress(NamedTuple):
    """How far one rank is in one process group, or with one peer."""

    name: str
    issued: int
    """Sequence number of the last operation that it issued, plus 1."""
    ended: int
    """The same of the last one that is known to have ended, or whose end the backend does not tell."""
    began: int = 0  # the same of the last one whose kernel has begun on the device; 0: nobody tells


def name_of(names: list[str], name_id: int) -> str:
    return names[name_id] if name_id < len(names) else "(unknown)"


class Batch(NamedTuple):
    """What one read returned: records, their sequence numbers, and how many were lost before or between them."""

    records: npt.NDArray[np.void]
    sequences: npt.NDArray[np.int64]
    lost: int


def record_dtype() -> np.dtype[np.void]:
    """The 64 bytes of a record as a NumPy structure. Durations and times are nanoseconds of CLOCK_MONOTONIC."""
    import numpy as np

    fields = (
        ("stamp", "<u4"), ("kind", "u1"), ("depth", "u1"), ("flags", "<u2"), ("name_id", "<u4"), ("step", "<u4"),
        ("start_ns", "<i8"), ("duration_ns", "<i8"), ("nested_ns", "<i8"), ("phase_ns", "<i8"),
        ("value0", "<u8"), ("value1", "<u8"),
    )  # fmt: skip
    return np.dtype(list(fields))


class Reader:
    """Reads a ring file that another process may be writing, or has left behind.

    By pread(2), not by a map: whoever makes the file shorter costs this ring its records, where a load from a mapped
    page that is gone would end the reading process with SIGBUS. One thread.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        """descriptor: of the ring, open already; it is closed with this. Raises OSError, and RingError for no ring."""
        self.path = path
        self.cursor = 0  # sequence number of the next record to read
        self._descriptor = memory.open_to_read(str(path)) if descriptor is None else descriptor
        try:
            self.capacity = self._checked_capacity()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._header = bytes(METADATA_OFFSET)  # as it was last seen whole
        self._names: list[str] = []
        self._names_read = 0

    def _checked_capacity(self) -> int:
        size = os.fstat(self._descriptor).st_size
        if size < RECORDS_OFFSET + RECORD_BYTES:
            raise RingError(f"{self.path} is too short to be a ring file")
        magic, version, record_bytes, capacity, *_ = _FIXED.unpack(
            os.pread(self._descriptor, _FIXED.size, 0).ljust(_FIXED.size)
        )
        if magic != MAGIC or version != VERSION or record_bytes != RECORD_BYTES:
            raise RingError(f"{self.path} is not a ring file of version {VERSION}")
        if capacity & (capacity - 1) or size != RECORDS_OFFSET + capacity * RECORD_BYTES:
            raise RingError(f"{self.path} says it holds {capacity} records, which does not match its {size} bytes")
        return int(capacity)

    def hold(self) -> None:
        """Says that this process keeps the ring, until close(), also where its process ends."""
        memory.hold(str(self.path), self._descriptor)

    def _words(self, first: int, count: int = 1) -> tuple[int, ...]:
        """Words of the header as they are now; of a file that was cut or overwritten, as they were last."""
        header = os.pread(self._descriptor, METADATA_OFFSET, 0)
        if len(header) == METADATA_OFFSET and header.startswith(MAGIC):
            self._header = header
        return struct.unpack_from(f"<{count}Q", self._header, 8 * first)

    def counter(self, word: int) -> int:
        """A header counter: HEAD, STEP, UNBALANCED, TOO_DEEP, TOOL_NS, STATE, GC_NS, NAMES_LOST or INTERNAL_ERRORS."""
        return self._words(word)[0]

    def metadata(self) -> dict[str, Any]:
        """The writer's metadata; empty while it is being replaced, and where it is not what the writer has stored."""
        revision, used = self.counter(METADATA_REVISION), self.counter(METADATA_USED)
        text = os.pread(self._descriptor, min(used & 0xFFFFFFFF, METADATA_BYTES), METADATA_OFFSET)
        if revision % 2 or revision != self.counter(METADATA_REVISION) or not text or zlib.crc32(text) != used >> 32:
            return {}
        try:
            loaded = json.loads(text)
        except (ValueError, RecursionError):
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def names(self) -> list[str]:
        """All names interned so far; a record's name_id is a position in this list."""
        used = min(self.counter(NAMES_USED), NAMES_BYTES)
        if used > self._names_read:
            text, at = os.pread(self._descriptor, used - self._names_read, NAMES_OFFSET + self._names_read), 0
            while at + 2 <= len(text):
                (length,) = struct.unpack_from("<H", text, at)
                self._names.append(text[at + 2 : at + 2 + length].decode("utf-8", "replace"))
                at += 2 + length
            self._names_read += at
        return self._names

    def open_spans(self) -> list[OpenSpan]:
        """What the training thread is inside of, outermost first. A snapshot: a running writer may change it midway."""
        names, spans = self.names(), []
        depth, *frames = self._words(DEPTH, 1 + FRAME_BYTES // 8 * MAX_FRAMES)
        for i in range(min(depth, MAX_FRAMES)):
            start_ns, _, _, packed = frames[4 * i : 4 * i + 4]
            name_id, kind = packed & 0xFFFFFFFF, packed >> 32
            if kind in Kind._value2member_map_ and name_id < len(names):
                spans.append(OpenSpan(Kind(kind), names[name_id], start_ns))
        return spans

    def groups(self) -> list[GroupProgress]:
        """How far the rank is in each of its groups. A snapshot, as of open_spans()."""
        names, found = self.names(), []
        groups, *rows = self._words(GROUPS_USED, 1 + GROUP_WORDS * MAX_GROUPS)
        for i in range(min(groups, MAX_GROUPS)):
            name_id, issued, ended = rows[GROUP_WORDS * i : GROUP_WORDS * (i + 1)]
            if name_id & 0xFFFFFFFF < len(names):
                found.append(GroupProgress(names[name_id & 0xFFFFFFFF], issued, ended, name_id >> 32))
        return found

    def read(self, *, final: bool = False) -> Batch:
        """The records since the last read. Overwritten ones are counted as lost and skipped.

        A record that is still being written ends the batch and is read next time; with `final`, for a writer that has
        ended, it is counted as lost. Raises RingError where the file was cut or overwritten meanwhile.
        """
        import numpy as np

        asked, stop = self.cursor, min(self.counter(HEAD), _LAST)
        first = max(asked, stop - self.capacity)
        sequences = np.arange(first, max(first, stop), dtype=np.int64)
        stamps = (sequences + 1).astype(np.uint32)
        records = self._copied(first, len(sequences))
        # A slot that was being rewritten while it was copied had another stamp then, or has one now.
        whole = (records["stamp"] == stamps) & (self._copied(first, len(sequences))["stamp"] == stamps)
        if os.fstat(self._descriptor).st_size != RECORDS_OFFSET + self.capacity * RECORD_BYTES:
            raise RingError(f"{self.path} was made shorter")
        if os.pread(self._descriptor, len(MAGIC), 0) != MAGIC:
            raise RingError(f"{self.path} was overwritten")
        if not whole.all():
            head = self.counter(HEAD)
            in_flight = (sequences > head - self.capacity) & (sequences >= head - IN_FLIGHT)
            unfinished = np.flatnonzero(~whole & in_flight)
            if len(unfinished) and not final:
                cut = int(unfinished[0])
                records, sequences, whole = records[:cut], sequences[:cut], whole[:cut]
                stop = first + cut
            records, sequences = records[whole], sequences[whole]
        self.cursor = max(asked, stop)
        return Batch(records, sequences, self.cursor - asked - len(records))

    def _copied(self, first: int, count: int) -> npt.NDArray[np.void]:
        """That many records from number `first` on, as they lie there now; zeros where the file ends before."""
        import numpy as np

        copied, begin = bytearray(count * RECORD_BYTES), first & (self.capacity - 1)
        until_end = min(count, self.capacity - begin) * RECORD_BYTES  # it may go on at the start
        for at, part in ((begin, memoryview(copied)[:until_end]), (0, memoryview(copied)[until_end:])):
            if part:
                os.preadv(self._descriptor, [part], RECORDS_OFFSET + at * RECORD_BYTES)
        return np.frombuffer(copied, record_dtype())

    def close(self) -> None:
        os.close(self._descriptor)
