"""Carry out captures on this node: forward requests to ranks, record stacks and write the files.

Requests are files in the run directory. On a shared disk, each node's sidecar handles its own
ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.run import captures, ownership
from torchlens_perf.run.captures import (
    LONGEST_S,
    LOOK_S,
    RAW_TRACE,
    REQUEST_LASTS_S,
    STACKS,
    TRACE,
    Outcome,
    Request,
)
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.place.node import host_of_node
from torchlens_perf.sidecar.host.stacks import read_all_stacks
from torchlens_perf.verdicts.causes.straggler_groups import choose_suspect_and_healthy
from torchlens_perf.verdicts.stragglers.findings import Findings
from torchlens_perf.verdicts.stragglers.placement import Placement

MAX_DUMPS = 8
# Record some stacks before the captured steps, because the steps may end before py-spy answers.
_DUMPS_BEFORE_CAPTURE = 3
_DUMP_INTERVAL_S = 0.5
_STEPS_AFTER_VERDICT = 3
_DUMP_TIMEOUT_S = 1.0
# Bytes of a trace to compress in one round. This takes about half a second.
_CHUNK_BYTES = 1 << 24
_FASTEST = 1
_DONE = object()
_MAX_NOTES = 4
# A rank must answer a request within this time, which includes starting, capturing and writing.
_ANSWER_TIMEOUT_S = 3 * LONGEST_S


@dataclasses.dataclass(frozen=True)
class LiveRank:
    """A running rank of this node."""

    ring: Path
    pid: int
    attempt: int
    step: int
    """The step in progress."""
    refuses: bool
    """True if the rank's settings switch captures off."""


@dataclasses.dataclass
class _PendingCapture:
    """A capture that was requested from a rank and is not finished."""

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
    """Handler of the captures of this node's ranks. Not thread-safe."""

    def __init__(self, run: RunDirectory) -> None:
        self.notes: list[str] = []
        """Notes on requests that cannot be read and outcomes that cannot be written."""
        self._run = run
        self._scanned_s = float("-inf")
        self._seen: set[tuple[str, int]] = set()  # ids of handled requests, each with its rank
        self._pending: list[_PendingCapture] = []
        self._after_verdict: set[int] = set()  # attempts in which a verdict has requested a capture

    def advance_captures(self, ranks: Mapping[int, LiveRank], now_s: float) -> None:
        """Start new captures and continue pending ones. Called in each round of the sidecar.

        now_s: a monotonic clock. Raises OSError if the run directory cannot be written.
        """
        if now_s - self._scanned_s >= LOOK_S:
            self._scanned_s = now_s
            requests, unreadable = captures.read_requests(self._run.captures)
            for why in unreadable:
                note = f"a capture request is invalid: {why}"
                if note not in self.notes and len(self.notes) < _MAX_NOTES:
                    self.notes.append(note)
            for request in requests:
                if time.time() - request.asked_unix_s < REQUEST_LASTS_S:
                    self._start_captures(request, ranks, now_s)
        for capture in list(self._pending):
            self._advance_capture(capture, ranks.get(capture.rank), now_s)

    def request_after_verdict(
        self, findings: Findings, places: Mapping[int, Placement], ranks: Mapping[int, LiveRank]
    ) -> None:
        """Request a capture of the slow rank and of a healthy rank, once per attempt of the job.

        ranks: this node's ranks. Raises OSError.
        """
        attempt = max((live.attempt for live in ranks.values()), default=-1)
        if not findings.groups or attempt in self._after_verdict or not findings.step_ns:
            return
        hosts = {host_of_node(state.stem) for state in self._run.nodes.glob("*.json")}
        reached = {rank for rank, place in places.items() if place.host in hosts}
        chosen = choose_suspect_and_healthy(findings, places, reached)
        if not chosen:
            return
        self._after_verdict.add(attempt)
        # A sidecar that ran before a restart may have requested this capture.
        earlier, _ = captures.read_requests(self._run.captures)
        if any(
            each.asked_by == captures.BY_VERDICT and each.attempt == attempt for each in earlier
        ):
            return
        step = max(live.step for live in ranks.values())
        captures.submit_request(
            self._run.captures,
            Request(
                id=captures.create_request_id(),
                asked_by=captures.BY_VERDICT,
                asked_unix_s=time.time(),
                attempt=attempt,
                ranks=chosen,
                from_step=captures.choose_first_step(step, findings.step_ns / 1e9, chosen),
                steps=_STEPS_AFTER_VERDICT,
            ),
        )

    def close(self) -> None:
        """Write the files of all pending captures, after all ranks have ended."""
        while self._pending:
            self.advance_captures({}, time.monotonic())

    def _start_captures(
        self, request: Request, ranks: Mapping[int, LiveRank], now_s: float
    ) -> None:
        for rank in request.ranks:
            live = ranks.get(rank)
            if live is None or live.attempt != request.attempt or (request.id, rank) in self._seen:
                continue
            self._seen.add((request.id, rank))
            folder = captures.rank_folder(self._run.captures, request.id, rank)
            if captures.outcome_path(folder).exists():
                continue
            capture = _PendingCapture(request, rank, live.ring, live.pid, folder, now_s)
            busy = any(other.rank == rank for other in self._pending)
            refusal = (
                captures.why_refused(self._run.captures, request)
                or "captures are switched off: capture='off'" * live.refuses
                or "another capture of this rank is in progress" * busy
            )
            if refusal:
                folder.mkdir(parents=True, exist_ok=True)
                for _ in self._write_files(capture, _build_failure(capture, refusal)):
                    pass
            else:
                logger.info("asking rank %d for capture %s", rank, request.id)
                self._record_stack(capture, live.step, now_s)
                # If the folder exists, an earlier sidecar has already forwarded the request.
                if not folder.exists():
                    captures.ring_outcome_path(live.ring).unlink(missing_ok=True)
                    of_rank = dataclasses.replace(request, folder=str(folder))
                    captures.write_capture_file(captures.ring_request_path(live.ring), of_rank)
                    folder.mkdir(parents=True, exist_ok=True)
                self._pending.append(capture)

    def _advance_capture(
        self, capture: _PendingCapture, live: LiveRank | None, now_s: float
    ) -> None:
        if capture.finishing is None:
            outcome = self._read_answer(capture) or self._give_up_if_late(capture, live, now_s)
            if outcome is not None:
                capture.finishing = self._write_files(capture, outcome)
            elif live is not None and self._is_stack_due(capture, live.step, now_s):
                self._record_stack(capture, live.step, now_s)
        if capture.finishing is not None and next(capture.finishing, _DONE) is _DONE:
            self._pending.remove(capture)

    def _read_answer(self, capture: _PendingCapture) -> Outcome | None:
        path = captures.ring_outcome_path(capture.ring)
        try:
            answer = captures.read_capture_file(path, Outcome)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return _build_failure(capture, f"the rank's answer cannot be read: {error}")
        # The answer may belong to an earlier request that was given up.
        if answer.id not in (capture.request.id, captures.UNREADABLE):
            path.unlink(missing_ok=True)
            return None
        return dataclasses.replace(answer, id=capture.request.id, rank=capture.rank)

    def _give_up_if_late(
        self, capture: _PendingCapture, live: LiveRank | None, now_s: float
    ) -> Outcome | None:
        """Return a failure if the process has ended or takes too long. Withdraw the request then."""
        request, waited_s = captures.ring_request_path(capture.ring), now_s - capture.since_s
        if live is None or live.pid != capture.pid:
            request.unlink(missing_ok=True)
            return _build_failure(capture, "the process ended")
        # If there is no request any more, the rank has begun the capture.
        with contextlib.suppress(FileNotFoundError):
            if waited_s > LONGEST_S:
                request.unlink()
                why = f"no step ended within {LONGEST_S:g} s: {STACKS} shows where the rank is"
                return _build_failure(capture, why)
        if waited_s <= _ANSWER_TIMEOUT_S:
            return None
        return _build_failure(
            capture,
            f"begun, but not answered within {_ANSWER_TIMEOUT_S:g} s: the rank is in step"
            f" {live.step}; {STACKS} shows where it was",
        )

    def _is_stack_due(self, capture: _PendingCapture, step: int, now_s: float) -> bool:
        if step >= capture.request.from_step:
            return len(capture.dumps) < MAX_DUMPS and step != capture.dumped_step
        return (
            len(capture.dumps) < _DUMPS_BEFORE_CAPTURE
            and now_s - capture.dumped_s >= _DUMP_INTERVAL_S
        )

    def _record_stack(self, capture: _PendingCapture, step: int, now_s: float) -> None:
        capture.dumped_step, capture.dumped_s = step, now_s
        capture.dumps.append(
            f"== in step {step}\n{read_all_stacks(capture.pid, _DUMP_TIMEOUT_S)}\n"
        )

    def _write_files(self, capture: _PendingCapture, outcome: Outcome) -> Iterator[None]:
        """Compress the trace, one chunk per iteration. Then write the stacks and the outcome."""
        files, left_out = dict(outcome.files), dict(outcome.left_out)
        raw, compressed = capture.folder / RAW_TRACE, capture.folder / TRACE
        if TRACE in files:
            del files[TRACE]
            partial = compressed.with_suffix(".partial")
            try:
                whole = False
                with (
                    open(raw, "rb") as read,
                    open(ownership.create_private_file(partial), "wb") as file,
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
                    left_out[TRACE] = (
                        "torch's profiler did not write it to its end: is the disk full?"
                    )
            except OSError as error:
                left_out[TRACE] = f"it could not be compressed: {error.strerror or error}"
            # Delete the uncompressed trace before writing other files, because the disk may be
            # full.
            partial.unlink(missing_ok=True)
        raw.unlink(missing_ok=True)
        if capture.dumps:
            try:
                ownership.write_private_file(capture.folder / STACKS, "\n".join(capture.dumps))
                files[STACKS] = (capture.folder / STACKS).stat().st_size
            except OSError as error:
                left_out[STACKS] = f"it could not be written: {error.strerror or error}"
        final = dataclasses.replace(outcome, files=files, left_out=left_out)
        try:
            captures.write_capture_file(captures.outcome_path(capture.folder), final)
        except OSError as error:
            self.notes.append(
                f"capture {outcome.id} of rank {outcome.rank}: its outcome could not be written:"
                f" {error}"
            )
        captures.ring_outcome_path(capture.ring).unlink(missing_ok=True)
        logger.info("capture %s of rank %d: %s", outcome.id, outcome.rank, outcome.ended or "done")


def _build_failure(capture: _PendingCapture, why: str) -> Outcome:
    return Outcome(capture.request.id, capture.rank, ended=why)
