"""`torchlens-perf capture`: asks ranks of a live run for a deep look at a few steps, and waits for the files.

The request goes through the run directory to the sidecars, and from them to the ranks: nobody opens a socket.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlens_perf.commands.progress import Progress
from torchlens_perf.errors import ConfigError, RunStoreError, printable
from torchlens_perf.run import captures as capture_files
from torchlens_perf.run import ownership
from torchlens_perf.run.captures import BY_USER, MAX_KEPT_BYTES, MAX_RANKS, MAX_STEPS, TRACE, Request
from torchlens_perf.run.rank_ranges import parse_ranges, ranges

if TYPE_CHECKING:
    from torchlens_perf.analysis.words.report import Capture
    from torchlens_perf.run.directory import RunDirectory

_SILENT_S = 60.0  # a live run's sidecar writes its state every few seconds
_POLL_S = 0.1


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "capture",
        help="a deep look at a few steps of a live run",
        description="Asks ranks of a live run for a trace of a few steps by torch.profiler, the flight recorder, "
        "Python stacks, and on a GPU a memory snapshot. The ranks pause while they write.",
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(
        "--rank", action="append", required=True, metavar="RANKS", help="5, 0-3 or 0,5; may be repeated"
    )
    parser.add_argument("--steps", type=int, default=3, help=f"how many, at most {MAX_STEPS}; default 3")
    parser.add_argument("--python", action="store_true", help="Python frames and modules in the trace; costs more")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="longest wait; default 120 s")
    parser.add_argument(
        "--force", action="store_true",
        help=f"also more than {MAX_RANKS} ranks, and where there are {MAX_KEPT_BYTES >> 30} GiB of captures already",
    )  # fmt: skip
    parser.add_argument("--no-wait", action="store_true", help="only ask")
    parser.set_defaults(command=capture)


def capture(options: argparse.Namespace) -> int:
    """Runs the command: 0 if every rank has a trace. Raises ConfigError or RunStoreError for what cannot be asked."""
    from torchlens_perf.run.directory import RunDirectory

    run = RunDirectory(options.run_dir.absolute())
    request = _request(run, _ranks(options.rank), options.steps, options.python)
    request = dataclasses.replace(request, forced=options.force)
    try:
        if not ownership.may_ask(run.captures if run.captures.exists() else run.nodes, run.path):
            raise RunStoreError(f"{run.captures} is another user's")
        refusal = capture_files.refusal(run.captures, request)
        if refusal:
            raise ConfigError(refusal)
        with ownership.as_private_as(run.nodes):
            capture_files.ask(run.captures, request)
    except OSError as error:
        raise RunStoreError(f"cannot write to {run.captures}: {error.strerror or error}") from None
    if not options.quiet:
        print(f"asked: ranks {ranges(request.ranks)}, {request.steps} steps from step {request.from_step} on")
    return 0 if options.no_wait else _wait(run, request, options.timeout, quiet=options.quiet)


def _ranks(texts: list[str]) -> tuple[int, ...]:
    try:
        return tuple(sorted({rank for text in texts for rank in parse_ranges(text)}))
    except ValueError:
        raise ConfigError(f"--rank {' '.join(texts)}: must be ranks, such as 5, 0-3 or 0,5") from None


def _request(run: RunDirectory, ranks: tuple[int, ...], steps: int, python: bool) -> Request:
    from torchlens_perf.report.run_report import run_report

    if not 1 <= steps <= MAX_STEPS:
        raise ConfigError(f"--steps {steps}: must be from 1 to {MAX_STEPS}")
    if not run.nodes.is_dir():
        raise RunStoreError(f"{run.path} is not a run directory")
    if not ranks:
        raise ConfigError("--rank: at least one is needed")
    report = run_report(run) if list(run.nodes.glob("*.json")) else None
    if report is None or report["run"]["last_step_at"] is None:
        raise ConfigError(f"{run.run_id} has made no step yet")
    silent_s = time.time() - max(path.stat().st_mtime for path in run.nodes.glob("*.json"))
    if not report["run"]["live"] or silent_s > _SILENT_S:
        raise ConfigError(f"{run.run_id} does not run any more")
    running = {row["rank"] for row in report["ranks"] if row["state"] == "running"}
    missing = [rank for rank in ranks if rank not in running]
    if missing:
        raise ConfigError(
            f"no rank {ranges(missing)} runs here (there are {ranges(sorted(running))}; nodes without a shared disk "
            "have run directories of their own)"
        )
    now_s = time.time()
    requests, _ = capture_files.read_requests(run.captures)
    if any(capture_files.is_open(run.captures, each, now_s) for each in requests):
        raise ConfigError("a capture is in progress; wait for it")
    step_s = report["steps"]["p50_s"] or report["steps"]["warm_up_max_s"]
    assert step_s is not None, "a step was made"
    last = datetime.datetime.fromisoformat(report["run"]["last_step_at"]).timestamp()
    made_since = int(max(0.0, now_s - last) / step_s)
    step = max(row["last_step"] for row in report["ranks"] if row["last_step"] is not None) + 1 + made_since
    return Request(
        id=capture_files.new_id(),
        asked_by=BY_USER,
        asked_unix_s=now_s,
        attempt=report["run"]["attempt"],
        ranks=ranks,
        from_step=capture_files.first_step(step, step_s),
        steps=steps,
        python=python,
    )


def _wait(run: RunDirectory, request: Request, timeout_s: float, *, quiet: bool) -> int:
    from torchlens_perf.report.captures import capture_line

    received: dict[int, Capture] = {}
    deadline_s = time.monotonic() + timeout_s
    while len(received) < len(request.ranks):
        with Progress(f"waiting for ranks {ranges(_left(request, received))}", quiet=quiet) as progress:
            progress(len(received), len(request.ranks))
            new = _next(run, request, received, deadline_s)
        if not new:
            path = printable(str(run.path))
            print(f"not yet: ranks {ranges(_left(request, received))}. Next: torchlens-perf report {path}, or "
                  "nodes/*.log there")  # fmt: skip
            return 1
        for row in new:
            received[row["rank"]] = row
            _tell(row, capture_line(row, str(run.path)), str(run.path))
    return 0 if all(TRACE in row["files"] for row in received.values()) else 1


def _left(request: Request, received: Mapping[int, Capture]) -> list[int]:
    return [rank for rank in request.ranks if rank not in received]


def _next(run: RunDirectory, request: Request, received: Mapping[int, Capture], deadline_s: float) -> list[Capture]:
    """Waits for what ranks answer; [] after the deadline."""
    from torchlens_perf.report.captures import captures

    while time.monotonic() <= deadline_s:
        time.sleep(_POLL_S)
        new = [row for row in captures(run) if row["id"] == request.id and row["rank"] not in received]
        if new:
            return new
    return []


def _tell(row: Capture, line: str, run_dir: str) -> None:
    print(printable(line))
    for file in row["files"].values():
        print(printable(f"  {run_dir}/{file['path']}  {file['bytes']} bytes"))
    for name, reason in row["left_out"].items():
        print(printable(f"  no {name}: {reason}"))
    if row["first_step"] is not None:
        print(f"  training paused for {row['paused_s']:.2f} s", flush=True)
