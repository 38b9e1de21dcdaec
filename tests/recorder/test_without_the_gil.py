"""Recording requires the GIL on a free-threaded Python, and survives a broken native recorder."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from torchlens_perf import watch
from torchlens_perf.commands import doctor
from torchlens_perf.recorder import recorder

FREE_THREADED = next(
    filter(None, (shutil.which(f"python3.{minor}t") for minor in (13, 14, 15))), None
)
PROGRAM = """
import sys
import torchlens_perf as perf
from torchlens_perf.commands import doctor
from torchlens_perf.recorder import recorder
with perf.watch() as w, perf.section("part"):
    pass
print(sys._is_gil_enabled(), recorder.NATIVE, w.run_dir, *doctor._check_native_recorder(), sep="|")
"""
BROKEN = """
import sys
from torchlens_perf.recorder import recorder
from torchlens_perf.commands import doctor
print(recorder.NATIVE, recorder.LOADING_PROBLEM, *doctor._check_native_recorder(), sep="|")
"""


def test_nothing_is_recorded_without_the_gil(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """One line has the reason, no file is created, and the doctor reports it too.

    This Python has the GIL, so the function that reports it is replaced.
    """
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with caplog.at_level(logging.WARNING, "torchlens_perf"), watch(dir=str(tmp_path / "runs")) as w:
        pass

    assert w.run_dir is None
    assert [
        each for each in caplog.messages if "without the GIL" in each and "is off" in each
    ] == caplog.messages
    assert len(caplog.messages) == 1
    assert list(tmp_path.iterdir()) == []
    (line,) = doctor._check_native_recorder()
    assert line.severity == doctor.BROKEN
    assert "PYTHON_GIL=1" in str(line)


def test_free_threaded_python_records_while_the_gil_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    assert recorder.find_recording_obstacle() is None


@pytest.mark.skipif(
    FREE_THREADED is None, reason="there is no free-threaded Python here (python3.13t or later)"
)
def test_package_does_not_switch_the_gil_on(tmp_path: Path) -> None:
    """A free-threaded Python imports the package and runs a watch and a section."""
    assert FREE_THREADED is not None
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    run = [FREE_THREADED, "-W", "error", "-c", PROGRAM]
    finished = subprocess.run(
        run, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    gil, native, run_dir, line = finished.stdout.strip().split("|")

    assert (gil, native, run_dir) == ("False", "False", "None")
    assert line.startswith("broken  recorder: nothing is recorded: Python runs without the GIL")
    assert finished.stderr.count("torchlens_perf is off: Python runs without the GIL") == 1
    assert len(finished.stderr.splitlines()) == 1


def test_damaged_native_recorder_is_replaced_by_the_python_recorder(tmp_path: Path) -> None:
    """The file exists and is damaged. The message differs from that for a missing file."""
    package = shutil.copytree(
        ROOT / "torchlens_perf",
        tmp_path / "torchlens_perf",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def said() -> tuple[str, str]:
        # -S leaves out installed packages, such as an editable installation of this one.
        run = [sys.executable, "-S", "-c", BROKEN]
        finished = subprocess.run(
            run, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return finished.stdout, finished.stderr

    without = said()
    (Path(package) / "_native.abi3.so").write_bytes(b"\x7fELF, and then something else")
    native, problem, line = said()[0].strip().split("|")

    assert native == "False"
    assert "the native recorder cannot be loaded" in problem
    assert problem in line
    assert problem in said()[1]
    assert without[0].startswith("False||limited recorder: the Python recorder")
    assert without[1] == ""
