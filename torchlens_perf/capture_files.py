"""Captures: what is asked of ranks, what came of it, and where both lie. Known to the ranks and to their sidecars.

::

    RUN/captures/ID.request.json        who asks whom; by the command line, or by the sidecar that judges
    RUN/captures/ID/rank00005/          trace.json.gz, flight_recorder.json, memory.pickle, stacks.txt
    RUN/captures/ID/rank00005/capture.json   what was captured and what not, and why; written last
    RING.capture                        beside the ring file: what the sidecar asks of the rank, until it begins
    RING.captured                       there too: the rank's answer, until the sidecar has taken it
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

MOST_STEPS = 20
LONGEST_S = 60.0
"""After it the capture of a rank ends with the step in progress; before it a step must have ended to begin one."""
REQUEST_LASTS_S = 120.0
"""After it nobody takes up a request any more."""
MOST_TRACE_BYTES = 1 << 30
"""Uncompressed. Perfetto opens that, and compressed it is some 60 MB."""
MOST_SNAPSHOT_BYTES = 1 << 28
TRACE, SNAPSHOT, FLIGHT_RECORDER, STACKS = "trace.json.gz", "memory.pickle", "flight_recorder.json", "stacks.txt"
RAW_TRACE = "trace.json"  # as the rank writes it; the sidecar compresses it
BY_USER, BY_VERDICT = "user", "verdict"

_NOTICE_S = 2.0  # sidecars look once a second, ranks at a step's end

_T = TypeVar("_T", bound="Request | Outcome")


@dataclasses.dataclass(frozen=True)
class Request:
    """Who is to be captured, and for how long."""

    id: str
    asked_by: str
    """BY_USER or BY_VERDICT."""
    asked_unix_s: float
    attempt: int
    """Of the job; other processes are not asked."""
    ranks: tuple[int, ...]
    from_step: int
    """The same on all ranks; one that is told too late begins with its next step."""
    steps: int
    python: bool = False
    """Python frames and modules in the trace too."""
    folder: str = ""
    """Where the rank that is asked writes; the sidecar fills it in."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a request on one rank."""

    id: str
    rank: int
    first_step: int | None = None
    steps: int = 0
    """That are whole in the trace."""
    ended: str = ""
    """Why nothing was captured, or less than was asked; "" where all was."""
    files: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes by name."""
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why a file, or a part of one, is not there."""
    paused_s: float = 0.0
    """How long training stood still for it, besides what the captured steps took longer."""
    torch: str = ""


def ask_path(ring: Path) -> Path:
    """Where a rank finds what it is asked."""
    return ring.with_suffix(".capture")


def answer_path(ring: Path) -> Path:
    """Where it answers."""
    return ring.with_suffix(".captured")


def request_path(captures: Path, request_id: str) -> Path:
    return captures / f"{request_id}.request.json"


def rank_folder(captures: Path, request_id: str, rank: int) -> Path:
    return captures / request_id / f"rank{rank:05d}"


def outcome_path(folder: Path) -> Path:
    return folder / "capture.json"


def write(path: Path, value: Request | Outcome) -> None:
    """Writes it whole at once: whoever sees the file can read it. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(dataclasses.asdict(value), indent=1))
    os.replace(partial, path)


def read(path: Path, kind: type[_T]) -> _T:
    """Raises OSError, or ValueError for what is not such a file."""
    try:
        value: dict[str, Any] = json.loads(path.read_text())
        if "ranks" in value:
            value["ranks"] = tuple(value["ranks"])
        return kind(**value)
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None


def ask(captures: Path, request: Request) -> None:
    """Puts a request where the sidecars look. Raises OSError."""
    captures.mkdir(exist_ok=True)
    write(request_path(captures, request.id), request)


def new_id() -> str:
    """As 20261121-013205-3fa9: sorts by time, and two people may ask in the same second."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def first_step(step: int, step_s: float) -> int:
    """A step that all ranks will be told of in time. step: in progress now; step_s: what one takes."""
    return step + 1 + math.ceil(_NOTICE_S / max(step_s, 1e-6))


def requests(captures: Path) -> list[Request]:
    """All of a run, oldest first; without those that cannot be read."""
    found = []
    for path in captures.glob("*.request.json"):
        try:
            found.append(read(path, Request))
        except (OSError, ValueError):
            continue
    return sorted(found, key=lambda request: request.asked_unix_s)


def outcome(captures: Path, request: Request, rank: int) -> Outcome | None:
    """What came of it there; None while that is open."""
    try:
        return read(outcome_path(rank_folder(captures, request.id, rank)), Outcome)
    except (OSError, ValueError):
        return None


def is_open(captures: Path, request: Request, unix_s: float) -> bool:
    """Whether it is still being worked on."""
    young = unix_s - request.asked_unix_s < REQUEST_LASTS_S + LONGEST_S
    return young and any(outcome(captures, request, rank) is None for rank in request.ranks)
