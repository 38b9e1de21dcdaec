"""Cost of live results for a job: an alert callback, a notebook cell, and a call of summary().

The cell runs in a real Jupyter kernel if ipykernel is installed, without a browser.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import torchlens_perf as perf
from benchmarks.measure import Table, interleaved, ratio_interval
from torchlens_perf.results.alerts import AlertCallbacks
from torchlens_perf.sidecar import live_results

LOOKS, ROUNDS, STEPS, ASKED = 20_000, 60, 400, 8
MAX_LOOK_US, MAX_STEP, MAX_UPDATE_SHARE = 2.0, 1.01, 0.01
LIVE_S = 15
CELLS = (
    """
import statistics, time, torch
import torchlens_perf as perf
from torchlens_perf.results import notebook
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
took, update = [], notebook.NotebookCell._update_display
def timed(cell, session):
    before, began_s = cell._newest, time.perf_counter()
    update(cell, session)
    if cell._newest is not before:
        took.append(time.perf_counter() - began_s)
notebook.NotebookCell._update_display = timed
""",
    f"""
with perf.watch(model, optimizer, config=perf.Config(_exit_timeout_s=60.0)) as w:
    display(w)
    until_s = time.monotonic() + {LIVE_S}
    while time.monotonic() < until_s:
        model(torch.randn(8, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.005)
import json
print(json.dumps([took, w.summary().sidecar_cpu_s]))
""",
)


class _Loop:
    """A watched loop of small steps."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(16, 16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._x = torch.ones(4, 16)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.model(self._x).sum().backward()
            self.optimizer.step()


def main() -> int:
    """Print the table. Return the number of missed bars."""
    torch.set_num_threads(1)
    table = Table("with a viewer", "value", "bar", "")
    with tempfile.TemporaryDirectory() as name:
        _callbacks(table, name)
        _questions(table, name)
        _cell(table, Path(name))
    return table.missed


def _callbacks(table: Table, folder: str) -> None:
    """Time a poll that finds no alert, and a loop alternately with and without a callback."""
    loop, alerts = _Loop(), AlertCallbacks()
    alerts.callbacks.append(print)
    with perf.watch(loop.model, loop.optimizer, dir=folder, report="quiet") as watch:
        session = watch._session
        assert session is not None
        with alerts.attached_to(session):
            began_s = time.perf_counter()
            for _ in range(LOOKS):
                alerts._poll_alerts(session)
            look_us = 1e6 * (time.perf_counter() - began_s) / LOOKS
        met = table.bar(look_us <= MAX_LOOK_US)
        table.row(
            "a look for alerts, once in 50 ms",
            f"{look_us:.2f} us",
            f"at most {MAX_LOOK_US:.0f} us",
            met,
        )

        def loop_us(*, listens: bool) -> float:
            with alerts.attached_to(session) if listens else contextlib.nullcontext():
                began_s = time.perf_counter()
                loop.steps(STEPS)
                return 1e6 * (time.perf_counter() - began_s) / STEPS

        arms = {"without": lambda: loop_us(listens=False), "with": lambda: loop_us(listens=True)}
        values = interleaved(arms, ROUNDS)
    ratio, low, high = ratio_interval(values["with"], values["without"])
    step = f"{ratio:.4f} [{low:.4f}, {high:.4f}] of {statistics.median(values['without']):.0f} us"
    met = table.bar(high <= MAX_STEP)
    table.row(
        "a step with a callback, to one without", step, f"at most {MAX_STEP} (upper end)", met
    )


def _questions(table: Table, folder: str) -> None:
    loop, asked_s, frame_s = _Loop(), [], []
    with perf.watch(loop.model, loop.optimizer, dir=folder, report="quiet") as watch:
        loop.steps(STEPS)
        for _ in range(ASKED):
            for question, took_s in ((watch.summary, asked_s), (watch.step_table, frame_s)):
                began_s = time.perf_counter()
                question()
                took_s.append(time.perf_counter() - began_s)
                loop.steps(STEPS)
    began_s = time.perf_counter()
    watch.summary()
    after_s = time.perf_counter() - began_s
    table.row("the first summary() of a young run", f"{1e3 * asked_s[0]:.0f} ms", "", "")
    table.row(
        "summary() while the run goes on", f"{1e3 * statistics.median(asked_s[1:]):.0f} ms", "", ""
    )
    table.row(
        "steps() while the run goes on", f"{1e3 * statistics.median(frame_s[1:]):.0f} ms", "", ""
    )
    table.row("summary() after the end", f"{1e3 * after_s:.0f} ms", "", "")


def _cell(table: Table, folder: Path) -> None:
    if importlib.util.find_spec("ipykernel") is None:
        print("ipykernel is not installed: a notebook's cell is not measured", file=sys.stderr)
        return
    from tests.support.kernel import Kernel

    kernel = Kernel(folder, TORCHLENS_PERF_RAISE="0")
    try:
        kernel.run(CELLS[0])
        took, cpu_s = _last_json(kernel.run(CELLS[1]).text)
    finally:
        kernel.close()
    share = statistics.mean(took) * len(took) / LIVE_S
    met = table.bar(share <= MAX_UPDATE_SHARE)
    text = f"{1e3 * statistics.median(took):.2f} ms, at most {1e3 * max(took):.2f} ms"
    table.row(f"an update of a notebook's cell, {len(took)} in {LIVE_S} s", text, "", "")
    table.row(
        "of the training thread's time", f"{share:.3%}", f"at most {MAX_UPDATE_SHARE:.0%}", met
    )
    rest = f"{100 / live_results._MIN_IDLE_RATIO:.0f} % for the view"
    table.row("the sidecar meanwhile", f"{cpu_s:.2f} s of a processor", f"at most {rest}", "")


def _last_json(text: str) -> Any:
    return json.loads(text.splitlines()[-1])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
