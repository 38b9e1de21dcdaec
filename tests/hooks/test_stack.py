"""Permission for the sidecar to read the stack of a rank, which the Yama kernel module may
require.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import torchlens_perf as perf
from tests.recorder.test_late_report import sidecar_of
from tests.support.processes import ROOT, wait_for_sidecar
from torchlens_perf.run import tracer
from torchlens_perf.run.directory import RunDirectory


def named_while_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, scope: str
) -> tuple[list[int], int]:
    """Return the pids that received permission in a short run, and the sidecar's pid."""
    named: list[int] = []
    real = tracer.allow_tracer
    monkeypatch.setattr(tracer, "YAMA", folder / "ptrace_scope")
    monkeypatch.setattr(tracer, "allow_tracer", lambda pid: named.append(pid) or real(pid))
    tracer.YAMA.write_text(scope)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with perf.watch(
        model, optimizer, dir=str(folder), config=perf.Config(_exit_timeout_s=0)
    ) as watch:
        sidecar = 0
        for step in range(200):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if step == 100:
                sidecar = sidecar_of(watch)
                subprocess.run([sys.executable, "-c", "import time; time.sleep(0.1)"], check=True)
    wait_for_sidecar(RunDirectory(watch.run_dir))
    return named, sidecar


def test_sidecar_may_read_stacks_until_the_watch_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ptrace_scope is 1. A kernel without Yama refuses the call, which then has no effect."""
    named, sidecar = named_while_training(tmp_path, monkeypatch, "1")

    assert named == [sidecar, 0]


@pytest.mark.parametrize("scope", ["0", "2", "3", ""])
def test_no_ptrace_permission_is_given_if_unnecessary_or_useless(
    scope: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ptrace_scope 0 needs no permission; with 2 and more a permission has no effect."""
    assert named_while_training(tmp_path, monkeypatch, scope)[0] == []


def test_permission_call_succeeds_only_on_a_kernel_with_yama() -> None:
    """Without Yama the kernel refuses the call, and the process continues."""
    program = (
        "import os; from torchlens_perf.run import tracer; print(tracer.allow_tracer(os.getppid()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout == f"{tracer.YAMA.exists()}\n"


def test_py_spy_is_installed_on_supported_processors() -> None:
    tomllib = pytest.importorskip("tomllib")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (found,) = [each for each in map(Requirement, declared) if each.name == "py-spy"]

    assert found.marker is not None
    assert [
        found.marker.evaluate({"platform_machine": machine}) for machine in ("x86_64", "aarch64")
    ] == [True, True]


def test_doctor_reports_if_py_spy_can_read_stacks() -> None:
    """py-spy reads the stack of this process."""
    program = "from torchlens_perf.commands.doctor import _check_stacks; print(*_check_stacks())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.startswith(
        (
            "ok      Python stacks: py-spy can",
            "limited Python stacks: none: not permitted",
        )
    )
