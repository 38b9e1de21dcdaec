"""Where the nodes of a job can meet, and which addresses of this node are for that. No packet is sent here."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from pathlib import Path

from torchlens_perf.config import ExchangeUrl

_LOOPBACK = ("127.", "::1", "fe80:")  # or only valid together with an interface
_FAR_AWAY = "192.0.2.1"  # reserved for documentation: what leads there is the default route


@dataclasses.dataclass(frozen=True)
class Endpoints:
    """What the job says about where its nodes can meet."""

    job_store: tuple[str, int] | None = None
    """Host and port of the job's TCPStore, as its training processes have them in MASTER_ADDR and MASTER_PORT."""
    folder: Path | None = None
    """In the run directory, which nodes may share."""
    coordinator: str = ""
    """host:port where node 0 listens; "" for a free port, which it publishes."""
    token_file: str = ""
    tls_folder: str = ""
    tls_name: str = ""
    token: str = dataclasses.field(default="", repr=False)

    @classmethod
    def of(cls, job_store: tuple[str, int] | None, exchange: str, folder: Path, token: str = "") -> Endpoints | None:
        """Return those of Config.exchange; None if it is off, or if the nodes share neither a store nor an address.

        token: the one that is not in the URL. Raise ValueError for text that is no URL of an exchange.
        """
        url = ExchangeUrl("") if exchange in ("auto", "off") else ExchangeUrl.parse(exchange)
        if exchange == "off" or (job_store is None and not url.address):
            return None
        return cls(job_store, folder, url.address, url.token_file, url.certs, url.name, token)

    @property
    def text(self) -> str:
        """For the log."""
        known = [f"the job's store is {self.job_store[0]}:{self.job_store[1]}"] if self.job_store else []
        return "; ".join(known + ([f"node 0 is at {self.coordinator}"] if self.coordinator else []))


def split_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[host]:port". Raises ValueError for another text."""
    host, colon, port = text.strip().rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port[:9]) < 1 << 16) or " " in host:
        raise ValueError(f"{text!r} is not host:port")
    return host, int(port)


def listen_on(places: Endpoints) -> tuple[list[str], int]:
    """Addresses to try to listen on, in that order, and the port, 0 for any. "::" stands for all of this node's.

    With a coordinator, its own. Else the address of the interface that leads to the job's store: loopback only where
    that is known by a loopback address itself, so that all nodes are on one machine.
    """
    if places.coordinator:
        host, port = split_address(places.coordinator)
        return [*_addresses(host), "::"], port  # it may be the name of what forwards to this node
    assert places.job_store is not None
    host = places.job_store[0]
    if host == "localhost":
        return ["127.0.0.1"], 0
    if host.startswith(("127.", "::1")):
        return [host], 0
    towards = next(filter(None, map(_own_address_towards, _addresses(host))), "")
    # A name that stands for loopback here, as a machine's own often does, stands for something else on other nodes.
    return ["::" if towards.startswith(_LOOPBACK) or not towards else towards], 0


def known_as(places: Endpoints, listens_on: str) -> tuple[str, ...]:
    """By what others may reach this node, the likeliest first."""
    host = split_address(places.coordinator)[0] if places.coordinator else (places.job_store or ("", 0))[0]
    if listens_on.startswith("127.") or listens_on == "::1":
        return (listens_on,)
    own = [listens_on]
    if listens_on == "::":
        own = [_own_address_towards(_FAR_AWAY) or "", *_addresses(socket.gethostname())]
    # A name that stands for this node: others resolve it to what they can reach.
    ours = bool(places.coordinator) or any(_own_address_towards(each) == each for each in _addresses(host))
    hosts = [host, *own] if ours else [*own, host]
    return tuple(dict.fromkeys(each for each in hosts if each and (each == host or not each.startswith(_LOOPBACK))))


def _own_address_towards(address: str) -> str | None:
    """This node's address on the interface that leads there. Connecting a UDP socket sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect((address, 9))
        return str(asking.getsockname()[0])
    return None


def _addresses(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
