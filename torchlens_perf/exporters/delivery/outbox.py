"""What is to be delivered, oldest first: the newest in memory, what the endpoint does not take on disk.

A file of the outbox is one request, whole, and its name says how many items are in it. It is written under another name
and renamed, and goes when the endpoint has taken it: whoever is killed in between sends that one request twice, and
none is lost. Beyond the room that it is given, the oldest items go for newer ones, and are counted.
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

from torchlens_perf.exporters.delivery.otlp_requests import decode, encode, size
from torchlens_perf.run import ownership

if TYPE_CHECKING:
    from torchlens_perf.exporters.delivery.otlp_requests import Item

_NAME = re.compile(r"(?P<owner>.+)\.(?P<signal>traces|metrics|logs)\.(?P<number>\d{10})\.(?P<count>\d+)\.otlp")


@dataclasses.dataclass(frozen=True)
class Request:
    """What is sent at once."""

    items: Sequence[Item]
    count: int
    """Spans, metric points or log records in it."""
    path: Path | None = None
    """Where it lies on disk; None: in memory."""


@dataclasses.dataclass(frozen=True)
class Room:
    """How much may wait."""

    memory_items: int = 16384
    disk_bytes: int = 256 << 20


class Outbox:
    """One signal's requests. put() on any thread, all else on the sender's."""

    def __init__(
        self,
        folder: Path | None,
        owner: str,
        signal: str,
        batch_items: int = 512,
        delay_s: float = 0.0,
        room: Room | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """folder: of the run's outbox; None: there is no disk, and memory is all. owner: of the files, the node's name;
        "": whoever's, for a replay. batch_items: that a request holds at most. delay_s: that an item waits for others.

        Files that an earlier process has left are delivered first.
        """
        self.signal = signal
        self._folder, self._owner = folder, owner or "replay"
        self._batch_items, self._delay_s, self._clock = batch_items, delay_s, clock
        self._room = Room() if room is None else room
        self._arrived = threading.Condition()
        self._items: deque[Item] = deque()
        self._count = 0  # in _items
        self._since_s = math.inf  # when the oldest of _items came
        self._requests: deque[Request] = deque()  # made of what were _items; the first may be on its way
        self._on_disk = threading.Lock()
        self._files: deque[tuple[Path, int, int]] = deque()  # with count and bytes
        self._disk_bytes = 0
        self._number = 0
        self._woken = False
        self.dropped = 0
        """Items that had to go for newer ones, or that the disk did not take. Only ever grows."""
        for path, count, number in found(folder, signal, owner):
            self._add_file(path, count, path.stat().st_size)
            self._number = max(self._number, number + 1)

    def put(self, items: Sequence[Item]) -> None:
        """Takes items over. Never waits, and touches no disk."""
        with self._arrived:
            was_empty = not self._items
            if was_empty:
                self._since_s = self._clock()
            self._items.extend(items)
            self._count += size(items)
            while self._count > self._room.memory_items and len(self._items) > 1:
                oldest = size([self._items.popleft()])
                self._count -= oldest
                self.dropped += oldest
            if was_empty or len(self._items) >= self._batch_items:
                self.wake()

    @property
    def on_disk(self) -> bool:
        """Whether what waits lies on the disk."""
        return self._folder is not None and not self._requests and not self._items

    def waiting(self) -> int:
        """Return how many items are to be delivered."""
        with self._arrived:
            in_requests = sum(each.count for each in self._requests)
            return self._count + in_requests + sum(count for _, count, _ in self._files)

    def due_s(self) -> float:
        """Return in how many seconds there is a request to send, as far as is known now."""
        with self._arrived:
            if self._files or self._requests or len(self._items) >= self._batch_items:
                return 0.0
            return max(0.0, self._since_s + self._delay_s - self._clock())

    def wait(self, timeout_s: float) -> None:
        """Wait until something comes, somebody calls wake(), or for so long."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._woken, timeout_s)
            self._woken = False

    def wake(self) -> None:
        """Ends a wait(), the next one if there is none now."""
        with self._arrived:
            self._woken = True
            self._arrived.notify()

    def oldest(self, *, everything: bool = False) -> Request | None:
        """The request to send next; it stays until removed. A file that cannot be read goes, and is counted.

        everything: also items that could still wait for others.
        """
        while self._files:
            path, count, size_bytes = self._files[0]
            try:
                return Request(decode(self.signal, ownership.read_bytes(path, self._room.disk_bytes)), count, path)
            except OSError:  # it may be readable another time
                self._drop_file(count, size_bytes)
            except ValueError:
                self._drop_file(count, size_bytes)
                path.unlink(missing_ok=True)
        with self._arrived:
            if not self._requests and (everything or self._is_due()):
                self._make_request()
            return self._requests[0] if self._requests else None

    def remove(self, request: Request, parts: Sequence[Sequence[Item]] = ()) -> None:
        """It was delivered, or will never be. parts: what takes its place, as it was too large; of one that lies on
        disk they do too, before it goes."""
        smaller = [Request(part, size(part)) for part in parts]
        if request.path is not None:
            smaller = [part for part in smaller if not self._is_kept(part)]
        with self._arrived:
            if request.path is not None:
                path, _, size_bytes = self._files.popleft()
                self._disk_bytes -= size_bytes
                path.unlink(missing_ok=True)
            elif self._requests and self._requests[0] is request:
                self._requests.popleft()
            self._requests.extendleft(reversed(smaller))

    def to_disk(self, *, everything: bool = True) -> bool:
        """Writes what is due, or all, to the disk, as the endpoint does not take it. Returns whether that is there."""
        with self._on_disk:
            while True:
                with self._arrived:
                    if not self._requests and (everything or self._is_due()):
                        self._make_request()
                    if not self._requests:
                        return True
                    request = self._requests[0]
                if self._folder is None or not self._is_kept(request):
                    return False
                with self._arrived:
                    self._requests.popleft()
                self._make_room()

    # -- parts

    def _is_due(self) -> bool:
        return len(self._items) >= self._batch_items or self._clock() - self._since_s >= self._delay_s

    def _make_request(self) -> None:
        """Under the lock."""
        if self._items:
            taken = [self._items.popleft() for _ in range(min(self._batch_items, len(self._items)))]
            count = size(taken)
            self._count -= count
            self._since_s = self._clock() if self._items else math.inf
            self._requests.append(Request(taken, count))

    def _is_kept(self, request: Request) -> bool:
        """Writes it to the disk. Returns whether it lies there."""
        try:
            body = encode(self.signal, request.items)
            path = self._written(body, request.count)
        except OSError:
            return False
        with self._arrived:
            self._add_file(path, request.count, len(body))
        return True

    def _written(self, body: bytes, count: int) -> Path:
        if self._folder is None:
            raise OSError("there is no disk")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"{self._owner}.{self.signal}.{self._number:010}.{count}.otlp"
        self._number += 1
        partial = path.with_suffix(".partial")
        with open(ownership.create(partial), "wb", buffering=0) as file:
            ownership.write_all(file, body)
        os.replace(partial, path)
        return path

    def _add_file(self, path: Path, count: int, size_bytes: int) -> None:
        self._files.append((path, count, size_bytes))
        self._disk_bytes += size_bytes

    def _make_room(self) -> None:
        while self._disk_bytes > self._room.disk_bytes and len(self._files) > 1:
            path, count, size_bytes = self._files[0]
            self._drop_file(count, size_bytes)
            path.unlink(missing_ok=True)

    def _drop_file(self, count: int, size_bytes: int) -> None:
        with self._arrived:
            self._files.popleft()
            self._disk_bytes -= size_bytes
            self.dropped += count


def outbox(run: Path) -> Path:
    """Where a run's requests wait."""
    return run / "outbox"


def found(folder: Path | None, signal: str, owner: str = "") -> list[tuple[Path, int, int]]:
    """The outbox's files of a signal, oldest first, with how many items each holds, and its number.

    owner: only that node's; "": all.
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
