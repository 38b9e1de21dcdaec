"""Draws what rank 0 prints at the end of a run as the README's picture. usage: picture.py RUN_DIR OUT.svg"""

import io
import sys
from pathlib import Path

from rich.console import Console

from torchlens_perf.report.brief import brief_layout
from torchlens_perf.report.run_report import run_report
from torchlens_perf.run.directory import RunDirectory

_COLUMNS = 120

run = RunDirectory(Path(sys.argv[1]))
console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False, markup=False)
folder = f"torchlens-perf/{run.run_id}"
console.print(brief_layout(run_report(run), folder, columns=_COLUMNS, page=f"{folder}/report.html"))
console.save_svg(sys.argv[2], title="make demo")
