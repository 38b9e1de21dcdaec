"""Tests of paths that are not UTF-8: run directory, script, working directory, and variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, clean_environ, wait_for_sidecar
from torchlens_perf.run import sidecar_status
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.identity import collect_job_attributes

ODD = os.fsdecode(b"n\xff\xfed")
SCRIPT = """
import torch
import torchlens_perf as perf
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with perf.watch(model, optimizer, config=perf.Config(_exit_timeout_s=60)):
    for _ in range(20):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    environ = clean_environ({"HOME": str(folder), "TMPDIR": str(folder), **environment})
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, timeout=200)


@pytest.mark.long
@pytest.mark.slow
def test_job_and_commands_accept_non_utf8_paths(tmp_path: Path) -> None:
    """The job raises no error, its report is printed, and each command reads the run."""
    folder = tmp_path / ODD
    folder.mkdir()
    script = folder / f"{ODD}.py"
    script.write_text(SCRIPT)
    done = run(
        [sys.executable, str(script)], folder, SLURM_JOB_NAME=ODD, TORCHLENS_PERF_REPORT="page"
    )
    assert done.returncode == 0, done.stderr
    assert b"20 steps" in done.stderr, done.stderr
    (path,) = (folder / "torchlens-perf").iterdir()
    made = RunDirectory(path)
    wait_for_sidecar(made)

    assert list(made.steps.glob("*.parquet"))
    assert made.report.with_suffix(".html").exists()
    page = folder / f"{ODD}.html"
    ours = [sys.executable, "-m", "torchlens_perf"]
    for command in (
        ["report"],
        ["report", str(path), "--json"],
        ["report", str(path), "--html", str(page)],
    ):
        shown = run([*ours, *command], folder)
        assert shown.returncode == 0, shown.stderr
    assert page.exists()
    replayed = run([*ours, "sidecar", str(path)], folder)
    assert replayed.returncode == 0, replayed.stderr
    assert b"replayed 20 steps" in replayed.stdout


def test_interpreter_in_a_non_utf8_folder_is_accepted(tmp_path: Path) -> None:
    """A child process of such an interpreter finds the package."""
    (tmp_path / ODD).symlink_to(sys.prefix)
    code = (
        "import subprocess; from torchlens_perf.run import children;"
        " children.check_sidecar_can_start();subprocess.run(children.build_command('doctor', '--help'),"
        " env=children.build_environment(), cwd='/', check=True)"
    )
    done = run([str(tmp_path / ODD / "bin" / "python"), "-c", code], ROOT, TMPDIR=str(tmp_path))

    assert done.returncode == 0, done.stderr
    assert b"usage: torchlens-perf doctor" in done.stdout


def test_status_is_written_for_a_run_with_a_non_utf8_path(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
    sidecar_status.write_status(descriptor, f"is making /{ODD}")
    os.close(descriptor)

    assert sidecar_status.read_status(str(file))[2].startswith("is making /n")


def test_ring_list_keeps_non_utf8_paths(tmp_path: Path) -> None:
    """The ring's path in the list equals the registered one."""
    made = RunDirectory(tmp_path / ODD)
    made.create()
    made.register_ring("node", made.rings / "a.ring")

    assert made.rings_in_run_directory("node") == [made.rings / "a.ring"]


def test_non_utf8_scheduler_variable_is_converted_to_exportable_text() -> None:
    attributes = collect_job_attributes({"SLURM_JOB_NAME": ODD, "SLURM_JOB_ID": "7"})

    assert attributes["slurm.job.name"] == "n\ufffd\ufffdd"
    assert attributes["slurm.job.id"] == "7"
