"""The part of all nodes but node 0: one stream of messages to node 0's sidecar, found again whenever it is lost."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from typing import Any

from grpc import aio

from torchlens_perf.sidecar.nodes import transport
from torchlens_perf.sidecar.nodes.messages import Outbox, decode_answer, encode
from torchlens_perf.sidecar.nodes.rendezvous import Address, NotYet, Rendezvous
from torchlens_perf.sidecar.nodes.timing import Timing

logger = logging.getLogger("torchlens_perf.sidecar")


class Sender:
    """Belongs to one event loop."""

    def __init__(
        self,
        meeting: Rendezvous,
        timing: Timing,
        lock: threading.Lock,
        outbox: Outbox,
        name: tuple[str, str],
        tls: tuple[str, str] = ("", ""),
    ) -> None:
        """lock: of what this and the sidecar's thread exchange values in. name: of this process, and of its node.

        tls: the folder of certificates, and the name in node 0's.
        """
        self._meeting = meeting
        self._timing = timing
        self._lock = lock
        self._outbox = outbox
        self._name = name
        self._tls = tls
        self._channel: aio.Channel | None = None
        self._call: Any = None
        self._instance = b""  # of the node 0 that has acknowledged posts
        self._last: tuple[str, Address] | None = None
        self._answered_s = 0.0
        self._not_before_s = self._pace_s = 0.0
        self.reply = b""
        """What node 0 says to everybody."""

    async def turn(self) -> float:
        """Sends what is due. Returns after how many seconds to come again, unless there is a post before. Raises
        OSError."""
        try:
            if self._call is None:
                await self._join()
            wait_s = self._not_before_s - time.monotonic()
            if wait_s > 0:
                return wait_s
            while await self._send(leaving=False):
                pass
            return self._timing.beat_s
        except BaseException:
            await self._drop()
            raise

    async def leave(self) -> None:
        """Sends what is waiting, says good-bye and closes everything. Raises OSError."""
        try:
            with self._lock:
                waiting = self._outbox.waiting
            if self._call is None and waiting:
                # No more looking for where it may have gone: the job's store has often ended by now.
                await (self._connect(*self._last) if self._last else self._join())
            if self._call is not None:
                while await self._send(leaving=True):
                    pass
        finally:
            await self._drop()
            self._meeting.close()

    async def _send(self, leaving: bool) -> bool:
        """Returns whether there is more."""
        now_s = time.monotonic()
        with self._lock:
            beat = now_s - self._answered_s >= self._timing.beat_s
            message = self._outbox.due(now_s, beat=beat, leaving=leaving)
            more = self._outbox.waiting
        if not (message.posts or beat or leaving):
            return False
        try:
            if self._call.done():
                raise asyncio.InvalidStateError
            await asyncio.wait_for(self._exchange(encode(message), message.wants_answer), self._timing.operation_s)
        except transport.ERRORS as error:
            raise ConnectionError(await self._why(error)) from None
        self._not_before_s = now_s + self._pace_s
        return more

    async def _exchange(self, data: bytes, wants_answer: bool) -> None:
        await self._call.write(data)
        if wants_answer:
            found = await self._call.read()
            if found is aio.EOF:
                raise asyncio.InvalidStateError
            try:
                answer = decode_answer(found)
            except ValueError as error:
                raise ConnectionError(f"node 0's answer cannot be read: {error}") from None
            self._answered_s = time.monotonic()
            self._pace_s = answer.pace_s
            with self._lock:
                self._outbox.acknowledge(answer.newest)
                self.reply = answer.reply

    async def _why(self, error: BaseException) -> str:
        """Why the stream has ended, if node 0 has said so."""
        if isinstance(error, asyncio.InvalidStateError) and self._call is not None and self._call.done():
            code, details = await self._call.code(), await self._call.details()
            return f"{code.name}: {' '.join((details or '').split())}"[:300]
        return transport.said(error)

    # -- finding node 0

    # Errors are kept as text: one that is kept in a frame keeps that frame, and so a call and its connection, alive.

    async def _join(self) -> None:
        """Connects to where node 0 was, else to where somebody says that it is."""
        places = [self._last] if self._last else []
        why = ""
        try:
            places += [place for place in self._meeting.known() if place != self._last]
        except NotYet:
            if not places:
                raise
        except OSError as error:
            why = str(error)
        for source, address in places:
            try:
                await self._connect(source, address)
            except OSError as error:
                why = str(error)
                continue
            logger.info("node 0's sidecar was found by %s", source)
            self._meeting.found()
            return
        raise ConnectionError(why)

    async def _connect(self, source: str, address: Address) -> None:
        why = "node 0's sidecar has no address"
        for host in address.hosts:
            try:
                await self._enter(host, address)
            except OSError as error:
                why = str(error)
                await self._drop()
                continue
            self._last = source, address
            return
        raise ConnectionError(why)

    async def _enter(self, host: str, address: Address) -> None:
        where = transport.target(host, address.port)
        self._channel = self._open(where)
        nonce = os.urandom(transport.NONCE_BYTES)
        try:
            hello = self._channel.unary_unary(transport.HELLO)
            found = bytes(await hello(b"", metadata=((transport.NONCE, nonce),), timeout=self._timing.connect_s))
        except transport.ERRORS as error:
            raise ConnectionError(f"{where}: {transport.said(error)}") from None
        instance, shown = found[: transport.INSTANCE_BYTES], found[transport.INSTANCE_BYTES :]
        if not transport.same(shown, transport.proof(address.token, nonce, instance)):
            raise ConnectionError(f"{where} is another one: it does not know the token of this job")
        sender, node = self._name
        self._call = self._channel.stream_stream(transport.POST)(
            metadata=(
                (transport.TOKEN, address.token),
                (transport.SENDER, sender),
                (transport.NODE, node.encode()),
                (transport.INSTANCE, instance),
            )
        )
        with self._lock:
            self._outbox.enter(known=instance == self._instance)
        self._instance = instance
        self._answered_s = self._not_before_s = self._pace_s = 0.0

    def _open(self, where: str) -> aio.Channel:
        folder, name = self._tls
        if not folder:
            return aio.insecure_channel(where, options=transport.CLIENT_OPTIONS)
        named = [("grpc.ssl_target_name_override", name)] if name else []
        return aio.secure_channel(
            where, transport.client_credentials(folder), options=[*transport.CLIENT_OPTIONS, *named]
        )

    async def _drop(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()
