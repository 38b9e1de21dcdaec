"""The part of node 0: serves one stream per node, and publishes where it does.

A call is answered or refused by its metadata, which are limited to 8 KB, unless it has the job's token: nothing of its
payload is read, and its stream ends at once. A call to an earlier node 0 is refused in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from typing import Any

import grpc
from grpc import aio

from torchlens_perf.sidecar.nodes import transport
from torchlens_perf.sidecar.nodes.messages import Answer, Inbox, encode
from torchlens_perf.sidecar.nodes.places import Places, known_as, listen_on
from torchlens_perf.sidecar.nodes.rendezvous import Address, Rendezvous, new_token
from torchlens_perf.sidecar.nodes.timing import Timing

logger = logging.getLogger("torchlens_perf.sidecar")

_MESSAGES_PER_S = 700  # of all nodes together; where there would be more, nodes send several posts at a time
_MAX_PACE_S = 3.0  # half of what makes a node a silent one
_NAME_BYTES = 512
_LEAVE_S = 0.5


class Collector(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Belongs to one event loop."""

    def __init__(
        self,
        meeting: Rendezvous,
        places: Places,
        key: str,
        timing: Timing,
        lock: threading.Lock,
        inbox: Inbox,
    ) -> None:
        """lock: of what this and the sidecar's thread exchange values in."""
        self._meeting = meeting
        self._places = places
        self._key = key
        self._token = ""
        self._timing = timing
        self._lock = lock
        self._inbox = inbox
        self._instance = secrets.token_bytes(transport.INSTANCE_BYTES)
        self._server: aio.Server | None = None
        self._heard_s: dict[asyncio.Task[Any], float] = {}
        # As a stream: grpc reads a unary call's message before it calls the handler, from whoever sends it.
        self._hello = grpc.stream_unary_rpc_method_handler(self._say_hello)
        self._post = grpc.stream_stream_rpc_method_handler(self._receive)
        self._refuse = grpc.stream_stream_rpc_method_handler(self._say_no)
        self.address: Address | None = None
        self.reply = b""
        """What the answers carry to all nodes; set under the lock."""

    async def turn(self) -> float:
        """Listens, and publishes where, as far as that is not done. Returns after how many seconds to come again.

        Raises OSError.
        """
        if self._server is None:
            await self._listen()
        assert self.address is not None
        now_s = time.monotonic()
        for task, heard_s in list(self._heard_s.items()):
            if now_s - heard_s > self._timing.silent_s:  # a link that was cut, or a node that has stopped
                task.cancel()
        wrong = self._meeting.publish(self.address)
        with self._lock:
            reached = self._inbox.senders
        if wrong and not reached:
            raise ConnectionError(wrong)
        return self._timing.look_s

    async def leave(self) -> None:
        self._meeting.close(unpublish=self.address)
        if self._server is not None:
            server, self._server = self._server, None
            for task in list(self._heard_s):  # each stream by itself: else grpc logs an error on all other nodes
                task.cancel()
            await server.stop(_LEAVE_S)

    async def _listen(self) -> None:
        transport.allow_many_connections()
        self._token = new_token(self._places, self._key)
        hosts, port = listen_on(self._places)
        for host in hosts:
            server = aio.server(handlers=[self], options=transport.SERVER_OPTIONS)
            where = transport.target(host, port)
            try:
                if self._places.tls_folder:
                    credentials = transport.server_credentials(self._places.tls_folder)
                    port = server.add_secure_port(where, credentials)
                else:
                    port = server.add_insecure_port(where)
            except RuntimeError as error:
                failed = OSError(f"cannot listen on {where}: {' '.join(str(error).split())}"[:300])
                continue
            await server.start()
            self._server = server
            self.address = Address(port, self._token, known_as(self._places, host))
            logger.info("listening for other nodes on %s", transport.target(host, port))
            return
        raise failed

    # -- calls

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Who answers a call, by what is known before its payload. A method of gRPC's."""
        if call.method == transport.HELLO:
            return self._hello
        if call.method != transport.POST:
            return None
        said = dict(call.invocation_metadata)
        shown = said.get(transport.TOKEN, "")
        good = isinstance(shown, str) and transport.same(shown.encode(), self._token.encode())
        return self._post if good else self._refuse

    async def _say_hello(self, requests: Any, context: Any) -> bytes:
        nonce = dict(context.invocation_metadata()).get(transport.NONCE)
        if not isinstance(nonce, bytes) or len(nonce) != transport.NONCE_BYTES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a nonce")
            return b""  # not reached: abort() raises
        return self._instance + transport.proof(self._token, nonce, self._instance)

    async def _say_no(self, requests: Any, context: Any) -> None:
        with self._lock:
            self._inbox.refused += 1
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this is not the token of this job")

    async def _receive(self, requests: Any, context: Any) -> None:
        said = dict(context.invocation_metadata())
        sender, node = said.get(transport.SENDER), said.get(transport.NODE)
        if said.get(transport.INSTANCE) != self._instance:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this sidecar has been started since")
        if not (isinstance(sender, str) and sender.isalnum() and len(sender) <= 64 and isinstance(node, bytes)):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "who are you?")
            return  # not reached: abort() raises
        inbox, lock, heard_s = self._inbox, self._lock, self._heard_s
        with lock:
            inbox.enter(sender, node[:_NAME_BYTES].decode(errors="replace"), time.monotonic())
        task = asyncio.current_task()
        assert task is not None
        heard_s[task] = time.monotonic()
        try:
            while (data := await context.read()) is not aio.EOF:
                heard_s[task] = now_s = time.monotonic()
                try:
                    with lock:
                        newest = inbox.receive(sender, data, now_s)
                    data = b""  # while the next is waited for, as many as there are nodes would be kept
                except ValueError:  # the sender comes again, and no other one notices
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "that message cannot be read")
                if newest is not None:
                    await context.write(encode(Answer(newest, self._pace_s(), self.reply)))
        finally:
            del heard_s[task]

    def _pace_s(self) -> float:
        nodes = len(self._heard_s)
        return min(_MAX_PACE_S, nodes / _MESSAGES_PER_S) if nodes > _MESSAGES_PER_S else 0.0
