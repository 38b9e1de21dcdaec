"""`torchlens-perf capture`: request detailed profiles of a few steps from ranks of a live run, and
wait for the files.

The request is a file in the run directory. The sidecars read it and pass it to their ranks, so no
socket is opened.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlens_perf.commands.progress import Progress
from torchlens_perf.errors import printable
from torchlens_perf.run.captures import MAX_KEPT_BYTES, MAX_RANKS, MAX_STEPS, TRACE
from torchlens_perf.run.rank_ranges import format_ranges

if TYPE_CHECKING:
    from torchlens_perf.run.captures import Request
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.verdicts.words.report import Capture

_POLL_S = 0.1
_ASK_AGAIN_S = 0.5


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "capture",
        description=(
            "Profile a few steps of some ranks with torch.profiler. The flight recorder, Python"
            " stacks and, on a GPU, a memory snapshot are written too. Training pauses while the"
            " files are written. The exit code is 1 if a rank has no trace."
        ),
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(
        "--rank",
        action="append",
        required=True,
        metavar="RANKS",
        help="5, 0-3 or 0,5; may be repeated",
    )
    parser.add_argument(
        "--steps", type=int, default=3, help=f"number of steps, at most {MAX_STEPS}; default 3"
    )
    parser.add_argument(
        "--python",
        action="store_true",
        help="record Python frames and modules in the trace, at a higher cost",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="timeout in seconds, first for the steps and then for the files; default 120",
    )
    parser.add_argument(
        "--force", action="store_true",
        help=(
            f"allow more than {MAX_RANKS} ranks, and more than {MAX_KEPT_BYTES >> 30} GiB of"
            " captures"
        ),
    )  # fmt: skip
    parser.add_argument("--no-wait", action="store_true", help="only ask")
    parser.set_defaults(command=run_capture)


def run_capture(options: argparse.Namespace) -> int:
    """Run the command. Return 0 if all ranks wrote a trace. Raises ConfigError or RunStoreError."""
    from torchlens_perf.run.directory import RunDirectory

    run = RunDirectory(options.run_dir.absolute())
    request = _request_when_ready(run, options)
    if not options.quiet:
        print(
            f"requested: ranks {format_ranges(request.ranks)}, {request.steps} steps from step"
            f" {request.from_step} on"
        )
        print("torch.profiler may write messages (USDT, Kineto) to the job's stderr")
    return (
        0
        if options.no_wait
        else _wait_for_results(run, request, options.timeout, quiet=options.quiet)
    )


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


def _wait_for_results(run: RunDirectory, request: Request, timeout_s: float, *, quiet: bool) -> int:
    from torchlens_perf.report.captures import describe_capture_line

    received: dict[int, Capture] = {}
    deadline_s = time.monotonic() + timeout_s
    while len(received) < len(request.ranks):
        with Progress(
            f"waiting for ranks {format_ranges(_waiting_ranks(request, received))}", quiet=quiet
        ) as progress:
            progress(len(received), len(request.ranks))
            new = _wait_for_next_results(run, request, received, deadline_s)
        if not new:
            path = printable(str(run.path))
            waiting = format_ranges(_waiting_ranks(request, received))
            print(
                f"no answer from ranks {waiting} within {timeout_s:g} s. Next: torchlens-perf report"
                f" {path}, or see {path}/nodes/*.log"
            )
            return 1
        for row in new:
            received[row["rank"]] = row
            _print_result(row, describe_capture_line(row, str(run.path)), str(run.path))
    traced = [TRACE in row["files"] for row in received.values()]
    if any(traced) and not quiet:
        print("open traces in ui.perfetto.dev")
    return 0 if all(traced) else 1


def _waiting_ranks(request: Request, received: Mapping[int, Capture]) -> list[int]:
    return [rank for rank in request.ranks if rank not in received]


def _wait_for_next_results(
    run: RunDirectory, request: Request, received: Mapping[int, Capture], deadline_s: float
) -> list[Capture]:
    """Wait for further answers of ranks. Return [] after the deadline."""
    from torchlens_perf.report.captures import capture_rows

    while time.monotonic() <= deadline_s:
        time.sleep(_POLL_S)
        new = [
            row
            for row in capture_rows(run)
            if row["id"] == request.id and row["rank"] not in received
        ]
        if new:
            return new
    return []


def _print_result(row: Capture, line: str, run_dir: str) -> None:
    print(printable(line))
    for file in row["files"].values():
        print(printable(f"  {run_dir}/{file['path']}  {file['bytes']} bytes"))
    for name, reason in row["left_out"].items():
        print(printable(f"  no {name}: {reason}"))
    if row["first_step"] is not None:
        print(f"  training paused for {row['paused_s']:.2f} s", flush=True)
