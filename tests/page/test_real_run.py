"""Pages of real training, written by the sidecar after the run or by w.report_html() at any
time.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import clean_environ, run_warm, runs
from tests.support.ranks import HOST, Rank
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.sidecar import page_file
from torchlens_perf.sidecar.loop import run_sidecar
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.sidecar.start.process import acquire_lock
from torchlens_perf.verdicts import node_state

pytestmark = pytest.mark.distributed

# Two ranks use gloo, and one sleeps in forward. Rank 0 writes a page in the middle of the run.
_JOB = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import torchlens_perf as perf

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.01 * dist.get_rank())
        return super().forward(x)

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(Slow(32, 64), nn.ReLU(), nn.Linear(64, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with perf.watch(model, optimizer, config=perf.Config(_exit_timeout_s=30)) as w:
    for _ in range(60):
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
if dist.get_rank() == 0:
    before = set(sys.modules)
    print("page", w.report_html("asked.html"))
    ours = ("torchlens_perf", "pyarrow", "rich")
    print("imported", sorted(name for name in set(sys.modules) - before if name.partition(".")[0] in ours))
time.sleep(0.3)
dist.destroy_process_group()
"""


def contents_of(page: Path) -> Any:
    found = re.search(
        r'<script type="application/json" id="contents">(.*?)</script>', page.read_text(), re.S
    )
    assert found is not None
    return json.loads(found[1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunDirectory, str]:
    """Return the folder, the run, and the output of a job."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "job.py").write_text(_JOB)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "job.py",
    ]
    done = run_warm(
        command, folder, TORCHLENS_PERF_REPORT="page", PYTHONPATH=str(Path(__file__).parents[2])
    )
    assert done.returncode == 0, done.stderr
    (made,) = runs(folder)
    return folder, made, done.stdout


def test_sidecar_writes_the_page_at_the_end_of_the_run(
    trained: tuple[Path, RunDirectory, str],
) -> None:
    """The page is stored with report.txt, agrees with the report, and is readable only by its
    user.
    """
    _, made, _ = trained
    page = made.report.with_suffix(".html")
    command = [sys.executable, "-m", "torchlens_perf", "report", str(made.path), "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    shown = contents_of(page)

    assert page.stat().st_mode & 0o777 == 0o600
    for part in ("verdicts", "ranks", "steps", "modules", "collectives"):
        assert shown["report"][part] == report[part], part
    assert shown["report"]["verdicts"][0]["rank"] == 1
    assert shown["traces"]["steps"][0]["ranks"][1]["rank"] == 1
    steps = shown["traces"]["steps"]
    waits = [each["wait_us"] for step in steps for each in step["collectives"]]
    # Rank 0 waits for rank 1, which sleeps for 10 ms. Other programs may delay rank 0 in a step.
    assert sum(wait["0"] for wait in waits) > 5000 * len(steps)
    assert sum(wait["0"] for wait in waits) > sum(wait["1"] for wait in waits)


def test_report_html_writes_the_page_in_another_process(
    trained: tuple[Path, RunDirectory, str],
) -> None:
    """The training process imports only the module that starts the other process."""
    folder, made, printed = trained

    assert f"page {folder / 'asked.html'}\n" in printed
    # This module only starts the command, and imports no reader.
    assert "imported ['torchlens_perf.results.child']\n" in printed
    assert contents_of(folder / "asked.html")["report"]["run"]["id"] == made.run_id


def test_report_html_without_a_recorded_run_raises() -> None:
    """The watch was never entered, or records nothing."""
    code = "import torchlens_perf as perf\nperf.watch().report_html()"
    environ = clean_environ({"PYTHONPATH": str(Path(__file__).parents[2])})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)

    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1]
        == "torchlens_perf.errors.RunStoreError: there is no run to show: enter the watch first;"
        " where it is switched off, the log says why"
    )


def copied(made: RunDirectory, folder: Path) -> RunDirectory:
    shutil.copytree(made.path, folder / "run")
    (folder / "run" / "report.html").unlink()
    return RunDirectory(folder / "run")


def test_writing_a_page_stops_at_limits_of_time_and_memory(
    trained: tuple[Path, RunDirectory, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing also stops when the caller asks to give up.

    The function returns the reason, or "" if the caller gave up, and no partial file is left.
    """
    made = copied(trained[1], tmp_path)
    page = made.report.with_suffix(".html")

    assert (
        page_file.write_page_in_child_process(made, lambda: False, timeout_s=0.0)
        == "it took longer than 0 s"
    )
    assert page_file.write_page_in_child_process(made, lambda: True) == ""
    assert not page.exists()
    with monkeypatch.context() as patched:
        patched.setattr(page_file, "MEMORY_BYTES", 40 << 20)
        assert page_file.write_page_in_child_process(made, lambda: False) != ""
    assert not page.exists()
    assert page_file.write_page_in_child_process(made, lambda: False) == ""
    assert contents_of(page)["report"]["steps"]["count"] == 60


def test_error_of_the_page_command_is_logged_as_the_reason(tmp_path: Path) -> None:
    made = RunDirectory(tmp_path / "run")
    made.create()

    assert page_file.write_page_in_child_process(made, lambda: False).startswith(
        f"{made.path} has no data yet"
    )


@pytest.mark.parametrize("wish", ["page", "quiet", "text", "off"])
def test_page_that_cannot_be_written_is_noted(run: RunDirectory, wish: str) -> None:
    """The report is delivered before. If no page is configured, no page is attempted."""
    rank = Rank(run, 0, 1, report=wish)
    rank.steps(20, data=1, forward=4, backward=6, host=1)
    rank.close()
    page = run.report.with_suffix(".html")
    page.mkdir()
    reported: list[bool] = []
    sidecar = Sidecar(run, HOST, None, lambda run, asked: reported.append(page.is_dir()))
    run_sidecar(sidecar, acquire_lock(run))
    (state,) = node_state.load_all(run)

    assert reported[-1]
    assert [note for note in state.notes if "html" in note] == (
        [f"report.html could not be written: {page} cannot be written: Is a directory"]
        if wish in ("page", "quiet")
        else []
    )


@pytest.mark.parametrize("writes", [True, False])
def test_page_is_kept_if_its_process_aborts_after_writing_it(
    writes: bool,
    trained: tuple[Path, RunDirectory, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library may abort the process at its exit."""
    made = copied(trained[1], tmp_path)
    page = made.report.with_suffix(".html")
    ordinary = page_file.children.build_command("report", str(made.path), "--html", str(page))
    aborts = (
        f"import os, subprocess\nif {writes}: subprocess.run({ordinary!r}, check=True)\nos.abort()"
    )
    monkeypatch.setattr(
        page_file.children, "build_command", lambda *arguments: [sys.executable, "-c", aborts]
    )

    why_not = page_file.write_page_in_child_process(made, lambda: False)
    assert (why_not == "") is writes
    assert page.exists() is writes
