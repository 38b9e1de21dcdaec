"""A notebook in a real Jupyter kernel: a report under each cell that trains, and nothing left between them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import report, runs

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("nbclient", "ipykernel")),
        reason="nbclient and ipykernel are not in this environment: make test-frameworks",
    ),
]
SETUP = """
import torch
import torchlens_perf as perf
from torch import nn

model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
"""
TRAIN = """
with perf.watch(model, optimizer, exit_timeout_s=60.0) as w:
    for _ in range(30):
        loss = model(torch.randn(8, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
"""
AFTER = """
import threading
print(len(losses), threading.active_count() - before, model._forward_hooks, "_compiled_call_impl" in model.__dict__)
"""


def text_of(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_a_report_under_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cells that train make two runs, each with its own report; the kernel has no thread more."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cells = [SETUP, "import threading; before = threading.active_count()", TRAIN, TRAIN, AFTER]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=200, kernel_name="python3").execute()

    first, second = notebook.cells[2], notebook.cells[3]
    for cell in (first, second):
        assert "30 steps" in text_of(cell)
        assert "Next: " in text_of(cell)
    assert "ipykernel_launcher" not in text_of(first)
    assert text_of(notebook.cells[4]) == "60 0 OrderedDict() False\n"
    reports = [report(directory) for directory in runs(tmp_path)]
    assert [value["steps"]["count"] for value in reports] == [30, 30]
