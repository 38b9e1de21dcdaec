"""Items of several resources, until there are enough for a request or the oldest has waited long enough."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from torchlens_perf.exporters.delivery.wire import request


class Batches:
    """add() on the sidecar's thread, due() on the sender's, or there where that waits."""

    def __init__(
        self, in_scope: bytes, max_items: int, delay_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """in_scope: the encoded instrumentation scope. delay_s: that an item waits for others."""
        self._scope, self._max_items, self._delay_s, self._clock = in_scope, max_items, delay_s, clock
        self._lock = threading.Lock()
        self._items: list[tuple[bytes, bytes]] = []  # with the resource
        self._since_s = math.inf

    def add(self, resource: bytes, items: Sequence[bytes]) -> bool:
        """Takes items of a resource over. Returns whether a request is full."""
        with self._lock:
            if not self._items:
                self._since_s = self._clock()
            self._items += [(resource, item) for item in items]
            return len(self._items) >= self._max_items

    def waiting(self) -> int:
        return len(self._items)

    def due(self, everything: bool) -> tuple[list[tuple[bytes, int]], float]:
        """The requests that are full or have waited, with their numbers of items; and when the next is due, in s."""
        found = []
        with self._lock:
            everything |= self._clock() - self._since_s >= self._delay_s
            while len(self._items) >= self._max_items or (everything and self._items):
                taken, self._items = self._items[: self._max_items], self._items[self._max_items :]
                found.append(taken)
                self._since_s = self._clock() if self._items else math.inf
            left_s = self._since_s + self._delay_s - self._clock()
        return [(self._encoded(taken), len(taken)) for taken in found], max(0.0, left_s)

    def _encoded(self, items: Sequence[tuple[bytes, bytes]]) -> bytes:
        groups: dict[bytes, list[bytes]] = {}
        for resource, item in items:
            groups.setdefault(resource, []).append(item)
        return request(groups.items(), self._scope)
