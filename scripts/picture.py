"""Draw what rank 0 prints at the end of a run as an SVG for the README.

usage: picture.py RUN_DIR OUT.svg
"""

import io
import sys
from pathlib import Path

from rich.console import Console

from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.view.terminal import short_report_lines

_COLUMNS = 120

run = RunDirectory(Path(sys.argv[1]))
console = Console(
    record=True,
    width=_COLUMNS,
    file=io.StringIO(),
    force_terminal=True,
    highlight=False,
    markup=False,
)
folder = f"torchlens-perf/{run.run_id}"
for line in short_report_lines(
    load_report(run), folder, _COLUMNS, color=True, page=f"{folder}/report.html"
):
    console.print(line, no_wrap=True)
console.save_svg(sys.argv[2], title="make demo")
