"""Run names: validation and addresses.

Names are untrusted: they come from disks and from viewers.
"""

from __future__ import annotations

import os
from urllib.parse import quote, unquote_to_bytes

from torchlens_perf.errors import TorchlensPerfError


class ReadError(TorchlensPerfError):
    """A request has no result. The error has an HTTP status and a text for the viewer."""

    def __init__(self, status: int, text: str) -> None:
        # Unpickling calls the class with these arguments.
        super().__init__(status, text)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[1])


def quote_name(name: str) -> str:
    """Quote a name for use in an address. File names may contain any bytes."""
    return quote(os.fsencode(name), safe="")


def parse_run_name(raw_path: bytes) -> str:
    """Return NAME of the raw request path /runs/NAME/...; "" if no folder can have this name."""
    parts = raw_path.split(b"/")
    return unquote_name(parts[2]) if len(parts) > 2 else ""


def unquote_name(quoted: str | bytes) -> str:
    """Return the name that quote_name() has quoted; "" if no folder can have it."""
    name = os.fsdecode(unquote_to_bytes(quoted))
    return "" if name in (".", "..") or "/" in name or "\0" in name or len(name) > 255 else name
