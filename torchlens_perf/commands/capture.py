"""`torchlens-perf capture`: request detailed profiles of a few steps from ranks of a live run, and
wait for the files.

The request is a file in the run directory. The sidecars read it and pass it to their ranks, so no
socket is opened.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.commands.command import Command, argument
from torchlens_perf.commands.progress import Progress
from torchlens_perf.errors import printable
from torchlens_perf.run.captures import MAX_KEPT_BYTES, MAX_RANKS, MAX_STEPS, TRACE
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.rank_ranges import format_rank_list

if TYPE_CHECKING:
    from torchlens_perf.run.captures import Request
    from torchlens_perf.verdicts.words.report import Capture

_POLL_S = 0.1
_ASK_AGAIN_S = 0.5


def _run_capture(options: argparse.Namespace) -> int:
    """Return 0 if all ranks wrote a trace."""
    run = RunDirectory(options.run_dir.absolute())
    request = _request_when_ready(run, options)
    if not options.quiet:
        print(
            f"requested: {format_rank_list(request.ranks)}, {request.steps} steps from step"
            f" {request.from_step} on"
        )
        print("torch.profiler may write messages (USDT, Kineto) to the job's stderr")
    return 0 if options.no_wait else _wait_for_results(run, request, options)


def _request_when_ready(run: RunDirectory, options: argparse.Namespace) -> Request:
    """Write the request, once the sidecar has read steps. Raises ConfigError or RunStoreError."""
    from torchlens_perf.serve.captures import NotReadYetError, request_capture

    deadline_s = time.monotonic() + (0.0 if options.no_wait else options.timeout)
    with Progress("waiting for the sidecar to read the first steps", quiet=options.quiet):
        while True:
            try:
                return request_capture(
                    run, options.rank, options.steps, python=options.python, force=options.force
                )
            except NotReadYetError:
                if time.monotonic() >= deadline_s:
                    raise
            time.sleep(_ASK_AGAIN_S)


def _wait_for_results(run: RunDirectory, request: Request, options: argparse.Namespace) -> int:
    from torchlens_perf.report.captures import describe_capture_line

    path = str(run.path)
    missing = set(request.ranks)
    rows: list[Capture] = []
    deadline_s = time.monotonic() + options.timeout
    while missing:
        ranks = format_rank_list(sorted(missing))
        with Progress(f"waiting for {ranks}", quiet=options.quiet) as progress:
            progress(len(rows), len(request.ranks))
            new = _wait_for_next_results(run, request, missing, deadline_s)
        if not new:
            print(
                f"no answer from {ranks} within {options.timeout:g} s. Next: torchlens-perf"
                f" report {printable(path)}, or see {printable(path)}/nodes/*.log"
            )
            return 1
        for row in new:
            missing.discard(row["rank"])
            _print_result(row, describe_capture_line(row, path), path)
        rows += new
    traced = [TRACE in row["files"] for row in rows]
    if any(traced) and not options.quiet:
        print("open traces in ui.perfetto.dev")
    return 0 if all(traced) else 1


def _wait_for_next_results(
    run: RunDirectory, request: Request, missing: Container[int], deadline_s: float
) -> list[Capture]:
    """Wait for further answers of ranks. Return [] after the deadline."""
    from torchlens_perf.report.captures import capture_rows

    new: list[Capture] = []
    while not new and time.monotonic() <= deadline_s:
        time.sleep(_POLL_S)
        answers = (row for row in capture_rows(run) if row["id"] == request.id)
        new = [row for row in answers if row["rank"] in missing]
    return new


def _print_result(row: Capture, line: str, run_dir: str) -> None:
    print(printable(line))
    for file in row["files"].values():
        print(printable(f"  {run_dir}/{file['path']}  {file['bytes']} bytes"))
    for name, reason in row["left_out"].items():
        print(printable(f"  no {name}: {reason}"))
    if row["first_step"] is not None:
        print(f"  training paused for {row['paused_s']:.2f} s", flush=True)


COMMAND = Command(
    name="capture",
    summary="profile a few steps of a live run with torch.profiler",
    description=(
        "Profile a few steps of some ranks with torch.profiler. The flight recorder, Python"
        " stacks and, on a GPU, a memory snapshot are written too. Training pauses while the"
        " files are written. The exit code is 1 if a rank has no trace."
    ),
    arguments=(
        argument("run_dir", type=Path),
        argument(
            "--rank",
            action="append",
            required=True,
            metavar="RANKS",
            help="5, 0-3 or 0,5; may be repeated",
        ),
        argument(
            "--steps", type=int, default=3, help=f"number of steps, at most {MAX_STEPS}; default 3"
        ),
        argument(
            "--python",
            action="store_true",
            help="record Python frames and modules in the trace, at a higher cost",
        ),
        argument(
            "--timeout",
            type=float,
            default=120.0,
            metavar="S",
            help="timeout in seconds, first for the steps and then for the files; default 120",
        ),
        argument(
            "--force",
            action="store_true",
            help=(
                f"allow more than {MAX_RANKS} ranks, and more than {MAX_KEPT_BYTES >> 30} GiB of"
                " captures"
            ),
        ),
        argument(
            "--no-wait", action="store_true", help="send the request and return without the files"
        ),
    ),
    run=_run_capture,
)
