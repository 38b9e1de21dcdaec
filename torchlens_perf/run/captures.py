"""Captures: what is asked of ranks, what came of it, and where both lie. Known to the ranks and to their sidecars.

::

    RUN/captures/ID.request.json        who asks whom; by the command line, or by the sidecar that judges
    RUN/captures/ID/rank00005/          trace.json.gz, flight_recorder.json, memory.pickle, stacks.txt
    RUN/captures/ID/rank00005/capture.json   what was captured and what not, and why; written last
    RING.capture                        beside the ring file: what the sidecar asks of the rank, until it begins
    RING.captured                       there too: the rank's answer, until the sidecar has taken it
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
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from torchlens_perf.run import ownership

MAX_STEPS = 20
MAX_RANKS = 8
"""In one request; more are asked only if it says so: each rank may write a gigabyte and more to one disk."""
MAX_KEPT_BYTES = 4 << 30
"""Of a run's captures; with more, a request is refused unless it says so. With what MAX_RANKS may write on top of it,
before that is compressed, a run's captures take 14 GiB at most."""
LONGEST_S = 60.0
"""After it the capture of a rank ends with the step in progress; before it a step must have ended to begin one."""
REQUEST_LASTS_S = 120.0
"""After it nobody takes up a request any more."""
MAX_TRACE_BYTES = 1 << 30
"""Uncompressed. Perfetto opens that, and compressed it is some 60 MB."""
MAX_SNAPSHOT_BYTES = 1 << 28
TRACE, SNAPSHOT, FLIGHT_RECORDER, STACKS = "trace.json.gz", "memory.pickle", "flight_recorder.json", "stacks.txt"
UNREADABLE = "unreadable"
"""The id in a rank's answer to a request that it could not read."""
RAW_TRACE = "trace.json"  # as the rank writes it; the sidecar compresses it
BY_USER, BY_VERDICT = "user", "verdict"

_REQUEST = ".request.json"
_MAX_BYTES = 1 << 20
_NOTICE_S = 2.0  # sidecars look once a second, ranks at a step's end

_FORM_OF_IDS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # they are names of folders

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
    """The same on all ranks; a rank that receives the request too late begins with its next step."""
    steps: int
    python: bool = False
    """Python frames and modules in the trace too."""
    forced: bool = False
    """Whether it may ask more than MAX_RANKS, and where there are MAX_KEPT_BYTES already."""
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
    return captures / f"{request_id}{_REQUEST}"


def rank_folder(captures: Path, request_id: str, rank: int) -> Path:
    return captures / request_id / f"rank{rank:05d}"


def outcome_path(folder: Path) -> Path:
    return folder / "capture.json"


def write(path: Path, value: Request | Outcome) -> None:
    """Writes it whole at once: whoever sees the file can read it. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        ownership.write(partial, json.dumps(dataclasses.asdict(value), indent=1))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path, kind: type[_T]) -> _T:
    """Raises OSError, or ValueError for what is not such a file: anybody may have put it there."""
    try:
        value = json.loads(ownership.read_bytes(path, _MAX_BYTES))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    if isinstance(value.get("ranks"), list):
        value["ranks"] = tuple(value["ranks"])
    try:
        made = kind(**value)
    except TypeError as error:
        raise ValueError(str(error)) from None
    _check(made)
    return made


def is_id(text: str) -> bool:
    """Whether it is in the form of a request's id, which is a folder's name."""
    return _FORM_OF_IDS.fullmatch(text) is not None


def _check(value: Request | Outcome) -> None:
    if not isinstance(value.id, str) or not is_id(value.id):
        raise ValueError(f"id: {value.id!r} is not in the form of one")
    wrong = [field for field, right in _right(value).items() if not right]
    if wrong:
        raise ValueError(", ".join(f"{field}: {getattr(value, field)!r} cannot be" for field in wrong))


def _right(value: Request | Outcome) -> dict[str, bool]:
    """By field, whether it can be that."""
    if isinstance(value, Request):
        return {
            "asked_by": isinstance(value.asked_by, str),
            "asked_unix_s": _is_number(value.asked_unix_s),
            "attempt": _is_count(value.attempt, least=-1),
            "ranks": isinstance(value.ranks, tuple) and all(map(_is_count, value.ranks)),
            "from_step": _is_count(value.from_step),
            "steps": _is_count(value.steps, least=1, most=MAX_STEPS),
            "python": isinstance(value.python, bool),
            "forced": isinstance(value.forced, bool),
            "folder": isinstance(value.folder, str),
        }
    texts = isinstance(value.left_out, dict) and all(isinstance(each, str) for each in value.left_out.values())
    names = {TRACE, SNAPSHOT, FLIGHT_RECORDER, STACKS}
    return {
        "rank": _is_count(value.rank),
        "first_step": value.first_step is None or _is_count(value.first_step),
        "steps": _is_count(value.steps),
        "ended": isinstance(value.ended, str),
        "files": isinstance(value.files, dict)
        and names >= set(value.files)
        and all(map(_is_count, value.files.values())),
        "left_out": texts,
        "paused_s": _is_number(value.paused_s),
        "torch": isinstance(value.torch, str),
    }


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object, least: int = 0, most: int = 1 << 62) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def ask(captures: Path, request: Request) -> None:
    """Puts a request where the sidecars look. Raises OSError."""
    captures.mkdir(exist_ok=True)
    write(request_path(captures, request.id), request)


def new_id() -> str:
    """As 20261121-013205-3fa9: sorts by time, and two people may ask in the same second."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def first_step(step: int, step_s: float) -> int:
    """A step that leaves all ranks time to receive the request. step: in progress now; step_s: how long one takes."""
    return step + 1 + math.ceil(_NOTICE_S / max(step_s, 1e-6))


def read_requests(captures: Path) -> tuple[list[Request], list[str]]:
    """All of a run, oldest first; and which cannot be used, and why: somebody else may have put them there."""
    found: list[Request] = []
    unreadable: list[str] = []
    for path in sorted(captures.glob(f"*{_REQUEST}")):
        try:
            if not ownership.may_ask(path, captures.parent):
                raise ValueError("another user has put it there")
            request = read(path, Request)
            if path.name != request_path(captures, request.id).name:
                raise ValueError(f"id: {request.id!r} is not the file's")
            found.append(request)
        except FileNotFoundError:
            continue
        except OSError as error:
            unreadable.append(f"{path.name}: {error.strerror or error}")
        except ValueError as error:
            unreadable.append(f"{path.name}: {error}")
    return sorted(found, key=lambda each: each.asked_unix_s), unreadable


def outcome(captures: Path, request: Request, rank: int) -> Outcome | None:
    """What came of it there; None while that is open."""
    try:
        return read(outcome_path(rank_folder(captures, request.id, rank)), Outcome)
    except (OSError, ValueError):
        return None


def refusal(captures: Path, request: Request) -> str:
    """Why nobody takes it up, unless it is forced; "" if all do. Raises OSError."""
    if request.forced:
        return ""
    if len(request.ranks) > MAX_RANKS:
        return f"{len(request.ranks)} ranks are more than {MAX_RANKS}, each may write a gigabyte: --force asks all"
    kept_bytes = 0
    for folder, _, names in os.walk(captures):
        for name in names if Path(folder).parent.name != request.id else ():  # not what its other ranks have written
            with contextlib.suppress(FileNotFoundError):
                kept_bytes += os.lstat(os.path.join(folder, name)).st_size
    if kept_bytes > MAX_KEPT_BYTES:
        return f"there are {kept_bytes >> 20} MiB of captures, {MAX_KEPT_BYTES >> 20} may be: remove some, or --force"
    return ""


def is_open(captures: Path, request: Request, unix_s: float) -> bool:
    """Whether it is still being worked on."""
    young = abs(unix_s - request.asked_unix_s) < REQUEST_LASTS_S + LONGEST_S
    return young and any(outcome(captures, request, rank) is None for rank in request.ranks)
