"""The example of docs/guides/notebook.md, run block by block without a notebook."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, run_warm, runs

DISPLAY = "def display(watch):\n    print(watch._repr_mimebundle_()['text/plain'])\n\n"


def blocks() -> list[str]:
    """Return the example's cells from the page."""
    return re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/guides/notebook.md").read_text(), re.DOTALL
    )


@pytest.mark.long
def test_documented_notebook_example_runs_as_a_script(tmp_path: Path) -> None:
    """In plain Python, displayed objects are printed. The numbers are those of the run."""
    code = DISPLAY + "\n".join(blocks()).replace(
        "perf.watch(model, optimizer)",
        "perf.watch(model, optimizer, config=perf.Config(_exit_timeout_s=60.0))",
    )
    done = run_warm([sys.executable, "-c", code], tmp_path, TORCHLENS_PERF_RAISE="1")

    assert done.returncode == 0, done.stderr
    assert len(blocks()) == 6
    assert re.search(r"^200 steps: p50 .* ms", done.stdout, re.MULTILINE)
    assert "communication_ns" in done.stdout
    assert "200 steps" in done.stderr
    runs(tmp_path)
