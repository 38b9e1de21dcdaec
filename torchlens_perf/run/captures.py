"""Read and write the files of a capture: the request and its outcome on each rank.

Ranks and sidecars both import this module.

::

    RUN/captures/ID.request.json        the request; from the command line or node 0's sidecar
    RUN/captures/ID/rank00005/          trace.json.gz, flight_recorder.json, ...
    RUN/captures/ID/rank00005/capture.json   the outcome, written after the other files
    RING.capture                        next to the ring file: request for its rank, until it starts
    RING.captured                       next to the ring file: outcome, until the sidecar reads it
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from torchlens_perf.interruption import ours
from torchlens_perf.run import ownership

MAX_STEPS = 20
MAX_RANKS = 8
"""Largest number of ranks in a request that is not forced. Each rank may write more than a gigabyte
to the shared disk.
"""
MAX_KEPT_BYTES = 4 << 30
"""Size of a run's captures above which a request that is not forced is refused.

An accepted request can add the files of MAX_RANKS ranks. The captures of a run therefore take at
most 14 GiB before compression.
"""
LONGEST_S = 60.0
"""Time limit of a capture. A capture that exceeds this limit ends with the current step. A capture
is cancelled if the step before it does not end within this limit.
"""
REQUEST_LASTS_S = 120.0
"""Age at which a request expires."""
MAX_TRACE_BYTES = 1 << 30
"""Largest uncompressed trace, which Perfetto can still open. It is about 60 MB when compressed."""
MAX_SNAPSHOT_BYTES = 1 << 28
TRACE = "trace.json.gz"
SNAPSHOT = "memory.pickle"
FLIGHT_RECORDER = "flight_recorder.json"
STACKS = "stacks.txt"
UNREADABLE = "unreadable"
"""Id in the outcome of a rank that could not read its request."""
# The rank writes this file. The sidecar compresses it to TRACE.
RAW_TRACE = "trace.json"
BY_USER, BY_VERDICT = "user", "verdict"

_REQUEST = ".request.json"
_MAX_BYTES = 1 << 20
# Sidecars scan the folder of requests rarely, because all nodes may share its disk.
LOOK_S = 5.0
# Their rounds are at most 4 s apart. Ranks look for requests at the end of each step.
_NOTICE_S = LOOK_S + 5.0

# Ids are also folder names.
_FORM_OF_IDS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_T = TypeVar("_T", bound="Request | Outcome")


@dataclasses.dataclass(frozen=True)
class Request:
    """The ranks and steps to capture."""

    id: str
    asked_by: str
    """BY_USER or BY_VERDICT."""
    asked_unix_s: float
    attempt: int
    """Attempt of the job. Processes of other attempts ignore the request."""
    ranks: tuple[int, ...]
    from_step: int
    """First step to capture on all ranks. A rank that receives the request after this step starts
    with its next step.
    """
    steps: int
    python: bool = False
    """Whether the trace contains Python frames and modules."""
    forced: bool = False
    """Whether the request may exceed MAX_RANKS and MAX_KEPT_BYTES."""
    folder: str = ""
    """Folder to which the rank writes its files. The sidecar fills in this field."""

    def __post_init__(self) -> None:
        if not (
            is_request_id(self.id)
            and _are_counts(self.attempt + 1, self.from_step, *self.ranks)
            and 1 <= self.steps <= MAX_STEPS
        ):
            raise ValueError("its id, attempt, steps or ranks are out of range")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a request on one rank."""

    id: str
    rank: int
    first_step: int | None = None
    steps: int = 0
    """Number of complete steps in the trace."""
    ended: str = ""
    """Reason why the capture ended early; "" if all requested steps were captured."""
    files: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """File sizes in bytes, by file name."""
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Reason why each missing or incomplete file is so, by file name."""
    paused_s: float = 0.0
    """Seconds for which the capture stopped training, without the slowdown of the captured steps.
    """
    torch: str = ""

    def __post_init__(self) -> None:
        if not (
            is_request_id(self.id)
            and _are_counts(self.rank, self.first_step or 0, self.steps, *self.files.values())
            and {TRACE, SNAPSHOT, FLIGHT_RECORDER, STACKS} >= self.files.keys()
        ):
            raise ValueError("its id, rank, steps or files are out of range")


def ring_request_path(ring: Path) -> Path:
    """Return the path of the request file next to a rank's ring file."""
    return ring.with_suffix(".capture")


def ring_outcome_path(ring: Path) -> Path:
    """Return the path of the outcome file next to a rank's ring file."""
    return ring.with_suffix(".captured")


def request_path(captures: Path, request_id: str) -> Path:
    return captures / f"{request_id}{_REQUEST}"


def rank_folder(captures: Path, request_id: str, rank: int) -> Path:
    return captures / request_id / f"rank{rank:05d}"


def outcome_path(folder: Path) -> Path:
    return folder / "capture.json"


def write_capture_file(path: Path, value: Request | Outcome) -> None:
    """Write a request or an outcome to a file atomically. Raise OSError."""
    text = json.dumps(dataclasses.asdict(value), indent=1, ensure_ascii=False)
    # JSON has no lone surrogates, which an exception's text may have.
    ownership.replace_private_file(path, text.encode(errors="replace"))


def read_capture_file(path: Path, kind: type[_T]) -> _T:
    """Read a request or an outcome. Raise OSError, or ValueError if the content is invalid.

    The content is validated because another user may have written the file.
    """
    # The training process imports msgspec only for a capture.
    import msgspec

    content = ownership.read_regular_file(path, _MAX_BYTES)
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None


def is_request_id(text: str) -> bool:
    """Return True if the text is a valid request id."""
    return _FORM_OF_IDS.fullmatch(text) is not None


def _are_counts(*values: int) -> bool:
    return all(0 <= value <= 1 << 62 for value in values)


def submit_request(captures: Path, request: Request) -> None:
    """Write a request to the folder that the sidecars watch. Raise OSError."""
    captures.mkdir(exist_ok=True)
    write_capture_file(request_path(captures, request.id), request)


def create_request_id() -> str:
    """Return a new id such as 20261121-013205-3fa9.

    Ids sort by time. A random suffix distinguishes requests of the same second.
    """
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def choose_first_step(step: int, step_s: float, ranks: Sequence[int]) -> int:
    """Return the first step to capture: for several ranks, one by which all will have received the
    request.

    step: the current step. step_s: duration of a step.
    """
    return step + 1 + math.ceil((len(ranks) > 1) * _NOTICE_S / max(step_s, 1e-6))


def read_requests(captures: Path) -> tuple[list[Request], list[str]]:
    """Return a run's requests, oldest first, and a message for each invalid file.

    A file of another user is invalid.
    """
    found: list[Request] = []
    unreadable: list[str] = []
    for path in sorted(captures.glob(f"*{_REQUEST}")):
        try:
            if not ownership.is_trusted_request(path, captures.parent):
                raise ValueError("another user has put it there")
            request = read_capture_file(path, Request)
            if path.name != request_path(captures, request.id).name:
                raise ValueError(f"its id {request.id!r} differs from the file's name")
            found.append(request)
        except FileNotFoundError:
            continue
        except ours(OSError) as error:
            unreadable.append(f"{path.name}: {error.strerror or error}")
        except ours(ValueError) as error:
            unreadable.append(f"{path.name}: {error}")
    return sorted(found, key=lambda each: each.asked_unix_s), unreadable


def read_outcome(captures: Path, request: Request, rank: int) -> Outcome | None:
    """Return a rank's outcome of the request; None while the outcome is missing."""
    try:
        return read_capture_file(outcome_path(rank_folder(captures, request.id, rank)), Outcome)
    except ours(OSError, ValueError):
        return None


def why_refused(captures: Path, request: Request) -> str:
    """Return the reason why sidecars refuse a request; "" if they accept it. Raise OSError."""
    if request.forced:
        return ""
    if len(request.ranks) > MAX_RANKS:
        return (
            f"{len(request.ranks)} ranks are more than {MAX_RANKS}, each may write a gigabyte:"
            " --force asks all"
        )
    kept_bytes = 0
    for folder, _, names in os.walk(captures):
        # Files that other ranks have written for this request do not count.
        for name in names if Path(folder).parent.name != request.id else ():
            with contextlib.suppress(FileNotFoundError):
                kept_bytes += os.lstat(os.path.join(folder, name)).st_size
    if kept_bytes > MAX_KEPT_BYTES:
        return (
            f"there are {kept_bytes >> 20} MiB of captures, {MAX_KEPT_BYTES >> 20} may be: remove"
            " some, or --force"
        )
    return ""


def is_awaiting_outcomes(captures: Path, request: Request, unix_s: float) -> bool:
    """Return True if a rank may still write its outcome of the request."""
    young = abs(unix_s - request.asked_unix_s) < REQUEST_LASTS_S + LONGEST_S
    return young and any(read_outcome(captures, request, rank) is None for rank in request.ranks)
