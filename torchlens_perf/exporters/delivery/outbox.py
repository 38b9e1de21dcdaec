"""What is to be delivered, oldest first: the newest in memory, what the endpoint does not take on disk.

A file of the outbox is one request, whole, and its name says how many items are in it. It is written under another name
and renamed, and goes when the endpoint has taken it: whoever is killed in between sends that one request twice, and
none is lost. Beyond the room that it is given, the oldest requests go for newer ones, and are counted.
"""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from torchlens_perf.run import ownership

_NAME = re.compile(r"(?P<owner>.+)\.(?P<signal>traces|metrics|logs)\.(?P<number>\d{10})\.(?P<items>\d+)\.otlp")


@dataclasses.dataclass(frozen=True)
class Request:
    """One request, encoded."""

    body: bytes
    items: int
    """Spans, metric points or log records in it."""
    path: Path | None = None
    """Where it lies on disk; None: in memory."""


@dataclasses.dataclass
class Room:
    """How much may wait."""

    memory_bytes: int = 32 << 20
    disk_bytes: int = 256 << 20


class Outbox:
    """One signal's requests. put() on any thread, all else on the sender's."""

    def __init__(self, folder: Path | None, owner: str, signal: str, room: Room | None = None) -> None:
        """folder: of the run's outbox; None: there is no disk, and memory is all. owner: of the files, the node's name;
        "": whoever's, for a replay.

        Files that an earlier process has left are delivered first.
        """
        self._folder, self._owner, self._signal = folder, owner or "replay", signal
        self._room = Room() if room is None else room
        self._arrived = threading.Condition()
        self._memory: deque[Request] = deque()
        self._memory_bytes = 0
        self._files: deque[tuple[Path, int, int]] = deque()  # with items and bytes
        self._disk_bytes = 0
        self._number = 0
        self._woken = False
        self.dropped = 0
        """Items that had to go for newer ones, or that the disk did not take. Only ever grows."""
        for path, items, number in found(folder, signal, owner):
            size = path.stat().st_size
            self._files.append((path, items, size))
            self._disk_bytes += size
            self._number = max(self._number, number + 1)

    def put(self, body: bytes, items: int) -> None:
        """Takes a request over. Never waits, and touches no disk."""
        with self._arrived:
            self._memory.append(Request(body, items))
            self._memory_bytes += len(body)
            while self._memory_bytes > self._room.memory_bytes and len(self._memory) > 1:
                oldest = self._memory.popleft()
                self._memory_bytes -= len(oldest.body)
                self.dropped += oldest.items
            self._arrived.notify()

    @property
    def on_disk(self) -> bool:
        """Whether what waits lies on the disk."""
        return self._folder is not None and not self._memory

    def waiting(self) -> int:
        """How many items are to be delivered."""
        with self._arrived:
            return sum(each.items for each in self._memory) + sum(items for _, items, _ in self._files)

    def wait(self, timeout_s: float) -> None:
        """Until there is a request, somebody calls wake(), or for so long."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._woken or self._memory or self._files, timeout_s)
            self._woken = False

    def wake(self) -> None:
        """Ends a wait(), the next one if there is none now."""
        with self._arrived:
            self._woken = True
            self._arrived.notify()

    def oldest(self) -> Request | None:
        """The request to send next; it stays until removed. A file that cannot be read goes, and is counted."""
        while self._files:
            path, items, size = self._files[0]
            try:
                return Request(ownership.read_bytes(path, self._room.disk_bytes), items, path)
            except OSError:
                with self._arrived:
                    self._files.popleft()
                    self._disk_bytes -= size
                    self.dropped += items
        with self._arrived:
            return self._memory[0] if self._memory else None

    def remove(self, request: Request, parts: Sequence[Request] = ()) -> None:
        """It was delivered, or will never be. parts: what takes its place, as it was too large; of one that lies on
        disk they do too, before it goes."""
        if request.path is not None:
            parts = [part for part in parts if not self._is_kept(part)]
        with self._arrived:
            if request.path is not None:
                path, _, size = self._files.popleft()
                self._disk_bytes -= size
                path.unlink(missing_ok=True)
            elif self._memory and self._memory[0] is request:  # else it had to go for newer ones meanwhile
                self._memory.popleft()
                self._memory_bytes -= len(request.body)
            else:
                self.dropped -= request.items
            for part in reversed(parts):
                self._memory.appendleft(part)
                self._memory_bytes += len(part.body)

    def to_disk(self) -> bool:
        """Writes what is in memory to the disk, as the endpoint does not take it. Returns whether all is there."""
        if self._folder is None:
            return not self._memory
        while True:
            with self._arrived:
                if not self._memory:
                    return True
                request = self._memory[0]
            if not self._is_kept(request):
                return False
            with self._arrived:
                if self._memory and self._memory[0] is request:
                    self._memory.popleft()
                    self._memory_bytes -= len(request.body)
                else:
                    self.dropped -= request.items  # it had to go from memory while it was written
            self._make_room()

    def _is_kept(self, request: Request) -> bool:
        """Writes it to the disk. Returns whether it lies there."""
        try:
            path = self._written(request)
        except OSError:
            return False
        with self._arrived:
            self._files.append((path, request.items, len(request.body)))
            self._disk_bytes += len(request.body)
        return True

    def _written(self, request: Request) -> Path:
        assert self._folder is not None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"{self._owner}.{self._signal}.{self._number:010}.{request.items}.otlp"
        self._number += 1
        partial = path.with_suffix(".partial")
        with open(ownership.create(partial), "wb", buffering=0) as file:
            ownership.write_all(file, request.body)
        os.replace(partial, path)
        return path

    def _make_room(self) -> None:
        while self._disk_bytes > self._room.disk_bytes and len(self._files) > 1:
            with self._arrived:
                path, items, size = self._files.popleft()
                self._disk_bytes -= size
                self.dropped += items
            path.unlink(missing_ok=True)


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
        (path, int(of["items"]), int(of["number"]))
        for path, of in named
        if of is not None and of["signal"] == signal and owner in ("", of["owner"])
    ]
    return sorted(files, key=lambda file: (file[2], file[0].name))
