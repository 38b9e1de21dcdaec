"""What a node is called in the names of files: its host's name, and whose process ids are meant.

Two pods on the host's network have one host name, containers may share a host's memory, and a host that was started
anew has other processes by the same ids. So a name ends in a digest of the boot and of the PID namespace; processes
are judged by their ids within one of them only.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_MAX_HOST = 64
_DIGITS = 6
_DIGEST = re.compile(rf"-[0-9a-f]{{{_DIGITS}}}$")


def pid_namespace() -> int:
    """The inode of this process's PID namespace; 0 where the kernel does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


_acts_for = ""  # see act_for()


def act_for(digest: str) -> None:
    """This process works on what processes of another boot or namespace have left, by their digest."""
    global _acts_for
    _acts_for = digest


def namespace_digest() -> str:
    """Of this boot of this host, and this PID namespace of it."""
    if _acts_for:
        return _acts_for
    try:
        with open(_BOOT_ID) as file:
            boot = file.read().strip()
    except OSError:  # some sandboxes have none
        boot = ""
    text = f"{boot}/{pid_namespace()}"
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def node_name(host: str | None = None) -> str:
    """This node's, in file names. host: its name; by default the kernel's."""
    name = socket.gethostname() if host is None else host
    return f"{name[:_MAX_HOST].replace('/', '_')}-{namespace_digest()}"


def host_of(node: str) -> str:
    """The host's name in that of a node: what people know it by."""
    return _DIGEST.sub("", node)
