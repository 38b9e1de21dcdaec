"""A queue of requests to deliver, oldest first.

New items are in memory. Requests that could not be sent are on disk, one per file. The file's name
contains the number of items. A file is written under a temporary name, renamed, and deleted after
delivery. If the process is killed before the deletion, the request is sent twice, but never lost.
When the outbox is full, the oldest items are dropped and counted.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.exporters.delivery.otlp_requests import (
    count_items,
    decode_request,
    encode_request,
)
from torchlens_perf.run import ownership

if TYPE_CHECKING:
    from torchlens_perf.exporters.delivery.otlp_requests import Item

_NAME = re.compile(
    r"(?P<owner>.+)\.(?P<signal>traces|metrics|logs)\.(?P<number>\d{10})\.(?P<count>\d+)\.otlp"
)


@dataclasses.dataclass(frozen=True)
class QueuedRequest:
    """Items that are sent together."""

    items: Sequence[Item]
    count: int
    """Number of spans, metric points or log records."""
    path: Path | None = None
    """File of the request; None if the request is in memory."""


@dataclasses.dataclass(frozen=True)
class OutboxLimits:
    """The capacity of an outbox."""

    memory_items: int = 16384
    disk_bytes: int = 256 << 20


class Outbox:
    """The queue of one signal. Only put() may be called on other threads than the sender's."""

    def __init__(
        self,
        folder: Path | None,
        owner: str,
        signal: str,
        batch_items: int = 512,
        delay_s: float = 0.0,
        room: OutboxLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Continue a queue. Files of an earlier process are delivered first.

        - folder: folder of the run's outbox; None to keep all requests in memory.
        - owner: name of the node that owns the files; "" in a replay for the files of all nodes.
        - batch_items: largest number of items in a request.
        - delay_s: longest time to wait for a full request.
        """
        self.signal = signal
        self._folder, self._owner = folder, owner or "replay"
        self._batch_items, self._delay_s, self._clock = batch_items, delay_s, clock
        self._room = OutboxLimits() if room is None else room
        self._arrived = threading.Condition()
        self._items: deque[Item] = deque()
        self._item_count = 0
        self._oldest_item_s = math.inf
        # Requests in memory, the first of which may be in flight.
        self._requests: deque[QueuedRequest] = deque()
        self._on_disk = threading.Lock()
        # Path, number of items and number of bytes of each file.
        self._files: deque[tuple[Path, int, int]] = deque()
        self._disk_bytes = 0
        self._number = 0
        self._woken = False
        self.dropped = 0
        """Number of items that were dropped: the outbox was full or a file unreadable."""
        for path, count, number in list_files(folder, signal, owner):
            self._add_file(path, count, path.stat().st_size)
            self._number = max(self._number, number + 1)

    def put(self, items: Sequence[Item]) -> None:
        """Append items without blocking and without writing to disk."""
        with self._arrived:
            was_empty = not self._items
            if was_empty:
                self._oldest_item_s = self._clock()
            self._items.extend(items)
            self._item_count += count_items(items)
            while self._item_count > self._room.memory_items and len(self._items) > 1:
                oldest = count_items([self._items.popleft()])
                self._item_count -= oldest
                self.dropped += oldest
            if was_empty or len(self._items) >= self._batch_items:
                self.wake()

    @property
    def on_disk(self) -> bool:
        """True if all undelivered items are on disk."""
        return self._folder is not None and not self._requests and not self._items

    def count_undelivered(self) -> int:
        """Return the number of undelivered items."""
        with self._arrived:
            in_requests = sum(each.count for each in self._requests)
            return self._item_count + in_requests + sum(count for _, count, _ in self._files)

    def seconds_until_due(self) -> float:
        """Return the seconds until a request is due if no further items arrive."""
        with self._arrived:
            if self._files or self._requests or len(self._items) >= self._batch_items:
                return 0.0
            return max(0.0, self._oldest_item_s + self._delay_s - self._clock())

    def wait(self, timeout_s: float) -> None:
        """Wait until items arrive, wake() is called, or the timeout has passed."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._woken, timeout_s)
            self._woken = False

    def wake(self) -> None:
        """End the current wait(). If no thread waits, the next wait() returns at once."""
        with self._arrived:
            self._woken = True
            self._arrived.notify()

    def next_request(self, *, everything: bool = False) -> QueuedRequest | None:
        """Return the next request without removing it. Unreadable files are dropped and counted.

        everything: return a request even if it is not due.
        """
        while self._files:
            path, count, size_bytes = self._files[0]
            try:
                return QueuedRequest(
                    decode_request(
                        self.signal, ownership.read_regular_file(path, self._room.disk_bytes)
                    ),
                    count,
                    path,
                )
            except OSError:
                # The file is kept, because a replay may be able to read it.
                self._drop_file(count, size_bytes)
            except ValueError:
                self._drop_file(count, size_bytes)
                path.unlink(missing_ok=True)
        with self._arrived:
            if not self._requests and (everything or self._is_due()):
                self._create_request()
            return self._requests[0] if self._requests else None

    def remove(self, request: QueuedRequest, parts: Sequence[Sequence[Item]] = ()) -> None:
        """Remove a request that was delivered, refused or too large.

        parts: items of smaller requests that replace a request that was too large. If the request
        was a file, its parts are written to disk before the file is deleted. A process that is
        killed thus loses nothing.
        """
        smaller = [QueuedRequest(part, count_items(part)) for part in parts]
        if request.path is not None:
            smaller = [part for part in smaller if not self._write_request(part)]
        with self._arrived:
            if request.path is not None:
                path, _, size_bytes = self._files.popleft()
                self._disk_bytes -= size_bytes
                path.unlink(missing_ok=True)
            elif self._requests and self._requests[0] is request:
                self._requests.popleft()
            self._requests.extendleft(reversed(smaller))

    def write_to_disk(self, *, everything: bool = True) -> bool:
        """Write requests that are due to disk, or all items if `everything` is True.

        Return True if all of these requests are on disk.
        """
        with self._on_disk:
            while True:
                with self._arrived:
                    if not self._requests and (everything or self._is_due()):
                        self._create_request()
                    if not self._requests:
                        return True
                    request = self._requests[0]
                if self._folder is None or not self._write_request(request):
                    return False
                with self._arrived:
                    self._requests.popleft()
                self._drop_oldest_files()

    # -- parts

    def _is_due(self) -> bool:
        return (
            len(self._items) >= self._batch_items
            or self._clock() - self._oldest_item_s >= self._delay_s
        )

    def _create_request(self) -> None:
        """Create a request from the oldest items. The caller must hold the lock."""
        if self._items:
            taken = [self._items.popleft() for _ in range(min(self._batch_items, len(self._items)))]
            count = count_items(taken)
            self._item_count -= count
            self._oldest_item_s = self._clock() if self._items else math.inf
            self._requests.append(QueuedRequest(taken, count))

    def _write_request(self, request: QueuedRequest) -> bool:
        """Write the request to disk. Return True if this succeeded."""
        try:
            body = encode_request(self.signal, request.items)
            path = self._write_file(body, request.count)
        except OSError:
            return False
        with self._arrived:
            self._add_file(path, request.count, len(body))
        return True

    def _write_file(self, body: bytes, count: int) -> Path:
        if self._folder is None:
            raise OSError("the outbox has no folder")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"{self._owner}.{self.signal}.{self._number:010}.{count}.otlp"
        self._number += 1
        partial = path.with_suffix(".partial")
        with open(ownership.create_private_file(partial), "wb", buffering=0) as file:
            ownership.write_all(file, body)
        os.replace(partial, path)
        return path

    def _add_file(self, path: Path, count: int, size_bytes: int) -> None:
        self._files.append((path, count, size_bytes))
        self._disk_bytes += size_bytes

    def _drop_oldest_files(self) -> None:
        while self._disk_bytes > self._room.disk_bytes and len(self._files) > 1:
            path, count, size_bytes = self._files[0]
            self._drop_file(count, size_bytes)
            path.unlink(missing_ok=True)

    def _drop_file(self, count: int, size_bytes: int) -> None:
        with self._arrived:
            self._files.popleft()
            self._disk_bytes -= size_bytes
            self.dropped += count


def outbox_folder(run: Path) -> Path:
    return run / "outbox"


def list_files(folder: Path | None, signal: str, owner: str = "") -> list[tuple[Path, int, int]]:
    """List a signal's files in the outbox, oldest first, as (path, number of items, sequence
    number).

    owner: name of a node; "" for the files of all nodes.
    """
    if folder is None or not folder.is_dir():
        return []
    named = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir())
    files = [
        (path, int(of["count"]), int(of["number"]))
        for path, of in named
        if of is not None and of["signal"] == signal and owner in ("", of["owner"])
    ]
    return sorted(files, key=lambda file: (file[2], file[0].name))
