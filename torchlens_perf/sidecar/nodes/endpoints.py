"""Choose the network addresses of the exchange between nodes. This module sends no packets."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from pathlib import Path

from torchlens_perf.config import ExchangeUrl

_LOOPBACK = ("127.", "::1", "fe80:")  # "fe80:" is link-local, which needs the name of an interface.
# This address is reserved for documentation, so the default route leads to it.
_FAR_AWAY = "192.0.2.1"


@dataclasses.dataclass(frozen=True)
class Endpoints:
    """The places where nodes can find node 0's sidecar, and the exchange's credentials."""

    job_store: tuple[str, int] | None = None
    """Host and port of the job's TCPStore, from the ranks' MASTER_ADDR and MASTER_PORT."""
    folder: Path | None = None
    """Folder in the run directory, which nodes may share."""
    coordinator: str = ""
    """host:port on which node 0 listens, or "" for a free port, which node 0 publishes."""
    token_file: str = ""
    tls_folder: str = ""
    tls_name: str = ""
    token: str = dataclasses.field(default="", repr=False)

    @classmethod
    def from_setting(
        cls, job_store: tuple[str, int] | None, exchange: str, folder: Path, token: str = ""
    ) -> Endpoints | None:
        """Return the endpoints for the setting Config.exchange.

        Returns None if the exchange is off, or if there is neither a store nor an address. token:
        the job's token, which is not part of the URL. Raises ValueError for an invalid URL.
        """
        url = ExchangeUrl("") if exchange in ("auto", "off") else ExchangeUrl.parse(exchange)
        if exchange == "off" or (job_store is None and not url.address):
            return None
        return cls(job_store, folder, url.address, url.token_file, url.certs, url.name, token)

    @property
    def description(self) -> str:
        """Description for the log."""
        known = (
            [f"the job's store is {self.job_store[0]}:{self.job_store[1]}"]
            if self.job_store
            else []
        )
        return "; ".join(known + ([f"node 0 is at {self.coordinator}"] if self.coordinator else []))


def split_address(text: str) -> tuple[str, int]:
    """Split "host:port" or "[host]:port". Raises ValueError for other texts."""
    host, colon, port = text.strip().rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if (
        not (colon and host and port.isascii() and port.isdigit() and 0 < int(port[:9]) < 1 << 16)
        or " " in host
    ):
        raise ValueError(f"{text!r} is not host:port")
    return host, int(port)


def find_listen_addresses(places: Endpoints) -> tuple[list[str], int]:
    """Return addresses for node 0 to listen on, in order of preference, and the port (0 for any).

    "::" means all addresses of this node. With a coordinator, the coordinator's addresses come
    first. Otherwise the result is the address of the interface that leads to the job's store. A
    loopback address is returned only if the store's address is one, because all nodes are then on
    one machine.
    """
    if places.coordinator:
        host, port = split_address(places.coordinator)
        # The host name may belong to a proxy that forwards to this node, so "::" is the last
        # choice.
        return [*_resolve_host(host), "::"], port
    assert places.job_store is not None
    host = places.job_store[0]
    if host == "localhost":
        return ["127.0.0.1"], 0
    if host.startswith(("127.", "::1")):
        return [host], 0
    towards = next(filter(None, map(_find_own_address_towards, _resolve_host(host))), "")
    # On the machine itself, its name often resolves to loopback. Other nodes see another address.
    return ["::" if towards.startswith(_LOOPBACK) or not towards else towards], 0


def find_own_hosts(places: Endpoints, listens_on: str) -> tuple[str, ...]:
    """Return names and addresses of this node to publish for other nodes, likeliest first."""
    host = (
        split_address(places.coordinator)[0]
        if places.coordinator
        else (places.job_store or ("", 0))[0]
    )
    if listens_on.startswith("127.") or listens_on == "::1":
        return (listens_on,)
    own = [listens_on]
    if listens_on == "::":
        own = [_find_own_address_towards(_FAR_AWAY) or "", *_resolve_host(socket.gethostname())]
    # Other nodes resolve this node's name to an address that they can reach, so put the name first.
    ours = bool(places.coordinator) or any(
        _find_own_address_towards(each) == each for each in _resolve_host(host)
    )
    hosts = [host, *own] if ours else [*own, host]
    return tuple(
        dict.fromkeys(
            each for each in hosts if each and (each == host or not each.startswith(_LOOPBACK))
        )
    )


def _find_own_address_towards(address: str) -> str | None:
    """Return this node's address on the interface that leads to another address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect((address, 9))
        return str(asking.getsockname()[0])
    return None


def _resolve_host(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
