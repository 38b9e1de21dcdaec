"""Captures, at the sidecar: hands requests on to this node's ranks, takes their stacks meanwhile, finishes their files.

A request lies in the run directory, so that on a shared disk each node's sidecar takes the ranks that it has.
"""

from __future__ import annotations

import dataclasses
import gzip
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.run import captures, ownership
from torchlens_perf.run.captures import LONGEST_S, RAW_TRACE, REQUEST_LASTS_S, STACKS, TRACE, Outcome, Request
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.place.node import host_of
from torchlens_perf.sidecar.host.stacks import python_stacks
from torchlens_perf.verdicts.causes.straggler_groups import suspect_and_healthy

if TYPE_CHECKING:
    from torchlens_perf.verdicts.stragglers.findings import Findings
    from torchlens_perf.verdicts.stragglers.placement import Placement

logger = logging.getLogger("torchlens_perf.sidecar")

LOOK_S = 5.0  # a folder that all nodes look at, on a disk that they may share
MAX_DUMPS = 8
_DUMPS_BEFORE = 3  # of them, before the captured steps, which may be over before py-spy answers
_BETWEEN_DUMPS_S = 0.5
_STEPS = 3  # after a verdict
_DUMP_TIMEOUT_S = 1.0
_CHUNK_BYTES = 1 << 24  # compressed in a round of the sidecar's: half a second
_FASTEST = 1
_DONE = object()
_MAX_NOTES = 4
_ANSWERED_WITHIN_S = 3 * LONGEST_S  # from being asked: to begin, to capture, to write


@dataclasses.dataclass(frozen=True)
class LiveRank:
    """A rank of this node that runs."""

    ring: Path
    pid: int
    attempt: int
    step: int
    """In progress."""
    refuses: bool
    """Whether its settings say that nobody may ask."""


@dataclasses.dataclass
class _Asked:
    """A rank that has been asked."""

    request: Request
    rank: int
    ring: Path
    pid: int
    folder: Path
    since_s: float
    dumps: list[str] = dataclasses.field(default_factory=list)
    dumped_step: int = -1
    dumped_s: float = 0.0
    finishing: Iterator[None] | None = None


class CaptureRelay:
    """Belongs to the sidecar's thread."""

    def __init__(self, run: RunDirectory) -> None:
        self.notes: list[str] = []
        """Of requests that cannot be read, and outcomes that cannot be written."""
        self._run = run
        self._looked_s = float("-inf")
        self._seen: set[tuple[str, int]] = set()  # requests and ranks that are asked, or need not be
        self._asked: list[_Asked] = []
        self._after_verdict: set[int] = set()  # attempts in which a verdict has been followed by a capture

    def update(self, ranks: Mapping[int, LiveRank], now_s: float) -> None:
        """Once in each round of the sidecar. now_s: a monotonic clock. Raises OSError if nothing can be written."""
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            requests, unreadable = captures.read_requests(self._run.captures)
            self._note(unreadable)
            for request in requests:
                if time.time() - request.asked_unix_s < REQUEST_LASTS_S:
                    self._take_up(request, ranks, now_s)
        for asked in list(self._asked):
            self._follow(asked, ranks.get(asked.rank), now_s)

    def ask_after_verdict(
        self, findings: Findings, places: Mapping[int, Placement], ranks: Mapping[int, LiveRank]
    ) -> None:
        """Asks for a capture of the rank that is named and of a healthy one: once in an attempt of the job.

        ranks: of this node. Raises OSError.
        """
        attempt = max((live.attempt for live in ranks.values()), default=-1)
        if not findings.groups or attempt in self._after_verdict or not findings.step_ns:
            return
        hosts = {host_of(state.stem) for state in self._run.nodes.glob("*.json")}
        reached = {rank for rank, place in places.items() if place.host in hosts}
        chosen = suspect_and_healthy(findings, places, reached)
        if not chosen:
            return
        self._after_verdict.add(attempt)
        earlier, _ = captures.read_requests(self._run.captures)  # also by an earlier sidecar
        if any(each.asked_by == captures.BY_VERDICT and each.attempt == attempt for each in earlier):
            return
        step = max(live.step for live in ranks.values())
        captures.ask(
            self._run.captures,
            Request(
                id=captures.new_id(),
                asked_by=captures.BY_VERDICT,
                asked_unix_s=time.time(),
                attempt=attempt,
                ranks=chosen,
                from_step=captures.first_step(step, findings.step_ns / 1e9),
                steps=_STEPS,
            ),
        )

    def _note(self, unreadable: list[str]) -> None:
        for why in unreadable:
            note = f"a request for a capture cannot be used: {why}"
            if note not in self.notes and len(self.notes) < _MAX_NOTES:
                self.notes.append(note)

    def close(self) -> None:
        """All ranks have ended: finishes what is left of their files."""
        while self._asked:
            self.update({}, time.monotonic())

    def _take_up(self, request: Request, ranks: Mapping[int, LiveRank], now_s: float) -> None:
        for rank in request.ranks:
            live = ranks.get(rank)
            if live is None or live.attempt != request.attempt or (request.id, rank) in self._seen:
                continue
            self._seen.add((request.id, rank))
            folder = captures.rank_folder(self._run.captures, request.id, rank)
            if captures.outcome_path(folder).exists():
                continue
            asked = _Asked(request, rank, live.ring, live.pid, folder, now_s)
            refusal = captures.refusal(self._run.captures, request)
            if refusal:
                self._finish_without(asked, refusal)
            elif live.refuses:
                self._finish_without(asked, "captures are switched off: capture='off'")
            elif any(other.rank == rank for other in self._asked):
                self._finish_without(asked, "another capture of this rank is in progress")
            else:
                logger.info("asking rank %d for capture %s", rank, request.id)
                self._dump(asked, live.step, now_s)
                if not folder.exists():  # else an earlier sidecar has asked
                    captures.answer_path(live.ring).unlink(missing_ok=True)
                    of_rank = dataclasses.replace(request, folder=str(folder))
                    captures.write(captures.ask_path(live.ring), of_rank)
                    folder.mkdir(parents=True, exist_ok=True)
                self._asked.append(asked)

    def _follow(self, asked: _Asked, live: LiveRank | None, now_s: float) -> None:
        runs = live is not None and live.pid == asked.pid
        if asked.finishing is None:
            answer = self._answer(asked)
            if answer is not None:
                asked.finishing = self._finish(asked, answer)
            elif not runs:
                captures.ask_path(asked.ring).unlink(missing_ok=True)
                asked.finishing = self._finish(asked, _nothing(asked, "the process ended"))
            elif now_s - asked.since_s > LONGEST_S and self._taken_back(asked):
                why = f"no step ended within {LONGEST_S:g} s: {STACKS} says where the rank is"
                asked.finishing = self._finish(asked, _nothing(asked, why))
            elif live is not None and now_s - asked.since_s > _ANSWERED_WITHIN_S:
                why = f"begun, but not answered within {_ANSWERED_WITHIN_S:g} s: the rank is in step {live.step}"
                asked.finishing = self._finish(asked, _nothing(asked, f"{why}; {STACKS} says where it was"))
            elif live is not None and self._dump_is_due(asked, live.step, now_s):
                self._dump(asked, live.step, now_s)
        if asked.finishing is not None and next(asked.finishing, _DONE) is _DONE:
            self._asked.remove(asked)

    def _answer(self, asked: _Asked) -> Outcome | None:
        path = captures.answer_path(asked.ring)
        try:
            answer = captures.read(path, Outcome)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return _nothing(asked, f"the rank's answer cannot be read: {error}")
        if answer.id not in (asked.request.id, captures.UNREADABLE):  # to one that was given up meanwhile
            path.unlink(missing_ok=True)
            return None
        return dataclasses.replace(answer, id=asked.request.id, rank=asked.rank)

    def _taken_back(self, asked: _Asked) -> bool:
        """Whether the rank has not taken the request, and now will not."""
        try:
            captures.ask_path(asked.ring).unlink()
        except FileNotFoundError:
            return False
        return True

    def _dump_is_due(self, asked: _Asked, step: int, now_s: float) -> bool:
        if step >= asked.request.from_step:
            return len(asked.dumps) < MAX_DUMPS and step != asked.dumped_step
        return len(asked.dumps) < _DUMPS_BEFORE and now_s - asked.dumped_s >= _BETWEEN_DUMPS_S

    def _dump(self, asked: _Asked, step: int, now_s: float) -> None:
        asked.dumped_step, asked.dumped_s = step, now_s
        asked.dumps.append(f"== in step {step}\n{python_stacks(asked.pid, _DUMP_TIMEOUT_S)}\n")

    def _finish_without(self, asked: _Asked, why: str) -> None:
        asked.folder.mkdir(parents=True, exist_ok=True)
        for _ in self._finish(asked, _nothing(asked, why)):
            pass

    def _finish(self, asked: _Asked, outcome: Outcome) -> Iterator[None]:
        """Writes what is the sidecar's, a little in each round; the outcome last."""
        files, left_out = dict(outcome.files), dict(outcome.left_out)
        raw, compressed = asked.folder / RAW_TRACE, asked.folder / TRACE
        if TRACE in files:
            del files[TRACE]
            partial = compressed.with_suffix(".partial")
            try:
                whole = False
                with (
                    open(raw, "rb") as read,
                    open(ownership.create(partial), "wb") as file,
                    gzip.open(file, "wb", _FASTEST) as written,
                ):
                    while chunk := read.read(_CHUNK_BYTES):
                        written.write(chunk)
                        whole = chunk.rstrip().endswith(b"}")
                        yield
                if whole:
                    os.replace(partial, compressed)
                    files[TRACE] = compressed.stat().st_size
                else:
                    left_out[TRACE] = "torch's profiler did not write it to its end: is the disk full?"
            except OSError as error:
                left_out[TRACE] = f"it could not be compressed: {error.strerror or error}"
            partial.unlink(missing_ok=True)  # before anything else is written: the disk may be full
        raw.unlink(missing_ok=True)
        if asked.dumps:
            try:
                ownership.write(asked.folder / STACKS, "\n".join(asked.dumps))
                files[STACKS] = (asked.folder / STACKS).stat().st_size
            except OSError as error:
                left_out[STACKS] = f"it could not be written: {error.strerror or error}"
        final = dataclasses.replace(outcome, files=files, left_out=left_out)
        try:
            captures.write(captures.outcome_path(asked.folder), final)
        except OSError as error:
            self.notes.append(f"capture {outcome.id} of rank {outcome.rank}: its outcome could not be written: {error}")
        captures.answer_path(asked.ring).unlink(missing_ok=True)
        logger.info("capture %s of rank %d: %s", outcome.id, outcome.rank, outcome.ended or "done")


def _nothing(asked: _Asked, why: str) -> Outcome:
    return Outcome(asked.request.id, asked.rank, ended=why)
