"""Captures: requests to the ranks of a live run, results, and files. Runs in reader processes."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import re
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchlens_perf.analysis.statistics.quantities import format_duration
from torchlens_perf.errors import ConfigError, RunStoreError
from torchlens_perf.report.captures import capture_rows
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run import captures as capture_files
from torchlens_perf.run import ownership
from torchlens_perf.run.captures import (
    BY_USER,
    FLIGHT_RECORDER,
    MAX_STEPS,
    SNAPSHOT,
    STACKS,
    TRACE,
    Request,
)
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.rank_ranges import format_ranges, parse_ranges
from torchlens_perf.serve.run_names import quote_name
from torchlens_perf.store.run_folders import NotFoundError, open_run
from torchlens_perf.verdicts.words.report import Capture
from torchlens_perf.verdicts.words.run_state import SILENT_S, format_age

BLOCK_BYTES = 1 << 20
_FILES = {TRACE, SNAPSHOT, FLIGHT_RECORDER, STACKS, "capture.json"}
_RANK = re.compile(r"[0-9]{1,9}")
_INSIDE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class NotReadYetError(ConfigError):
    """The run cannot be captured yet, since its sidecar has not read the first steps."""


# -- requests


def request_capture(
    run: RunDirectory,
    texts: Sequence[str],
    steps: int,
    *,
    python: bool = False,
    force: bool = False,
) -> Request:
    """Write a request into the run directory, where the sidecars find it.

    texts: ranks, such as 5, 0-3 or 0,5. python: record Python frames in the trace. force: allow
    more ranks than MAX_RANKS, and more than MAX_KEPT_BYTES of captures. Raise ConfigError if the
    request is invalid, NotReadYetError if it is too early, and RunStoreError if it cannot be
    written.
    """
    try:
        asked = tuple(sorted({rank for text in texts for rank in parse_ranges(text)}))
    except ValueError:
        raise ConfigError(
            f"--rank {' '.join(texts)}: expected ranks, such as 5, 0-3 or 0,5"
        ) from None
    if not 1 <= steps <= MAX_STEPS:
        raise ConfigError(f"--steps {steps}: must be from 1 to {MAX_STEPS}")
    if not run.nodes.is_dir():
        raise RunStoreError(run.why_unreadable())
    if not asked:
        raise ConfigError("--rank is missing: name at least one rank")
    attempt, from_step = _choose_first_step(run, asked)
    request = Request(
        id=capture_files.create_request_id(), asked_by=BY_USER, asked_unix_s=time.time(), attempt=attempt, ranks=asked,
        from_step=from_step, steps=steps, python=python, forced=force,
    )  # fmt: skip
    try:
        if not ownership.is_trusted_request(
            run.captures if run.captures.exists() else run.nodes, run.path
        ):
            raise RunStoreError(f"{run.captures} is another user's")
        refusal = capture_files.why_refused(run.captures, request)
        if refusal:
            raise ConfigError(refusal)
        with ownership.restrict_new_files_like(run.nodes):
            capture_files.submit_request(run.captures, request)
    except OSError as error:
        raise RunStoreError(f"cannot write to {run.captures}: {error.strerror or error}") from None
    return request


def _choose_first_step(run: RunDirectory, asked: Sequence[int]) -> tuple[int, int]:
    """Return the attempt, and the first step to capture, which no rank has reached yet.

    Raise ConfigError if these ranks cannot be captured.
    """
    states = list(run.nodes.glob("*.json"))
    report = load_report(run, lost_time=False) if states else None
    not_yet = (
        f"the sidecar of {run.run_id} has not read the first steps yet: try again in a few seconds"
    )
    if report is None:
        raise NotReadYetError(not_yet)
    if not report["run"]["live"]:
        raise ConfigError(f"run {run.run_id} has ended: a capture needs a live run")
    now_s = time.time()
    silent_s = now_s - max(path.stat().st_mtime for path in states)
    if silent_s > SILENT_S:
        raise ConfigError(
            f"run {run.run_id} has written nothing for {format_age(silent_s)}, so no sidecar would read the"
            " request: a capture needs a live run"
        )
    if report["run"]["last_step_at"] is None:
        raise NotReadYetError(not_yet)
    running = {row["rank"] for row in report["ranks"] if row["state"] == "running"}
    missing = [rank for rank in asked if rank not in running]
    if missing:
        raise ConfigError(
            f"rank {format_ranges(missing)} does not run here. Running ranks: {format_ranges(sorted(running))}."
            " Nodes without a shared disk have separate run directories."
        )
    requests, _ = capture_files.read_requests(run.captures)
    if any(capture_files.is_awaiting_outcomes(run.captures, each, now_s) for each in requests):
        raise ConfigError("another capture is in progress; wait until it has ended")
    step_s = report["steps"]["p50_s"] or report["steps"]["warm_up_max_s"]
    assert step_s is not None, "a step was made"
    last_s = datetime.datetime.fromisoformat(report["run"]["last_step_at"]).timestamp()
    step = max(row["last_step"] for row in report["ranks"] if row["last_step"] is not None) + 1
    step += int(max(0.0, now_s - last_s) / step_s)
    return report["run"]["attempt"], capture_files.choose_first_step(step, step_s, asked)


def request_capture_for_viewer(
    path: str, texts: str, steps: int, python: bool, force: bool
) -> dict[str, Any]:
    """Request a capture for a viewer. Raise the errors of request_capture()."""
    made = request_capture(open_run(path), [texts], steps, python=python, force=force)
    return {
        "id": made.id,
        "ranks": list(made.ranks),
        "from_step": made.from_step,
        "steps": made.steps,
    }


# -- results


def capture_progress(path: str, capture: str) -> dict[str, Any]:
    """Return the progress of a request: `outcomes` by rank, `waiting` ranks, and `is_over`."""
    run = open_run(path)
    request = next(
        (each for each in capture_files.read_requests(run.captures)[0] if each.id == capture), None
    )
    if request is None:
        raise NotFoundError("this capture does not exist")
    rows = [row for row in capture_rows(run) if row["id"] == capture]
    waiting = sorted({*request.ranks} - {row["rank"] for row in rows})
    outcomes = [
        {"rank": row["rank"], "words": describe_capture(row), "files": list_captured_files(row)}
        for row in rows
    ]
    is_over = not waiting or not capture_files.is_awaiting_outcomes(
        run.captures, request, time.time()
    )
    return {"outcomes": outcomes, "waiting": waiting, "is_over": is_over}


def describe_capture(row: Capture) -> str:
    """Return a sentence on the result of a capture on one rank."""
    if row["first_step"] is None:
        return f"no step was profiled: {row['ended']}"
    first, last = row["first_step"], row["last_step"]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    short = f" ({row['ended']})" if row["ended"] else ""
    missing = "".join(f"; no {name}: {why}" for name, why in row["left_out"].items())
    return f"{steps}{short}; training paused for {format_duration(row['paused_s'])}{missing}"


def list_captured_files(row: Capture) -> list[dict[str, Any]]:
    """Return the captured files of one rank, with addresses relative to the run's page."""
    folder = f"captures/{quote_name(row['id'])}/{row['rank']}"
    return [
        {"name": name, "bytes": file["bytes"], "address": f"{folder}/{quote_name(name)}"}
        for name, file in row["files"].items()
    ]


# -- files


def read_file_block(
    path: str, capture: str, rank: str, file: str, at: int, known: tuple[int, ...]
) -> tuple[bytes, tuple[int, ...]]:
    """Return BLOCK_BYTES from offset `at` of a file, and the file's device, inode and size.

    known: device, inode and size from the first block; () for the first block. Links are not
    followed. Raise NotFoundError if the file is missing or was replaced, or OSError.
    """
    if not _RANK.fullmatch(rank) or file not in _FILES or not capture_files.is_request_id(capture):
        raise NotFoundError("this file does not exist")
    folder = capture_files.rank_folder(Path("captures"), capture, int(rank))
    with contextlib.ExitStack() as closing:
        try:
            at_folder = None
            for part in (path, *folder.parts):
                at_folder = os.open(part, _INSIDE | os.O_DIRECTORY, dir_fd=at_folder)
                closing.callback(os.close, at_folder)
            descriptor = os.open(file, _INSIDE, dir_fd=at_folder)
            closing.callback(os.close, descriptor)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            raise NotFoundError("this file does not exist") from None
        found = os.fstat(descriptor)
        identity = (found.st_dev, found.st_ino, found.st_size)
        if not stat.S_ISREG(found.st_mode) or known not in ((), identity):
            raise NotFoundError("this file was removed or replaced")
        return os.pread(descriptor, BLOCK_BYTES, at), identity
