"""Tests of device times on torch_openreg, PyTorch's reference backend, if it is installed.

Kernels of torch_openreg run on the host and are complete when the call returns.

The tests show that only public names of torch are needed. Tests with planted times use the device
of test_device.py instead.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import ROOT, run
from torchlens_perf.recorder.device_abilities import ABILITIES

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torch_openreg") is None,
        reason="torch_openreg, PyTorch's reference backend, is not installed",
    ),
    pytest.mark.skipif(
        shutil.which("gcc") is None, reason="waits cannot be counted: there is no gcc"
    ),
]
STEPS = 24
SOURCE = Path(__file__).with_name("openreg_waits.c")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The results of the programs in openreg.py."""
    folder = tmp_path_factory.mktemp("openreg")
    counter = folder / "waits.so"
    subprocess.run(
        ["gcc", "-O1", "-Wall", "-shared", "-fPIC", "-o", counter, SOURCE, "-ldl"], check=True
    )
    found = {}
    for what in ("abilities", "plain", "watched"):
        command = [sys.executable, "-m", "tests.device.openreg", what, str(folder), str(STEPS)]
        ended = run(command, ROOT, LD_PRELOAD=str(counter))
        assert ended.returncode == 0, ended.stderr
        found[what] = torch.load(folder / f"{what}.pt")
    return found


def test_doctor_finds_no_problem_with_the_reference_backend(ran: dict[str, dict[str, Any]]) -> None:
    assert ran["abilities"]["problems"] == {each.name: "" for each in ABILITIES}


def test_event_between_two_streams_orders_their_work(ran: dict[str, dict[str, Any]]) -> None:
    found = ran["abilities"]
    assert found["reached"]
    assert found["apart_ms"] >= 0


def test_every_step_has_its_device_times(ran: dict[str, dict[str, Any]]) -> None:
    """From the first complete step on, phases are in order and inside the step."""
    watched = ran["watched"]
    assert watched["errors"] == 0
    assert not [note for note in watched["metadata"]["notes"] if "device" in note]
    assert watched["metadata"]["device"]["clock"] == "openreg events"
    assert watched["metadata"]["device"]["unread"] == 0
    steps: dict[int, dict[str, tuple[int, int]]] = {}
    for kind, step, start_ns, duration_ns in watched["spans"]:
        steps.setdefault(step, {})[kind] = start_ns, duration_ns
    for step in range(2, STEPS):
        phases = [steps[step][name] for name in ("FORWARD", "BACKWARD", "OPTIMIZER")]
        starts = [start for start, _ in phases]
        assert starts == sorted(starts)
        assert all(duration >= 0 for _, duration in phases)
        assert sum(duration for _, duration in phases) <= steps[step]["STEP"][1]


def test_watch_does_not_change_losses_and_parameters(ran: dict[str, dict[str, Any]]) -> None:
    plain, watched = ran["plain"]["numbers"], ran["watched"]["numbers"]
    assert len(plain) == len(watched)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))


def test_watch_adds_no_wait_of_the_host_for_the_device(ran: dict[str, dict[str, Any]]) -> None:
    """The device counts each wait of the host."""
    assert ran["abilities"]["counted"] > 0
    assert ran["watched"]["waits"] == ran["plain"]["waits"]
