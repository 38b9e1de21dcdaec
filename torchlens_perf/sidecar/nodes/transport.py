"""Settings that both sides of the exchange share: gRPC options, method name, proofs and TLS.

This module imports grpc, so only sidecars of jobs with several nodes import it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# grpc reads these variables when it is imported. Values that the user has set are kept.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # Errors are reported as notes instead.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # The sidecar only uses vfork with exec.
# Separate polling threads would cost 30 to 40 % of node 0's time per message.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener,-event_engine_client")

import grpc
from grpc import aio

from torchlens_perf.sidecar.nodes.messages import MAX_LINKS_BYTES, MAX_MESSAGE_BYTES

logging.getLogger("grpc").setLevel(logging.CRITICAL)

# The number in the name is the protocol version. Node 0 answers UNIMPLEMENTED to other versions.
REPORT = "/torchlens_perf.Exchange3/Report"
NONCE_BYTES, INSTANCE_BYTES = 16, 8
NONCE, PROOF = "nonce-bin", "proof-bin"
SENDER, NODE, INSTANCE = "sender", "node-bin", "instance-bin"
MAX_CONNECTIONS = 8192
IDLE_S = 10  # Node 0 closes connections without a call after this time.
_KEEPALIVE_S = 60

_MS = 1000
_BOTH = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES + MAX_LINKS_BYTES + 4096),
    # The bandwidth probe would send a ping per message, but small messages need no flow control.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_metadata_size", 8192),
]
CLIENT_OPTIONS: Sequence[tuple[str, Any]] = [
    *_BOTH,
    ("grpc.keepalive_time_ms", _KEEPALIVE_S * _MS),
    # Each channel opens its own connection, without the back-off of an earlier connection.
    ("grpc.use_local_subchannel_pool", 1),
    # The back-off time also limits the duration of one connection attempt.
    ("grpc.min_reconnect_backoff_ms", 5 * _MS),
    ("grpc.initial_reconnect_backoff_ms", 5 * _MS),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),  # Nodes of a job connect directly.
    ("grpc.service_config_disable_resolution", 1),
]
SERVER_OPTIONS: Sequence[tuple[str, Any]] = [
    *_BOTH,
    ("grpc.so_reuseport", 0),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", 5 * _MS),
    ("grpc.max_connection_idle_ms", IDLE_S * _MS),
    ("grpc.max_concurrent_streams", 4),
    # All nodes may connect at the same time.
    ("grpc.server.max_pending_requests", MAX_CONNECTIONS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_CONNECTIONS),
    ("grpc.http2.min_ping_interval_without_data_ms", 10 * _MS),
    # A larger limit could keep a buffer of 64 KB per connection: more than 100 MB for 2048 nodes.
    ("grpc.experimental.tcp_max_read_buffer_size", 8192),
]
CALL_ERRORS = (grpc.RpcError, asyncio.TimeoutError, asyncio.InvalidStateError, aio.UsageError)


def make_proof(token: str, role: str, nonce: bytes) -> bytes:
    """Return a proof that its sender has the token. The token itself is never sent.

    role: SENDER, or INSTANCE for node 0.
    """
    return hmac.new(
        token.encode(), f"torchlens_perf {role} ".encode() + nonce, hashlib.sha256
    ).digest()


def describe_grpc_status(code: grpc.StatusCode, details: str | None) -> str:
    """Return one line that describes how a gRPC call has ended."""
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "it is something else, or another version of torchlens_perf"
    return f"{code.name}: {' '.join((details or '').split())}"[:300]


def load_client_credentials(folder: str) -> grpc.ChannelCredentials:
    """Return credentials from ca.crt and, if they exist, tls.crt and tls.key. Raises OSError."""
    files = Path(folder)
    pair = [
        (files / name).read_bytes() if (files / name).exists() else None
        for name in ("tls.key", "tls.crt")
    ]
    return grpc.ssl_channel_credentials(
        (files / "ca.crt").read_bytes(), *(pair if all(pair) else (None, None))
    )


def load_server_credentials(folder: str) -> grpc.ServerCredentials:
    """Return credentials from tls.crt, tls.key and, if it exists, ca.crt.

    With ca.crt, all nodes must present certificates. Raises OSError.
    """
    files = Path(folder)
    pairs = [((files / "tls.key").read_bytes(), (files / "tls.crt").read_bytes())]
    ca = (files / "ca.crt").read_bytes() if (files / "ca.crt").exists() else None
    return grpc.ssl_server_credentials(pairs, ca, require_client_auth=ca is not None)


def format_target(host: str, port: int) -> str:
    """Return an address in the form that gRPC expects."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
