"""`torchlens-perf report RUN_DIR --perfetto FILE` or `--chrome-traces DIR`: recorded steps as traces."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import format_count
from torchlens_perf.commands.progress import Progress
from torchlens_perf.errors import printable
from torchlens_perf.run.rank_ranges import parse_ranges

if TYPE_CHECKING:
    from torchlens_perf.run.directory import RunDirectory


def add_arguments(report: argparse.ArgumentParser) -> None:
    trace = report.add_argument_group("with --perfetto and --chrome-traces")
    trace.add_argument("--ranks", type=_parse_ranks, help="ranks to write, such as 0,3,8-15")
    trace.add_argument("--steps", type=_parse_range, help="first and last step, such as 100-200")
    trace.add_argument(
        "--limit-mb", type=float, help="size of the file, which limits the steps; default: 20"
    )


def _parse_ranks(text: str) -> tuple[int, ...]:
    try:
        ranks = parse_ranges(text)
    except ValueError:
        ranks = ()
    if not ranks:
        raise argparse.ArgumentTypeError(f"invalid ranks {text!r}: expected 5, 0-3 or 0,5")
    return ranks


def _parse_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise argparse.ArgumentTypeError(f"invalid numbers {text!r}: use a number, or FIRST-LAST")
    return int(match[1]), int(match[2] or match[1])


def write_requested_trace(run: RunDirectory, options: argparse.Namespace) -> None:
    """Write the trace and print what it contains. Raise ConfigError or RunStoreError."""
    from torchlens_perf.timeline.export import DEFAULT_LIMIT_BYTES, write_trace

    path = options.perfetto or options.chrome_traces
    limit = options.limit_mb * 1e6 if options.limit_mb else DEFAULT_LIMIT_BYTES
    with Progress("writing the trace", quiet=options.quiet) as progress:
        written = write_trace(
            run,
            path,
            ranks=options.ranks,
            steps=options.steps,
            limit_bytes=int(limit),
            per_rank=options.perfetto is None,
            advanced=progress,
        )
    if options.quiet:
        return
    first, last = written.steps
    print(
        f"torchlens-perf: wrote {printable(str(path))}, {written.size_bytes / 1e6:.1f}"
        f" MB: {format_count(len(written.ranks), 'rank')}, steps {first} to {last}. Open it in"
        " https://ui.perfetto.dev, which reads it in your browser without sending it",
        file=sys.stderr,
    )
    for note in written.notes:
        print(f"torchlens-perf: {printable(note)}", file=sys.stderr)
