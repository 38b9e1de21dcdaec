"""Name a node in file names by its host name, its boot and its PID namespace.

The host name alone is not unique. Two pods on the host's network have the same host name, and
containers may share memory. After a reboot, other processes get the same ids. The name therefore
ends in a digest of the boot and the PID namespace. Process ids are only compared if the digests are
equal.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket

from torchlens_perf.interruption import ours
from torchlens_perf.run.processes import read_kernel_text

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_MAX_HOST = 64
_DIGITS = 6
_DIGEST = re.compile(rf"-[0-9a-f]{{{_DIGITS}}}$")


def pid_namespace_inode() -> int:
    """Return the inode of this process's PID namespace; 0 if the kernel does not provide it."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except ours(OSError):
        return 0


_overriding_digest = ""  # see override_namespace_digest()


def override_namespace_digest(digest: str) -> None:
    """Make namespace_digest() return the digest of another boot or namespace.

    The drain program does so to process the files of that boot or namespace.
    """
    global _overriding_digest
    _overriding_digest = digest


def namespace_digest() -> str:
    """Return a digest of the host's current boot and of this PID namespace."""
    if _overriding_digest:
        return _overriding_digest
    # Some sandboxes do not have this file.
    boot = read_kernel_text(_BOOT_ID)
    return hashlib.sha256(f"{boot}/{pid_namespace_inode()}".encode()).hexdigest()[:_DIGITS]


def node_name(host: str | None = None) -> str:
    """Return the name that this node has in file names. host: by default the host's name."""
    name = socket.gethostname() if host is None else host
    return f"{name[:_MAX_HOST].replace('/', '_')}-{namespace_digest()}"


def host_of_node(node: str) -> str:
    """Return the host name of a node for display. node: name of the node in file names."""
    return _DIGEST.sub("", node)
