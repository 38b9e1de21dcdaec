"""Captures in the report: ranks, steps and paths of the files."""

from __future__ import annotations

from torchlens_perf.analysis.statistics.quantities import printable
from torchlens_perf.run import captures as capture_files
from torchlens_perf.run.captures import TRACE
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts.words.report import Capture


def capture_rows(run: RunDirectory, unusable: list[str] | None = None) -> list[Capture]:
    """Return a row for each rank with the outcome of a capture request, oldest first.

    unusable: receives a line for each request that cannot be read.

    File paths are relative to the run directory. `first_step` and `last_step` are null if no step
    was captured. `ended` is the reason if fewer steps than requested were captured.
    """
    rows: list[Capture] = []
    requests, unreadable = capture_files.read_requests(run.captures)
    if unusable is not None:
        unusable += [f"a capture request is invalid: {why}" for why in unreadable]
    for request in requests:
        for rank in request.ranks:
            outcome = capture_files.read_outcome(run.captures, request, rank)
            if outcome is None:
                continue
            first = outcome.first_step
            rows.append(
                {
                    "id": request.id,
                    "asked_by": request.asked_by,
                    "attempt": request.attempt,
                    "rank": rank,
                    "first_step": first if outcome.steps else None,
                    "last_step": first + outcome.steps - 1
                    if first is not None and outcome.steps
                    else None,
                    "ended": outcome.ended,
                    "paused_s": outcome.paused_s,
                    "files": {
                        name: {
                            "path": str(
                                (
                                    capture_files.rank_folder(run.captures, request.id, rank) / name
                                ).relative_to(run.path)
                            ),
                            "bytes": size,
                        }
                        for name, size in outcome.files.items()
                    },
                    "left_out": dict(outcome.left_out),
                }
            )
    return rows


def describe_capture_line(row: Capture, run_dir: str) -> str:
    if row["first_step"] is None:
        where = "".join(f" {printable(run_dir)}/{file['path']}" for file in row["files"].values())
        return f"not captured: rank {row['rank']}: {printable(row['ended'])}{where}"
    first, last = row["first_step"], row["last_step"]
    steps = f"step {first}" if first == last else f"steps {first}-{last}"
    short = f" ({printable(row['ended'])})" if row["ended"] else ""
    if TRACE in row["files"]:
        where = f"{printable(run_dir)}/{row['files'][TRACE]['path']}"
    else:
        where = f"no trace: {printable(row['left_out'].get(TRACE, 'not known why'))}"
    return f"captured: rank {row['rank']}, {steps}{short}: {where}"
