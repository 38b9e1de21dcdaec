"""Send reports to node 0's sidecar, and reconnect when the connection is lost.

The sidecars of all nodes except node 0 use this module.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from grpc import aio

from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.sidecar.nodes import transport
from torchlens_perf.sidecar.nodes.messages import Outbox, decode_reply, encode
from torchlens_perf.sidecar.nodes.rendezvous import ExchangeAddress, NotPublishedYet, Rendezvous


class ReportSender:
    """The side of the exchange that sends reports to node 0. Belongs to one event loop."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        lock: threading.Lock,
        outbox: Outbox,
        name: tuple[str, str],
    ) -> None:
        """lock: guards the data shared with the sidecar's thread.

        name: id of this process, and name of its node.
        """
        self._rendezvous = rendezvous
        self._timing = rendezvous.timing
        self._lock = lock
        self._outbox = outbox
        self._name = name
        self._channel: aio.Channel | None = None
        self._call: Any = None
        self._instance = b""  # id of the process on node 0 that has received posts
        self._last: tuple[str, ExchangeAddress] | None = None
        self._not_before_s = 0.0

    async def work_once(self) -> float:
        """Send all unsent posts.

        Return the seconds until the next report, unless a new post needs an earlier one.

        Raises OSError.
        """
        try:
            if self._call is None:
                await self._find_node_0()
            wait_s = self._not_before_s - time.monotonic()
            if wait_s > 0:
                return wait_s
            await self._send_report()
            while self._outbox.has_unsent:
                await self._send_report()
            return self._timing.beat_s
        except BaseException:
            await self._close_connection()
            raise

    async def finish(self) -> None:
        """Send the remaining posts, announce the end, and close the connection."""
        try:
            if self._call is None and self._outbox.has_unsent:
                # Use the last address. A new search may fail, because at the end of a job its store
                # has often ended too.
                last = self._last
                await (self._connect_to_first([last]) if last else self._find_node_0())
            if self._call is not None:
                while not await self._send_report(leaving=True):
                    pass
        finally:
            await self._close_connection()
            self._rendezvous.close()

    async def _send_report(self, leaving: bool = False) -> bool:
        """Send one report. Return True if it was the last report of a sidecar that ends."""
        now_s = time.monotonic()
        with self._lock:
            report = self._outbox.build_report(now_s, leaving=leaving)
        try:
            if self._call.done():
                raise asyncio.InvalidStateError
            found = await asyncio.wait_for(
                self._get_reply(encode(report)), self._timing.operation_s
            )
        except transport.CALL_ERRORS as error:
            raise ConnectionError(await self._describe_error(error)) from None
        try:
            reply = decode_reply(found)
        except ValueError as error:
            raise ConnectionError(f"node 0's reply cannot be read: {error}") from None
        with self._lock:
            self._outbox.mark_received(report)
            self._outbox.instructions = reply.instructions
        self._not_before_s = now_s + reply.pace_s
        return report.leaving

    async def _get_reply(self, data: bytes) -> bytes:
        await self._call.write(data)
        found = await self._call.read()
        if found is aio.EOF:
            raise asyncio.InvalidStateError
        return bytes(found)

    async def _describe_error(self, error: BaseException) -> str:
        """Return the reason why the call has ended."""
        if (
            isinstance(error, asyncio.InvalidStateError)
            and self._call is not None
            and self._call.done()
        ):
            return transport.describe_grpc_status(
                await self._call.code(), await self._call.details()
            )
        if isinstance(error, asyncio.TimeoutError):
            return "it does not answer"
        return f"the connection has ended ({type(error).__name__})"

    # -- finding node 0

    # Errors are stored as text. An exception in a variable would keep its frame, a call and a
    # connection alive.

    async def _find_node_0(self) -> None:
        """Connect to node 0's last known address. If that fails, try all published addresses."""
        candidates = [self._last] if self._last else []
        why = ""
        try:
            candidates += [each for each in self._rendezvous.find_addresses() if each != self._last]
        except NotPublishedYet:
            if not candidates:
                raise
        except OSError as error:
            why = str(error)
        source = await self._connect_to_first(candidates, why)
        logger.info("node 0's sidecar was found by %s", source)
        self._rendezvous.stop_search()

    async def _connect_to_first(
        self, candidates: Sequence[tuple[str, ExchangeAddress]], why: str = ""
    ) -> str:
        """Connect to the first address that node 0 answers at. Return the address's source.

        Raises OSError without one. why: the reason if no address can be tried.
        """
        for source, address in candidates:
            for host in address.hosts:
                try:
                    await self._open_call(host, address)
                except OSError as error:
                    why = str(error)
                    await self._close_connection()
                    continue
                self._last = source, address
                return source
        raise ConnectionError(why)

    async def _open_call(self, host: str, address: ExchangeAddress) -> None:
        """Open a call after both sides have proved that they have the job's token."""
        where = transport.format_target(host, address.port)
        nonce = os.urandom(transport.NONCE_BYTES)
        sender, node = self._name
        self._channel = self._open_channel(where)
        self._call = self._channel.stream_stream(transport.REPORT)(
            metadata=(
                (transport.NONCE, nonce),
                (transport.PROOF, transport.make_proof(address.token, transport.SENDER, nonce)),
                (transport.SENDER, sender),
                (transport.NODE, node.encode()),
            )
        )
        try:
            found = dict(
                await asyncio.wait_for(self._call.initial_metadata(), self._timing.connect_s)
            )
            if transport.PROOF not in found:  # Node 0 has refused the call.
                await asyncio.wait_for(self._call.code(), self._timing.operation_s)
                raise asyncio.InvalidStateError
        except transport.CALL_ERRORS as error:
            raise ConnectionError(f"{where}: {await self._describe_error(error)}") from None
        instance, shown = found.get(transport.INSTANCE, b""), found[transport.PROOF]
        if not hmac.compare_digest(
            shown, transport.make_proof(address.token, transport.INSTANCE, nonce + instance)
        ):
            raise ConnectionError(
                f"{where} belongs to another job: it does not have this job's token"
            )
        if instance != self._instance:
            with self._lock:
                self._outbox.require_resend()
        self._instance, self._not_before_s = instance, 0.0

    def _open_channel(self, where: str) -> aio.Channel:
        places = self._rendezvous.places
        if not places.tls_folder:
            return aio.insecure_channel(where, options=transport.CLIENT_OPTIONS)
        # The host name in node 0's certificate.
        named = [("grpc.ssl_target_name_override", places.tls_name)] if places.tls_name else []
        return aio.secure_channel(
            where,
            transport.load_client_credentials(places.tls_folder),
            options=[*transport.CLIENT_OPTIONS, *named],
        )

    async def _close_connection(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()
