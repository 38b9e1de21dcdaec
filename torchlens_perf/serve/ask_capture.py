"""Asks ranks of a live run for a capture: what may be asked, and of whom."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchlens_perf.errors import ConfigError, RunStoreError
from torchlens_perf.report.run_report import run_report
from torchlens_perf.run import captures as capture_files
from torchlens_perf.run import ownership
from torchlens_perf.run.captures import BY_USER, MAX_STEPS, Request
from torchlens_perf.run.rank_ranges import parse_ranges, ranges
from torchlens_perf.verdicts.words.run_state import SILENT_S, ago

if TYPE_CHECKING:
    from torchlens_perf.run.directory import RunDirectory


class NotReadYetError(ConfigError):
    """The run may be captured soon: its sidecar has not read the first steps yet."""


def ask_capture(
    run: RunDirectory, ranks: Sequence[str], steps: int, *, python: bool = False, force: bool = False
) -> Request:
    """Leaves a request in the run directory, for the sidecars, and returns it.

    ranks: texts as 5, 0-3 or 0,5. python: Python frames in the trace too. force: also more ranks than MAX_RANKS, and
    where there are MAX_KEPT_BYTES of captures. Raises ConfigError for what cannot be asked, NotReadYetError of it
    for what can be asked later, and RunStoreError.
    """
    request = _request(run, _ranks(ranks), steps, python=python, force=force)
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
    return request


def _ranks(texts: Sequence[str]) -> tuple[int, ...]:
    try:
        return tuple(sorted({rank for text in texts for rank in parse_ranges(text)}))
    except ValueError:
        raise ConfigError(f"--rank {' '.join(texts)}: must be ranks, such as 5, 0-3 or 0,5") from None


def _request(run: RunDirectory, ranks: tuple[int, ...], steps: int, *, python: bool, force: bool) -> Request:
    if not 1 <= steps <= MAX_STEPS:
        raise ConfigError(f"--steps {steps}: must be from 1 to {MAX_STEPS}")
    if not run.nodes.is_dir():
        raise RunStoreError(run.why_unreadable())
    if not ranks:
        raise ConfigError("--rank: at least one is needed")
    report = run_report(run) if list(run.nodes.glob("*.json")) else None
    not_yet = f"the sidecar of {run.run_id} has not read the first steps yet: ask again in some seconds"
    if report is None:
        raise NotReadYetError(not_yet)
    if not report["run"]["live"]:
        raise ConfigError(f"{run.run_id} has ended: a capture needs a live run")
    silent_s = time.time() - max(path.stat().st_mtime for path in run.nodes.glob("*.json"))
    if silent_s > SILENT_S:
        raise ConfigError(
            f"{run.run_id} is silent for {ago(silent_s)}, and no sidecar would see the request: a capture needs a "
            "live run"
        )
    if report["run"]["last_step_at"] is None:
        raise NotReadYetError(not_yet)
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
        forced=force,
    )
