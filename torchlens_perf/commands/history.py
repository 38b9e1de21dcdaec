"""`torchlens-perf history DIR`: many runs of a job in order of time, and where they changed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlens_perf.commands.chosen_runs import find_runs
from torchlens_perf.commands.progress import Progress
from torchlens_perf.errors import printable
from torchlens_perf.run.installation import require_packages

if TYPE_CHECKING:
    from torchlens_perf.compare.history import History


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "history",
        description=(
            "Show the runs of a folder in order of time: step, parts and memory of each, the runs"
            " from which the step takes longer or shorter, and the goodput of each job."
        ),
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder of runs of one job")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--html", type=Path, metavar="FILE", help="write a web page")
    add_price_argument(parser)
    parser.set_defaults(command=_run_history)


def add_price_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--price-per-device-hour",
        type=float,
        metavar="PRICE",
        help="show costs; without devices, the price is that of an hour of one rank",
    )


def _run_history(options: argparse.Namespace) -> int:
    require_packages("history", ["ruptures"], "history")
    from torchlens_perf.compare.history import read_history

    with Progress("reading the runs", quiet=options.quiet) as progress:
        runs = find_runs(options.folder)
        found = read_history(runs, progress, options.price_per_device_hour)
    _print_history(found, options)
    return 0


def _print_history(found: History, options: argparse.Namespace) -> None:
    from torchlens_perf.compare import history_screens as screens

    if options.json:
        from torchlens_perf.report import report_json

        report_json.write_json(screens.to_dictionary(found), sys.stdout)
    elif options.html is not None:
        screens.write_history_page(found, options.html)
        if not options.quiet:
            print(f"torchlens-perf: wrote {printable(str(options.html))}", file=sys.stderr)
    else:
        from torchlens_perf.view.terminal import print_tables

        head = screens.build_headline(found)
        print_tables(head, screens.build_tables(found), screens.list_changes(found),
                     found.notes, sys.stdout)  # fmt: skip
