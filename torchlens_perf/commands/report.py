"""`torchlens-perf report RUN_DIR`: the report as text, JSON or a web page, or the steps as traces."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import format_count
from torchlens_perf.commands import fail_on
from torchlens_perf.commands.chosen_runs import find_newest_run
from torchlens_perf.commands.command import Command, argument, one_of, print_note, titled
from torchlens_perf.commands.progress import Progress
from torchlens_perf.errors import printable, require
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.rank_ranges import parse_ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchlens_perf.verdicts.node_state import NodeState
    from torchlens_perf.verdicts.words.report import Report

_EXIT_CODES = """exit codes:
  0  the report was printed, and no verdict of --fail-on holds
  1  a verdict of --fail-on holds
  2  a mistake on the command line, or no run that can be read
  3  the run has too little data for a verdict of --fail-on"""


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


def _run_report(options: argparse.Namespace) -> int:
    if options.schema:
        from torchlens_perf.report import report_json

        require(
            not options.fail_on,
            "--fail-on needs a run, but --schema does not: remove one of these options",
        )
        report_json.write_json(report_json.build_schema(), sys.stdout)
        return 0
    run = RunDirectory(options.run_dir or find_newest_run())
    if options.html is not None:
        _write_page(run, options)
        if not options.fail_on:
            return 0
    if options.perfetto is not None:
        _write_trace(run, options)
        return 0
    from torchlens_perf.report.run_report import load_report_and_states

    with Progress("reading the run", quiet=options.quiet) as progress:
        report, states = load_report_and_states(run, progress)
    return _print_report(run, report, states, options)


def _write_page(run: RunDirectory, options: argparse.Namespace) -> None:
    from torchlens_perf.page.document.write import write_page

    with Progress("writing the page", quiet=options.quiet):
        size = write_page(run, options.html, price=options.price_per_device_hour)
    print_note(options, f"wrote {printable(str(options.html))}, {size / 1e6:.2f} MB")


def _write_trace(run: RunDirectory, options: argparse.Namespace) -> None:
    from torchlens_perf.timeline.export import DEFAULT_LIMIT_BYTES, write_trace

    with Progress("writing the trace", quiet=options.quiet) as progress:
        written = write_trace(
            run,
            options.perfetto,
            ranks=options.ranks,
            steps=options.steps,
            limit_bytes=int(options.limit_mb * 1e6) if options.limit_mb else DEFAULT_LIMIT_BYTES,
            advanced=progress,
        )
    first, last = written.steps
    print_note(
        options,
        f"wrote {printable(str(options.perfetto))}, {written.size_bytes / 1e6:.1f} MB:"
        f" {format_count(len(written.ranks), 'rank')}, steps {first} to {last}. Open it in"
        " https://ui.perfetto.dev, which reads it in your browser without sending it",
    )
    for note in written.notes:
        print_note(options, printable(note))


def _print_report(
    run: RunDirectory, report: Report, states: Sequence[NodeState], options: argparse.Namespace
) -> int:
    from torchlens_perf.diagnosis.goodput import with_price
    from torchlens_perf.report import report_json
    from torchlens_perf.view.terminal import print_report

    report["goodput"] = with_price(report["goodput"], options.price_per_device_hour)
    if options.json:
        report_json.write_json(report, sys.stdout)
    elif options.html is None:
        print_report(
            report,
            sys.stdout,
            str(run.path),
            whole=options.all or options.price_per_device_hour is not None,
        )
    code, why = fail_on.choose_exit_code(options.fail_on, report, states)
    print_note(options, why)
    return code


COMMAND = Command(
    name="report",
    summary="print the report of a run, as text, JSON or a web page",
    description=(
        "Print the report of a run, live or finished: which rank is slow, why, since when and at"
        " what cost, and what limits the step."
    ),
    epilog=_EXIT_CODES,
    arguments=(
        argument(
            "run_dir", type=Path, nargs="?", help="a run directory; default: the newest run here"
        ),
        argument(
            "--all",
            action="store_true",
            help="print all tables; by default, those that fit in 40 lines",
        ),
        one_of(
            argument("--json", action="store_true", help="print JSON"),
            argument(
                "--html",
                type=Path,
                metavar="FILE",
                help="write the report as a web page in one file that needs no network",
            ),
            argument(
                "--perfetto",
                type=Path,
                metavar="FILE",
                help="write the recorded steps as a trace for ui.perfetto.dev",
            ),
            argument(
                "--schema",
                action="store_true",
                help="print the JSON schema of --json, for which no run is needed",
            ),
        ),
        titled(
            "with --perfetto",
            argument("--ranks", type=_parse_ranks, help="ranks to write, such as 0,3,8-15"),
            argument("--steps", type=_parse_range, help="first and last step, such as 100-200"),
            argument(
                "--limit-mb",
                type=float,
                help="size of the file, which limits the steps; default: 20",
            ),
        ),
        argument(
            "--price-per-device-hour",
            type=float,
            metavar="PRICE",
            help="show costs; without devices, the price is that of an hour of one rank",
        ),
        argument(
            "--fail-on",
            type=fail_on.parse_verdict_names,
            action="extend",
            default=[],
            metavar="VERDICT,...",
            help=(
                "exit with code 1 if the report contains one of these verdicts:"
                f" {', '.join(fail_on.KINDS)}"
            ),
        ),
    ),
    run=_run_report,
)
