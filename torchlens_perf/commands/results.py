"""`torchlens-perf results RUN_DIR WHAT`: an internal command for the results of a watch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from torchlens_perf.run.directory import TABLES, RunDirectory

NAME = "results"  # The help does not list this command.


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(NAME)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(
        "what", choices=["cell", *TABLES], help="JSON for a notebook's cell, or an Arrow stream"
    )
    parser.set_defaults(command=_write_results)


def _write_results(options: argparse.Namespace) -> int:
    run = RunDirectory(options.run_dir)
    if options.what == "cell":
        from torchlens_perf.page.notebook import results_from_run

        sys.stdout.write(results_from_run(run))
        return 0
    from torchlens_perf.store.frames import write_table

    write_table(run, options.what, sys.stdout.buffer)
    return 0
