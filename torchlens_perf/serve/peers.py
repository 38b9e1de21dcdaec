"""Find the user at the other end of a TCP connection within this machine.

The kernel looks up one socket, in constant time (`man 7 sock_diag`). /proc/net/tcp would list all
sockets of the machine for each connection.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from typing import Any

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST = 4, 20, 1
_NO_COOKIE = 0xFFFFFFFF
_ANY_STATE = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")
"""struct nlmsghdr: length, type, flags, sequence number, port."""
_ADDRESSES = struct.Struct("!HH16s16s")
"""The start of struct inet_diag_sockid: ports and addresses of the looked up socket and its peer."""
_ADDRESSES_AT, _USER_AT = _HEADER.size + 4, _HEADER.size + 64
"""Offsets in the answer of the addresses, and of the uid and the inode."""


def find_peer_uid(connection: Any) -> int | None:
    """Return the uid of the process that has opened a connection to this process.

    connection: a socket, or what asyncio has for it. Return None if the process is on another
    machine or in another network namespace, has closed its end, or if the kernel does not answer.
    """
    with contextlib.suppress(OSError, struct.error):
        return find_uid(connection.getpeername(), connection.getsockname())
    return None


def find_uid(end: tuple[Any, ...], other_end: tuple[Any, ...]) -> int | None:
    """Return the uid of one end of a connection if it is on this machine. Raise OSError."""
    (address, port), (other, other_port) = _unmap(end), _unmap(other_end)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    addresses = _ADDRESSES.pack(port, other_port, address.packed, other.packed)
    body = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, _ANY_STATE) + addresses
    body += struct.pack("=III", 0, _NO_COOKIE, _NO_COOKIE)
    head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(head + body)
        answer = kernel.recv(8192, socket.MSG_DONTWAIT)
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    uid, inode = struct.unpack_from("=II", answer, _USER_AT)
    # Without a connected socket the kernel returns a listening one. A closed socket has no inode,
    # and its uid is 0.
    is_end = _ADDRESSES.unpack_from(answer, _ADDRESSES_AT)[:2] == (port, other_port)
    return uid if is_end and inode else None


def _unmap(end: tuple[Any, ...]) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Return address and port. A socket for both families shows IPv4 addresses as IPv6."""
    address = ipaddress.ip_address(end[0].partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address, end[1]
