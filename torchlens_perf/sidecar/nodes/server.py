"""Serve one gRPC call per node on node 0, and publish node 0's address.

The server accepts or refuses a call by its metadata, which are limited to 8 KB. A call must prove
that its sender has the job's token. Otherwise the server ends the call without reading its payload.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import secrets
import threading
import time
from typing import Any

import grpc
from grpc import aio

from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.run.open_files import raise_open_file_limit
from torchlens_perf.sidecar.nodes import transport
from torchlens_perf.sidecar.nodes.endpoints import find_listen_addresses, find_own_hosts
from torchlens_perf.sidecar.nodes.messages import Inbox, ReportReply, encode
from torchlens_perf.sidecar.nodes.rendezvous import ExchangeAddress, Rendezvous, create_token

# Limit of reports from all nodes together. With more nodes, each report contains several posts.
_MAX_REPORTS_PER_S = 550
# The sum of this interval and a report's timeout is less than the time after which a node counts as
# silent.
_MAX_PACE_S = 3.75
_MAX_NAME_BYTES = 512
# Garbage collections must be rare, because they visit the objects of thousands of open calls.
_GC_THRESHOLD = 10_000
_STOP_TIMEOUT_S = 0.5


class ReportCollector(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Node 0's side of the exchange, which receives all reports. Belongs to one event loop."""

    def __init__(self, rendezvous: Rendezvous, lock: threading.Lock, inbox: Inbox) -> None:
        """lock: guards the data shared with the sidecar's thread."""
        self._rendezvous = rendezvous
        self._timing = rendezvous.timing
        self._token = ""
        self._lock = lock
        self._inbox = inbox
        self._instance = secrets.token_bytes(transport.INSTANCE_BYTES)
        self._server: aio.Server | None = None
        self._last_report_s: dict[asyncio.Task[Any], float] = {}
        self._accept = grpc.stream_stream_rpc_method_handler(self._serve_call)
        self._refuse = grpc.stream_stream_rpc_method_handler(self._refuse_call)
        self.address: ExchangeAddress | None = None

    async def work_once(self) -> float:
        """Start the server and publish its address, if needed.

        Return the seconds until the next call.

        Raises OSError.
        """
        if self._server is None:
            await self._start_server()
        assert self.address is not None
        now_s = time.monotonic()
        for task, last_report_s in list(self._last_report_s.items()):
            # The connection to the other node was cut, or that node has stopped.
            if now_s - last_report_s > self._timing.silent_s:
                task.cancel()
        error = self._rendezvous.publish_address(self.address)
        with self._lock:
            has_senders = bool(self._inbox.senders)
        # The error does not matter if other nodes have found this node in another way.
        if error and not has_senders:
            raise ConnectionError(error)
        return self._timing.look_s

    async def finish(self) -> None:
        self._rendezvous.close(unpublish=self.address)
        if self._server is not None:
            server, self._server = self._server, None
            # Without cancelling each call first, grpc would log an error on all other nodes.
            for task in list(self._last_report_s):
                task.cancel()
            await server.stop(_STOP_TIMEOUT_S)

    async def _start_server(self) -> None:
        raise_open_file_limit()  # Each node has one connection.
        gc.set_threshold(_GC_THRESHOLD)
        places = self._rendezvous.places
        self._token = create_token(places, self._rendezvous.key)
        hosts, port = find_listen_addresses(places)
        for host in hosts:
            server = aio.server(handlers=[self], options=transport.SERVER_OPTIONS)
            where = transport.format_target(host, port)
            try:
                if places.tls_folder:
                    credentials = transport.load_server_credentials(places.tls_folder)
                    port = server.add_secure_port(where, credentials)
                else:
                    port = server.add_insecure_port(where)
            except RuntimeError as error:
                failed = OSError(f"cannot listen on {where}: {' '.join(str(error).split())}"[:300])
                continue
            await server.start()
            self._server = server
            self.address = ExchangeAddress(port, self._token, find_own_hosts(places, host))
            logger.info("listening for other nodes on %s", transport.format_target(host, port))
            return
        raise failed

    # -- calls

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Choose a call's handler before its payload is read. gRPC calls this method."""
        if call.method != transport.REPORT:
            return None
        metadata = dict(call.invocation_metadata)
        nonce, shown = metadata.get(transport.NONCE, b""), metadata.get(transport.PROOF, b"")
        good = hmac.compare_digest(
            shown, transport.make_proof(self._token, transport.SENDER, nonce)
        )
        return self._accept if good and len(nonce) == transport.NONCE_BYTES else self._refuse

    async def _refuse_call(self, requests: Any, context: Any) -> None:
        with self._lock:
            self._inbox.refused += 1
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this is not the token of this job")

    async def _serve_call(self, requests: Any, context: Any) -> None:
        metadata = dict(context.invocation_metadata())
        sender, node = metadata.get(transport.SENDER, ""), metadata.get(transport.NODE, b"")
        if not (sender.isalnum() and len(sender) <= 64):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a sender without a name")
        proof = transport.make_proof(
            self._token, transport.INSTANCE, metadata[transport.NONCE] + self._instance
        )
        await context.send_initial_metadata(
            ((transport.INSTANCE, self._instance), (transport.PROOF, proof))
        )
        with self._lock:
            self._inbox.add_sender(
                sender, node[:_MAX_NAME_BYTES].decode(errors="replace"), time.monotonic()
            )
        task = asyncio.current_task()
        assert task is not None
        self._last_report_s[task] = time.monotonic()
        try:
            while (data := await context.read()) is not aio.EOF:
                self._last_report_s[task] = now_s = time.monotonic()
                try:
                    with self._lock:
                        self._inbox.receive_report(sender, data, now_s)
                        instructions = self._inbox.instructions
                    # Free the report before waiting for the next one, because there is one per
                    # node.
                    data = b""
                except ValueError:
                    # Only this sender has to reconnect.
                    await context.abort(
                        grpc.StatusCode.INVALID_ARGUMENT, "that report cannot be read"
                    )
                # Many nodes report less often.
                pace_s = min(_MAX_PACE_S, len(self._last_report_s) / _MAX_REPORTS_PER_S)
                await context.write(
                    encode(ReportReply(pace_s if pace_s > 1 else 0.0, instructions))
                )
        finally:
            del self._last_report_s[task]
