"""Fixtures for the exchange between nodes. All open exchanges are closed when a test ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.collected import payloads, ranks
from torchlens_perf.sidecar.nodes.endpoints import Endpoints
from torchlens_perf.sidecar.nodes.exchange import Exchange
from torchlens_perf.sidecar.nodes.messages import NodeContact
from torchlens_perf.sidecar.nodes.rendezvous import ExchangeAddress, Rendezvous, store_key_of_watch
from torchlens_perf.sidecar.nodes.timing import ExchangeTiming

FAST = ExchangeTiming(
    operation_s=2.0, connect_s=2.0, beat_s=0.2, look_s=0.05, first_retry_s=0.05, last_retry_s=0.4
)
LONG_S = 60.0  # Only a failing test waits this long.
KEY = store_key_of_watch(0)
LOOPBACK = ("127.0.0.1", 1)  # Address of a job store that does not exist.


class Nodes:
    """Starts exchanges of several nodes and gathers the posts that node 0 collects."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.places = Endpoints(LOOPBACK, folder)
        self._stack = stack
        self.seen: dict[int, list[bytes]] = {}
        self.contacts: Mapping[str, NodeContact] = {}

    def start(
        self,
        node: str,
        merges: bool = False,
        key: str = KEY,
        timing: ExchangeTiming = FAST,
        places: Endpoints | None = None,
    ) -> Exchange:
        exchange = Exchange(places or self.places, key, node, merges, timing=timing)
        self._stack.callback(exchange.close)
        return exchange

    def wait(self, exchange: Exchange, condition: Callable[[], bool]) -> None:
        """Collect posts until a condition is true."""
        deadline = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < deadline, (self.seen, self.contacts, exchange.notes())
            self.collect(exchange)
            time.sleep(0.01)

    def collect(self, exchange: Exchange) -> None:
        collected = exchange.collect_posts()
        self.contacts = collected.nodes
        for rank in ranks(collected):
            self.seen.setdefault(rank, []).extend(payloads(collected, rank))

    def address(self, key: str = KEY) -> ExchangeAddress:
        """Return node 0's address from the run directory, once it is published."""
        file = Rendezvous(self.places, key).address_file
        assert file is not None
        wait_until(file.exists)
        return ExchangeAddress.decode(file.read_bytes())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def open_at_end() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def nodes(tmp_path: Path, open_at_end: ExitStack) -> Nodes:
    return Nodes(tmp_path, open_at_end)
