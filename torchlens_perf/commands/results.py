"""`torchlens-perf results RUN_DIR WHAT`: an internal command for the results of a watch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchlens_perf.commands.command import Command, argument
from torchlens_perf.run.directory import TABLES, RunDirectory


def _write_results(options: argparse.Namespace) -> int:
    run = RunDirectory(options.run_dir)
    if options.what == "cell":
        from torchlens_perf.page.notebook import results_from_run

        sys.stdout.write(results_from_run(run))
        return 0
    from torchlens_perf.store.frames import write_table

    write_table(run, options.what, sys.stdout.buffer)
    return 0


COMMAND = Command(
    name="results",  # The help does not list this command.
    arguments=(
        argument("run_dir", type=Path),
        argument(
            "what", choices=["cell", *TABLES], help="JSON for a notebook's cell, or an Arrow stream"
        ),
    ),
    run=_write_results,
)
