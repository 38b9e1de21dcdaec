"""The failure of a training process, as the process itself saw it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TypedDict


class Failure(TypedDict):
    """The exception that ended a watch, or its program."""

    type: str
    """Name of the exception's class, such as "torch.OutOfMemoryError"."""
    message: str
    """One line; at most MAX_MESSAGE characters."""
    where: str
    """The innermost line of the program's own code, such as "train.py:42 in loss_fn"; "" without
    one."""
    step: int
    """The step in progress."""
    phase: str
    """"data", "forward", "backward" or "optimizer"; "" outside of these phases."""
    module: str
    """Qualified name of the innermost module whose forward() was running; "" without one."""
    exit_code: int | None
    """The exit code, if the program ended with sys.exit()."""
    lost_peer: bool
    """True if the exception says that another rank or its connection is gone."""
    after_watch: bool
    """True if the watch had ended before the exception."""
    unix_ns: int


@dataclasses.dataclass(frozen=True)
class ProcessActivity:
    """A snapshot of what a running process was doing, taken by the sidecar."""

    step: int
    """The step in progress."""
    step_s: float
    """Time since that step began."""
    inside: tuple[str, ...]
    """The open spans of its training thread, outermost first, without the step."""
    inside_s: float | None
    """Time since the innermost of these spans began; None without spans."""


class ProcessEnd(TypedDict):
    """The end of a process, as the kernel shows it."""

    signal: int | None
    """The signal that ended the process; None without one, or if not known."""
    exit_code: int | None
    """None if a signal ended the process, if it still ran, or if not known."""
    oom_kills: int
    """Number of processes of its control group that the kernel's OOM killer ended shortly before."""
    memory_limit_bytes: int | None
    """The tightest memory limit of its control group; None without one, or if not known."""


MAX_MESSAGE = 300
_LOST_PEER_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_LOST_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "gloo/transport",
    "Broken pipe",
)


def is_about_lost_peer(types: Iterable[str], message: str) -> bool:
    """Return True if an exception says that another rank or its connection is gone.

    types: names of the exception's class and its base classes.
    """
    names = set(types)
    if names & _LOST_PEER_TYPES:
        return True
    return bool({"RuntimeError", "OSError"} & names) and any(
        text in message for text in _LOST_PEER_TEXTS
    )
