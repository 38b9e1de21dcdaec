"""Split an endpoint's address into parts, to remove credentials before the address is printed."""

from __future__ import annotations

import re
from typing import NamedTuple

from torchlens_perf.errors import printable

# Schemes of names that gRPC resolves itself: https://github.com/grpc/grpc/blob/master/doc/naming.md
_GRPC_SCHEMES = ("dns", "unix", "unix-abstract", "ipv4", "ipv6", "vsock", "xds")
_WITH_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://(.*)", re.DOTALL)
_HOST_AND_PORT = re.compile(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?")


class EndpointAddress(NamedTuple):
    """The parts of an address. Parts are unchanged text, and a missing part is ""."""

    scheme: str
    """Scheme in lower case."""
    user_info: str
    host: str
    """Host and port; "" if gRPC resolves the address, which is then in `path`."""
    path: str
    query: str
    fragment: str


def parse_endpoint_address(address: str) -> EndpointAddress:
    """Split any text into the parts of an address, which need not have a scheme."""
    whole = address.strip()
    rest, _, fragment = whole.partition("#")
    rest, _, query = rest.partition("?")
    name, colon, after = rest.partition(":")
    scheme = name.lower() if colon else ""
    if scheme.startswith("unix") and scheme in _GRPC_SCHEMES:
        return EndpointAddress(scheme, "", "", after, query, fragment)
    # dns:password@host is no gRPC name, but has credentials for a user called dns.
    if scheme in _GRPC_SCHEMES and "@" not in rest.partition("/")[0]:
        before, _, last = after.rpartition("@")
        # In dns://authority/user:password@host, the credentials start after the last slash.
        slashes = before[: before.rfind("/") + 1]
        return EndpointAddress(scheme, before[len(slashes) :], "", slashes + last, query, fragment)
    found = _WITH_SCHEME.fullmatch(rest)
    scheme, rest = (found[1].lower(), found[2]) if found else ("", rest)
    authority, slash, path = rest.partition("/")
    if "@" not in authority and "@" in whole and not _HOST_AND_PORT.fullmatch(authority):
        # The password contains "/", "?" or "#", so its start was parsed as the port.
        before, _, last = whole[len(scheme) + len("://") if scheme else 0 :].rpartition("@")
        return parse_endpoint_address(f"{scheme}://{last}" if scheme else last)._replace(
            user_info=before
        )
    user_info, _, host = authority.rpartition("@")
    return EndpointAddress(scheme, user_info, host, slash + path, query, fragment)


def remove_credentials(address: str) -> str:
    """Return scheme, host, port and path of an address in one line, which may be printed."""
    found = parse_endpoint_address(address)
    # gRPC resolves an address such as unix:/path itself.
    separator = ":" if found.scheme in _GRPC_SCHEMES else "://"
    return printable(f"{found.scheme}{separator if found.scheme else ''}{found.host}{found.path}")
