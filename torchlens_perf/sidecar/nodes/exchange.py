"""Exchange reports between the sidecars of several nodes. Node 0's sidecar collects the reports.

::

    setting, run directory, job's store   address of node 0's sidecar, and the token (rendezvous.py)
    one gRPC call per node                each report and its reply (client.py, server.py,
    messages.py)

The exchange runs on one daemon thread with an event loop. The methods of Exchange only pass values
to and from this thread. Only this thread imports grpc, so sidecars of jobs with one node do not
load it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import secrets
import threading
import time
from collections.abc import Mapping
from concurrent.futures import wait
from typing import TYPE_CHECKING

from torchlens_perf.sidecar.nodes.endpoints import Endpoints
from torchlens_perf.sidecar.nodes.messages import (
    MAX_REPLY_BYTES,
    CollectedPosts,
    Inbox,
    Outbox,
)
from torchlens_perf.sidecar.nodes.rendezvous import NotPublishedYet, Rendezvous
from torchlens_perf.sidecar.nodes.timing import ExchangeTiming

if TYPE_CHECKING:
    from torchlens_perf.sidecar.nodes.client import ReportSender
    from torchlens_perf.sidecar.nodes.server import ReportCollector


class Exchange:
    """One node's access to the exchange. Methods do not block. Not thread-safe."""

    def __init__(
        self,
        endpoints: Endpoints,
        key: str,
        node: str,
        merges: bool,
        *,
        timing: ExchangeTiming | None = None,
    ) -> None:
        """Start the exchange on its thread.

        endpoints: the places where nodes can find node 0.
        key: id of this exchange. All nodes of the job must use the same key, and other jobs must
        use other keys.
        node: name of this node, unique in the job.
        merges: True on node 0, which collects the reports.

        Raises ValueError for an invalid port.
        """
        if endpoints.job_store is not None and not 0 <= endpoints.job_store[1] < 1 << 16:
            raise ValueError(f"invalid port {endpoints.job_store[1]}")
        self._rendezvous = Rendezvous(endpoints, key, timing)
        self._timing = self._rendezvous.timing
        self._node, self._merges = node, merges
        self._lock = threading.Lock()
        self._inbox = Inbox(node)
        self._outbox = Outbox()
        self._errors = 0
        self._last_error = ""
        self._failing_since_s: float | None = None
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._closing = False
        self._loop = _get_event_loop()
        self._life = asyncio.run_coroutine_threadsafe(self._run_until_stopped(), self._loop)

    def post(self, payloads: Mapping[int, bytes]) -> None:
        """Send payloads, by rank, to node 0. Node 0 itself sends nothing.

        While node 0 is unreachable, the last 8 posts are kept.

        Raises ValueError for a payload over 1024 bytes, an invalid rank, or more than 512 ranks.
        """
        with self._lock:
            self._outbox.add_post(payloads, time.monotonic())
        self._loop.call_soon_threadsafe(self._wake.set)

    def collect_posts(self) -> CollectedPosts:
        """Return the posts that node 0 has received since the last call.

        On other nodes the result is empty.

        After a restart of node 0's sidecar, each node reports its last 8 posts again.
        """
        with self._lock:
            return self._inbox.collect_posts(time.monotonic())

    def set_links(self, links: bytes) -> None:
        """Set the link statistics for the next report.

        The statistics are sent again if node 0's sidecar restarts. Has no effect on node 0.
        """
        with self._lock:
            self._outbox.links = links

    def link_reports(self) -> list[bytes]:
        """Return the newest link report of each other node. The list is empty except on node 0."""
        with self._lock:
            return self._inbox.link_reports()

    def set_instructions(self, reply: bytes) -> None:
        """Set node 0's instructions to all other nodes, at most 1024 bytes.

        Each reply to a node contains the instructions, and each node gets a reply at least every
        few seconds. Raises ValueError for instructions of more than 1024 bytes.
        """
        if len(reply) > MAX_REPLY_BYTES:
            raise ValueError(f"the reply has {len(reply)} bytes, more than {MAX_REPLY_BYTES}")
        with self._lock:
            self._inbox.instructions = reply

    def instructions(self) -> bytes:
        """Return node 0's newest instructions, or b"" before the first ones and on node 0."""
        with self._lock:
            return self._outbox.instructions

    @property
    def time_without_contact_s(self) -> float:
        """Time without contact to node 0, or on node 0 without publishing its address."""
        since_s = self._failing_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def notes(self) -> list[str]:
        """Return notes for the report about the current state of the exchange."""
        notes = []
        with self._lock:
            failing_s = self.time_without_contact_s
            if failing_s > self._timing.beat_s:
                what = (
                    "other nodes may not reach this sidecar"
                    if self._merges
                    else "node 0's sidecar is not reached"
                )
                notes.append(f"{what}, since {failing_s:.0f} s: {self._last_error}")
            elif self._errors:
                notes.append(
                    f"errors in the exchange between nodes: {self._errors}; the last:"
                    f" {self._last_error}"
                )
            if self._outbox.dropped:
                notes.append(
                    f"{self._outbox.dropped} windows could not be sent to node 0's sidecar"
                )
            notes += [
                f"{count} reports of node {node} could not be read"
                for node, count in self._inbox.count_unreadable_reports().items()
            ]
            if self._inbox.refused:
                notes.append(f"{self._inbox.refused} calls without this job's token were refused")
            notes += [
                f"several sidecars use the node name {node!r}"
                for node in self._inbox.find_duplicate_names()
            ]
        if self._life.done() and not self._closing:
            notes.append(f"the exchange between nodes has failed: {self._life.exception()!r}")
        return notes

    def close(self, timeout_s: float = 5.0) -> bool:
        """Send unsent posts if node 0 is reachable, and close all connections.

        Returns False if this takes longer than `timeout_s`. Open connections are then dropped.
        """
        self._closing = True
        for event in (self._stop, self._wake):
            self._loop.call_soon_threadsafe(event.set)
        done, _ = wait([self._life], timeout_s)
        if not done:
            self._life.cancel()
        return bool(done)

    # -- on the thread

    async def _run_until_stopped(self) -> None:
        end = self._create_side()
        retry_s = self._timing.first_retry_s
        while not self._stop.is_set():
            # Clear the event before the work, so a post during it wakes this loop again.
            self._wake.clear()
            try:
                wait_s = await end.work_once()
                with self._lock:
                    self._failing_since_s = None
                retry_s = self._timing.first_retry_s
                await _wait_for_event(self._wake, wait_s)
            except OSError as error:
                self._record_error(error)
                # The random factor spreads the retries of all nodes over time. New posts do not
                # shorten the delay.
                await _wait_for_event(self._stop, retry_s * random.uniform(0.5, 1.0))
                retry_s = min(2 * retry_s, self._timing.last_retry_s)
        try:
            await end.finish()
        except OSError as error:
            self._record_error(error)

    def _create_side(self) -> ReportCollector | ReportSender:
        if self._merges:
            from torchlens_perf.sidecar.nodes.server import ReportCollector

            return ReportCollector(self._rendezvous, self._lock, self._inbox)
        from torchlens_perf.sidecar.nodes.client import ReportSender

        name = secrets.token_hex(8), self._node
        return ReportSender(self._rendezvous, self._lock, self._outbox, name)

    def _record_error(self, error: OSError) -> None:
        with self._lock:
            self._errors += not isinstance(error, NotPublishedYet)
            self._last_error = str(error)
            if self._failing_since_s is None:
                self._failing_since_s = time.monotonic()


@functools.cache
def _get_event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process, which runs on a daemon thread.

    The first call starts it.

    All exchanges share it, because grpc needs a single event loop in a process.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="torchlens_perf exchange", daemon=True).start()
    return loop


async def _wait_for_event(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
