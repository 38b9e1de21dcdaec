"""Draws a run's report as the README's picture. usage: picture.py RUN_DIR OUT.svg"""

import io
import sys
from pathlib import Path

from rich.console import Console

from torchlens_perf.analysis import node_state
from torchlens_perf.report.build import build
from torchlens_perf.report.terminal import layout
from torchlens_perf.run.directory import RunDirectory

run = RunDirectory(Path(sys.argv[1]))
console = Console(record=True, width=120, file=io.StringIO(), force_terminal=True, highlight=False, markup=False)
console.print(layout(build(run.run_id, node_state.load_all(run)), f"torchlens-perf/{run.run_id}"))
console.save_svg(sys.argv[2], title="make demo")
