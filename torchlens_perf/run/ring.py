"""The ring file, in which a training process writes records that its node's sidecar reads.

A ring file is preallocated, mapped into memory and never grows. Records have a fixed size. The
writer overwrites the oldest record, so it never waits for a reader. Each record has a sequence
number, so a reader can count the records that it missed. After a process was killed, a reader still
finds the newest records and the stack of open spans.

::

    0      header   sizes, counters, open spans of the training thread (also in native/layout.h)
    4096   metadata one JSON object: rank, host, process, clock anchors
    12288  names    length-prefixed UTF-8; a record's name_id is the index in this list
    274432 records  64 bytes each

`recorder/recorder.py` writes records. This module creates the file, interns names, and reads.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import signal
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlens_perf.errors import RingError
from torchlens_perf.interruption import ours
from torchlens_perf.run.fitting import fit_metadata
from torchlens_perf.run.kept_file import KeptFile
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
MAX_FRAMES = 64
MAX_GROUPS = 48
FRAME_BYTES = 32
# Each row of the table of process groups has three 64-bit words: name id and started operations,
# issued operations, ended operations.
GROUP_WORDS = 3
# Number of operations in the circular buffer of the operations issued last, over all groups. Each
# has two 64-bit words: sequence number, name id and row of the group; and its bytes.
MAX_RECENT = 32
METADATA_OFFSET, METADATA_BYTES = 4096, 8192
NAMES_OFFSET, NAMES_BYTES = 12288, 262144
RECORDS_OFFSET, RECORD_BYTES = 274432, 64
IN_FLIGHT = 64
"""Largest number of records that several threads may be writing at once."""
# Pages of a ring file beyond this size are mapped when they are first written.
_MAPPED_AT_ONCE = 1 << 24
LONGEST_NAME = 256
# value1 of a STEP record contains the micro-steps in its low bits. Its high bits are the workload
# plus 1, or 0 if the workload is not known.
WORKLOAD_SHIFT = 16
MICRO_STEPS_MASK = (1 << WORKLOAD_SHIFT) - 1
# A process never writes this many records, so a larger count means that the file is damaged.
_LAST = 1 << 62
# value1 of a DEVICE record if the device's clock cannot be compared with the host's clock.
UNKNOWN_NS = (1 << 63) - 1
# The bits of a MERGED record's value0 from this position on are the slowest rank plus 1.
MERGED_RANK_SHIFT = 44
# Section in which a rank starts or writes a capture. Messages between nodes contain the first 16
# bytes of a section's name.
CAPTURING = "perf capture"
# On this signal, a process writes its stack to the file whose path is in its metadata.
STACK_SIGNAL = signal.SIGUSR2
# The name with id 0, for steps and for all names that do not fit into the table.
OTHER_NAMES = "(other)"

# Header fields that change while the job runs: indexes of 64-bit words.
HEAD, STEP, UNBALANCED, TOO_DEEP, TOOL_NS, STATE, GC_NS = 8, 9, 10, 11, 12, 13, 14
# HEAD, STEP and STATE of the words from HEAD on.
_PROGRESS = struct.Struct(f"<QQ{8 * (STATE - STEP - 1)}xQ")
NAMES_USED, NAMES_LOST, METADATA_REVISION, METADATA_USED, INTERNAL_ERRORS = 16, 17, 18, 19, 20
DEPTH, FRAMES, DEVICE_MARK = 24, 25, (15, 21, 22, 23)
GROUPS_USED, GROUPS, RECENT = 281, 282, 282 + GROUP_WORDS * MAX_GROUPS
# Magic, version, record_bytes, capacity, then offset and size of each area.
_FIXED = struct.Struct("<8sIIQQQQQQ")


class RingFile:
    """Ring file of a writer, which creates and maps it, interns names and publishes metadata.

    Any thread of the writer's process may use it. Only rare operations acquire the lock: new names,
    new groups and new metadata. The lock is re-entrant because a signal handler may interrupt an
    operation and call it again.
    """

    def __init__(
        self, path: Path, capacity: int, first_step: int = 0, *, anonymous: bool = False
    ) -> None:
        """Create the file with mode 0600 and space for `capacity` records, a power of two.

        first_step: index of the step of the first records. anonymous: use anonymous memory, with a
        link to it at `path` (rings/memory.py). Raise OSError if there is not enough space. No file
        is left after an error.
        """
        self.path = path
        # Path of the run directory. The drain program needs it if the run was killed.
        self.run_dir = ""
        # File of anonymous memory. Other processes open the memory through its descriptor.
        self._file: KeptFile | None = None
        size = RECORDS_OFFSET + capacity * RECORD_BYTES
        if anonymous:
            self.buffer, self._file = memory.reserve_anonymous(str(path), size)
        else:
            self.buffer = memory.reserve_file(path, size)
        try:
            for page in range(0, min(size, _MAPPED_AT_ONCE), mmap.PAGESIZE):
                # Pages are mapped now, because a page fault takes longer than writing a record.
                self.buffer[page] = 0
            self._lock = threading.RLock()
            # For each name, its id and the end of its text in the table.
            self._names: dict[str, tuple[int, int]] = {}
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
        """Return the id of `name`. If the table is full, count a lost name and return 0.

        A hook of another thread may run while the ring file is closed: then nothing is written.
        """
        known = self._names.get(name)
        return self._intern_new(name) if known is None else known[0]

    def _intern_new(self, name: str) -> int:
        with self._lock:
            known = self._names.get(name)
            if known is not None:
                return known[0]
            if self.buffer.closed:
                return 0
            text = name.encode("utf-8", "backslashreplace")[:LONGEST_NAME]
            used = next(reversed(self._names.values()))[1] if self._names else 0
            name_id, end = len(self._names), used + 2 + len(text)
            if end > NAMES_BYTES:
                self._words[NAMES_LOST] += 1
                return 0
            struct.pack_into(f"<H{len(text)}s", self.buffer, NAMES_OFFSET + used, len(text), text)
            try:
                # A single assignment stays consistent if a signal handler raises an exception.
                self._names[name] = name_id, end
            finally:
                self._words[NAMES_USED] = end if name in self._names else used
            self._pass_new_names_to_listener()
            return name_id

    def set_name_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with every name except OTHER_NAMES, in the order of their ids.

        The listener is called with existing names at once.
        """
        with self._lock:
            self._name_listener = listener
            self._pass_new_names_to_listener()

    def _pass_new_names_to_listener(self) -> None:
        listener = self._name_listener
        if listener is None:
            return
        names = self.names()
        while self._names_told < len(names):
            # A signal handler may intern a name during the call, so increase the counter first.
            self._names_told += 1
            listener(names[self._names_told - 1])

    def names(self) -> list[str]:
        """Return all interned names in the order of their ids."""
        return list(self._names)

    def open_span_names(self) -> list[str]:
        """Return the names of the training thread's open spans inside the step, outermost first."""
        names, depth = self.names(), min(self._words[DEPTH], MAX_FRAMES)
        ids = [self._words[FRAMES + FRAME_BYTES // 8 * i + 3] & 0xFFFFFFFF for i in range(1, depth)]
        return [lookup_name(names, name_id) for name_id in ids]

    def add_group_row(self, name: str) -> int:
        """Return the row of a process group in the progress table, and add the row if it is new.

        If the table is full, return MAX_GROUPS, which is not a valid row.
        """
        with self._lock:
            if name in self._groups or self.buffer.closed:
                return self._groups.get(name, MAX_GROUPS)
            slot = len(self._groups)
            if slot < MAX_GROUPS:
                self._words[GROUPS + GROUP_WORDS * slot] = self.intern(name)
                self._groups[name] = slot
                self._words[GROUPS_USED] = slot + 1
            return slot

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata. A reader retries if it finds an odd revision or a wrong checksum.

        Parts that do not fit into METADATA_BYTES are removed, and a note lists them (fitting.py).
        """
        text = fit_metadata(metadata, METADATA_BYTES)
        with self._lock:
            if self.buffer.closed:
                return
            self._metadata = text
            try:
                self._store_metadata()
            except BaseException:
                # A signal handler has raised an exception. Complete the metadata, because readers
                # would otherwise retry forever.
                self._store_metadata()
                raise

    def _store_metadata(self) -> None:
        text = b""
        # A signal handler may set newer metadata during the write.
        while text is not self._metadata:
            text = self._metadata
            self._words[METADATA_REVISION] |= 1
            self.buffer[METADATA_OFFSET : METADATA_OFFSET + len(text)] = text
            # A signal handler that also stores metadata here makes the revision even too early, so
            # readers need the checksum.
            self._words[METADATA_USED] = zlib.crc32(text) << 32 | len(text)
            self._words[METADATA_REVISION] = (self._words[METADATA_REVISION] | 1) + 1

    def count(self, word: int, amount: int = 1) -> None:
        """Add to a counter of the header, unless the ring file is closed.

        word: GC_NS, or INTERNAL_ERRORS for an error that was not passed on to the training loop.
        """
        if not self.buffer.closed:
            self._words[word] += amount

    def close(self) -> None:
        """Mark the ring file as closed by its writer and unmap it. Further calls do nothing.

        The recorder must be closed before. After an exception, the next call completes the work.
        """
        with self._lock:
            if self.buffer.closed:
                return
            struct.pack_into("<Q", self.buffer, 8 * STATE, State.CLOSED)
            self._words.release()
            self.buffer.close()

    def release(self, timeout_s: float = 0.0) -> bool:
        """Close this process's file of anonymous memory. Further calls do nothing.

        The memory is lost if no other process has opened it. Wait at most `timeout_s` for another
        process to open it. Return True if the records are kept.
        """
        file, self._file = self._file, None
        if file is None:
            return True
        try:
            return memory.wait_until_opened_elsewhere(str(self.path), file, timeout_s)
        finally:
            file.close()


class OpenSpan(NamedTuple):
    """A span that has started and not ended."""

    kind: Kind
    name: str
    start_ns: int


class GroupProgress(NamedTuple):
    """Number of operations of one rank in one process group, or of messages with one peer."""

    name: str
    issued: int
    """Sequence number of the last issued operation, plus 1."""
    ended: int
    """Sequence number, plus 1, of the last operation that has ended or whose end is never reported.
    """
    # Sequence number, plus 1, of the last operation whose kernel has started; 0 if not reported.
    began: int = 0


class IssuedOperation(NamedTuple):
    """One of the operations that a rank issued last."""

    group: str
    sequence: int
    name: str
    """Name of the operation's record, such as "allreduce group=0 dtype=float32"."""
    bytes: int


def lookup_name(names: list[str], name_id: int) -> str:
    return names[name_id] if name_id < len(names) else "(unknown)"


class RingBatch(NamedTuple):
    """Records from one read_records() call, their sequence numbers, and the number of lost ones."""

    records: npt.NDArray[np.void]
    sequences: npt.NDArray[np.int64]
    lost: int


@functools.cache
def record_dtype() -> np.dtype[np.void]:
    """Return the NumPy structure of a 64-byte record.

    Durations and times are nanoseconds of CLOCK_MONOTONIC.
    """
    import numpy as np

    fields = (
        ("stamp", "<u4"), ("kind", "u1"), ("depth", "u1"), ("flags", "<u2"), ("name_id", "<u4"), ("step", "<u4"),
        ("start_ns", "<i8"), ("duration_ns", "<i8"), ("nested_ns", "<i8"), ("phase_ns", "<i8"),
        ("value0", "<u8"), ("value1", "<u8"),
    )  # fmt: skip
    return np.dtype(list(fields))


class RingReader:
    """Reader of a ring file of another process, which may have ended. Used on one thread.

    The reader uses pread(2), because another process may truncate the file. If the file were
    mapped, access to a missing page would end the reading process with SIGBUS.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        """Open the file. Raise OSError, or RingError if it is not a ring file.

        descriptor: an open descriptor of the file, which close() closes; None to open `path`.
        """
        self.path = path
        # Sequence number of the next record to read.
        self.cursor = 0
        self._descriptor = memory.open_to_read(str(path)) if descriptor is None else descriptor
        try:
            self.capacity = self._read_capacity()
        except BaseException:
            os.close(self._descriptor)
            raise
        # Last complete copy of the header.
        self._header = bytes(METADATA_OFFSET)
        self._progress = (0, 0, 0)
        self._seen_revision = -1
        self._is_frozen = False
        self._names: list[str] = []
        self._names_read = 0

    def _read_capacity(self) -> int:
        size = os.fstat(self._descriptor).st_size
        if size < RECORDS_OFFSET + RECORD_BYTES:
            raise RingError(f"{self.path} is too short to be a ring file")
        magic, version, record_bytes, capacity, *_ = _FIXED.unpack(
            os.pread(self._descriptor, _FIXED.size, 0).ljust(_FIXED.size)
        )
        if magic != MAGIC or version != VERSION or record_bytes != RECORD_BYTES:
            raise RingError(f"{self.path} is not a ring file of version {VERSION}")
        if capacity & (capacity - 1) or size != RECORDS_OFFSET + capacity * RECORD_BYTES:
            raise RingError(
                f"{self.path} has a header for {capacity} records, which does not match its {size}"
                " bytes"
            )
        return int(capacity)

    def announce_open(self) -> None:
        """Announce that this process keeps the ring open until close(), even if its writer ends."""
        memory.announce_open_ring(str(self.path), self._descriptor)

    def _read_words(self, first: int, count: int = 1) -> tuple[int, ...]:
        """Return words of the header; the last valid ones if the file has been damaged."""
        if not self._is_frozen:
            header = os.pread(self._descriptor, METADATA_OFFSET, 0)
            if len(header) == METADATA_OFFSET and header.startswith(MAGIC):
                self._header = header
        return struct.unpack_from(f"<{count}Q", self._header, 8 * first)

    @contextlib.contextmanager
    def frozen_header(self) -> Iterator[None]:
        """Context in which all methods use one copy of the header, which takes less time."""
        self._read_words(HEAD)
        self._is_frozen = True
        try:
            yield
        finally:
            self._is_frozen = False

    def read_counter(self, word: int) -> int:
        """Return a counter in the header.

        word: HEAD, STEP, UNBALANCED, TOO_DEEP, TOOL_NS, STATE, GC_NS, NAMES_LOST or
        INTERNAL_ERRORS.
        """
        return self._read_words(word)[0]

    def read_progress(self) -> tuple[int, int, int]:
        """Return HEAD, STEP and STATE; the last valid ones if the file has been damaged.

        The call takes less time than read_counter(), because it reads fewer bytes.
        """
        header = os.pread(self._descriptor, 8 * (STATE + 1), 0)
        if len(header) == 8 * (STATE + 1) and header.startswith(MAGIC):
            self._progress = _PROGRESS.unpack_from(header, 8 * HEAD)
        head, step, state = self._progress
        return head, step, state

    def read_metadata(self) -> dict[str, Any]:
        """Return the writer's metadata; {} if the metadata are being replaced or are damaged."""
        revision, used = self.read_counter(METADATA_REVISION), self.read_counter(METADATA_USED)
        text = os.pread(self._descriptor, min(used & 0xFFFFFFFF, METADATA_BYTES), METADATA_OFFSET)
        if (
            revision % 2
            or revision != self.read_counter(METADATA_REVISION)
            or not text
            or zlib.crc32(text) != used >> 32
        ):
            return {}
        try:
            loaded = json.loads(text)
        except ours(ValueError, RecursionError):
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def read_changed_metadata(self) -> dict[str, Any]:
        """Return the metadata as read_metadata(); {} if the last call has returned the same."""
        revision = self.read_counter(METADATA_REVISION)
        if revision == self._seen_revision:
            return {}
        metadata = self.read_metadata()
        if metadata:
            self._seen_revision = revision
        return metadata

    def names(self) -> list[str]:
        """Return all interned names. A record's name_id is an index in this list."""
        used = min(self.read_counter(NAMES_USED), NAMES_BYTES)
        if used > self._names_read:
            text = os.pread(
                self._descriptor, used - self._names_read, NAMES_OFFSET + self._names_read
            )
            at = 0
            while at + 2 <= len(text):
                (length,) = struct.unpack_from("<H", text, at)
                self._names.append(text[at + 2 : at + 2 + length].decode("utf-8", "replace"))
                at += 2 + length
            self._names_read += at
        return self._names

    def read_open_spans(self) -> list[OpenSpan]:
        """Return the open spans of the training thread, outermost first.

        A running writer may change the spans during the call.
        """
        names, spans = self.names(), []
        depth = min(self.read_counter(DEPTH), MAX_FRAMES)
        frames = self._read_words(DEPTH + 1, FRAME_BYTES // 8 * depth)
        for i in range(depth):
            start_ns, _, _, packed = frames[4 * i : 4 * i + 4]
            name_id, kind = packed & 0xFFFFFFFF, packed >> 32
            if kind in Kind._value2member_map_ and name_id < len(names):
                spans.append(OpenSpan(Kind(kind), names[name_id], start_ns))
        return spans

    def read_group_progress(self) -> list[GroupProgress]:
        """Return the rank's progress in each of its process groups.

        A running writer may change the progress during the call.
        """
        names, found = self.names(), []
        groups = min(self.read_counter(GROUPS_USED), MAX_GROUPS)
        rows = self._read_words(GROUPS_USED + 1, GROUP_WORDS * groups)
        for i in range(groups):
            name_id, issued, ended = rows[GROUP_WORDS * i : GROUP_WORDS * (i + 1)]
            if name_id & 0xFFFFFFFF < len(names):
                found.append(
                    GroupProgress(names[name_id & 0xFFFFFFFF], issued, ended, name_id >> 32)
                )
        return found

    def read_last_operations(self) -> list[IssuedOperation]:
        """Return the operations that the rank issued last, whether or not they have ended.

        They are in no order. A running writer may change the operations during the call.
        """
        names, groups = self.names(), self._read_words(GROUPS, GROUP_WORDS * MAX_GROUPS)
        words, found = self._read_words(RECENT, 2 * MAX_RECENT), []
        for key, size in zip(words[::2], words[1::2], strict=True):
            row, name_id = (key >> 56) - 1, key >> 32 & 0xFFFFFF
            if 0 <= row < MAX_GROUPS and name_id < len(names):
                group = lookup_name(names, groups[GROUP_WORDS * row] & 0xFFFFFFFF)
                found.append(IssuedOperation(group, key & 0xFFFFFFFF, names[name_id], size))
        return found

    def read_records(self, *, final: bool = False) -> RingBatch:
        """Return the records since the last call. Overwritten records are counted as lost.

        A record that is still being written ends the batch, and the next call returns that record.
        final: True if the writer has ended, so an incomplete record is counted as lost. Raise
        RingError if the file was truncated or overwritten.
        """
        import numpy as np

        asked, stop = self.cursor, min(self.read_counter(HEAD), _LAST)
        if stop == asked:
            self._check_file()
            return RingBatch(np.zeros(0, record_dtype()), np.zeros(0, np.int64), 0)
        first = max(asked, stop - self.capacity)
        sequences = np.arange(first, max(first, stop), dtype=np.int64)
        stamps = (sequences + 1).astype(np.uint32)
        records = self._copy_records(first, len(sequences))
        # If a record was overwritten during the copy, its stamp is wrong in the copy or the file.
        whole = (records["stamp"] == stamps) & (
            self._copy_records(first, len(sequences))["stamp"] == stamps
        )
        self._check_file()
        if not whole.all():
            head = self.read_counter(HEAD)
            in_flight = (sequences > head - self.capacity) & (sequences >= head - IN_FLIGHT)
            unfinished = np.flatnonzero(~whole & in_flight)
            if len(unfinished) and not final:
                cut = int(unfinished[0])
                records, sequences, whole = records[:cut], sequences[:cut], whole[:cut]
                stop = first + cut
            records, sequences = records[whole], sequences[whole]
        self.cursor = max(asked, stop)
        return RingBatch(records, sequences, self.cursor - asked - len(records))

    def _check_file(self) -> None:
        """Raise RingError if the file was truncated or overwritten."""
        if os.fstat(self._descriptor).st_size != RECORDS_OFFSET + self.capacity * RECORD_BYTES:
            raise RingError(f"{self.path} was truncated")
        if os.pread(self._descriptor, len(MAGIC), 0) != MAGIC:
            raise RingError(f"{self.path} was overwritten")

    def _copy_records(self, first: int, count: int) -> npt.NDArray[np.void]:
        """Return copies of `count` records from number `first` on; zeros after the file's end."""
        import numpy as np

        copied, begin = bytearray(count * RECORD_BYTES), first & (self.capacity - 1)
        # The records may wrap to the start of the ring.
        until_end = min(count, self.capacity - begin) * RECORD_BYTES
        for at, part in (
            (begin, memoryview(copied)[:until_end]),
            (0, memoryview(copied)[until_end:]),
        ):
            if part:
                os.preadv(self._descriptor, [part], RECORDS_OFFSET + at * RECORD_BYTES)
        return np.frombuffer(copied, record_dtype())

    def close(self) -> None:
        os.close(self._descriptor)


@contextlib.contextmanager
def reading_ring(path: Path) -> Iterator[RingReader | None]:
    """Context with a reader of a ring file; None if this version cannot read the file."""
    try:
        reader = RingReader(path)
    except ours(OSError, RingError):
        yield None
        return
    try:
        yield reader
    finally:
        reader.close()
